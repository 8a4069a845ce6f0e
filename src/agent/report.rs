//! How the node stands, for people: made from the agent's state, which it does not change.

use std::collections::BTreeMap;

use decide::{
    id::OfferId,
    plan::{UnitPlan, Verdict},
    refusal::Refusal,
    unit::UnitId,
    usage::Pods,
};
use reason::{Code, Reason};

use super::Agent;
use crate::status::{GroupStatus, State, Status};

impl Agent {
    /// Publishes the status.
    pub(super) fn report(&self) {
        let troubles = self.states.reasons(&self.plan);
        let groups: Vec<GroupStatus> =
            self.plan.units.iter().map(|plan| self.group_status(plan, &troubles)).collect();
        let mut reasons: Vec<Reason> = self.failure.iter().chain(&self.unclear).cloned().collect();
        let registrations = self.channels.registrations.borrow().clone();
        // What the kubelet does not know of is no use to anybody, however well it is bound.
        reasons.extend(registrations.iter().filter_map(|(resource, registration)| {
            let failure = registration.failure.as_ref()?;
            Some(Reason::new(Code::NotRegistered, format!("{resource}: {}", failure.message)))
        }));
        if let Pods::Unknown(reason) = &self.usage.pods {
            reasons.push(Reason::new(Code::PodResourcesUnknown, reason.clone()));
        }
        reasons.extend(self.gone_reasons());
        reasons.extend(self.plan.stale.iter().map(|stale| Reason::new(Code::StalePrior, stale.to_string())));
        reasons.extend(self.kept_back());
        reasons.extend(groups.iter().flat_map(|group| group.reasons.iter().cloned()));
        reasons.sort();
        reasons.dedup();
        self.channels.status.send_replace(Status {
            workload_type: self.desired.workload_type,
            consumer: self.desired.consumer,
            state: self.state(&groups, &reasons),
            reasons,
            groups,
            offers: self.offers.clone(),
            holds: self.usage.holds.keys().copied().collect(),
            registrations,
            passes: self.passes,
            last_pass: self.last_pass.clone(),
            ..super::starting(&self.desired)
        });
    }

    /// What was offered, and is not on the node any more, with its resource.
    pub(super) fn gone(&self) -> impl Iterator<Item = (OfferId, &str)> {
        let gone = self.known.iter().filter(|(id, _)| {
            id.function().is_some_and(|address| {
                !self.inventory.functions.contains_key(&address)
                    && !self.inventory.unreadable.contains_key(&address)
            })
        });
        gone.map(|(id, resource)| (*id, resource.as_str()))
    }

    fn gone_reasons(&self) -> impl Iterator<Item = Reason> {
        self.gone().map(|(id, resource)| {
            let text = format!(
                "{id} was offered as {resource} and is not on the node any more: it was unplugged, or fell off the bus"
            );
            Reason::new(Code::FunctionGone, text)
        })
    }

    /// What is not given back yet, since it has gone bad again and again.
    fn kept_back(&self) -> impl Iterator<Item = Reason> {
        let reasons =
            self.offers.iter().flat_map(|offer| offer.reasons.iter().map(move |reason| (offer, reason)));
        let kept = reasons.filter(|(_, reason)| reason.code == Code::Flapping);
        kept.map(|(offer, reason)| Reason::new(reason.code, format!("{}: {}", offer.id, reason.message)))
    }

    /// `all` are the reasons of groups that are not right, of the node and of its kubelet.
    fn state(&self, groups: &[GroupStatus], all: &[Reason]) -> State {
        if self.failure.is_some() {
            return State::Failed;
        }
        if !self.states.gate().is_empty() {
            return State::Switching;
        }
        let noted = groups.iter().any(|group| !group.right || !group.reasons.is_empty());
        if !noted && all.is_empty() {
            State::Ready
        } else if all.iter().any(|reason| reason.code == Code::InUse) {
            State::Blocked
        } else {
            State::Degraded
        }
    }

    fn group_status(&self, plan: &UnitPlan, troubles: &BTreeMap<UnitId, Reason>) -> GroupStatus {
        // A write of vfiod's own that hangs says more of it below.
        let own = self.states.waits_for_kernel(&plan.unit);
        let told = plan.refusals().iter().filter(|refusal| !(own && matches!(refusal, Refusal::Busy { .. })));
        let mut reasons: Vec<Reason> = told.map(Reason::from).collect();
        let trouble = troubles.get(&plan.unit);
        reasons.extend(trouble.cloned());
        reasons.extend(plan.boot_bound.iter().map(|address| {
            let text = format!(
                "{address} stays on vfio: the kernel bound it by ids at boot; take the ids out of the kernel command \
                 line or modprobe.d, or set adoptBootBound"
            );
            Reason::new(Code::BoundAtBoot, text)
        }));
        GroupStatus {
            group: plan.group,
            groups: plan.groups.iter().copied().collect(),
            functions: plan.functions.iter().copied().collect(),
            right: plan.verdict == Verdict::Right && trouble.is_none(),
            reasons,
        }
    }
}
