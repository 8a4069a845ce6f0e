//! A snapshot of all that the kernel says. Plain data, compared by value.
//!
//! [`Observed`] is what was read; [`Inventory`] adds what follows from it and is asked for again and again: roles, and the
//! [`Unit`]s that move as one.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Deref,
};

use serde::Serialize;
use vfio::{
    console::Consoles,
    framebuffer::{Claim, Framebuffers},
    holders::{self, Holder, Holders, Opaque},
    iommu::{self, Group},
    mdev::Mdev,
    modules::VfioDriver,
    pci::{self, Address, Function, Role, life::Life},
    vendor::{self, Holds, Scope},
};

use crate::unit::{Unit, UnitId, together};

/// What a node looked like at one moment, as it was read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Observed {
    /// All readable functions.
    pub functions: BTreeMap<Address, Function>,
    /// Functions that could not be read, each with why.
    pub unreadable: BTreeMap<Address, String>,
    /// All IOMMU groups; none at all where there is no IOMMU.
    pub groups: BTreeMap<u32, Group>,
    /// Who has VFIO nodes, those of the vendors' host drivers, and DRM nodes open.
    pub holders: Holders,
    /// The host drivers' nodes, and what each stands for.
    pub driver_nodes: BTreeMap<String, Scope>,
    /// The display and render nodes, and the function that each is of.
    pub drm_nodes: BTreeMap<String, Address>,
    /// The functions whose BARs a boot framebuffer holds.
    pub framebuffers: Framebuffers,
    /// The functions that carry the kernel's own console.
    pub consoles: Consoles,
    /// The mediated devices, by UUID.
    pub mdevs: BTreeMap<String, Mdev>,
    /// The vfio driver chosen for each function that vfiod moves, and what it takes to have it.
    pub vfio: BTreeMap<Address, VfioDriver>,
    /// Every PCI driver that is there.
    pub drivers: BTreeSet<String>,
    /// The VFIO character devices that are there, where the kernel has iommufd (`/dev/iommu`): each function's node.
    pub cdevs: BTreeMap<Address, String>,
    /// Whether each function that nobody has open answers.
    pub lives: BTreeMap<Address, Life>,
}

/// A process that has a function of a unit open.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Open {
    /// The process.
    #[serde(flatten)]
    pub holder: Holder,
    /// The node that it has open, on the host.
    pub node: String,
}

/// What was read of a node, and what follows from it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Inventory {
    observed: Observed,
    roles: BTreeMap<Address, Role>,
    own_nodes: OwnNodes,
    units: Vec<Unit>,
    by_function: BTreeMap<Address, usize>,
    by_group: BTreeMap<u32, usize>,
}

impl Deref for Inventory {
    type Target = Observed;

    fn deref(&self) -> &Observed {
        &self.observed
    }
}

/// The nodes of host drivers that are of one function each.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct OwnNodes {
    driver: BTreeMap<Address, BTreeSet<String>>,
    drm: BTreeMap<Address, BTreeSet<String>>,
}

impl From<&Observed> for OwnNodes {
    fn from(observed: &Observed) -> Self {
        let mut own = Self::default();
        for (node, scope) in &observed.driver_nodes {
            if let Scope::Function(address) = scope {
                own.driver.entry(*address).or_default().insert(node.clone());
            }
        }
        for (node, address) in &observed.drm_nodes {
            own.drm.entry(*address).or_default().insert(node.clone());
        }
        own
    }
}

/// Whether vfiod moves functions of this role.
#[must_use]
pub fn is_moved(role: Role) -> bool {
    matches!(role, Role::Gpu | Role::NvSwitch | Role::Companion)
}

/// The path of a function's VFIO character device on the host, as the kernel names it.
#[must_use]
pub fn cdev_node(function: &Function) -> Option<String> {
    function.vfio_dev.as_ref().map(|name| format!("/dev/vfio/devices/{name}"))
}

/// What each function is to this node.
#[must_use]
pub fn roles(functions: &BTreeMap<Address, Function>) -> BTreeMap<Address, Role> {
    functions
        .iter()
        .map(|(address, function)| {
            let slot = functions.range(address.slot()).map(|(_, mate)| mate);
            (*address, pci::role(function, slot))
        })
        .collect()
}

impl From<Observed> for Inventory {
    fn from(observed: Observed) -> Self {
        let roles = roles(&observed.functions);
        let own_nodes = OwnNodes::from(&observed);
        let mut inventory = Self { observed, roles, own_nodes, ..Self::default() };
        let sets = together(&inventory.groups, &inventory.functions, &inventory.roles);
        let mut units: Vec<Unit> = sets.into_iter().map(|groups| inventory.unit_of_groups(groups)).collect();
        let alone = inventory.functions.values().filter(|function| function.iommu_group.is_none());
        let alone =
            alone.filter(|function| inventory.roles.get(&function.address).copied().is_some_and(is_moved));
        units.extend(alone.map(|function| {
            inventory.make_unit(BTreeSet::new(), UnitId(BTreeSet::from([function.address])), BTreeMap::new())
        }));
        for (index, unit) in units.iter().enumerate() {
            inventory.by_function.extend(unit.id.0.iter().map(|address| (*address, index)));
            inventory.by_group.extend(unit.groups.iter().map(|group| (*group, index)));
        }
        inventory.units = units;
        inventory
    }
}

impl Inventory {
    /// Adds whether functions answer, which is asked last: of those that nobody has open.
    pub fn set_lives(&mut self, lives: BTreeMap<Address, Life>) {
        self.observed.lives = lives;
    }

    /// What was read, to be changed and made an inventory of again.
    #[must_use]
    pub fn into_observed(self) -> Observed {
        self.observed
    }

    fn unit_of_groups(&self, groups: BTreeSet<u32>) -> Unit {
        let members: BTreeSet<Address> = groups
            .iter()
            .filter_map(|group| self.groups.get(group))
            .flat_map(|group| &group.members)
            .copied()
            .collect();
        let unreadable = members
            .iter()
            .filter(|address| !self.functions.contains_key(address))
            .map(|address| {
                let why = self.unreadable.get(address).cloned();
                let why =
                    why.unwrap_or_else(|| "it is in the group and not among the node's functions".to_owned());
                (*address, why)
            })
            .collect();
        self.make_unit(groups, UnitId(members), unreadable)
    }

    fn make_unit(&self, groups: BTreeSet<u32>, id: UnitId, unreadable: BTreeMap<Address, String>) -> Unit {
        let members: Vec<&Function> = id.0.iter().filter_map(|address| self.functions.get(address)).collect();
        let of_role = |fits: fn(Role) -> bool| {
            members
                .iter()
                .map(|function| function.address)
                .filter(|address| fits(self.role_of(*address)))
                .collect()
        };
        let nodes = self.nodes(groups.iter().map(|group| iommu::group_node(*group)), &members);
        let opaque = self.opaque_to(&groups, &nodes);
        Unit {
            movable: of_role(is_moved),
            offerable: of_role(Role::is_offered),
            blockers: iommu::blockers(members.iter().copied(), |_| false),
            id,
            groups,
            unreadable,
            nodes,
            opaque,
        }
    }

    /// Everything that moves as one, those without a group last.
    #[must_use]
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// The unit that a function is in, though it cannot be read itself; none for one that is nothing to vfiod and in no
    /// group.
    #[must_use]
    pub fn unit_of(&self, address: Address) -> Option<&Unit> {
        self.by_function.get(&address).and_then(|index| self.units.get(*index))
    }

    /// The unit that a group is in.
    #[must_use]
    pub fn unit_of_group(&self, group: u32) -> Option<&Unit> {
        self.by_group.get(&group).and_then(|index| self.units.get(*index))
    }

    /// The readable members of a unit.
    pub fn members<'a>(&'a self, unit: &'a Unit) -> impl Iterator<Item = &'a Function> {
        unit.id.0.iter().filter_map(|address| self.functions.get(address))
    }

    /// The members of a unit that vfiod moves.
    pub fn movable<'a>(&'a self, unit: &'a Unit) -> impl Iterator<Item = &'a Function> {
        unit.movable.iter().filter_map(|address| self.functions.get(address))
    }

    /// What a function is to this node.
    #[must_use]
    pub fn role(&self, function: &Function) -> Role {
        self.role_of(function.address)
    }

    /// What the function at an address is to this node; foreign where there is none.
    #[must_use]
    pub fn role_of(&self, address: Address) -> Role {
        self.roles.get(&address).copied().unwrap_or(Role::Foreign)
    }

    /// The functions that are offered: GPUs and NVSwitches, in a group or not.
    pub fn offerable(&self) -> impl Iterator<Item = (&Function, Role)> {
        let all = self.functions.values().map(|function| (function, self.role(function)));
        all.filter(|(_, role)| role.is_offered())
    }

    /// The functions of a unit, of those that vfiod moves, whose BARs a boot framebuffer holds: a VM could not have them.
    pub fn framebuffers<'a>(&'a self, unit: &'a Unit) -> impl Iterator<Item = (Address, &'a Claim)> {
        unit.movable
            .iter()
            .filter_map(|address| Some((*address, self.framebuffers.by_function.get(address)?)))
    }

    /// Whether a function is known to be dead.
    #[must_use]
    pub fn is_lost(&self, address: Address) -> bool {
        self.lives.get(&address) == Some(&Life::Dead)
    }

    /// Which processes have the unit open, or the host's nodes of one of its functions.
    #[must_use]
    pub fn open(&self, unit: &Unit) -> BTreeSet<Open> {
        self.open_nodes(&unit.nodes)
    }

    /// Which processes have one function open: its group, where it is in one, or the host's nodes of the function.
    #[must_use]
    pub fn open_function(&self, function: &Function) -> BTreeSet<Open> {
        self.open_nodes(&self.nodes(function.iommu_group.map(iommu::group_node), &[function]))
    }

    /// Which processes have the node of a group open.
    #[must_use]
    pub fn open_group(&self, group: u32) -> BTreeSet<Open> {
        self.open_nodes(&BTreeSet::from([iommu::group_node(group)]))
    }

    /// What cannot be looked into and may have one function open.
    #[must_use]
    pub fn opaque_function(&self, function: &Function) -> BTreeSet<Opaque> {
        let groups: BTreeSet<u32> = function.iommu_group.into_iter().collect();
        let nodes = self.nodes(groups.iter().map(|group| iommu::group_node(*group)), &[function]);
        self.opaque_to(&groups, &nodes)
    }

    /// What may have one of `nodes` open, those of `groups` among them. Nobody can have a group's node open that is not there.
    fn opaque_to(&self, groups: &BTreeSet<u32>, nodes: &BTreeSet<String>) -> BTreeSet<Opaque> {
        let absent =
            groups.iter().filter(|group| self.groups.get(group).is_none_or(|group| group.node.is_none()));
        let absent: BTreeSet<String> = absent.map(|group| iommu::group_node(*group)).collect();
        let there = nodes.difference(&absent).cloned().collect();
        self.holders.opaque_to(&there).cloned().collect()
    }

    fn open_nodes(&self, nodes: &BTreeSet<String>) -> BTreeSet<Open> {
        let open = |(node, holders): (&String, &BTreeSet<Holder>)| {
            let function = self.function_of(node);
            let open = holders.iter().map(|holder| {
                // With the function known, the cure may be one for it alone.
                let cure = holders::cure(&holder.command, &holder.owner, function);
                Open { holder: Holder { cure, ..holder.clone() }, node: node.clone() }
            });
            open.collect::<Vec<_>>()
        };
        self.holders.by_node.iter().filter(|(node, _)| nodes.contains(*node)).flat_map(open).collect()
    }

    /// The one function that a node of a host driver stands for, where it stands for one.
    fn function_of(&self, node: &str) -> Option<Address> {
        match self.driver_nodes.get(node) {
            Some(Scope::Function(address)) => Some(*address),
            Some(Scope::Common { .. }) | None => self.drm_nodes.get(node).copied(),
        }
    }

    /// The nodes by which `functions` can be held: those of their groups, and the host's own of each.
    fn nodes(&self, groups: impl IntoIterator<Item = String>, functions: &[&Function]) -> BTreeSet<String> {
        let mut nodes: BTreeSet<String> = groups.into_iter().collect();
        for function in functions {
            nodes.extend(cdev_node(function));
            nodes.extend(self.own_nodes.drm.get(&function.address).into_iter().flatten().cloned());
            let Some((vendor, role)) = on_host_driver(function) else { continue };
            let own = self.own_nodes.driver.get(&function.address);
            nodes.extend(own.into_iter().flatten().cloned());
            nodes.extend(self.driver_nodes.iter().filter_map(|(node, scope)| match scope {
                Scope::Common { vendor: id, role: of, holds } if (*id, *of) == (vendor, role) => {
                    (*holds == Holds::EveryFunction || own.is_none()).then(|| node.clone())
                }
                Scope::Common { .. } | Scope::Function(_) => None,
            }));
        }
        nodes
    }
}

/// Vendor and role of a function that is on one of its vendor's host drivers: only while that driver has it, the driver's
/// nodes hold it. By its own ids, since a VF on that driver is held as its physical function is.
fn on_host_driver(function: &Function) -> Option<(u16, Role)> {
    let vendor = vendor::of(function.vendor)?;
    let role = vendor.role(function.device, function.class)?;
    let driver = function.driver.as_deref()?;
    vendor.host_drivers(role).contains(&driver).then_some((vendor.id, role))
}
