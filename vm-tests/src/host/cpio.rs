//! Writes the archive that the kernel unpacks as its first root file system (cpio, "newc" form).

use std::collections::BTreeSet;
use std::path::{Component, Path};

const FILE: u32 = 0o100_000;
const DIRECTORY: u32 = 0o040_000;
const SYMLINK: u32 = 0o120_000;

/// An archive in the making. Folders above an entry are put in by themselves.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    folders: BTreeSet<String>,
    entries: u32,
}

impl Archive {
    /// Adds a file that anybody may run (the guest has one user).
    pub fn file(&mut self, path: &str, content: &[u8]) {
        self.folders_above(path);
        self.entry(path, FILE | 0o755, content);
    }

    /// Adds a symbolic link.
    pub fn symlink(&mut self, path: &str, target: &str) {
        self.folders_above(path);
        self.entry(path, SYMLINK | 0o777, target.as_bytes());
    }

    /// Adds an empty folder.
    pub fn folder(&mut self, path: &str) {
        self.folders_above(path);
        if self.folders.insert(path.trim_start_matches('/').to_owned()) {
            self.entry(path, DIRECTORY | 0o755, &[]);
        }
    }

    /// The finished archive.
    #[must_use]
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn folders_above(&mut self, path: &str) {
        let parent = Path::new(path).parent().map(Path::to_owned).unwrap_or_default();
        let mut above = String::new();
        for part in parent.components().filter(|c| matches!(c, Component::Normal(_))) {
            above = format!("{above}/{}", part.as_os_str().to_string_lossy());
            if self.folders.insert(above.trim_start_matches('/').to_owned()) {
                self.entry(&above, DIRECTORY | 0o755, &[]);
            }
        }
    }

    /// The kernel's Documentation/driver-api/early-userspace/buffer-format.rst has the fields.
    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) {
        let name = path.trim_start_matches('/');
        self.entries += 1;
        // Files over 4 GiB cannot be said in this form; the lab's are a thousandth of that.
        let size = u32::try_from(content.len()).unwrap_or(u32::MAX);
        let name_size = u32::try_from(name.len() + 1).unwrap_or(u32::MAX);
        let (inode, links) = (self.entries, 1);
        let fields = [inode, mode, 0, 0, links, 0, size, 0, 0, 0, 0, name_size, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_come_before_what_is_in_them_and_once() {
        let mut archive = Archive::default();
        archive.file("/a/b/c", b"12345");
        archive.file("/a/b/d", b"");
        let bytes = archive.finish();
        let text = String::from_utf8(bytes.clone()).unwrap();
        let names: Vec<_> =
            text.split("070701").skip(1).map(|e| e[104..].split('\0').next().unwrap()).collect();
        assert_eq!(names, ["a", "a/b", "a/b/c", "a/b/d", "TRAILER!!!"]);
        assert_eq!(bytes.len() % 4, 0);
        assert!(text.contains("c\u{0}12345\u{0}\u{0}\u{0}070701"), "content is padded to four bytes");
    }
}
