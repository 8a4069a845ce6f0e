//! How each unit stands with the agent, from one pass to the next.
//!
//! ```text
//!          Gate           Begin            Done
//!   Idle ───────▶ Gated ─────────▶ Moving ──────▶ Idle
//!    ▲             │ ▲              │  │
//!    │◀── Open ────┘ │ Gate, when   │  │ Late: no answer within the deadline
//!    │   (or Failed  │ it is due    │  ▼
//!    │    as before) │              │ Wedged{child} ──── Returned ───▶ Idle
//!    │               │              ▼
//!    └─── Unneeded ── Failed{reason, failures, next_try}
//!
//!   Idle ── Found: a write of an agent before this one ──▶ ForeignWedge{process, write} ── Returned ──▶ Idle
//! ```
//! Allocates are refused for what is gated or moving. A failed unit is tried again at its time; one that is wedged when its
//! write has come back from the kernel, never by the clock. All other events leave a state as it is.
//! Units are known by their functions; a wedge counts against every unit that it has a function in common with, whatever
//! has been plugged since.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use decide::{
    plan::{Plan, UnitPlan},
    refusal::Refusal,
    unit::UnitId,
};
use reason::{Code, Reason};
use tokio::time::Instant;
use vfio::{child::LeftBehind, process::ProcessId};

use crate::{
    execute::Outcome,
    journal::{Journal, Pending},
};

/// The longest back-off of a unit that fails again and again.
const LONGEST_BACKOFF: Duration = Duration::from_secs(60);

/// What came of a unit's last transaction, where it failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Failure {
    reason: Reason,
    failures: u32,
    next_try: Instant,
}

/// The state of one unit.
#[derive(Debug, Default)]
pub(super) enum UnitState<C> {
    /// Nothing is going on.
    #[default]
    Idle,
    /// It is about to be moved.
    Gated(Option<Failure>),
    /// Its transaction is under way.
    Moving(Option<Failure>),
    /// Its transaction failed; it is not tried again before its time.
    Failed(Failure),
    /// A write of this agent's has not come back.
    Wedged {
        /// In words.
        reason: Reason,
        /// Who makes it.
        child: C,
    },
    /// A write of an agent before this one has not come back.
    ForeignWedge {
        /// Who makes it.
        process: ProcessId,
        /// The write, in words.
        write: String,
    },
}

/// What happens to a unit.
#[derive(Debug)]
pub(super) enum Event<C> {
    /// It shall be moved.
    Gate,
    /// It will not be moved after all, or its move is over.
    Open,
    /// Its transaction begins.
    Begin,
    /// It is where it should be.
    Done,
    /// Its transaction failed.
    Fail {
        /// Why.
        reason: Reason,
        /// Whether trying again may help.
        retryable: bool,
    },
    /// A write did not come back in time.
    Late {
        /// In words.
        reason: Reason,
        /// Who makes it.
        child: C,
    },
    /// The write has come back.
    Returned,
    /// It is as desired, or must not be moved.
    Unneeded,
    /// The journal tells of a write whose maker lives.
    Found {
        /// Who makes it.
        process: ProcessId,
        /// The write, in words.
        write: String,
    },
}

impl Failure {
    fn after(before: Option<&Self>, reason: Reason, retryable: bool, now: Instant) -> Self {
        let failures = before.map_or(1, |before| before.failures.saturating_add(1));
        let backoff = if retryable {
            LONGEST_BACKOFF.min(Duration::from_secs(1) * 2_u32.saturating_pow(failures.min(6) - 1))
        } else {
            LONGEST_BACKOFF
        };
        Self { reason, failures, next_try: now + backoff }
    }
}

impl<C> UnitState<C> {
    /// The state after `event`.
    pub(super) fn after(self, event: Event<C>, now: Instant) -> Self {
        match (self, event) {
            (Self::Idle, Event::Gate) => Self::Gated(None),
            (Self::Failed(failure), Event::Gate) => Self::Gated(Some(failure)),
            (Self::Gated(before), Event::Begin) => Self::Moving(before),
            (Self::Gated(before) | Self::Moving(before), Event::Open) => {
                before.map_or(Self::Idle, Self::Failed)
            }
            (Self::Moving(_), Event::Done) => Self::Idle,
            (Self::Moving(before), Event::Fail { reason, retryable }) => {
                Self::Failed(Failure::after(before.as_ref(), reason, retryable, now))
            }
            (Self::Moving(_), Event::Late { reason, child }) => Self::Wedged { reason, child },
            (Self::Wedged { .. } | Self::ForeignWedge { .. }, Event::Returned) => Self::Idle,
            (Self::Failed(_), Event::Unneeded) => Self::Idle,
            (Self::Gated(Some(_)), Event::Unneeded) => Self::Gated(None),
            (Self::Idle, Event::Found { process, write }) => Self::ForeignWedge { process, write },
            (state, _) => state,
        }
    }

    /// Why it is not simply right.
    fn reason(&self) -> Option<Reason> {
        match self {
            Self::Idle | Self::Gated(None) | Self::Moving(None) => None,
            Self::Gated(Some(failure)) | Self::Moving(Some(failure)) | Self::Failed(failure) => {
                Some(failure.reason.clone())
            }
            Self::Wedged { reason, .. } => Some(reason.clone()),
            Self::ForeignWedge { process, write } => {
                Some(Reason::from(&Refusal::Wedged { pid: process.pid, write: write.clone() }))
            }
        }
    }

    fn waits_for_kernel(&self) -> bool {
        matches!(self, Self::Wedged { .. } | Self::ForeignWedge { .. })
    }
}

/// The states of all units; what is not in here is idle.
#[derive(Debug, Default)]
pub(super) struct States {
    of: BTreeMap<UnitId, UnitState<LeftBehind>>,
    /// What Allocates are refused for: what is gated or moving.
    gate: BTreeSet<UnitId>,
}

impl States {
    /// Lets `event` happen to `unit`.
    pub(super) fn on(&mut self, unit: &UnitId, event: Event<LeftBehind>) {
        let state = self.of.remove(unit).unwrap_or_default().after(event, Instant::now());
        if matches!(state, UnitState::Gated(_) | UnitState::Moving(_)) {
            self.gate.insert(unit.clone());
        } else {
            self.gate.remove(unit);
        }
        if !matches!(state, UnitState::Idle) {
            self.of.insert(unit.clone(), state);
        }
    }

    /// Lets `event` happen to every unit in the gate.
    pub(super) fn open_gate(&mut self) {
        for unit in std::mem::take(&mut self.gate) {
            self.on(&unit, Event::Open);
        }
    }

    /// What a transaction came to happens to its unit.
    pub(super) fn end(&mut self, unit: &UnitId, outcome: Outcome, reason: Reason, retryable: bool) {
        let event = match outcome {
            Outcome::Done => Event::Done,
            Outcome::RolledBack { .. } | Outcome::Broken { .. } => Event::Fail { reason, retryable },
            Outcome::Wedged { child, .. } => Event::Late { reason, child },
        };
        // The gate stays closed until all units of the pass are read back together.
        let gated = self.gate.contains(unit);
        self.on(unit, event);
        if gated {
            self.gate.insert(unit.clone());
        }
    }

    /// What is gated or moving.
    pub(super) fn gate(&self) -> &BTreeSet<UnitId> {
        &self.gate
    }

    /// What is not to be moved any more is in no trouble; a wedge stays one.
    pub(super) fn follow(&mut self, plan: &Plan) {
        let moving: BTreeSet<&UnitId> = plan.moves().map(|plan| &plan.unit).collect();
        let unneeded: Vec<UnitId> = self.of.keys().filter(|unit| !moving.contains(unit)).cloned().collect();
        for unit in unneeded {
            self.on(&unit, Event::Unneeded);
        }
    }

    /// Lets go of writes that have come back from the kernel, and of the journal's that nobody makes any more.
    pub(super) fn reap(&mut self, journal: &mut Journal) {
        let ended = |state: &mut UnitState<LeftBehind>| match state {
            UnitState::Wedged { child, .. } => child.ended(),
            UnitState::ForeignWedge { process, .. } => !process.alive(),
            _ => false,
        };
        let returned: Vec<UnitId> =
            self.of.iter_mut().filter_map(|(unit, state)| ended(state).then(|| unit.clone())).collect();
        for unit in returned {
            tracing::info!(%unit, "the kernel has answered at last");
            self.on(&unit, Event::Returned);
        }
        let of = &self.of;
        // Writers of an agent before this one count as well, as long as they live.
        journal.pending.retain(|pending| {
            pending.writer.alive()
                || of.iter().any(|(unit, state)| state.waits_for_kernel() && pending.concerns(unit))
        });
        for Pending { unit, write, writer } in journal.pending.clone() {
            self.on(&unit, Event::Found { process: writer, write: write.to_string() });
        }
    }

    fn wedge(&self, unit: &UnitId) -> Option<&UnitState<LeftBehind>> {
        let mut wedges = self.of.iter().filter(|(_, state)| state.waits_for_kernel());
        // What was written down without its functions may be about any unit.
        wedges.find(|(wedged, _)| wedged.0.is_empty() || wedged.meets(unit)).map(|(_, state)| state)
    }

    /// Whether a write to the unit, of this agent or of one before it, has not come back from the kernel.
    pub(super) fn waits_for_kernel(&self, unit: &UnitId) -> bool {
        self.wedge(unit).is_some()
    }

    /// Whether any unit waits for the kernel.
    pub(super) fn any_waits(&self) -> bool {
        self.of.values().any(UnitState::waits_for_kernel)
    }

    /// Whether `plan`'s time has come: it is not wedged, and has not failed a moment ago.
    pub(super) fn due(&self, plan: &UnitPlan, now: Instant) -> bool {
        let later = match self.of.get(&plan.unit) {
            Some(UnitState::Failed(failure)) => failure.next_try > now,
            _ => false,
        };
        !later && !self.waits_for_kernel(&plan.unit)
    }

    /// When the first failed unit is tried again.
    pub(super) fn next_try(&self) -> Option<Instant> {
        let failed = self.of.iter().filter_map(|(unit, state)| match state {
            UnitState::Failed(failure) if !self.waits_for_kernel(unit) => Some(failure.next_try),
            _ => None,
        });
        failed.min()
    }

    /// Every unit of `plan` that is in trouble, with why.
    pub(super) fn reasons(&self, plan: &Plan) -> BTreeMap<UnitId, Reason> {
        let reason = |unit: &UnitId| {
            let state = self.wedge(unit).or_else(|| self.of.get(unit))?;
            Some((unit.clone(), state.reason()?))
        };
        plan.units.iter().filter_map(|plan| reason(&plan.unit)).collect()
    }
}

/// The reason that a wedged unit shows.
pub(super) fn wedged(message: String) -> Reason {
    Reason::new(Code::Wedged, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason() -> Reason {
        Reason::new(Code::KernelRefused, "no")
    }

    /// A state without the times and texts that do not matter here.
    fn short(state: &UnitState<u8>) -> String {
        match state {
            UnitState::Idle => "Idle".to_owned(),
            UnitState::Gated(before) => {
                format!("Gated{}", before.as_ref().map_or(0, |failure| failure.failures))
            }
            UnitState::Moving(before) => {
                format!("Moving{}", before.as_ref().map_or(0, |failure| failure.failures))
            }
            UnitState::Failed(failure) => format!("Failed{}", failure.failures),
            UnitState::Wedged { .. } => "Wedged".to_owned(),
            UnitState::ForeignWedge { .. } => "Foreign".to_owned(),
        }
    }

    #[test]
    fn every_state_and_every_event() {
        let now = Instant::now();
        let failure = Failure { reason: reason(), failures: 2, next_try: now };
        let process = ProcessId { pid: 7, started: 1 };
        let states: [fn(&Failure, ProcessId) -> UnitState<u8>; 8] = [
            |_, _| UnitState::Idle,
            |_, _| UnitState::Gated(None),
            |failure, _| UnitState::Gated(Some(failure.clone())),
            |_, _| UnitState::Moving(None),
            |failure, _| UnitState::Moving(Some(failure.clone())),
            |failure, _| UnitState::Failed(failure.clone()),
            |_, _| UnitState::Wedged { reason: reason(), child: 0 },
            |_, process| UnitState::ForeignWedge { process, write: String::new() },
        ];
        let events: [fn(ProcessId) -> Event<u8>; 9] = [
            |_| Event::Gate,
            |_| Event::Open,
            |_| Event::Begin,
            |_| Event::Done,
            |_| Event::Fail { reason: reason(), retryable: true },
            |_| Event::Late { reason: reason(), child: 0 },
            |_| Event::Returned,
            |_| Event::Unneeded,
            |process| Event::Found { process, write: String::new() },
        ];
        // Gate, Open, Begin, Done, Fail, Late, Returned, Unneeded, Found
        let table = [
            ["Gated0", "Idle", "Idle", "Idle", "Idle", "Idle", "Idle", "Idle", "Foreign"],
            ["Gated0", "Idle", "Moving0", "Gated0", "Gated0", "Gated0", "Gated0", "Gated0", "Gated0"],
            ["Gated2", "Failed2", "Moving2", "Gated2", "Gated2", "Gated2", "Gated2", "Gated0", "Gated2"],
            ["Moving0", "Idle", "Moving0", "Idle", "Failed1", "Wedged", "Moving0", "Moving0", "Moving0"],
            ["Moving2", "Failed2", "Moving2", "Idle", "Failed3", "Wedged", "Moving2", "Moving2", "Moving2"],
            ["Gated2", "Failed2", "Failed2", "Failed2", "Failed2", "Failed2", "Failed2", "Idle", "Failed2"],
            ["Wedged", "Wedged", "Wedged", "Wedged", "Wedged", "Wedged", "Idle", "Wedged", "Wedged"],
            ["Foreign", "Foreign", "Foreign", "Foreign", "Foreign", "Foreign", "Idle", "Foreign", "Foreign"],
        ];
        for (state, row) in states.iter().zip(table) {
            for (event, expected) in events.iter().zip(row) {
                let (before, event) = (state(&failure, process), event(process));
                let context = format!("{before:?} on {event:?}");
                assert_eq!(short(&before.after(event, now)), expected, "{context}");
            }
        }
    }

    #[test]
    fn a_unit_that_fails_again_is_tried_less_often_and_a_hopeless_one_least() {
        let now = Instant::now();
        let mut before: Option<Failure> = None;
        let mut pauses = Vec::new();
        for _ in 0..8 {
            let failure = Failure::after(before.as_ref(), reason(), true, now);
            pauses.push((failure.next_try - now).as_secs());
            before = Some(failure);
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 32, 32]);
        assert_eq!(Failure::after(None, reason(), false, now).next_try - now, LONGEST_BACKOFF);
    }

    /// Whatever is plugged beside it: a write that hangs keeps its functions from being touched.
    #[test]
    fn a_wedge_counts_against_every_unit_that_it_meets() {
        let unit = |texts: &[&str]| UnitId(texts.iter().map(|text| text.parse().unwrap()).collect());
        let mut states = States::default();
        let process = ProcessId { pid: 7, started: 1 };
        let found = || Event::Found { process, write: "probe".to_owned() };
        states.on(&unit(&["0000:17:00.0"]), found());
        assert!(states.waits_for_kernel(&unit(&["0000:17:00.0", "0000:17:00.1"])));
        assert!(!states.waits_for_kernel(&unit(&["0000:65:00.0"])));
        states.on(&unit(&[]), found());
        assert!(states.waits_for_kernel(&unit(&["0000:65:00.0"])));
    }
}
