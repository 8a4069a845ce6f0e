//! Every GPU, NVSwitch and companion of a unit to vfio, or none.

use std::collections::{BTreeMap, BTreeSet};

use vfio::{
    driver::{DmaOwner, Target, dma_owner},
    modules::{Availability, Load},
    pci::{Address, Function},
};

use super::{Given, UnitPlan, Verdict, busy, unreadable};
use crate::{
    inventory::Inventory,
    refusal::Refusal,
    step::{Bind, Step},
    unit::Unit,
    usage::User,
};

pub(super) fn plan(given: Given<'_>, unit: &Unit) -> UnitPlan {
    let inventory = given.inventory;
    if unit.groups.is_empty() {
        let others_have = !inventory.groups.is_empty();
        let refusals =
            unit.offerable.iter().map(|address| Refusal::NoIommu { address: *address, others_have });
        return UnitPlan::new(
            unit,
            unit.offerable.clone(),
            Verdict::Refused { refusals: refusals.collect() },
        );
    }
    let on_vfio = |function: &&Function| dma_owner(function.driver.as_deref()) == DmaOwner::Vfio;
    let mut needed = Needed::default();
    let moves: Vec<Step> = inventory
        .movable(unit)
        .filter(|function| !on_vfio(function))
        .filter_map(|function| {
            Some(Step::Bind(Bind::new(function, Target::vfio(needed.add(inventory, function)?))))
        })
        .collect();

    let mut refusals: Vec<Refusal> = unreadable(unit).chain(busy(inventory.movable(unit))).collect();
    refusals.extend(given.lost(unit));
    refusals.extend(of_groups(inventory, unit));
    for function in inventory.members(unit) {
        let moved = unit.movable.contains(&function.address);
        match (&function.driver, function.iommu_group) {
            (Some(driver), Some(group)) if !moved && dma_owner(Some(driver)) == DmaOwner::Host => {
                refusals.push(Refusal::ForeignMember {
                    address: function.address,
                    group,
                    id: format!("{:04x}:{:04x}", function.vendor, function.device),
                    class: function.class.to_string(),
                    driver: driver.clone(),
                });
            }
            _ => {}
        }
        if moved && function.num_vfs > 0 {
            let users = on_vfs(inventory, function.address);
            refusals.push(Refusal::VfsEnabled { address: function.address, count: function.num_vfs, users });
        }
        if moved && !function.unassigned_bars.is_empty() {
            let bars = function.unassigned_bars.clone();
            refusals.push(Refusal::BarUnassigned { address: function.address, bars });
        }
    }
    if !moves.is_empty() || !needed.absent.is_empty() {
        refusals.extend(inventory.framebuffers(unit).map(Refusal::from));
        refusals.extend(inventory.movable(unit).filter(|function| !on_vfio(function)).filter_map(
            |function| {
                let console = inventory.consoles.by_function.get(&function.address)?.clone();
                Some(Refusal::KernelConsole { address: function.address, console })
            },
        ));
    }
    refusals.extend(needed.absent);
    let verdict = if !refusals.is_empty() {
        Verdict::Refused { refusals }
    } else if moves.is_empty() {
        Verdict::Right
    } else {
        given.unless_in_use(unit, needed.loads.into_iter().map(Step::LoadModule).chain(moves).collect())
    };
    UnitPlan { notes: needed.notes, ..UnitPlan::new(unit, unit.movable.clone(), verdict) }
}

/// What the groups themselves have against it.
fn of_groups<'a>(inventory: &'a Inventory, unit: &'a Unit) -> impl Iterator<Item = Refusal> + 'a {
    unit.groups.iter().filter_map(|group| inventory.groups.get(group)).flat_map(|group| {
        let id = group.id;
        let strangers =
            group.strangers.iter().map(move |name| Refusal::NotPci { name: name.clone(), group: id });
        let reserved = group
            .direct_mappings()
            .map(move |region| Refusal::ReservedRegion { group: id, region: region.clone() });
        let unknown = group.reserved_unknown.iter();
        let unknown =
            unknown.map(move |reason| Refusal::ReservedUnknown { group: id, reason: reason.clone() });
        strangers.chain(reserved).chain(unknown).chain(group.noiommu.then_some(Refusal::NoIommuGroup))
    })
}

/// Who uses which virtual function of `physfn`, or which mediated device on it: to take them away would end what runs there.
fn on_vfs(inventory: &Inventory, physfn: Address) -> BTreeMap<String, BTreeSet<User>> {
    let vfs = inventory.functions.values().filter(|function| function.physfn == Some(physfn));
    let on_vfs = vfs.clone().map(|vf| (format!("VF {}", vf.address), inventory.open_function(vf)));
    let parents: BTreeSet<Address> = vfs.map(|vf| vf.address).chain([physfn]).collect();
    let mdevs = inventory.mdevs.iter().filter(|(_, mdev)| parents.contains(&mdev.parent));
    let on_mdevs =
        mdevs.filter_map(|(uuid, mdev)| Some((format!("mdev {uuid}"), inventory.open_group(mdev.group?))));
    let users = on_vfs.chain(on_mdevs).filter(|(_, open)| !open.is_empty());
    users.map(|(on, open)| (on, open.into_iter().map(User::Process).collect())).collect()
}

/// What it takes to have the vfio drivers of a unit's functions.
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
        // What a unit's functions need in common is loaded once; a load that any of them requires is required.
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
