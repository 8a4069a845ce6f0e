//! Node profiles: which functions a simulated node has.
//!
//! A profile is a small YAML file (its keys: `docs/profiles.md`). Those below `vfio/profiles` are built in; each says
//! where its hardware was seen.

mod config_space;
mod error;
mod file;
mod lay;
mod memory;
mod spelling;
mod values;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

pub use error::{Place, ProfileError};
use serde::Deserialize;

use crate::pci::Address;

/// A node's hardware, as it stands after boot.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Profile {
    /// A short name.
    pub name: String,
    /// Its functions, enabled VFs too. The kernel finds them in this order.
    pub functions: Vec<ProfileFunction>,
    /// The drivers that are loaded (each takes what it takes on a real kernel).
    pub drivers: Vec<String>,
    /// The CPUs of each NUMA node, as the kernel lists them (`0-55,112-167`; empty for a node without).
    pub numa_cpus: BTreeMap<u32, String>,
    /// The reserved regions of groups that list others than the interrupt controllers' alone.
    pub reserved: BTreeMap<u32, BTreeSet<ReservedKind>>,
}

/// What a reserved region of a group is, as `reserved_regions` spells it (`iommu_group_resv_type_string`,
/// drivers/iommu/iommu.c).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ReservedKind {
    /// To be mapped one to one, whoever has the device.
    Direct,
    /// To be mapped one to one only while the firmware may still use the device.
    DirectRelaxable,
    /// Where interrupts are written to.
    Msi,
    /// Not to be mapped.
    Reserved,
}

impl ReservedKind {
    /// As the kernel and the profile spell it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::DirectRelaxable => "direct-relaxable",
            Self::Msi => "msi",
            Self::Reserved => "reserved",
        }
    }
}

/// How a function's configuration space answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Answers {
    /// As it should.
    #[default]
    Yes,
    /// With all ones: the function fell off the bus.
    No,
    /// With a header of type 0x7f, which none has.
    HeaderType7f,
}

/// One function of a profile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProfileFunction {
    /// Where it is.
    pub address: Address,
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Class code, 24 bits.
    pub class: u32,
    /// Subsystem vendor and device id.
    pub subsystem: (u16, u16),
    /// Revision.
    pub revision: u8,
    /// The driver bound after boot.
    pub driver: Option<String>,
    /// Its IOMMU group.
    pub group: Option<u32>,
    /// Its NUMA node, -1 for not known.
    pub numa: i32,
    /// The bridge whose bus it is on; none on a root bus. A function of another domain: the controller that made it (VMD).
    pub behind: Option<Address>,
    /// Whether the firmware started the console on it.
    pub boot_vga: bool,
    /// Which driver keeps the firmware's framebuffer in one of its BARs.
    pub framebuffer: Option<Framebuffer>,
    /// Whether its driver's framebuffer device carries the kernel's own console.
    pub console: bool,
    /// How its configuration space answers.
    pub answers: Answers,
    /// What `reset_method` lists; none where the kernel has no way to reset it.
    pub reset_method: Option<String>,
    /// Its memory and I/O regions.
    pub bars: Vec<Bar>,
    /// The VFs it can have.
    pub sriov: Option<Sriov>,
    /// The physical function, where this is a VF.
    pub physfn: Option<Address>,
}

/// A base address register: what it asks for. Where it ends up, the simulated firmware says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bar {
    /// Its number, 0 to 5; a 64-bit one takes the next number too.
    pub index: u8,
    /// Its size in bytes, a power of two.
    pub size: u64,
    /// What it decodes.
    pub space: Space,
    /// Whether reads have no side effects.
    pub prefetchable: bool,
    /// Whether the firmware found a place for it.
    pub assigned: bool,
}

/// What a BAR decodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Space {
    /// I/O ports.
    Io,
    /// Memory below 4 GiB.
    Memory32,
    /// Memory anywhere.
    Memory64,
}

/// An SR-IOV capability.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sriov {
    /// How many VFs there can be.
    pub total: u16,
    /// Steps from the physical function to the first VF.
    pub offset: u16,
    /// Steps from one VF to the next.
    pub stride: u16,
    /// The VFs' device id.
    pub device: u16,
    /// Each VF's regions.
    pub bars: Vec<Bar>,
}

/// Who shows the firmware's framebuffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Framebuffer {
    /// simpledrm, the usual one since Linux 5.15.
    Simpledrm,
    /// The older efifb.
    Efifb,
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

macro_rules! built_in {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../../profiles/", $name, ".yaml")))),*]
    };
}

/// The files that are part of the library.
const BUILT_IN: &[(&str, &str)] = built_in![
    "a10",
    "a30",
    "a40",
    "boot-vga",
    "consumer-x8x8",
    "consumer-x8x8-amd",
    "four-function-card",
    "gb200",
    "geforce",
    "gh200",
    "group-0",
    "hgx-a100",
    "hgx-h100",
    "hgx-h100-pairs",
    "hgx-h200",
    "l40s",
    "mcp55",
    "mi300x",
    "mixed-a10-l40s",
    "quadro",
    "rtx-pro-6000",
    "t4",
    "vmd",
    "without-iommu",
];

impl Profile {
    /// An HGX board: eight H100 SXM5 and four NVSwitches, each in a group of its own, on two NUMA nodes; beside them a
    /// root port, a network card and the board's management VGA.
    #[must_use]
    pub fn hgx_h100() -> Self {
        embedded("hgx-h100")
    }

    /// A Quadro RTX 4000: VGA, audio, USB and UCSI in one group, each on its own host driver.
    #[must_use]
    pub fn four_function_card() -> Self {
        embedded("four-function-card")
    }

    /// Two A10 on a node whose IOMMU is off: no groups at all.
    #[must_use]
    pub fn without_iommu() -> Self {
        embedded("without-iommu")
    }

    /// All built-in profiles, by name.
    #[must_use]
    pub fn built_in() -> Vec<Self> {
        BUILT_IN.iter().map(|(name, _)| embedded(name)).collect()
    }

    /// A built-in profile by its name, or the one in a file by its path (anything with a `/` or ending in `.yaml`,
    /// `.yml`).
    ///
    /// # Errors
    /// When there is none of that name, or the file cannot be read or does not fit.
    pub fn find(name_or_path: &str) -> Result<Self, ProfileError> {
        let path = Path::new(name_or_path);
        let is_path =
            name_or_path.contains('/') || path.extension().is_some_and(|e| e == "yaml" || e == "yml");
        if is_path {
            return Self::load(path);
        }
        let (name, text) = BUILT_IN.iter().find(|(name, _)| *name == name_or_path).ok_or_else(|| {
            let known: Vec<_> = BUILT_IN.iter().map(|(name, _)| *name).collect();
            ProfileError::Unknown { name: name_or_path.to_owned(), known: known.join(", ") }
        })?;
        Self::parse(text, &embedded_path(name))
    }

    /// Reads and checks the profile at `path`.
    ///
    /// # Errors
    /// When the file cannot be read or does not fit.
    pub fn load(path: &Path) -> Result<Self, ProfileError> {
        let text = fs::read_to_string(path)
            .map_err(|source| ProfileError::Read { path: path.to_owned(), source })?;
        Self::parse(&text, path)
    }

    /// Checks the text of a profile; `path` is for the errors.
    ///
    /// # Errors
    /// When anything in it does not fit.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ProfileError> {
        file::parse(text, path)
    }
}

fn embedded_path(name: &str) -> std::path::PathBuf {
    Path::new("vfio/profiles").join(format!("{name}.yaml"))
}

/// A built-in profile that is known to be there: the files are part of the build, and a test parses each of them, so the
/// empty profile is never met.
fn embedded(name: &str) -> Profile {
    Profile::find(name).unwrap_or_default()
}

impl ProfileFunction {
    /// A function without a driver, a group, or anything else that not every function has.
    #[must_use]
    pub fn new(address: Address, vendor: u16, device: u16, class: u32) -> Self {
        Self {
            address,
            vendor,
            device,
            class,
            subsystem: (0, 0),
            revision: 0,
            driver: None,
            group: None,
            numa: -1,
            behind: None,
            boot_vga: false,
            framebuffer: None,
            console: false,
            answers: Answers::Yes,
            reset_method: None,
            bars: Vec::new(),
            sriov: None,
            physfn: None,
        }
    }

    /// Whether it is a PCI-to-PCI bridge: the one kind with a type 1 header.
    fn is_bridge(&self) -> bool {
        self.class >> 8 == 0x0604
    }

    /// Whether it is a VGA controller: only those have a `boot_vga` file.
    fn is_vga(&self) -> bool {
        self.class >> 8 == 0x0300
    }
}
