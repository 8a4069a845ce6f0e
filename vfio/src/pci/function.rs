//! Reading functions from `/sys/bus/pci/devices`.

use std::{collections::BTreeMap, io};

use serde::{Deserialize, Serialize};

use super::{Address, Class};
use crate::host::{Host, ReadError};

/// One PCI function, as its sysfs directory described it at one moment.
///
/// Source of each field: Documentation/ABI/testing/sysfs-bus-pci.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Function {
    /// Where it is.
    pub address: Address,
    /// Vendor id (`0x10de` is NVIDIA).
    #[serde(with = "hex4")]
    pub vendor: u16,
    /// Device id.
    #[serde(with = "hex4")]
    pub device: u16,
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
}

/// Ids as four hex digits.
mod hex4 {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(id: &u16, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{id:04x}"))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u16, D::Error> {
        let text = String::deserialize(deserializer)?;
        u16::from_str_radix(&text, 16).map_err(D::Error::custom)
    }
}

/// Why one function could not be read. The others are read all the same.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FunctionError {
    /// The kernel did not give an attribute.
    #[error("PCI function {address}: {source}")]
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
        Err(_) if !host.function_dir(address).exists() => Ok(None),
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
        let number = hex(attribute, "a 16-bit id such as 0x10de")?;
        u16::try_from(number).map_err(|_| FunctionError::Content {
            address,
            attribute,
            content: format!("{number:#x}"),
            expected: "a 16-bit id such as 0x10de",
        })
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
    // A missing numa_node or modalias says nothing wrong of a function: kernels are built without NUMA.
    Ok(Function {
        address,
        vendor: id("vendor")?,
        device: id("device")?,
        class: Class(hex("class", "a class code such as 0x030200")?),
        driver: link("driver")?,
        driver_override: None,
        iommu_group: group,
        numa_node: i32::try_from(number("numa_node", -1, "a NUMA node's number")?).unwrap_or(-1),
        modalias: optional("modalias")?.unwrap_or_default().trim().to_owned(),
        physfn: link("physfn")?.and_then(|name| name.parse().ok()),
        num_vfs: 0,
        busy: true,
        vfio_dev: vfio_dev(host, address).map_err(failed)?,
    })
}

fn vfio_dev(host: &Host, address: Address) -> Result<Option<String>, ReadError> {
    match host.list(&host.function_dir(address).join("vfio-dev")) {
        Ok(names) => Ok(names.into_iter().find(|name| name.starts_with("vfio"))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
