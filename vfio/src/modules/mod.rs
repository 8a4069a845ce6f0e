//! The kernel's modules: which are there, which can be loaded, and in which order.
//!
//! Read from the host's `/lib/modules/RELEASE`, never by calling its `modprobe`: an agent's container has none, and some hosts
//! have none. Modules are loaded by the writer (a write of a [`Load`]), from the host's own files.

mod alias;
mod choice;
mod conf;
mod file;
mod load;
mod name;
mod tree;

use std::{cell::OnceCell, collections::BTreeSet, path::PathBuf};

pub use choice::VfioDriver;
use conf::Conf;
pub use file::{BadModuleFile, ModuleFile, Packing};
pub use load::Load;
pub use name::{BadModuleName, ModuleName};
use reason::{Code, Coded};
use tree::Tree;

use crate::host::Host;

/// Whether a module is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Availability {
    /// It is part of the kernel's image.
    BuiltIn,
    /// It has been loaded.
    Loaded,
    /// It is not, and can be.
    Loadable,
    /// It is not, and cannot be.
    Absent(Absence),
}

/// Why a module cannot be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Absence {
    /// The kernel does not say which one it is.
    #[error(
        "which kernel runs is not known ({reason}), so its modules cannot be found; mount the host's /proc"
    )]
    NoRelease {
        /// Why not.
        reason: String,
    },
    /// The running kernel's modules are not there.
    #[error(
        "the running kernel's modules are not there ({reason}); mount the host's /lib/modules, or, after an update of the \
         kernel, restart the node"
    )]
    NoTree {
        /// Why not.
        reason: String,
    },
    /// The kernel came without it.
    #[error(
        "kernel {release} came without the module {module}: install the package that holds it, or another kernel"
    )]
    NotInTree {
        /// The module.
        module: ModuleName,
        /// The kernel.
        release: String,
    },
    /// Its file is not as it should be.
    #[error("the module's file cannot be loaded: {reason}")]
    File {
        /// Why not.
        reason: String,
    },
    /// `modprobe.d` has a command run in its place. vfiod runs no command of a file.
    #[error(
        "{file} has a command run instead of loading {module} (install {module} {command}): load it yourself, or take the \
         line out", file = file.display()
    )]
    InstallCommand {
        /// The module.
        module: ModuleName,
        /// The file.
        file: PathBuf,
        /// The command.
        command: String,
    },
    /// The kernel's command line forbids it.
    #[error(
        "the kernel's command line forbids {module} (module_blacklist=): take it out there and restart the node"
    )]
    ForbiddenAtBoot {
        /// The module.
        module: ModuleName,
    },
    /// Another module that it needs cannot be had.
    #[error("{module} needs {needed}: {because}")]
    Needs {
        /// The module.
        module: ModuleName,
        /// What it needs.
        needed: ModuleName,
        /// Why that cannot be had.
        because: Box<Absence>,
    },
}

impl Coded for Absence {
    fn code(&self) -> Code {
        match self {
            Self::NoRelease { .. } => Code::KernelUnknown,
            Self::NoTree { .. } => Code::NoModuleDirectory,
            Self::NotInTree { .. } => Code::NoSuchModule,
            Self::File { .. } => Code::ModuleFile,
            Self::InstallCommand { .. } => Code::InstallCommand,
            Self::ForbiddenAtBoot { .. } => Code::ForbiddenAtBoot,
            Self::Needs { because, .. } => because.code(),
        }
    }

    /// It does not pass with nothing changed by people.
    fn retryable(&self) -> bool {
        match self {
            Self::NoRelease { .. }
            | Self::NoTree { .. }
            | Self::NotInTree { .. }
            | Self::File { .. }
            | Self::InstallCommand { .. }
            | Self::ForbiddenAtBoot { .. } => false,
            Self::Needs { because, .. } => because.retryable(),
        }
    }
}

/// A host's modules at one moment. Each file is read when it is first asked about, and once.
#[derive(Debug)]
pub struct Modules {
    host: Host,
    release: Result<String, Absence>,
    loaded: BTreeSet<ModuleName>,
    built_in: OnceCell<BTreeSet<ModuleName>>,
    tree: OnceCell<Result<Tree, Absence>>,
    conf: OnceCell<Conf>,
    /// The `vfio_pci:` aliases: pattern and module.
    aliases: OnceCell<Result<Vec<(String, String)>, String>>,
}

impl Modules {
    /// The modules of `host`.
    #[must_use]
    pub fn of(host: &Host) -> Self {
        Self {
            host: host.clone(),
            release: release(host),
            loaded: loaded(&host.read(&host.proc("modules")).unwrap_or_default()),
            built_in: OnceCell::new(),
            tree: OnceCell::new(),
            conf: OnceCell::new(),
            aliases: OnceCell::new(),
        }
    }

    /// Which of the four it is.
    #[must_use]
    pub fn availability(&self, module: &ModuleName) -> Availability {
        if let Some(presence) = self.presence(module) {
            return presence;
        }
        match self.loads(module) {
            Ok(_) => Availability::Loadable,
            Err(absence) => Availability::Absent(absence),
        }
    }

    /// The modules to load, in order, so that `module` is there. Empty where it is.
    ///
    /// # Errors
    /// When it cannot be had.
    pub fn loads(&self, module: &ModuleName) -> Result<Vec<Load>, Absence> {
        let mut walk = load::Walk::new(self);
        walk.need(module)?;
        Ok(walk.end())
    }

    /// The directory of a module's PCI driver below `/sys/bus/pci/drivers`, in whichever spelling.
    #[must_use]
    pub fn driver_directory(&self, module: &ModuleName) -> Option<String> {
        driver_directory(&self.host, module)
    }

    /// Whether the module is there now.
    #[must_use]
    pub fn present(&self, module: &ModuleName) -> bool {
        self.presence(module).is_some()
    }

    /// How the module is there: built in or loaded.
    fn presence(&self, module: &ModuleName) -> Option<Availability> {
        if self.loaded.contains(module) {
            return Some(Availability::Loaded);
        }
        let dir = self.host.sys("module").join(module.as_str());
        if self.host.is_dir(&dir) {
            // Only modules that were loaded have an initstate (kernel/module/sysfs.c); those with parameters have the directory
            // even when built in (kernel/params.c, `param_sysfs_builtin`).
            return match self.host.read_if_there(&dir.join("initstate")) {
                Ok(None) => Some(Availability::BuiltIn),
                Ok(Some(state)) if state.trim() == "going" => None,
                _ => Some(Availability::Loaded),
            };
        }
        // A driver that no module is listed for is built in.
        if self.driver_directory(module).is_some() || self.built_in().contains(module) {
            return Some(Availability::BuiltIn);
        }
        None
    }

    fn host(&self) -> &Host {
        &self.host
    }

    fn built_in(&self) -> &BTreeSet<ModuleName> {
        self.built_in.get_or_init(|| match &self.release {
            // What cannot be read says nothing of built-in modules: the module then has to have a file.
            Ok(release) => tree::built_in(&self.host, release).unwrap_or_default(),
            Err(_) => BTreeSet::new(),
        })
    }

    fn tree(&self) -> Result<&Tree, Absence> {
        let read = || Tree::read(&self.host, self.release.as_deref().map_err(Absence::clone)?);
        self.tree.get_or_init(read).as_ref().map_err(Absence::clone)
    }

    fn conf(&self) -> &Conf {
        self.conf.get_or_init(|| {
            let soft = self.release.as_ref().ok();
            let soft = soft.map(|release| self.host.modules(release).join("modules.softdep"));
            Conf::read(&self.host, soft.as_deref())
        })
    }

    /// The `vfio_pci:` aliases of `modules.alias` and `modules.builtin.modinfo`, or why the former cannot be had.
    fn aliases(&self) -> &Result<Vec<(String, String)>, String> {
        self.aliases.get_or_init(|| {
            let release = self.release.as_ref().map_err(ToString::to_string)?;
            let dir = self.host.modules(release);
            let read = |name: &str| self.host.read(&dir.join(name));
            let modules = read("modules.alias").map_err(|error| error.to_string())?;
            let built_in = read("modules.builtin.modinfo").unwrap_or_default();
            let all = alias::of_modules(&modules).chain(alias::of_built_in(&built_in));
            Ok(all.map(|(pattern, module)| (pattern.to_owned(), module.to_owned())).collect())
        })
    }
}

/// The directory of a module's PCI driver below `/sys/bus/pci/drivers`: modules and drivers differ in `_` and `-`.
#[must_use]
pub fn driver_directory(host: &Host, module: &ModuleName) -> Option<String> {
    let names = host.list(&host.sys("bus/pci/drivers")).unwrap_or_default();
    names.into_iter().find(|name| module.is(name))
}

/// The running kernel (`uname -r`), as `/proc/sys/kernel/osrelease` below the root has it.
fn release(host: &Host) -> Result<String, Absence> {
    let text = host
        .read(&host.proc("sys/kernel/osrelease"))
        .map_err(|error| Absence::NoRelease { reason: error.to_string() })?;
    let release = text.trim();
    if release.is_empty() || release.contains('/') || release.starts_with('.') {
        return Err(Absence::NoRelease { reason: format!("{release:?} is no kernel's release") });
    }
    Ok(release.to_owned())
}

/// The modules that `/proc/modules` lists and that are not on their way out (fifth field `Unloading`).
fn loaded(text: &str) -> BTreeSet<ModuleName> {
    text.lines()
        .filter_map(|line| {
            let mut fields = line.split(' ');
            let module = ModuleName::new(fields.next()?).ok()?;
            (fields.nth(3) != Some("Unloading")).then_some(module)
        })
        .collect()
}
