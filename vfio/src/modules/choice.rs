//! The vfio driver of a function, and what it takes to have it.

use super::{Availability, Load, ModuleName, Modules, alias, load::Walk};
use crate::driver::VFIO_PCI;

/// The vfio driver chosen for a function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VfioDriver {
    /// Its module.
    pub module: ModuleName,
    /// The driver, as its directory below `/sys/bus/pci/drivers` is called; as it is expected to be, while it is not there.
    pub driver: String,
    /// Whether it can be had.
    pub availability: Availability,
    /// The modules to load before the function is moved, in order. Empty where all is there, or the driver cannot be had.
    pub loads: Vec<Load>,
    /// Why the choice may not be the best, or options may be lost.
    pub notes: Vec<String>,
}

impl Modules {
    /// The vfio driver for a function with this `modalias`: its variant by the most specific alias, else vfio-pci.
    #[must_use]
    pub fn vfio_driver(&self, modalias: &str) -> VfioDriver {
        let (module, mut notes) = match self.vfio_module(modalias) {
            Ok(module) => (module.unwrap_or_else(ModuleName::vfio_pci), Vec::new()),
            Err(reason) => {
                let note = format!(
                    "whether the kernel has a vfio driver made for this card is not known, so vfio-pci takes it: {reason}"
                );
                (ModuleName::vfio_pci(), vec![note])
            }
        };
        let availability = self.availability(&module);
        let loads = match availability {
            Availability::Absent(_) => Vec::new(),
            _ => {
                let mut walk = Walk::new(self);
                // It was just found that it can be had.
                let _ = walk.need(&module);
                // VMs that use the group node need it as well. modprobe loads it as a soft dependency of vfio, which a module
                // directory without modules.softdep does not tell; a kernel with iommufd alone has none.
                walk.wish(&ModuleName::vfio_iommu_type1());
                walk.end()
            }
        };
        if !loads.is_empty() {
            let lost = |error: &String| format!("options of modules may be lost: {error}");
            notes.extend(self.conf().unread.iter().map(lost));
        }
        let driver = self.driver_directory(&module).unwrap_or_else(|| expected_driver(&module));
        VfioDriver { module, driver, availability, loads, notes }
    }

    fn vfio_module(&self, modalias: &str) -> Result<Option<ModuleName>, String> {
        let aliases = self.aliases().as_ref().map_err(Clone::clone)?;
        let aliases = aliases.iter().map(|(pattern, module)| (pattern.as_str(), module.as_str()));
        Ok(alias::most_specific(modalias, aliases))
    }
}

/// What a driver that is not there yet will be called: vfio-pci alone has a dash (drivers/vfio/pci/vfio_pci.c), variants
/// have their module's name. Looked at again once it is loaded.
fn expected_driver(module: &ModuleName) -> String {
    if *module == ModuleName::vfio_pci() { VFIO_PCI.to_owned() } else { module.to_string() }
}
