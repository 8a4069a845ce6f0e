//! Reading functions from `/sys/bus/pci/devices`.

use std::{collections::BTreeMap, io};

use serde::Serialize;

use super::{Address, Class};
use crate::host::{Host, ReadError};

/// One PCI function, as its sysfs directory described it at one moment.
///
/// Source of each field: Documentation/ABI/testing/sysfs-bus-pci.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Function {
    /// Where it is.
    pub address: Address,
    /// Vendor id (`0x10de` is NVIDIA).
    #[serde(serialize_with = "hex4")]
    pub vendor: u16,
    /// Device id.
    #[serde(serialize_with = "hex4")]
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
    /// Name of its VFIO character device (`vfio3`), while a vfio driver of Linux 6.1 or newer is bound.
    pub vfio_dev: Option<String>,
}

fn hex4<S: serde::Serializer>(id: &u16, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{id:04x}"))
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
}

impl FunctionError {
    /// The function that could not be read.
    #[must_use]
    pub fn address(&self) -> Address {
        match self {
            Self::Read { address, .. } | Self::Content { address, .. } => *address,
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

/// Reads all functions of `host`.
///
/// # Errors
/// Only where the list itself cannot be had; a single bad function ends up in [`Functions::unreadable`].
pub fn functions(host: &Host) -> Result<Functions, ReadError> {
    let mut all = Functions::default();
    for name in host.list(&host.sys("bus/pci/devices"))? {
        // Names that are no address are no functions (nothing of the kernel's own makes one).
        let Ok(address) = name.parse() else { continue };
        match read(host, address) {
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
    match read_present(host, address) {
        // A function that was unplugged while it was read fails in any of these ways; that is no error of its own.
        Err(_) if !host.function_dir(address).exists() => Ok(None),
        other => other.map(Some),
    }
}

fn read_present(host: &Host, address: Address) -> Result<Function, FunctionError> {
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
    // A missing driver_override, numa_node or modalias says nothing wrong of a function: kernels are built without NUMA.
    let driver_override = optional("driver_override")?
        .map(|content| content.trim_end_matches('\n').to_owned())
        .filter(|name| !name.is_empty() && name != "(null)");
    Ok(Function {
        address,
        vendor: id("vendor")?,
        device: id("device")?,
        class: Class(hex("class", "a class code such as 0x030200")?),
        driver: link("driver")?,
        driver_override,
        iommu_group: group,
        numa_node: i32::try_from(number("numa_node", -1, "a NUMA node's number")?).unwrap_or(-1),
        modalias: optional("modalias")?.unwrap_or_default().trim().to_owned(),
        physfn: link("physfn")?.and_then(|name| name.parse().ok()),
        num_vfs: u32::try_from(number("sriov_numvfs", 0, "a number of VFs")?).unwrap_or(0),
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
