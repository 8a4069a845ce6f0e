//! A snapshot of all that the kernel says. Plain data, compared by value; only [`observe`] touches the world.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
};

use serde::Serialize;
use vfio::{
    drm,
    framebuffer::{self, Claim, Framebuffers},
    holders::{self, Holder, Holders, Opaque},
    host::{Host, ReadError},
    iommu::{self, Blocker, Group},
    modules::{Modules, VfioDriver},
    pci::{self, Address, Function, Functions, Role},
    vendor::{self, Holds, Scope},
};

use crate::reason::chain;

/// What a node looks like at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Inventory {
    /// All readable functions.
    pub functions: BTreeMap<Address, Function>,
    /// Functions that could not be read, each with why.
    pub unreadable: BTreeMap<Address, String>,
    /// All IOMMU groups; none at all where there is no IOMMU.
    pub groups: BTreeMap<u32, Group>,
    /// Who has VFIO nodes, those of the vendors' host drivers, and DRM nodes open.
    pub holders: Holders,
    /// The nodes of the vendors' host drivers, and what each stands for.
    pub driver_nodes: BTreeMap<String, Scope>,
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

/// Observes the node below `host`, whose functions have been read already: some of their attributes may block, and
/// [`vfio::writer::Reader`] reads them in a child process.
///
/// # Errors
/// When groups, drivers or `/dev` cannot be listed at all. A single unreadable function or process is data.
pub fn observe(host: &Host, functions: Functions) -> Result<Inventory, ObserveError> {
    let groups = iommu::groups(host, &functions)?;
    let driver_nodes = vendor::nodes(host)?;
    let mut drm_nodes = BTreeMap::new();
    for address in functions.known.keys() {
        drm_nodes.extend(drm::nodes(host, *address)?.into_iter().map(|node| (node, *address)));
    }
    let nodes: BTreeSet<String> = groups
        .values()
        .filter_map(|group| group.node.clone())
        .chain(functions.known.values().filter_map(cdev_node))
        .chain(driver_nodes.keys().cloned())
        .chain(drm_nodes.keys().cloned())
        .collect();
    let holders = match holders::scan(host, nodes) {
        Ok(holders) => holders,
        // Without a process list nothing is known of any process: not known is in use.
        Err(error) => Holders {
            opaque: BTreeSet::from([Opaque { pid: 0, reason: error.to_string() }]),
            ..Holders::default()
        },
    };
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
        unreadable: functions.unreadable.into_iter().map(|(a, error)| (a, chain(&error))).collect(),
        groups,
        holders,
        driver_nodes,
        drm_nodes,
        framebuffers: framebuffer::framebuffers(host),
        drivers: drivers.into_iter().collect(),
        iommufd: host.exists(&host.dev("iommu")),
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
        self.open_nodes([iommu::group_node(group)], self.members(group))
    }

    /// Which processes have one function open: its group, where it is in one, or the host's nodes of the function.
    #[must_use]
    pub fn open_function(&self, function: &Function) -> BTreeSet<Open> {
        self.open_nodes(function.iommu_group.map(iommu::group_node), [function])
    }

    fn open_nodes<'a>(
        &self,
        groups: impl IntoIterator<Item = String>,
        functions: impl IntoIterator<Item = &'a Function>,
    ) -> BTreeSet<Open> {
        // Each node with the one function that it stands for, where it stands for one.
        let mut nodes: BTreeMap<String, Option<Address>> =
            groups.into_iter().map(|node| (node, None)).collect();
        for function in functions {
            nodes.extend(cdev_node(function).map(|node| (node, Some(function.address))));
            if let Some((vendor, role)) = on_host_driver(function) {
                let (mut own, mut common) = (Vec::new(), Vec::new());
                for (node, scope) in &self.driver_nodes {
                    match *scope {
                        Scope::Function(address) if address == function.address => own.push(node),
                        Scope::Common { vendor: id, role: of, holds } if (id, of) == (vendor, role) => {
                            common.push((node, holds));
                        }
                        Scope::Function(_) | Scope::Common { .. } => {}
                    }
                }
                let held = common.into_iter().filter(|(_, holds)| match holds {
                    Holds::EveryFunction => true,
                    Holds::WithoutOwnNode => own.is_empty(),
                });
                nodes.extend(held.map(|(node, _)| (node.clone(), None)));
                nodes.extend(own.into_iter().map(|node| (node.clone(), Some(function.address))));
            }
            let drm = self.drm_nodes.iter().filter(|(_, address)| **address == function.address);
            nodes.extend(drm.map(|(node, address)| (node.clone(), Some(*address))));
        }
        let open = |(node, function): (String, Option<Address>)| {
            self.holders
                .of(&node)
                .map(|holder| {
                    // With the function known, the cure may be one for it alone.
                    let cure = holders::cure(&holder.command, &holder.owner, function);
                    Open { holder: Holder { cure, ..holder.clone() }, node: node.clone() }
                })
                .collect::<Vec<_>>()
        };
        nodes.into_iter().flat_map(open).collect()
    }
}

/// Vendor and role of a function that is on one of its vendor's host drivers: only while that driver has it, the driver's nodes
/// hold it.
fn on_host_driver(function: &Function) -> Option<(u16, Role)> {
    let vendor = vendor::of(function.vendor)?;
    let role = vendor.role(function.device, function.class)?;
    let driver = function.driver.as_deref()?;
    vendor.host_drivers(role).contains(&driver).then_some((vendor.id, role))
}
