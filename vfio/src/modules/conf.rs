//! What the host's people say of modules: `modprobe.d` and the kernel's command line.
//!
//! Source: modprobe.d(5), and kmod's libkmod-config.c for what the page leaves open. What modprobe would not lose is not lost
//! here: an `allow_unsafe_interrupts=1` of a node without interrupt remapping, above all.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use super::ModuleName;
use crate::host::Host;

/// Where `modprobe.d` directories are, below the root. A file hides those of the same name in later directories.
const DIRECTORIES: [&str; 5] =
    ["etc/modprobe.d", "run/modprobe.d", "usr/local/lib/modprobe.d", "usr/lib/modprobe.d", "lib/modprobe.d"];

/// A command that shall be run instead of loading a module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Install {
    pub(super) file: PathBuf,
    pub(super) command: String,
}

/// Modules that are wanted beside another.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct SoftDependencies {
    pub(super) before: Vec<ModuleName>,
    pub(super) after: Vec<ModuleName>,
}

/// All of it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Conf {
    options: BTreeMap<ModuleName, Vec<String>>,
    installs: BTreeMap<ModuleName, Install>,
    soft: BTreeMap<ModuleName, SoftDependencies>,
    /// `module_blacklist=` on the command line: the kernel itself refuses these (kernel/module/main.c, `blacklisted`).
    forbidden: BTreeSet<ModuleName>,
    /// Files that could not be read.
    pub(super) unread: Vec<String>,
}

impl Conf {
    /// Reads what stands below `host`'s root; `soft` is the kernel's own `modules.softdep`.
    pub(super) fn read(host: &Host, soft: Option<&Path>) -> Self {
        let mut conf = Self::default();
        if let Some(path) = soft {
            conf.add_file(host, path);
        }
        // By name over all directories, as modprobe takes them: a later file's options come later and win.
        let mut files = BTreeMap::new();
        for directory in DIRECTORIES {
            let directory = host.root().join(directory);
            // Few nodes have all of these directories. A link to /dev/null masks a file (modprobe.d(5)): it is there, and empty.
            for name in host.list(&directory).unwrap_or_default() {
                if name.ends_with(".conf") {
                    let path = directory.join(&name);
                    files.entry(name).or_insert(path);
                }
            }
        }
        for path in files.values() {
            conf.add_file(host, path);
        }
        conf.add_command_line(&host.read(&host.proc("cmdline")).unwrap_or_default());
        conf
    }

    fn add_file(&mut self, host: &Host, path: &Path) {
        match host.read_if_there(path) {
            Ok(text) => self.add_text(path, &text.unwrap_or_default()),
            Err(error) => self.unread.push(error.to_string()),
        }
    }

    /// Adds the lines of one file.
    fn add_text(&mut self, file: &Path, text: &str) {
        for line in whole_lines(text) {
            let mut words = line.split_whitespace();
            let (Some(verb), Some(Ok(module))) = (words.next(), words.next().map(ModuleName::new)) else {
                continue;
            };
            match verb {
                "options" => self.options.entry(module).or_default().extend(words.map(str::to_owned)),
                "install" => {
                    let command = words.collect::<Vec<_>>().join(" ");
                    self.installs.entry(module).or_insert(Install { file: file.to_owned(), command });
                }
                "softdep" => self.add_soft(module, words),
                // `blacklist` is about loading by alias; modules named outright are loaded all the same. `alias`, `remove` and
                // `weakdep` do not concern a module that is named.
                _ => {}
            }
        }
    }

    fn add_soft<'a>(&mut self, module: ModuleName, words: impl Iterator<Item = &'a str>) {
        let soft = self.soft.entry(module).or_default();
        let mut list = None;
        for word in words {
            match (word, list) {
                ("pre:", _) => list = Some(true),
                ("post:", _) => list = Some(false),
                (name, Some(before)) => {
                    let list = if before { &mut soft.before } else { &mut soft.after };
                    list.extend(ModuleName::new(name));
                }
                (_, None) => {}
            }
        }
    }

    /// `MODULE.PARAMETER=VALUE` on the kernel's command line is for loadable modules as well: modprobe hands it on, after the
    /// options of `modprobe.d` (libkmod-config.c, `kmod_config_parse_kcmdline`).
    fn add_command_line(&mut self, text: &str) {
        for word in quoted_words(text) {
            if let Some(names) = word.strip_prefix("module_blacklist=") {
                self.forbidden.extend(names.split(',').filter_map(|name| ModuleName::new(name).ok()));
                continue;
            }
            let key = word.split('=').next().unwrap_or_default();
            let Some((module, _)) = key.split_once('.') else { continue };
            if let (Ok(module), Some(option)) = (ModuleName::new(module), word.get(module.len() + 1..)) {
                self.options.entry(module).or_default().push(option.to_owned());
            }
        }
    }

    /// The options of a module, as they are handed to the kernel.
    pub(super) fn options(&self, module: &ModuleName) -> String {
        self.options.get(module).map(|options| options.join(" ")).unwrap_or_default()
    }

    pub(super) fn install(&self, module: &ModuleName) -> Option<&Install> {
        self.installs.get(module)
    }

    pub(super) fn soft(&self, module: &ModuleName) -> Option<&SoftDependencies> {
        self.soft.get(module)
    }

    pub(super) fn forbidden(&self, module: &ModuleName) -> bool {
        self.forbidden.contains(module)
    }
}

/// The lines of a file, those that end in `\` joined with the next, without comments.
fn whole_lines(text: &str) -> impl Iterator<Item = String> {
    text.replace("\\\n", " ")
        .lines()
        .map(str::trim)
        .filter(|line| !line.starts_with('#'))
        .map(str::to_owned)
        .collect::<Vec<_>>()
        .into_iter()
}

/// The words of a command line; a quoted space divides nothing.
fn quoted_words(text: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quoted = false;
    for c in text.trim().chars() {
        match (c, words.last_mut()) {
            (c, _) if c.is_whitespace() && !quoted => words.push(String::new()),
            (c, Some(word)) => {
                quoted ^= c == '"';
                word.push(c);
            }
            (_, None) => {}
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    fn name(text: &str) -> ModuleName {
        ModuleName::new(text).unwrap()
    }

    #[test]
    fn lines_are_read_as_modprobe_reads_them() {
        let mut conf = Conf::default();
        conf.add_text(
            Path::new("/etc/modprobe.d/a.conf"),
            "# options vfio_iommu_type1 commented=1\n\
             options vfio_iommu_type1 allow_unsafe_interrupts=1\n\
             \t options vfio-iommu-type1  \\\n   dma_entry_limit=10 \n\
             options vfio-pci ids=10de:2236,10de:1aef disable_vga=1\n\
             blacklist vfio-pci\n\
             install nouveau /bin/false\n\
             softdep nvidia pre: vfio-pci drm post: nvidia_uvm\n\
             options\n\
             options ../evil x=1\n",
        );
        assert_eq!(conf.options(&name("vfio_iommu_type1")), "allow_unsafe_interrupts=1 dma_entry_limit=10");
        assert_eq!(conf.options(&name("vfio_pci")), "ids=10de:2236,10de:1aef disable_vga=1");
        assert_eq!(conf.options(&name("vfio")), "");
        assert!(conf.install(&name("vfio_pci")).is_none(), "a blacklisted module is loaded when it is named");
        let install = conf.install(&name("nouveau")).unwrap();
        assert_eq!((install.command.as_str(), install.file.ends_with("a.conf")), ("/bin/false", true));
        let soft = conf.soft(&name("nvidia")).unwrap();
        assert_eq!(soft.before, [name("vfio_pci"), name("drm")]);
        assert_eq!(soft.after, [name("nvidia_uvm")]);
    }

    #[test]
    fn the_command_line_speaks_to_modules_too() {
        let mut conf = Conf::default();
        conf.add_text(Path::new("/x.conf"), "options vfio_iommu_type1 allow_unsafe_interrupts=0\n");
        conf.add_command_line(
            "BOOT_IMAGE=/vmlinuz-6.12 root=UUID=1 vfio_iommu_type1.allow_unsafe_interrupts=1 vfio-pci.ids=10de:2236 \
             x.y=\"a b\" module_blacklist=nouveau,vfio-pci quiet\n",
        );
        assert_eq!(
            conf.options(&name("vfio_iommu_type1")),
            "allow_unsafe_interrupts=0 allow_unsafe_interrupts=1",
            "the kernel takes the last"
        );
        assert_eq!(conf.options(&name("vfio_pci")), "ids=10de:2236");
        assert_eq!(conf.options(&name("x")), "y=\"a b\"");
        assert!(conf.forbidden(&name("vfio_pci")) && !conf.forbidden(&name("vfio")));
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a test's own files")]
    fn an_earlier_directorys_file_hides_a_later_ones_and_names_are_in_order() {
        let tree = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = tree.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        fs::create_dir(tree.path().join("sys")).unwrap();
        put("etc/modprobe.d/50-vfio.conf", "options vfio_pci a=etc\n");
        put("run/modprobe.d/50-vfio.conf", "options vfio_pci a=run\n");
        put("usr/lib/modprobe.d/10-first.conf", "options vfio_pci b=first\n");
        put("lib/modprobe.d/90-last.conf", "options vfio_pci c=last\n");
        put("lib/modprobe.d/readme.txt", "options vfio_pci d=none\n");
        put("opt/real.conf", "options vfio_pci e=linked\n");
        let link = |target: &str, at: &str| symlink(target, tree.path().join(at)).unwrap();
        link("/opt/real.conf", "etc/modprobe.d/95-linked.conf");
        // Masked, as modprobe.d(5) has it.
        put("lib/modprobe.d/99-masked.conf", "options vfio_pci f=masked\n");
        link("/dev/null", "etc/modprobe.d/99-masked.conf");
        let conf = Conf::read(&Host::at(tree.path()).unwrap(), None);
        assert_eq!(conf.options(&name("vfio_pci")), "b=first a=etc c=last e=linked");
        assert!(conf.unread.is_empty(), "{:?}", conf.unread);
    }
}
