//! Where a host's kernel is met: its four roots, and how they are read. Writing goes through [`crate::child`].
//!
//! Below another root than `/`, no link leaves it.

mod below;
#[cfg(test)]
mod tests;

use std::{
    fmt,
    fs::{self, File},
    io::{self, Read},
    os::{
        fd::OwnedFd,
        unix::fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
    sync::Arc,
};

use below::Root;
use nix::{
    dir::Dir,
    errno::Errno,
    fcntl::{OFlag, open, openat, readlinkat},
    sys::{
        stat::Mode,
        statfs::{SYSFS_MAGIC, fstatfs},
    },
};
use reason::{Code, Coded};

use crate::pci::Address;

/// Which kernel answers below a root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// The `sys` below the root is a sysfs: the running kernel answers.
    Real,
    /// It is a plain directory tree: the simulated kernel answers writes, or refuses each where the build has none.
    Simulated,
}

/// A host: the places where its kernel shows and takes things, all below one root.
#[derive(Clone)]
pub struct Host {
    root: PathBuf,
    kernel: Kernel,
    /// The root where it is not this process's own; else paths are what they are.
    other: Option<Arc<Root>>,
}

/// Two are the same that have the same root.
impl PartialEq for Host {
    fn eq(&self, other: &Self) -> bool {
        (&self.root, self.kernel) == (&other.root, other.kernel)
    }
}

impl Eq for Host {}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host").field("root", &self.root).field("kernel", &self.kernel).finish()
    }
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
        let no_sys = |source| HostError::NoSys { root: root.clone(), path: path.clone(), source };
        let is_own = root.parent().is_none();
        let other = if is_own { None } else { Some(Arc::new(Root::at(&root).map_err(no_sys)?)) };
        let mut host = Self { root: root.clone(), kernel: Kernel::Simulated, other };
        // Nothing is held open before the first look: a child closes what it inherited, after its host was made.
        let sys = host.unheld().open(&path, OFlag::O_PATH).map_err(no_sys)?;
        let kind = fstatfs(sys).map_err(|errno| no_sys(errno.into()))?.filesystem_type();
        if kind == SYSFS_MAGIC {
            host.kernel = Kernel::Real;
        }
        Ok(host)
    }

    /// The same host, with nothing of it held open between two looks. Another root than `/` is held open else: a process that
    /// may be left behind, blocked in the kernel, shall not keep a mount.
    #[must_use]
    pub fn unheld(&self) -> Self {
        Self { other: self.other.as_ref().map(|root| Arc::new(root.unheld())), ..self.clone() }
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

    /// Opens what `path` leads to, links followed and none of them out of the root.
    fn open(&self, path: &Path, flags: OFlag) -> io::Result<OwnedFd> {
        match &self.other {
            None => Ok(open(path, flags | OFlag::O_CLOEXEC, Mode::empty())?),
            // What is not below the root is the host's own spelling.
            Some(root) => root.open(path.strip_prefix(&self.root).unwrap_or(path), flags),
        }
    }

    /// Opens the directory that holds `path`, so that the link `path` itself can be looked at.
    fn open_parent(&self, path: &Path) -> io::Result<OwnedFd> {
        self.open(path.parent().unwrap_or(path), OFlag::O_PATH | OFlag::O_DIRECTORY)
    }

    /// Opens a file of the kernel's, to be written or to be read by the kernel itself: for the writer's child alone.
    pub(crate) fn open_for(&self, path: &Path, access: OFlag) -> io::Result<File> {
        self.open(path, access).map(File::from)
    }

    /// Reads a file of the kernel's as text (lossy: a kernel string is bytes).
    ///
    /// # Errors
    /// With path and cause.
    pub fn read(&self, path: &Path) -> Result<String, ReadError> {
        let bytes = self.bytes(path, usize::MAX)?;
        Ok(String::from_utf8(bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
    }

    /// Reads the first `most` bytes of a file of the kernel's.
    ///
    /// # Errors
    /// With path and cause.
    pub fn bytes(&self, path: &Path, most: usize) -> Result<Vec<u8>, ReadError> {
        let failed = |e: io::Error| ReadError::new("read", path, &e);
        let file = File::from(self.open(path, OFlag::O_RDONLY).map_err(failed)?);
        let mut bytes = Vec::new();
        file.take(u64::try_from(most).unwrap_or(u64::MAX)).read_to_end(&mut bytes).map_err(failed)?;
        Ok(bytes)
    }

    /// Opens a plain file for reading; nothing where `path` leads to something else (a pipe would block, a device may act), which
    /// is not opened.
    ///
    /// # Errors
    /// As the system has it.
    pub fn plain_file(&self, path: &Path) -> io::Result<Option<File>> {
        if !File::from(self.open(path, OFlag::O_PATH)?).metadata()?.is_file() {
            return Ok(None);
        }
        // Should something else have taken its place meanwhile, the open does not wait for it.
        let file = File::from(self.open(path, OFlag::O_RDONLY | OFlag::O_NONBLOCK)?);
        Ok(file.metadata()?.is_file().then_some(file))
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
        let directory = self.open(path, OFlag::O_RDONLY | OFlag::O_DIRECTORY).map_err(failed)?;
        let mut names = Dir::from_fd(directory)
            .map_err(|errno| failed(errno.into()))?
            .into_iter()
            .map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()))
            .filter(|name| !matches!(name.as_deref(), Ok("." | "..")))
            .collect::<Result<Vec<_>, Errno>>()
            .map_err(|errno| failed(errno.into()))?;
        names.sort();
        Ok(names)
    }

    /// What a link points to, or nothing where there is no link.
    ///
    /// # Errors
    /// With path and cause, for any failure but absence.
    pub fn link(&self, path: &Path) -> Result<Option<PathBuf>, ReadError> {
        let target = match (path.file_name(), &self.other) {
            (Some(name), Some(_)) => {
                self.open_parent(path).and_then(|parent| Ok(PathBuf::from(readlinkat(parent, name)?)))
            }
            _ => fs::read_link(path),
        };
        match target {
            Ok(target) => Ok(Some(target)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(ReadError::new("follow", path, &error)),
        }
    }

    /// The last component of what a link points to, or nothing where there is no link.
    ///
    /// # Errors
    /// As [`Host::link`].
    pub fn link_name(&self, path: &Path) -> Result<Option<String>, ReadError> {
        let target = self.link(path)?;
        Ok(target.and_then(|target| Some(target.file_name()?.to_string_lossy().into_owned())))
    }

    /// Checks that there is something at `path`, links followed.
    ///
    /// # Errors
    /// With path and cause.
    pub fn look_at(&self, path: &Path) -> Result<(), ReadError> {
        self.open(path, OFlag::O_PATH).map(drop).map_err(|error| ReadError::new("look at", path, &error))
    }

    /// Whether there is something at `path`, links followed. What cannot be looked at counts as there.
    #[must_use]
    pub fn exists(&self, path: &Path) -> bool {
        match self.open(path, OFlag::O_PATH) {
            Ok(_) => true,
            Err(error) => !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory),
        }
    }

    /// Whether `path` leads to a directory.
    #[must_use]
    pub fn is_dir(&self, path: &Path) -> bool {
        self.open(path, OFlag::O_PATH | OFlag::O_DIRECTORY).is_ok()
    }

    /// Where `path` leads with all links followed, as the host names it (`/sys/devices/...`, without the root), or nothing
    /// where it leads nowhere.
    ///
    /// # Errors
    /// With path and cause, for any failure but absence.
    pub fn real_path(&self, path: &Path) -> Result<Option<PathBuf>, ReadError> {
        let real = match &self.other {
            None => fs::canonicalize(path),
            Some(root) => root.real_path(path.strip_prefix(&self.root).unwrap_or(path)),
        };
        match real {
            Ok(real) => Ok(Some(real)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(ReadError::new("follow", path, &error)),
        }
    }

    /// Which device the node at `path` (or the open file behind a `/proc/PID/fd` link) is, or nothing where it is no
    /// device: not there, or a file of another kind.
    ///
    /// # Errors
    /// With path and cause, for any failure but absence.
    pub fn node_id(&self, path: &Path) -> Result<Option<NodeId>, ReadError> {
        match self.metadata(path) {
            Ok(meta) if meta.file_type().is_char_device() => Ok(Some(NodeId::Character(meta.rdev()))),
            Ok(meta) if meta.is_file() && self.kernel == Kernel::Simulated => {
                Ok(Some(NodeId::File(meta.dev(), meta.ino())))
            }
            Ok(_) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(ReadError::new("look at", path, &error)),
        }
    }

    /// What `path` leads to.
    ///
    /// A descriptor of a real process (`/proc/PID/fd/N`) is the open file itself, under whatever path, if any, in whatever mount
    /// namespace: resolving below the root refuses it. So its directory is resolved below the root, and the link then followed
    /// as the kernel means it.
    fn metadata(&self, path: &Path) -> io::Result<fs::Metadata> {
        let Some(_) = &self.other else { return fs::metadata(path) };
        let directory = path.parent().and_then(Path::file_name);
        match path.file_name() {
            Some(name) if directory.is_some_and(|dir| dir == "fd") && self.kernel == Kernel::Real => {
                let parent = self.open_parent(path)?;
                File::from(openat(parent, name, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?).metadata()
            }
            _ => File::from(self.open(path, OFlag::O_PATH)?).metadata(),
        }
    }
}
