//! What a container gets with a device, rendered for its consumer from the same offers.
//!
//! How a grant is put on a wire (an Allocate's answer, a CDI spec) is the publisher's.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use vfio::iommu::group_node;

use crate::{consumer::Consumer, id::OfferId, inventory::Inventory, names::env_name, unit::Unit};

/// What a container gets. The kubelet keeps it and uses it again whenever the container is restarted, so it must stay
/// true for as long as the pod lives.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// Environment variables of the container.
    pub env: BTreeMap<String, String>,
    /// Device nodes, in the order they are to be listed.
    pub nodes: Vec<DeviceNode>,
}

/// A device node that has the same path on the host and in the container.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DeviceNode {
    /// For example `/dev/vfio/12`.
    pub path: String,
    /// A subset of `rwm`; KubeVirt's own plugin gives `mrw`.
    pub permissions: String,
}

impl Consumer {
    /// What a container gets with `devices` of `resource`.
    ///
    /// Nodes: the container node, those of the groups of all units that the devices are in, and where the kernel has
    /// iommufd the character devices that are there of the units' functions, with `/dev/iommu`. Only nodes that exist are
    /// named: a runtime refuses a container over one that does not.
    ///
    /// Environment, for KubeVirt: the addresses asked for, sorted, in the one variable of the resource; never a
    /// companion's, since virt-launcher takes them off the list one by one for its `gpus[]`. Kata reads none.
    #[must_use]
    pub fn grant(self, inventory: &Inventory, resource: &str, devices: &BTreeSet<OfferId>) -> Grant {
        let env = match self {
            Self::Kubevirt => {
                let addresses: Vec<_> = devices.iter().map(ToString::to_string).collect();
                BTreeMap::from([(env_name(resource), addresses.join(","))])
            }
            Self::Kata => BTreeMap::new(),
        };
        Grant { env, nodes: nodes(inventory, devices) }
    }
}

fn nodes(inventory: &Inventory, devices: &BTreeSet<OfferId>) -> Vec<DeviceNode> {
    let units = devices.iter().filter_map(|id| inventory.unit_of(id.function()?));
    let units: BTreeMap<_, &Unit> = units.map(|unit| (unit.group(), unit)).collect();
    let groups: BTreeSet<u32> = units.values().flat_map(|unit| &unit.groups).copied().collect();
    let movable = units.values().flat_map(|unit| &unit.movable);
    let cdevs: Vec<String> = movable.filter_map(|address| inventory.cdevs.get(address).cloned()).collect();
    let iommu = (!cdevs.is_empty()).then(|| "/dev/iommu".to_owned());
    let paths = cdevs
        .into_iter()
        .chain(["/dev/vfio/vfio".to_owned()])
        .chain(groups.into_iter().map(group_node))
        .chain(iommu);
    paths.map(|path| DeviceNode { path, permissions: "mrw".to_owned() }).collect()
}
