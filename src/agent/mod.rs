//! The loop: one task owns all that changes, by value.
//!
//! ```text
//!  inputs                               outputs
//!  wish       watch ──┐            ┌──▶ advertised  watch ──▶ device plugins ──▶ kubelet
//!  tuning     watch ──┤            │
//!  allocate   mpsc ───┼──▶ Agent ──┤
//!  stop       token ──┘            └──▶ status      watch ──▶ unix socket
//! ```
//! It is level-triggered. Whatever woke it, a pass looks again, plans again, and does nothing where nothing differs:
//!
//! ```text
//!  look ─▶ plan ─┬─ nothing to move ──────────────────────────────────────────────▶ publish
//!                └─ withdraw what is free, close the gate ─▶ look again ─▶ plan again
//!                   ─▶ move the groups side by side ─▶ look again ─▶ open the gate ─▶ publish
//! ```
//! Allocates are answered by the same task, between passes and while groups are being moved; so closing the gate is
//! setting a field, and no answer can be in flight across it.

mod allocate;
mod flap;
mod look;
mod pass;
mod report;
mod service;
mod states;

pub use service::{Service, StartError};

use std::{collections::BTreeMap, time::Duration};

use decide::{
    id::OfferId,
    inventory::Inventory,
    names::Naming,
    offers::Offer,
    plan::Plan,
    usage::Usage,
    wish::{Desired, Wish},
};
use reason::Reason;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;
use vfio::{child::ChildCommand, host::Host};

use self::{flap::Flaps, look::Looking, states::States};
use crate::{
    device_plugin::{Advertised, AllocateCall, Registrations},
    execute::Commands,
    journal::{Journal, JournalError, Store},
    kubelet::KubeletDir,
    pods::IfAbsent,
    status::{State, Status},
    transaction::Keeper,
};

/// Everything that an agent is told once.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The node.
    pub host: Host,
    /// Its kubelet.
    pub kubelet: KubeletDir,
    /// What it means where the kubelet's directory is not there.
    pub if_absent: IfAbsent,
    /// Where the journal is.
    pub store: Store,
    /// How kernel writes are made; for how long, [`Tuning`] says.
    pub writer: ChildCommand,
    /// How functions are read.
    pub reader: ChildCommand,
    /// What the config may change while the agent runs, as it is at the start.
    pub tuning: Tuning,
}

/// What the config says beside the wish. A change of it is followed from the next pass on.
#[derive(Debug, Clone, PartialEq)]
pub struct Tuning {
    /// What names the offers.
    pub naming: Naming,
    /// Past this a kernel write is given up, and its unit is wedged.
    pub write_deadline: Duration,
    /// How long an answered Allocate counts without PodResources having shown it.
    pub hold_grace: Duration,
    /// How often all is looked at without a cause.
    pub rescan: Duration,
    /// How soon something that waits for others (a VM to end, a hold to be seen) is looked at again.
    pub blocked_retry: Duration,
    /// How long PodResources may take.
    pub pod_resources_deadline: Duration,
    /// How long PodResources may say nothing before a promise that nobody is seen to have shows as unhealthy. A kubelet that
    /// starts again says nothing for a moment, and must find the devices of its pods healthy.
    pub pods_silence: Duration,
    /// How long a device that has gone bad three times has to stay good before it is given out again; doubles each time.
    pub flap_pause: Duration,
}

/// The ends of the agent's channels.
#[derive(Debug)]
pub struct Channels {
    /// What is asked of the node.
    pub wish: watch::Receiver<Wish>,
    /// What the config says beside that.
    pub tuning: watch::Receiver<Tuning>,
    /// Allocates to answer.
    pub allocate: mpsc::Receiver<AllocateCall>,
    /// What the device plugins say of the kubelet.
    pub registrations: watch::Receiver<Registrations>,
    /// What is advertised.
    pub advertised: watch::Sender<Advertised>,
    /// How the node stands.
    pub status: watch::Sender<Status>,
    /// Ends the loop, whatever it waits for.
    pub stop: CancellationToken,
}

/// The agent: state of the one loop.
#[derive(Debug)]
pub struct Agent {
    settings: Settings,
    channels: Channels,
    journal: Journal,
    keeper: Keeper,
    desired: Desired,
    /// Why the last wish is none, where it is not clear: the one before it is kept.
    unclear: Option<Reason>,
    tuning: Tuning,
    inventory: Inventory,
    usage: Usage,
    plan: Plan,
    offers: Vec<Offer>,
    states: States,
    looking: Looking,
    flaps: Flaps,
    /// What was offered since the start, each with its resource: what is gone is told of.
    known: BTreeMap<OfferId, String>,
    /// How many holds this agent has made: a look is of use only if it was begun after the last of them.
    holds_made: u64,
    /// Since when PodResources has not answered.
    silent_since: Option<Instant>,
    passes: u64,
    last_pass: String,
    failure: Option<Reason>,
}

/// The first status, before anything is known.
#[must_use]
pub fn starting(desired: &Desired) -> Status {
    Status {
        version: env!("CARGO_PKG_VERSION"),
        pid: std::process::id(),
        workload_type: desired.workload_type,
        consumer: desired.consumer,
        state: State::Starting,
        reasons: Vec::new(),
        groups: Vec::new(),
        offers: Vec::new(),
        holds: Vec::new(),
        registrations: Registrations::new(),
        passes: 0,
        last_pass: String::new(),
    }
}

impl Agent {
    /// An agent for the node of `settings`, which shall be as `desired`. The caller has the state directory's lock.
    ///
    /// # Errors
    /// When the journal is there and cannot be used: nothing may be touched then.
    pub fn new(settings: Settings, desired: Desired, channels: Channels) -> Result<Self, JournalError> {
        let journal = settings.store.load(&settings.host.boot_id())?;
        Ok(Self {
            usage: Usage { holds: journal.holds.clone(), ..Usage::default() },
            keeper: Keeper::new(settings.store.clone(), &journal),
            tuning: settings.tuning.clone(),
            looking: Looking::default(),
            settings,
            channels,
            journal,
            desired,
            unclear: None,
            inventory: Inventory::default(),
            plan: Plan::default(),
            offers: Vec::new(),
            states: States::default(),
            flaps: Flaps::default(),
            known: BTreeMap::new(),
            holds_made: 0,
            silent_since: None,
            passes: 0,
            last_pass: String::new(),
            failure: None,
        })
    }

    /// How transactions start their children.
    fn commands(&self) -> Commands {
        let Settings { writer, reader, .. } = &self.settings;
        let writer = ChildCommand { deadline: self.tuning.write_deadline, ..writer.clone() };
        Commands { writer, reader: reader.clone() }
    }

    /// Runs until it is told to stop, which ends it wherever it is: a look is thrown away, a write in flight is journalled
    /// and left to its child. Nothing is given back on the way out: VMs go on, and the next agent finds the node as it is.
    pub async fn run(self) {
        let stop = self.channels.stop.clone();
        stop.run_until_cancelled(self.work()).await;
    }

    async fn work(mut self) {
        let mut why = "start".to_owned();
        loop {
            tracing::debug!(%why, "pass");
            self.passes += 1;
            self.last_pass = why;
            let mut wake = self.pass().await;
            why = loop {
                // Every arm is cancel-safe: a watch and a channel keep what was not taken, a deadline stays true.
                tokio::select! {
                    biased;
                    Some(call) = self.channels.allocate.recv() => {
                        self.allocate(call).await;
                        wake = self.wake_after_allocate(wake);
                    }
                    changed = self.channels.wish.changed() => match changed {
                        Ok(()) => break "the wish changed".to_owned(),
                        // Nobody can wish any more: that is the end of the agent.
                        Err(_) => return,
                    },
                    changed = self.channels.tuning.changed() => match changed {
                        Ok(()) => break "the config changed".to_owned(),
                        Err(_) => return,
                    },
                    changed = self.channels.registrations.changed() => match changed {
                        Ok(()) => self.report(),
                        Err(_) => return,
                    },
                    () = sleep_until(wake.at) => break wake.why.to_owned(),
                }
            };
        }
    }
}

/// When the next pass is due though nothing happens, and why.
#[derive(Debug, Clone, Copy)]
struct Wake {
    at: Instant,
    why: &'static str,
}

/// Seconds since boot, suspend included: the clock of holds.
fn boot_seconds() -> u64 {
    use nix::time::{ClockId, clock_gettime};
    // The call fails only for a clock that the kernel lacks; Linux has had this one since 2.6.39. Zero keeps holds.
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(0, |time| u64::try_from(time.tv_sec()).unwrap_or(0))
}
