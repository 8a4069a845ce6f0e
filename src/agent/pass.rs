//! One pass: look, plan, move, look, publish.

use std::time::Duration;

use decide::{
    id::OfferId,
    offers::{View, offers},
    plan::{Plan, UnitPlan},
    refusal::Refusal,
    wish::Wish,
};
use reason::{Code, Coded, Reason, chain};
use tokio::time::Instant;

use super::{Agent, Wake, states};
use crate::{
    device_plugin::advertised,
    execute::Outcome,
    transaction::{Ended, Transactions},
};

/// The shortest time to another try, whatever else says.
const SHORTEST_RETRY: Duration = Duration::from_millis(200);

/// How soon a write that has not come back is looked at again: mostly it is a killed agent's last one.
const LATE_RETRY: Duration = Duration::from_secs(1);

impl Agent {
    /// Makes one pass, and says when the next is due.
    pub(super) async fn pass(&mut self) -> Wake {
        self.heed();
        // Before the look: a function whose write has come back need not be taken for busy.
        self.states.reap(&mut self.journal);
        if !self.look().await {
            self.report();
            return self.wake_in(self.tuning.blocked_retry, "the node could not be looked at");
        }
        self.plan();
        self.forget_settled();
        if self.due().moves().next().is_some() {
            self.move_units().await;
        }
        // What is told is durable: an agent may be told to end at any moment.
        self.keep_journal().await;
        self.publish();
        self.next_wake()
    }

    /// Takes in what is asked of the node. A wish that is not clear changes nothing, and is told of.
    fn heed(&mut self) {
        match self.channels.wish.borrow_and_update().clone() {
            Wish::Clear(desired) => {
                self.desired = desired;
                self.unclear = None;
            }
            Wish::Unclear(reason) => self.unclear = Some(reason),
        }
        self.tuning = self.channels.tuning.borrow_and_update().clone();
    }

    pub(super) fn plan(&mut self) {
        self.plan = decide::plan::plan(&self.inventory, &self.desired, &self.usage, &self.journal.priors);
        self.states.follow(&self.plan);
    }

    /// Forgets the functions that are back where they were, and what is told of devices that are gone. Not while units are
    /// being moved: a function that is back may yet have to return to vfio with the rest of its unit.
    fn forget_settled(&mut self) {
        for stale in &self.plan.stale {
            tracing::warn!(code = %Code::StalePrior, "{stale}");
        }
        self.journal.forget_stale(&self.plan);
        for plan in self.plan.units.iter().filter(|plan| !self.states.waits_for_kernel(&plan.unit)) {
            for address in &plan.settled {
                self.journal.priors.remove(address);
            }
        }
    }

    /// The plan without the units whose time has not come: wedged ones, and those that failed a moment ago.
    fn due(&self) -> Plan {
        let now = Instant::now();
        let units = self.plan.units.iter().filter(|plan| self.states.due(plan, now)).cloned().collect();
        Plan { units, ..Plan::default() }
    }

    async fn move_units(&mut self) {
        for plan in self.due().moves() {
            self.states.on(&plan.unit, states::Event::Gate);
        }
        self.publish();
        // The look that allows a write is never older than the gate.
        if !self.look().await {
            self.states.open_gate();
            return;
        }
        self.plan();
        let mut due = self.due();
        due.units.retain(|plan| plan.moves() && self.states.gate().contains(&plan.unit));
        for plan in &due.units {
            self.states.on(&plan.unit, states::Event::Begin);
        }
        let mut transactions = Transactions::start(&self.settings.host, &self.commands(), &due);
        loop {
            tokio::select! {
                // Both arms are cancel-safe: Transactions keeps its events, the channel its calls.
                event = transactions.next() => {
                    let Some(event) = event else { break };
                    let ended = event.settle(&mut self.journal, &mut self.keeper).await;
                    ended.into_iter().for_each(|ended| self.conclude(ended));
                }
                Some(call) = self.channels.allocate.recv() => self.allocate(call).await,
            }
        }
        self.look().await;
        self.plan();
        self.forget_settled();
        self.states.open_gate();
    }

    fn conclude(&mut self, ended: Ended) {
        let Ended { unit, steps, outcome } = ended;
        let text = outcome.to_string();
        let (reason, retryable) = match &outcome {
            Outcome::Done => {
                let functions = steps.iter().filter_map(|step| step.touches()).count();
                tracing::info!(%unit, functions, "moved, and read back");
                (Reason::new(Code::NotTaken, text), true)
            }
            Outcome::RolledBack { error } | Outcome::Broken { error, .. } => {
                (Reason::new(error.code(), text), error.retryable())
            }
            Outcome::Wedged { .. } => (states::wedged(text), true),
        };
        if !matches!(outcome, Outcome::Done) {
            tracing::error!(%unit, code = %reason.code, "{}", reason.message);
        }
        self.states.end(&unit, outcome, reason, retryable);
    }

    /// Makes offers and status from what is known now.
    pub(super) fn publish(&mut self) {
        let trouble = self.states.reasons(&self.plan);
        self.offers = offers(View {
            inventory: &self.inventory,
            desired: &self.desired,
            plan: &self.plan,
            usage: &self.usage,
            pods_silent: self.pods_silent(),
            naming: &self.tuning.naming,
            trouble: &trouble,
        });
        self.keep_back();
        self.known.extend(self.offers.iter().map(|offer| (offer.id, offer.resource.clone())));
        let next = advertised(&self.offers);
        self.channels.advertised.send_if_modified(|now| {
            let changed = *now != next;
            *now = next;
            changed
        });
        self.report();
    }

    /// What goes bad again and again is not offered as healthy each time that it comes back.
    fn keep_back(&mut self) {
        let now = Instant::now();
        let gone: Vec<OfferId> = self.gone().map(|(id, _)| id).collect();
        let flaps = &mut self.flaps;
        for id in gone {
            flaps.see(id, true, now);
        }
        for offer in &mut self.offers {
            let bad = offer.reasons.iter().any(|reason| is_hardware(reason.code));
            flaps.see(offer.id, bad, now);
            // What a pod has is not taken for bad over what it was.
            let Some((until, times)) =
                flaps.kept_back(offer.id, self.tuning.flap_pause, now).filter(|_| !offer.given_out)
            else {
                continue;
            };
            let seconds = until.duration_since(now).as_secs() + 1;
            let text = format!(
                "it has gone bad {times} times of late; it is given out again when it has stayed good for {seconds} s more"
            );
            offer.reasons.push(Reason::new(Code::Flapping, text));
            offer.healthy = false;
        }
    }

    /// Makes what the pass changed of holds and priors durable. A journal that cannot be written keeps its old content,
    /// which remembers more, never less; the next pass tries again.
    pub(super) async fn keep_journal(&mut self) {
        self.journal.holds.clone_from(&self.usage.holds);
        if let Err(error) = self.keeper.keep(&self.journal).await {
            tracing::error!(code = %error.code(), "{}", chain(&error));
        }
    }

    fn wake_in(&self, after: Duration, why: &'static str) -> Wake {
        Wake { at: Instant::now() + after, why }
    }

    /// An Allocate has looked, and may have made a hold: what the pass before it had in mind may be too late.
    pub(super) fn wake_after_allocate(&self, before: Wake) -> Wake {
        let changed = self.due().moves().next().is_some();
        let moves = changed.then(|| self.wake_in(SHORTEST_RETRY, "an Allocate found the node changed"));
        [before, self.next_wake()].into_iter().chain(moves).min_by_key(|wake| wake.at).unwrap_or(before)
    }

    fn next_wake(&self) -> Wake {
        let refused =
            |fits: fn(&Refusal) -> bool| self.plan.units.iter().flat_map(UnitPlan::refusals).any(fits);
        let blocked_retry = self.tuning.blocked_retry;
        let mut wakes = vec![self.wake_in(self.tuning.rescan, "rescan")];
        if self.failure.is_some() {
            wakes.push(self.wake_in(blocked_retry, "the node could not be looked at"));
        }
        if refused(|refusal| matches!(refusal, Refusal::InUse { .. })) {
            wakes.push(self.wake_in(blocked_retry, "something in use is looked at again"));
        }
        if !self.usage.holds.is_empty() {
            wakes.push(self.wake_in(blocked_retry, "holds are looked at again"));
        }
        if self.silent_since.is_some() {
            wakes.push(self.wake_in(blocked_retry, "the kubelet is asked for its pods again"));
        }
        if self.states.any_waits() || refused(|refusal| matches!(refusal, Refusal::Busy { .. })) {
            wakes.push(self.wake_in(blocked_retry.min(LATE_RETRY), "a late write is looked at again"));
        }
        let now = Instant::now();
        let soonest = now + SHORTEST_RETRY;
        // A wedged unit is tried again when its write has come back, not by the clock.
        let failed = self.states.next_try().map(|at| (at, "a failed group is tried again"));
        let kept = self
            .flaps
            .next(self.tuning.flap_pause, now)
            .map(|at| (at, "a device that had gone bad is given back"));
        wakes.extend(failed.into_iter().chain(kept).map(|(at, why)| Wake { at: at.max(soonest), why }));
        // The list begins with the rescan, so there is always one.
        wakes
            .into_iter()
            .min_by_key(|wake| wake.at)
            .unwrap_or_else(|| self.wake_in(self.tuning.rescan, "rescan"))
    }
}

/// Whether a reason is about hardware that does not hold, rather than about what is done with it.
fn is_hardware(code: Code) -> bool {
    matches!(code, Code::FunctionLost | Code::FunctionGone | Code::Unreadable)
}
