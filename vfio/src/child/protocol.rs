//! What a child is asked and answers: lines of JSON over its standard input and output.

use serde::{Deserialize, Serialize};

use crate::{
    holders::{Request, Seen},
    pci::{Address, Function, life},
    write::Write,
};

/// What the agent tells its child.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Ask {
    /// Get ready for this write, and touch nothing yet.
    Prepare(Write),
    /// Do it.
    Go,
    /// Read a function.
    Look(Address),
    /// Look whether a function answers.
    Life(Address),
    /// Look for holders. Many answers: all that is seen, up to its end.
    Holders(Request),
}

/// What the child answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Answer {
    /// The file is open.
    Ready,
    /// The kernel took it.
    Done,
    /// The kernel's error number.
    Failed(i32),
    /// A write that the child refuses: it names something that no driver is called.
    Refused(String),
    /// The tree is a plain one, and this build has no simulated kernel to take a write.
    NoSimulation,
    /// The function as it is; nothing where there is none.
    Function(Option<Box<Function>>),
    /// Why the function cannot be read.
    Unreadable(String),
    /// How the function answered.
    Life(life::Answer),
    /// What is seen of the processes.
    Seen(Seen),
}
