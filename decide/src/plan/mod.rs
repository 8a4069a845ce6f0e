//! From inventory and desired to an ordered plan, a unit at a time. Pure: it touches nothing.

mod to_host;
mod to_vfio;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Serialize, Serializer};
use vfio::pci::{Address, Function};

use crate::{
    inventory::Inventory,
    prior::Remembered,
    refusal::Refusal,
    step::{ByKind, Step},
    unit::{self, Unit, UnitId},
    usage::{Usage, Users},
    wish::{Desired, WorkloadType},
};

/// What shall happen to a unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It is as desired.
    Right,
    /// These steps, in order, all or none.
    Move {
        /// The steps.
        steps: Vec<Step>,
    },
    /// Nothing, and why.
    Refused {
        /// Every reason.
        refusals: Vec<Refusal>,
    },
}

/// In JSON: `verdict` (`right`, `move` with `loads[]` and `moves[]`, `refused` with `refusals[]`).
impl Serialize for Verdict {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        #[serde(tag = "verdict", rename_all = "kebab-case")]
        enum Shown<'a> {
            Right,
            Move(ByKind<'a>),
            Refused { refusals: &'a [Refusal] },
        }
        match self {
            Self::Right => Shown::Right,
            Self::Move { steps } => Shown::Move(ByKind::of(steps)),
            Self::Refused { refusals } => Shown::Refused { refusals },
        }
        .serialize(serializer)
    }
}

/// The plan of one unit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct UnitPlan {
    /// What the unit is known by.
    #[serde(skip)]
    pub unit: UnitId,
    /// The nodes by which a process can have it open.
    #[serde(skip)]
    pub nodes: BTreeSet<String>,
    /// The lowest of its groups; none for a function that is in no group.
    pub group: Option<u32>,
    /// Its groups.
    pub groups: BTreeSet<u32>,
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

/// An entry of the journal that tells of another device than the one that is at its address now: it counts for nothing.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Stale {
    /// The address.
    pub address: Address,
    /// The device that was meant, as far as that was written down.
    pub meant: Option<String>,
    /// The device that is there now.
    pub found: String,
}

impl std::fmt::Display for Stale {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { address, meant, found } = self;
        let meant = meant.as_deref().unwrap_or("a device that vfiod had moved");
        write!(
            f,
            "the journal tells of {meant} at {address}, where {found} is now: the card was changed for another; the entry \
             is forgotten, and what is there is left alone"
        )
    }
}

/// The plan of a node.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Plan {
    /// Unit by unit.
    #[serde(rename = "groups")]
    pub units: Vec<UnitPlan>,
    /// Journal entries of devices that are not there any more.
    pub stale: BTreeSet<Stale>,
}

impl UnitPlan {
    fn new(unit: &Unit, functions: BTreeSet<Address>, verdict: Verdict) -> Self {
        Self {
            unit: unit.id.clone(),
            nodes: unit.nodes.clone(),
            group: unit.group(),
            groups: unit.groups.clone(),
            functions,
            boot_bound: BTreeSet::new(),
            settled: BTreeSet::new(),
            notes: BTreeSet::new(),
            verdict,
        }
    }

    /// The steps, where it is to be moved.
    #[must_use]
    pub fn steps(&self) -> &[Step] {
        match &self.verdict {
            Verdict::Move { steps } => steps,
            Verdict::Right | Verdict::Refused { .. } => &[],
        }
    }

    /// Why it is refused, if it is.
    #[must_use]
    pub fn refusals(&self) -> &[Refusal] {
        match &self.verdict {
            Verdict::Refused { refusals } => refusals,
            Verdict::Right | Verdict::Move { .. } => &[],
        }
    }

    /// Whether it is to be moved.
    #[must_use]
    pub fn moves(&self) -> bool {
        matches!(self.verdict, Verdict::Move { .. })
    }

    /// How people are told of it.
    #[must_use]
    pub fn name(&self) -> String {
        unit::name(&self.groups)
    }
}

impl Plan {
    /// The plan of the unit that a group is in.
    #[must_use]
    pub fn of_group(&self, group: u32) -> Option<&UnitPlan> {
        self.units.iter().find(|plan| plan.groups.contains(&group))
    }

    /// The plan of a unit.
    #[must_use]
    pub fn of(&self, unit: &UnitId) -> Option<&UnitPlan> {
        self.units.iter().find(|plan| plan.unit == *unit)
    }

    /// Whether some unit is refused.
    #[must_use]
    pub fn refused(&self) -> bool {
        self.units.iter().any(|plan| matches!(plan.verdict, Verdict::Refused { .. }))
    }

    /// The units to be moved.
    pub fn moves(&self) -> impl Iterator<Item = &UnitPlan> {
        self.units.iter().filter(|plan| plan.moves())
    }
}

/// All that a plan is made of.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Given<'a> {
    inventory: &'a Inventory,
    desired: &'a Desired,
    users: &'a Users,
    priors: &'a BTreeMap<Address, &'a Remembered>,
}

/// Plans the way from `inventory` to `desired`. `priors` is what the journal remembers of functions under way.
#[must_use]
pub fn plan(
    inventory: &Inventory,
    desired: &Desired,
    usage: &Usage,
    priors: &BTreeMap<Address, Remembered>,
) -> Plan {
    let users = usage.of(inventory);
    let (counting, stale) = sort_out(inventory, priors);
    let given = Given { inventory, desired, users: &users, priors: &counting };
    let planned = inventory.units().iter().filter_map(|unit| match desired.workload_type {
        WorkloadType::Container => to_host::plan(given, unit),
        // A member that is not known may be a GPU: its group is not passed over in silence.
        _ if unit.offerable.is_empty() && unit.unreadable.is_empty() => None,
        WorkloadType::VmPassthrough => Some(to_vfio::plan(given, unit)),
        WorkloadType::VmVgpu => Some(given.not_yet(unit)),
    });
    Plan { units: planned.collect(), stale }
}

/// The journal's entries that count, and those that tell of another device than is there now.
fn sort_out<'a>(
    inventory: &Inventory,
    priors: &'a BTreeMap<Address, Remembered>,
) -> (BTreeMap<Address, &'a Remembered>, BTreeSet<Stale>) {
    let (mut counting, mut stale) = (BTreeMap::new(), BTreeSet::new());
    for (address, remembered) in priors {
        match inventory.functions.get(address) {
            Some(now) if !remembered.is_of(now, inventory.role(now)) => {
                stale.insert(Stale {
                    address: *address,
                    meant: remembered.device.as_ref().map(ToString::to_string),
                    found: now.identity().to_string(),
                });
            }
            // Of one that cannot be read, or is not there just now, it is not known that it is another.
            _ => {
                counting.insert(*address, remembered);
            }
        }
    }
    (counting, stale)
}

impl Given<'_> {
    fn not_yet(&self, unit: &Unit) -> UnitPlan {
        let refusals = vec![Refusal::NotYet { workload_type: self.desired.workload_type.to_string() }];
        UnitPlan::new(unit, unit.movable.clone(), Verdict::Refused { refusals })
    }

    /// The steps of a unit, or the users that forbid them.
    fn unless_in_use(&self, unit: &Unit, steps: Vec<Step>) -> Verdict {
        let users = self.users.of_unit(self.inventory, unit);
        if users.is_empty() {
            Verdict::Move { steps }
        } else {
            Verdict::Refused { refusals: vec![Refusal::InUse { users }] }
        }
    }

    /// Members that do not answer: a lost function is not written to, whichever way it should go.
    fn lost(&self, unit: &Unit) -> impl Iterator<Item = Refusal> {
        let lost = unit.movable.iter().filter(|address| self.inventory.is_lost(**address));
        lost.map(|address| Refusal::FunctionLost { address: *address })
    }
}

fn unreadable(unit: &Unit) -> impl Iterator<Item = Refusal> {
    unit.unreadable
        .iter()
        .map(|(address, reason)| Refusal::Unreadable { address: *address, reason: reason.clone() })
}

fn busy<'a>(functions: impl IntoIterator<Item = &'a Function>) -> impl Iterator<Item = Refusal> {
    let busy = functions.into_iter().filter(|function| function.busy);
    busy.map(|function| Refusal::Busy { address: function.address })
}
