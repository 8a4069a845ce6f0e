//! How the node stands, for people: made from the agent's state, which it does not change.

use super::Agent;
use crate::{
    plan::{GroupPlan, Verdict},
    reason::Reason,
    status::{GroupStatus, State, Status},
};

impl Agent {
    /// Publishes the status.
    pub(super) fn report(&self) {
        let groups: Vec<GroupStatus> = self.plan.groups.iter().map(|plan| self.group_status(plan)).collect();
        let mut reasons: Vec<Reason> = self.failure.iter().cloned().collect();
        for group in groups.iter().filter(|group| !group.right) {
            reasons.extend(group.reasons.iter().cloned());
        }
        reasons.sort();
        reasons.dedup();
        self.channels.status.send_replace(Status {
            workload_type: self.desired.workload_type,
            consumer: self.desired.consumer,
            state: self.state(&groups),
            reasons,
            groups,
            offers: self.offers.clone(),
            holds: self.usage.holds.keys().copied().collect(),
            registrations: self.channels.registrations.borrow().clone(),
            passes: self.passes,
            last_pass: self.last_pass.clone(),
            ..super::starting(&self.desired)
        });
    }

    fn state(&self, groups: &[GroupStatus]) -> State {
        if self.failure.is_some() {
            return State::Failed;
        }
        if !self.gate.is_empty() {
            return State::Switching;
        }
        let reasons = || groups.iter().flat_map(|group| &group.reasons);
        if groups.iter().all(|group| group.right) && reasons().next().is_none() {
            State::Ready
        } else if reasons().any(|reason| reason.code == "InUse") {
            State::Blocked
        } else {
            State::Degraded
        }
    }

    fn group_status(&self, plan: &GroupPlan) -> GroupStatus {
        let mut reasons: Vec<Reason> = match &plan.verdict {
            Verdict::Refused { refusals } => refusals.iter().map(Reason::from).collect(),
            Verdict::Right | Verdict::Move { .. } => Vec::new(),
        };
        reasons.extend(plan.group.and_then(|group| self.trouble_reasons().remove(&group)));
        reasons.extend(plan.boot_bound.iter().map(|address| {
            let text = format!(
                "{address} stays on vfio: the kernel bound it by ids at boot; take the ids out of the kernel command \
                 line or modprobe.d, or set adoptBootBound"
            );
            Reason::new("BoundAtBoot", text)
        }));
        GroupStatus {
            group: plan.group,
            functions: plan.functions.iter().copied().collect(),
            right: plan.verdict == Verdict::Right,
            reasons,
        }
    }
}
