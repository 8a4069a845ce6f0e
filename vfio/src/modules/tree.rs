//! What lies below `/lib/modules/RELEASE`: which modules have a file, and which others each needs.

use std::collections::{BTreeMap, BTreeSet};

use super::{Absence, ModuleName};
use crate::host::{Host, ReadError};

/// A module with a file of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    /// Below `/lib/modules`.
    pub(super) file: String,
    /// The modules it needs, as `modules.dep` lists them: the last is loaded first.
    pub(super) needs: Vec<ModuleName>,
}

/// The modules of one kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tree {
    entries: BTreeMap<ModuleName, Entry>,
    release: String,
}

impl Tree {
    /// Reads `modules.dep` of the kernel `release`.
    pub(super) fn read(host: &Host, release: &str) -> Result<Self, Absence> {
        let path = host.modules(release).join("modules.dep");
        let text = host.read(&path).map_err(|source| Absence::NoTree { reason: source.to_string() })?;
        Ok(Self::parse(release, &text))
    }

    /// Lines `FILE: FILE...`, each file below the kernel's directory (or, from an odd depmod.d, absolute), all that a module
    /// needs being listed, directly or not. Source: modules.dep(5).
    fn parse(release: &str, text: &str) -> Self {
        let entry = |line: &str| {
            let (file, needs) = line.split_once(':')?;
            let entry = Entry {
                file: below_modules(release, file.trim()),
                needs: needs.split_whitespace().filter_map(ModuleName::of_file).collect(),
            };
            Some((ModuleName::of_file(file.trim())?, entry))
        };
        Self { entries: text.lines().filter_map(entry).collect(), release: release.to_owned() }
    }

    /// A module's file and needs.
    pub(super) fn entry(&self, module: &ModuleName) -> Result<&Entry, Absence> {
        self.entries
            .get(module)
            .ok_or_else(|| Absence::NotInTree { module: module.clone(), release: self.release.clone() })
    }
}

fn below_modules(release: &str, file: &str) -> String {
    let below = file.strip_prefix("/usr").unwrap_or(file).strip_prefix("/lib/modules/");
    // An absolute path elsewhere stays one, and the writer takes none such.
    below.map_or_else(
        || if file.starts_with('/') { file.to_owned() } else { format!("{release}/{file}") },
        str::to_owned,
    )
}

/// The modules that are part of the kernel's image: `modules.builtin`, one file name a line that no file bears.
///
/// # Errors
/// When the file is there and cannot be read. A kernel directory without one says nothing of built-in modules.
pub(super) fn built_in(host: &Host, release: &str) -> Result<BTreeSet<ModuleName>, ReadError> {
    let text = host.read_if_there(&host.modules(release).join("modules.builtin"))?;
    Ok(text.unwrap_or_default().lines().filter_map(ModuleName::of_file).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_found_wherever_they_lie() {
        let text = "kernel/drivers/vfio/pci/vfio-pci.ko.xz: kernel/drivers/vfio/pci/vfio-pci-core.ko.xz kernel/drivers/vfio/vfio.ko.xz\n\
                    /lib/modules/6.12/updates/nvidia.ko:\n/opt/odd.ko:\nnot a line\n";
        let tree = Tree::parse("6.12", text);
        let name = |text| ModuleName::new(text).unwrap();
        let vfio_pci = tree.entry(&ModuleName::vfio_pci()).unwrap();
        assert_eq!(vfio_pci.file, "6.12/kernel/drivers/vfio/pci/vfio-pci.ko.xz");
        assert_eq!(vfio_pci.needs, [name("vfio_pci_core"), name("vfio")]);
        assert_eq!(tree.entry(&name("nvidia")).unwrap().file, "6.12/updates/nvidia.ko");
        assert_eq!(tree.entry(&name("odd")).unwrap().file, "/opt/odd.ko");
        assert!(matches!(tree.entry(&name("nosuch")), Err(Absence::NotInTree { .. })));
    }
}
