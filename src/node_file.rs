//! Where a node keeps its pci.ids, and reading it so that nothing of it can fail the agent. What the names decide is in
//! [`decide::names`].

use std::{
    fs::File,
    io::{self, Read},
    path::{Component, Path, PathBuf},
};

use decide::names::{Names, Prefer, pci_ids};
use reason::{Code, Coded};
use vfio::host::Host;

/// Where distributions put the file: Debian and SUSE, then Fedora and RHEL (`hwdata`).
pub const USUAL_PATHS: [&str; 2] = ["/usr/share/misc/pci.ids", "/usr/share/hwdata/pci.ids"];

/// The largest file read, in bytes: ten times today's.
const LARGEST_FILE: u64 = 16 << 20;

/// Names, and how the node's file fared.
#[derive(Debug)]
pub struct Loaded {
    /// The names: the built-in ones alone where no file could be used.
    pub names: Names,
    /// The file used, below the root.
    pub file: Option<PathBuf>,
    /// Files that are there and could not be used, and an explicit one that is not there. For the log; each says what
    /// holds instead.
    pub warnings: Vec<NodeFileWarning>,
}

/// A pci.ids file that was passed over. The built-in names and, if there is one, the next usual file hold.
#[derive(Debug, thiserror::Error)]
pub enum NodeFileWarning {
    /// The file that the config names is not there.
    #[error("no pci.ids at {path}, the built-in names hold: correct names.file, or leave it out", path = path.display())]
    Missing {
        /// The path below the root.
        path: PathBuf,
    },
    /// The file, or a link to it, could not be read.
    #[error("cannot read {path}, its names are passed over: make it readable to the agent", path = path.display())]
    Read {
        /// The path below the root.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A directory, pipe, socket or device.
    #[error("{path} is not a plain file, its names are passed over: put a pci.ids file there", path = path.display())]
    NotAFile {
        /// The path below the root.
        path: PathBuf,
    },
    /// Too large to be a pci.ids.
    #[error("{path} has {size} bytes, more than the {LARGEST_FILE} that a pci.ids may have, and is passed over: put a pci.ids file there", path = path.display())]
    TooLarge {
        /// The path below the root.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
    },
    /// Not one device in it.
    #[error("no device is named in {path}, it is passed over: is it a pci.ids file?", path = path.display())]
    NoNames {
        /// The path below the root.
        path: PathBuf,
    },
}

impl Coded for NodeFileWarning {
    fn code(&self) -> Code {
        Code::NamesFile
    }

    fn retryable(&self) -> bool {
        match self {
            // A file may be put there, or put right, at any time: it is read anew with the next config.
            Self::Missing { .. }
            | Self::Read { .. }
            | Self::NotAFile { .. }
            | Self::TooLarge { .. }
            | Self::NoNames { .. } => false,
        }
    }
}

/// Names for `host`: the built-in ones and those of `explicit`, or else of the first of [`USUAL_PATHS`] that can be used.
///
/// Paths are the host's own, so they are looked for below its root, and so is what they link to (Debian's file has been a
/// link to /var/lib/pciutils). Never fails: a usual file that is missing is normal, and one that cannot be used becomes a
/// warning. Synchronous; reads at most 16 MiB.
#[must_use]
pub fn load(host: &Host, explicit: Option<&Path>, prefer: Prefer) -> Loaded {
    let mut warnings = Vec::new();
    let usual = USUAL_PATHS.map(Path::new);
    let candidates: &[&Path] = match &explicit {
        Some(path) => &[path],
        None => &usual,
    };
    for candidate in candidates {
        match read(host, candidate) {
            Ok(Some((file, text))) => {
                return Loaded { names: Names::with_node_file(&text, prefer), file: Some(file), warnings };
            }
            Ok(None) if explicit.is_some() => {
                warnings.push(NodeFileWarning::Missing { path: below(host.root(), candidate) });
            }
            Ok(None) => {}
            Err(warning) => warnings.push(warning),
        }
    }
    Loaded { names: Names::builtin(), file: None, warnings }
}

/// `path` of the host, below `root`. A `..` at the start cannot lead out: it is dropped, as the kernel does at `/`.
fn below(root: &Path, path: &Path) -> PathBuf {
    let mut inner = PathBuf::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => inner.push(name),
            Component::ParentDir => {
                inner.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    root.join(inner)
}

/// The file at the host's `path` with its text; `None` when it is not there.
fn read(host: &Host, path: &Path) -> Result<Option<(PathBuf, String)>, NodeFileWarning> {
    let shown = below(host.root(), path);
    match host.plain_file(&shown) {
        Ok(Some(file)) => text(file, &shown).map(|text| Some((shown, text))),
        Ok(None) => Err(NodeFileWarning::NotAFile { path: shown }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(NodeFileWarning::Read { path: shown, source }),
    }
}

fn text(file: File, path: &Path) -> Result<String, NodeFileWarning> {
    let unreadable = |source| NodeFileWarning::Read { path: path.to_owned(), source };
    let size = file.metadata().map_err(unreadable)?.len();
    if size > LARGEST_FILE {
        return Err(NodeFileWarning::TooLarge { path: path.to_owned(), size });
    }
    let mut bytes = Vec::new();
    file.take(LARGEST_FILE).read_to_end(&mut bytes).map_err(unreadable)?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    if pci_ids::entries(&text).next().is_none() {
        return Err(NodeFileWarning::NoNames { path: path.to_owned() });
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::disallowed_methods, reason = "lays out a node's files for the test")]

    use std::{
        fs,
        os::unix::{fs::symlink, net::UnixListener},
    };

    use tempfile::TempDir;

    use super::*;

    const TEXT: &[u8] = b"10de  NVIDIA\n\tfff0  From the node \xe9\n";

    fn node() -> TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("sys")).unwrap();
        root
    }

    fn host(root: &TempDir) -> Host {
        Host::at(root.path()).unwrap()
    }

    fn put(root: &Path, path: &str, bytes: &[u8]) {
        let path = below(root, Path::new(path));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    fn name(loaded: &Loaded) -> Option<&str> {
        loaded.names.device(0x10de, 0xfff0)
    }

    #[test]
    fn no_file_is_no_trouble() {
        let root = node();
        let loaded = load(&host(&root), None, Prefer::NodeFile);
        assert!(loaded.warnings.is_empty() && loaded.file.is_none());
        assert_eq!(loaded.names, Names::builtin());
    }

    #[test]
    fn the_usual_files_in_their_order() {
        let root = node();
        put(root.path(), USUAL_PATHS[1], TEXT);
        let loaded = load(&host(&root), None, Prefer::BuiltIn);
        assert_eq!(name(&loaded), Some("From the node \u{fffd}"));
        assert_eq!(loaded.file, Some(root.path().join("usr/share/hwdata/pci.ids")));

        put(root.path(), USUAL_PATHS[0], b"10de  NVIDIA\n\tfff0  First");
        assert_eq!(name(&load(&host(&root), None, Prefer::BuiltIn)), Some("First"));
    }

    #[test]
    fn garbage_is_a_warning_and_the_next_file_is_used() {
        let root = node();
        put(root.path(), USUAL_PATHS[0], b"<html>\x00\xff</html>");
        put(root.path(), USUAL_PATHS[1], TEXT);
        let loaded = load(&host(&root), None, Prefer::BuiltIn);
        assert!(matches!(loaded.warnings.as_slice(), [NodeFileWarning::NoNames { .. }]), "{loaded:?}");
        assert!(name(&loaded).is_some());
    }

    #[test]
    fn an_explicit_file_is_the_only_one_and_missed() {
        let root = node();
        put(root.path(), USUAL_PATHS[0], TEXT);
        put(root.path(), "/etc/vfiod/pci.ids", b"10de  NVIDIA\n\tfff0  Ours\n");
        let loaded = load(&host(&root), Some(Path::new("/etc/vfiod/pci.ids")), Prefer::BuiltIn);
        assert_eq!(name(&loaded), Some("Ours"));

        let loaded = load(&host(&root), Some(Path::new("/etc/typo")), Prefer::BuiltIn);
        assert_eq!(name(&loaded), None);
        let warning = loaded.warnings.first().unwrap().to_string();
        assert!(warning.starts_with("no pci.ids at ") && warning.contains("names.file"), "{warning}");
    }

    #[test]
    fn links_stay_below_the_root() {
        let root = node();
        put(root.path(), "/var/lib/pciutils/pci.ids", TEXT);
        fs::create_dir_all(root.path().join("usr/share/misc")).unwrap();
        let link = root.path().join("usr/share/misc/pci.ids");
        for target in ["/var/lib/pciutils/pci.ids", "../../../var/lib/pciutils/pci.ids"] {
            symlink(target, &link).unwrap();
            assert!(name(&load(&host(&root), None, Prefer::BuiltIn)).is_some(), "{target}");
            fs::remove_file(&link).unwrap();
        }
        symlink("pci.ids", &link).unwrap();
        let loaded = load(&host(&root), None, Prefer::BuiltIn);
        assert!(matches!(loaded.warnings.as_slice(), [NodeFileWarning::Read { .. }]), "{loaded:?}");
    }

    #[test]
    fn what_is_no_plain_file_is_never_opened() {
        let root = node();
        fs::create_dir_all(root.path().join("usr/share/misc")).unwrap();
        let _socket = UnixListener::bind(root.path().join("usr/share/misc/pci.ids")).unwrap();
        fs::create_dir_all(root.path().join("usr/share/hwdata/pci.ids")).unwrap();
        let loaded = load(&host(&root), None, Prefer::BuiltIn);
        let all_refused = loaded.warnings.iter().all(|w| matches!(w, NodeFileWarning::NotAFile { .. }));
        assert!(all_refused && loaded.warnings.len() == 2, "{loaded:?}");
    }

    #[test]
    fn a_file_beyond_any_sense_is_not_read() {
        let root = node();
        put(root.path(), USUAL_PATHS[0], TEXT);
        let file =
            fs::OpenOptions::new().write(true).open(root.path().join("usr/share/misc/pci.ids")).unwrap();
        file.set_len(LARGEST_FILE + 1).unwrap();
        let loaded = load(&host(&root), None, Prefer::BuiltIn);
        assert!(matches!(loaded.warnings.as_slice(), [NodeFileWarning::TooLarge { .. }]), "{loaded:?}");
    }
}
