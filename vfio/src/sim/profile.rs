//! Node profiles: which functions a simulated node has.

use std::{fs, io, os::unix::fs::symlink, path::Path};

use serde::{Deserialize, Serialize};

use super::{kernel, modules, tree, tree::Tree};
use crate::{host::Host, pci::Address};

/// A node's hardware, as it stands after boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Profile {
    /// A short name.
    pub name: String,
    /// Its functions.
    pub functions: Vec<ProfileFunction>,
    /// The drivers that are loaded (each takes what it takes on a real kernel).
    pub drivers: Vec<String>,
}

/// One function of a profile.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProfileFunction {
    /// Where it is.
    pub address: Address,
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Class code, 24 bits.
    pub class: u32,
    /// The driver bound after boot.
    pub driver: Option<String>,
    /// Its IOMMU group.
    pub group: Option<u32>,
    /// Its NUMA node, -1 for not known.
    pub numa: i32,
}

/// Drivers of a node that has all it needs.
const DRIVERS: [&str; 10] = [
    "ast",
    "mlx5_core",
    "nvidia",
    "nvidia-gpu",
    "nvidia-nvswitch",
    "pci-stub",
    "pcieport",
    "snd_hda_intel",
    "vfio-pci",
    "xhci_hcd",
];

/// A row of the tables below: bus and function, vendor, device, class, driver, group, NUMA node.
type Row = (u8, u8, u16, u16, u32, &'static str, u32, i32);

fn table(name: &str, rows: &[Row]) -> Profile {
    let functions = rows
        .iter()
        .filter_map(|&(bus, function, vendor, device, class, driver, group, numa)| {
            Some(ProfileFunction {
                address: Address::new(0, bus, 0, function)?,
                vendor,
                device,
                class,
                driver: Some(driver.to_owned()),
                group: Some(group),
                numa,
            })
        })
        .collect();
    Profile { name: name.to_owned(), functions, drivers: DRIVERS.map(str::to_owned).to_vec() }
}

impl Profile {
    /// An HGX board: eight H100 SXM5 and four NVSwitches, each in a group of its own, on two NUMA nodes; beside them a
    /// root port, a network card and the board's management VGA. Ids as seen on real ones.
    #[must_use]
    pub fn hgx_h100() -> Self {
        table(
            "hgx-h100",
            &[
                (0x04, 0, 0x1a03, 0x2000, 0x03_00_00, "ast", 20, 0),
                (0x05, 0, 0x10de, 0x22a3, 0x06_80_00, "nvidia-nvswitch", 86, 0),
                (0x06, 0, 0x10de, 0x22a3, 0x06_80_00, "nvidia-nvswitch", 87, 0),
                (0x07, 0, 0x10de, 0x22a3, 0x06_80_00, "nvidia-nvswitch", 88, 0),
                (0x08, 0, 0x10de, 0x22a3, 0x06_80_00, "nvidia-nvswitch", 89, 0),
                (0x10, 0, 0x8086, 0x352a, 0x06_04_00, "pcieport", 28, 0),
                (0x11, 0, 0x10de, 0x2330, 0x03_02_00, "nvidia", 29, 0),
                (0x12, 0, 0x10de, 0x2330, 0x03_02_00, "nvidia", 30, 0),
                (0x41, 0, 0x10de, 0x2330, 0x03_02_00, "nvidia", 17, 0),
                (0x44, 0, 0x10de, 0x2330, 0x03_02_00, "nvidia", 18, 0),
                (0x5a, 0, 0x15b3, 0x1021, 0x02_07_00, "mlx5_core", 40, 0),
                (0x86, 0, 0x10de, 0x2330, 0x03_02_00, "nvidia", 58, 1),
                (0x87, 0, 0x10de, 0x2330, 0x03_02_00, "nvidia", 59, 1),
                (0xbb, 0, 0x10de, 0x2330, 0x03_02_00, "nvidia", 49, 1),
                (0xbe, 0, 0x10de, 0x2330, 0x03_02_00, "nvidia", 50, 1),
            ],
        )
    }

    /// A Quadro RTX 4000: VGA, audio, USB and UCSI in one group, each on its own host driver.
    #[must_use]
    pub fn four_function_card() -> Self {
        table(
            "four-function-card",
            &[
                (0x52, 0, 0x10de, 0x1eb1, 0x03_00_00, "nvidia", 35, 0),
                (0x52, 1, 0x10de, 0x10f8, 0x04_03_00, "snd_hda_intel", 35, 0),
                (0x52, 2, 0x10de, 0x1ad8, 0x0c_03_30, "xhci_hcd", 35, 0),
                (0x52, 3, 0x10de, 0x1ad9, 0x0c_80_00, "nvidia-gpu", 35, 0),
            ],
        )
    }

    /// Two A10 on a node whose IOMMU is off: no groups at all.
    #[must_use]
    pub fn without_iommu() -> Self {
        let mut profile = table(
            "without-iommu",
            &[
                (0x17, 0, 0x10de, 0x2236, 0x03_02_00, "nvidia", 0, -1),
                (0x65, 0, 0x10de, 0x2236, 0x03_02_00, "nvidia", 0, -1),
            ],
        );
        for function in &mut profile.functions {
            function.group = None;
        }
        profile
    }

    /// All built-in profiles.
    #[must_use]
    pub fn built_in() -> Vec<Self> {
        vec![Self::hgx_h100(), Self::four_function_card(), Self::without_iommu()]
    }

    pub(super) fn lay(&self, root: &Path) -> io::Result<()> {
        for dir in ["sys/bus/pci/devices", "sys/kernel/iommu_groups", "dev/vfio", "proc", "lib/modules"] {
            fs::create_dir_all(root.join(dir))?;
        }
        tree::put(&root.join("sys/bus/pci/drivers_probe"), "")?;
        tree::put(&root.join("sys/kernel/uevent_seqnum"), "1000\n")?;
        tree::put(&root.join("proc/sys/kernel/random/boot_id"), "5137ab1e-0000-4000-8000-000000000001\n")?;
        tree::put(&root.join("dev/vfio/vfio"), "")?;
        for driver in &self.drivers {
            modules::lay_driver(root, driver)?;
        }
        for function in &self.functions {
            function.lay(root)?;
        }
        let tree = Tree::new(Host::at(root).map_err(io::Error::other)?);
        for function in &self.functions {
            if let Some(driver) = &function.driver {
                kernel::put(&tree, function.address, Some(driver), None)?;
            }
        }
        if root.join("dev/nvidia0").exists() {
            tree::put(&root.join("dev/nvidiactl"), "")?;
        }
        Ok(())
    }
}

impl ProfileFunction {
    fn lay(&self, root: &Path) -> io::Result<()> {
        let Self { address, vendor, device, class, .. } = self;
        let name = address.to_string();
        let bus: String = name.chars().take(name.len().saturating_sub(5)).collect();
        let dir = root.join(format!("sys/devices/pci{bus}/{name}"));
        tree::put(&dir.join("vendor"), &format!("{vendor:#06x}\n"))?;
        tree::put(&dir.join("device"), &format!("{device:#06x}\n"))?;
        tree::put(&dir.join("class"), &format!("{class:#08x}\n"))?;
        tree::put(&dir.join("driver_override"), "(null)\n")?;
        tree::put(&dir.join("numa_node"), &format!("{}\n", self.numa))?;
        let (base, sub, interface) = (class >> 16, class >> 8 & 0xff, class & 0xff);
        tree::put(
            &dir.join("modalias"),
            &format!(
                "pci:v{vendor:08X}d{device:08X}sv{vendor:08X}sd00000000bc{base:02X}sc{sub:02X}i{interface:02X}\n"
            ),
        )?;
        symlink(format!("../../../devices/pci{bus}/{name}"), root.join("sys/bus/pci/devices").join(&name))?;
        if let Some(group) = self.group {
            let group_dir = root.join(format!("sys/kernel/iommu_groups/{group}"));
            fs::create_dir_all(group_dir.join("devices"))?;
            symlink(format!("../../../kernel/iommu_groups/{group}"), dir.join("iommu_group"))?;
            symlink(format!("../../../../devices/pci{bus}/{name}"), group_dir.join("devices").join(&name))?;
        }
        Ok(())
    }
}
