//! Services of a host that have GPUs open as a matter of course.

/// A service, and how it is made to let go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Service {
    /// The name of its processes, cut to the 15 characters that `/proc/PID/comm` has (`TASK_COMM_LEN`,
    /// include/linux/sched.h).
    pub command: &'static str,
    /// Its whole name.
    pub name: &'static str,
    /// The unit that its packages bring.
    pub unit: &'static str,
    /// What makes it let go of one function alone, `ADDRESS` standing for it; none where only its end does.
    pub one_function: Option<&'static str>,
    /// What ends with it, beside itself: to be said before anybody stops it. None where nothing does.
    pub ends: Option<&'static str>,
}

impl Service {
    /// A service whose end ends nothing else.
    #[must_use]
    pub const fn new(command: &'static str, name: &'static str, unit: &'static str) -> Self {
        Self { command, name, unit, one_function: None, ends: None }
    }
}
