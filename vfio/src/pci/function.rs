//! Reading functions from `/sys/bus/pci/devices`.

use std::{collections::BTreeMap, io};

use reason::{Code, Coded};
use serde::{Deserialize, Serialize};

use super::{
    Address, Class, Identity, Role,
    bar::{self, Region},
    hex,
};
use crate::{
    host::{Host, ReadError},
    vendor,
};

/// One PCI function, as its sysfs directory described it at one moment.
///
/// Source of each field: Documentation/ABI/testing/sysfs-bus-pci.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Function {
    /// Where it is.
    pub address: Address,
    /// Vendor id (`0x10de` is NVIDIA).
    #[serde(with = "hex")]
    pub vendor: u16,
    /// Device id.
    #[serde(with = "hex")]
    pub device: u16,
    /// Who made the board; 0 where there is no such file.
    #[serde(with = "hex", default)]
    pub subsystem_vendor: u16,
    /// Which board it is; 0 where there is no such file.
    #[serde(with = "hex", default)]
    pub subsystem_device: u16,
    /// Exact class code.
    pub class: Class,
    /// The driver bound to it, by its directory's name under `/sys/bus/pci/drivers`.
    pub driver: Option<String>,
    /// `driver_override`; the kernel's `(null)` is none.
    #[serde(rename = "override")]
    pub driver_override: Option<String>,
    /// Number of its IOMMU group; none without an IOMMU.
    pub iommu_group: Option<u32>,
    /// NUMA node; -1 is the kernel's own value for "not known".
    pub numa_node: i32,
    /// The module alias, by which drivers are matched.
    pub modalias: String,
    /// The physical function, where this is a VF.
    pub physfn: Option<Address>,
    /// How many VFs are enabled below it.
    pub num_vfs: u32,
    /// The kernel holds the device's lock, and does not let go: it is being bound or unbound, and that hangs (a VM may have
    /// it open, or its driver waits). `driver_override` and `num_vfs` are read under that lock (drivers/pci/pci-sysfs.c,
    /// drivers/pci/iov.c), so they are not known then.
    #[serde(default)]
    pub busy: bool,
    /// Name of its VFIO character device (`vfio3`), while a vfio driver of Linux 6.1 or newer is bound.
    pub vfio_dev: Option<String>,
    /// The numbers of its own BARs that have a size and no address: firmware and kernel found no place for them, and the
    /// kernel does not enable such a function for a VM (`pci_enable_resources`, drivers/pci/setup-res.c). Looked at for GPUs
    /// and switches only.
    #[serde(default)]
    pub unassigned_bars: Vec<u8>,
}

impl Function {
    /// Which device it is, wherever it sits.
    #[must_use]
    pub fn identity(&self) -> Identity {
        let Self { vendor, device, subsystem_vendor, subsystem_device, class, .. } = *self;
        Identity { vendor, device, subsystem_vendor, subsystem_device, class }
    }
}

/// Why one function could not be read. The others are read all the same.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FunctionError {
    /// The kernel did not give an attribute.
    #[error("PCI function {address}")]
    Read {
        /// The function.
        address: Address,
        /// What was read and how it failed.
        source: ReadError,
    },
    /// An attribute held something the kernel never writes.
    #[error("PCI function {address}: {attribute} holds {content:?}, which is not {expected}")]
    Content {
        /// The function.
        address: Address,
        /// The file's name.
        attribute: &'static str,
        /// What it held.
        content: String,
        /// What belongs there.
        expected: &'static str,
    },
    /// The child that reads it said this.
    #[error("{reason}")]
    Said {
        /// The function.
        address: Address,
        /// What it said.
        reason: String,
    },
}

impl FunctionError {
    /// The function that could not be read.
    #[must_use]
    pub fn address(&self) -> Address {
        match self {
            Self::Read { address, .. } | Self::Content { address, .. } | Self::Said { address, .. } => {
                *address
            }
        }
    }
}

impl Coded for FunctionError {
    fn code(&self) -> Code {
        match self {
            Self::Read { .. } | Self::Content { .. } | Self::Said { .. } => Code::Unreadable,
        }
    }

    fn retryable(&self) -> bool {
        match self {
            Self::Read { source, .. } => source.retryable(),
            Self::Content { .. } => false,
            Self::Said { .. } => true,
        }
    }
}

/// Every function of the node: those that could be read, and those that could not.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Functions {
    /// The readable ones, by address.
    pub known: BTreeMap<Address, Function>,
    /// The others, each with why.
    pub unreadable: BTreeMap<Address, FunctionError>,
}

/// Reads all functions of `host`, in this process: it blocks for as long as the kernel does ([`Function::busy`]).
///
/// # Errors
/// Only where the list itself cannot be had; a single bad function ends up in [`Functions::unreadable`].
pub fn functions(host: &Host) -> Result<Functions, ReadError> {
    functions_by(host, |address| read(host, address))
}

/// Reads all functions of `host`, each by `read`.
///
/// # Errors
/// As [`functions`].
pub fn functions_by(
    host: &Host,
    mut read: impl FnMut(Address) -> Result<Option<Function>, FunctionError>,
) -> Result<Functions, ReadError> {
    let mut all = Functions::default();
    for name in host.list(&host.sys("bus/pci/devices"))? {
        // Names that are no address are no functions (nothing of the kernel's own makes one).
        let Ok(address) = name.parse() else { continue };
        match read(address) {
            Ok(Some(function)) => {
                all.known.insert(address, function);
            }
            Ok(None) => {}
            Err(error) => {
                all.unreadable.insert(address, error);
            }
        }
    }
    Ok(all)
}

/// Reads one function; nothing where it is not (or no longer) there.
///
/// # Errors
/// When an attribute every function has is missing, unreadable or senseless.
pub fn read(host: &Host, address: Address) -> Result<Option<Function>, FunctionError> {
    present(host, address, read_all(host, address))
}

/// Reads of one function what the kernel answers without the device's lock: it is [`Function::busy`] by its own word.
///
/// # Errors
/// As [`read`].
pub fn read_busy(host: &Host, address: Address) -> Result<Option<Function>, FunctionError> {
    present(host, address, read_unlocked(host, address))
}

fn present(
    host: &Host,
    address: Address,
    function: Result<Function, FunctionError>,
) -> Result<Option<Function>, FunctionError> {
    match function {
        // A function that was unplugged while it was read fails in any of these ways; that is no error of its own.
        Err(_) if !host.exists(&host.function_dir(address)) => Ok(None),
        other => other.map(Some),
    }
}

fn read_all(host: &Host, address: Address) -> Result<Function, FunctionError> {
    let unlocked = read_unlocked(host, address)?;
    let dir = host.function_dir(address);
    let optional = |attribute: &'static str| {
        host.read_if_there(&dir.join(attribute)).map_err(|source| FunctionError::Read { address, source })
    };
    // A missing driver_override says nothing wrong of a function, nor does a missing number of VFs.
    let driver_override = optional("driver_override")?
        .map(|content| content.trim_end_matches('\n').to_owned())
        .filter(|name| !name.is_empty() && name != "(null)");
    let num_vfs = match optional("sriov_numvfs")? {
        None => 0,
        Some(content) => content.trim().parse().map_err(|_| FunctionError::Content {
            address,
            attribute: "sriov_numvfs",
            content: content.clone(),
            expected: "a number of VFs",
        })?,
    };
    Ok(Function { driver_override, num_vfs, busy: false, ..unlocked })
}

fn read_unlocked(host: &Host, address: Address) -> Result<Function, FunctionError> {
    let dir = host.function_dir(address);
    let failed = |source| FunctionError::Read { address, source };
    let text = |attribute: &'static str| host.read(&dir.join(attribute)).map_err(failed);
    let optional = |attribute: &'static str| host.read_if_there(&dir.join(attribute)).map_err(failed);
    let link = |name: &str| host.link_name(&dir.join(name)).map_err(failed);
    let hex = |attribute: &'static str, expected: &'static str| {
        let content = text(attribute)?;
        let digits = content.trim().strip_prefix("0x").map(|d| u32::from_str_radix(d, 16));
        match digits {
            Some(Ok(number)) => Ok(number),
            _ => Err(FunctionError::Content { address, attribute, content, expected }),
        }
    };
    let id = |attribute| {
        let number = hex(attribute, ID)?;
        u16::try_from(number).map_err(|_| FunctionError::Content {
            address,
            attribute,
            content: format!("{number:#x}"),
            expected: ID,
        })
    };
    // No driver goes by these alone: what makes no sense there is as if it were missing.
    let subsystem_id = |attribute| {
        let content = optional(attribute)?.unwrap_or_default();
        let digits = content.trim().strip_prefix("0x").unwrap_or_default();
        Ok(u16::from_str_radix(digits, 16).unwrap_or(0))
    };
    let number = |attribute: &'static str, absent: i64, expected: &'static str| match optional(attribute)? {
        None => Ok(absent),
        Some(content) => content.trim().parse::<i64>().map_err(|_| FunctionError::Content {
            address,
            attribute,
            content: content.clone(),
            expected,
        }),
    };

    let group = match link("iommu_group")? {
        None => None,
        Some(name) => Some(name.parse().map_err(|_| FunctionError::Content {
            address,
            attribute: "iommu_group",
            content: name.clone(),
            expected: "a link to a group's number",
        })?),
    };
    let (vendor, device) = (id("vendor")?, id("device")?);
    let class = Class(hex("class", "a class code such as 0x030200")?);
    let physfn = link("physfn")?.and_then(|name| name.parse().ok());
    // Of other functions there are thousands, and nobody asks for more of them.
    let asked = physfn.is_none() && vendor::role(vendor, device, class).is_some_and(Role::is_offered);
    let resource = if asked { optional("resource")? } else { None };
    // A missing numa_node or modalias says nothing wrong of a function: kernels are built without NUMA.
    Ok(Function {
        address,
        vendor,
        device,
        subsystem_vendor: subsystem_id("subsystem_vendor")?,
        subsystem_device: subsystem_id("subsystem_device")?,
        class,
        driver: link("driver")?,
        driver_override: None,
        iommu_group: group,
        numa_node: i32::try_from(number("numa_node", -1, "a NUMA node's number")?).unwrap_or(-1),
        modalias: optional("modalias")?.unwrap_or_default().trim().to_owned(),
        physfn,
        num_vfs: 0,
        busy: true,
        vfio_dev: vfio_dev(host, address).map_err(failed)?,
        unassigned_bars: resource.as_deref().map(unassigned).unwrap_or_default(),
    })
}

/// What an id's file holds.
const ID: &str = "a 16-bit id such as 0x10de";

/// The function's own BARs that have no address, by its `resource` file.
fn unassigned(resource: &str) -> Vec<u8> {
    let bars = bar::parse(resource).into_iter();
    bars.filter(|bar| bar.region == Region::Bar && !bar.assigned).map(|bar| bar.index).collect()
}

fn vfio_dev(host: &Host, address: Address) -> Result<Option<String>, ReadError> {
    match host.list(&host.function_dir(address).join("vfio-dev")) {
        Ok(names) => Ok(names.into_iter().find(|name| name.starts_with("vfio"))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roms_and_the_bars_of_vfs_may_be_without_an_address() {
        const PLACED: &str = "0x0000206000000000 0x00002067ffffffff 0x000000000014220c\n";
        const UNSET: &str = "0x0000000000000000 0x00000007ffffffff 0x000000002014220c\n";
        const NONE: &str = "0x0000000000000000 0x0000000000000000 0x0000000000000000\n";
        // BAR 1 and 3, the ROM, VF BAR 0.
        let text =
            [PLACED, UNSET, NONE, UNSET, NONE, NONE, UNSET, UNSET, NONE, NONE, NONE, NONE, NONE].concat();
        assert_eq!(unassigned(&text), [1, 3]);
        assert!(unassigned(PLACED).is_empty() && unassigned("").is_empty());
    }
}
