//! QEMU: an installed one, or Debian's unpacked into the cache.

use std::path::PathBuf;
use std::process::Command;

use super::apt::{self, AptError};
use super::cache::{Cache, CacheError, Key};
use super::files::FileError;
use super::process::{self, ProcessError};
use super::progress::say;

const PROGRAM: &str = "qemu-system-x86_64";
const PACKAGE: &str = "qemu-system-x86";
/// The oldest version that the lab was seen to work with: bookworm's.
const OLDEST: (u32, u32) = (7, 2);
const CURE: &str = "Install qemu-system-x86 7.2 or newer yourself, or delete the lab's cache and run again";

/// No usable QEMU.
#[derive(Debug, thiserror::Error)]
pub enum QemuError {
    /// The package could not be fetched.
    #[error("fetching {PACKAGE}")]
    Apt(#[from] AptError),
    /// The cache failed.
    #[error("keeping QEMU")]
    Cache(#[from] CacheError),
    /// A file operation failed.
    #[error("unpacking QEMU")]
    File(#[from] FileError),
    /// The program does not run.
    #[error("asking {PROGRAM} for its version")]
    Process(#[from] ProcessError),
    /// The fetched program is too old or says no version.
    #[error("the QEMU that apt offers says '{said}', and the lab needs 7.2 or newer. {CURE}")]
    TooOld {
        /// The first line of its answer.
        said: String,
    },
}

/// A QEMU that runs.
#[derive(Debug, Clone)]
pub struct Qemu {
    program: PathBuf,
    /// Where an unpacked QEMU lies; none for an installed one.
    root: Option<PathBuf>,
    /// What it says of its version.
    pub version: String,
}

impl Qemu {
    /// The installed QEMU if it is new enough, else Debian's, fetched into the cache.
    ///
    /// It is never installed: on a machine that has QEMU's other packages in another version, that would remove them.
    pub fn find_or_fetch(cache: &Cache) -> Result<Self, QemuError> {
        if let Some(program) = process::find(PROGRAM) {
            let installed = Self { program, root: None, version: String::new() };
            match installed.checked() {
                Ok(qemu) => return Ok(qemu),
                Err(error) => say(&format!("not using the installed QEMU: {error}")),
            }
        }
        let package = apt::candidate(PACKAGE)?;
        let key = Key::of([package.version.as_bytes()]);
        let entry = cache.entry::<QemuError>("qemu", &key, |dir| {
            say(&format!("fetching {PACKAGE} {} into the cache", package.version));
            let downloads = tempfile::tempdir_in(dir)
                .map_err(|source| FileError::new("create a folder in", dir, source))?;
            for deb in apt::download_closure(PACKAGE, "qemu-", downloads.path())? {
                apt::unpack(&deb, dir)?;
            }
            Ok(())
        })?;
        let program = entry.join("usr/bin").join(PROGRAM);
        Self { program, root: Some(entry), version: String::new() }.checked()
    }

    /// The command, ready for a machine's arguments.
    #[must_use]
    pub fn command(&self) -> Command {
        self.under(Command::new(&self.program))
    }

    /// The command under coreutils' `timeout`, which ends the machine even when this process was killed.
    #[must_use]
    pub fn command_for_seconds(&self, seconds: u64) -> Command {
        let mut command = Command::new("timeout");
        command.args(["--foreground", "--kill-after=5"]).arg(seconds.to_string()).arg(&self.program);
        self.under(command)
    }

    /// An unpacked QEMU finds neither its libraries, nor its accelerator's module, nor its firmware by itself.
    fn under(&self, mut command: Command) -> Command {
        let Some(root) = &self.root else { return command };
        let libraries = root.join("usr/lib/x86_64-linux-gnu");
        let path = [libraries.clone(), root.join("lib/x86_64-linux-gnu")];
        if let Ok(path) = std::env::join_paths(path) {
            command.env("LD_LIBRARY_PATH", path);
        }
        command.env("QEMU_MODULE_DIR", libraries.join("qemu"));
        for folder in ["qemu", "seabios", "qemu/vgabios"] {
            command.arg("-L").arg(root.join("usr/share").join(folder));
        }
        command
    }

    fn checked(mut self) -> Result<Self, QemuError> {
        let answer = process::run(self.command().arg("--version"), CURE)?;
        let said = answer.lines().next().unwrap_or_default().to_owned();
        if version(&said).is_some_and(|v| v >= OLDEST) {
            self.version = said;
            return Ok(self);
        }
        Err(QemuError::TooOld { said })
    }
}

/// Major and minor of `QEMU emulator version 7.2.22 (Debian ...)`.
fn version(said: &str) -> Option<(u32, u32)> {
    let numbers = said.strip_prefix("QEMU emulator version ")?;
    let mut parts = numbers.split(['.', ' ']);
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_as_numbers() {
        assert_eq!(version("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg)"), Some((7, 2)));
        assert!(version("QEMU emulator version 10.0.2").is_some_and(|v| v >= OLDEST));
        assert!(version("QEMU emulator version 6.9.1").is_some_and(|v| v < OLDEST));
        assert_eq!(version("nonsense"), None);
    }
}
