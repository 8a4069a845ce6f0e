//! The one lock of all writers: whoever writes to the kernel or the journal has it.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};

/// The lock of a state directory, held until it is dropped (or its process ends, however it ends).
#[derive(Debug)]
pub struct WriterLock {
    _file: Flock<File>,
}

/// The lock could not be had.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process has it.
    #[error(
        "another vfiod works on this node (process {owner}); only one may write at a time, and there is no way round it"
    )]
    Held {
        /// Who, as it said itself.
        owner: String,
    },
    /// The lock file.
    #[error("cannot lock {path}: the state directory must be writable", path = path.display())]
    File {
        /// The lock file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl WriterLock {
    /// Takes the lock of `state_dir`, which is created where it is missing. `role` is told to whoever comes second.
    ///
    /// # Errors
    /// At once when another process has it.
    #[expect(clippy::disallowed_methods, reason = "a lock file is opened for writing and never replaced")]
    pub fn take(state_dir: &Path, role: &str) -> Result<Self, LockError> {
        let path = state_dir.join("lock");
        let failed = |source: io::Error| LockError::File { path: path.clone(), source };
        fs::create_dir_all(state_dir).map_err(failed)?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(failed)?;
        let mut file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(file) => file,
            Err((mut file, Errno::EWOULDBLOCK)) => {
                let mut owner = String::new();
                // Who it is helps, and is not needed: the lock is what counts.
                let _ = file.read_to_string(&mut owner);
                return Err(LockError::Held { owner: owner.trim().to_owned() });
            }
            Err((_, errno)) => return Err(failed(errno.into())),
        };
        let name = format!("{} {role}\n", std::process::id());
        file.set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| file.write_all(name.as_bytes()))
            .map_err(failed)?;
        Ok(Self { _file: file })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_writer_is_told_who_the_first_is() {
        let dir = tempfile::tempdir().unwrap();
        let first = WriterLock::take(dir.path(), "agent").unwrap();
        let error = WriterLock::take(dir.path(), "bind").unwrap_err().to_string();
        assert!(error.contains(&format!("{} agent", std::process::id())), "{error}");
        drop(first);
        WriterLock::take(dir.path(), "bind").unwrap();
    }
}
