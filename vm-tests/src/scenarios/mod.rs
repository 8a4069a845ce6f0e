//! What is checked on the real kernel: one machine and a list of steps each.

mod agent;
mod cards;
mod lab;
mod manual;
mod modules;

use crate::guest::failure::Step;
use crate::guest::machine::Machine;
use crate::node::Node;

/// One scenario.
#[derive(Debug, Clone, Copy)]
pub struct Scenario {
    /// Its name, on the command line and as the test's name (with underscores).
    pub name: &'static str,
    /// What it shows, in one line.
    pub about: &'static str,
    /// The machine.
    pub node: Node,
    /// Seconds until the machine is ended; far more than it needs on an idle host.
    pub seconds: u64,
    /// The steps, run in the guest.
    pub run: fn(&Machine) -> Step,
}

/// Every scenario.
pub const ALL: &[Scenario] = &[
    lab::VMM_TAKES_A_GROUP,
    lab::HOST_DRIVER_SPOILS_A_GROUP,
    lab::KERNEL_ASKS_THE_HOLDER,
    manual::ONE_GPU,
    manual::FOUR_FUNCTION_CARD,
    manual::FOREIGN_NIC,
    manual::HELD_GROUP,
    manual::NO_IOMMU,
    modules::MODULES_LOADED,
    agent::RIGHT_NODE,
    agent::AGENT_KILLED,
    agent::BLOCKED_UNBIND,
    agent::FULL_WALK,
];

/// The scenario of a name.
#[must_use]
pub fn find(name: &str) -> Option<&'static Scenario> {
    ALL.iter().find(|scenario| scenario.name == name)
}
