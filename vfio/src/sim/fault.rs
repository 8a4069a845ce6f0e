//! Faults: what a simulated kernel does wrong, and when.

use serde::{Deserialize, Serialize};

use crate::{pci::Address, write::Write};

/// When a fault strikes, seen from the write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Moment {
    /// The kernel has done nothing yet.
    Before,
    /// The kernel has done it, and the writer does not know yet.
    After,
}

/// What happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Effect {
    /// The write answers this error number.
    Errno(i32),
    /// The write blocks until the fault is taken back.
    Hang,
    /// The agent is killed (SIGKILL), its writer is not.
    KillAgent,
    /// The writer is killed, the agent is not.
    KillChild,
    /// Both are killed.
    KillBoth,
}

/// One fault, and the writes that it strikes: those that fit all that is given.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Only the write with this number, counted from 1 over the tree's whole life.
    pub at: Option<usize>,
    /// Only writes to this function.
    pub address: Option<Address>,
    /// When.
    pub moment: Moment,
    /// What.
    pub effect: Effect,
}

impl Fault {
    /// A fault at the write with number `at`, counted from 1.
    #[must_use]
    pub fn at(at: usize, moment: Moment, effect: Effect) -> Self {
        Self { at: Some(at), address: None, moment, effect }
    }

    /// A fault at every write to `address`.
    #[must_use]
    pub fn on(address: Address, moment: Moment, effect: Effect) -> Self {
        Self { at: None, address: Some(address), moment, effect }
    }

    pub(super) fn strikes(&self, number: usize, write: &Write, moment: Moment) -> bool {
        self.moment == moment
            && self.at.is_none_or(|at| at == number)
            && self.address.is_none_or(|address| Some(address) == write.function())
    }
}
