//! The one seam through which every kernel write goes: a child process, one per group and transaction.
//!
//! A kernel write can block for ever (a vfio unbind waits until the VM lets go). A blocked thread would keep a killed
//! agent's sockets accepting; a blocked child does not. So the agent starts its own binary under a hidden subcommand,
//! and speaks with it in lines of JSON over the child's standard input and output:
//!
//! ```text
//!   agent                                child
//!   Ask::Prepare(write)  ───────────▶    opens the file; nothing has happened yet
//!                        ◀───────────    Answer::Ready            (or Failed: the file cannot be opened)
//!   makes the journal entry durable
//!   Ask::Go              ───────────▶    writes
//!                        ◀───────────    Answer::Done             (or Failed: the kernel's errno)
//! ```
//! Functions are read through it as well ([`Reader`]), since some of their attributes are answered under the lock that a
//! hanging write holds.
//!
//! When the pipe closes, the child ends without another write. Past the deadline the child is left behind
//! ([`LeftBehind`]); it holds no descriptor but its pipe.

mod cause;
mod child;
mod module;
mod parent;
mod reader;
mod running;

use std::{io, path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

pub use cause::{Cause, Circumstances, Lockdown, Refused};
pub use child::{ServeError, serve, serve_looks};
pub use parent::{LookError, Writer};
pub use reader::Reader;
pub use running::LeftBehind;

use crate::{
    pci::{Address, Function},
    write::Write,
};

/// How the child is started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WriterCommand {
    /// The binary: in production the agent's own (`/proc/self/exe`).
    pub program: PathBuf,
    /// Its arguments before the root: the hidden subcommand.
    pub arguments: Vec<String>,
    /// How long one step (open, or write) may take. A read may take [`READ_DEADLINE`], or this where it is shorter.
    pub deadline: Duration,
}

/// How long reading one function may take. It is microseconds, but for a device that is being bound or unbound.
pub const READ_DEADLINE: Duration = Duration::from_secs(3);

/// What the agent tells its child.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Ask {
    /// Get ready for this write, and touch nothing yet.
    Prepare(Write),
    /// Do it.
    Go,
    /// Read a function.
    Look(Address),
}

/// What the child answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Answer {
    /// The file is open.
    Ready,
    /// The kernel took it.
    Done,
    /// The kernel's error number.
    Failed(i32),
    /// A write that the child refuses: it names something that no driver is called.
    Refused(String),
    /// The function as it is; nothing where there is none.
    Function(Option<Box<Function>>),
    /// Why the function cannot be read.
    Unreadable(String),
}

/// A kernel write that did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The kernel refused it.
    #[error("the kernel refused to {write} ({path}): {errno}{cause}", path = path.display(), errno = errno.desc())]
    Kernel {
        /// The write.
        write: Write,
        /// The file it goes to.
        path: PathBuf,
        /// The kernel's answer.
        errno: nix::errno::Errno,
        /// What that means here.
        cause: Cause,
    },
    /// It did not come back in time, and its child was left behind. The group is wedged until the child ends.
    #[error("the kernel did not answer within {seconds} s to: {write} ({path}); {meaning}", path = path.display(), seconds = after.as_secs_f32(), meaning = late_meaning(write))]
    Late {
        /// The write.
        write: Write,
        /// The file it goes to.
        path: PathBuf,
        /// The deadline.
        after: Duration,
        /// The child that still waits for the kernel.
        child: LeftBehind,
    },
    /// The child ended before it answered: whether the write was made is not known. Look again.
    #[error("the writer (pid {pid}) ended before it answered to: {write}; the group is looked at anew")]
    ChildEnded {
        /// The write.
        write: Write,
        /// The child's process id.
        pid: u32,
    },
    /// The child refused the write as senseless.
    #[error("cannot {write}: {reason}")]
    Refused {
        /// The write.
        write: Write,
        /// Why.
        reason: String,
    },
    /// The child could not be started.
    #[error("cannot start the writer {program}", program = program.display())]
    Start {
        /// The binary.
        program: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The caller could not make its journal entry durable, so nothing was written.
    #[error("nothing was written: {write} could not be recorded first")]
    NotRecorded {
        /// The write.
        write: Write,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl WriteError {
    /// Whether the same write may succeed later, with nothing changed by people.
    #[must_use]
    pub fn retryable(&self) -> bool {
        match self {
            Self::Kernel { cause, .. } => cause.retryable(),
            Self::Late { .. } | Self::ChildEnded { .. } | Self::Start { .. } | Self::NotRecorded { .. } => {
                true
            }
            Self::Refused { .. } => false,
        }
    }

    /// A stable name for metrics and conditions.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Kernel { .. } => "KernelRefused",
            Self::Late { .. } => "Wedged",
            Self::ChildEnded { .. } => "WriterEnded",
            Self::Refused { .. } => "WriteRefused",
            Self::Start { .. } => "WriterNotStarted",
            Self::NotRecorded { .. } => "NotRecorded",
        }
    }
}

/// What a late write means for people.
fn late_meaning(write: &Write) -> &'static str {
    match write {
        Write::Unbind { driver, .. } if crate::driver::is_vfio(driver) => {
            "a VM still has the device open, and the unbind has already asked it to give the device up; \
             the group is left alone until that write ends"
        }
        _ => "the group is left alone until that write ends (the kernel log may say what it waits for)",
    }
}
