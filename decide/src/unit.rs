//! What moves as one: an IOMMU group, or the groups over which one card's functions are spread.
//!
//! The kernel hands a VM whole groups. A card (a GPU with its audio, USB and UCSI functions in one slot) is of use as a
//! whole only; where the platform puts its functions into several groups, these are one unit, and go to one VM.
//! A unit is known by its functions: the kernel gives group numbers anew when a card is replugged.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde::{Deserialize, Serialize};
use vfio::{
    holders::Opaque,
    iommu::{Blocker, Group},
    pci::{Address, Function, Role},
};

/// What a unit is known by: all its functions, those of others and those that cannot be read too.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UnitId(pub BTreeSet<Address>);

impl UnitId {
    /// Whether both have a function in common: then they are, or were, one piece of hardware.
    #[must_use]
    pub fn meets(&self, other: &Self) -> bool {
        !self.0.is_disjoint(&other.0)
    }
}

impl fmt::Display for UnitId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<_> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&texts.join(" "))
    }
}

/// A unit, with what is asked of it again and again worked out once a look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    /// What it is known by.
    pub id: UnitId,
    /// Its groups, by their numbers of this moment; none for a function that is in no group.
    pub groups: BTreeSet<u32>,
    /// The members that vfiod moves: GPUs, NVSwitches and companions.
    pub movable: BTreeSet<Address>,
    /// The members that are offered: GPUs and NVSwitches.
    pub offerable: BTreeSet<Address>,
    /// Members of which nothing is known, each with why.
    pub unreadable: BTreeMap<Address, String>,
    /// The members that keep it from being viable.
    pub blockers: Vec<Blocker>,
    /// The nodes by which a process can have it open, on the host.
    pub nodes: BTreeSet<String>,
    /// Processes of which it is not known whether they have it open.
    pub opaque: BTreeSet<Opaque>,
}

impl Unit {
    /// The lowest of its groups: by it the unit goes in tables, where it has several.
    #[must_use]
    pub fn group(&self) -> Option<u32> {
        self.groups.first().copied()
    }

    /// How people are told of it: `group 25`, or `groups 36 and 37`.
    #[must_use]
    pub fn name(&self) -> String {
        name(&self.groups)
    }
}

/// How people are told of groups that move as one.
#[must_use]
pub fn name(groups: &BTreeSet<u32>) -> String {
    let texts: Vec<_> = groups.iter().map(ToString::to_string).collect();
    match texts.as_slice() {
        [] => "function without a group".to_owned(),
        [one] => format!("group {one}"),
        [first @ .., last] => format!("groups {} and {last}", first.join(", ")),
    }
}

/// Which groups move as one: those that have functions of one card in them.
pub(crate) fn together(
    groups: &BTreeMap<u32, Group>,
    functions: &BTreeMap<Address, Function>,
    roles: &BTreeMap<Address, Role>,
) -> Vec<BTreeSet<u32>> {
    // Each group points at one that it goes with, or at itself: the lowest number of all that go together, in the end.
    let mut with: BTreeMap<u32, u32> = groups.keys().map(|group| (*group, *group)).collect();
    let root = |with: &BTreeMap<u32, u32>, group: u32| {
        let mut here = group;
        while let Some(next) = with.get(&here).copied().filter(|next| *next != here) {
            here = next;
        }
        here
    };
    let mut before: Option<(Address, u32)> = None;
    // By address, so that the functions of one slot follow each other.
    for (address, role) in roles {
        if !matches!(role, Role::Gpu | Role::Companion) {
            continue;
        }
        let Some(group) = functions.get(address).and_then(|function| function.iommu_group) else { continue };
        if let Some((_, other)) = before.filter(|(mate, other)| mate.same_slot(*address) && *other != group) {
            let (a, b) = (root(&with, other), root(&with, group));
            with.insert(a.max(b), a.min(b));
        }
        before = Some((*address, group));
    }
    let mut sets: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    for group in groups.keys() {
        sets.entry(root(&with, *group)).or_default().insert(*group);
    }
    sets.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_named_for_people() {
        assert_eq!(name(&BTreeSet::from([25])), "group 25");
        assert_eq!(name(&BTreeSet::from([36, 37])), "groups 36 and 37");
        assert_eq!(name(&BTreeSet::from([1, 2, 3])), "groups 1, 2 and 3");
    }
}
