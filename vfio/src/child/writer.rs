//! Kernel writes, as the agent makes them.

use std::error::Error;

use nix::errno::Errno;

use super::{
    Cause, ChildCommand, Circumstances, LookError, READ_DEADLINE, WriteError,
    protocol::{Answer, Ask},
    running::{Servant, Unanswered},
};
use crate::{
    host::Host,
    pci::{Address, Function, FunctionError},
    write::Write,
};

/// Makes kernel writes, one at a time, and reads the functions that they are for, through one child process.
#[derive(Debug)]
pub struct Writer {
    servant: Servant,
}

impl Writer {
    /// A writer on `host`.
    #[must_use]
    pub fn new(command: &ChildCommand, host: &Host) -> Self {
        Self { servant: Servant::new(command, host) }
    }

    /// Makes one write. `record` is called with the child's process id when the child stands ready, before anything has
    /// happened: it must make the journal entry durable. Where it fails, nothing is written.
    ///
    /// # Errors
    /// See [`WriteError`]. After [`WriteError::Late`] and [`WriteError::ChildEnded`] the child is gone from here; another
    /// write would start another child.
    pub fn write<E>(
        &mut self,
        write: &Write,
        record: impl FnOnce(u32) -> Result<(), E>,
    ) -> Result<(), WriteError>
    where
        E: Into<Box<dyn Error + Send + Sync>>,
    {
        let pid = self.ask(write, &Ask::Prepare(write.clone()))?;
        // A child whose write could not be recorded stays ready for another Prepare, which replaces this one.
        record(pid).map_err(|e| WriteError::NotRecorded { write: write.clone(), source: e.into() })?;
        self.ask(write, &Ask::Go)?;
        Ok(())
    }

    /// Asks the child one thing about a write, and says its process id when it answered well.
    fn ask(&mut self, write: &Write, ask: &Ask) -> Result<u32, WriteError> {
        let after = self.servant.command.deadline;
        let answer = self.servant.ask(ask, after);
        let (write, path) = (write.clone(), write.path(&self.servant.host));
        match answer {
            Ok((pid, Answer::Ready | Answer::Done)) => Ok(pid),
            Ok((_, Answer::Failed(errno))) => {
                let errno = Errno::from_raw(errno);
                // A function that cannot be read now leaves the cause less certain; the error is told all the same.
                let function = write.function().and_then(|address| look(&mut self.servant, address).ok()?);
                let seen = Circumstances::look(&self.servant.host, &write, function);
                let cause = Cause::of(&seen, &write, errno);
                Err(WriteError::Kernel { write, path, errno, cause })
            }
            Ok((_, Answer::Refused(reason))) => Err(WriteError::Refused { write, reason }),
            // An answer to another question: that child is not ours.
            Ok((pid, Answer::Function(_) | Answer::Unreadable(_))) | Err(Unanswered::Ended(pid)) => {
                Err(WriteError::ChildEnded { write, pid })
            }
            Err(Unanswered::NotStarted(source)) => {
                Err(WriteError::Start { program: self.servant.command.program.clone(), source })
            }
            Err(Unanswered::Late(child)) => Err(WriteError::Late { write, path, after, child }),
        }
    }

    /// Reads a function; nothing where it is not (or no longer) there.
    ///
    /// # Errors
    /// See [`LookError`].
    pub fn look(&mut self, address: Address) -> Result<Option<Function>, LookError> {
        look(&mut self.servant, address)
    }
}

/// Reads a function through a child. One that ended (a fault, a kill) is replaced once: reading again does no harm.
pub(super) fn look(servant: &mut Servant, address: Address) -> Result<Option<Function>, LookError> {
    let said = |reason: String| LookError::Function(FunctionError::Said { address, reason });
    let deadline = servant.command.deadline.min(READ_DEADLINE);
    let ask = Ask::Look(address);
    let mut answer = servant.ask(&ask, deadline);
    if matches!(answer, Err(Unanswered::Ended(_))) {
        answer = servant.ask(&ask, deadline);
    }
    match answer {
        Ok((_, Answer::Function(function))) => Ok(function.map(|function| *function)),
        Ok((_, Answer::Unreadable(reason))) => Err(said(reason)),
        Ok((pid, _)) | Err(Unanswered::Ended(pid)) => {
            Err(said(format!("PCI function {address}: the child that reads it (pid {pid}) ended")))
        }
        Err(Unanswered::NotStarted(error)) => Err(said(format!(
            "PCI function {address}: the child that reads it ({program}) cannot be started: {error}",
            program = servant.command.program.display()
        ))),
        Err(Unanswered::Late(child)) => Err(LookError::Late { address, child }),
    }
}
