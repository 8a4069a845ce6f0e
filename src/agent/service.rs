//! The loop together with what serves its outputs: device plugins and the status socket.

use std::path::Path;

use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{Agent, Channels, Settings, starting};
use crate::{
    desired::Desired,
    device_plugin::{self, Advertised, DevicePlugins, Registrations},
    journal::JournalError,
    status::{self, Status, StatusError},
};

/// An agent at work. Every task of it is joined by [`Service::stop`].
#[derive(Debug)]
pub struct Service {
    /// What is asked of the node.
    pub wish: watch::Sender<Desired>,
    /// How the node stands.
    pub status: watch::Receiver<Status>,
    looping: JoinSet<()>,
    servers: TaskTracker,
    stop_loop: CancellationToken,
    stop_servers: CancellationToken,
}

/// An agent that could not begin. Nothing was touched.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The journal.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The status socket.
    #[error(transparent)]
    Status(#[from] StatusError),
}

impl Service {
    /// Starts an agent for the node of `settings`, to make it as `first` asks. `socket` is where it says how it stands.
    /// The caller has the state directory's lock.
    ///
    /// # Errors
    /// When the journal cannot be used or the socket not be opened.
    pub fn start(
        settings: Settings,
        plugins: device_plugin::Settings,
        first: Desired,
        socket: &Path,
    ) -> Result<Self, StartError> {
        let (status_out, status) = watch::channel(starting(&first));
        let (wish, wish_seen) = watch::channel(first);
        let (allocate, allocate_seen) = mpsc::channel(16);
        let (registrations, registrations_seen) = watch::channel(Registrations::new());
        let (advertised, advertised_seen) = watch::channel(Advertised::new());
        let (stop_loop, stop_servers) = (CancellationToken::new(), CancellationToken::new());

        let kubelet = settings.kubelet.clone();
        let channels = Channels {
            wish: wish_seen,
            allocate: allocate_seen,
            registrations: registrations_seen,
            advertised,
            status: status_out,
            stop: stop_loop.clone(),
        };
        let agent = Agent::new(settings, channels)?;
        let listener = status::listen(socket)?;

        let servers = TaskTracker::new();
        servers.spawn(status::serve(listener, status.clone(), stop_servers.clone()));
        servers.spawn(
            DevicePlugins {
                settings: plugins,
                kubelet,
                advertised: advertised_seen,
                allocate,
                registrations,
                stop: stop_servers.clone(),
            }
            .run(),
        );
        servers.close();
        let mut looping = JoinSet::new();
        looping.spawn(agent.run());
        Ok(Self { wish, status, looping, servers, stop_loop, stop_servers })
    }

    /// Returns when the loop has ended without having been told to: its outputs are stale then.
    pub async fn ended(&mut self) {
        self.looping.join_next().await;
    }

    /// Ends the loop first, after the pass under way, then what serves its outputs.
    pub async fn stop(mut self) {
        self.stop_loop.cancel();
        while self.looping.join_next().await.is_some() {}
        self.stop_servers.cancel();
        self.servers.wait().await;
    }
}
