//! Whether an Allocate may be answered with a promise.
//!
//! A promise lasts as long as the pod, so it is made only of what is offered and free in a look taken after the kubelet
//! asked. The caller takes that look, and makes the hold durable before it answers.

use std::collections::BTreeSet;

use reason::{Code, Reason};

use crate::{
    id::OfferId,
    inventory::Inventory,
    offers::Offer,
    unit::UnitId,
    usage::{Pods, Usage, User},
    wish::{Desired, WorkloadType},
};

/// What the decision is made from.
#[derive(Debug, Clone, Copy)]
pub struct Known<'a> {
    /// The node.
    pub inventory: &'a Inventory,
    /// What is in use.
    pub usage: &'a Usage,
    /// What is offered.
    pub offers: &'a [Offer],
    /// The units that are about to be moved.
    pub gate: &'a BTreeSet<UnitId>,
}

/// Whether anything is given to VMs at all.
///
/// # Errors
/// While the node serves, or is on its way to, another workload type.
pub fn open_for(desired: &Desired) -> Result<(), Reason> {
    if desired.workload_type == WorkloadType::VmPassthrough {
        return Ok(());
    }
    let text = format!("this node is on its way to {}: nothing is given to VMs", desired.workload_type);
    Err(Reason::new(Code::WorkloadType, text))
}

/// The offer that `id` is under `resource`.
///
/// # Errors
/// When there is none.
pub fn offered<'a>(offers: &'a [Offer], resource: &str, id: &str) -> Result<&'a Offer, Reason> {
    let found = offers.iter().find(|offer| offer.resource == resource && offer.id.to_string() == id);
    found.ok_or_else(|| {
        Reason::new(Code::UnknownDevice, format!("{resource} {id} is not a device of this node"))
    })
}

impl Known<'_> {
    /// Whether `id` may be promised now. Its whole unit goes to the pod that asks: a mate that it does not ask for stays
    /// unused.
    ///
    /// # Errors
    /// With why not.
    pub fn check(self, resource: &str, id: OfferId) -> Result<(), Reason> {
        let Self { inventory, gate, offers, .. } = self;
        let offer = offered(offers, resource, &id.to_string())?;
        if offer.given_out {
            self.check_again(resource, offer)?;
        }
        let Some(unit) = id.function().and_then(|address| inventory.unit_of(address)) else {
            return Err(Reason::new(Code::UnknownDevice, format!("{resource} {id} is not there any more")));
        };
        if gate.contains(&unit.id) {
            return Err(Reason::new(Code::Switching, format!("{} of {id} is being moved", unit.name())));
        }
        if let Some(reason) = offer.reasons.first() {
            return Err(Reason::new(reason.code, format!("{resource} {id}: {}", reason.message)));
        }
        if unit.groups.is_empty() {
            return Err(Reason::new(Code::NoIommu, format!("{id} is in no IOMMU group")));
        }
        // Also where the kubelet does not say whose the process is, and the device therefore stays healthy.
        if let Some(open) = inventory.open(unit).into_iter().next() {
            let text = format!("{resource} {id}: {}", User::Process(open));
            return Err(Reason::new(Code::HeldOutside, text));
        }
        Ok(())
    }

    /// Whether a device that was given out may be answered for once more.
    ///
    /// The kubelet asks again for what a pod's init container had, when the pod's next container takes it over
    /// (kubelet pkg/kubelet/cm/devicemanager, `devicesToReuse`): then it lists the device, for one pod, under this very
    /// resource, and nobody has opened it yet. In any other case somebody else has it, or may have it.
    fn check_again(self, resource: &str, offer: &Offer) -> Result<(), Reason> {
        let Self { inventory, usage, .. } = self;
        let id = offer.id;
        let in_use = |by: String| Reason::new(Code::InUse, format!("{resource} {id} is given out: {by}"));
        let unit = id.function().and_then(|address| inventory.unit_of(address));
        let open = unit.map(|unit| inventory.open(unit)).unwrap_or_default();
        if let Some(open) = open.into_iter().next() {
            return Err(in_use(User::Process(open).to_string()));
        }
        let devices: Vec<_> = usage.pods_with(id).collect();
        let pods: BTreeSet<_> = devices.iter().map(|device| (&device.namespace, &device.pod)).collect();
        if pods.len() == 1 && devices.iter().all(|device| device.resource == resource) {
            return Ok(());
        }
        Err(in_use(match (devices.first(), &usage.pods) {
            (Some(device), _) => User::Pod((*device).clone()).to_string(),
            (None, Pods::Unknown(reason)) => format!("whether a pod still has it is not known: {reason}"),
            (None, Pods::Known { .. }) => "an earlier answer has not been seen to end".to_owned(),
        }))
    }
}
