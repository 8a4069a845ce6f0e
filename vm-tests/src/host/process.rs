//! Other programs: run, wait, and on failure say which, how it ended and what it said.

use std::io;
use std::process::{Command, ExitStatus, Output, Stdio};

/// A program could not be run or failed.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// It could not be started.
    #[error("cannot start `{program}`. {cure}")]
    Start {
        /// The program.
        program: String,
        /// What to do.
        cure: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// It ended with a failure.
    #[error("`{line}` ended with {status}. {cure}\n{said}")]
    Failed {
        /// Program and arguments.
        line: String,
        /// How it ended.
        status: ExitStatus,
        /// What to do.
        cure: &'static str,
        /// The end of its output.
        said: String,
    },
}

/// How many of a failed program's last lines are shown.
const SHOWN: usize = 25;

/// The last `count` lines of a text.
#[must_use]
pub fn tail(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines.iter().skip(lines.len().saturating_sub(count)).copied().collect::<Vec<_>>().join("\n")
}

/// Runs a program to its end and gives its standard output. `cure` says what the user can do when it fails.
pub fn run(command: &mut Command, cure: &'static str) -> Result<String, ProcessError> {
    let Output { status, stdout, stderr } = command.stdin(Stdio::null()).output().map_err(|source| {
        ProcessError::Start { program: command.get_program().to_string_lossy().into_owned(), cure, source }
    })?;
    let stdout = String::from_utf8_lossy(&stdout).into_owned();
    if status.success() {
        return Ok(stdout);
    }
    let said = tail(&format!("{stdout}{}", String::from_utf8_lossy(&stderr)), SHOWN);
    Err(ProcessError::Failed { line: line(command), status, cure, said })
}

fn line(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy()];
    words.extend(command.get_args().map(|a| a.to_string_lossy()));
    words.join(" ")
}

/// Where a program lies on PATH (and in the folders of the super-user, which a plain user's PATH may lack).
#[must_use]
pub fn find(program: &str) -> Option<std::path::PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|dir| dir.join(program))
        .find(|candidate| candidate.is_file())
}
