//! From inventory and desired to an ordered plan, a group at a time. Pure: it touches nothing.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use vfio::{
    driver::{Binding, DmaOwner, Target, Wanted, dma_owner, is_vfio},
    modules::{Availability, Load},
    pci::{Address, Function, Role},
};

use crate::{
    desired::{Desired, WorkloadType},
    inventory::Inventory,
    usage::Usage,
};

pub use crate::refusal::Refusal;

/// What a function was before vfiod touched it first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Prior {
    /// Somebody had begun to move it: what it was before that is not known.
    Unknown,
    /// No driver.
    None,
    /// On this host driver.
    Driver(String),
    /// On a vfio driver; with no override it was bound by ids at boot.
    AlreadyVfio {
        /// The override it had.
        #[serde(rename = "override")]
        driver_override: Option<String>,
    },
}

impl From<&Binding> for Prior {
    fn from(binding: &Binding) -> Self {
        let meant_for_vfio = binding.driver_override.as_deref().is_some_and(is_vfio);
        match &binding.driver {
            Some(driver) if is_vfio(driver) => {
                Self::AlreadyVfio { driver_override: binding.driver_override.clone() }
            }
            Some(driver) => Self::Driver(driver.clone()),
            None if meant_for_vfio => Self::Unknown,
            None => Self::None,
        }
    }
}

/// One function's move, and its inverse.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Move {
    /// The function.
    pub address: Address,
    /// As it is now.
    pub from: Binding,
    /// As it shall be.
    pub to: Target,
    /// The way back, should a later step of the group fail.
    pub inverse: Target,
}

/// What shall happen to a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "verdict", rename_all = "kebab-case")]
pub enum Verdict {
    /// It is as desired.
    Right,
    /// These moves, in order, all or none.
    Move {
        /// The kernel modules that are loaded first.
        loads: Vec<Load>,
        /// The moves.
        moves: Vec<Move>,
    },
    /// Nothing, and why.
    Refused {
        /// Every reason.
        refusals: Vec<Refusal>,
    },
}

/// The plan of one group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GroupPlan {
    /// The group; none for a function that is in no group.
    pub group: Option<u32>,
    /// The functions it is about.
    pub functions: BTreeSet<Address>,
    /// Functions left on vfio although the host shall have them: the kernel bound them by ids at boot.
    pub boot_bound: BTreeSet<Address>,
    /// Functions that are back where they were: their journal entries are done with.
    #[serde(skip)]
    pub settled: BTreeSet<Address>,
    /// What people should know of it.
    pub notes: BTreeSet<String>,
    /// What shall happen.
    #[serde(flatten)]
    pub verdict: Verdict,
}

/// The plan of a node.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Plan {
    /// Group by group.
    pub groups: Vec<GroupPlan>,
}

impl Plan {
    /// The plan of one group.
    #[must_use]
    pub fn of(&self, group: Option<u32>) -> Option<&GroupPlan> {
        self.groups.iter().find(|plan| plan.group == group)
    }

    /// Whether some group is refused.
    #[must_use]
    pub fn refused(&self) -> bool {
        self.groups.iter().any(|plan| matches!(plan.verdict, Verdict::Refused { .. }))
    }

    /// The groups to be moved, each with the modules to load first and its moves.
    pub fn transactions(&self) -> impl Iterator<Item = (u32, &[Load], &[Move])> {
        self.groups.iter().filter_map(|plan| match (&plan.verdict, plan.group) {
            (Verdict::Move { loads, moves }, Some(group)) => {
                Some((group, loads.as_slice(), moves.as_slice()))
            }
            _ => None,
        })
    }

    /// The groups to be moved, each with its moves.
    pub fn moves(&self) -> impl Iterator<Item = (u32, &[Move])> {
        self.transactions().map(|(group, _, moves)| (group, moves))
    }
}

/// Plans the way from `inventory` to `desired`. `priors` is what the journal remembers of functions under way.
#[must_use]
pub fn plan(
    inventory: &Inventory,
    desired: &Desired,
    usage: &Usage,
    priors: &BTreeMap<Address, Prior>,
) -> Plan {
    let mut groups = Vec::new();
    // A member that is not known may be a GPU: its group is not passed over in silence.
    let passthrough: BTreeSet<u32> =
        inventory.passthrough_groups().into_iter().chain(inventory.groups_with_unreadable()).collect();
    for group in inventory.groups.keys() {
        let planned = match desired.workload_type {
            WorkloadType::Container => to_host(inventory, desired, usage, priors, *group),
            _ if !passthrough.contains(group) => None,
            WorkloadType::VmPassthrough => Some(to_vfio(inventory, usage, *group)),
            WorkloadType::VmVgpu => Some(not_yet(inventory, desired, *group)),
        };
        groups.extend(planned);
    }
    if desired.workload_type != WorkloadType::Container {
        groups.extend(inventory.offerable().filter(|(function, _)| function.iommu_group.is_none()).map(
            |(function, _)| GroupPlan {
                group: None,
                functions: BTreeSet::from([function.address]),
                boot_bound: BTreeSet::new(),
                settled: BTreeSet::new(),
                notes: BTreeSet::new(),
                verdict: Verdict::Refused { refusals: vec![Refusal::NoIommu { address: function.address }] },
            },
        ));
    }
    Plan { groups }
}

fn group_plan(group: u32, functions: BTreeSet<Address>, verdict: Verdict) -> GroupPlan {
    GroupPlan {
        group: Some(group),
        functions,
        boot_bound: BTreeSet::new(),
        settled: BTreeSet::new(),
        notes: BTreeSet::new(),
        verdict,
    }
}

fn not_yet(inventory: &Inventory, desired: &Desired, group: u32) -> GroupPlan {
    let functions = inventory.movable(group).map(|function| function.address).collect();
    let refusals = vec![Refusal::NotYet { workload_type: desired.workload_type.to_string() }];
    group_plan(group, functions, Verdict::Refused { refusals })
}

/// The moves of a group, or the users that forbid them.
fn unless_in_use(
    inventory: &Inventory,
    usage: &Usage,
    group: u32,
    loads: Vec<Load>,
    moves: Vec<Move>,
) -> Verdict {
    let users = usage.of_group(inventory, group);
    if users.is_empty() {
        Verdict::Move { loads, moves }
    } else {
        Verdict::Refused { refusals: vec![Refusal::InUse { users }] }
    }
}

fn a_move(function: &Function, to: Target) -> Move {
    let from = Binding::from(function);
    Move { address: function.address, inverse: Target::restore(&from), from, to }
}

fn unreadable(inventory: &Inventory, group: u32) -> impl Iterator<Item = Refusal> {
    let members = inventory.unreadable_members(group);
    members.map(|(address, reason)| Refusal::Unreadable { address, reason: reason.to_owned() })
}

fn busy(functions: &[&Function]) -> impl Iterator<Item = Refusal> {
    functions
        .iter()
        .filter(|function| function.busy)
        .map(|function| Refusal::Busy { address: function.address })
}

/// Every GPU, NVSwitch and companion of the group to vfio, or none.
fn to_vfio(inventory: &Inventory, usage: &Usage, group: u32) -> GroupPlan {
    let movable: Vec<_> = inventory.movable(group).collect();
    let functions = movable.iter().map(|function| function.address).collect();
    let on_vfio = |function: &Function| dma_owner(function.driver.as_deref()) == DmaOwner::Vfio;
    let mut needed = Needed::default();
    let moves: Vec<_> = movable
        .iter()
        .filter(|function| !on_vfio(function))
        .filter_map(|function| Some(a_move(function, Target::vfio(needed.add(inventory, function)?))))
        .collect();

    let mut refusals: Vec<Refusal> = unreadable(inventory, group).chain(busy(&movable)).collect();
    if let Some(group) = inventory.groups.get(&group) {
        refusals.extend(group.strangers.iter().map(|name| Refusal::NotPci { name: name.clone() }));
        if group.noiommu {
            refusals.push(Refusal::NoIommuGroup);
        }
    }
    for function in inventory.members(group) {
        let moved = movable.iter().any(|movable| movable.address == function.address);
        match &function.driver {
            Some(driver) if !moved && dma_owner(Some(driver)) == DmaOwner::Host => {
                refusals.push(Refusal::ForeignMember {
                    address: function.address,
                    id: format!("{:04x}:{:04x}", function.vendor, function.device),
                    class: function.class.to_string(),
                    driver: driver.clone(),
                });
            }
            _ => {}
        }
        if moved && function.num_vfs > 0 {
            refusals.push(Refusal::VfsEnabled { address: function.address, count: function.num_vfs });
        }
    }
    if !moves.is_empty() || !needed.absent.is_empty() {
        refusals.extend(inventory.framebuffers(group).map(Refusal::from));
    }
    refusals.extend(needed.absent);
    let verdict = if !refusals.is_empty() {
        Verdict::Refused { refusals }
    } else if moves.is_empty() {
        Verdict::Right
    } else {
        unless_in_use(inventory, usage, group, needed.loads, moves)
    };
    GroupPlan { notes: needed.notes, ..group_plan(group, functions, verdict) }
}

/// What it takes to have the vfio drivers of a group's functions.
#[derive(Default)]
struct Needed {
    loads: Vec<Load>,
    notes: BTreeSet<String>,
    absent: BTreeSet<Refusal>,
}

impl Needed {
    /// Adds the driver of `function`, and says its name; nothing where it cannot be had.
    fn add<'a>(&mut self, inventory: &'a Inventory, function: &Function) -> Option<&'a str> {
        // Of every function that is moved the inventory has a driver.
        let chosen = inventory.vfio.get(&function.address)?;
        if let Availability::Absent(absence) = &chosen.availability {
            let (module, reason) = (chosen.module.to_string(), absence.to_string());
            self.absent.insert(Refusal::VfioAbsent { module, reason });
            return None;
        }
        // What a group's functions need in common is loaded once; a load that any of them requires is required.
        for load in &chosen.loads {
            match self.loads.iter_mut().find(|known| known.module == load.module) {
                Some(known) => known.required |= load.required,
                None => self.loads.push(load.clone()),
            }
        }
        self.notes.extend(chosen.notes.iter().cloned());
        Some(&chosen.driver)
    }
}

/// Every function of the group that is on vfio, or on its way, back to the host: the design's way back.
fn to_host(
    inventory: &Inventory,
    desired: &Desired,
    usage: &Usage,
    priors: &BTreeMap<Address, Prior>,
    group: u32,
) -> Option<GroupPlan> {
    let mut found = group_plan(group, BTreeSet::new(), Verdict::Right);
    let mut moves = Vec::new();
    let mut waiting: Vec<&Function> = Vec::new();
    for function in inventory.members(group) {
        let ours = matches!(inventory.role(function), Role::Gpu | Role::NvSwitch | Role::Companion);
        let journalled = priors.get(&function.address);
        if !ours && journalled.is_none() {
            continue;
        }
        found.functions.insert(function.address);
        if function.busy {
            waiting.push(function);
            continue;
        }
        let on_vfio = function.driver.as_deref().is_some_and(is_vfio);
        let meant_for_vfio = function.driver_override.as_deref().is_some_and(is_vfio);
        if !on_vfio && !meant_for_vfio && journalled.is_none() {
            continue;
        }
        let prior = journalled.cloned().unwrap_or_else(|| Prior::from(&Binding::from(function)));
        let bound_at_boot = prior == Prior::AlreadyVfio { driver_override: None };
        if on_vfio && bound_at_boot && function.driver_override.is_none() && !desired.adopt_boot_bound {
            found.boot_bound.insert(function.address);
            continue;
        }
        let target = way_back(inventory.role(function), &prior);
        // Where any driver will do, a driverless function is right only after a probe, which this pass has not made.
        if target.reached(&Binding::from(function), false) {
            found.settled.insert(function.address);
        } else {
            moves.push(a_move(function, target));
        }
    }
    let mut refusals: Vec<Refusal> = busy(&waiting).collect();
    let journalled = |address: &Address| priors.contains_key(address);
    if !moves.is_empty() || inventory.unreadable_members(group).any(|(address, _)| journalled(&address)) {
        // A member that cannot be read may be the GPU whose companions would be taken away, or has yet to come back itself.
        refusals.extend(unreadable(inventory, group));
        found
            .functions
            .extend(inventory.unreadable_members(group).map(|(address, _)| address).filter(journalled));
    }
    refusals.extend(absent_drivers(inventory, &moves));
    if !refusals.is_empty() {
        found.verdict = Verdict::Refused { refusals };
    } else if !moves.is_empty() {
        found.verdict = unless_in_use(inventory, usage, group, Vec::new(), moves);
    }
    (!found.functions.is_empty()).then_some(found)
}

/// Moves that cannot succeed, since the driver that they are to end with is not there: tried all the same, they would
/// take the whole group out of vfio and back each time.
fn absent_drivers(inventory: &Inventory, moves: &[Move]) -> impl Iterator<Item = Refusal> {
    moves.iter().filter_map(|step| match &step.to.driver {
        Wanted::Named(driver) if !inventory.drivers.contains(driver) => {
            Some(Refusal::HostDriverAbsent { address: step.address, driver: driver.clone() })
        }
        _ => None,
    })
}

/// Where a function goes when the host shall have it again. Its override is cleared in every case.
fn way_back(role: Role, prior: &Prior) -> Target {
    let driver = match (role, prior) {
        // A driver pod may bind it later; driverless is right where no driver is loaded.
        (Role::Gpu | Role::NvSwitch, _) => Wanted::AnyHost,
        (_, Prior::Driver(name)) => Wanted::Named(name.clone()),
        (_, Prior::None) => Wanted::NoProbe,
        (_, Prior::Unknown | Prior::AlreadyVfio { .. }) => Wanted::AnyHost,
    };
    Target { driver, driver_override: None }
}
