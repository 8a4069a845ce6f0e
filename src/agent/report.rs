//! How the node stands, for people: made from the agent's state, which it does not change.

use std::collections::BTreeMap;

use super::Agent;
use crate::{
    plan::{GroupPlan, Verdict},
    reason::Reason,
    status::{GroupStatus, State, Status},
};

impl Agent {
    /// Publishes the status.
    pub(super) fn report(&self) {
        let troubles = self.trouble_reasons();
        let groups: Vec<GroupStatus> =
            self.plan.groups.iter().map(|plan| self.group_status(plan, &troubles)).collect();
        let mut reasons: Vec<Reason> = self.failure.iter().cloned().collect();
        let registrations = self.channels.registrations.borrow().clone();
        // What the kubelet does not know of is no use to anybody, however well it is bound.
        reasons.extend(registrations.iter().filter_map(|(resource, registration)| {
            let failure = registration.failure.as_ref()?;
            Some(Reason::new("NotRegistered", format!("{resource}: {}", failure.message)))
        }));
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

    /// `all` are the reasons of groups that are not right, of the node and of its kubelet.
    fn state(&self, groups: &[GroupStatus], all: &[Reason]) -> State {
        if self.failure.is_some() {
            return State::Failed;
        }
        if !self.gate.is_empty() {
            return State::Switching;
        }
        let noted = groups.iter().any(|group| !group.right || !group.reasons.is_empty());
        if !noted && all.is_empty() {
            State::Ready
        } else if all.iter().any(|reason| reason.code == "InUse") {
            State::Blocked
        } else {
            State::Degraded
        }
    }

    fn group_status(&self, plan: &GroupPlan, troubles: &BTreeMap<u32, Reason>) -> GroupStatus {
        let mut reasons: Vec<Reason> = match &plan.verdict {
            // A write of vfiod's own that hangs says more of it below.
            Verdict::Refused { refusals } => {
                let own = plan.group.is_some_and(|group| self.waits_for_kernel(group));
                let told = refusals.iter().filter(|refusal| !(own && refusal.code() == "Busy"));
                told.map(Reason::from).collect()
            }
            Verdict::Right | Verdict::Move { .. } => Vec::new(),
        };
        let trouble = plan.group.and_then(|group| troubles.get(&group));
        reasons.extend(trouble.cloned());
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
            right: plan.verdict == Verdict::Right && trouble.is_none(),
            reasons,
        }
    }
}
