//! The device plugins: what is offered, by way of the kubelet's device plugin API `v1beta1`.
//!
//! Plain data comes in (a `watch` of what is advertised), registrations go out (a `watch` of how each resource
//! stands), an Allocate becomes an [`AllocateCall`] that the agent's loop answers. Nothing here looks at hardware.
//!
//! ```text
//!  watch<Advertised> ──▶ DevicePlugins::run ──┬─▶ one task a resource ──▶ socket, ListAndWatch streams
//!                                             │        ▲ kubelet.sock new, own socket gone (one inotify watch)
//!  mpsc<AllocateCall> ◀── Allocate ───────────┘        └──▶ watch<BTreeMap<resource, Registration>>
//! ```
//!
//! One resource's task lives in *sessions*: remove the stale socket, bind, serve, register (tried for ever), follow;
//! see `session.rs` for the states and for what ends a session.
//! Facts: kubelet `pkg/kubelet/cm/devicemanager`, KEP-3573.

mod backoff;
mod endpoint;
mod lives;
mod offer;
mod plugin;
mod service;
mod session;
mod settings;
mod status;
mod stream;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::{Id, JoinSet};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use self::plugin::{Parts, Plugin};
use self::status::StatusOut;
use crate::kubelet::{KubeletDir, PluginDir};

pub use self::endpoint::endpoint;
pub use self::offer::{Advertised, AllocateCall, Device, advertised, grpc_code};
pub use self::settings::Settings;
pub use self::status::{Registration, RegistrationFailure, RegistrationState, Registrations};

/// All resources of a node: one gRPC server, one socket and one registration each.
#[derive(Debug)]
pub struct DevicePlugins {
    /// The times.
    pub settings: Settings,
    /// The kubelet to register with.
    pub kubelet: KubeletDir,
    /// What is offered now. A resource that appears is served and registered; one that disappears has its streams,
    /// its server and its socket ended; a change of devices is sent on the streams. When the sender is gone the
    /// last state stays.
    pub advertised: watch::Receiver<Advertised>,
    /// Where an Allocate of the kubelet goes. Closed, or full past `allocate_deadline`: the kubelet gets
    /// `unavailable`.
    pub allocate: mpsc::Sender<AllocateCall>,
    /// How each advertised resource stands with the kubelet. Sent only when something differs.
    pub registrations: watch::Sender<Registrations>,
    /// Ends [`run`](Self::run).
    pub stop: CancellationToken,
}

/// A resource with a task. It keeps its entry until the task has ended, so that two tasks never share a socket.
struct Running {
    task: Id,
    stop: CancellationToken,
    devices: watch::Sender<Vec<Device>>,
}

impl DevicePlugins {
    /// Serves until `stop`. When it returns, all streams and servers are ended, all own sockets removed and all
    /// tasks joined; that takes at most `stop_deadline`.
    pub async fn run(self) {
        let Self { settings, kubelet, mut advertised, allocate, registrations, stop } = self;
        let (watch, seen) = PluginDir::new(&kubelet, settings.plugin_dir);
        let mut watcher = JoinSet::new();
        watcher.spawn(watch.run());
        let mut set = PluginSet {
            stop_deadline: settings.stop_deadline,
            restart_after: settings.retry_max,
            parts: Parts { settings: Arc::new(settings), kubelet, seen, allocate },
            registrations: Arc::new(registrations),
            running: BTreeMap::new(),
            tasks: JoinSet::new(),
        };
        let mut more = true;
        loop {
            let wanted = advertised.borrow_and_update().clone();
            set.converge(&wanted, &stop);
            tokio::select! {
                () = stop.cancelled() => break,
                // Cancel safe: a change not seen is seen by the next `changed`.
                changed = advertised.changed(), if more => more = changed.is_ok(),
                // Cancel safe: a task that ended stays in the set until it is returned.
                Some(ended) = set.tasks.join_next_with_id(), if !set.tasks.is_empty() => set.ended(ended),
            }
        }
        set.finish().await;
        watcher.shutdown().await;
    }
}

struct PluginSet {
    stop_deadline: Duration,
    restart_after: Duration,
    parts: Parts,
    registrations: Arc<watch::Sender<Registrations>>,
    running: BTreeMap<String, Running>,
    tasks: JoinSet<()>,
}

impl PluginSet {
    /// Ends what is no longer wanted, starts what is missing, hands on the devices of the rest.
    fn converge(&mut self, wanted: &Advertised, stop: &CancellationToken) {
        for (resource, running) in &self.running {
            if !wanted.contains_key(resource) {
                running.stop.cancel();
            }
        }
        for (resource, devices) in wanted {
            match self.running.get(resource) {
                // Still ending: it is started when its task has been joined.
                Some(running) if running.stop.is_cancelled() => {}
                Some(running) => {
                    running.devices.send_if_modified(|known| {
                        let differs = known != devices;
                        if differs {
                            known.clone_from(devices);
                        }
                        differs
                    });
                }
                None => self.start(resource, devices, stop.child_token(), Duration::ZERO),
            }
        }
    }

    fn start(&mut self, resource: &str, devices: &[Device], stop: CancellationToken, after: Duration) {
        let (sender, receiver) = watch::channel(devices.to_vec());
        let plugin = Plugin {
            resource: resource.to_owned(),
            endpoint: endpoint(&self.parts.kubelet.device_plugins(), resource),
            devices: receiver,
            parts: self.parts.clone(),
            status: StatusOut::new(resource, Arc::clone(&self.registrations)),
            stop: stop.clone(),
        };
        let task = self.tasks.spawn(lives::run(plugin, after)).id();
        self.running.insert(resource.to_owned(), Running { task, stop, devices: sender });
    }

    /// Forgets a task that has ended. One that ended though nobody asked it to (a bug) is started again, later.
    fn ended(&mut self, ended: Result<(Id, ()), tokio::task::JoinError>) {
        let task = match &ended {
            Ok((task, ())) => *task,
            Err(error) => error.id(),
        };
        let Some(resource) = self
            .running
            .iter()
            .find(|(_, running)| running.task == task)
            .map(|(resource, _)| resource.clone())
        else {
            return;
        };
        self.registrations.send_if_modified(|all| all.remove(&resource).is_some());
        if let Entry::Occupied(entry) = self.running.entry(resource.clone()) {
            let running = entry.remove();
            if let Err(error) = ended {
                tracing::error!(resource, %error, "the task of a device plugin failed");
                if !running.stop.is_cancelled() {
                    let devices = running.devices.borrow().clone();
                    self.start(&resource, &devices, running.stop, self.restart_after);
                }
            }
        }
    }

    /// Joins all tasks; their tokens are cancelled already (children of the caller's).
    async fn finish(mut self) {
        let all = async { while self.tasks.join_next().await.is_some() {} };
        if timeout(self.stop_deadline, all).await.is_err() {
            tracing::warn!(left = self.tasks.len(), "device plugins did not end in time, cutting them off");
            self.tasks.shutdown().await;
        }
        self.registrations.send_if_modified(|all| {
            let any = !all.is_empty();
            all.clear();
            any
        });
    }
}
