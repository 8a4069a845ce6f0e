//! Opening what lies below a root that is not this process's own.
//!
//! A node's files name each other by absolute links (`/lib/modules -> /usr/lib/modules`, Debian's `modprobe.d`). Followed as they
//! stand they would leave the root and lead into the container's own files. The kernel resolves below a root by itself
//! (openat2(2), `RESOLVE_IN_ROOT`, since Linux 5.6); where that call is missing or a seccomp filter forbids it, the same is
//! done here a component at a time.

use std::{
    ffi::OsString,
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Component, Path, PathBuf},
    sync::{Arc, OnceLock},
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, OpenHow, ResolveFlag, open, openat, openat2, readlinkat},
    sys::{
        stat::Mode,
        statfs::{PROC_SUPER_MAGIC, fstatfs},
    },
};

/// As many links are followed as the kernel follows (`MAXSYMLINKS`, include/linux/namei.h).
const MOST_LINKS: usize = 40;

/// How often the kernel is asked anew when a rename anywhere on the node disturbed it (EAGAIN).
const ATTEMPTS: usize = 16;

/// A root.
#[derive(Debug, Clone)]
pub(super) struct Root {
    path: PathBuf,
    /// The root held open, once it was needed; none for one that is opened each time.
    held: Option<OnceLock<Arc<OwnedFd>>>,
    /// Whether the kernel resolves; else it is done here.
    by_kernel: bool,
}

impl Root {
    pub(super) fn at(root: &Path) -> io::Result<Self> {
        let dir = open_root(root)?;
        let by_kernel = in_root(dir.as_fd(), Path::new("."), OFlag::O_PATH | OFlag::O_CLOEXEC).is_ok();
        Ok(Self { path: root.to_owned(), held: Some(OnceLock::new()), by_kernel })
    }

    /// The same root, opened anew for each look.
    pub(super) fn unheld(&self) -> Self {
        Self { held: None, ..self.clone() }
    }

    fn dir(&self) -> io::Result<Arc<OwnedFd>> {
        let Some(held) = &self.held else { return Ok(Arc::new(open_root(&self.path)?)) };
        if let Some(dir) = held.get() {
            return Ok(Arc::clone(dir));
        }
        let dir = Arc::new(open_root(&self.path)?);
        Ok(Arc::clone(held.get_or_init(|| dir)))
    }

    /// Opens what `path` leads to, with `/` and `..` ending at the root. A magic link (`/proc/PID/fd/N`, `/proc/PID/root`), which
    /// is no path, is refused with EXDEV.
    pub(super) fn open(&self, path: &Path, flags: OFlag) -> io::Result<OwnedFd> {
        let flags = flags | OFlag::O_CLOEXEC;
        let dir = self.dir()?;
        if self.by_kernel {
            // An empty path is none to the kernel.
            let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
            for _ in 0..ATTEMPTS {
                match in_root(dir.as_fd(), path, flags) {
                    Err(Errno::EAGAIN) => {}
                    other => return Ok(other?),
                }
            }
        }
        open_by_steps(dir.as_fd(), path, flags)
    }

    /// Where `path` leads, from the root on.
    pub(super) fn real_path(&self, path: &Path) -> io::Result<PathBuf> {
        let way = walk(self.dir()?.as_fd(), path)?;
        Ok(Path::new("/").join(way.iter().map(|(name, _)| name).collect::<PathBuf>()))
    }
}

fn open_root(path: &Path) -> io::Result<OwnedFd> {
    Ok(open(path, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?)
}

fn open_by_steps(root: BorrowedFd<'_>, path: &Path, flags: OFlag) -> io::Result<OwnedFd> {
    let mut way = walk(root, path)?;
    let Some((name, found)) = way.pop() else {
        return Ok(openat(root, ".", flags, Mode::empty())?);
    };
    if flags.contains(OFlag::O_PATH) && !flags.contains(OFlag::O_DIRECTORY) {
        return Ok(found);
    }
    let parent = way.last().map_or(root, |(_, dir)| dir.as_fd());
    // Should a link have taken its place meanwhile, it is not followed.
    Ok(openat(parent, name.as_os_str(), flags | OFlag::O_NOFOLLOW, Mode::empty())?)
}

/// Each step of the way to where `path` leads: its name, and the file or directory itself, which no rename can change.
fn walk(root: BorrowedFd<'_>, path: &Path) -> io::Result<Vec<(OsString, OwnedFd)>> {
    let mut way: Vec<(OsString, OwnedFd)> = Vec::new();
    let mut ahead: Vec<OsString> = Vec::new();
    add(&mut ahead, path);
    let mut links = 0;
    while let Some(name) = ahead.pop() {
        if name == ".." {
            // Only a directory has one above it.
            if let Some((_, left)) = way.pop()
                && !File::from(left).metadata()?.is_dir()
            {
                return Err(Errno::ENOTDIR.into());
            }
            continue;
        }
        let here = way.last().map_or(root, |(_, dir)| dir.as_fd());
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let found = File::from(openat(here, name.as_os_str(), flags, Mode::empty())?);
        if !found.metadata()?.is_symlink() {
            way.push((name, found.into()));
            continue;
        }
        links += 1;
        if links > MOST_LINKS {
            return Err(Errno::ELOOP.into());
        }
        let target = PathBuf::from(readlinkat(&found, "")?);
        if is_magic(&found, &target)? {
            return Err(Errno::EXDEV.into());
        }
        if target.is_absolute() {
            way.clear();
        }
        add(&mut ahead, &target);
    }
    Ok(way)
}

fn in_root(dir: BorrowedFd<'_>, path: &Path, flags: OFlag) -> nix::Result<OwnedFd> {
    openat2(dir, path, OpenHow::new().flags(flags).resolve(ResolveFlag::RESOLVE_IN_ROOT))
}

/// Puts the components of `path` before those that are ahead. The last one is the next.
fn add(ahead: &mut Vec<OsString>, path: &Path) {
    for component in path.components().rev() {
        match component {
            Component::Normal(name) => ahead.push(name.to_owned()),
            Component::ParentDir => ahead.push("..".into()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
}

/// Whether a link of procfs leads to an open file rather than along a path: `pipe:[12]`, or an absolute path that is only a
/// description. Those of procfs that are paths are relative (`self`, `mounts`).
fn is_magic(link: &File, target: &Path) -> io::Result<bool> {
    let looks_so = target.is_absolute() || target.to_string_lossy().contains(":[");
    Ok(looks_so && fstatfs(link)?.filesystem_type() == PROC_SUPER_MAGIC)
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, create_dir_all},
        io::Read,
        os::unix::fs::symlink,
    };

    use proptest::prelude::*;
    use tempfile::TempDir;

    use super::*;

    /// A root opened both ways: by the kernel, and by steps.
    fn both(root: &Path) -> [Root; 2] {
        let by_steps = Root { by_kernel: false, ..Root::at(root).unwrap() };
        [Root::at(root).unwrap(), by_steps]
    }

    fn read(root: &Root, path: &str) -> Result<String, Option<i32>> {
        let file = root.open(Path::new(path), OFlag::O_RDONLY).map_err(|e| e.raw_os_error())?;
        let mut text = String::new();
        File::from(file).read_to_string(&mut text).map_err(|e| e.raw_os_error())?;
        Ok(text)
    }

    #[expect(clippy::disallowed_methods, reason = "a test's own file")]
    fn put(tree: &TempDir, path: &str, content: &str) {
        let path = tree.path().join(path);
        create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    #[test]
    fn links_end_below_the_root() {
        let tree = tempfile::tempdir().unwrap();
        put(&tree, "usr/lib/modules/6.12/modules.dep", "found");
        put(&tree, "etc/os-release", "of the node");
        create_dir_all(tree.path().join("lib")).unwrap();
        let link = |target: &str, at: &str| symlink(target, tree.path().join(at)).unwrap();
        link("/usr/lib/modules", "lib/modules");
        link("/etc/os-release", "release");
        link("../../../../../../etc/os-release", "lib/release");
        link("/etc/passwd", "passwd");
        link("/", "host");
        link("loop", "loop");
        for root in both(tree.path()) {
            for path in ["lib/modules/6.12/modules.dep", "host/host/lib/modules/6.12/modules.dep"] {
                assert_eq!(read(&root, path).as_deref(), Ok("found"), "{path}");
            }
            for path in
                ["release", "lib/release", "../../etc/os-release", "/etc/os-release", "./lib/../release"]
            {
                assert_eq!(read(&root, path).as_deref(), Ok("of the node"), "{path}");
            }
            assert_eq!(read(&root, "passwd"), Err(Some(Errno::ENOENT as i32)), "it is not the machine's own");
            assert_eq!(read(&root, "loop"), Err(Some(Errno::ELOOP as i32)));
            assert_eq!(read(&root, "etc/os-release/x"), Err(Some(Errno::ENOTDIR as i32)));
            let real = |path: &str| root.real_path(Path::new(path)).unwrap();
            assert_eq!(real("host/lib/modules/6.12"), Path::new("/usr/lib/modules/6.12"));
            assert_eq!(real("host"), Path::new("/"));
            assert!(root.open(Path::new(""), OFlag::O_RDONLY | OFlag::O_DIRECTORY).is_ok());
            assert!(root.open(Path::new("host"), OFlag::O_PATH | OFlag::O_DIRECTORY).is_ok());
            assert!(root.open(Path::new("release"), OFlag::O_PATH | OFlag::O_DIRECTORY).is_err());
        }
    }

    /// What a descriptor of `/proc` leads to is no path: the machine's own `/proc` shows it, as it would below a root.
    #[test]
    fn magic_links_are_refused() {
        for root in both(Path::new("/proc")) {
            for path in ["self/root/etc/passwd", "self/cwd", "self/exe"] {
                assert_eq!(read(&root, path), Err(Some(Errno::EXDEV as i32)), "{path}");
            }
            assert!(read(&root, "self/comm").is_ok() && read(&root, "mounts").is_ok());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Whatever links a tree has, both ways come to the same.
        #[test]
        fn the_steps_do_as_the_kernel_does(
            links in prop::collection::vec(("[ab]{1,2}", "(/|(\\.\\./){1,3})?([abc]{1,2}|\\.\\.)(/[abc]{1,2}){0,2}"), 0..6),
            path in "([abc]{1,2}|\\.\\.)(/([abc]{1,2}|\\.\\.)){0,3}",
        ) {
            let tree = tempfile::tempdir().unwrap();
            put(&tree, "c/c", "inside");
            create_dir_all(tree.path().join("a/b")).unwrap();
            for (at, target) in &links {
                for dir in ["", "c", "a/b"] {
                    let _ = symlink(target, tree.path().join(dir).join(at));
                }
            }
            let [kernel, steps] = both(tree.path());
            let opened = |root: &Root| read(root, &path);
            prop_assert_eq!(opened(&kernel), opened(&steps));
        }
    }
}
