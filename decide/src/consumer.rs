//! Who takes the devices of a VM workload type, and all that differs by it.
//!
//! A grant is rendered here for each consumer, from the same offers; how a grant is put on a wire (an Allocate's answer, a
//! CDI spec) is the publisher's.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    str::FromStr,
};

use reason::{Code, Reason};
use serde::{Deserialize, Serialize};
use vfio::iommu::group_node;

use crate::{id::OfferId, inventory::Inventory, names::env_name, unit::Unit};

/// Who takes the devices of a VM workload type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Consumer {
    /// KubeVirt: environment variables and device nodes in the virt-launcher container.
    #[default]
    Kubevirt,
    /// Kata Containers: device nodes, and CDI specs looked up by the runtime.
    Kata,
}

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

/// A consumer that is none of the two.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no consumer: it takes kubevirt or kata, spelt exactly so")]
pub struct UnknownConsumer(pub String);

impl Consumer {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Kubevirt, Self::Kata];

    /// As it is spelt.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Kubevirt => "kubevirt",
            Self::Kata => "kata",
        }
    }

    /// Why this consumer could not use a device at all, if so.
    #[must_use]
    pub fn cannot_use(self, id: OfferId) -> Option<Reason> {
        let wide = id.function().is_some_and(|address| address.domain() > 0xffff);
        let text = "KubeVirt takes PCI domains of four hex digits only";
        (self == Self::Kubevirt && wide).then(|| Reason::new(Code::DomainTooWide, text))
    }

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

impl FromStr for Consumer {
    type Err = UnknownConsumer;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|known| known.as_str() == text);
        found.ok_or_else(|| UnknownConsumer(text.to_owned()))
    }
}

impl fmt::Display for Consumer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}
