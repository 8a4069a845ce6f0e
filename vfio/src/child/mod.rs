//! The child processes of an agent: one kind makes the kernel writes, the other reads what may block.
//!
//! A kernel write can block for ever (a vfio unbind waits until the VM lets go), and so can a read that waits for the lock
//! that such a write holds. A blocked thread would keep a killed agent's sockets accepting; a blocked child does not. So the
//! agent starts its own binary under a hidden subcommand, and speaks with it in lines of JSON over the child's standard input
//! and output:
//!
//! ```text
//!   agent                                child
//!   Ask::Prepare(write)  ───────────▶    opens the file; nothing has happened yet
//!                        ◀───────────    Answer::Ready            (or Failed: the file cannot be opened)
//!   makes the journal entry durable
//!   Ask::Go              ───────────▶    writes
//!                        ◀───────────    Answer::Done             (or Failed: the kernel's errno)
//!
//!   Ask::Look(address)   ───────────▶    reads a function
//!                        ◀───────────    Answer::Function         (or Unreadable: why)
//!   Ask::Life(address)   ───────────▶    looks whether it answers
//!                        ◀───────────    Answer::Life
//!   Ask::Holders(nodes)  ───────────▶    goes through all processes
//!                        ◀───────────    Answer::Seen, many times, up to Seen::End
//! ```
//! [`Writer`] is the one seam through which every kernel write goes, one child per group and transaction; [`Reader`] looks at
//! the node. Both are the parent's side; [`serve`] and [`serve_looks`] are the child's.
//!
//! When the pipe closes, the child ends without another write. Past the deadline the child is left behind
//! ([`LeftBehind`]); it holds no descriptor but its pipe.

mod cause;
mod error;
mod left_behind;
mod lives;
mod module;
mod protocol;
mod reader;
mod running;
mod scan;
mod serve;
mod writer;

use std::{path::PathBuf, time::Duration};

pub use cause::{Cause, Circumstances, Lockdown, Refused};
pub use error::{LookError, WriteError};
pub use left_behind::LeftBehind;
pub use reader::Reader;
pub use serve::{ServeError, serve, serve_looks};
pub use writer::Writer;

/// How a child is started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChildCommand {
    /// What it is called in `ps`: its argument before all others. What it does stands in the next one.
    pub name: String,
    /// The binary: in production the agent's own (`/proc/self/exe`).
    pub program: PathBuf,
    /// Its arguments before the root: the hidden subcommand.
    pub arguments: Vec<String>,
    /// How long one step (open, or write) may take. A read may take [`READ_DEADLINE`], or this where it is shorter.
    pub deadline: Duration,
}

/// How long reading one function, or the next step of a walk through all processes, may take. It is microseconds, but for a
/// device that is being bound or unbound, and a process that hangs in the kernel.
pub const READ_DEADLINE: Duration = Duration::from_secs(3);
