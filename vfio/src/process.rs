//! A process of this machine, told from any later one with the same number.

use serde::{Deserialize, Serialize};

/// A process, told from a later one with the same number by its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    /// The process id.
    pub pid: u32,
    /// When it started, in clock ticks since boot (`/proc/PID/stat`, field 22); 0 where it had ended already.
    pub started: u64,
}

impl ProcessId {
    /// The process `pid` as it is now.
    #[must_use]
    pub fn of(pid: u32) -> Self {
        Self { pid, started: started(pid).unwrap_or(0) }
    }

    /// Whether that very process still lives (a zombie has come to its end).
    #[must_use]
    pub fn alive(self) -> bool {
        self.started != 0 && started(self.pid) == Some(self.started)
    }
}

/// A living process's start, from this machine's own `/proc`: an agent's children are this machine's processes even where
/// the host's tree is a simulated one.
fn started(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (state, started) = parse(&stat)?;
    (state != "Z").then_some(started)
}

/// State and start of a `/proc/PID/stat` (proc_pid_stat(5)).
fn parse(stat: &str) -> Option<(&str, u64)> {
    // The command, in brackets, may hold anything: fields are counted after its last bracket.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    let state = fields.next()?;
    Some((state, fields.nth(18)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_told_from_another_with_its_number() {
        let own = ProcessId::of(std::process::id());
        assert!(own.started > 0 && own.alive());
        assert!(!ProcessId { started: own.started + 1, ..own }.alive());
        let nobody = ProcessId::of(u32::MAX);
        assert!(nobody.started == 0 && !nobody.alive());
    }

    /// The journal holds it like this.
    #[test]
    fn it_is_written_as_pid_and_start() {
        let text = r#"{"pid":7,"started":4242}"#;
        let process: ProcessId = serde_json::from_str(text).unwrap();
        assert_eq!(process, ProcessId { pid: 7, started: 4242 });
        assert_eq!(serde_json::to_string(&process).unwrap(), text);
    }

    #[test]
    fn a_command_may_hold_anything() {
        let fields = "S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4242 20";
        for command in ["sh", "a) Z 1 (b", ") S 1"] {
            assert_eq!(parse(&format!("7 ({command}) {fields}")), Some(("S", 4242)), "{command}");
        }
        assert_eq!(parse("7 (sh) S 1"), None);
        assert_eq!(parse(""), None);
    }
}
