//! Replaces a file as a whole: whoever reads it, and whatever crashes when, finds the old content or the new, never a part.
//!
//! The only module of the agent that writes files (the host's kernel is written to by the `vfio` library alone).

use std::{
    fs::{self, File, Permissions},
    io::{self, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use reason::{Code, Coded};
use tempfile::Builder;

/// What the new file's name begins and ends with until it is in place.
const TEMPORARY: (&str, &str) = (".vfiod-", ".tmp");

/// A file that could not be replaced or read. After a failed [`replace`] the old content is there still, unless the
/// variant says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum AtomicFileError {
    /// The path ends in `/`, `.` or `..`, or is empty.
    #[error("cannot write {path}: it names no file; give a path that ends in a file's name", path = path.display())]
    NoFileName {
        /// The path given.
        path: PathBuf,
    },
    /// The new file could not be created beside the old one.
    #[error("cannot create a file in {directory} to replace {path}: the directory must be there and writable by the agent", path = path.display(), directory = directory.display())]
    Create {
        /// The file to replace.
        path: PathBuf,
        /// Its directory.
        directory: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The new content, its mode, or its way to the disk failed.
    #[error("cannot write the new content of {path}: is there room and no error on its file system?", path = path.display())]
    Write {
        /// The file to replace.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The new file could not take the old one's place.
    #[error("cannot put the new {path} in place: is there a directory or a mount at that path?", path = path.display())]
    Rename {
        /// The file to replace.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The new content is in place, but a power cut may bring the old one back.
    #[error("{path} is written, but its directory {directory} cannot be brought to the disk: check the file system for errors", path = path.display(), directory = directory.display())]
    SyncDirectory {
        /// The file replaced.
        path: PathBuf,
        /// Its directory.
        directory: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A file that is there could not be read.
    #[error("cannot read {path}: it must be a plain file, readable by the agent", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

impl Coded for AtomicFileError {
    fn code(&self) -> Code {
        Code::StateFile
    }

    fn retryable(&self) -> bool {
        match self {
            Self::NoFileName { .. } => false,
            Self::Create { .. }
            | Self::Write { .. }
            | Self::Rename { .. }
            | Self::SyncDirectory { .. }
            | Self::Read { .. } => true,
        }
    }
}

/// Removes what replacements that were killed on their way have left in `directory`. Says how many files that were; one
/// that cannot be removed does no harm.
///
/// The caller has the lock of all writers: nobody replaces a file there now.
pub fn sweep(directory: &Path) -> usize {
    let entries = fs::read_dir(directory).into_iter().flatten().filter_map(Result::ok);
    let left = entries.filter(|entry| {
        let name = entry.file_name();
        name.to_str().is_some_and(|name| name.starts_with(TEMPORARY.0) && name.ends_with(TEMPORARY.1))
    });
    left.filter(|entry| fs::remove_file(entry.path()).is_ok()).count()
}

/// Makes `bytes` the whole content of the file at `path`, with exactly `mode` (permission bits, the umask plays no part).
///
/// Returns when content and name are on the disk. The new file is made beside the old one under a name that starts
/// with a dot and ends in `.tmp`, so that no reader of `*.json` or `*.yaml` takes it for one of its own; it is removed when
/// a step fails. A symbolic link at `path` is replaced, not followed.
///
/// # Errors
///
/// [`AtomicFileError`], by step. The content is the old one, except for [`AtomicFileError::SyncDirectory`].
pub fn replace(path: &Path, bytes: &[u8], mode: u32) -> Result<(), AtomicFileError> {
    if path.file_name().is_none() || path.as_os_str().as_encoded_bytes().ends_with(b"/") {
        return Err(AtomicFileError::NoFileName { path: path.to_owned() });
    }
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let written = |source| AtomicFileError::Write { path: path.to_owned(), source };

    let mut file =
        Builder::new().prefix(TEMPORARY.0).suffix(TEMPORARY.1).tempfile_in(directory).map_err(|source| {
            AtomicFileError::Create { path: path.to_owned(), directory: directory.to_owned(), source }
        })?;
    file.write_all(bytes).map_err(written)?;
    file.as_file().set_permissions(Permissions::from_mode(mode & 0o7777)).map_err(written)?;
    file.as_file().sync_all().map_err(written)?;
    file.persist(path)
        .map_err(|refused| AtomicFileError::Rename { path: path.to_owned(), source: refused.error })?;
    File::open(directory).and_then(|directory| directory.sync_all()).map_err(|source| {
        AtomicFileError::SyncDirectory { path: path.to_owned(), directory: directory.to_owned(), source }
    })
}

/// The content of the file at `path`; `None` when there is none.
///
/// # Errors
///
/// [`AtomicFileError::Read`] for everything else: what cannot be read is not the same as what is not there.
pub fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>, AtomicFileError> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(AtomicFileError::Read { path: path.to_owned(), source }),
    }
}

#[cfg(test)]
mod tests {
    use std::{error::Error, os::unix::fs::symlink};

    use super::*;

    fn listing(directory: &Path) -> Vec<String> {
        fs::read_dir(directory).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn content_and_mode_are_replaced_whole_and_nothing_is_left_beside() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.json");
        assert_eq!(read_if_there(&path).unwrap(), None);
        replace(&path, b"a longer first content", 0o600).unwrap();
        replace(&path, b"second", 0o666).unwrap();
        assert_eq!(read_if_there(&path).unwrap().as_deref(), Some(&b"second"[..]));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o666, "whatever the umask");
        assert_eq!(listing(dir.path()), ["journal.json"]);
    }

    #[test]
    fn what_a_killed_replacement_left_is_swept_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.json");
        replace(&path, b"content", 0o600).unwrap();
        let kept =
            Builder::new().prefix(".vfiod-").suffix(".tmp").tempfile_in(dir.path()).unwrap().keep().unwrap();
        assert!(kept.1.exists());
        assert_eq!((sweep(dir.path()), listing(dir.path())), (1, vec!["journal.json".to_owned()]));
        assert_eq!(sweep(&dir.path().join("nowhere")), 0);
    }

    #[test]
    fn a_link_is_replaced_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("spec.yaml"), dir.path().join("other"));
        replace(&other, b"other", 0o644).unwrap();
        symlink(&other, &path).unwrap();
        replace(&path, b"new", 0o644).unwrap();
        assert_eq!(read_if_there(&other).unwrap().as_deref(), Some(&b"other"[..]));
        assert_eq!(read_if_there(&path).unwrap().as_deref(), Some(&b"new"[..]));
    }

    #[test]
    fn a_missing_directory_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("none/state.json");
        let error = replace(&path, b"x", 0o600).unwrap_err();
        let shown = dir.path().display();
        assert_eq!(
            error.to_string(),
            format!(
                "cannot create a file in {shown}/none to replace {shown}/none/state.json: the directory must be there \
                 and writable by the agent"
            )
        );
        assert!(error.source().is_some_and(|source| source.to_string().contains("No such file")));
        assert_eq!(read_if_there(&path).unwrap(), None);
    }

    #[test]
    fn a_directory_that_takes_no_files_is_named() {
        // Root writes where the mode forbids it, so a directory of /proc stands for the read-only one.
        let error = replace(Path::new("/proc/self/state.json"), b"x", 0o600).unwrap_err();
        assert!(matches!(error, AtomicFileError::Create { .. }), "{error:?}");
        assert!(error.to_string().starts_with("cannot create a file in /proc/self "), "{error}");
    }

    #[test]
    fn a_failed_step_leaves_neither_damage_nor_a_temporary_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.json");
        fs::create_dir(&path).unwrap();
        let error = replace(&path, b"x", 0o600).unwrap_err();
        assert!(matches!(error, AtomicFileError::Rename { .. }), "{error:?}");
        assert_eq!(listing(dir.path()), ["state.json"]);
        assert!(matches!(read_if_there(&path), Err(AtomicFileError::Read { .. })));
    }

    #[test]
    fn a_path_without_a_file_name_is_refused() {
        for path in ["", "/", "..", "state/"] {
            let error = replace(Path::new(path), b"x", 0o600).unwrap_err();
            assert!(matches!(error, AtomicFileError::NoFileName { .. }), "{path:?}: {error:?}");
        }
    }
}
