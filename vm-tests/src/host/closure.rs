//! The shared libraries that a program needs, by `ldd`.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::process::{self, ProcessError};

/// The libraries of one of our own programs, the dynamic loader among them, by the paths it looks for them at.
pub fn libraries(program: &Path) -> Result<Vec<PathBuf>, ProcessError> {
    let cure = "It must be a dynamic program for this machine, since its libraries go into the guest";
    let answer = process::run(Command::new("ldd").arg(program).env_remove("LD_LIBRARY_PATH"), cure)?;
    Ok(parse(&answer))
}

/// `name => /path (address)` or, for the loader, `/path (address)`; the kernel's vdso has no path.
fn parse(answer: &str) -> Vec<PathBuf> {
    let path = |line: &str| {
        let place = line.split_once("=>").map_or(line, |(_, place)| place);
        let path = place.trim().split(" (").next().unwrap_or_default();
        path.starts_with('/').then(|| PathBuf::from(path))
    };
    answer.lines().filter_map(path).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_line_is_understood() {
        let answer = "\tlinux-vdso.so.1 (0x00007f3b79b52000)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x1)\n\
                      \t/lib64/ld-linux-x86-64.so.2 (0x2)\n\tstatically linked\n";
        let expected = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from);
        assert_eq!(parse(answer), expected);
    }
}
