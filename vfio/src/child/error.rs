//! Why a write was not made, or a function not read, through a child.

use std::{io, path::PathBuf, time::Duration};

use reason::{Code, Coded};

use super::{Cause, LeftBehind};
use crate::{
    driver::is_vfio,
    pci::{Address, FunctionError},
    write::Write,
};

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
    /// The host is a plain tree, and this build has no simulated kernel that would answer. Nothing was written.
    #[error(
        "cannot {write}: {root}/sys is no sysfs but a plain directory, and this build of vfiod has no simulated kernel to answer \
         a write there (one made with `cargo build --features simulation` has)",
        root = root.display()
    )]
    NoSimulation {
        /// The write.
        write: Write,
        /// The host's root.
        root: PathBuf,
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

impl Coded for WriteError {
    fn code(&self) -> Code {
        match self {
            Self::Kernel { .. } => Code::KernelRefused,
            Self::Late { .. } => Code::Wedged,
            Self::ChildEnded { .. } => Code::WriterEnded,
            Self::Refused { .. } => Code::WriteRefused,
            Self::NoSimulation { .. } => Code::NoSimulation,
            Self::Start { .. } => Code::WriterNotStarted,
            Self::NotRecorded { .. } => Code::NotRecorded,
        }
    }

    fn retryable(&self) -> bool {
        match self {
            Self::Kernel { cause, .. } => cause.retryable(),
            Self::Late { .. } | Self::ChildEnded { .. } | Self::Start { .. } | Self::NotRecorded { .. } => {
                true
            }
            Self::Refused { .. } | Self::NoSimulation { .. } => false,
        }
    }
}

/// A function that could not be read through the child.
#[derive(Debug, thiserror::Error)]
pub enum LookError {
    /// The child said why.
    #[error(transparent)]
    Function(#[from] FunctionError),
    /// The kernel did not answer in time, and the child was left behind.
    #[error(
        "PCI function {address}: the kernel does not answer; it is being bound or unbound, and that hangs (a VM may have it \
         open, or its driver waits; the kernel log may say for what)"
    )]
    Late {
        /// The function.
        address: Address,
        /// The child that still waits.
        child: LeftBehind,
    },
}

impl Coded for LookError {
    fn code(&self) -> Code {
        match self {
            Self::Function(_) => Code::Unreadable,
            Self::Late { .. } => Code::Busy,
        }
    }

    /// A function that cannot be read now may be there again at the next look; one whose lock is held may be let go.
    fn retryable(&self) -> bool {
        match self {
            Self::Function(_) | Self::Late { .. } => true,
        }
    }
}

/// What a late write means for people.
fn late_meaning(write: &Write) -> &'static str {
    match write {
        Write::Unbind { driver, .. } if is_vfio(driver) => {
            "a VM still has the device open, and the unbind has already asked it to give the device up; \
             the group is left alone until that write ends"
        }
        _ => "the group is left alone until that write ends (the kernel log may say what it waits for)",
    }
}
