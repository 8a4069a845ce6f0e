//! Configuration space: the capabilities that a function announces.
//!
//! `config` gives all of it only to a reader with CAP_SYS_ADMIN; any other gets the first 64 bytes
//! (`pci_read_config`, drivers/pci/pci-sysfs.c). What those do not tell is not known.

use std::collections::BTreeSet;

use serde::Serialize;

use super::Link;

/// Bytes that every reader gets: the header (`PCI_STD_HEADER_SIZEOF`, include/uapi/linux/pci_regs.h).
pub const HEADER: usize = 64;
/// Where the extended capabilities begin (PCI Express Base Specification, 7.6.1).
const EXTENDED: usize = 0x100;
/// Bytes of a whole configuration space (`PCI_CFG_SPACE_EXP_SIZE`).
pub const SIZE: usize = 4096;

const STATUS: usize = 0x06;
/// The function has a capability list (`PCI_STATUS_CAP_LIST`).
const STATUS_CAPABILITIES: u16 = 0x10;
const HEADER_TYPE: usize = 0x0e;
const CAPABILITY_POINTER: usize = 0x34;
/// The pointer of a CardBus bridge (header type 2).
const CARDBUS_CAPABILITY_POINTER: usize = 0x14;

const EXPRESS: u8 = 0x10;
const ADVANCED_FEATURES: u8 = 0x13;

/// A capability: its id, and where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Capability {
    /// The id (PCI Code and ID Assignment Specification, chapters 2 and 3).
    pub id: u16,
    /// Its offset in configuration space.
    pub offset: u16,
    /// What it is called, where it is one of those that matter to passthrough.
    pub name: Option<&'static str>,
}

/// What a PCI Express function is (PCI Express Base Specification, 7.5.3.2, Device/Port Type).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PortType {
    /// An endpoint.
    Endpoint,
    /// A root port.
    RootPort,
    /// The port of a switch that faces the root.
    SwitchUpstream,
    /// A port of a switch that faces a slot.
    SwitchDownstream,
    /// A bridge from or to conventional PCI.
    Bridge,
    /// Integrated into the root complex: an endpoint or an event collector.
    RootComplex,
    /// A code without a meaning.
    Reserved,
}

/// The PCI Express capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Express {
    /// What the function is.
    pub port: PortType,
    /// Whether it can reset itself alone (Function Level Reset, Device Capabilities bit 28).
    pub flr: bool,
    /// Its link.
    #[serde(skip)]
    pub link: Link,
}

/// What could be read from a function's configuration space.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct ConfigSpace {
    /// The header's layout: 0 for an endpoint, 1 for a bridge; none where the function does not answer.
    pub header_type: Option<u8>,
    /// The capabilities, in the order of the list; none where it could not be read.
    pub capabilities: Option<Vec<Capability>>,
    /// The extended capabilities; none where they could not be read.
    pub extended: Option<Vec<Capability>>,
    /// The PCI Express capability; none where there is none, or where it could not be read.
    pub express: Option<Express>,
    /// Whether it can reset itself alone; none where that could not be read.
    pub flr: Option<bool>,
}

/// Reads configuration space from as many of its bytes as there are. Any bytes will do: a list that runs in a circle, or
/// out of what is there, ends there.
#[must_use]
pub fn parse(bytes: &[u8]) -> ConfigSpace {
    let mut space = ConfigSpace { header_type: header_type(bytes), ..ConfigSpace::default() };
    let Some(layout) = space.header_type else { return space };
    space.capabilities = capabilities(bytes, layout);
    let Some(list) = &space.capabilities else { return space };
    let at = |id: u8| list.iter().find(|found| found.id == u16::from(id)).map(|found| found.offset.into());
    space.express = at(EXPRESS).and_then(|offset| express(bytes, offset));
    let advanced = at(ADVANCED_FEATURES).and_then(|offset: usize| bytes.get(offset + 3));
    // Bit 1 of AF Capabilities (PCI ECN Advanced Capabilities for Conventional PCI): how a conventional function says it.
    space.flr = Some(
        space.express.is_some_and(|express| express.flr) || advanced.is_some_and(|byte| byte & 0x02 != 0),
    );
    space.extended = match at(EXPRESS) {
        Some(_) => extended(bytes),
        // Only PCI Express functions have any.
        None => Some(Vec::new()),
    };
    space
}

/// The header's layout, without the bit that says that the device has further functions.
fn header_type(bytes: &[u8]) -> Option<u8> {
    // 0x7f is what an absent function answers: all ones.
    bytes.get(HEADER_TYPE).map(|byte| byte & 0x7f).filter(|layout| *layout != 0x7f)
}

fn u16_at(bytes: &[u8], offset: usize) -> Option<u16> {
    let bytes = bytes.get(offset..offset.checked_add(2)?)?;
    Some(u16::from_le_bytes(bytes.try_into().ok()?))
}

fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    let bytes = bytes.get(offset..offset.checked_add(4)?)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

fn capabilities(bytes: &[u8], layout: u8) -> Option<Vec<Capability>> {
    if u16_at(bytes, STATUS)? & STATUS_CAPABILITIES == 0 {
        return Some(Vec::new());
    }
    // A list is announced, so zeros are not what the function says but what an unprivileged reader sees.
    if bytes.get(HEADER..)?.iter().all(|byte| *byte == 0) {
        return None;
    }
    let pointer = if layout == 2 { CARDBUS_CAPABILITY_POINTER } else { CAPABILITY_POINTER };
    let mut next = bytes.get(pointer).copied();
    let mut seen = BTreeSet::new();
    let mut list = Vec::new();
    // The two low bits are reserved (PCI Local Bus Specification, 6.7).
    while let Some(offset) = next.map(|offset| offset & 0xfc).filter(|offset| usize::from(*offset) >= HEADER)
    {
        let entry = u16_at(bytes, offset.into()).map(u16::to_le_bytes);
        let Some([id, following]) = entry.filter(|[id, _]| *id != 0xff && seen.insert(offset)) else { break };
        list.push(Capability { id: id.into(), offset: offset.into(), name: name(id) });
        next = Some(following);
    }
    Some(list)
}

fn extended(bytes: &[u8]) -> Option<Vec<Capability>> {
    let mut seen = BTreeSet::new();
    let mut list = Vec::new();
    let mut offset = EXTENDED;
    // All ones: the kernel cannot reach extended configuration space here.
    if u32_at(bytes, offset)? == u32::MAX {
        return None;
    }
    while let Some(header) = u32_at(bytes, offset).filter(|header| *header != u32::MAX && *header != 0) {
        if !seen.insert(offset) {
            break;
        }
        let [low, high, ..] = header.to_le_bytes();
        let id = u16::from_le_bytes([low, high]);
        // Id 0 is a null capability, of which only the pointer counts (PCI Express Base Specification, 7.9.28).
        if id != 0 {
            list.push(Capability { id, offset: u16::try_from(offset).ok()?, name: extended_name(id) });
        }
        offset = usize::try_from(header >> 20 & 0xffc).ok()?;
        if offset < EXTENDED {
            break;
        }
    }
    Some(list)
}

fn express(bytes: &[u8], offset: usize) -> Option<Express> {
    let flags = u16_at(bytes, offset + 0x02)?;
    let port = match flags >> 4 & 0xf {
        0 | 1 => PortType::Endpoint,
        4 => PortType::RootPort,
        5 => PortType::SwitchUpstream,
        6 => PortType::SwitchDownstream,
        7 | 8 => PortType::Bridge,
        9 | 10 => PortType::RootComplex,
        _ => PortType::Reserved,
    };
    Some(Express {
        port,
        flr: u32_at(bytes, offset + 0x04)? & 1 << 28 != 0,
        link: Link::from_registers(u32_at(bytes, offset + 0x0c)?, u16_at(bytes, offset + 0x12)?),
    })
}

fn name(id: u8) -> Option<&'static str> {
    Some(match id {
        0x01 => "Power Management",
        0x03 => "Vital Product Data",
        0x05 => "MSI",
        0x09 => "Vendor Specific",
        0x0d => "Subsystem IDs",
        EXPRESS => "PCI Express",
        0x11 => "MSI-X",
        ADVANCED_FEATURES => "Advanced Features",
        0x14 => "Enhanced Allocation",
        _ => return None,
    })
}

fn extended_name(id: u16) -> Option<&'static str> {
    Some(match id {
        0x01 => "Advanced Error Reporting",
        0x02 => "Virtual Channel",
        0x03 => "Device Serial Number",
        0x04 => "Power Budgeting",
        0x0b => "Vendor Specific",
        0x0d => "Access Control Services",
        0x0e => "ARI",
        0x0f => "Address Translation Services",
        0x10 => "SR-IOV",
        0x13 => "Page Request",
        0x15 => "Resizable BAR",
        0x17 => "TPH Requester",
        0x18 => "Latency Tolerance Reporting",
        0x19 => "Secondary PCI Express",
        0x1b => "PASID",
        0x1e => "L1 PM Substates",
        0x1f => "Precision Time Measurement",
        0x23 => "Designated Vendor Specific",
        0x24 => "VF Resizable BAR",
        0x25 => "Data Link Feature",
        0x26 => "Physical Layer 16.0 GT/s",
        0x27 => "Lane Margining",
        0x2a => "Physical Layer 32.0 GT/s",
        0x2e => "Data Object Exchange",
        _ => return None,
    })
}

#[cfg(test)]
mod tests;
