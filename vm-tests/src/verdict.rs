//! What the guest tells the host: one line a scenario on the second serial port.

use serde::{Deserialize, Serialize};

/// Begins every result line, so that stray output on the port is told apart.
const MARK: &str = "VMLAB ";

/// How a scenario ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// The scenario's name.
    pub scenario: String,
    /// Why it failed; none when it passed.
    pub failure: Option<String>,
    /// Seconds since the guest's kernel started.
    pub uptime: f64,
}

impl Verdict {
    /// The line that goes over the serial port: `VMLAB NAME ok|FAILED {json}`.
    #[must_use]
    pub fn line(&self) -> String {
        let word = if self.failure.is_none() { "ok" } else { "FAILED" };
        let json = serde_json::to_string(self).unwrap_or_default();
        format!("{MARK}{} {word} {json}", self.scenario)
    }

    /// The verdict in what came over the port, if there is one.
    #[must_use]
    pub fn find(output: &str) -> Option<Self> {
        output.lines().filter(|l| l.starts_with(MARK)).find_map(|l| {
            let json = l.split_once('{').map(|(_, rest)| rest.trim_end())?;
            serde_json::from_str(&format!("{{{json}")).ok()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_of_several_lines_survives_the_port() {
        let sent = Verdict { scenario: "x".into(), failure: Some("a {\nb\"}".into()), uptime: 1.5 };
        let port = format!("noise\r\n{}\r\n", sent.line());
        assert_eq!(Verdict::find(&port), Some(sent));
        assert_eq!(Verdict::find("VMLAB x ok"), None);
    }
}
