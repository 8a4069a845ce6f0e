//! The loop together with what serves its outputs: device plugins and the status socket.

use std::{path::Path, time::Duration};

use decide::wish::{Desired, Wish};
use reason::{Code, Coded};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use super::{Agent, Channels, Settings, Tuning, starting};
use crate::{
    device_plugin::{self, Advertised, DevicePlugins, Registrations},
    journal::JournalError,
    status::{self, Status, StatusError},
};

/// How long what serves the loop's outputs may take to end well: a kubelet closes its connections in milliseconds. An agent
/// that is told to end ends within two seconds, whatever others do.
const GOODBYE: Duration = Duration::from_millis(1200);

/// An agent at work. Every task of it is joined by [`Service::stop`].
#[derive(Debug)]
pub struct Service {
    /// What is asked of the node.
    pub wish: watch::Sender<Wish>,
    /// What the config says beside that.
    pub tuning: watch::Sender<Tuning>,
    /// How the node stands.
    pub status: watch::Receiver<Status>,
    looping: JoinSet<()>,
    servers: JoinSet<()>,
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

impl Coded for StartError {
    fn code(&self) -> Code {
        match self {
            Self::Journal(error) => error.code(),
            Self::Status(error) => error.code(),
        }
    }

    fn retryable(&self) -> bool {
        match self {
            Self::Journal(error) => error.retryable(),
            Self::Status(error) => error.retryable(),
        }
    }
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
        let (wish, wish_seen) = watch::channel(Wish::Clear(first.clone()));
        let (tuning, tuning_seen) = watch::channel(settings.tuning.clone());
        let (allocate, allocate_seen) = mpsc::channel(16);
        let (registrations, registrations_seen) = watch::channel(Registrations::new());
        let (advertised, advertised_seen) = watch::channel(Advertised::new());
        let (stop_loop, stop_servers) = (CancellationToken::new(), CancellationToken::new());

        let kubelet = settings.kubelet.clone();
        let channels = Channels {
            wish: wish_seen,
            tuning: tuning_seen,
            allocate: allocate_seen,
            registrations: registrations_seen,
            advertised,
            status: status_out,
            stop: stop_loop.clone(),
        };
        let agent = Agent::new(settings, first, channels)?;
        let listener = status::listen(socket)?;

        let mut servers = JoinSet::new();
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
        let mut looping = JoinSet::new();
        looping.spawn(agent.run());
        Ok(Self { wish, tuning, status, looping, servers, stop_loop, stop_servers })
    }

    /// Returns when the loop has ended without having been told to: its outputs are stale then.
    pub async fn ended(&mut self) {
        self.looping.join_next().await;
    }

    /// Ends the loop first, wherever it is, then what serves its outputs: those that take longer than a moment are cut off.
    pub async fn stop(mut self) {
        self.stop_loop.cancel();
        while self.looping.join_next().await.is_some() {}
        self.stop_servers.cancel();
        let ended = async { while self.servers.join_next().await.is_some() {} };
        if timeout(GOODBYE, ended).await.is_err() {
            tracing::warn!("the kubelet, or somebody who asks for the status, does not let go: cut off");
            self.servers.shutdown().await;
        }
    }
}
