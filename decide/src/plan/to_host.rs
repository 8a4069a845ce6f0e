//! Every function of a unit that is on vfio, or on its way, back to the host: the design's way back.

use std::collections::BTreeSet;

use vfio::{
    driver::{Binding, Target, Wanted, is_vfio},
    pci::{Address, Function, Role},
};

use super::{Given, UnitPlan, Verdict, busy, unreadable};
use crate::{
    inventory::Inventory,
    prior::Prior,
    refusal::Refusal,
    step::{Bind, Step},
    unit::Unit,
};

pub(super) fn plan(given: Given<'_>, unit: &Unit) -> Option<UnitPlan> {
    let Given { inventory, desired, priors, .. } = given;
    let mut found = UnitPlan::new(unit, BTreeSet::new(), Verdict::Right);
    let mut moves: Vec<Bind> = Vec::new();
    let mut waiting: Vec<&Function> = Vec::new();
    for function in inventory.members(unit) {
        let ours = unit.movable.contains(&function.address);
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
        let prior =
            journalled.map_or_else(|| Prior::from(&Binding::from(function)), |known| known.was.clone());
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
            moves.push(Bind::new(function, target));
        }
    }
    let mut refusals: Vec<Refusal> = busy(waiting).collect();
    let journalled = |address: &&Address| priors.contains_key(*address);
    if !moves.is_empty() || unit.unreadable.keys().any(|address| journalled(&address)) {
        // A member that cannot be read may be the GPU whose companions would be taken away, or has yet to come back itself.
        refusals.extend(unreadable(unit));
        found.functions.extend(unit.unreadable.keys().filter(journalled));
    }
    if !moves.is_empty() {
        refusals.extend(given.lost(unit));
    }
    refusals.extend(absent_drivers(inventory, &moves));
    if !refusals.is_empty() {
        found.verdict = Verdict::Refused { refusals };
    } else if !moves.is_empty() {
        found.verdict = given.unless_in_use(unit, moves.into_iter().map(Step::Bind).collect());
    }
    (!found.functions.is_empty()).then_some(found)
}

/// Moves that cannot succeed, since the driver that they are to end with is not there: tried all the same, they would
/// take the whole unit out of vfio and back each time.
fn absent_drivers(inventory: &Inventory, moves: &[Bind]) -> impl Iterator<Item = Refusal> {
    moves.iter().filter_map(|bind| match &bind.to.driver {
        Wanted::Named(driver) if !inventory.drivers.contains(driver) => {
            Some(Refusal::HostDriverAbsent { address: bind.address, driver: driver.clone() })
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
