//! The drivers that a simulated kernel knows: which functions each takes by itself.

use crate::{
    driver::{VFIO_PCI, is_vfio},
    modules::ModuleName,
    pci::Function,
};

struct Driver {
    name: &'static str,
    vendor: Option<u16>,
    /// Class codes, shifted right by 8: base class and subclass. None: it takes nothing by itself.
    classes: &'static [u32],
    /// Lowest and highest device id.
    devices: (u16, u16),
}

const fn driver(name: &'static str, vendor: u16, classes: &'static [u32]) -> Driver {
    Driver { name, vendor: Some(vendor), classes, devices: (0, u16::MAX) }
}

const fn of_any_vendor(name: &'static str, classes: &'static [u32]) -> Driver {
    Driver { name, vendor: None, classes, devices: (0, u16::MAX) }
}

const NVIDIA: u16 = 0x10de;

/// In the order in which they are asked.
const DRIVERS: &[Driver] = &[
    driver("nvidia", NVIDIA, &[0x0300, 0x0302]),
    driver("nouveau", NVIDIA, &[0x0300, 0x0302]),
    // Its table has every NVIDIA function of class 0680, its probe then refuses what is no NVSwitch: the old nForce
    // parts of that class have low ids, and forcedeth takes them.
    Driver { devices: (0x1ac0, u16::MAX), ..driver("nvidia-nvswitch", NVIDIA, &[0x0680]) },
    Driver { devices: (0, 0x0fff), ..driver("forcedeth", NVIDIA, &[0x0200, 0x0680]) },
    driver("nvidia-gpu", NVIDIA, &[0x0c80]),
    of_any_vendor("snd_hda_intel", &[0x0403]),
    of_any_vendor("xhci_hcd", &[0x0c03]),
    driver("mlx5_core", 0x15b3, &[0x0200, 0x0207]),
    driver("ast", 0x1a03, &[0x0300]),
    // PCI_CLASS_ACCELERATOR_PROCESSING by pciidlist (drivers/gpu/drm/amd/amdgpu/amdgpu_drv.c).
    driver("amdgpu", 0x1002, &[0x0300, 0x0302, 0x0380, 0x1200]),
    driver("i915", 0x8086, &[0x0300, 0x0380]),
    driver("ice", 0x8086, &[0x0200]),
    driver("vmd", 0x8086, &[0x0104]),
    of_any_vendor("ahci", &[0x0106]),
    of_any_vendor("nvme", &[0x0108]),
    of_any_vendor("pcieport", &[0x0604]),
    of_any_vendor("pci-stub", &[]),
    of_any_vendor("vfio-pci", &[]),
    // Grace's variant has underscores in sysfs too, unlike vfio-pci.
    driver("nvgrace_gpu_vfio_pci", NVIDIA, &[]),
];

/// Whether there is a driver of that name.
pub(super) fn knows(name: &str) -> bool {
    DRIVERS.iter().any(|driver| driver.name == name)
}

/// All of them.
pub(super) fn names() -> Vec<&'static str> {
    DRIVERS.iter().map(|driver| driver.name).collect()
}

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
                && (driver.devices.0..=driver.devices.1).contains(&function.device)
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

/// The nodes below `/dev` that come and go with a driver's functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Nodes {
    /// One with this beginning and the lowest free number.
    Numbered(&'static str),
    /// A display and a render node in `/dev/dri`; beside them `/dev/kfd`, while any function is on the driver.
    Drm,
}

/// Which nodes come and go with this driver's functions.
pub(super) fn nodes(driver: &str) -> Option<Nodes> {
    match driver {
        "nvidia" => Some(Nodes::Numbered("nvidia")),
        "nvidia-nvswitch" => Some(Nodes::Numbered("nvidia-nvswitch")),
        "amdgpu" => Some(Nodes::Drm),
        _ => None,
    }
}

/// Whether functions of this driver have a VFIO character device and a group node.
pub(super) fn has_group_node(driver: &str) -> bool {
    is_vfio(driver)
}
