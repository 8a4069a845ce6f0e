//! What is offered. Pure: inventory in, offers out.

use std::collections::BTreeMap;

use reason::{Code, Coded, Reason};
use serde::Serialize;
use vfio::{driver::is_vfio, iommu::group_node, pci::Function};

use crate::{
    id::OfferId,
    inventory::Inventory,
    names::Naming,
    plan::Plan,
    refusal::Refusal,
    unit::{Unit, UnitId},
    usage::{Pods, Usage, User, Users},
    wish::{Desired, WorkloadType},
};

/// One device as it is, or would be, offered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Offer {
    /// The resource (`nvidia.com/GH100_H100_SXM5_80GB`).
    pub resource: String,
    /// The device's id under it: its address, for both consumers.
    pub id: OfferId,
    /// Whether a pod may be given it, or has it and may keep it.
    pub healthy: bool,
    /// Its NUMA node, -1 for not known (the kubelet is told no topology then).
    pub numa_node: i32,
    /// Its IOMMU group.
    pub iommu_group: Option<u32>,
    /// Why it is not healthy.
    pub reasons: Vec<Reason>,
    /// Whether the resource's name may be registered.
    #[serde(skip)]
    pub registrable: bool,
    /// Whether a pod has it, or was promised it.
    pub given_out: bool,
}

/// All that offers are made of.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// The node.
    pub inventory: &'a Inventory,
    /// What is asked of it.
    pub desired: &'a Desired,
    /// The way there.
    pub plan: &'a Plan,
    /// What is in use.
    pub usage: &'a Usage,
    /// The kubelet has not said for long which pods have devices: a promise that nobody is seen to have is not known to
    /// be anybody's.
    pub pods_silent: bool,
    /// What names the offers.
    pub naming: &'a Naming,
    /// Units in trouble (wedged, failed), each with why.
    pub trouble: &'a BTreeMap<UnitId, Reason>,
}

/// The offers of a node.
///
/// With a VM type desired: every GPU and NVSwitch, healthy where its unit has been read back as right. With another type
/// desired only what pods hold is left: it stays listed and healthy until they are gone.
#[must_use]
pub fn offers(view: View<'_>) -> Vec<Offer> {
    let View { inventory, desired, usage, naming, .. } = view;
    let users = usage.of(inventory);
    let mut offers = Vec::new();
    for (function, role) in inventory.offerable() {
        let id = OfferId::from(function.address);
        let given_out = usage.given_out(id);
        let named = naming.resource(desired.consumer, role, function);
        let serves_vms = desired.workload_type == WorkloadType::VmPassthrough;
        if !serves_vms && !given_out {
            continue;
        }
        let mut reasons = faults(view, function);
        let found =
            if given_out { unseen(view, id).into_iter().collect() } else { busy(view, &users, function) };
        for reason in found {
            // The plan may have refused the unit for the same cause.
            if !reasons.contains(&reason) {
                reasons.push(reason);
            }
        }
        let (resource, registrable) = match (usage.holds.get(&id), named) {
            // What a pod has stays listed under the name that it was given by, whatever it would be called now.
            (Some(hold), _) => (hold.resource.clone(), true),
            (None, Ok(name)) => (name.to_string(), true),
            (None, Err(error)) => {
                reasons.push(error.reason());
                (error.name, false)
            }
        };
        offers.push(Offer {
            resource,
            id,
            healthy: reasons.is_empty(),
            numa_node: function.numa_node,
            iommu_group: function.iommu_group,
            reasons,
            registrable,
            given_out,
        });
    }
    offers.extend(lost(view));
    offers.sort_by(|a, b| (&a.resource, a.id).cmp(&(&b.resource, b.id)));
    offers
}

/// What a pod has, or was promised, and what is not to be read any more, or is no GPU by what was read: it stays listed
/// until they are gone, since a kubelet that starts again would turn the pod away over a device that is not listed.
fn lost(view: View<'_>) -> impl Iterator<Item = Offer> {
    let View { inventory, usage, .. } = view;
    let offered = |id: &OfferId| {
        id.function().is_some_and(|address| {
            inventory.unit_of(address).is_some_and(|unit| unit.offerable.contains(&address))
        })
    };
    let held = usage.holds.iter().filter(move |(id, _)| !offered(id));
    held.map(move |(id, hold)| {
        let unreadable = id.function().and_then(|address| inventory.unreadable.get(&address));
        let reason = match unreadable {
            Some(reason) => Reason::new(Code::Unreadable, reason.clone()),
            None => Reason::new(Code::FunctionGone, format!("{id} is no GPU of this node any more")),
        };
        let groups = id.function().and_then(|address| Some(&inventory.unit_of(address)?.groups));
        Offer {
            resource: hold.resource.clone(),
            id: *id,
            healthy: false,
            numa_node: -1,
            iommu_group: groups.and_then(|groups| groups.first()).copied(),
            reasons: vec![reason],
            registrable: true,
            given_out: true,
        }
    })
}

/// What is really wrong with a device, whoever has it.
fn faults(view: View<'_>, function: &Function) -> Vec<Reason> {
    let View { inventory, desired, plan, trouble, .. } = view;
    let mut reasons = Vec::new();
    let Some(unit) = inventory.unit_of(function.address) else { return reasons };
    let trouble = trouble.get(&unit.id);
    let on_vfio = function.driver.as_deref().is_some_and(is_vfio);
    // A refusal to move a unit in use says nothing against the device that is in use.
    let told = |refusal: &&Refusal| match refusal {
        Refusal::InUse { .. } => !on_vfio,
        // A write of vfiod's own that hangs says more of it below.
        Refusal::Busy { .. } => trouble.is_none(),
        _ => true,
    };
    let refusals = plan.of(&unit.id).map(|plan| plan.refusals()).unwrap_or_default();
    reasons.extend(refusals.iter().filter(told).map(Reason::from));
    let Some(group) = function.iommu_group else { return reasons };
    reasons.extend(trouble.cloned());
    if inventory.is_lost(function.address) {
        let lost = Reason::from(&Refusal::FunctionLost { address: function.address });
        if !reasons.contains(&lost) {
            reasons.push(lost);
        }
    }
    if !on_vfio {
        let driver = function.driver.as_deref().unwrap_or("no driver");
        reasons.push(Reason::new(Code::NotBound, format!("it is on {driver}, not on a vfio driver")));
        return reasons;
    }
    for group in &unit.groups {
        let no_node = inventory.groups.get(group).is_none_or(|group| group.node.is_none());
        // A group of the unit in which nothing is moved has no node, and needs none.
        let needed = inventory.movable(unit).any(|function| function.iommu_group == Some(*group));
        if no_node && needed {
            reasons.push(Reason::new(Code::NoGroupNode, format!("{} is not there", group_node(*group))));
        }
    }
    for blocker in &unit.blockers {
        let text = format!("group {group} is not viable: {} is on {}", blocker.address, blocker.driver);
        reasons.push(Reason::new(Code::NotViable, text));
    }
    reasons.extend(desired.consumer.cannot_use(function.address.into()));
    reasons
}

/// What keeps a device that nobody was given from being given.
fn busy(view: View<'_>, users: &Users, function: &Function) -> Vec<Reason> {
    let View { inventory, plan, usage, .. } = view;
    let Some(unit) = inventory.unit_of(function.address) else { return Vec::new() };
    if unit.groups.is_empty() {
        return Vec::new();
    }
    // Also where it was bound before vfiod looked: the bind succeeds, and the next VM meets the held BAR.
    let mut reasons: Vec<_> =
        inventory.framebuffers(unit).map(|claim| Reason::from(&Refusal::from(claim))).collect();
    if plan.of(&unit.id).is_some_and(|plan| plan.moves()) {
        reasons.push(Reason::new(Code::Switching, format!("{} is not yet as desired", unit.name())));
    }
    let held_mate = unit.id.0.iter().find(|mate| usage.given_out(OfferId::from(**mate)));
    if let Some(mate) = held_mate {
        let text = format!("{mate} of the same {} is given out; a group goes to one VM", unit.name());
        reasons.push(Reason::new(Code::GroupHeld, text));
    } else if matches!(usage.pods, Pods::Known { .. }) {
        // While the kubelet does not answer, a holder may well be a pod's that it would list.
        reasons.extend(outside(inventory, users, unit));
    }
    reasons
}

/// Who has the unit though nobody was given it: an Allocate would be refused over them.
fn outside(inventory: &Inventory, users: &Users, unit: &Unit) -> Vec<Reason> {
    let open = inventory.open(unit).into_iter().map(|open| (Code::HeldOutside, User::Process(open)));
    let by_pods = users.by_pods(inventory, unit).map(|user| (Code::InUse, user.clone()));
    open.chain(by_pods).map(|(code, user)| Reason::new(code, user.to_string())).collect()
}

/// A device that was given out, and that nobody is seen to have, while the kubelet has long said nothing of pods: its
/// next Allocate would be refused, since it is not known to be free.
fn unseen(view: View<'_>, id: OfferId) -> Option<Reason> {
    let View { inventory, usage, pods_silent, .. } = view;
    let Pods::Unknown(reason) = &usage.pods else { return None };
    let unit = inventory.unit_of(id.function()?)?;
    let seen = !inventory.open(unit).is_empty() || !unit.opaque.is_empty();
    (pods_silent && !seen).then(|| {
        let text = format!("it was given out, and whether a pod still has it is not known: {reason}");
        Reason::new(Code::PodResourcesUnknown, text)
    })
}
