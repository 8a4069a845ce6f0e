//! Looking at the node: kernel and kubelet.

use std::{collections::BTreeSet, time::Duration};

use decide::{
    id::OfferId,
    inventory::Inventory,
    usage::{Hold, HoldBy, Pods},
};
use reason::{Code, Coded, Reason};
use tokio::{
    task::JoinSet,
    time::{Instant, timeout_at},
};
use vfio::{child::Reader, pci::Address};

use super::{Agent, boot_seconds};
use crate::{kubelet::list, observe::observe, pods::pods};

/// How long a look may take; what of it may block has deadlines of its own.
const LOOK_DEADLINE: Duration = Duration::from_secs(30);

/// A look that has come back.
#[derive(Debug)]
struct Looked {
    reader: Reader,
    /// How many holds had been made when it was begun.
    holds_made: u64,
    inventory: Result<Inventory, Reason>,
}

/// The look under way, and what it is made with.
#[derive(Debug, Default)]
pub(super) struct Looking {
    /// What reads the functions, between looks.
    reader: Option<Reader>,
    task: JoinSet<Looked>,
}

impl Agent {
    /// Asks kernel and kubelet how things are; false where the node could not be looked at. The kubelet comes first, so that
    /// no process can have come between that is of a pod not heard of.
    pub(super) async fn look(&mut self) -> bool {
        let answer = list(&self.settings.kubelet, self.tuning.pod_resources_deadline).await;
        let pods = pods(answer, self.settings.if_absent);
        match self.observe().await {
            Ok(inventory) => {
                self.inventory = inventory;
                self.failure = None;
            }
            Err(reason) => {
                tracing::error!(code = %reason.code, "{}", reason.message);
                self.failure = Some(reason);
                return false;
            }
        }
        self.heard(pods);
        self.adopt_holds();
        let grace = self.tuning.hold_grace.as_secs();
        for id in self.usage.settle(&self.inventory, boot_seconds(), grace) {
            tracing::info!(%id, "no pod has it any more");
        }
        true
    }

    /// Takes what the kubelet said of pods, and notes since when it has said nothing.
    fn heard(&mut self, pods: Pods) {
        match &pods {
            Pods::Known { .. } => {
                if self.silent_since.take().is_some() {
                    tracing::info!("the kubelet says again which pods have devices");
                }
            }
            Pods::Unknown(reason) => {
                if self.silent_since.is_none() {
                    self.silent_since = Some(Instant::now());
                    tracing::warn!(code = %Code::PodResourcesUnknown, "{reason}");
                }
            }
        }
        self.usage.pods = pods;
    }

    /// Whether PodResources has been silent for so long that it is not just a kubelet's start.
    pub(super) fn pods_silent(&self) -> bool {
        self.silent_since.is_some_and(|since| since.elapsed() >= self.tuning.pods_silence)
    }

    /// Reads the node on a blocking thread, what may block through child processes.
    ///
    /// A look that was begun before the last hold was made says nothing of what the hold is about, and is thrown away.
    async fn observe(&mut self) -> Result<Inventory, Reason> {
        let until = Instant::now() + LOOK_DEADLINE;
        loop {
            // A look that has not come back is waited for, not joined by another.
            if self.looking.task.is_empty() {
                self.begin_look();
            }
            match timeout_at(until, self.looking.task.join_next()).await {
                Ok(Some(Ok(looked))) => {
                    self.looking.reader = Some(looked.reader);
                    if looked.holds_made == self.holds_made {
                        return looked.inventory;
                    }
                }
                Ok(_) => return Err(Reason::new(Code::NotObserved, "the look broke off")),
                Err(_) => {
                    let text = format!("looking at the node took longer than {} s", LOOK_DEADLINE.as_secs());
                    return Err(Reason::new(Code::NotObserved, text));
                }
            }
        }
    }

    fn begin_look(&mut self) {
        let host = self.settings.host.clone();
        let reader = self.looking.reader.take();
        let mut reader = reader.unwrap_or_else(|| Reader::new(&self.settings.reader, &host));
        // What is written to right now answers in a moment; what hangs need not be asked.
        let hanging =
            self.journal.pending.iter().filter(|pending| !self.states.gate().contains(&pending.unit));
        let busy: BTreeSet<Address> = hanging.filter_map(|pending| pending.write.function()).collect();
        let holds_made = self.holds_made;
        self.looking.task.spawn_blocking(move || {
            let inventory = observe(&host, &mut reader, &busy).map_err(|error| error.reason());
            Looked { reader, holds_made, inventory }
        });
    }

    /// Takes over as holds what the kubelet lists under this agent's own names without an answer being remembered: given
    /// out by another program, or before the journal was lost. So it counts as in use although the kubelet falls silent.
    fn adopt_holds(&mut self) {
        let mut listed = Vec::new();
        for (function, role) in self.inventory.offerable() {
            let id = OfferId::from(function.address);
            let Ok(name) = self.tuning.naming.resource(self.desired.consumer, role, function) else {
                continue;
            };
            if self.usage.pods_with(id).any(|device| device.resource == name.as_str()) {
                listed.push((id, name.to_string()));
            }
        }
        for (id, resource) in listed {
            let hold = Hold { resource, by: HoldBy::Allocate, answered_at: boot_seconds(), shown: true };
            self.usage.holds.entry(id).or_insert(hold);
        }
    }
}
