//! Unix socket files: who made this one, bind a fresh one, remove only one's own.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use reason::{Code, Coded};
use tokio::net::UnixListener;

/// The longest path of a unix socket, in bytes (`sun_path` has 108, one is the terminating zero).
pub const MAX_PATH: usize = 107;

/// Which file a path names. A file made anew under the same name has another identity, also where the file
/// system gives the inode number of the old one again: the time of change tells them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketId {
    device: u64,
    inode: u64,
    changed: (i64, i64),
}

impl SocketId {
    fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// The identity of what is at `path`, `None` where nothing is, or nothing that can be looked at.
    #[must_use]
    pub fn at(path: &Path) -> Option<Self> {
        fs::symlink_metadata(path).ok().map(|metadata| Self::of(&metadata))
    }

    /// Whether both are the same file, whatever was done to it (mode, owner) in between.
    #[must_use]
    pub fn same_file(&self, other: &Self) -> bool {
        (self.device, self.inode) == (other.device, other.inode)
    }
}

/// Why a socket could not be served.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The path does not fit into a socket address.
    #[error(
        "the socket path {path} has {length} bytes, a unix socket takes {MAX_PATH}: use a shorter kubelet directory"
    )]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Its length in bytes.
        length: usize,
    },
    /// The directory is not there: the kubelet makes it at its first start.
    #[error(
        "the directory {path} does not exist: has the kubelet been started on this node, is the directory mounted?"
    )]
    NoDirectory {
        /// The directory.
        path: PathBuf,
    },
    /// Something that is no socket has the name.
    #[error("{path} is in the way and is not a socket: remove it")]
    InTheWay {
        /// The path.
        path: PathBuf,
    },
    /// An old socket could not be removed.
    #[error("cannot remove the old socket {path}: vfiod must be able to write in its directory")]
    Remove {
        /// The socket.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The socket could not be bound.
    #[error("cannot listen on {path}: vfiod must be able to write in its directory")]
    Bind {
        /// The socket.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

impl Coded for SocketError {
    fn code(&self) -> Code {
        match self {
            Self::PathTooLong { .. } => Code::SocketPathTooLong,
            Self::NoDirectory { .. } => Code::SocketNoDirectory,
            Self::InTheWay { .. } => Code::SocketInTheWay,
            Self::Remove { .. } => Code::SocketRemove,
            Self::Bind { .. } => Code::SocketBind,
        }
    }

    fn retryable(&self) -> bool {
        match self {
            Self::NoDirectory { .. } | Self::Remove { .. } | Self::Bind { .. } => true,
            Self::PathTooLong { .. } | Self::InTheWay { .. } => false,
        }
    }
}

/// A listening socket, and the file that it made.
#[derive(Debug)]
pub struct Bound {
    /// The listener.
    pub listener: UnixListener,
    /// The file. Gone or another one: nobody new can reach the listener any more.
    pub id: SocketId,
}

/// Removes a socket left over at `path` and listens there.
///
/// # Errors
/// See [`SocketError`]. Must be called within a tokio runtime.
pub fn bind(path: &Path) -> Result<Bound, SocketError> {
    let length = path.as_os_str().as_bytes().len();
    if length > MAX_PATH {
        return Err(SocketError::PathTooLong { path: path.to_path_buf(), length });
    }
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.file_type().is_socket() => fs::remove_file(path)
            .or_else(absent_is_fine)
            .map_err(|source| SocketError::Remove { path: path.to_path_buf(), source })?,
        Ok(_) => return Err(SocketError::InTheWay { path: path.to_path_buf() }),
        // Whatever else is wrong with the path, bind says it better.
        Err(_) => {}
    }
    let listener = UnixListener::bind(path).map_err(|source| {
        let directory = path.parent().unwrap_or(path);
        if source.kind() == io::ErrorKind::NotFound {
            SocketError::NoDirectory { path: directory.to_path_buf() }
        } else {
            SocketError::Bind { path: path.to_path_buf(), source }
        }
    })?;
    let id = fs::symlink_metadata(path)
        .map(|metadata| SocketId::of(&metadata))
        .map_err(|source| SocketError::Bind { path: path.to_path_buf(), source })?;
    Ok(Bound { listener, id })
}

/// Removes the socket at `path` if it still is the file `id`; another one's socket is left alone.
///
/// # Errors
/// [`SocketError::Remove`].
pub fn remove_own(path: &Path, id: &SocketId) -> Result<(), SocketError> {
    if SocketId::at(path).is_some_and(|there| there.same_file(id)) {
        fs::remove_file(path)
            .or_else(absent_is_fine)
            .map_err(|source| SocketError::Remove { path: path.to_path_buf(), source })?;
    }
    Ok(())
}

fn absent_is_fine(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_anothers_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        let first = bind(&path).unwrap();
        let second = bind(&path).unwrap();
        // The old owner's goodbye must not take the new owner's socket away.
        drop(first.listener);
        if !first.id.same_file(&second.id) {
            remove_own(&path, &first.id).unwrap();
        }
        assert!(SocketId::at(&path).is_some());
        remove_own(&path, &second.id).unwrap();
        assert!(SocketId::at(&path).is_none());
        remove_own(&path, &second.id).unwrap();
    }

    #[tokio::test]
    async fn errors_say_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file.sock");
        fs::create_dir(&file).unwrap();
        assert_eq!(bind(&file).unwrap_err().code(), Code::SocketInTheWay);
        let missing = bind(&dir.path().join("no/such.sock")).unwrap_err();
        assert_eq!(missing.code(), Code::SocketNoDirectory);
        assert!(missing.retryable());
        let long = bind(&dir.path().join("x".repeat(MAX_PATH))).unwrap_err();
        assert_eq!(long.code(), Code::SocketPathTooLong);
        assert!(!long.retryable());
    }
}
