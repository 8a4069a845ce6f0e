//! Answers the kubelet's Allocate.
//!
//! An answer is a promise that lasts as long as the pod, so it is made on a fresh look, only of what is offered and free
//! at that moment, and only after the hold is durable.

use std::collections::BTreeSet;

use vfio::pci::Address;

use super::{Agent, boot_seconds};
use crate::{
    desired::WorkloadType,
    device_plugin::{AllocateCall, Grant, Refusal, RefusalKind},
    offers::{Offer, kubevirt_grant},
    reason::chain,
    usage::{Hold, User},
};

fn refusal(code: &'static str, kind: RefusalKind, message: impl Into<String>) -> Refusal {
    Refusal { code, message: message.into(), kind }
}

impl Agent {
    pub(super) async fn allocate(&mut self, call: AllocateCall) {
        let AllocateCall { resource, containers, reply } = call;
        if reply.is_closed() {
            return;
        }
        let answer = self.answer(&resource, &containers).await;
        match &answer {
            Ok(_) => tracing::info!(%resource, ?containers, "given out"),
            Err(refusal) => {
                tracing::warn!(%resource, ?containers, code = refusal.code, "{}", refusal.message);
            }
        }
        let given = answer.is_ok();
        if reply.send(answer).is_err() && given {
            // Nobody waited any more, so the kubelet counts these as free. Their holds end as any other's, by its grace:
            // the answer may have been on its way.
            tracing::warn!(%resource, ?containers, "the kubelet did not wait for the answer");
        }
        // The mates of what was given out are not to be had any more.
        self.publish();
    }

    async fn answer(&mut self, resource: &str, containers: &[Vec<String>]) -> Result<Vec<Grant>, Refusal> {
        if self.desired.workload_type != WorkloadType::VmPassthrough {
            let text =
                format!("this node is on its way to {}: nothing is given to VMs", self.desired.workload_type);
            return Err(refusal("WorkloadType", RefusalKind::Unavailable, text));
        }
        let of_container = |ids: &Vec<String>| {
            let offered = ids.iter().map(|id| self.offered(resource, id).map(|offer| offer.id));
            offered.collect::<Result<BTreeSet<Address>, _>>()
        };
        let containers = containers.iter().map(of_container).collect::<Result<Vec<_>, _>>()?;
        let devices: BTreeSet<Address> = containers.iter().flatten().copied().collect();
        // What was right at the last pass may have changed since: drivers, nodes, holders, pods that have ended.
        if !self.look().await {
            let text = "the node cannot be looked at, so nothing is promised of it";
            return Err(refusal("NotObserved", RefusalKind::Unavailable, text));
        }
        self.plan();
        self.publish();
        for address in &devices {
            self.check(resource, *address)?;
        }
        let before = self.usage.holds.clone();
        let hold = Hold { resource: resource.to_owned(), answered_at: boot_seconds(), shown: false };
        self.usage.holds.extend(devices.iter().map(|address| (*address, hold.clone())));
        self.journal.holds.clone_from(&self.usage.holds);
        if let Err(error) = self.keeper.keep(&self.journal).await {
            self.usage.holds = before;
            self.journal.holds.clone_from(&self.usage.holds);
            let text =
                format!("the hold could not be made durable, so nothing is given out: {}", chain(&error));
            return Err(refusal(error.code(), RefusalKind::Internal, text));
        }
        Ok(containers.iter().map(|devices| kubevirt_grant(&self.inventory, resource, devices)).collect())
    }

    fn offered(&self, resource: &str, id: &str) -> Result<&Offer, Refusal> {
        let found = self.offers.iter().find(|offer| offer.resource == resource && offer.id.to_string() == id);
        found.ok_or_else(|| {
            let text = format!("{resource} {id} is not a device of this node");
            refusal("UnknownDevice", RefusalKind::UnknownDevice, text)
        })
    }

    /// Whether `address` may be promised now. Its whole group goes to the pod that asks: a mate that it does not ask for
    /// stays unused.
    fn check(&self, resource: &str, address: Address) -> Result<(), Refusal> {
        let offer = self.offered(resource, &address.to_string())?;
        if offer.given_out {
            self.check_again(resource, offer)?;
        }
        let gated = offer.iommu_group.filter(|group| self.gate.contains(group));
        if let Some(group) = gated {
            let text = format!("group {group} of {address} is being moved");
            return Err(refusal("Switching", RefusalKind::Unavailable, text));
        }
        if let Some(reason) = offer.reasons.first() {
            let kind = if reason.code == "GroupHeld" { RefusalKind::InUse } else { RefusalKind::Unavailable };
            return Err(refusal(reason.code, kind, format!("{resource} {address}: {}", reason.message)));
        }
        let Some(group) = offer.iommu_group else {
            let text = format!("{address} is in no IOMMU group");
            return Err(refusal("NoIommu", RefusalKind::Unavailable, text));
        };
        // Also where the kubelet does not say whose the process is, and the device therefore stays healthy.
        if let Some(open) = self.inventory.open(group).into_iter().next() {
            let text = format!("{resource} {address}: {}", User::Process(open));
            return Err(refusal("HeldOutside", RefusalKind::InUse, text));
        }
        Ok(())
    }

    /// Whether a device that was given out may be answered for once more.
    ///
    /// The kubelet asks again for what a pod's init container had, when the pod's next container takes it over
    /// (kubelet pkg/kubelet/cm/devicemanager, `devicesToReuse`): then it lists the device, for one pod, under this very
    /// resource, and nobody has opened it yet. In any other case somebody else has it, or may have it.
    fn check_again(&self, resource: &str, offer: &Offer) -> Result<(), Refusal> {
        let address = offer.id;
        let in_use = |by: String| {
            refusal("InUse", RefusalKind::InUse, format!("{resource} {address} is given out: {by}"))
        };
        let open = offer.iommu_group.map(|group| self.inventory.open(group)).unwrap_or_default();
        if let Some(open) = open.into_iter().next() {
            return Err(in_use(User::Process(open).to_string()));
        }
        let devices: Vec<_> = self.usage.pods_with(address).collect();
        let pods: BTreeSet<_> = devices.iter().map(|device| (&device.namespace, &device.pod)).collect();
        if pods.len() == 1 && devices.iter().all(|device| device.resource == resource) {
            return Ok(());
        }
        Err(in_use(match devices.first() {
            Some(device) => User::Pod((*device).clone()).to_string(),
            None => "an earlier answer has not been seen to end".to_owned(),
        }))
    }
}
