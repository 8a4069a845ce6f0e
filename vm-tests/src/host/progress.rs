//! Lines that say what a slow step is doing.

use std::io::Write as _;

/// Prints one line on standard error, past libtest's capture: a first run takes a minute and must not look hung.
pub fn say(line: &str) {
    // A closed standard error is no reason to fail a test.
    let _ = writeln!(std::io::stderr(), "vm-tests: {line}");
}
