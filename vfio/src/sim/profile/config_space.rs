//! The first 64 bytes of configuration space: what a reader without CAP_SYS_ADMIN gets of it.

use super::{
    Answers, ProfileFunction,
    memory::{Regions, registers},
};

/// Memory and I/O decoding and bus mastering are on.
const COMMAND: u16 = 0x0007;
/// There is a capability list.
const STATUS: u16 = 0x0010;
const CAPABILITIES: u8 = 0x60;

/// The buses of a bridge: its own, the one behind it, the last one behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Buses {
    pub primary: u8,
    pub secondary: u8,
    pub subordinate: u8,
}

/// The header of `function`. `multifunction`: another function is in its slot; `buses`: it is a bridge with these.
///
/// Source: PCI Express Base Specification, 7.5.1 (type 0 and 1) and 9.3.4.1 (VFs: no ids, no BARs, no decoding).
pub(super) fn header(
    function: &ProfileFunction,
    multifunction: bool,
    buses: Option<Buses>,
    regions: &Regions,
) -> Vec<u8> {
    if function.answers == Answers::No {
        return vec![0xff; 64];
    }
    let is_vf = function.physfn.is_some();
    let mut out = Vec::with_capacity(64);
    let (vendor, device) = if is_vf { (0xffff, 0xffff) } else { (function.vendor, function.device) };
    out.extend(vendor.to_le_bytes());
    out.extend(device.to_le_bytes());
    out.extend(if is_vf { [0x04, 0] } else { COMMAND.to_le_bytes() });
    out.extend(STATUS.to_le_bytes());
    let [_, base, sub, interface] = function.class.to_be_bytes();
    out.extend([function.revision, interface, sub, base]);
    let kind = match function.answers {
        Answers::HeaderType7f => 0x7f,
        Answers::Yes | Answers::No => u8::from(function.is_bridge()),
    };
    out.extend([0, 0, kind | if multifunction { 0x80 } else { 0 }, 0]);
    if function.is_bridge() {
        type_1(&mut out, function, buses);
    } else {
        type_0(&mut out, function, regions);
    }
    out
}

fn type_0(out: &mut Vec<u8>, function: &ProfileFunction, regions: &Regions) {
    let mut upper_half = None;
    for number in 0..6 {
        let region = regions.get(&(function.address, number)).filter(|_| function.physfn.is_none());
        let register = match (upper_half.take(), region) {
            (Some(high), _) => high,
            (None, Some(region)) => {
                let (low, high) = registers(region);
                upper_half = high;
                low
            }
            (None, None) => 0,
        };
        out.extend(register.to_le_bytes());
    }
    out.extend([0; 4]);
    out.extend(function.subsystem.0.to_le_bytes());
    out.extend(function.subsystem.1.to_le_bytes());
    out.extend([0; 4]);
    out.extend([CAPABILITIES, 0, 0, 0, 0, 0, 0, 0]);
    // The interrupt line's 255 is "not routed"; the pin is INTA, which VFs do not have.
    out.extend([0xff, u8::from(function.physfn.is_none()), 0, 0]);
}

fn type_1(out: &mut Vec<u8>, function: &ProfileFunction, buses: Option<Buses>) {
    let here = function.address.bus();
    let Buses { primary, secondary, subordinate } =
        buses.unwrap_or(Buses { primary: here, secondary: 0, subordinate: 0 });
    out.extend([0; 8]);
    out.extend([primary, secondary, subordinate, 0]);
    // The windows stay closed: their limits lie below their bases.
    out.extend([0xf1, 0x01, 0, 0]);
    out.extend([0xf0, 0xff, 0, 0, 0xf1, 0xff, 0x01, 0]);
    out.extend([0; 12]);
    out.extend([CAPABILITIES, 0, 0, 0, 0, 0, 0, 0]);
    out.extend([0xff, 1, 0, 0]);
}
