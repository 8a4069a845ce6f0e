//! A module's name, of which `-` and `_` are one letter.

use std::fmt;

use reason::{Code, Coded};
use serde::{Deserialize, Serialize};

/// A kernel module's name, spelt with `_` as the kernel spells it. `vfio-pci` and `vfio_pci` are equal.
///
/// Source: the kernel's build makes `KBUILD_MODNAME` of a file's name by turning `-` into `_` (scripts/Makefile.lib).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ModuleName(String);

/// A text that is no module's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no kernel module's name: letters, digits, '_' and '-', at most 56")]
pub struct BadModuleName(pub String);

impl Coded for BadModuleName {
    fn code(&self) -> Code {
        Code::InvalidRequest
    }

    fn retryable(&self) -> bool {
        false
    }
}

/// `MODULE_NAME_LEN` of a 64-bit kernel: 64 bytes less one pointer (include/linux/moduleparam.h).
const LONGEST: usize = 56;

impl ModuleName {
    /// The module called `name`, in either spelling.
    ///
    /// # Errors
    /// When no module can be called so: a name never leads out of a directory.
    pub fn new(name: &str) -> Result<Self, BadModuleName> {
        let fine = (1..=LONGEST).contains(&name.len())
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'));
        if fine { Ok(Self(name.replace('-', "_"))) } else { Err(BadModuleName(name.to_owned())) }
    }

    /// The module whose file is `path` (`kernel/drivers/vfio/pci/vfio-pci.ko.xz`).
    #[must_use]
    pub fn of_file(path: &str) -> Option<Self> {
        let file = path.rsplit('/').next()?;
        let (name, ending) = file.split_once(".ko")?;
        (ending.is_empty() || ending.starts_with('.')).then(|| Self::new(name).ok()).flatten()
    }

    /// The module that goes by vfio-pci.
    #[must_use]
    pub fn vfio_pci() -> Self {
        Self("vfio_pci".to_owned())
    }

    /// The module that maps a VM's memory for the legacy group nodes.
    #[must_use]
    pub fn vfio_iommu_type1() -> Self {
        Self("vfio_iommu_type1".to_owned())
    }

    /// Whether `name`, in whichever spelling, is this module's.
    #[must_use]
    pub fn is(&self, name: &str) -> bool {
        name.len() == self.0.len() && name.replace('-', "_") == self.0
    }

    /// As the kernel spells it.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for ModuleName {
    type Error = BadModuleName;

    fn try_from(name: String) -> Result<Self, Self::Error> {
        Self::new(&name)
    }
}

impl From<ModuleName> for String {
    fn from(name: ModuleName) -> Self {
        name.0
    }
}

impl fmt::Display for ModuleName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_spellings_are_one_name() {
        let name = ModuleName::new("vfio-pci").unwrap();
        assert_eq!(name, ModuleName::vfio_pci());
        assert!(name.is("vfio_pci") && name.is("vfio-pci") && !name.is("vfio_pci_core"));
    }

    #[test]
    fn a_name_leads_nowhere_else() {
        for name in ["", "..", "a/b", "a b", "a.b", "a\n", &"x".repeat(57)] {
            assert!(ModuleName::new(name).is_err(), "{name:?}");
        }
    }

    #[test]
    fn a_file_says_its_modules_name_however_it_is_compressed() {
        for (path, name) in [
            ("kernel/drivers/vfio/pci/vfio-pci.ko", Some("vfio_pci")),
            ("updates/dkms/nvidia.ko.zst", Some("nvidia")),
            ("vfio.ko.xz", Some("vfio")),
            ("kernel/README", None),
            ("x.koala", None),
        ] {
            assert_eq!(ModuleName::of_file(path).as_ref().map(ModuleName::as_str), name, "{path}");
        }
    }
}
