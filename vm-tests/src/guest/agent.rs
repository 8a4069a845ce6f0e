//! Runs the program under test as a user would.

use std::process::{Command, Stdio};

use serde_json::Value;

use super::failure::{Failure, Step, contains, equal, io_on};
use super::paths;

/// What one call of `vfiod` gave.
#[derive(Debug)]
pub struct Answer {
    /// The command, for messages.
    pub line: String,
    /// Exit status; none if a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

/// Runs `vfiod` to its end; prints command and output to the console, where a failure shows them.
///
/// The machine has no Kubernetes, and a kubelet's missing directory would else mean that nothing is known of pods.
pub fn vfiod(arguments: &[&str]) -> Step<Answer> {
    let arguments = &[arguments, &["--no-kubernetes"]].concat();
    let line = format!("vfiod {}", arguments.join(" "));
    println!("+ {line}");
    let output = Command::new(paths::VFIOD)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .map_err(io_on("run", paths::VFIOD))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let answer = Answer {
        line,
        code: output.status.code(),
        stdout: text(&output.stdout),
        stderr: text(&output.stderr),
    };
    print!("{}{}", answer.stdout, answer.stderr);
    println!("= {}", output.status);
    Ok(answer)
}

impl Answer {
    /// All it said, on both streams.
    #[must_use]
    pub fn said(&self) -> String {
        format!("{}{}", self.stdout, self.stderr)
    }

    /// Checks the exit status; shows what was said if it is another.
    pub fn exits(self, code: i32) -> Step<Self> {
        let what = format!("exit status of `{}` (which said: {})", self.line, self.said().trim_end());
        equal(&what, &self.code, &Some(code))?;
        Ok(self)
    }

    /// Checks that it said something, in whatever case.
    pub fn says(self, part: &str) -> Step<Self> {
        contains(&format!("what `{}` said", self.line), &self.said(), part)?;
        Ok(self)
    }

    /// Its standard output as JSON.
    pub fn json(&self) -> Step<Value> {
        serde_json::from_str(&self.stdout).map_err(|source| Failure::Json {
            what: format!("standard output of `{}`", self.line),
            text: self.said(),
            source,
        })
    }
}
