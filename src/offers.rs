//! What is advertised, and what a container gets with it. Pure: inventory in, offers out.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use vfio::{
    driver::is_vfio,
    iommu::group_node,
    pci::{Address, Function, Role},
};

use crate::{
    desired::{Consumer, Desired, WorkloadType},
    device_plugin::{Advertised, Device, DeviceNode, Grant},
    inventory::Inventory,
    names::{Aliases, NameError, Names, OfferedRole, ResourceName, env_name},
    plan::{Plan, Verdict},
    reason::Reason,
    refusal::Refusal,
    usage::{Pods, Usage, User},
};

/// What names the offers.
#[derive(Debug, Clone, Default)]
pub struct Naming {
    /// The databases.
    pub names: Names,
    /// Kata's aliases.
    pub aliases: Aliases,
}

impl Naming {
    /// The resource under which a GPU or an NVSwitch is offered to `consumer`.
    ///
    /// # Errors
    /// When Kubernetes would refuse the name.
    pub fn resource(
        &self,
        consumer: Consumer,
        role: Role,
        function: &Function,
    ) -> Result<ResourceName, NameError> {
        let role = if role == Role::NvSwitch { OfferedRole::NvSwitch } else { OfferedRole::Gpu };
        self.names.resource(consumer, role, function.vendor, function.device, &self.aliases)
    }
}

/// One device as it is, or would be, advertised.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Offer {
    /// The resource (`nvidia.com/GH100_H100_SXM5_80GB`).
    pub resource: String,
    /// The device's id under it: its address, for both consumers.
    pub id: Address,
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
    #[serde(rename = "given_out")]
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
    /// What names the offers.
    pub naming: &'a Naming,
    /// Groups in trouble (wedged, failed, under way), each with why.
    pub trouble: &'a BTreeMap<u32, Reason>,
}

/// The offers of a node.
///
/// With a VM type desired: every GPU and NVSwitch, healthy where its group has been read back as right. With another
/// type desired only what pods hold is left: it stays listed and healthy until they are gone.
#[must_use]
pub fn offers(view: View<'_>) -> Vec<Offer> {
    let View { inventory, desired, usage, naming, .. } = view;
    let mut offers = Vec::new();
    for (function, role) in inventory.offerable() {
        let given_out = usage.given_out(function.address);
        let named = naming.resource(desired.consumer, role, function);
        let serves_vms = desired.workload_type == WorkloadType::VmPassthrough;
        if !serves_vms && !given_out {
            continue;
        }
        let mut reasons = faults(view, function);
        if !given_out {
            // The plan may have refused the group for the same cause.
            let busy = busy(view, function).into_iter().filter(|reason| !reasons.contains(reason));
            reasons.extend(busy.collect::<Vec<_>>());
        }
        let (resource, registrable) = match (usage.holds.get(&function.address), named) {
            // What a pod has stays listed under the name that it was given by, whatever it would be called now.
            (Some(hold), _) => (hold.resource.clone(), true),
            (None, Ok(name)) => (name.to_string(), true),
            (None, Err(error)) => {
                reasons.push(Reason::new("NameRefused", error.to_string()));
                (error.name, false)
            }
        };
        offers.push(Offer {
            resource,
            id: function.address,
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
fn lost<'a>(view: View<'a>) -> impl Iterator<Item = Offer> + 'a {
    let View { inventory, usage, .. } = view;
    let offerable: BTreeSet<Address> = inventory.offerable().map(|(function, _)| function.address).collect();
    let held = usage.holds.iter().filter(move |(address, _)| !offerable.contains(address));
    held.map(move |(address, hold)| {
        let reason = match inventory.unreadable.get(address) {
            Some(reason) => Reason::new("Unreadable", reason.clone()),
            None => Reason::new("FunctionGone", format!("{address} is no GPU of this node any more")),
        };
        Offer {
            resource: hold.resource.clone(),
            id: *address,
            healthy: false,
            numa_node: -1,
            iommu_group: inventory.group_of(*address),
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
    let on_vfio = function.driver.as_deref().is_some_and(is_vfio);
    // By the function as well: all functions without a group share "no group", and each has a plan of its own.
    let planned = plan
        .groups
        .iter()
        .find(|plan| plan.group == function.iommu_group && plan.functions.contains(&function.address));
    if let Some(Verdict::Refused { refusals }) = planned.map(|plan| &plan.verdict) {
        // A refusal to move a group in use says nothing against the device that is in use.
        let told = |code: &str| match code {
            "InUse" => !on_vfio,
            // A write of vfiod's own that hangs says more of it below.
            "Busy" => function.iommu_group.is_none_or(|group| !trouble.contains_key(&group)),
            _ => true,
        };
        let bad = refusals.iter().filter(|refusal| told(refusal.code()));
        reasons.extend(bad.map(Reason::from));
    }
    let Some(group) = function.iommu_group else { return reasons };
    reasons.extend(trouble.get(&group).cloned());
    if !on_vfio {
        let driver = function.driver.as_deref().unwrap_or("no driver");
        reasons.push(Reason::new("NotBound", format!("it is on {driver}, not on a vfio driver")));
        return reasons;
    }
    if inventory.groups.get(&group).is_none_or(|group| group.node.is_none()) {
        reasons.push(Reason::new("NoGroupNode", format!("{} is not there", group_node(group))));
    }
    for blocker in inventory.blockers(group) {
        let text = format!("group {group} is not viable: {} is on {}", blocker.address, blocker.driver);
        reasons.push(Reason::new("NotViable", text));
    }
    if desired.consumer == Consumer::Kubevirt && function.address.domain() > 0xffff {
        let text = "KubeVirt takes PCI domains of four hex digits only";
        reasons.push(Reason::new("DomainTooWide", text));
    }
    reasons
}

/// What keeps a device that nobody was given from being given.
fn busy(view: View<'_>, function: &Function) -> Vec<Reason> {
    let View { inventory, plan, usage, .. } = view;
    let Some(group) = function.iommu_group else { return Vec::new() };
    // Also where it was bound before vfiod looked: the bind succeeds, and the next VM meets the held BAR.
    let mut reasons: Vec<_> =
        inventory.framebuffers(group).map(|claim| Reason::from(&Refusal::from(claim))).collect();
    if matches!(plan.of(Some(group)).map(|plan| &plan.verdict), Some(Verdict::Move { .. })) {
        reasons.push(Reason::new("Switching", format!("group {group} is not yet as desired")));
    }
    let held_mate = inventory.members(group).find(|mate| usage.given_out(mate.address));
    if let Some(mate) = held_mate {
        let text = format!("{} of the same group {group} is given out; a group goes to one VM", mate.address);
        reasons.push(Reason::new("GroupHeld", text));
    } else if matches!(usage.pods, Pods::Known(_)) {
        // While the kubelet does not answer, a holder may well be a pod's that it would list.
        for open in inventory.open(group) {
            reasons.push(Reason::new("HeldOutside", User::Process(open).to_string()));
        }
    }
    reasons
}

/// The offers as the kubelet is told them: only resources whose names it takes.
#[must_use]
pub fn advertised(offers: &[Offer]) -> Advertised {
    let mut resources = Advertised::new();
    for offer in offers.iter().filter(|offer| offer.registrable) {
        resources.entry(offer.resource.clone()).or_default().push(Device {
            id: offer.id.to_string(),
            healthy: offer.healthy,
            numa_node: u32::try_from(offer.numa_node).ok(),
        });
    }
    resources
}

/// What a KubeVirt launcher gets with `devices` of `resource`.
///
/// Environment: the addresses asked for, sorted, in the one variable of the resource: never a companion's, since
/// virt-launcher takes them off the list one by one for its `gpus[]`. Nodes: the container node, the groups, and where
/// the kernel has iommufd the character devices of every vfio function of the groups with `/dev/iommu`.
#[must_use]
pub fn kubevirt_grant(inventory: &Inventory, resource: &str, devices: &BTreeSet<Address>) -> Grant {
    let groups: BTreeSet<u32> =
        devices.iter().filter_map(|address| inventory.functions.get(address)?.iommu_group).collect();
    let cdevs: Vec<String> = groups
        .iter()
        .flat_map(|group| inventory.movable(*group))
        .filter_map(|function| inventory.cdev(function))
        .collect();
    let iommu = (!cdevs.is_empty()).then(|| "/dev/iommu".to_owned());
    let paths = cdevs
        .into_iter()
        .chain(["/dev/vfio/vfio".to_owned()])
        .chain(groups.into_iter().map(group_node))
        .chain(iommu);
    let addresses: Vec<_> = devices.iter().map(ToString::to_string).collect();
    Grant {
        env: BTreeMap::from([(env_name(resource), addresses.join(","))]),
        nodes: paths.map(|path| DeviceNode { path, permissions: "mrw".to_owned() }).collect(),
    }
}
