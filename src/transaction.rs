//! The transactions of several units side by side, each on a blocking thread with children of its own. `vfiod bind` and the
//! agent's pass both move units through here.
//!
//! ```text
//!   start(plan) ─▶ one thread a unit: [carry_out] ──announce──▶ next() ─▶ Event ─▶ settle: made durable, "go"
//!                                                 └──outcome──▶ next() ─▶ Event ─▶ settle: concluded in the journal
//! ```
//! The caller owns the journal and stays free to do other things between events.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
};

use decide::{
    plan::{Plan, UnitPlan},
    step::Step,
    unit::UnitId,
};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinSet,
};
use vfio::{host::Host, process::ProcessId};

use crate::{
    execute::{Attempt, Commands, KernelPort, Outcome, Recorder, carry_out},
    journal::{Journal, JournalError, Store},
};

/// A write that stands ready and waits for its journal entry.
#[derive(Debug)]
pub struct Announce {
    unit: UnitId,
    attempt: Attempt,
    writer: ProcessId,
    go: oneshot::Sender<Result<(), JournalError>>,
}

/// Keeps the journal durable, off the async threads, and writes nothing where nothing changed.
#[derive(Debug)]
pub struct Keeper {
    store: Store,
    /// What the file holds; none where that is not known.
    durable: Option<Journal>,
}

impl Keeper {
    /// A keeper of `store`, whose file holds `journal`.
    #[must_use]
    pub fn new(store: Store, journal: &Journal) -> Self {
        Self { store, durable: Some(journal.clone()) }
    }

    /// Makes `journal` durable.
    ///
    /// # Errors
    /// As [`Store::save`].
    pub async fn keep(&mut self, journal: &Journal) -> Result<(), JournalError> {
        if self.durable.as_ref() == Some(journal) {
            return Ok(());
        }
        self.durable = None;
        let (store, journal) = (self.store.clone(), journal.clone());
        let mut task = JoinSet::new();
        task.spawn_blocking(move || store.save(&journal).map(|()| journal));
        match task.join_next().await {
            Some(Ok(result)) => {
                self.durable = Some(result?);
                Ok(())
            }
            // The runtime is going down: nothing is durable then.
            _ => Err(JournalError::Interrupted),
        }
    }
}

/// A unit whose transaction has come to its end.
#[derive(Debug)]
pub struct Ended {
    /// The unit.
    pub unit: UnitId,
    /// Its steps.
    pub steps: Vec<Step>,
    /// What came of them.
    pub outcome: Outcome,
}

/// What happens next.
#[derive(Debug)]
pub enum Event {
    /// A write waits for its entry.
    Announce(Announce),
    /// A unit has come to its end.
    Ended(Ended),
}

impl Event {
    /// Brings the journal to what has happened: a write that waits is made durable and let go. Says which unit has ended,
    /// if one has.
    pub async fn settle(self, journal: &mut Journal, keeper: &mut Keeper) -> Option<Ended> {
        match self {
            Self::Announce(Announce { unit, attempt, writer, go }) => {
                journal.announce(&unit, &attempt, writer);
                let result = keeper.keep(journal).await;
                // A transaction that does not wait any more has ended.
                let _ = go.send(result);
                None
            }
            Self::Ended(ended) => {
                journal.conclude(&ended.unit, &ended.steps, &ended.outcome);
                Some(ended)
            }
        }
    }
}

/// The transactions under way.
#[derive(Debug)]
pub struct Transactions {
    units: JoinSet<Ended>,
    announces: mpsc::Receiver<Announce>,
}

impl Transactions {
    /// Starts the transaction of every unit that `plan` moves.
    #[must_use]
    pub fn start(host: &Host, commands: &Commands, plan: &Plan) -> Self {
        let (send, announces) = mpsc::channel(1);
        let mut units = JoinSet::new();
        // What is said of several units is said once.
        for note in plan.units.iter().flat_map(|unit| &unit.notes).collect::<BTreeSet<_>>() {
            tracing::warn!("{note}");
        }
        // What several units need is done once: the others find it done.
        let alone = Arc::new(Mutex::new(()));
        for plan in plan.moves() {
            let recorder = ChannelRecorder { send: send.clone() };
            let port = KernelPort::new(host, commands, plan, recorder);
            let (plan, alone) = (plan.clone(), Arc::clone(&alone));
            units.spawn_blocking(move || transact(plan, port, &alone));
        }
        Self { units, announces }
    }

    /// The next event; none when all have come to their end. Cancel-safe: an event that is not returned is returned by the
    /// next call.
    pub async fn next(&mut self) -> Option<Event> {
        loop {
            tokio::select! {
                Some(announce) = self.announces.recv() => return Some(Event::Announce(announce)),
                ended = self.units.join_next() => match ended? {
                    Ok(ended) => return Some(Event::Ended(ended)),
                    // A transaction that panicked has dropped its writer; the next observation shows what it left.
                    Err(error) => tracing::error!(%error, "a unit's transaction broke off"),
                },
            }
        }
    }
}

fn transact(plan: UnitPlan, mut port: KernelPort<ChannelRecorder>, alone: &Mutex<()>) -> Ended {
    let steps = plan.steps().to_vec();
    let of_its_own = steps.iter().position(|step| !step.shared()).unwrap_or(steps.len());
    let (shared, own) = steps.split_at(of_its_own);
    let one_at_a_time = alone.lock().unwrap_or_else(PoisonError::into_inner);
    let common = carry_out(shared, &mut port);
    drop(one_at_a_time);
    // Shared steps stay, so those of the unit's own are undone alone.
    let outcome = if matches!(common, Outcome::Done) { carry_out(own, &mut port) } else { common };
    Ended { unit: plan.unit, steps, outcome }
}

struct ChannelRecorder {
    send: mpsc::Sender<Announce>,
}

impl Recorder for ChannelRecorder {
    fn announce(
        &mut self,
        unit: &UnitId,
        attempt: &Attempt,
        writer: ProcessId,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let (go, wait) = oneshot::channel();
        let announce = Announce { unit: unit.clone(), attempt: attempt.clone(), writer, go };
        self.send.blocking_send(announce).map_err(|_| JournalError::Interrupted)?;
        wait.blocking_recv().map_err(|_| JournalError::Interrupted)??;
        Ok(())
    }
}
