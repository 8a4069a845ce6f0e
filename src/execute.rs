//! Carries out the plan of one group: every move, each read back, or all undone.

use std::fmt;

use vfio::{
    driver::{Binding, Next, Target, Wanted, next},
    host::Host,
    pci::{Address, Function},
    write::Write,
    writer::{LeftBehind, LookError, WriteError, Writer, WriterCommand},
};

use crate::{
    journal::WriterId,
    plan::{Move, Prior},
};

/// The most writes that a move can need: override, unbind, probe, override.
const MOST_WRITES: usize = 4;

/// What a transaction meets: the kernel, in production.
pub trait Port {
    /// A function as it is now.
    ///
    /// # Errors
    /// When it is gone or cannot be read.
    fn look(&mut self, address: Address) -> Result<Function, MoveError>;

    /// Makes one write to a function that was `prior` when the transaction began.
    ///
    /// # Errors
    /// See [`WriteError`].
    fn write(&mut self, write: &Write, prior: &Prior) -> Result<(), WriteError>;
}

/// Remembers writes before they are made.
pub trait Recorder {
    /// Makes it durable that `writer` is about to make `write`.
    ///
    /// # Errors
    /// When that could not be made durable; then the write is not made.
    fn announce(
        &mut self,
        group: u32,
        write: &Write,
        prior: &Prior,
        writer: WriterId,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;
}

/// The kernel, through the one seam.
pub struct KernelPort<R> {
    group: u32,
    writer: Writer,
    recorder: R,
}

impl<R: Recorder> KernelPort<R> {
    /// A port for one transaction on `group`.
    #[must_use]
    pub fn new(host: &Host, command: &WriterCommand, group: u32, recorder: R) -> Self {
        Self { group, writer: Writer::new(command, host), recorder }
    }
}

impl<R: Recorder> Port for KernelPort<R> {
    fn look(&mut self, address: Address) -> Result<Function, MoveError> {
        match self.writer.look(address) {
            Ok(Some(function)) => Ok(function),
            Ok(None) => Err(MoveError::Gone { address }),
            Err(error) => Err(MoveError::Unreadable(error)),
        }
    }

    fn write(&mut self, write: &Write, prior: &Prior) -> Result<(), WriteError> {
        let Self { group, writer, recorder, .. } = self;
        let started = std::time::Instant::now();
        let result = writer.write(write, |pid| recorder.announce(*group, write, prior, WriterId::of(pid)));
        match &result {
            Ok(()) => tracing::info!(group = *group, elapsed = ?started.elapsed(), "{write}"),
            Err(error) => tracing::warn!(group = *group, code = error.code(), "{error}"),
        }
        result
    }
}

/// Why one function did not get where it should.
#[derive(Debug, thiserror::Error)]
pub enum MoveError {
    /// A kernel write failed.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The function is not there any more.
    #[error("{address} is gone: it was unplugged, or fell off the bus")]
    Gone {
        /// The function.
        address: Address,
    },
    /// The function could not be read back.
    #[error("it cannot be read back: {0}")]
    Unreadable(#[from] LookError),
    /// All writes succeeded, and the function is not where it should be.
    #[error(
        "{address} was probed and is {seen}, not {wanted}: the kernel log says why the driver did not take it"
    )]
    NotTaken {
        /// The function.
        address: Address,
        /// What was wanted.
        wanted: String,
        /// What reading back showed.
        seen: String,
    },
}

impl MoveError {
    /// A stable name for metrics and conditions.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Write(error) => error.code(),
            Self::Gone { .. } => "FunctionGone",
            Self::Unreadable(_) => "Unreadable",
            Self::NotTaken { .. } => "NotTaken",
        }
    }

    /// Whether trying again may help, with nothing changed by people.
    #[must_use]
    pub fn retryable(&self) -> bool {
        match self {
            Self::Write(error) => error.retryable(),
            Self::Gone { .. } | Self::Unreadable(_) | Self::NotTaken { .. } => true,
        }
    }
}

/// What came of a group's transaction.
#[derive(Debug)]
pub enum Outcome {
    /// Every function is where it should be, read back.
    Done,
    /// A move failed, and every function is as it was.
    RolledBack {
        /// What failed.
        error: MoveError,
    },
    /// A move failed, and so did a part of the way back.
    Broken {
        /// What failed first.
        error: MoveError,
        /// What failed on the way back.
        rollback: Vec<MoveError>,
    },
    /// A write did not come back: the group is left alone until its child ends.
    Wedged {
        /// What is waited for, in words.
        message: String,
        /// The child.
        child: LeftBehind,
    },
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done => f.write_str("done"),
            Self::RolledBack { error } => {
                write!(f, "{error}; every function of the group is as it was before")
            }
            Self::Broken { error, rollback } => {
                let texts: Vec<_> = rollback.iter().map(ToString::to_string).collect();
                write!(f, "{error}; and the way back failed: {}", texts.join("; "))
            }
            Self::Wedged { message, .. } => f.write_str(message),
        }
    }
}

/// Carries out `moves` in order; on a failure, undoes what was done in reverse order.
pub fn carry_out(moves: &[Move], port: &mut impl Port) -> Outcome {
    for (index, step) in moves.iter().enumerate() {
        let Err(error) = go(step.address, &step.to, &Prior::from(&step.from), port) else { continue };
        let begun = moves.iter().take(index + 1).rev();
        return match left_behind(error) {
            Ok((message, child)) => Outcome::Wedged { message, child },
            Err(error) => undo(error, begun, port),
        };
    }
    Outcome::Done
}

fn undo<'a>(error: MoveError, begun: impl Iterator<Item = &'a Move>, port: &mut impl Port) -> Outcome {
    let mut failed = Vec::new();
    for step in begun {
        let Err(error) = go(step.address, &step.inverse, &Prior::from(&step.from), port) else { continue };
        match left_behind(error) {
            Ok((message, child)) => return Outcome::Wedged { message, child },
            Err(error) => failed.push(error),
        }
    }
    if failed.is_empty() {
        Outcome::RolledBack { error }
    } else {
        Outcome::Broken { error, rollback: failed }
    }
}

/// The child that still waits for the kernel, where that is what the error is about.
fn left_behind(error: MoveError) -> Result<(String, LeftBehind), MoveError> {
    let message = error.to_string();
    match error {
        MoveError::Write(WriteError::Late { child, .. })
        | MoveError::Unreadable(LookError::Late { child, .. }) => Ok((message, child)),
        other => Err(other),
    }
}

/// Brings one function to `target`: look, write, look again, until it is there.
fn go(address: Address, target: &Target, prior: &Prior, port: &mut impl Port) -> Result<(), MoveError> {
    let mut probed = false;
    for _ in 0..=MOST_WRITES {
        let function = port.look(address)?;
        match next(&function, target, probed) {
            Next::Done => return Ok(()),
            Next::Stuck => return Err(not_taken(&function, target)),
            Next::Write(write) => {
                probed |= matches!(write, Write::Probe { .. });
                port.write(&write, prior)?;
            }
        }
    }
    // Somebody else moves it as well.
    Err(not_taken(&port.look(address)?, target))
}

fn not_taken(function: &Function, target: &Target) -> MoveError {
    let wanted = match &target.driver {
        Wanted::Named(name) => format!("on {name}"),
        Wanted::AnyHost => "on a host driver".to_owned(),
        Wanted::NoProbe => "off vfio".to_owned(),
    };
    let seen = match Binding::from(function).driver {
        Some(driver) => format!("on {driver}"),
        None => "on no driver".to_owned(),
    };
    MoveError::NotTaken { address: function.address, wanted, seen }
}
