//! The values of a profile, one by one.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    str::FromStr,
};

use serde_saphyr::Spanned;

use super::{
    Answers, Bar, ProfileError, ProfileFunction, ReservedKind, Space, Sriov,
    spelling::{Vfs, refuse},
};
use crate::pci::Address;

/// How many NUMA nodes a kernel has at most (`NODES_SHIFT` 10).
const NUMA_NODES: i32 = 1024;

pub(super) fn address(
    path: &Path,
    given: &Spanned<String>,
    key: &'static str,
) -> Result<Address, ProfileError> {
    let expected = "DOMAIN:BUS:DEVICE.FUNCTION in hex, such as 0000:3b:00.0";
    let address: Address = given.value.parse().map_err(|_| refuse(path, given, key, expected))?;
    // The kernel's spelling only, so that a file can be searched for what vfiod prints.
    (address.to_string() == given.value).then_some(address).ok_or_else(|| refuse(path, given, key, expected))
}

fn hex(text: &str, digits: usize) -> Option<u32> {
    let fits = text.len() == digits && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    fits.then(|| u32::from_str_radix(text, 16).ok()).flatten()
}

fn id(text: &str) -> Option<u16> {
    hex(text, 4).and_then(|id| u16::try_from(id).ok())
}

pub(super) fn ids(
    path: &Path,
    given: &Spanned<String>,
    key: &'static str,
) -> Result<(u16, u16), ProfileError> {
    let pair = given.value.split_once(':').and_then(|(vendor, device)| Some((id(vendor)?, id(device)?)));
    pair.ok_or_else(|| {
        refuse(path, given, key, "vendor and device as four hex digits each, such as 10de:2330")
    })
}

pub(super) fn class(path: &Path, given: &Spanned<String>) -> Result<u32, ProfileError> {
    let text = given.value.strip_prefix("0x").unwrap_or(&given.value);
    hex(text, 6).ok_or_else(|| refuse(path, given, "class", "six hex digits, such as 030200"))
}

pub(super) fn revision(path: &Path, given: &Spanned<String>) -> Result<u8, ProfileError> {
    let number = hex(&given.value, 2).and_then(|number| u8::try_from(number).ok());
    number.ok_or_else(|| refuse(path, given, "revision", "two hex digits, such as a1"))
}

pub(super) fn numa(path: &Path, given: &Spanned<i32>) -> Result<i32, ProfileError> {
    let fits = (-1..NUMA_NODES).contains(&given.value);
    fits.then_some(given.value)
        .ok_or_else(|| refuse(path, given, "numa", "a node's number, or -1 for not known"))
}

pub(super) fn cpu_list(path: &Path, given: Spanned<String>) -> Result<String, ProfileError> {
    let part = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        matches!((u32::from_str(first), u32::from_str(last)), (Ok(first), Ok(last)) if first <= last)
    };
    if given.value.is_empty() || given.value.split(',').all(part) {
        return Ok(given.value);
    }
    Err(refuse(path, &given, "cpus", "CPUs as 0-55,112-167, or \"\" for a node that has none"))
}

pub(super) fn reset_method(path: &Path, given: &Spanned<String>) -> Result<String, ProfileError> {
    // pci_reset_fn_methods, drivers/pci/pci.c.
    const METHODS: [&str; 7] = ["device_specific", "acpi", "flr", "af_flr", "pm", "bus", "cxl_bus"];
    let fits = given.value.split(' ').all(|method| METHODS.contains(&method));
    let expected = "one or more of device_specific, acpi, flr, af_flr, pm, bus, cxl_bus with a space between, or leave it \
                    out for a function that cannot be reset";
    fits.then(|| given.value.clone()).ok_or_else(|| refuse(path, given, "reset_method", expected))
}

pub(super) fn bars(
    path: &Path,
    given: Option<&BTreeMap<u8, Spanned<String>>>,
) -> Result<Vec<Bar>, ProfileError> {
    let mut bars: Vec<Bar> = Vec::new();
    for (index, text) in given.into_iter().flatten() {
        let refused = |expected| refuse(path, text, "bars", expected);
        let bar = bar(*index, &text.value).ok_or_else(|| {
            refused(
                "a power of two, then what holds of 64 and prefetchable, or io: \"16M\", \"32G 64 prefetchable\", \
                 \"128 io\"; without 64 it is at most 1G; unassigned at the end for one without an address",
            )
        })?;
        let last = if bar.space == Space::Memory64 { index.saturating_add(1) } else { *index };
        let free = bars
            .last()
            .is_none_or(|before| before.index + u8::from(before.space == Space::Memory64) < *index);
        if last > 5 || !free {
            return Err(refused(
                "it under a number from 0 to 5 that is free; a 64-bit one takes the next number too",
            ));
        }
        bars.push(bar);
    }
    Ok(bars)
}

fn bar(index: u8, text: &str) -> Option<Bar> {
    let mut words = text.split(' ');
    let size = size(words.next()?)?;
    let mut bar = Bar { index, size, space: Space::Memory32, prefetchable: false, assigned: true };
    for word in words {
        match (word, bar.space) {
            ("io", Space::Memory32) if !bar.prefetchable => bar.space = Space::Io,
            ("64", Space::Memory32) => bar.space = Space::Memory64,
            ("prefetchable", Space::Memory32 | Space::Memory64) if !bar.prefetchable => {
                bar.prefetchable = true;
            }
            ("unassigned", _) if bar.assigned => bar.assigned = false,
            _ => return None,
        }
    }
    let bounds = match bar.space {
        Space::Io => 4..=256,
        Space::Memory32 => 16..=1 << 30,
        // 8 TiB: what the largest cards could ask for, and far from the end of the address space.
        Space::Memory64 => 16..=1 << 43,
    };
    (size.is_power_of_two() && bounds.contains(&size)).then_some(bar)
}

fn size(text: &str) -> Option<u64> {
    let units = [("K", 10), ("M", 20), ("G", 30), ("T", 40)];
    let with_unit = units.iter().find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, *shift)));
    let (digits, shift) = with_unit.unwrap_or((text, 0));
    let plain = digits.bytes().all(|byte| byte.is_ascii_digit());
    plain.then(|| digits.parse::<u64>().ok()).flatten()?.checked_mul(1 << shift)
}

/// How configuration space answers.
pub(super) fn answers(path: &Path, given: &Spanned<String>) -> Result<Answers, ProfileError> {
    match given.value.as_str() {
        "true" => Ok(Answers::Yes),
        "false" => Ok(Answers::No),
        "7f" => Ok(Answers::HeaderType7f),
        _ => Err(refuse(
            path,
            given,
            "answers",
            "true, false for a function that reads as all ones, or 7f for a header of type 0x7f",
        )),
    }
}

/// The regions that each group's file lists; only of groups that `functions` are in.
pub(super) fn reserved(
    path: &Path,
    given: Option<BTreeMap<u32, Spanned<Vec<Spanned<String>>>>>,
    functions: &[ProfileFunction],
) -> Result<BTreeMap<u32, BTreeSet<ReservedKind>>, ProfileError> {
    let groups: BTreeSet<u32> = functions.iter().filter_map(|function| function.group).collect();
    let kind = |text: &Spanned<String>| {
        let kinds =
            [ReservedKind::Direct, ReservedKind::DirectRelaxable, ReservedKind::Reserved, ReservedKind::Msi];
        let found = kinds.into_iter().find(|kind| kind.as_str() == text.value);
        found.ok_or_else(|| refuse(path, text, "reserved", "direct, direct-relaxable, reserved or msi"))
    };
    let mut regions = BTreeMap::new();
    for (group, kinds) in given.into_iter().flatten() {
        if !groups.contains(&group) {
            let at = Spanned { value: group, referenced: kinds.referenced, defined: kinds.defined };
            return Err(refuse(path, &at, "reserved", "a group that some function of this profile is in"));
        }
        regions.insert(group, kinds.value.iter().map(kind).collect::<Result<_, _>>()?);
    }
    Ok(regions)
}

/// A physical function's capability.
pub(super) fn sriov(path: &Path, physfn: &ProfileFunction, vfs: &Vfs) -> Result<Sriov, ProfileError> {
    let refused = |given: &Spanned<u16>, key, expected| Err(refuse(path, given, key, expected));
    let stride = vfs.stride.as_ref();
    if vfs.count.value == 0 {
        return refused(&vfs.count, "vfs.count", "how many VFs there can be, at least 1");
    }
    if vfs.offset.value == 0 {
        return refused(
            &vfs.offset,
            "vfs.offset",
            "the steps from the physical function to the first VF, at least 1",
        );
    }
    if let Some(stride) = stride.filter(|stride| stride.value == 0) {
        return refused(stride, "vfs.stride", "the steps from one VF to the next, at least 1");
    }
    if let Some(enabled) = vfs.enabled.as_ref().filter(|enabled| enabled.value > vfs.count.value) {
        return refused(enabled, "vfs.enabled", "at most vfs.count");
    }
    let device = vfs.device.as_ref().map_or(Ok(physfn.device), |given| {
        id(&given.value)
            .ok_or_else(|| refuse(path, given, "vfs.device", "a device id of four hex digits, such as 2235"))
    })?;
    Ok(Sriov {
        total: vfs.count.value,
        offset: vfs.offset.value,
        stride: stride.map_or(1, |stride| stride.value),
        device,
        bars: bars(path, vfs.bars.as_ref())?,
    })
}
