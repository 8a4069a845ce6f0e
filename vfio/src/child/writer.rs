//! Kernel writes, as the agent makes them.

use std::error::Error;

use nix::errno::Errno;

use super::{
    Cause, ChildCommand, Circumstances, LookError, WriteError,
    protocol::{Answer, Ask},
    running::{Servant, Unanswered},
    scan::HolderScan,
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
    /// Who was in the way of a write.
    holders: HolderScan,
}

impl Writer {
    /// A writer on `host`.
    #[must_use]
    pub fn new(command: &ChildCommand, host: &Host) -> Self {
        Self { servant: Servant::new(command, host), holders: HolderScan::default() }
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
                let host = self.servant.host.clone();
                let seen = Circumstances::look(&host, &write, function, |node| {
                    self.holders.scan(&mut self.servant, [node].into())
                });
                let cause = Cause::of(&seen, &write, errno);
                Err(WriteError::Kernel { write, path, errno, cause })
            }
            Ok((_, Answer::NoSimulation)) => {
                Err(WriteError::NoSimulation { write, root: self.servant.host.root().to_owned() })
            }
            Ok((_, Answer::Refused(reason))) => Err(WriteError::Refused { write, reason }),
            // An answer to another question: that child is not ours.
            Ok((pid, Answer::Function(_) | Answer::Unreadable(_) | Answer::Life(_) | Answer::Seen(_))) => {
                self.servant.dismiss();
                Err(WriteError::ChildEnded { write, pid })
            }
            Err(Unanswered::Ended(pid)) => Err(WriteError::ChildEnded { write, pid }),
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

/// Reads a function through a child.
pub(super) fn look(servant: &mut Servant, address: Address) -> Result<Option<Function>, LookError> {
    let said = |reason: String| LookError::Function(FunctionError::Said { address, reason });
    match servant.read(&Ask::Look(address)) {
        Ok((_, Answer::Function(function))) => Ok(function.map(|function| *function)),
        Ok((_, Answer::Unreadable(reason))) => Err(said(reason)),
        // An answer to another question: that child is not ours.
        Ok((pid, _)) => {
            servant.dismiss();
            Err(said(format!(
                "PCI function {address}: the child that reads it (pid {pid}) answered something else"
            )))
        }
        Err(Unanswered::Ended(pid)) => {
            Err(said(format!("PCI function {address}: the child that reads it (pid {pid}) ended")))
        }
        Err(Unanswered::NotStarted(error)) => Err(said(format!(
            "PCI function {address}: the child that reads it ({program}) cannot be started: {error}",
            program = servant.command.program.display()
        ))),
        Err(Unanswered::Late(child)) => Err(LookError::Late { address, child }),
    }
}
