//! A simulated kernel's modules: a module directory laid for tests, and what a load does.

use std::{collections::BTreeMap, io, path::Path};

use nix::errno::Errno;

use super::{drivers, tree, tree::Tree};
use crate::{
    host::Host,
    modules::{Availability, ModuleName, Modules, driver_directory},
};

/// The modules of a node: what lies below `/lib/modules/RELEASE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModuleTree {
    /// The kernel's release (`uname -r`).
    pub release: String,
    /// Files below the release's directory, each with the files that it needs, as a line of `modules.dep` has them.
    pub files: Vec<(String, Vec<String>)>,
    /// Lines of `modules.alias`; none for no such file.
    pub aliases: Option<Vec<String>>,
    /// Lines of `modules.builtin`.
    pub built_in: Vec<String>,
    /// Lines of `modules.softdep`.
    pub soft: Vec<String>,
}

impl ModuleTree {
    /// A distribution's kernel: vfio and Grace's variant as packed modules, with Debian's names and dependencies.
    #[must_use]
    pub fn distribution() -> Self {
        let vfio = "kernel/drivers/vfio/vfio.ko.xz";
        let core = "kernel/drivers/vfio/pci/vfio-pci-core.ko.xz";
        let bypass = "kernel/virt/lib/irqbypass.ko.xz";
        let file = |name: &str, needs: &[&str]| {
            (name.to_owned(), needs.iter().map(|need| (*need).to_owned()).collect())
        };
        Self {
            release: "6.12.95+deb12-amd64".to_owned(),
            files: vec![
                file(bypass, &[]),
                file(vfio, &[]),
                file("kernel/drivers/vfio/vfio_iommu_type1.ko.xz", &[vfio]),
                file(core, &[vfio, bypass]),
                file("kernel/drivers/vfio/pci/vfio-pci.ko.xz", &[core, vfio, bypass]),
                file("kernel/drivers/vfio/pci/nvgrace-gpu/nvgrace-gpu-vfio-pci.ko.xz", &[core, vfio, bypass]),
            ],
            aliases: Some(vec![
                "alias vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci".to_owned(),
                "alias vfio_pci:v000010DEd00002342sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci".to_owned(),
                "alias vfio_pci:v000010DEd00002941sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci".to_owned(),
            ]),
            built_in: Vec::new(),
            soft: vec!["softdep vfio post: vfio_iommu_type1 vfio_iommu_spapr_tce".to_owned()],
        }
    }

    /// A kernel that has these drivers built in and no module beside them: what a profile's node has, unless it is given
    /// other modules. Only the aliases of vfio drivers are in it.
    #[must_use]
    pub(super) fn of_drivers(drivers: &[String]) -> Self {
        let all = Self::distribution();
        let there = |line: &&String| {
            let module = line.rsplit(' ').next().and_then(|name| ModuleName::new(name).ok());
            module.is_some_and(|module| drivers.iter().any(|driver| module.is(driver)))
        };
        let aliases = all.aliases.iter().flatten().filter(there).cloned().collect();
        Self {
            release: all.release,
            files: Vec::new(),
            aliases: Some(aliases),
            built_in: Vec::new(),
            soft: Vec::new(),
        }
    }

    /// Lays it below `root`, as the running kernel's.
    pub(super) fn lay(&self, root: &Path) -> io::Result<()> {
        let dir = root.join("lib/modules").join(&self.release);
        tree::put(&root.join("proc/sys/kernel/osrelease"), &format!("{}\n", self.release))?;
        let lines = |lines: &[String]| lines.iter().map(|line| format!("{line}\n")).collect::<String>();
        let dependencies: Vec<_> = self
            .files
            .iter()
            .map(|(file, needs)| {
                [format!("{file}:")].into_iter().chain(needs.clone()).collect::<Vec<_>>().join(" ")
            })
            .collect();
        tree::put(&dir.join("modules.dep"), &lines(&dependencies))?;
        tree::put(&dir.join("modules.builtin"), &lines(&self.built_in))?;
        tree::put(&dir.join("modules.softdep"), &lines(&self.soft))?;
        let path = dir.join("modules.alias");
        match &self.aliases {
            Some(aliases) => tree::put(&path, &lines(aliases))?,
            None => tree::remove(&path)?,
        }
        self.files.iter().try_for_each(|(file, _)| tree::put(&dir.join(file), ""))
    }
}

/// Loads a module: EEXIST where it is there, ENOENT where something it needs is not (an unknown symbol); else its directory,
/// its parameters, and its driver's directory come. Says the driver that is there now.
pub(super) fn load(tree: &Tree, module: &ModuleName, options: &str) -> Result<Option<String>, Errno> {
    let host = tree.host();
    let eio = |_: io::Error| Errno::EIO;
    let modules = Modules::of(host);
    if matches!(modules.availability(module), Availability::Loaded | Availability::BuiltIn) {
        return Err(Errno::EEXIST);
    }
    let missing = modules.loads(module).map_err(|_| Errno::ENOENT)?;
    if missing.iter().any(|load| load.required && load.module != *module) {
        return Err(Errno::ENOENT);
    }
    let dir = host.sys("module").join(module.as_str());
    let options: BTreeMap<_, _> =
        options.split_whitespace().map(|option| option.split_once('=').unwrap_or((option, "Y"))).collect();
    for (name, value) in options {
        tree::put(&dir.join("parameters").join(name), &format!("{value}\n")).map_err(eio)?;
    }
    tree::put(&dir.join("initstate"), "live\n").map_err(eio)?;
    let list = host.proc("modules");
    let before = host.read(&list).unwrap_or_default();
    tree::put(&list, &format!("{module} 16384 0 - Live 0x0000000000000000\n{before}")).map_err(eio)?;
    let driver = drivers::of_module(module);
    if let Some(driver) = &driver {
        lay_driver(host.root(), driver).map_err(eio)?;
    }
    Ok(driver)
}

/// A driver's directory, with nothing bound.
pub(super) fn lay_driver(root: &Path, driver: &str) -> io::Result<()> {
    let dir = root.join("sys/bus/pci/drivers").join(driver);
    tree::put(&dir.join("bind"), "")?;
    tree::put(&dir.join("unbind"), "")
}

/// Forgets what was loaded, as a start of the node does. What a profile laid as its drivers counts as loaded at boot.
pub(super) fn forget_loaded(host: &Host) -> io::Result<()> {
    let list = host.proc("modules");
    let text = host.read_if_there(&list).map_err(io::Error::other)?.unwrap_or_default();
    for module in text.lines().filter_map(|line| ModuleName::new(line.split(' ').next()?).ok()) {
        tree::remove_dir(&host.sys("module").join(module.as_str()))?;
        if let Some(driver) = driver_directory(host, &module) {
            tree::remove_dir(&host.sys("bus/pci/drivers").join(driver))?;
        }
    }
    tree::remove(&list)
}
