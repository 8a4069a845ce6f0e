//! Where a host's kernel is met: its four roots, and how they are read. Writing goes through [`crate::writer`].

use std::{
    fs,
    io::{self, Read},
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

use nix::sys::statfs::{SYSFS_MAGIC, statfs};

use reason::{Code, Coded};

use crate::pci::Address;

/// Which kernel answers below a root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// The `sys` below the root is a sysfs: the running kernel answers.
    Real,
    /// It is a plain directory tree: [`crate::sim`] answers writes as the kernel would.
    Simulated,
}

/// A host: the places where its kernel shows and takes things, all below one root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    root: PathBuf,
    kernel: Kernel,
}

/// A read from the kernel that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot {operation} {path}: {reason}", path = path.display())]
pub struct ReadError {
    /// The file or directory.
    pub path: PathBuf,
    /// What was tried: "read", "list", "follow".
    pub operation: &'static str,
    kind: io::ErrorKind,
    reason: String,
}

impl ReadError {
    fn new(operation: &'static str, path: &Path, error: &io::Error) -> Self {
        Self { path: path.to_owned(), operation, kind: error.kind(), reason: error.to_string() }
    }

    /// The kind of the system's error.
    #[must_use]
    pub fn kind(&self) -> io::ErrorKind {
        self.kind
    }
}

impl Coded for ReadError {
    fn code(&self) -> Code {
        Code::ReadFailed
    }

    /// What is forbidden stays so; all else may have been a matter of that moment.
    fn retryable(&self) -> bool {
        self.kind != io::ErrorKind::PermissionDenied
    }
}

/// A root below which no host lives.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// `sys` is not there.
    #[error("no host below {root}: {path} cannot be looked at; give --root a directory that holds sys, dev and proc", root = root.display(), path = path.display())]
    NoSys {
        /// The root.
        root: PathBuf,
        /// The `sys` looked for.
        path: PathBuf,
        /// Why it cannot be had.
        source: io::Error,
    },
    /// The machine's own `/sys` is no sysfs.
    #[error("/sys is not a sysfs: mount it, or name another root with --root")]
    SystemWithoutSysfs,
}

impl Coded for HostError {
    fn code(&self) -> Code {
        match self {
            Self::NoSys { .. } | Self::SystemWithoutSysfs => Code::NoHost,
        }
    }

    fn retryable(&self) -> bool {
        match self {
            Self::NoSys { .. } | Self::SystemWithoutSysfs => false,
        }
    }
}

/// What tells one open device node from another: a device number, or in a simulated tree the plain file that stands for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NodeId {
    /// Character device by its number (`st_rdev`), the same under whatever path or mount namespace it is open.
    Character(u64),
    /// Plain file of a simulated tree by device and inode.
    File(u64, u64),
}

impl Host {
    /// The machine this runs on.
    ///
    /// # Errors
    /// When `/sys` is no sysfs.
    pub fn system() -> Result<Self, HostError> {
        let host = Self::at("/")?;
        match host.kernel {
            Kernel::Real => Ok(host),
            Kernel::Simulated => Err(HostError::SystemWithoutSysfs),
        }
    }

    /// The host below `root`: a container's view of its node, or a simulated tree.
    ///
    /// # Errors
    /// When `root` has no `sys`.
    pub fn at(root: impl Into<PathBuf>) -> Result<Self, HostError> {
        let root = root.into();
        // The writer runs in another directory: a relative root would mean another place there.
        let root = std::path::absolute(&root).unwrap_or(root);
        let path = root.join("sys");
        let kind = match statfs(&path) {
            Ok(stat) => stat.filesystem_type(),
            Err(errno) => return Err(HostError::NoSys { root, path, source: errno.into() }),
        };
        let kernel = if kind == SYSFS_MAGIC { Kernel::Real } else { Kernel::Simulated };
        Ok(Self { root, kernel })
    }

    /// The root that all paths are below; `/` for the system itself.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Which kernel answers here.
    #[must_use]
    pub fn kernel(&self) -> Kernel {
        self.kernel
    }

    /// A path below `/sys`.
    #[must_use]
    pub fn sys(&self, below: &str) -> PathBuf {
        self.root.join("sys").join(below)
    }

    /// A path below `/dev`.
    #[must_use]
    pub fn dev(&self, below: &str) -> PathBuf {
        self.root.join("dev").join(below)
    }

    /// A path below `/proc`.
    #[must_use]
    pub fn proc(&self, below: &str) -> PathBuf {
        self.root.join("proc").join(below)
    }

    /// A path below `/lib/modules`.
    #[must_use]
    pub fn modules(&self, below: &str) -> PathBuf {
        self.root.join("lib/modules").join(below)
    }

    /// The sysfs directory of a function.
    #[must_use]
    pub fn function_dir(&self, address: Address) -> PathBuf {
        self.sys("bus/pci/devices").join(address.to_string())
    }

    /// The host's boot ID (`/proc/sys/kernel/random/boot_id`): another one means that the node was restarted.
    /// A tree without one has never booted: empty.
    #[must_use]
    pub fn boot_id(&self) -> String {
        self.read(&self.proc("sys/kernel/random/boot_id")).unwrap_or_default().trim().to_owned()
    }

    /// Reads a file of the kernel's as text (lossy: a kernel string is bytes).
    ///
    /// # Errors
    /// With path and cause.
    pub fn read(&self, path: &Path) -> Result<String, ReadError> {
        let bytes = fs::read(path).map_err(|e| ReadError::new("read", path, &e))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Reads the first `most` bytes of a file of the kernel's.
    ///
    /// # Errors
    /// With path and cause.
    pub fn bytes(&self, path: &Path, most: usize) -> Result<Vec<u8>, ReadError> {
        let failed = |e: io::Error| ReadError::new("read", path, &e);
        let mut bytes = Vec::new();
        let file = fs::File::open(path).map_err(failed)?;
        file.take(u64::try_from(most).unwrap_or(u64::MAX)).read_to_end(&mut bytes).map_err(failed)?;
        Ok(bytes)
    }

    /// As [`Host::read`], with nothing for a file that is not there.
    ///
    /// # Errors
    /// With path and cause, for any failure but absence.
    pub fn read_if_there(&self, path: &Path) -> Result<Option<String>, ReadError> {
        match self.read(path) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The names in a directory, sorted.
    ///
    /// # Errors
    /// With path and cause.
    pub fn list(&self, path: &Path) -> Result<Vec<String>, ReadError> {
        let failed = |e: io::Error| ReadError::new("list", path, &e);
        let mut names = fs::read_dir(path)
            .map_err(failed)?
            .map(|entry| entry.map(|e| e.file_name().to_string_lossy().into_owned()))
            .collect::<Result<Vec<_>, _>>()
            .map_err(failed)?;
        names.sort();
        Ok(names)
    }

    /// The last component of what a link points to, or nothing where there is no link.
    ///
    /// # Errors
    /// With path and cause, for any failure but absence.
    pub fn link_name(&self, path: &Path) -> Result<Option<String>, ReadError> {
        match fs::read_link(path) {
            Ok(target) => Ok(target.file_name().map(|name| name.to_string_lossy().into_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(ReadError::new("follow", path, &error)),
        }
    }

    /// Whether there is something at `path`, links followed. What cannot be looked at counts as there.
    #[must_use]
    pub fn exists(&self, path: &Path) -> bool {
        !matches!(fs::metadata(path), Err(error) if error.kind() == io::ErrorKind::NotFound)
    }

    /// Where `path` leads with all links followed, as the host names it (`/sys/devices/...`, without the root), or nothing
    /// where it leads nowhere.
    ///
    /// # Errors
    /// With path and cause, for any failure but absence.
    pub fn real_path(&self, path: &Path) -> Result<Option<PathBuf>, ReadError> {
        let failed = |e: io::Error| ReadError::new("follow", path, &e);
        let root = fs::canonicalize(&self.root).map_err(failed)?;
        match fs::canonicalize(path) {
            Ok(real) => {
                Ok(Some(real.strip_prefix(&root).map_or(real.clone(), |below| Path::new("/").join(below))))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed(error)),
        }
    }

    /// Which device the node at `path` (or the open file behind a `/proc/PID/fd` link) is, or nothing where it is no
    /// device: not there, or a file of another kind.
    ///
    /// # Errors
    /// With path and cause, for any failure but absence.
    pub fn node_id(&self, path: &Path) -> Result<Option<NodeId>, ReadError> {
        match fs::metadata(path) {
            Ok(meta) if meta.file_type().is_char_device() => Ok(Some(NodeId::Character(meta.rdev()))),
            Ok(meta) if meta.is_file() && self.kernel == Kernel::Simulated => {
                Ok(Some(NodeId::File(meta.dev(), meta.ino())))
            }
            Ok(_) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(ReadError::new("look at", path, &error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_tree_is_simulated_and_the_machines_sysfs_is_real() {
        let tree = tempfile::tempdir().unwrap();
        fs::create_dir(tree.path().join("sys")).unwrap();
        assert_eq!(Host::at(tree.path()).unwrap().kernel(), Kernel::Simulated);
        assert_eq!(Host::at("/").unwrap().kernel(), Kernel::Real);
    }

    #[test]
    fn a_root_without_sys_is_no_host() {
        let tree = tempfile::tempdir().unwrap();
        let error = Host::at(tree.path()).unwrap_err();
        let text = reason::chain(&error);
        assert!(text.contains("sys") && text.contains("--root"), "{text}");
        assert_eq!(text.matches("No such file").count(), 1, "{text}");
        assert_eq!((error.code(), error.retryable()), (Code::NoHost, false));
    }
}
