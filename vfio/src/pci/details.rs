//! All that sysfs tells of one function, beyond what decides about it.
//!
//! Nothing here is an error: what cannot be read is not known, and the function is none the worse for it.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{
    Address, Bar, ConfigSpace, Function, Link, LinkSpeed, ResetMethods, Topology, bar, config,
    link::parse_width,
    topology::{numa_distances, slot, topology},
};
use crate::{host::Host, printable::printable_some};

/// A function in detail. Source of each field: Documentation/ABI/testing/sysfs-bus-pci, where it names no other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Details {
    /// The function.
    pub address: Address,
    /// Who made the board.
    #[serde(serialize_with = "hex4")]
    pub subsystem_vendor: Option<u16>,
    /// Which board it is.
    #[serde(serialize_with = "hex4")]
    pub subsystem_device: Option<u16>,
    /// The chip's revision.
    #[serde(serialize_with = "hex2")]
    pub revision: Option<u8>,
    /// Its virtual functions, by their number.
    pub virtfns: Vec<Address>,
    /// How many virtual functions it can have.
    pub total_vfs: Option<u32>,
    /// How it can be reset.
    pub reset: ResetMethods,
    /// Its regions; none where they cannot be read.
    pub bars: Option<Vec<Bar>>,
    /// Its configuration space.
    pub config: ConfigView,
    /// Its link; of what `current_link_speed` and its like say, else of what configuration space says.
    pub link: Link,
    /// What the firmware calls it (`label`: SMBIOS type 41, or ACPI _DSM).
    pub label: Option<String>,
    /// The slot that it is in.
    pub slot: Option<String>,
    /// Whether it was the firmware's display (`boot_vga`); only display functions say.
    pub boot_vga: Option<bool>,
    /// `D0` to `D3cold`. Never a fault: what is idle sleeps.
    pub power_state: Option<String>,
    /// Whether it may sleep without power.
    pub d3cold_allowed: Option<bool>,
    /// The way to it from the root.
    pub topology: Topology,
    /// How far each NUMA node is from its own.
    pub numa_distances: Option<BTreeMap<u32, u32>>,
}

/// What became of reading configuration space.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum ConfigView {
    /// It was read, as far as the reader may.
    Read(ConfigSpace),
    /// It was left alone, since somebody has the function open.
    Held,
    /// It cannot be read.
    Unreadable {
        /// Why not.
        reason: String,
    },
}

fn hex4<S: serde::Serializer>(id: &Option<u16>, serializer: S) -> Result<S::Ok, S::Error> {
    id.map(|id| format!("{id:04x}")).serialize(serializer)
}

fn hex2<S: serde::Serializer>(id: &Option<u8>, serializer: S) -> Result<S::Ok, S::Error> {
    id.map(|id| format!("{id:02x}")).serialize(serializer)
}

/// Reads all there is of `function`. `held` says that somebody has it open: then its configuration space is left alone, since
/// that read enters the function.
#[must_use]
pub fn details(host: &Host, function: &Function, held: bool) -> Details {
    let address = function.address;
    let dir = host.function_dir(address);
    let text = |attribute: &str| host.read(&dir.join(attribute)).ok();
    let hex = |attribute: &str| {
        text(attribute).and_then(|content| u32::from_str_radix(content.trim().strip_prefix("0x")?, 16).ok())
    };
    let flag = |attribute: &str| match text(attribute)?.trim() {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    };
    let speed = |attribute: &str| text(attribute).as_deref().and_then(LinkSpeed::parse);
    let width = |attribute: &str| text(attribute).as_deref().and_then(parse_width);

    let config = if held { ConfigView::Held } else { config_view(host, address) };
    let shown = Link {
        current_speed: speed("current_link_speed"),
        current_width: width("current_link_width"),
        max_speed: speed("max_link_speed"),
        max_width: width("max_link_width"),
    };
    let from_config = match &config {
        ConfigView::Read(space) => space.express.map(|express| express.link),
        ConfigView::Held | ConfigView::Unreadable { .. } => None,
    };
    // A bridge is nobody's to hold.
    let topology = topology(host, address, |bridge| match config_view(host, bridge) {
        ConfigView::Read(space) => space.express.map(|express| express.port),
        ConfigView::Held | ConfigView::Unreadable { .. } => None,
    });
    Details {
        address,
        subsystem_vendor: hex("subsystem_vendor").and_then(|id| u16::try_from(id).ok()),
        subsystem_device: hex("subsystem_device").and_then(|id| u16::try_from(id).ok()),
        revision: hex("revision").and_then(|id| u8::try_from(id).ok()),
        virtfns: virtfns(host, address),
        total_vfs: text("sriov_totalvfs").and_then(|content| content.trim().parse().ok()),
        reset: ResetMethods::read(host, address),
        bars: text("resource").as_deref().map(bar::parse),
        link: shown.or(from_config.unwrap_or_default()),
        config,
        label: text("label").as_deref().and_then(printable_some),
        slot: slot(host, address, &topology),
        boot_vga: flag("boot_vga"),
        power_state: text("power_state").as_deref().and_then(printable_some),
        d3cold_allowed: flag("d3cold_allowed"),
        topology,
        numa_distances: numa_distances(host, function.numa_node),
    }
}

fn config_view(host: &Host, address: Address) -> ConfigView {
    match host.bytes(&host.function_dir(address).join("config"), config::SIZE) {
        Ok(bytes) => ConfigView::Read(config::parse(&bytes)),
        Err(error) => ConfigView::Unreadable { reason: error.to_string() },
    }
}

/// The links `virtfnN`, by N: in a directory listing `virtfn10` comes before `virtfn2`.
fn virtfns(host: &Host, address: Address) -> Vec<Address> {
    let dir = host.function_dir(address);
    let numbered: BTreeMap<u32, Address> = host
        .list(&dir)
        .unwrap_or_default()
        .iter()
        .filter_map(|name| {
            let number = name.strip_prefix("virtfn")?.parse().ok()?;
            Some((number, host.link_name(&dir.join(name)).ok()??.parse().ok()?))
        })
        .collect();
    numbered.into_values().collect()
}
