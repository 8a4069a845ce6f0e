//! The drivers that a simulated kernel knows: which functions each takes by itself.

use crate::{
    driver::{VFIO_PCI, is_vfio},
    modules::ModuleName,
    pci::Function,
};

struct Driver {
    name: &'static str,
    vendor: Option<u16>,
    /// Class codes, shifted right by 8: base class and subclass.
    classes: &'static [u32],
}

const DRIVERS: &[Driver] = &[
    Driver { name: "nvidia", vendor: Some(0x10de), classes: &[0x0300, 0x0302] },
    Driver { name: "nvidia-nvswitch", vendor: Some(0x10de), classes: &[0x0680] },
    Driver { name: "nvidia-gpu", vendor: Some(0x10de), classes: &[0x0c80] },
    Driver { name: "snd_hda_intel", vendor: None, classes: &[0x0403] },
    Driver { name: "xhci_hcd", vendor: None, classes: &[0x0c03] },
    Driver { name: "mlx5_core", vendor: Some(0x15b3), classes: &[0x0200, 0x0207] },
    Driver { name: "ast", vendor: Some(0x1a03), classes: &[0x0300] },
    Driver { name: "pcieport", vendor: None, classes: &[0x0604] },
];

/// The driver that would take `function`, of those that `loaded` says are there.
///
/// With an override only the driver of that name is tried, and vfio and stub drivers take anything then
/// (`pci_match_device`, drivers/pci/pci-driver.c). Without one, those two kinds take nothing.
pub(super) fn pick(function: &Function, loaded: impl Fn(&str) -> bool) -> Option<String> {
    if let Some(name) = &function.driver_override {
        return loaded(name).then(|| name.clone());
    }
    DRIVERS
        .iter()
        .find(|driver| {
            driver.vendor.is_none_or(|vendor| vendor == function.vendor)
                && driver.classes.contains(&(function.class.0 >> 8))
                && loaded(driver.name)
        })
        .map(|driver| driver.name.to_owned())
}

/// The PCI driver that comes with a module, where the simulation knows one.
///
/// vfio-pci has a dash; a variant is called as its module (`KBUILD_MODNAME` in drivers/vfio/pci/nvgrace-gpu/main.c).
pub(super) fn of_module(module: &ModuleName) -> Option<String> {
    if *module == ModuleName::vfio_pci() {
        return Some(VFIO_PCI.to_owned());
    }
    let known = DRIVERS.iter().find(|driver| module.is(driver.name)).map(|driver| driver.name.to_owned());
    known.or_else(|| is_vfio(module.as_str()).then(|| module.to_string()))
}

/// Whether nodes below `/dev` come and go with this driver's functions, and how they are called.
pub(super) fn node_prefix(driver: &str) -> Option<&'static str> {
    match driver {
        "nvidia" => Some("nvidia"),
        "nvidia-nvswitch" => Some("nvidia-nvswitch"),
        _ => None,
    }
}

/// Whether functions of this driver have a VFIO character device and a group node.
pub(super) fn has_group_node(driver: &str) -> bool {
    is_vfio(driver)
}
