//! Carries out the plan of one unit: every step, each read back, or all undone.

use std::{collections::BTreeSet, fmt};

use decide::{
    plan::UnitPlan,
    prior::Remembered,
    step::{NotReached, Seen, Step, Subject},
    unit::UnitId,
    usage::User,
};
use reason::{Code, Coded, chain};
use vfio::{
    child::{ChildCommand, LeftBehind, LookError, Reader, WriteError, Writer},
    driver::Next,
    host::Host,
    modules::{ModuleName, Modules, driver_directory},
    pci::Address,
    process::ProcessId,
    write::Write,
};

/// A write that a step is about to make, and what has to be so before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// The write.
    pub write: Write,
    /// What has to be remembered first.
    pub remembers: Option<(Address, Remembered)>,
    /// Nobody may use the unit at that moment.
    pub needs_idle: bool,
}

/// What a transaction meets: the kernel, in production.
pub trait Port {
    /// A step's subject as it is now.
    ///
    /// # Errors
    /// When it is gone or cannot be read.
    fn look(&mut self, subject: &Subject) -> Result<Seen, StepError>;

    /// Makes one write, recorded first, and not made where its unit has to be idle and is not.
    ///
    /// # Errors
    /// When it was not made, or is not known to have been.
    fn write(&mut self, attempt: &Attempt) -> Result<(), StepError>;
}

/// Remembers writes before they are made.
pub trait Recorder {
    /// Makes it durable that `writer` is about to make this attempt on a function of `unit`.
    ///
    /// # Errors
    /// When that could not be made durable; then the write is not made.
    fn announce(
        &mut self,
        unit: &UnitId,
        attempt: &Attempt,
        writer: ProcessId,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;
}

/// How the two kinds of children are started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Commands {
    /// Those that make kernel writes.
    pub writer: ChildCommand,
    /// Those that read what may block.
    pub reader: ChildCommand,
}

/// The kernel, through the one seam.
pub struct KernelPort<R> {
    unit: UnitId,
    nodes: BTreeSet<String>,
    host: Host,
    writer: Writer,
    reader: Reader,
    recorder: R,
}

impl<R: Recorder> KernelPort<R> {
    /// A port for one transaction on the unit of `plan`.
    #[must_use]
    pub fn new(host: &Host, commands: &Commands, plan: &UnitPlan, recorder: R) -> Self {
        Self {
            unit: plan.unit.clone(),
            nodes: plan.nodes.clone(),
            host: host.clone(),
            writer: Writer::new(&commands.writer, host),
            reader: Reader::new(&commands.reader, host),
            recorder,
        }
    }
}

/// How a driver is spelt that may have been loaded since it was chosen: as its directory is.
#[must_use]
pub fn spelling(host: &Host, name: &str) -> String {
    if host.is_dir(&host.sys("bus/pci/drivers").join(name)) {
        return name.to_owned();
    }
    let module = ModuleName::new(name).ok();
    module.and_then(|module| driver_directory(host, &module)).unwrap_or_else(|| name.to_owned())
}

impl<R: Recorder> Port for KernelPort<R> {
    fn look(&mut self, subject: &Subject) -> Result<Seen, StepError> {
        match subject {
            Subject::Module(module) => Ok(Seen::Module(Modules::of(&self.host).present(module))),
            Subject::Function { address, driver } => match self.writer.look(*address) {
                Ok(Some(function)) => Ok(Seen::Function {
                    function: Box::new(function),
                    driver: driver.as_deref().map(|name| spelling(&self.host, name)),
                }),
                Ok(None) => Err(StepError::Gone { address: *address }),
                Err(error) => Err(StepError::Unreadable(error)),
            },
        }
    }

    fn write(&mut self, attempt: &Attempt) -> Result<(), StepError> {
        let Self { unit, nodes, host, writer, reader, recorder } = self;
        let started = std::time::Instant::now();
        let write = &attempt.write;
        let mut users = BTreeSet::new();
        let result = writer.write(write, |pid| -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
            recorder.announce(unit, attempt, ProcessId::of(pid))?;
            if attempt.needs_idle {
                // Minutes may have gone by since the plan was made, and a VM may have started: this look is the last
                // thing before the write.
                let there = nodes
                    .iter()
                    .filter(|node| host.exists(&host.root().join(node.trim_start_matches('/'))))
                    .cloned()
                    .collect();
                users = User::of_nodes(&reader.holders(nodes.clone()), &there);
            }
            if users.is_empty() { Ok(()) } else { Err("somebody uses it".into()) }
        });
        if !users.is_empty() {
            tracing::warn!(%unit, code = %Code::InUse, "not made, since the unit is in use by now: {write}");
            return Err(StepError::InUse { write: write.clone(), users });
        }
        match &result {
            Ok(()) => tracing::info!(%unit, elapsed = ?started.elapsed(), "{write}"),
            Err(error) => tracing::warn!(%unit, code = %error.code(), "{}", chain(error)),
        }
        Ok(result?)
    }
}

/// Why a step did not get where it should.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// A kernel write failed.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The function is not there any more.
    #[error("{address} is gone: it was unplugged, or fell off the bus")]
    Gone {
        /// The function.
        address: Address,
    },
    /// It could not be read back.
    #[error("it cannot be read back")]
    Unreadable(#[from] LookError),
    /// All writes succeeded, and it is not where it should be.
    #[error(
        "{what} was probed and is {seen}, not {wanted}: the kernel log says why the driver did not take it",
        seen = not.seen, wanted = not.wanted
    )]
    NotTaken {
        /// The function, or what else it is.
        what: String,
        /// What was wanted, and what reading back showed.
        not: NotReached,
    },
    /// Somebody came to use the unit after the plan was made.
    #[error("did not {write}: in use by now: {}", texts(users))]
    InUse {
        /// The write that was not made.
        write: Write,
        /// By whom.
        users: BTreeSet<User>,
    },
}

fn texts(users: &BTreeSet<User>) -> String {
    users.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

impl Coded for StepError {
    fn code(&self) -> Code {
        match self {
            Self::Write(error) => error.code(),
            Self::Gone { .. } => Code::FunctionGone,
            Self::Unreadable(error) => error.code(),
            Self::NotTaken { .. } => Code::NotTaken,
            Self::InUse { .. } => Code::InUse,
        }
    }

    fn retryable(&self) -> bool {
        match self {
            Self::Write(error) => error.retryable(),
            Self::Gone { .. } | Self::Unreadable(_) | Self::NotTaken { .. } | Self::InUse { .. } => true,
        }
    }
}

impl StepError {
    /// Whether the kernel said no, and nothing else is wrong: what is only wished for may be done without.
    fn refused(&self) -> bool {
        matches!(
            self,
            Self::Write(WriteError::Kernel { .. } | WriteError::Refused { .. }) | Self::NotTaken { .. }
        )
    }
}

/// What came of a unit's transaction.
#[derive(Debug)]
pub enum Outcome {
    /// Everything is where it should be, read back.
    Done,
    /// A step failed, and everything is as it was.
    RolledBack {
        /// What failed.
        error: StepError,
    },
    /// A step failed, and so did a part of the way back.
    Broken {
        /// What failed first.
        error: StepError,
        /// What failed on the way back.
        rollback: Vec<StepError>,
    },
    /// A write did not come back: the unit is left alone until its child ends.
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
                write!(f, "{}; every function of the group is as it was before", chain(error))
            }
            Self::Broken { error, rollback } => {
                let texts: Vec<_> = rollback.iter().map(|error| chain(error)).collect();
                write!(f, "{}; and the way back failed: {}", chain(error), texts.join("; "))
            }
            Self::Wedged { message, .. } => f.write_str(message),
        }
    }
}

/// Carries out `steps` in order; on a failure, undoes what was done in reverse order.
pub fn carry_out(steps: &[Step], port: &mut impl Port) -> Outcome {
    for (index, step) in steps.iter().enumerate() {
        let error = match go(step, step, port) {
            Ok(()) => continue,
            Err(error) if step.optional() && error.refused() => continue,
            Err(error) => error,
        };
        let begun = steps.iter().take(index + 1).rev();
        return match left_behind(error) {
            Ok((message, child)) => Outcome::Wedged { message, child },
            Err(error) => undo(error, begun, port),
        };
    }
    Outcome::Done
}

fn undo<'a>(error: StepError, begun: impl Iterator<Item = &'a Step>, port: &mut impl Port) -> Outcome {
    let mut failed = Vec::new();
    for step in begun {
        let Some(inverse) = step.inverse() else { continue };
        let Err(error) = go(&inverse, step, port) else { continue };
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
fn left_behind(error: StepError) -> Result<(String, LeftBehind), StepError> {
    let message = chain(&error);
    match error {
        StepError::Write(WriteError::Late { child, .. })
        | StepError::Unreadable(LookError::Late { child, .. }) => Ok((message, child)),
        other => Err(other),
    }
}

/// Takes one step: look, write, look again, until it is there. What has to be remembered is what `first` says, of which the
/// step is a part or the inverse.
fn go(step: &Step, first: &Step, port: &mut impl Port) -> Result<(), StepError> {
    let subject = step.subject();
    let mut made = Vec::new();
    loop {
        let seen = port.look(&subject)?;
        match step.next(&seen, &made) {
            Next::Done => return Ok(()),
            Next::Write(write) if made.len() < step.most_writes() => {
                let attempt =
                    Attempt { remembers: first.remembers(), needs_idle: step.needs_idle(&write), write };
                port.write(&attempt)?;
                made.push(attempt.write);
            }
            // Stuck, or somebody else moves it as well.
            Next::Stuck | Next::Write(_) => {
                let what = step.touches().map_or_else(|| "it".to_owned(), |address| address.to_string());
                return Err(StepError::NotTaken { what, not: step.not_reached(&seen) });
            }
        }
    }
}
