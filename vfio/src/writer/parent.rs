//! The agent's side: starts the child, and waits for it no longer than the deadline.

use std::{
    error::Error,
    io::{self, Read, Write as _},
    os::{fd::AsFd, unix::process::CommandExt},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};

use super::{Answer, Ask, Cause, Circumstances, WriteError, WriterCommand};
use crate::{host::Host, write::Write};

/// Makes kernel writes, one at a time, through a child process that is started with the first of them. Dropping it
/// closes the child's pipe, upon which the child ends.
#[derive(Debug)]
pub struct Writer {
    command: WriterCommand,
    host: Host,
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    pid: u32,
    /// Taken out where the child is left behind; else waited for at the end.
    child: Option<Child>,
    input: Option<ChildStdin>,
    output: Option<ChildStdout>,
    unread: Vec<u8>,
}

/// A child that still waits for the kernel after its deadline. It is not killed (a process in an uninterruptible
/// write cannot be), and it makes no further write.
#[derive(Debug)]
pub struct LeftBehind {
    child: Child,
    /// Kept open, so that the child's late report does not meet a closed pipe.
    _output: Option<ChildStdout>,
}

impl LeftBehind {
    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether its write has come to an end, so that the group may be looked at anew.
    pub fn ended(&mut self) -> bool {
        // An error says that the child is no longer ours to wait for: it has ended.
        !matches!(self.child.try_wait(), Ok(None))
    }
}

/// What came of waiting for an answer.
enum Waited {
    Answer(Answer),
    Late,
    Ended,
}

impl Writer {
    /// A writer on `host`.
    #[must_use]
    pub fn new(command: &WriterCommand, host: &Host) -> Self {
        Self { command: command.clone(), host: host.clone(), running: None }
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

    /// Asks the child one thing, and says its process id when it answered well. The child is put back only when it
    /// answered at all.
    fn ask(&mut self, write: &Write, ask: &Ask) -> Result<u32, WriteError> {
        let mut running = match self.running.take() {
            Some(running) => running,
            None => Running::start(&self.command, &self.host)?,
        };
        let pid = running.pid;
        let (write, path) = (write.clone(), write.path(&self.host));
        if running.send(ask).is_err() {
            return Err(WriteError::ChildEnded { write, pid });
        }
        let after = self.command.deadline;
        match running.answer(after) {
            Waited::Ended => Err(WriteError::ChildEnded { write, pid }),
            Waited::Late => match running.leave_behind() {
                Some(child) => Err(WriteError::Late { write, path, after, child }),
                None => Err(WriteError::ChildEnded { write, pid }),
            },
            Waited::Answer(answer) => {
                self.running = Some(running);
                match answer {
                    Answer::Ready | Answer::Done => Ok(pid),
                    Answer::Failed(errno) => {
                        let errno = Errno::from_raw(errno);
                        let seen = Circumstances::look(&self.host, &write);
                        let cause = Cause::of(&seen, &write, errno);
                        Err(WriteError::Kernel { write, path, errno, cause })
                    }
                    Answer::Refused(reason) => Err(WriteError::Refused { write, reason }),
                }
            }
        }
    }
}

impl Running {
    fn start(command: &WriterCommand, host: &Host) -> Result<Self, WriteError> {
        let start = |source| WriteError::Start { program: command.program.clone(), source };
        let mut child = Command::new(&command.program)
            .args(&command.arguments)
            .arg(host.root())
            .env_clear()
            .current_dir("/")
            // A terminal's interrupt is for the agent: it must not end the child in the middle of a write.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(start)?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        Ok(Self { pid: child.id(), child: Some(child), input, output, unread: Vec::new() })
    }

    fn send(&mut self, ask: &Ask) -> io::Result<()> {
        let mut text = serde_json::to_string(ask)?;
        text.push('\n');
        match &mut self.input {
            Some(input) => input.write_all(text.as_bytes()),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    fn answer(&mut self, deadline: Duration) -> Waited {
        let until = Instant::now() + deadline;
        loop {
            if let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=end).collect();
                // A line that is no answer comes from a child that is not ours: nothing more is asked of it.
                return serde_json::from_slice(&line).map_or(Waited::Ended, Waited::Answer);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Waited::Late;
            }
            let millis = u16::try_from(left.as_millis().max(1)).unwrap_or(u16::MAX);
            let Some(output) = &mut self.output else { return Waited::Ended };
            let mut fds = [PollFd::new(output.as_fd(), PollFlags::POLLIN)];
            match poll(&mut fds, PollTimeout::from(millis)) {
                Ok(0) | Err(Errno::EINTR) => continue,
                Ok(_) => {}
                Err(_) => return Waited::Ended,
            }
            let mut chunk = [0; 1024];
            match output.read(&mut chunk) {
                Ok(0) | Err(_) => return Waited::Ended,
                Ok(read) => self.unread.extend(chunk.iter().take(read)),
            }
        }
    }

    /// Takes the child out, so that dropping this does not wait for it.
    fn leave_behind(&mut self) -> Option<LeftBehind> {
        drop(self.input.take());
        let output = self.output.take();
        self.child.take().map(|child| LeftBehind { child, _output: output })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.input.take());
        if let Some(child) = &mut self.child {
            // An idle child ends at once on its pipe's end; waiting for it leaves no zombie.
            let _ = child.wait();
        }
    }
}
