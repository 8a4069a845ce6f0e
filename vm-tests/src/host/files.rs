//! File operations whose errors say what was done to which file.
#![allow(
    clippy::disallowed_methods,
    reason = "a test harness that writes below its own cache and temporary folders"
)]

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A file operation failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {path} (if the disk is full or it is another user's, XDG_CACHE_HOME moves the lab's cache)", path = path.display())]
pub struct FileError {
    action: &'static str,
    path: PathBuf,
    source: io::Error,
}

impl FileError {
    /// An operation that this module has no function for.
    #[must_use]
    pub fn new(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self { action, path: path.to_owned(), source }
    }
}

fn on<T>(action: &'static str, path: &Path, result: io::Result<T>) -> Result<T, FileError> {
    result.map_err(|source| FileError::new(action, path, source))
}

/// Reads a whole file.
pub fn read(path: &Path) -> Result<Vec<u8>, FileError> {
    on("read", path, fs::read(path))
}

/// Reads a file as text; bytes that are none are replaced (a console prints anything).
pub fn read_text(path: &Path) -> Result<String, FileError> {
    read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// Writes a whole file.
pub fn write(path: &Path, content: impl AsRef<[u8]>) -> Result<(), FileError> {
    on("write", path, fs::write(path, content))
}

/// Creates an empty file, or opens an old one, for use as a lock or as a program's output.
pub fn create(path: &Path) -> Result<fs::File, FileError> {
    on("create", path, fs::OpenOptions::new().write(true).create(true).truncate(false).open(path))
}

/// Creates a folder and all above it.
pub fn create_dir(path: &Path) -> Result<(), FileError> {
    on("create", path, fs::create_dir_all(path))
}

/// Renames a file or folder.
pub fn rename(from: &Path, to: &Path) -> Result<(), FileError> {
    on("put in place", to, fs::rename(from, to))
}

/// Removes a folder with all in it.
pub fn remove_dir(path: &Path) -> Result<(), FileError> {
    on("remove", path, fs::remove_dir_all(path))
}

/// The paths in a folder, sorted.
pub fn list(path: &Path) -> Result<Vec<PathBuf>, FileError> {
    let entries = on("list", path, fs::read_dir(path))?;
    let mut paths = on("list", path, entries.map(|e| e.map(|e| e.path())).collect::<io::Result<Vec<_>>>())?;
    paths.sort();
    Ok(paths)
}

/// Takes an exclusive lock; it goes when the file is dropped, or with the process.
pub fn lock(file: &fs::File, path: &Path) -> Result<(), FileError> {
    on("lock", path, file.lock())
}
