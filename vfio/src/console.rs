//! The kernel's own console: which functions it may be shown on.
//!
//! fbcon draws the virtual consoles on framebuffer devices (drivers/video/fbdev/core/fbcon.c). It is one console driver for
//! all of them: `/sys/class/vtconsole/vtconN` has its name, "frame buffer device", and whether the consoles are bound to it
//! (`show_name`, `show_bind`, drivers/tty/vt/vt.c). Which console is on which framebuffer (`con2fb_map`) only an ioctl on a
//! framebuffer tells, and which of them people look at nothing tells: with several framebuffers each of them counts.
//!
//! A driver that is unbound takes its framebuffer away under the console, and messages of the kernel are lost from then on;
//! some drivers do not come back from that.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, io,
    path::Path,
};

use serde::Serialize;

use crate::{
    host::{Host, ReadError},
    pci::Address,
    printable::printable,
};

/// How fbcon calls itself (`fbcon_startup`), after `(S)` or `(M)` for built in or module.
const FBCON: &str = "frame buffer device";

/// The console on a function.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Console {
    /// The function's framebuffers (`fb0`).
    pub framebuffers: BTreeSet<String>,
    /// The console driver that may draw on them (`vtcon1`).
    pub vtconsole: String,
}

/// All functions that the kernel's console may be shown on.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Consoles {
    /// Those known, each with what it has.
    pub by_function: BTreeMap<Address, Console>,
    /// Why there may be others.
    pub unknown: Option<String>,
}

impl fmt::Display for Console {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let framebuffers: Vec<_> = self.framebuffers.iter().map(String::as_str).collect();
        write!(f, "the kernel's console ({}) may be on its {}", self.vtconsole, framebuffers.join(", "))
    }
}

/// Reads on which functions of `host` the kernel's console may be.
#[must_use]
pub fn consoles(host: &Host) -> Consoles {
    let mut found = Consoles::default();
    let Some(vtconsole) = bound(host, &mut found.unknown) else { return found };
    let dir = host.sys("class/graphics");
    let names = match host.list(&dir) {
        Ok(names) => names,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => {
            note(&mut found.unknown, &error);
            return found;
        }
    };
    let mut framebuffers = names.into_iter().filter(|name| is_framebuffer(name)).peekable();
    if framebuffers.peek().is_none() {
        // A kernel without CONFIG_FB_DEVICE has framebuffers and lists none.
        found.unknown.get_or_insert_with(|| {
            format!("the kernel's console ({vtconsole}) is on a framebuffer that /sys/class/graphics does not list")
        });
    }
    for name in framebuffers {
        match function(host, &dir.join(&name)) {
            // One that is on no function has its place in memory: a boot framebuffer, which is looked for by that.
            Ok(None) => {}
            Ok(Some(address)) => {
                let console = found.by_function.entry(address).or_insert_with(|| Console {
                    framebuffers: BTreeSet::new(),
                    vtconsole: vtconsole.clone(),
                });
                console.framebuffers.insert(name);
            }
            Err(error) => note(&mut found.unknown, &error),
        }
    }
    found
}

/// The vtconsole that fbcon is, where consoles are bound to it. A kernel without virtual consoles has none.
fn bound(host: &Host, unknown: &mut Option<String>) -> Option<String> {
    let dir = host.sys("class/vtconsole");
    let names = match host.list(&dir) {
        Ok(names) => names,
        Err(error) => {
            if error.kind() != io::ErrorKind::NotFound {
                note(unknown, &error);
            }
            return None;
        }
    };
    let is_bound = |name: &String| {
        let text = |file: &str| host.read(&dir.join(name).join(file));
        match text("name") {
            // Anything but a clear no counts.
            Ok(called) => called.contains(FBCON) && text("bind").map_or(true, |bind| bind.trim() != "0"),
            Err(error) => {
                // Unloaded meanwhile.
                if error.kind() != io::ErrorKind::NotFound {
                    note(unknown, &error);
                }
                false
            }
        }
    };
    names.into_iter().find(is_bound).map(|name| printable(&name))
}

fn is_framebuffer(name: &str) -> bool {
    let number = name.strip_prefix("fb").unwrap_or_default();
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

/// The function that a framebuffer is of: the last one on the way to its device. A boot framebuffer's platform device is below
/// its function since Linux 6.9 (`sysfb_parent_dev`, drivers/firmware/sysfb.c).
fn function(host: &Host, framebuffer: &Path) -> Result<Option<Address>, ReadError> {
    let device = match host.real_path(&framebuffer.join("device"))? {
        Some(device) => Some(device),
        // A framebuffer without a parent is told by its own place.
        None => host.real_path(framebuffer)?,
    };
    Ok(device.and_then(|path| path.iter().rev().find_map(|name| name.to_str()?.parse().ok())))
}

fn note(unknown: &mut Option<String>, error: &ReadError) {
    unknown.get_or_insert_with(|| error.to_string());
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink, path::PathBuf};

    use proptest::prelude::*;
    use tempfile::TempDir;

    use super::*;

    struct Tree(TempDir);

    impl Tree {
        fn new() -> Self {
            let tree = tempfile::tempdir().unwrap();
            fs::create_dir(tree.path().join("sys")).unwrap();
            Self(tree)
        }

        #[expect(clippy::disallowed_methods, reason = "a test's own file")]
        fn put(&self, path: &str, content: impl AsRef<[u8]>) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }

        fn vtconsole(&self, number: u8, name: &str, bind: &str) {
            self.put(&format!("sys/class/vtconsole/vtcon{number}/name"), name);
            self.put(&format!("sys/class/vtconsole/vtcon{number}/bind"), bind);
        }

        /// A framebuffer as the kernel shows it: its directory below its device, with a link back to that.
        fn framebuffer(&self, number: u8, device: &str) {
            let dir: PathBuf = self.0.path().join(format!("sys/devices/{device}/graphics/fb{number}"));
            fs::create_dir_all(&dir).unwrap();
            symlink("../..", dir.join("device")).unwrap();
            let class = self.0.path().join("sys/class/graphics");
            fs::create_dir_all(class.join("fbcon")).unwrap();
            symlink(format!("../../devices/{device}/graphics/fb{number}"), class.join(format!("fb{number}")))
                .unwrap();
        }

        fn found(&self) -> Consoles {
            consoles(&Host::at(self.0.path()).unwrap())
        }

        fn functions(&self) -> Vec<String> {
            self.found().by_function.keys().map(ToString::to_string).collect()
        }
    }

    const GPU: &str = "pci0000:00/0000:00:01.0/0000:01:00.0";

    #[test]
    fn a_bound_fbcon_is_on_the_functions_of_all_framebuffers() {
        let tree = Tree::new();
        tree.vtconsole(0, "(S) dummy device\n", "0\n");
        tree.vtconsole(1, "(M) frame buffer device\n", "1\n");
        tree.framebuffer(0, GPU);
        let found = tree.found();
        let console = &found.by_function[&"0000:01:00.0".parse().unwrap()];
        assert_eq!(console.to_string(), "the kernel's console (vtcon1) may be on its fb0");
        assert_eq!((found.by_function.len(), found.unknown.as_deref()), (1, None));
        // Which of two the consoles are on is not known: both count. One below no function is a matter of the boot framebuffer.
        tree.framebuffer(1, "pci0000:40/0000:41:00.0/simple-framebuffer.0");
        tree.framebuffer(2, "platform/efi-framebuffer.0");
        assert_eq!(tree.functions(), ["0000:01:00.0", "0000:41:00.0"]);
        assert_eq!(tree.found().unknown, None);
    }

    #[test]
    fn a_console_that_is_not_on_fbcon_is_on_no_function() {
        let tree = Tree::new();
        assert_eq!(tree.found(), Consoles::default(), "no virtual consoles");
        tree.framebuffer(0, GPU);
        assert_eq!(tree.found(), Consoles::default());
        tree.vtconsole(0, "(S) VGA+\n", "1\n");
        tree.vtconsole(1, "(M) frame buffer device\n", "0\n");
        assert_eq!(tree.found(), Consoles::default());
        tree.vtconsole(1, "(M) frame buffer device\n", "yes\n");
        assert_eq!(tree.functions(), ["0000:01:00.0"], "only a clear no is one");
    }

    #[test]
    fn a_framebuffer_that_is_not_listed_is_not_known() {
        let tree = Tree::new();
        tree.vtconsole(1, "(S) frame buffer device\n", "1\n");
        assert!(tree.found().unknown.unwrap().contains("vtcon1"));
        tree.put("sys/class/graphics", "no directory");
        assert!(tree.found().unknown.unwrap().contains("class/graphics"));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_tree_is_survived(
            name in prop::collection::vec(any::<u8>(), 0..40),
            bind in prop::collection::vec(any::<u8>(), 0..8),
            framebuffers in prop::collection::vec("(fb)?[0-9a-z]{1,4}", 0..4),
            target in "[a-z0-9:./]{1,30}",
        ) {
            let tree = Tree::new();
            tree.put("sys/class/vtconsole/vtcon0/name", [name, b" frame buffer device".to_vec()].concat());
            tree.put("sys/class/vtconsole/vtcon0/bind", bind);
            let class = tree.0.path().join("sys/class/graphics");
            fs::create_dir_all(&class).unwrap();
            for framebuffer in framebuffers {
                let _ = symlink(&target, class.join(framebuffer));
            }
            let _ = tree.found();
        }
    }
}
