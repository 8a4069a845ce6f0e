//! The loop: one task owns all that changes, by value.
//!
//! ```text
//!  inputs                               outputs
//!  wish       watch ──┐            ┌──▶ advertised  watch ──▶ device plugins ──▶ kubelet
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
mod pass;
mod report;
mod service;

pub use service::{Service, StartError};

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;
use vfio::{
    child::{ChildCommand, LeftBehind, Reader},
    host::Host,
};

use crate::{
    conduct::Keeper,
    desired::Desired,
    device_plugin::{Advertised, AllocateCall, Registrations},
    inventory::Inventory,
    journal::{Journal, JournalError, Store},
    kubelet::KubeletDir,
    offers::{Naming, Offer},
    plan::Plan,
    reason::Reason,
    status::{State, Status},
    usage::Usage,
};

/// Everything that an agent is told once.
#[derive(Debug)]
pub struct Settings {
    /// The node.
    pub host: Host,
    /// Its kubelet.
    pub kubelet: KubeletDir,
    /// Where the journal is.
    pub store: Store,
    /// How kernel writes are made.
    pub writer: ChildCommand,
    /// How functions and processes are looked at.
    pub reader: ChildCommand,
    /// What names the offers.
    pub naming: Naming,
    /// How long an answered Allocate counts without PodResources having shown it.
    pub hold_grace: Duration,
    /// How often all is looked at without a cause.
    pub rescan: Duration,
    /// How soon something that waits for others (a VM to end, a hold to be seen) is looked at again.
    pub blocked_retry: Duration,
    /// How long PodResources may take.
    pub pod_resources_deadline: Duration,
}

/// The ends of the agent's channels.
#[derive(Debug)]
pub struct Channels {
    /// What is asked of the node.
    pub wish: watch::Receiver<Desired>,
    /// Allocates to answer.
    pub allocate: mpsc::Receiver<AllocateCall>,
    /// What the device plugins say of the kubelet.
    pub registrations: watch::Receiver<Registrations>,
    /// What is advertised.
    pub advertised: watch::Sender<Advertised>,
    /// How the node stands.
    pub status: watch::Sender<Status>,
    /// Ends the loop, after the pass under way.
    pub stop: CancellationToken,
}

/// A group in trouble: not tried again before its time.
#[derive(Debug)]
struct Trouble {
    reason: Reason,
    failures: u32,
    next_try: Instant,
}

/// The agent: state of the one loop.
#[derive(Debug)]
pub struct Agent {
    settings: Settings,
    channels: Channels,
    journal: Journal,
    keeper: Keeper,
    desired: Desired,
    inventory: Inventory,
    usage: Usage,
    plan: Plan,
    offers: Vec<Offer>,
    /// Groups whose Allocates are refused, since they are about to be moved.
    gate: BTreeSet<u32>,
    troubles: BTreeMap<u32, Trouble>,
    wedged: BTreeMap<u32, LeftBehind>,
    /// What looks at functions and processes, between looks.
    reader: Option<Reader>,
    /// The look under way.
    looking: JoinSet<(Reader, Result<Inventory, String>)>,
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
    /// An agent for the node of `settings`. The caller has the state directory's lock.
    ///
    /// # Errors
    /// When the journal is there and cannot be used: nothing may be touched then.
    pub fn new(settings: Settings, channels: Channels) -> Result<Self, JournalError> {
        let journal = settings.store.load(&settings.host.boot_id())?;
        let desired = channels.wish.borrow().clone();
        Ok(Self {
            usage: Usage { holds: journal.holds.clone(), ..Usage::default() },
            keeper: Keeper::new(settings.store.clone(), &journal),
            settings,
            channels,
            journal,
            desired,
            inventory: Inventory::default(),
            plan: Plan::default(),
            offers: Vec::new(),
            gate: BTreeSet::new(),
            troubles: BTreeMap::new(),
            wedged: BTreeMap::new(),
            reader: None,
            looking: JoinSet::new(),
            passes: 0,
            last_pass: String::new(),
            failure: None,
        })
    }

    /// Runs until it is told to stop. Nothing is given back on the way out: VMs go on, and the next agent finds the node
    /// as it is.
    pub async fn run(mut self) {
        let mut why = "start".to_owned();
        loop {
            tracing::debug!(%why, "pass");
            self.passes += 1;
            self.last_pass = why;
            let mut wake = self.pass().await;
            why = loop {
                // Every arm is cancel-safe: a watch and a channel keep what was not taken, a token and a deadline stay true.
                tokio::select! {
                    biased;
                    () = self.channels.stop.cancelled() => return,
                    Some(call) = self.channels.allocate.recv() => {
                        self.allocate(call).await;
                        wake = self.wake_after_allocate(wake);
                    }
                    changed = self.channels.wish.changed() => match changed {
                        Ok(()) => break "the wish changed".to_owned(),
                        // Nobody can wish any more: that is the end of the agent.
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
