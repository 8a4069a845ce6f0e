//! The child as its parent sees it: started, asked one thing at a time, and waited for no longer than a deadline.

use std::{
    io::{self, Read, Write as _},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::process::CommandExt,
    },
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
    poll::{PollFd, PollFlags, PollTimeout, poll},
};

use super::{
    ChildCommand, READ_DEADLINE,
    left_behind::{LeftBehind, part_from, reap},
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
        let until = Instant::now() + deadline;
        let mut running = match self.running.take() {
            Some(running) => running,
            None => Running::start(&self.command, &self.host).map_err(Unanswered::NotStarted)?,
        };
        match running.send(ask, until) {
            Waited::Done(()) => self.wait(running, until),
            Waited::Ended => Err(Unanswered::Ended(running.pid)),
            Waited::Late => Err(running.late()),
        }
    }

    /// How long a read may take.
    pub(super) fn read_deadline(&self) -> Duration {
        self.command.deadline.min(READ_DEADLINE)
    }

    /// Asks the child for a read. One that ended (a fault, a kill) is replaced once: reading again does no harm.
    pub(super) fn read(&mut self, ask: &Ask) -> Result<(u32, Answer), Unanswered> {
        let deadline = self.read_deadline();
        match self.ask(ask, deadline) {
            Err(Unanswered::Ended(_)) => self.ask(ask, deadline),
            other => other,
        }
    }

    /// Parts from the child: it said what it was not asked.
    pub(super) fn dismiss(&mut self) {
        self.running = None;
    }

    /// A further answer to what was asked last.
    pub(super) fn more(&mut self, deadline: Duration) -> Result<Answer, Unanswered> {
        match self.running.take() {
            Some(running) => self.wait(running, Instant::now() + deadline).map(|(_, answer)| answer),
            // Whoever got no answer does not ask for more of it.
            None => Err(Unanswered::NotStarted(io::ErrorKind::NotConnected.into())),
        }
    }

    fn wait(&mut self, mut running: Running, until: Instant) -> Result<(u32, Answer), Unanswered> {
        let pid = running.pid;
        match running.answer(until) {
            Waited::Done(answer) => {
                self.running = Some(running);
                Ok((pid, answer))
            }
            Waited::Ended => Err(Unanswered::Ended(pid)),
            Waited::Late => Err(running.late()),
        }
    }
}

#[derive(Debug)]
struct Running {
    pid: u32,
    /// Taken out where the child is left behind; else parted from at the end.
    child: Option<Child>,
    input: Option<ChildStdin>,
    output: Option<ChildStdout>,
    unread: Vec<u8>,
}

/// What came of waiting.
enum Waited<T> {
    Done(T),
    Late,
    Ended,
}

impl Running {
    fn start(command: &ChildCommand, host: &Host) -> io::Result<Self> {
        reap();
        let mut child = Command::new(&command.program)
            .arg0(&command.name)
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
        let running = Self { pid: child.id(), child: Some(child), input, output, unread: Vec::new() };
        // A child that does not read must not hold up its parent over a pipe that is full. The flag is this end's alone.
        if let Some(input) = &running.input {
            fcntl(input, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        }
        Ok(running)
    }

    fn send(&mut self, ask: &Ask, until: Instant) -> Waited<()> {
        let Ok(mut text) = serde_json::to_string(ask) else { return Waited::Ended };
        text.push('\n');
        let Some(input) = &mut self.input else { return Waited::Ended };
        let mut left = text.as_bytes();
        while !left.is_empty() {
            match wait_for(input.as_fd(), PollFlags::POLLOUT, until) {
                Waited::Done(()) => {}
                other => return other,
            }
            match input.write(left) {
                Ok(0) => return Waited::Ended,
                Ok(written) => left = left.get(written..).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return Waited::Ended,
            }
        }
        Waited::Done(())
    }

    fn answer(&mut self, until: Instant) -> Waited<Answer> {
        loop {
            if let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=end).collect();
                // A line that is no answer comes from a child that is not ours: nothing more is asked of it.
                return serde_json::from_slice(&line).map_or(Waited::Ended, Waited::Done);
            }
            let Some(output) = &mut self.output else { return Waited::Ended };
            match wait_for(output.as_fd(), PollFlags::POLLIN, until) {
                Waited::Done(()) => {}
                Waited::Late => return Waited::Late,
                Waited::Ended => return Waited::Ended,
            }
            let mut chunk = [0; 4096];
            match output.read(&mut chunk) {
                Ok(0) | Err(_) => return Waited::Ended,
                Ok(read) => self.unread.extend(chunk.iter().take(read)),
            }
        }
    }

    /// Leaves the child behind, so that dropping this does not wait for it.
    fn late(mut self) -> Unanswered {
        drop(self.input.take());
        let output = self.output.take();
        match self.child.take() {
            Some(child) => Unanswered::Late(LeftBehind::new(child, output)),
            None => Unanswered::Ended(self.pid),
        }
    }
}

/// Waits until `fd` is ready, or until the other end has closed it.
fn wait_for(fd: BorrowedFd<'_>, what: PollFlags, until: Instant) -> Waited<()> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Waited::Late;
        }
        let millis = u16::try_from(left.as_millis().max(1)).unwrap_or(u16::MAX);
        match poll(&mut [PollFd::new(fd, what)], PollTimeout::from(millis)) {
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Waited::Done(()),
            Err(_) => return Waited::Ended,
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.input.take());
        drop(self.output.take());
        if let Some(child) = self.child.take() {
            part_from(child);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(100);
    const LONG: Duration = Duration::from_secs(20);

    fn shell(script: &str) -> Servant {
        let command = ChildCommand {
            name: "sh".to_owned(),
            program: "/bin/sh".into(),
            arguments: vec!["-c".to_owned(), script.to_owned()],
            deadline: SHORT,
        };
        Servant::new(&command, &Host::at("/").unwrap())
    }

    /// `R`, `S`, `Z`...; nothing for a process that is there no more.
    fn state(pid: u32) -> Option<char> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(") ")?.1.chars().next()
    }

    fn until(what: &str, mut reached: impl FnMut() -> bool) {
        let until = Instant::now() + LONG;
        while !reached() {
            assert!(Instant::now() < until, "{what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn late(servant: &mut Servant) -> LeftBehind {
        match servant.ask(&Ask::Go, SHORT) {
            Err(Unanswered::Late(child)) => child,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_child_that_ends_late_leaves_no_zombie() {
        let mut servant = shell("sleep 0.4");
        let mut kept = late(&mut servant);
        let dropped = late(&mut servant);
        let pid = dropped.pid();
        drop(dropped);
        until("its end", || state(pid).is_none_or(|state| state == 'Z'));
        // Whatever child comes or goes next buries it.
        until("the kept one's end", || kept.ended());
        assert_eq!((state(pid), state(kept.pid())), (None, None));
        assert!(kept.ended(), "it stays so");
    }

    #[test]
    fn one_that_is_dropped_after_its_end_is_buried_at_once() {
        let child = late(&mut shell("sleep 0.4"));
        let pid = child.pid();
        until("its end", || state(pid) == Some('Z'));
        drop(child);
        assert_eq!(state(pid), None);
    }

    #[test]
    fn parting_from_a_child_that_does_not_end_takes_no_longer_than_a_moment() {
        // It answers, and then takes no notice of its pipe's end.
        let mut servant = shell("echo '\"done\"'; exec sleep 1");
        let Ok((pid, Answer::Done)) = servant.ask(&Ask::Go, LONG) else { panic!() };
        let begun = Instant::now();
        drop(servant);
        assert!(begun.elapsed() < Duration::from_millis(900), "{:?}", begun.elapsed());
        assert!(state(pid).is_some_and(|state| state != 'Z'), "it is not killed");
        until("its end", || state(pid).is_none_or(|state| state == 'Z'));
        reap();
        assert_eq!(state(pid), None);
    }

    #[test]
    fn an_idle_child_is_gone_when_its_parent_lets_go_of_it() {
        let mut servant = shell("read -r line; echo '\"ready\"'; read -r line");
        let Ok((pid, Answer::Ready)) = servant.ask(&Ask::Go, LONG) else { panic!() };
        drop(servant);
        assert_eq!(state(pid), None);
    }

    #[test]
    fn a_child_that_does_not_read_holds_nobody_up() {
        let driver = Some("x".repeat(1 << 20));
        let address = "0000:01:00.0".parse().unwrap();
        let ask = Ask::Prepare(crate::write::Write::Override { address, driver });
        let begun = Instant::now();
        let answer = shell("exec sleep 2").ask(&ask, SHORT);
        assert!(matches!(answer, Err(Unanswered::Late(_))), "{answer:?}");
        assert!(begun.elapsed() < Duration::from_secs(1));
    }

    #[test]
    fn what_is_no_answer_and_no_child_is_said() {
        assert!(matches!(shell("echo nonsense").ask(&Ask::Go, LONG), Err(Unanswered::Ended(_))));
        assert!(matches!(shell("exit 0").ask(&Ask::Go, LONG), Err(Unanswered::Ended(_))));
        let mut nobody = shell("");
        nobody.command.program = "/nonexistent".into();
        assert!(matches!(nobody.ask(&Ask::Go, LONG), Err(Unanswered::NotStarted(_))));
        assert!(nobody.more(LONG).is_err());
    }

    #[test]
    fn one_question_may_have_several_answers() {
        let mut servant = shell("read -r line; echo '\"ready\"'; echo '\"done\"'; read -r line; sleep 9");
        assert!(matches!(servant.ask(&Ask::Go, LONG), Ok((_, Answer::Ready))));
        assert!(matches!(servant.more(LONG), Ok(Answer::Done)));
    }
}
