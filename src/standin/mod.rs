//! A **stand-in kubelet**: the part of a kubelet that device plugins see, for `vfiod demo`, the integration tests and
//! the tests on a real kernel. It runs no pods and is never part of a node agent's work.
//!
//! It does what a kubelet does where a plugin can notice (facts: kubelet `pkg/kubelet/cm/devicemanager`):
//! at its start it deletes every socket in `device-plugins/`, then listens; it dials a plugin and asks its options
//! before it answers the plugin's registration; it watches ListAndWatch and marks all devices unhealthy at its end; it
//! allocates only healthy devices that nobody has, one container a call, and lists allocations in PodResources;
//! allocations outlive it (the checkpoint). Its known fault with replaced clients is an option
//! ([`StandinOptions::old_stream_takes_new`]), and its PodResources can be broken in several ways
//! ([`PodResourcesMode`]).

mod allocate;
mod error;
mod lister;
mod plugins;
mod state;

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::service::Routes;

use self::lister::Lister;
use self::plugins::{Clients, Registry};
use crate::kubelet::proto::v1::pod_resources_lister_server::PodResourcesListerServer;
use crate::kubelet::proto::v1beta1::registration_server::RegistrationServer;
use crate::kubelet::{Claim, KubeletDir};
use crate::uds::server::UdsServer;
use crate::uds::socket::{Bound, SocketId, bind, remove_own};

pub use self::allocate::{Allocated, Want};
pub use self::error::StandinError;
pub use self::state::{DeviceState, PodName, ResourceState, StandinState};

/// How PodResources behaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PodResourcesMode {
    /// As a kubelet's does.
    #[default]
    Answers,
    /// There is no `pod-resources/` directory (of no use once one was made: it is removed again).
    NoDirectory,
    /// There is a directory and no socket in it.
    NoSocket,
    /// Every call fails with this status.
    Fails(tonic::Code),
    /// Calls are never answered.
    Hangs,
}

/// What is to be different from a well-behaved kubelet, and how long its calls may take.
#[derive(Clone, Debug)]
pub struct StandinOptions {
    /// PodResources at the start; [`StandinKubelet::set_pod_resources`] changes it.
    pub pod_resources: PodResourcesMode,
    /// The kubelet's fault: the end of the OLD stream of a resource closes the NEW client's connection and marks its
    /// devices unhealthy, until the plugin registers once more.
    pub old_stream_takes_new: bool,
    /// How long dialling a plugin and its options may take (a kubelet: 10 s).
    pub dial_deadline: Duration,
    /// How long an Allocate may take (a kubelet: for ever).
    pub allocate_deadline: Duration,
    /// How long the end may take.
    pub stop_deadline: Duration,
}

impl Default for StandinOptions {
    fn default() -> Self {
        Self {
            pod_resources: PodResourcesMode::default(),
            old_stream_takes_new: false,
            dial_deadline: Duration::from_secs(10),
            allocate_deadline: Duration::from_secs(60),
            stop_deadline: Duration::from_secs(5),
        }
    }
}

/// What all parts of a stand-in share: its state, published, and the clients of the plugins.
#[derive(Debug)]
struct Shared {
    directory: KubeletDir,
    options: StandinOptions,
    state: watch::Sender<StandinState>,
    pod_resources: watch::Sender<PodResourcesMode>,
    clients: Clients,
}

/// A running, or stopped, stand-in kubelet.
#[derive(Debug)]
pub struct StandinKubelet {
    shared: Arc<Shared>,
    life: Option<Life>,
    lister: Option<Served>,
}

/// From one start to the next stop.
#[derive(Debug)]
struct Life {
    registration: Served,
    tasks: TaskTracker,
    stop: CancellationToken,
}

#[derive(Debug)]
struct Served {
    server: UdsServer,
    path: PathBuf,
    id: SocketId,
}

impl Served {
    fn start(path: PathBuf, routes: Routes) -> Result<Self, StandinError> {
        let Bound { listener, id } = bind(&path).map_err(|source| StandinError::Serve { source })?;
        Ok(Self { server: UdsServer::start(listener, routes), path, id })
    }

    async fn end(self) -> Result<(), StandinError> {
        // A kubelet that is killed drains nothing.
        self.server.end(Duration::ZERO).await;
        remove_own(&self.path, &self.id).map_err(|source| StandinError::Serve { source })
    }
}

impl StandinKubelet {
    /// Starts a well-behaved one below `directory`.
    ///
    /// # Errors
    /// If the directories cannot be made or the sockets not be served.
    pub async fn start(directory: KubeletDir) -> Result<Self, StandinError> {
        Self::start_with(directory, StandinOptions::default()).await
    }

    /// Starts one with `options`.
    ///
    /// # Errors
    /// If the directories cannot be made or the sockets not be served.
    pub async fn start_with(directory: KubeletDir, options: StandinOptions) -> Result<Self, StandinError> {
        let mode = options.pod_resources;
        let shared = Arc::new(Shared {
            directory,
            options,
            state: watch::Sender::new(StandinState::default()),
            pod_resources: watch::Sender::new(mode),
            clients: Clients::default(),
        });
        let mut kubelet = Self { shared, life: None, lister: None };
        kubelet.begin().await?;
        Ok(kubelet)
    }

    /// Everything it knows, as a `watch`.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<StandinState> {
        self.shared.state.subscribe()
    }

    /// Waits until `predicate` holds and returns the state in which it did.
    ///
    /// # Errors
    /// [`StandinError::Deadline`] with the last state.
    pub async fn wait_for(
        &self,
        predicate: impl FnMut(&StandinState) -> bool,
        deadline: Duration,
    ) -> Result<StandinState, StandinError> {
        let mut state = self.state();
        let reached = async { state.wait_for(predicate).await.map(|state| state.clone()).ok() };
        match timeout(deadline, reached).await {
            Ok(Some(state)) => Ok(state),
            Ok(None) | Err(_) => {
                Err(StandinError::Deadline { deadline, state: Box::new(self.shared.state.borrow().clone()) })
            }
        }
    }

    /// Lets a container of a pod have devices of `resource`: picks them as a kubelet does (healthy, nobody's), calls
    /// the plugin's Allocate and remembers the allocation.
    ///
    /// # Errors
    /// If there are not enough devices, no plugin, or the plugin refuses; nothing is allocated then.
    pub async fn allocate(
        &self,
        pod: &PodName,
        container: &str,
        resource: &str,
        want: Want,
    ) -> Result<Allocated, StandinError> {
        allocate::allocate(&self.shared, pod, container, resource, want).await
    }

    /// A container of a pod has a device by a resource claim from now on, as PodResources lists it.
    pub fn claim(&self, claim: Claim) {
        self.shared.state.send_modify(|state| state.claims.push(claim));
    }

    /// A pod has ended: all it had is free. The plugins are not told, as with a kubelet.
    pub fn pod_gone(&self, pod: &PodName) {
        self.shared.state.send_modify(|state| {
            state.allocations.retain(|one| !pod.has(one));
            state.claims.retain(|one| !pod.claims(one));
        });
    }

    /// Lets PodResources behave otherwise from now on.
    ///
    /// # Errors
    /// If its socket cannot be served or removed.
    pub async fn set_pod_resources(&mut self, mode: PodResourcesMode) -> Result<(), StandinError> {
        self.shared.pod_resources.send_replace(mode);
        if self.life.is_some() { self.serve_lister().await } else { Ok(()) }
    }

    /// Ends as a kubelet that is killed: connections and streams break. Allocations stay (the checkpoint). Does
    /// nothing when it is stopped already.
    ///
    /// # Errors
    /// If a socket cannot be removed.
    pub async fn stop(&mut self) -> Result<(), StandinError> {
        let Some(life) = self.life.take() else { return Ok(()) };
        life.stop.cancel();
        self.shared.clients.clear();
        let ended = life.registration.end().await;
        life.tasks.close();
        if timeout(self.shared.options.stop_deadline, life.tasks.wait()).await.is_err() {
            tracing::warn!(left = life.tasks.len(), "the stand-in kubelet's tasks did not end in time");
        }
        self.shared.state.send_modify(|state| state.resources.clear());
        let lister = match self.lister.take() {
            Some(lister) => lister.end().await,
            None => Ok(()),
        };
        ended.and(lister)
    }

    /// Stops if need be, and starts again: all sockets in `device-plugins/` are deleted, nothing is registered,
    /// allocations are kept.
    ///
    /// # Errors
    /// As [`start`](Self::start) and [`stop`](Self::stop).
    pub async fn restart(&mut self) -> Result<(), StandinError> {
        self.stop().await?;
        self.begin().await
    }

    async fn begin(&mut self) -> Result<(), StandinError> {
        let directory = self.shared.directory.device_plugins();
        make_directory(&directory)?;
        remove_sockets(&directory)?;
        let tasks = TaskTracker::new();
        let stop = CancellationToken::new();
        let registry =
            Registry { shared: Arc::clone(&self.shared), tasks: tasks.clone(), stop: stop.clone() };
        let registration = Served::start(
            self.shared.directory.kubelet_socket(),
            Routes::new(RegistrationServer::new(registry)),
        )?;
        self.life = Some(Life { registration, tasks, stop });
        self.serve_lister().await
    }

    /// Has the PodResources socket there, or not, as the mode says.
    async fn serve_lister(&mut self) -> Result<(), StandinError> {
        let directory = self.shared.directory.pod_resources_dir();
        let mode = *self.shared.pod_resources.borrow();
        match mode {
            PodResourcesMode::NoDirectory | PodResourcesMode::NoSocket => {
                if let Some(lister) = self.lister.take() {
                    lister.end().await?;
                }
            }
            PodResourcesMode::Answers | PodResourcesMode::Fails(_) | PodResourcesMode::Hangs => {
                make_directory(&directory)?;
                if self.lister.is_none() {
                    let lister = Lister { shared: Arc::clone(&self.shared) };
                    self.lister = Some(Served::start(
                        self.shared.directory.pod_resources_socket(),
                        Routes::new(PodResourcesListerServer::new(lister)),
                    )?);
                }
            }
        }
        match mode {
            PodResourcesMode::NoDirectory => match fs::remove_dir(&directory) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    Err(StandinError::directory(&directory, error))
                }
                Ok(()) | Err(_) => Ok(()),
            },
            PodResourcesMode::NoSocket => make_directory(&directory),
            PodResourcesMode::Answers | PodResourcesMode::Fails(_) | PodResourcesMode::Hangs => Ok(()),
        }
    }
}

impl Drop for StandinKubelet {
    fn drop(&mut self) {
        // The servers are cut by their own drop; this ends the watches on plugins.
        if let Some(life) = &self.life {
            life.stop.cancel();
        }
    }
}

fn make_directory(path: &Path) -> Result<(), StandinError> {
    fs::create_dir_all(path).map_err(|error| StandinError::directory(path, error))
}

/// Deletes every socket in `directory` and nothing else, as a kubelet does at its start.
fn remove_sockets(directory: &Path) -> Result<(), StandinError> {
    let failed = |error| StandinError::directory(directory, error);
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.file_type().map_err(failed)?.is_socket() {
            match fs::remove_file(entry.path()) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
                Ok(()) | Err(_) => {}
            }
        }
    }
    Ok(())
}
