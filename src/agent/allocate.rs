//! Answers the kubelet's Allocate.
//!
//! An answer is a promise that lasts as long as the pod, so it is made on a fresh look, only of what is offered and free
//! at that moment, and only after the hold is durable.

use std::collections::BTreeSet;

use decide::{
    allocate::{Known, offered, open_for},
    grant::Grant,
    id::OfferId,
    usage::{Hold, HoldBy},
};
use reason::{Code, Coded, Reason, chain};

use super::{Agent, boot_seconds};
use crate::device_plugin::AllocateCall;

impl Agent {
    pub(super) async fn allocate(&mut self, call: AllocateCall) {
        let AllocateCall { resource, containers, reply } = call;
        if reply.is_closed() {
            return;
        }
        let answer = self.answer(&resource, &containers).await;
        match &answer {
            Ok(_) => tracing::info!(%resource, ?containers, "given out"),
            Err(reason) => tracing::warn!(%resource, ?containers, code = %reason.code, "{}", reason.message),
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

    async fn answer(&mut self, resource: &str, containers: &[Vec<String>]) -> Result<Vec<Grant>, Reason> {
        open_for(&self.desired)?;
        let of_container = |ids: &Vec<String>| {
            let offered = ids.iter().map(|id| offered(&self.offers, resource, id).map(|offer| offer.id));
            offered.collect::<Result<BTreeSet<OfferId>, _>>()
        };
        let containers = containers.iter().map(of_container).collect::<Result<Vec<_>, _>>()?;
        let devices: BTreeSet<OfferId> = containers.iter().flatten().copied().collect();
        // What was right at the last pass may have changed since: drivers, nodes, holders, pods that have ended.
        if !self.look().await {
            let text = "the node cannot be looked at, so nothing is promised of it";
            return Err(Reason::new(Code::NotObserved, text));
        }
        self.plan();
        self.publish();
        let known = Known {
            inventory: &self.inventory,
            usage: &self.usage,
            offers: &self.offers,
            gate: self.states.gate(),
        };
        devices.iter().try_for_each(|id| known.check(resource, *id))?;
        let before = self.usage.holds.clone();
        let (resource, by) = (resource.to_owned(), HoldBy::Allocate);
        let hold = Hold { resource, by, answered_at: boot_seconds(), shown: false };
        self.usage.holds.extend(devices.iter().map(|id| (*id, hold.clone())));
        self.holds_made += 1;
        self.journal.holds.clone_from(&self.usage.holds);
        if let Err(error) = self.keeper.keep(&self.journal).await {
            self.usage.holds = before;
            self.journal.holds.clone_from(&self.usage.holds);
            let text =
                format!("the hold could not be made durable, so nothing is given out: {}", chain(&error));
            return Err(Reason::new(error.code(), text));
        }
        let consumer = self.desired.consumer;
        Ok(containers.iter().map(|ids| consumer.grant(&self.inventory, &hold.resource, ids)).collect())
    }
}
