//! Runs the transactions of several groups side by side, each on a blocking thread with a writer of its own.
//!
//! The caller owns the journal and stays free to do other things between events: it gets each write announced, makes the
//! journal entry durable, and answers; then each group's outcome.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::{
    sync::{mpsc, oneshot},
    task::JoinSet,
};
use vfio::{child::ChildCommand, host::Host, process::ProcessId, write::Write};

use crate::{
    execute::{KernelPort, Outcome, Recorder, carry_out, load_modules},
    journal::{Journal, JournalError, Store},
    plan::{Move, Plan, Prior},
};

/// A write that stands ready and waits for its journal entry.
#[derive(Debug)]
pub struct Announce {
    group: u32,
    write: Write,
    prior: Option<Prior>,
    writer: ProcessId,
    go: oneshot::Sender<Result<(), JournalError>>,
}

impl Announce {
    /// Makes the entry durable in `journal`, and lets the write be made.
    pub async fn record(self, journal: &mut Journal, keeper: &mut Keeper) {
        journal.announce(self.group, &self.write, self.prior.as_ref(), self.writer);
        let result = keeper.keep(journal).await;
        // A transaction that does not wait any more has ended.
        let _ = self.go.send(result);
    }
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

/// What happens next.
#[derive(Debug)]
pub enum Event {
    /// A write waits for its entry.
    Announce(Announce),
    /// A group has come to its end.
    Finished {
        /// The group.
        group: u32,
        /// Its moves.
        moves: Vec<Move>,
        /// What came of them.
        outcome: Outcome,
    },
    /// All have.
    AllDone,
}

/// The transactions under way.
#[derive(Debug)]
pub struct Conduct {
    groups: JoinSet<(u32, Vec<Move>, Outcome)>,
    announces: mpsc::Receiver<Announce>,
}

impl Conduct {
    /// Starts the transaction of every group that `plan` moves.
    #[must_use]
    pub fn start(host: &Host, command: &ChildCommand, plan: &Plan) -> Self {
        let (send, announces) = mpsc::channel(1);
        let mut groups = JoinSet::new();
        // What is said of several groups is said once.
        for note in plan.groups.iter().flat_map(|group| &group.notes).collect::<BTreeSet<_>>() {
            tracing::warn!("{note}");
        }
        // What several groups need is loaded once: the others find it there.
        let loading = Arc::new(Mutex::new(()));
        for (group, loads, moves) in plan.transactions() {
            let (loads, moves, loading) = (loads.to_vec(), moves.to_vec(), Arc::clone(&loading));
            let recorder = ChannelRecorder { send: send.clone() };
            let mut port = KernelPort::new(host, command, group, recorder);
            groups.spawn_blocking(move || {
                let alone = loading.lock().unwrap_or_else(PoisonError::into_inner);
                let failed = load_modules(&loads, &mut port);
                drop(alone);
                let outcome = failed.unwrap_or_else(|| carry_out(&moves, &mut port));
                (group, moves, outcome)
            });
        }
        Self { groups, announces }
    }

    /// The next event. Cancel-safe: an event that is not returned is returned by the next call.
    pub async fn next(&mut self) -> Event {
        loop {
            tokio::select! {
                Some(announce) = self.announces.recv() => return Event::Announce(announce),
                finished = self.groups.join_next() => match finished {
                    None => return Event::AllDone,
                    Some(Ok((group, moves, outcome))) => return Event::Finished { group, moves, outcome },
                    // A transaction that panicked has dropped its writer; the next observation shows what it left.
                    Some(Err(error)) => tracing::error!(%error, "a group's transaction broke off"),
                },
            }
        }
    }
}

struct ChannelRecorder {
    send: mpsc::Sender<Announce>,
}

impl Recorder for ChannelRecorder {
    fn announce(
        &mut self,
        group: u32,
        write: &Write,
        prior: Option<&Prior>,
        writer: ProcessId,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let (go, wait) = oneshot::channel();
        let announce = Announce { group, write: write.clone(), prior: prior.cloned(), writer, go };
        self.send.blocking_send(announce).map_err(|_| JournalError::Interrupted)?;
        wait.blocking_recv().map_err(|_| JournalError::Interrupted)??;
        Ok(())
    }
}
