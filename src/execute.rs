//! Carries out the plan of one group: every move, each read back, or all undone.

use std::fmt;

use vfio::{
    driver::{Binding, Next, Target, Wanted, is_vfio, next},
    host::Host,
    modules::{Load, ModuleName, Modules, driver_directory},
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

    /// Whether a module is there by now.
    fn present(&mut self, module: &ModuleName) -> bool;

    /// How the driver `name` is spelt, which may have been loaded since it was chosen: as its directory is.
    fn spelling(&mut self, name: &str) -> String;

    /// Makes one write: to a function that was `prior` when the transaction began, or to none.
    ///
    /// # Errors
    /// See [`WriteError`].
    fn write(&mut self, write: &Write, prior: Option<&Prior>) -> Result<(), WriteError>;
}

/// Remembers writes before they are made.
pub trait Recorder {
    /// Makes it durable that `writer` is about to make `write`, to a function that was `prior`, or to none.
    ///
    /// # Errors
    /// When that could not be made durable; then the write is not made.
    fn announce(
        &mut self,
        group: u32,
        write: &Write,
        prior: Option<&Prior>,
        writer: WriterId,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;
}

/// The kernel, through the one seam.
pub struct KernelPort<R> {
    group: u32,
    host: Host,
    writer: Writer,
    recorder: R,
}

impl<R: Recorder> KernelPort<R> {
    /// A port for one transaction on `group`.
    #[must_use]
    pub fn new(host: &Host, command: &WriterCommand, group: u32, recorder: R) -> Self {
        Self { group, host: host.clone(), writer: Writer::new(command, host), recorder }
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

    fn present(&mut self, module: &ModuleName) -> bool {
        Modules::of(&self.host).present(module)
    }

    fn spelling(&mut self, name: &str) -> String {
        if self.host.is_dir(&self.host.sys("bus/pci/drivers").join(name)) {
            return name.to_owned();
        }
        let module = ModuleName::new(name).ok();
        module.and_then(|module| driver_directory(&self.host, &module)).unwrap_or_else(|| name.to_owned())
    }

    fn write(&mut self, write: &Write, prior: Option<&Prior>) -> Result<(), WriteError> {
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

/// Loads the modules that a group's moves need, in order, but those that are there by now. Says what went wrong, if
/// anything did; nothing was moved then. A module that is only wished for may be refused.
///
/// Groups that need the same modules call this one after another.
pub fn load_modules(loads: &[Load], port: &mut impl Port) -> Option<Outcome> {
    for load in loads {
        if port.present(&load.module) {
            continue;
        }
        match port.write(&Write::LoadModule(Box::new(load.clone())), None) {
            Ok(()) => {}
            Err(WriteError::Kernel { .. } | WriteError::Refused { .. }) if !load.required => {}
            Err(error) => {
                return Some(match left_behind(error.into()) {
                    Ok((message, child)) => Outcome::Wedged { message, child },
                    Err(error) => Outcome::RolledBack { error },
                });
            }
        }
    }
    None
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
    let target = &as_spelt(target, port);
    let mut probed = false;
    for _ in 0..=MOST_WRITES {
        let function = port.look(address)?;
        match next(&function, target, probed) {
            Next::Done => return Ok(()),
            Next::Stuck => return Err(not_taken(&function, target)),
            Next::Write(write) => {
                probed |= matches!(write, Write::Probe { .. });
                port.write(&write, Some(prior))?;
            }
        }
    }
    // Somebody else moves it as well.
    Err(not_taken(&port.look(address)?, target))
}

/// The target, with its vfio driver spelt as its directory is: a driver that was not loaded when the plan was made may be
/// called otherwise than expected, and `driver_override` has to be exact.
fn as_spelt(target: &Target, port: &mut impl Port) -> Target {
    match &target.driver {
        Wanted::Named(name) if is_vfio(name) => {
            let spelt = port.spelling(name);
            let its_own = target.driver_override.as_ref() == Some(name);
            let driver_override = if its_own { Some(spelt.clone()) } else { target.driver_override.clone() };
            Target { driver: Wanted::Named(spelt), driver_override }
        }
        _ => target.clone(),
    }
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
