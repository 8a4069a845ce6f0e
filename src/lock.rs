//! The one lock of all writers: whoever writes to the kernel or the journal has it.

use std::{
    fmt,
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};
use reason::{Code, Coded};
use vfio::{host::Host, process::ProcessId};

use crate::atomic_file;

/// The lock of all writers of a node, held until it is dropped (or its process ends, however it ends).
///
/// It is two: on a file of the state directory, which says who has it, and on the kernel's own `/sys/bus/pci/devices`,
/// so that another state directory, or a removed lock file, is no way round it.
#[derive(Debug)]
pub struct WriterLock {
    _kernel: Flock<File>,
    _file: Flock<File>,
}

/// How long the lock of a process that has ended may linger: in its child between fork and exec.
const LINGERING: Duration = Duration::from_secs(2);

/// What the process that has the lock does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// It keeps the node at its workload type.
    Agent,
    /// It moves units by hand.
    Hand,
    /// It plays on a simulated node.
    Demo,
}

impl Role {
    const ALL: [Self; 3] = [Self::Agent, Self::Hand, Self::Demo];

    fn as_str(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Hand => "bind",
            Self::Demo => "demo",
        }
    }
}

/// Who has the lock, as it wrote down itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// Its process id.
    pub pid: u32,
    /// What it does; none for a word that this version does not know.
    pub role: Option<Role>,
}

impl Owner {
    fn parse(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace();
        let pid = words.next()?.parse().ok()?;
        let role = words.next().and_then(|word| Role::ALL.into_iter().find(|role| role.as_str() == word));
        Some(Self { pid, role })
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {}", self.pid)?;
        self.role.map_or(Ok(()), |role| write!(f, ", {}", role.as_str()))
    }
}

fn name_of(owner: Option<&Owner>) -> String {
    owner.map_or_else(|| "with another state directory".to_owned(), ToString::to_string)
}

/// The lock could not be had.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process has it.
    #[error(
        "another vfiod works on this node ({}); only one may write at a time, and there is no way round it",
        name_of(owner.as_ref())
    )]
    Held {
        /// Who; none for one with another state directory.
        owner: Option<Owner>,
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

impl Coded for LockError {
    fn code(&self) -> Code {
        match self {
            Self::Held { .. } => Code::LockHeld,
            Self::File { .. } => Code::LockFile,
        }
    }

    fn retryable(&self) -> bool {
        match self {
            Self::Held { .. } => true,
            Self::File { .. } => false,
        }
    }
}

impl WriterLock {
    /// Takes the lock of the node `host`, whose state is kept in `state_dir` (created where it is missing). `role` is told
    /// to whoever comes second.
    ///
    /// # Errors
    /// At once when another living process has it.
    #[expect(clippy::disallowed_methods, reason = "a lock file is opened for writing and never replaced")]
    pub fn take(host: &Host, state_dir: &Path, role: Role) -> Result<Self, LockError> {
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
        let mut file = lock(file, &path)?;
        let devices = host.sys("bus/pci/devices");
        let opened = File::open(&devices);
        let opened = opened.map_err(|source| LockError::File { path: devices.clone(), source })?;
        let kernel = lock(opened, &devices)?;
        let name = format!("{} {}\n", std::process::id(), role.as_str());
        file.set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| file.write_all(name.as_bytes()))
            .map_err(failed)?;
        let left = atomic_file::sweep(state_dir);
        if left > 0 {
            tracing::info!(left, "removed what a killed vfiod had left in {}", state_dir.display());
        }
        Ok(Self { _kernel: kernel, _file: file })
    }
}

fn lock(mut file: File, path: &Path) -> Result<Flock<File>, LockError> {
    let until = Instant::now() + LINGERING;
    loop {
        file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(file) => return Ok(file),
            Err((mut file, Errno::EWOULDBLOCK)) => {
                let owner = owner(&mut file);
                let lives = |owner: &Owner| ProcessId::of(owner.pid).alive();
                if owner.as_ref().is_none_or(lives) || Instant::now() > until {
                    return Err(LockError::Held { owner });
                }
                sleep(LINGERING / 100);
                file
            }
            Err((_, errno)) => return Err(LockError::File { path: path.to_owned(), source: errno.into() }),
        };
    }
}

/// Who has the lock, as it said itself.
fn owner(file: &mut File) -> Option<Owner> {
    let mut text = String::new();
    file.rewind().and_then(|()| file.read_to_string(&mut text)).ok()?;
    Owner::parse(&text)
}

#[cfg(test)]
mod tests {
    use vfio::sim::{Profile, Simulation};

    use super::*;

    #[test]
    fn the_second_writer_is_told_who_the_first_is() {
        let dir = tempfile::tempdir().unwrap();
        let sim = Simulation::create(dir.path().join("node"), &Profile::without_iommu()).unwrap();
        let take = |state: &str, role| WriterLock::take(sim.host(), &dir.path().join(state), role);
        let first = take("state", Role::Agent).unwrap();
        let error = take("state", Role::Hand).unwrap_err().to_string();
        assert!(error.contains(&format!("process {}, agent", std::process::id())), "{error}");
        let error = take("another", Role::Hand).unwrap_err().to_string();
        assert!(error.contains("another state directory"), "{error}");
        fs::remove_file(dir.path().join("state/lock")).unwrap();
        take("state", Role::Hand).unwrap_err();
        drop(first);
        take("state", Role::Hand).unwrap();
    }
}
