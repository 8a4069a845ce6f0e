//! Where a function sits: the ports and switches between it and its root, its slot, its distance to memory.

use std::{collections::BTreeMap, path::Path};

use serde::Serialize;

use super::{Address, config::PortType};
use crate::{
    host::Host,
    printable::{printable, printable_some},
};

/// A bridge on the way from the root to a function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Hop {
    /// The bridge.
    pub address: Address,
    /// What it is; from its place on the way, where its configuration space does not tell.
    pub port: PortType,
}

/// The way from the root complex to a function.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Topology {
    /// The host bridge (`pci0000:3a`); none where the path could not be followed.
    pub host_bridge: Option<String>,
    /// The bridges on the way, from the root on.
    pub hops: Vec<Hop>,
}

impl Topology {
    /// The root port that the function is below.
    #[must_use]
    pub fn root_port(&self) -> Option<Address> {
        self.nearest(PortType::RootPort)
    }

    /// The switch that the function is below, by its port towards the root; the nearest of several. Functions of one switch
    /// reach each other without the root complex.
    #[must_use]
    pub fn switch(&self) -> Option<Address> {
        self.nearest(PortType::SwitchUpstream)
    }

    fn nearest(&self, port: PortType) -> Option<Address> {
        self.hops.iter().rev().find(|hop| hop.port == port).map(|hop| hop.address)
    }
}

/// Reads the way to `address` from the real path of its directory: every bridge's directory holds those behind it
/// (`/sys/devices/pci0000:3a/0000:3a:01.0/0000:3b:00.0`). `port` says what configuration space tells of a bridge.
#[must_use]
pub fn topology(host: &Host, address: Address, port: impl Fn(Address) -> Option<PortType>) -> Topology {
    let Ok(Some(path)) = host.real_path(&host.function_dir(address)) else { return Topology::default() };
    way(&path, port)
}

fn way(path: &Path, port: impl Fn(Address) -> Option<PortType>) -> Topology {
    let mut topology = Topology::default();
    let mut bridges: Vec<Address> = Vec::new();
    for component in path.iter().map(|component| component.to_string_lossy()) {
        if let Ok(address) = component.parse() {
            bridges.push(address);
        } else if component.strip_prefix("pci").is_some_and(|bus| bus.contains(':')) {
            // VMD has its root bus inside the real one's function: the last one counts, and what it is behind is no bridge.
            topology.host_bridge = Some(printable(&component));
            bridges.clear();
        }
    }
    // The last one is the function itself.
    bridges.pop();
    topology.hops = bridges
        .into_iter()
        .enumerate()
        .map(|(place, address)| Hop { address, port: port(address).unwrap_or_else(|| by_place(place)) })
        .collect();
    topology
}

/// A root bus has root ports; behind one, switches follow each other, each with a port up and a port down.
fn by_place(place: usize) -> PortType {
    match place {
        0 => PortType::RootPort,
        _ if place % 2 == 1 => PortType::SwitchUpstream,
        _ => PortType::SwitchDownstream,
    }
}

/// The name of the slot that the function is in, by `/sys/bus/pci/slots/NAME/address`: `0000:3b:00`, or `0000:3b` for a slot
/// that speaks of a whole bus (`address_read_file`, drivers/pci/slot.c). A card with a switch of its own has its slot above
/// the switch: the nearest on the way counts.
#[must_use]
pub fn slot(host: &Host, address: Address, topology: &Topology) -> Option<String> {
    let dir = host.sys("bus/pci/slots");
    let slots: Vec<(String, String)> = host
        .list(&dir)
        .ok()?
        .into_iter()
        .filter_map(|name| {
            let address = host.read(&dir.join(&name).join("address")).ok()?;
            Some((name, address.trim().to_ascii_lowercase()))
        })
        .collect();
    let way = topology.hops.iter().rev().map(|hop| hop.address);
    [address].into_iter().chain(way).find_map(|address| {
        let text = address.to_string();
        let device = text.rsplit_once('.')?.0;
        let bus = device.rsplit_once(':')?.0;
        let found = slots.iter().find(|(_, place)| place == device || place == bus);
        found.and_then(|(name, _)| printable_some(name))
    })
}

/// How far a NUMA node's memory is from each online node, as `/sys/devices/system/node/nodeN/distance` says it (10 is the
/// node itself; ACPI SLIT). None for node -1, and where file and nodes do not fit each other.
#[must_use]
pub fn numa_distances(host: &Host, node: i32) -> Option<BTreeMap<u32, u32>> {
    let node = u32::try_from(node).ok()?;
    let dir = host.sys("devices/system/node");
    let text = host.read(&dir.join(format!("node{node}/distance"))).ok()?;
    // The file has one number for each online node (`node_read_distance`, drivers/base/node.c), and those have directories.
    let mut nodes: Vec<u32> =
        host.list(&dir).ok()?.iter().filter_map(|name| name.strip_prefix("node")?.parse().ok()).collect();
    nodes.sort_unstable();
    distances(&nodes, &text)
}

fn distances(nodes: &[u32], text: &str) -> Option<BTreeMap<u32, u32>> {
    let numbers: Vec<u32> = text.split_whitespace().map(str::parse).collect::<Result<_, _>>().ok()?;
    (numbers.len() == nodes.len()).then(|| nodes.iter().copied().zip(numbers).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hops(path: &str) -> (Option<String>, Vec<(String, PortType)>) {
        let topology = way(Path::new(path), |_| None);
        let hops = topology.hops.iter().map(|hop| (hop.address.to_string(), hop.port)).collect();
        (topology.host_bridge, hops)
    }

    #[test]
    fn a_gpu_behind_a_switch_is_told_from_one_at_a_root_port() {
        use PortType::{RootPort, SwitchDownstream, SwitchUpstream};
        let at_root = hops("/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0");
        assert_eq!(at_root, (Some("pci0000:3a".to_owned()), vec![("0000:3a:00.0".to_owned(), RootPort)]));
        let (_, behind) =
            hops("/host/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0");
        let ports: Vec<_> = behind.iter().map(|(_, port)| *port).collect();
        assert_eq!(ports, [RootPort, SwitchUpstream, SwitchDownstream]);
        assert_eq!(hops("/sys/devices/pci0000:00/0000:00:06.0"), (Some("pci0000:00".to_owned()), vec![]));
    }

    #[test]
    fn a_vmd_domain_has_a_root_of_its_own() {
        let (bridge, found) =
            hops("/sys/devices/pci0000:00/0000:00:0e.0/pci10000:00/10000:00:01.0/10000:01:00.0");
        assert_eq!(bridge.as_deref(), Some("pci10000:00"));
        assert_eq!(found, [("10000:00:01.0".to_owned(), PortType::RootPort)]);
    }

    #[test]
    fn the_switch_is_its_port_towards_the_root() {
        let path = "/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0";
        let topology = way(Path::new(path), |_| None);
        assert_eq!(topology.root_port().unwrap().to_string(), "0000:15:01.0");
        assert_eq!(topology.switch().unwrap().to_string(), "0000:16:00.0");
        // Where configuration space tells, it counts.
        let told = way(Path::new(path), |_| Some(PortType::Bridge));
        assert_eq!((told.root_port(), told.switch()), (None, None));
    }

    #[test]
    fn distances_go_with_the_online_nodes_in_order() {
        assert_eq!(distances(&[0, 1], "10 21\n").unwrap(), BTreeMap::from([(0, 10), (1, 21)]));
        // Grace: the GPU's memory is nodes 2 to 9.
        assert_eq!(distances(&[0, 2], "10 80\n").unwrap()[&2], 80);
        for (nodes, text) in [(&[0, 1][..], "10\n"), (&[0], "ten"), (&[0], "-1")] {
            assert_eq!(distances(nodes, text), None, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn any_path_and_any_distances_are_survived(path in "(?s).{0,80}", text in "(?s).{0,40}") {
            let _ = way(Path::new(&path), |_| None);
            let _ = distances(&[0, 1], &text);
        }
    }
}
