//! `vfiod inspect FUNCTION...`: all that is known of one function.

use std::{collections::BTreeSet, fmt::Write as _};

use decide::{
    inventory::{Inventory, Open},
    names::Naming,
    usage::User,
};
use serde::Serialize;
use vfio::{
    framebuffer::Claim,
    host::Host,
    pci::{
        self, Address, Bar, Capability, ConfigView, Details, Function, PortType, ResetMethods, Role,
        bar::{Region, Space},
        life::{self, Answer},
    },
};

use super::{
    Failure,
    table::{or_dash, render},
};

/// One function in detail.
#[derive(Debug, Serialize)]
pub struct Detail<'a> {
    #[serde(skip)]
    function: &'a Function,
    role: Role,
    name: Option<&'a str>,
    #[serde(flatten)]
    details: Details,
    root_port: Option<Address>,
    switch: Option<Address>,
    /// One look: it tells what answers from what does not, and a reset from death only to who looks twice.
    answer: Answer,
    framebuffer: Option<&'a Claim>,
    /// Why it is not known whether a framebuffer holds it.
    framebuffer_unknown: Option<&'a str>,
    cure: Option<String>,
    holders: BTreeSet<Open>,
}

/// All that is known of `address`.
///
/// # Errors
/// When it is not on this node, or cannot be read at all.
pub fn detail<'a>(
    host: &Host,
    inventory: &'a Inventory,
    naming: &'a Naming,
    address: Address,
) -> Result<Detail<'a>, Failure> {
    let Some(function) = inventory.functions.get(&address) else {
        return Err(match inventory.unreadable.get(&address) {
            Some(reason) => reason.clone().into(),
            None => format!("{address} is not on this node: vfiod inspect lists its functions").into(),
        });
    };
    let holders = inventory.open_function(function);
    // A read of configuration space enters the function, and waits for a guest's reset: not known is in use here too.
    let held = !holders.is_empty() || !inventory.opaque_function(function).is_empty();
    let details = pci::details(host, function, held);
    let framebuffer = inventory.framebuffers.by_function.get(&address);
    Ok(Detail {
        function,
        role: inventory.role(function),
        name: naming.names.device(function.vendor, function.device),
        root_port: details.topology.root_port(),
        switch: details.topology.switch(),
        answer: life::look(host, address, held),
        details,
        framebuffer,
        framebuffer_unknown: inventory.framebuffers.unknown.as_deref(),
        cure: framebuffer.map(Claim::cure),
        holders,
    })
}

/// As people read it: a line a fact.
pub fn detail_text(detail: &Detail<'_>) -> String {
    let Detail { function: f, details: d, .. } = detail;
    let mut text = format!("{}  {}\n", f.address, detail.name.unwrap_or("(no name in pci.ids)"));
    let mut line = |title: &str, value: String| {
        let _ = writeln!(text, "  {title:<12} {value}");
    };
    let subsystem = match (d.subsystem_vendor, d.subsystem_device) {
        (Some(vendor), Some(device)) => format!("{vendor:04x}:{device:04x}"),
        _ => "unknown".to_owned(),
    };
    let revision = d.revision.map_or_else(|| "unknown".to_owned(), |revision| format!("{revision:02x}"));
    line("id", format!("{:04x}:{:04x}, subsystem {subsystem}, revision {revision}", f.vendor, f.device));
    line("class", format!("{} ({})", f.class, detail.role));
    line(
        "driver",
        format!("{}, override {}", or_dash(f.driver.as_ref()), or_dash(f.driver_override.as_ref())),
    );
    line("group", or_dash(f.iommu_group));
    line("numa", numa(f, d));
    line("slot", or_dash(d.slot.as_ref()));
    line("label", or_dash(d.label.as_ref()));
    line("path", path(d, f.address));
    line("link", link(d));
    line("reset", reset(d));
    line("power", power(d));
    line("answers", answer(detail.answer).to_owned());
    if d.boot_vga == Some(true) {
        line("display", "the firmware's (boot_vga)".to_owned());
    }
    if d.total_vfs.is_some_and(|total| total > 0) || !d.virtfns.is_empty() {
        let vfs: Vec<_> = d.virtfns.iter().map(ToString::to_string).collect();
        line(
            "vfs",
            format!("{} of {} {}", vfs.len(), or_dash(d.total_vfs), vfs.join(" ")).trim_end().to_owned(),
        );
    }
    line("capabilities", capabilities(d));
    let framebuffer = match (detail.framebuffer, detail.framebuffer_unknown) {
        (Some(claim), _) => format!("{claim}; {}", claim.cure()),
        (None, Some(reason)) => format!("unknown: {reason}"),
        (None, None) => "-".to_owned(),
    };
    line("framebuffer", framebuffer);
    for open in &detail.holders {
        line("holder", User::Process(open.clone()).to_string());
    }
    if detail.holders.is_empty() {
        line("holder", "-".to_owned());
    }
    match &d.bars {
        Some(bars) => text.push_str(&bar_table(bars)),
        None => text.push_str("  BARs cannot be read\n"),
    }
    text
}

fn numa(function: &Function, details: &Details) -> String {
    let Some(distances) = &details.numa_distances else { return function.numa_node.to_string() };
    let distances: Vec<_> =
        distances.iter().map(|(node, distance)| format!("{distance} to node {node}")).collect();
    format!("{} (distance {})", function.numa_node, distances.join(", "))
}

fn path(details: &Details, address: Address) -> String {
    let Some(bridge) = &details.topology.host_bridge else { return "unknown".to_owned() };
    let port = |port| match port {
        PortType::RootPort => "root port",
        PortType::SwitchUpstream => "switch",
        PortType::SwitchDownstream => "switch port",
        PortType::Bridge => "bridge",
        PortType::Endpoint | PortType::RootComplex | PortType::Reserved => "port",
    };
    let hops = details.topology.hops.iter().map(|hop| format!("{} {}", port(hop.port), hop.address));
    let way: Vec<_> = [bridge.clone()].into_iter().chain(hops).chain([address.to_string()]).collect();
    way.join(" > ")
}

fn link(details: &Details) -> String {
    let link = details.link;
    let lanes = |width: Option<u8>| width.map_or_else(|| "?".to_owned(), |lanes| format!("x{lanes}"));
    let speed =
        |speed: Option<pci::LinkSpeed>| speed.map_or_else(|| "?".to_owned(), |speed| speed.to_string());
    if link == pci::Link::default() {
        return "unknown".to_owned();
    }
    let narrowed =
        if link.narrowed() { "; fewer lanes than it has: seat it anew, or use a wider slot" } else { "" };
    format!(
        "{} {} of at most {} {}{narrowed}",
        speed(link.current_speed),
        lanes(link.current_width),
        speed(link.max_speed),
        lanes(link.max_width),
    )
}

fn reset(details: &Details) -> String {
    let methods = match &details.reset {
        ResetMethods::Ordered(methods) => methods.join(", "),
        ResetMethods::Off => "switched off: reset_method is empty".to_owned(),
        ResetMethods::Unlisted => "yes (this kernel does not say how)".to_owned(),
        ResetMethods::Absent => "none of its own".to_owned(),
        ResetMethods::Unknown => "unknown".to_owned(),
    };
    let flr = match &details.config {
        ConfigView::Read(space) => space.flr,
        ConfigView::Held | ConfigView::Unreadable { .. } => None,
    };
    match flr {
        Some(true) => format!("{methods} (FLR: yes)"),
        Some(false) => format!("{methods} (FLR: no)"),
        None => format!("{methods} (FLR: unknown)"),
    }
}

fn power(details: &Details) -> String {
    let state = or_dash(details.power_state.as_ref());
    match details.d3cold_allowed {
        Some(true) => format!("{state}, D3cold allowed"),
        Some(false) => format!("{state}, D3cold not allowed"),
        None => state,
    }
}

fn answer(answer: Answer) -> &'static str {
    match answer {
        Answer::Answers => "yes",
        Answer::AllOnes => {
            "no: its configuration space reads as all ones (in reset, or off the bus); look again"
        }
        Answer::HeaderType7f => "no: its header type reads as 7f (in reset, or off the bus); look again",
        Answer::Held => "not asked: it is open, or not known to be free",
        Answer::Unreadable => "unknown",
    }
}

fn capabilities(details: &Details) -> String {
    let space = match &details.config {
        ConfigView::Read(space) => space,
        ConfigView::Held => return "not read: it is open, or not known to be free".to_owned(),
        ConfigView::Unreadable { reason } => return format!("unknown: {reason}"),
    };
    let (Some(list), extended) = (&space.capabilities, &space.extended) else {
        return "unknown: beyond 64 bytes of configuration space it takes CAP_SYS_ADMIN".to_owned();
    };
    let name = |found: &Capability| found.name.map_or_else(|| format!("{:#04x}", found.id), str::to_owned);
    let names: Vec<_> = list.iter().chain(extended.iter().flatten()).map(name).collect();
    let rest = if extended.is_none() { " (extended ones unknown)" } else { "" };
    let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    format!("{names}{rest}")
}

fn bar_table(bars: &[Bar]) -> String {
    let rows = bars.iter().map(|bar| {
        let region = match bar.region {
            Region::Bar => format!("BAR {}", bar.index),
            Region::Rom => "ROM".to_owned(),
            Region::VfBar => format!("VF BAR {}", bar.index),
        };
        let kind = match (bar.space, bar.wide) {
            (Space::Io, _) => "I/O",
            (Space::Memory, false) => "memory, 32-bit",
            (Space::Memory, true) => "memory, 64-bit",
        };
        vec![
            region,
            size(bar.size),
            if bar.assigned { format!("{:#x}", bar.start) } else { "not assigned".to_owned() },
            format!("{kind}{}", if bar.prefetchable { ", prefetchable" } else { "" }),
        ]
    });
    let table = render(&["region", "size", "at", "kind"], rows.collect(), "No BAR.");
    table.lines().map(|line| format!("  {line}\n")).collect()
}

/// The largest unit that leaves a whole number.
fn size(bytes: u64) -> String {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let unit = units.iter().find(|(_, shift)| bytes > 0 && bytes.trailing_zeros() >= *shift);
    unit.map_or_else(|| format!("{bytes} B"), |(name, shift)| format!("{} {name}", bytes >> shift))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_whole_numbers() {
        for (bytes, expected) in
            [(256 << 30, "256 GiB"), (16 << 20, "16 MiB"), (512 << 10, "512 KiB"), (128, "128 B"), (0, "0 B")]
        {
            assert_eq!(size(bytes), expected);
        }
    }
}
