//! The child as its parent sees it: started, asked one thing at a time, and waited for no longer than a deadline.

use std::{
    io::{self, Read, Write as _},
    os::{fd::AsFd, unix::process::CommandExt},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};

use super::{
    ChildCommand,
    protocol::{Answer, Ask},
};
use crate::host::Host;

/// A child process that is started with the first thing asked of it. Dropping it closes the child's pipe, upon which the
/// child ends.
#[derive(Debug)]
pub(super) struct Servant {
    pub(super) command: ChildCommand,
    pub(super) host: Host,
    running: Option<Running>,
}

/// Why there is no answer. The child is gone from here in each case; the next question starts another.
#[derive(Debug)]
pub(super) enum Unanswered {
    /// It could not be started.
    NotStarted(io::Error),
    /// It ended before it answered.
    Ended(u32),
    /// It did not answer in time.
    Late(LeftBehind),
}

impl Servant {
    pub(super) fn new(command: &ChildCommand, host: &Host) -> Self {
        Self { command: command.clone(), host: host.clone(), running: None }
    }

    /// Asks the child one thing. Says its process id with the answer.
    pub(super) fn ask(&mut self, ask: &Ask, deadline: Duration) -> Result<(u32, Answer), Unanswered> {
        let mut running = match self.running.take() {
            Some(running) => running,
            None => Running::start(&self.command, &self.host).map_err(Unanswered::NotStarted)?,
        };
        let pid = running.pid;
        if running.send(ask).is_err() {
            return Err(Unanswered::Ended(pid));
        }
        match running.answer(deadline) {
            Waited::Answer(answer) => {
                self.running = Some(running);
                Ok((pid, answer))
            }
            Waited::Ended => Err(Unanswered::Ended(pid)),
            Waited::Late => Err(running.leave_behind().map_or(Unanswered::Ended(pid), Unanswered::Late)),
        }
    }
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

impl Running {
    fn start(command: &ChildCommand, host: &Host) -> io::Result<Self> {
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
            .spawn()?;
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
