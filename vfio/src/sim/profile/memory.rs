//! Where the simulated firmware puts each BAR, and how the kernel lists that.

use std::{collections::BTreeMap, fmt::Write as _};

use super::{Bar, Framebuffer, ProfileFunction, Space};
use crate::pci::Address;

/// Below 4 GiB: from the end of memory to the interrupt controllers.
const LOW: (u64, u64) = (0x8000_0000, 0xfec0_0000);
/// Above: from where firmware with 46-bit addresses puts it, up to what processors can address.
const HIGH: (u64, u64) = (0x2000_0000_0000, 1 << 52);
const PORTS: (u64, u64) = (0x2000, 0x1_0000);

/// The resource number of the first VF BAR (`PCI_IOV_RESOURCES`, include/linux/pci.h): after six BARs and the ROM.
const VF_RESOURCES: u8 = 7;
/// How many lines `resource` has: six BARs, the ROM, six VF BARs; a bridge also has its four windows.
const LINES: u8 = 13;
const BRIDGE_LINES: u8 = 17;
/// A console of 1920 by 1080 takes 8 MiB less a little.
const FRAMEBUFFER: u64 = 0x7e_9000;

/// One BAR with its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Region {
    pub start: u64,
    pub size: u64,
    pub space: Space,
    pub prefetchable: bool,
    /// Whether it has a place; its start is 0 without.
    pub assigned: bool,
}

impl Region {
    fn end(&self) -> u64 {
        self.start.saturating_add(self.size).saturating_sub(1)
    }

    /// The flags of include/linux/ioport.h: kind, prefetch, 64 bit, aligned by size; the lowest byte is the BAR's own.
    fn flags(&self) -> u64 {
        let kind = match self.space {
            Space::Io => 0x101,
            Space::Memory32 => 0x200,
            Space::Memory64 => 0x10_0204,
        };
        // IORESOURCE_UNSET.
        let unset = if self.assigned { 0 } else { 0x2000_0000 };
        0x4_0000 | kind | unset | if self.prefetchable { 0x2008 } else { 0 }
    }
}

/// Every region of a node, by function and resource number.
pub(super) type Regions = BTreeMap<(Address, u8), Region>;

/// Gives each BAR its place, aligned to its size. VFs get slices of what their physical function was given.
///
/// # Errors
/// With the first function for which there is no room.
pub(super) fn assign(functions: &[ProfileFunction]) -> Result<Regions, Address> {
    let (mut low, mut high, mut ports) = (LOW.0, HIGH.0, PORTS.0);
    let mut regions = Regions::new();
    for function in functions.iter().filter(|function| function.physfn.is_none()) {
        let own = function.bars.iter().map(|bar| (bar, 0_u8, 1_u64));
        let of_vfs = function
            .sriov
            .iter()
            .flat_map(|sriov| sriov.bars.iter().map(|bar| (bar, VF_RESOURCES, u64::from(sriov.total))));
        for (bar, first, count) in own.chain(of_vfs) {
            let (next, limit) = match bar.space {
                Space::Io => (&mut ports, PORTS.1),
                Space::Memory32 => (&mut low, LOW.1),
                Space::Memory64 => (&mut high, HIGH.1),
            };
            let Bar { index, space, prefetchable, assigned, .. } = *bar;
            let size = bar.size.saturating_mul(count);
            let mut start = 0;
            if assigned {
                start = next.checked_next_multiple_of(bar.size).ok_or(function.address)?;
                *next = start.checked_add(size).filter(|end| *end <= limit).ok_or(function.address)?;
            }
            let region = Region { start, size, space, prefetchable, assigned };
            regions.insert((function.address, first + index), region);
        }
    }
    let mut counted: BTreeMap<Address, u64> = BTreeMap::new();
    for vf in functions {
        let Some(physfn) = vf.physfn else { continue };
        let number = counted.entry(physfn).or_default();
        for bar in &vf.bars {
            let Some(whole) = regions.get(&(physfn, VF_RESOURCES + bar.index)).copied() else { continue };
            let offset = if whole.assigned { bar.size.saturating_mul(*number) } else { 0 };
            let start = whole.start.saturating_add(offset);
            regions.insert((vf.address, bar.index), Region { start, size: bar.size, ..whole });
        }
        *number += 1;
    }
    Ok(regions)
}

/// The `resource` file of a function.
pub(super) fn resource(function: &ProfileFunction, regions: &Regions) -> String {
    let lines = if function.is_bridge() { BRIDGE_LINES } else { LINES };
    let mut out = String::new();
    for number in 0..lines {
        let (start, end, flags) = regions
            .get(&(function.address, number))
            .map_or((0, 0, 0), |region| (region.start, region.end(), region.flags()));
        let _ = writeln!(out, "{start:#018x} {end:#018x} {flags:#018x}");
    }
    out
}

/// `/proc/iomem` as root reads it: bus window, function, and what lies in it.
pub(super) fn iomem(functions: &[ProfileFunction], regions: &Regions) -> String {
    let mut out =
        "00001000-0009ffff : System RAM\n000a0000-000fffff : Reserved\n00100000-7fffffff : System RAM\n"
            .to_owned();
    let mut line = |depth: usize, start: u64, end: u64, name: &str| {
        let _ = writeln!(out, "{:indent$}{start:08x}-{end:08x} : {name}", "", indent = depth * 2);
    };
    let by_address: BTreeMap<Address, &ProfileFunction> = functions.iter().map(|f| (f.address, f)).collect();
    let mut memory: Vec<_> =
        regions.iter().filter(|(_, region)| region.space != Space::Io && region.assigned).collect();
    memory.sort_by_key(|(at, region)| (region.start, *at));
    for ((address, number), region) in &memory {
        let Some(function) = by_address.get(address) else { continue };
        if function.physfn.is_some() {
            continue;
        }
        let bus = format!("PCI Bus {:04x}:{:02x}", address.domain(), address.bus());
        line(0, region.start, region.end(), &bus);
        line(1, region.start, region.end(), &address.to_string());
        if *number >= VF_RESOURCES {
            let inside = memory.iter().filter(|((vf, _), slice)| {
                by_address.get(vf).is_some_and(|vf| vf.physfn == Some(*address))
                    && (region.start..=region.end()).contains(&slice.start)
            });
            for ((vf, _), slice) in inside {
                line(2, slice.start, slice.end(), &vf.to_string());
            }
        }
        if let Some(framebuffer) = function.framebuffer.filter(|_| framebuffer_bar(function) == Some(*number))
        {
            let end = region.start.saturating_add(FRAMEBUFFER.min(region.size)).saturating_sub(1);
            // simpledrm's device is made by sysfb, which names the region; efifb asks for it itself.
            let names: &[&str] = match framebuffer {
                Framebuffer::Simpledrm => &["BOOTFB", "simpledrm"],
                Framebuffer::Efifb => &["efifb"],
            };
            for (depth, name) in (2..).zip(names) {
                line(depth, region.start, end, name);
            }
        }
    }
    out
}

/// The BAR that the firmware draws in: the first prefetchable one with a place.
pub(super) fn framebuffer_bar(function: &ProfileFunction) -> Option<u8> {
    let mut memory = function.bars.iter().filter(|bar| bar.space != Space::Io);
    memory.find(|bar| bar.prefetchable && bar.assigned).map(|bar| bar.index)
}

/// The value of a BAR's register, and of the one after it for a 64-bit BAR.
pub(super) fn registers(region: &Region) -> (u32, Option<u32>) {
    let [a, b, c, d, e, f, g, h] = region.start.to_le_bytes();
    let (low, high) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
    let prefetch = if region.prefetchable { 8 } else { 0 };
    match region.space {
        Space::Io => (low | 1, None),
        Space::Memory32 => (low | prefetch, None),
        Space::Memory64 => (low | 4 | prefetch, Some(high)),
    }
}
