//! Children that are not waited for any more, and how they are buried.

use std::{
    process::{Child, ChildStdout},
    sync::{Mutex, MutexGuard, PoisonError},
    thread::sleep,
    time::{Duration, Instant},
};

/// How long is waited for a child whose pipe has been closed. An idle one ends within a millisecond or two.
const FAREWELL: Duration = Duration::from_millis(200);

/// Children whose handles are gone and that have not been seen to end.
///
/// This is the one list of the library that belongs to no value, and it has to: a child outlives whatever started it, the
/// kernel keeps it (a zombie, once it has ended) for this process and no other, and the next one to start a child may be
/// anybody. Nothing is decided by it, and it is never waited for: it is only gone through, at every start and end of a child.
static FORGOTTEN: Mutex<Vec<Child>> = Mutex::new(Vec::new());

fn forgotten() -> MutexGuard<'static, Vec<Child>> {
    FORGOTTEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An error says that the child is no longer ours to wait for: it has ended.
fn lives(child: &mut Child) -> bool {
    matches!(child.try_wait(), Ok(None))
}

/// Buries those of the forgotten children that have ended. Does not block.
pub(super) fn reap() {
    forgotten().retain_mut(lives);
}

/// Lets go of a child that may or may not end: whoever comes later buries it.
fn forget(mut child: Child) {
    let mut list = forgotten();
    list.retain_mut(lives);
    if lives(&mut child) {
        list.push(child);
    }
}

/// Waits a moment for the end of a child whose pipe has been closed, and lets go of one that does not end.
pub(super) fn part_from(mut child: Child) {
    let until = Instant::now() + FAREWELL;
    while lives(&mut child) {
        if Instant::now() >= until {
            return forget(child);
        }
        sleep(Duration::from_millis(1));
    }
}

/// A child that still waits for the kernel after its deadline. It is not killed (a process in an uninterruptible
/// write cannot be), and it makes no further write. One whose handle is dropped leaves no zombie: it is buried when another
/// child starts or ends.
#[derive(Debug)]
pub struct LeftBehind {
    pid: u32,
    /// Taken out once it has ended.
    child: Option<Child>,
    /// Kept open, so that the child's late report does not meet a closed pipe.
    output: Option<ChildStdout>,
}

impl LeftBehind {
    pub(super) fn new(child: Child, output: Option<ChildStdout>) -> Self {
        Self { pid: child.id(), child: Some(child), output }
    }

    /// Closes its output too: what it has yet to say does not fit a pipe that nobody reads, and it would never end.
    #[must_use]
    pub(super) fn hang_up(mut self) -> Self {
        self.output = None;
        self
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether what it waited for has come to an end, so that the group or process may be looked at anew.
    pub fn ended(&mut self) -> bool {
        reap();
        if self.child.as_mut().is_some_and(lives) {
            return false;
        }
        self.child = None;
        true
    }
}

impl Drop for LeftBehind {
    fn drop(&mut self) {
        if let Some(child) = self.child.take() {
            forget(child);
        }
    }
}
