//! A snapshot of all that the kernel says. Plain data, compared by value; only [`observe`] touches the world.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
};

use serde::Serialize;
use vfio::{
    child::Reader,
    driver::is_vfio,
    drm,
    framebuffer::{self, Claim, Framebuffers},
    holders::{Holder, Holders, Opaque},
    host::{Host, ReadError},
    iommu::{self, Blocker, Group},
    modules::{Modules, VfioDriver},
    nvidia::{self, Scope},
    pci::{self, Address, Function, Role},
};

/// What a node looks like at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Inventory {
    /// All readable functions.
    pub functions: BTreeMap<Address, Function>,
    /// Functions that could not be read, each with why.
    pub unreadable: BTreeMap<Address, String>,
    /// All IOMMU groups; none at all where there is no IOMMU.
    pub groups: BTreeMap<u32, Group>,
    /// Who has VFIO, NVIDIA and DRM nodes open.
    pub holders: Holders,
    /// The host driver's nodes, and what each stands for.
    pub nvidia_nodes: BTreeMap<String, Scope>,
    /// The display and render nodes, and the function that each is of.
    pub drm_nodes: BTreeMap<String, Address>,
    /// The functions whose BARs a boot framebuffer holds.
    pub framebuffers: Framebuffers,
    /// The vfio driver chosen for each function that vfiod moves, and what it takes to have it.
    pub vfio: BTreeMap<Address, VfioDriver>,
    /// Every PCI driver that is there.
    pub drivers: BTreeSet<String>,
    /// Whether the kernel has iommufd (`/dev/iommu`).
    pub iommufd: bool,
}

/// A process that has a function of a group open.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Open {
    /// The process.
    #[serde(flatten)]
    pub holder: Holder,
    /// The node that it has open, on the host.
    pub node: String,
}

/// The host could not be observed at all.
#[derive(Debug, thiserror::Error)]
#[error("cannot observe the node: {0}")]
pub struct ObserveError(#[from] ReadError);

/// Observes the node below `host`. What may block of it, functions and processes, is looked at through `reader`; the functions
/// of `busy` are not asked for, since a write to them has not come back.
///
/// # Errors
/// When groups, drivers or `/dev` cannot be listed at all. A single unreadable function or process is data.
pub fn observe(
    host: &Host,
    reader: &mut Reader,
    busy: &BTreeSet<Address>,
) -> Result<Inventory, ObserveError> {
    let functions = reader.functions(busy)?;
    let groups = iommu::groups(host, &functions)?;
    let nvidia_nodes = nvidia::nodes(host)?;
    let mut drm_nodes = BTreeMap::new();
    for address in functions.known.keys() {
        drm_nodes.extend(drm::nodes(host, *address)?.into_iter().map(|node| (node, *address)));
    }
    let nodes: BTreeSet<String> = groups
        .values()
        .filter_map(|group| group.node.clone())
        .chain(functions.known.values().filter_map(cdev_node))
        .chain(nvidia_nodes.keys().cloned())
        .chain(drm_nodes.keys().cloned())
        .collect();
    let holders = reader.holders(nodes);
    let drivers = match host.list(&host.sys("bus/pci/drivers")) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        other => other.unwrap_or_default(),
    };
    let modules = Modules::of(host);
    let moved = |function: &&Function| is_moved(pci::role(function, functions.known.values()));
    let vfio = functions.known.values().filter(moved);
    let vfio = vfio.map(|function| (function.address, modules.vfio_driver(&function.modalias))).collect();
    Ok(Inventory {
        vfio,
        functions: functions.known,
        unreadable: functions.unreadable.into_iter().map(|(a, error)| (a, error.to_string())).collect(),
        groups,
        holders,
        nvidia_nodes,
        drm_nodes,
        framebuffers: framebuffer::framebuffers(host),
        drivers: drivers.into_iter().collect(),
        iommufd: host.dev("iommu").exists(),
    })
}

/// Whether vfiod moves functions of this role.
fn is_moved(role: Role) -> bool {
    matches!(role, Role::Gpu | Role::NvSwitch | Role::Companion)
}

/// The path of a function's VFIO character device on the host, as the kernel names it.
fn cdev_node(function: &Function) -> Option<String> {
    function.vfio_dev.as_ref().map(|name| format!("/dev/vfio/devices/{name}"))
}

impl Inventory {
    /// The readable members of a group.
    pub fn members(&self, group: u32) -> impl Iterator<Item = &Function> {
        let members = self.groups.get(&group).into_iter().flat_map(|group| &group.members);
        members.filter_map(|address| self.functions.get(address))
    }

    /// The group of a function, though it cannot be read itself.
    #[must_use]
    pub fn group_of(&self, address: Address) -> Option<u32> {
        if let Some(function) = self.functions.get(&address) {
            return function.iommu_group;
        }
        self.groups.values().find(|group| group.members.contains(&address)).map(|group| group.id)
    }

    /// What a function is to this node.
    #[must_use]
    pub fn role(&self, function: &Function) -> Role {
        pci::role(function, self.functions.values())
    }

    /// The members of a group that vfiod moves: GPUs, NVSwitches and companions.
    pub fn movable(&self, group: u32) -> impl Iterator<Item = &Function> {
        self.members(group).filter(|function| is_moved(self.role(function)))
    }

    /// The functions that are offered: GPUs and NVSwitches, in a group or not.
    pub fn offerable(&self) -> impl Iterator<Item = (&Function, Role)> {
        self.functions
            .values()
            .map(|function| (function, self.role(function)))
            .filter(|(_, role)| matches!(role, Role::Gpu | Role::NvSwitch))
    }

    /// The groups that hold a GPU or an NVSwitch.
    #[must_use]
    pub fn passthrough_groups(&self) -> BTreeSet<u32> {
        self.offerable().filter_map(|(function, _)| function.iommu_group).collect()
    }

    /// The members that keep a group from being viable.
    #[must_use]
    pub fn blockers(&self, group: u32) -> Vec<Blocker> {
        iommu::blockers(self.members(group), |_| false)
    }

    /// Members of a group that could not be read, or that the kernel lists in the group alone: of them nothing is known.
    pub fn unreadable_members(&self, group: u32) -> impl Iterator<Item = (Address, &str)> {
        let members = self.groups.get(&group).into_iter().flat_map(|group| &group.members);
        members.filter(|address| !self.functions.contains_key(address)).map(|address| {
            let why = self
                .unreadable
                .get(address)
                .map_or("it is in the group and not among the node's functions", |s| s);
            (*address, why)
        })
    }

    /// The groups of which some member is not known.
    pub fn groups_with_unreadable(&self) -> impl Iterator<Item = u32> {
        self.groups.keys().copied().filter(|group| self.unreadable_members(*group).next().is_some())
    }

    /// The VFIO character device of a function on the host, where the kernel has such nodes.
    #[must_use]
    pub fn cdev(&self, function: &Function) -> Option<String> {
        self.iommufd.then(|| cdev_node(function)).flatten()
    }

    /// The functions of a group, of those that vfiod moves, whose BARs a boot framebuffer holds: a VM could not have them.
    pub fn framebuffers(&self, group: u32) -> impl Iterator<Item = (Address, &Claim)> {
        self.movable(group).filter_map(|function| {
            Some((function.address, self.framebuffers.by_function.get(&function.address)?))
        })
    }

    /// Which processes have the group, or the host's nodes of one of its functions, open.
    #[must_use]
    pub fn open(&self, group: u32) -> BTreeSet<Open> {
        self.open_nodes(self.nodes(Some(group), self.members(group)))
    }

    /// What may have the group, or the host's nodes of one of its functions, open, and cannot be looked into.
    pub fn opaque(&self, group: u32) -> impl Iterator<Item = &Opaque> {
        self.opaque_to(self.nodes(Some(group), self.members(group)))
    }

    /// Which processes have one function open: its group, where it is in one, or the host's nodes of the function.
    #[must_use]
    pub fn open_function(&self, function: &Function) -> BTreeSet<Open> {
        self.open_nodes(self.nodes(function.iommu_group, [function]))
    }

    /// What may have one function open, as [`Inventory::open_function`], and cannot be looked into.
    pub fn opaque_function(&self, function: &Function) -> impl Iterator<Item = &Opaque> {
        self.opaque_to(self.nodes(function.iommu_group, [function]))
    }

    /// The nodes that are there of a group and of these functions.
    fn nodes<'a>(
        &self,
        group: Option<u32>,
        functions: impl IntoIterator<Item = &'a Function>,
    ) -> BTreeSet<String> {
        let group = group.and_then(|group| self.groups.get(&group));
        let mut nodes: BTreeSet<String> = group.and_then(|group| group.node.clone()).into_iter().collect();
        let mut on_nvidia = BTreeSet::new();
        let mut addresses = BTreeSet::new();
        for function in functions {
            addresses.insert(function.address);
            nodes.extend(cdev_node(function));
            if function
                .driver
                .as_deref()
                .is_some_and(|driver| driver.starts_with("nvidia") && !is_vfio(driver))
            {
                on_nvidia.insert(function.address);
            }
        }
        nodes.extend(self.nvidia_nodes.iter().filter_map(|(node, scope)| {
            let concerns = match scope {
                Scope::Function(address) => on_nvidia.contains(address),
                Scope::Driver => !on_nvidia.is_empty(),
            };
            concerns.then(|| node.clone())
        }));
        let drm = self.drm_nodes.iter().filter(|(_, address)| addresses.contains(address));
        nodes.extend(drm.map(|(node, _)| node.clone()));
        nodes
    }

    fn opaque_to(&self, nodes: BTreeSet<String>) -> impl Iterator<Item = &Opaque> {
        self.holders.opaque.iter().filter(move |opaque| opaque.may_hold(&nodes))
    }

    fn open_nodes(&self, nodes: BTreeSet<String>) -> BTreeSet<Open> {
        let open = |node: String| {
            self.holders
                .of(&node)
                .map(|holder| Open { holder: holder.clone(), node: node.clone() })
                .collect::<Vec<_>>()
        };
        nodes.into_iter().flat_map(open).collect()
    }
}
