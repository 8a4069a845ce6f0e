//! One pass: look, plan, move, look, publish.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::time::{Instant, timeout};
use vfio::child::Reader;

use super::{Agent, Trouble, Wake, boot_seconds};
use crate::{
    conduct::{Conduct, Event},
    execute::Outcome,
    inventory::{Inventory, observe},
    kubelet,
    offers::{View, advertised, offers},
    plan::{Move, Plan, Verdict, plan},
    reason::{Reason, chain},
    usage::Hold,
};

/// The shortest time to another try, whatever else says.
const SHORTEST_RETRY: Duration = Duration::from_millis(200);

/// How long a look may take; what of it may block has deadlines of its own.
const LOOK_DEADLINE: Duration = Duration::from_secs(30);

/// How soon a write that has not come back is looked at again: mostly it is a killed agent's last one.
const LATE_RETRY: Duration = Duration::from_secs(1);

/// The longest back-off of a group that fails again and again.
const LONGEST_BACKOFF: Duration = Duration::from_secs(60);

impl Agent {
    /// Makes one pass, and says when the next is due.
    pub(super) async fn pass(&mut self) -> Wake {
        self.desired = self.channels.wish.borrow_and_update().clone();
        // Before the look: a function whose write has come back need not be taken for busy.
        self.reap_wedged();
        if !self.look().await {
            self.report();
            return self.wake_in(self.settings.blocked_retry, "the node could not be looked at");
        }
        self.plan();
        self.forget_settled();
        if self.due().moves().next().is_some() {
            self.move_groups().await;
        }
        self.publish();
        self.keep_journal().await;
        self.next_wake()
    }

    /// Asks kernel and kubelet how things are. The kubelet comes first, so that no process can have come between that
    /// is of a pod not heard of.
    pub(super) async fn look(&mut self) -> bool {
        let pods = kubelet::list(&self.settings.kubelet, self.settings.pod_resources_deadline).await;
        let observed = self.observe().await;
        match observed {
            Ok(inventory) => {
                self.inventory = inventory;
                self.failure = None;
            }
            Err(error) => {
                tracing::error!("{error}");
                self.failure = Some(Reason::new("NotObserved", error));
                return false;
            }
        }
        self.usage.pods = pods.into();
        self.adopt_holds();
        for address in self.usage.settle(&self.inventory, boot_seconds(), self.settings.hold_grace.as_secs())
        {
            tracing::info!(%address, "no pod has it any more");
        }
        true
    }

    /// Reads the node on a blocking thread, its functions and processes through a child process.
    async fn observe(&mut self) -> Result<Inventory, String> {
        // A look that has not come back is waited for, not joined by another.
        if self.looking.is_empty() {
            let host = self.settings.host.clone();
            let mut reader =
                self.reader.take().unwrap_or_else(|| Reader::new(&self.settings.reader, &self.settings.host));
            // What is written to right now answers in a moment; what hangs need not be asked.
            let hanging = self.journal.pending.iter().filter(|(group, _)| !self.gate.contains(group));
            let busy = hanging.filter_map(|(_, pending)| pending.write.function()).collect();
            self.looking.spawn_blocking(move || {
                let inventory = observe(&host, &mut reader, &busy).map_err(|error| error.to_string());
                (reader, inventory)
            });
        }
        match timeout(LOOK_DEADLINE, self.looking.join_next()).await {
            Ok(Some(Ok((reader, inventory)))) => {
                self.reader = Some(reader);
                inventory
            }
            Ok(_) => Err("the look broke off".to_owned()),
            Err(_) => Err(format!("looking at the node took longer than {} s", LOOK_DEADLINE.as_secs())),
        }
    }

    /// Takes over as holds what the kubelet lists under this agent's own names without an answer being remembered: given
    /// out by another program, or before the journal was lost. So it counts as in use although the kubelet falls silent.
    fn adopt_holds(&mut self) {
        let mut listed = Vec::new();
        for (function, role) in self.inventory.offerable() {
            let Ok(name) = self.settings.naming.resource(self.desired.consumer, role, function) else {
                continue;
            };
            if self.usage.pods_with(function.address).any(|device| device.resource == name.as_str()) {
                listed.push((function.address, name.to_string()));
            }
        }
        for (address, resource) in listed {
            let hold = Hold { resource, answered_at: boot_seconds(), shown: true };
            self.usage.holds.entry(address).or_insert(hold);
        }
    }

    pub(super) fn plan(&mut self) {
        self.plan = plan(&self.inventory, &self.desired, &self.usage, &self.journal.priors);
        // What went right, or is not to be moved any more, is in no trouble.
        let moving: BTreeSet<u32> = self.plan.moves().map(|(group, _)| group).collect();
        let wedged = &self.wedged;
        self.troubles.retain(|group, _| moving.contains(group) || wedged.contains_key(group));
    }

    /// Forgets the functions that are back where they were. Not while groups are being moved: a function that is back may
    /// yet have to return to vfio with the rest of its group.
    fn forget_settled(&mut self) {
        for plan in &self.plan.groups {
            if plan.group.is_none_or(|group| !self.waits_for_kernel(group)) {
                for address in &plan.settled {
                    self.journal.priors.remove(address);
                }
            }
        }
    }

    /// Whether a write to the group, of this agent or of one before it, has not come back from the kernel.
    pub(super) fn waits_for_kernel(&self, group: u32) -> bool {
        self.journal.pending.contains_key(&group) || self.wedged.contains_key(&group)
    }

    /// The plan without the groups whose time has not come: wedged ones, and those that failed a moment ago.
    fn due(&self) -> Plan {
        let now = Instant::now();
        let due = |group: u32| {
            !self.waits_for_kernel(group)
                && self.troubles.get(&group).is_none_or(|trouble| trouble.next_try <= now)
        };
        let groups = self.plan.groups.iter().filter(|plan| plan.group.is_some_and(due)).cloned().collect();
        Plan { groups }
    }

    async fn move_groups(&mut self) {
        self.gate = self.due().moves().map(|(group, _)| group).collect();
        self.publish();
        // The look that allows a write is never older than the gate.
        if !self.look().await {
            self.gate.clear();
            return;
        }
        self.plan();
        let mut due = self.due();
        due.groups.retain(|plan| plan.group.is_some_and(|group| self.gate.contains(&group)));
        let mut conduct = Conduct::start(&self.settings.host, &self.settings.writer, &due);
        loop {
            tokio::select! {
                // Both arms are cancel-safe: Conduct keeps its events, the channel its calls.
                event = conduct.next() => match event {
                    Event::Announce(announce) => announce.record(&mut self.journal, &mut self.keeper).await,
                    Event::Finished { group, moves, outcome } => self.conclude(group, &moves, outcome),
                    Event::AllDone => break,
                },
                Some(call) = self.channels.allocate.recv() => self.allocate(call).await,
            }
        }
        self.look().await;
        self.plan();
        self.forget_settled();
        self.gate.clear();
    }

    fn conclude(&mut self, group: u32, moves: &[Move], outcome: Outcome) {
        self.journal.conclude(group, moves, &outcome);
        let text = outcome.to_string();
        let (code, retryable) = match outcome {
            Outcome::Done => {
                tracing::info!(group, functions = moves.len(), "group moved, and read back");
                self.troubles.remove(&group);
                return;
            }
            Outcome::RolledBack { error } | Outcome::Broken { error, .. } => {
                (error.code(), error.retryable())
            }
            Outcome::Wedged { child, .. } => {
                self.wedged.insert(group, child);
                ("Wedged", true)
            }
        };
        tracing::error!(group, code, "{text}");
        let failures = self.troubles.get(&group).map_or(1, |trouble| trouble.failures.saturating_add(1));
        let backoff = if retryable {
            LONGEST_BACKOFF.min(Duration::from_secs(1) * 2_u32.saturating_pow(failures.min(6) - 1))
        } else {
            LONGEST_BACKOFF
        };
        let trouble =
            Trouble { reason: Reason::new(code, text), failures, next_try: Instant::now() + backoff };
        self.troubles.insert(group, trouble);
    }

    /// Lets go of writes that have come back from the kernel: their groups are looked at anew.
    fn reap_wedged(&mut self) {
        self.wedged.retain(|group, child| {
            let ended = child.ended();
            if ended {
                tracing::info!(group, "the kernel has answered at last");
                self.troubles.remove(group);
            }
            !ended
        });
        let wedged = &self.wedged;
        // Writers of an agent before this one count as well, as long as they live.
        self.journal.pending.retain(|group, pending| wedged.contains_key(group) || pending.writer.alive());
    }

    /// Makes offers and status from what is known now.
    pub(super) fn publish(&mut self) {
        let trouble = self.trouble_reasons();
        self.offers = offers(View {
            inventory: &self.inventory,
            desired: &self.desired,
            plan: &self.plan,
            usage: &self.usage,
            naming: &self.settings.naming,
            trouble: &trouble,
        });
        let next = advertised(&self.offers);
        self.channels.advertised.send_if_modified(|now| {
            let changed = *now != next;
            *now = next;
            changed
        });
        self.report();
    }

    /// Every group in trouble, with why.
    pub(super) fn trouble_reasons(&self) -> BTreeMap<u32, Reason> {
        let mut reasons: BTreeMap<u32, Reason> =
            self.troubles.iter().map(|(group, trouble)| (*group, trouble.reason.clone())).collect();
        // A write that is being waited for this very moment is none to be late.
        for (group, pending) in self.journal.pending.iter().filter(|(group, _)| !self.gate.contains(group)) {
            reasons.entry(*group).or_insert_with(|| {
                let text = format!(
                    "an earlier write has not come back from the kernel (process {}: {}); the group is left alone",
                    pending.writer.pid, pending.write
                );
                Reason::new("Wedged", text)
            });
        }
        reasons
    }

    /// Makes what the pass changed of holds and priors durable. A journal that cannot be written keeps its old content,
    /// which remembers more, never less; the next pass tries again.
    pub(super) async fn keep_journal(&mut self) {
        self.journal.holds.clone_from(&self.usage.holds);
        if let Err(error) = self.keeper.keep(&self.journal).await {
            tracing::error!(code = error.code(), "{}", chain(&error));
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
        let refused = |code: &str| {
            self.plan.groups.iter().any(|plan| match &plan.verdict {
                Verdict::Refused { refusals } => refusals.iter().any(|refusal| refusal.code() == code),
                Verdict::Right | Verdict::Move { .. } => false,
            })
        };
        let mut wakes = vec![self.wake_in(self.settings.rescan, "rescan")];
        if self.failure.is_some() {
            wakes.push(self.wake_in(self.settings.blocked_retry, "the node could not be looked at"));
        }
        if refused("InUse") {
            wakes.push(self.wake_in(self.settings.blocked_retry, "something in use is looked at again"));
        }
        if !self.usage.holds.is_empty() {
            wakes.push(self.wake_in(self.settings.blocked_retry, "holds are looked at again"));
        }
        if !self.journal.pending.is_empty() || !self.wedged.is_empty() || refused("Busy") {
            let soon = self.settings.blocked_retry.min(LATE_RETRY);
            wakes.push(self.wake_in(soon, "a late write is looked at again"));
        }
        // A wedged group is tried again when its write has come back, not by the clock.
        let failed = self.troubles.iter().filter(|(group, _)| !self.waits_for_kernel(**group));
        let soonest = Instant::now() + SHORTEST_RETRY;
        wakes.extend(failed.map(|(_, trouble)| Wake {
            at: trouble.next_try.max(soonest),
            why: "a failed group is tried again",
        }));
        // The list begins with the rescan, so there is always one.
        wakes
            .into_iter()
            .min_by_key(|wake| wake.at)
            .unwrap_or_else(|| self.wake_in(self.settings.rescan, "rescan"))
    }
}
