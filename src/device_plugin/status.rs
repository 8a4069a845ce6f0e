//! How each resource stands with the kubelet, published.

use std::collections::BTreeMap;
use std::sync::Arc;

use reason::{Code, Coded, Reason};
use serde::Serialize;
use tokio::sync::watch;

/// The state of every advertised resource, by resource name.
pub type Registrations = BTreeMap<String, Registration>;

/// How one resource stands with the kubelet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Registration {
    /// The socket's file name in `device-plugins/`.
    pub socket: String,
    /// Where it stands.
    pub state: RegistrationState,
    /// How often the kubelet has accepted a registration since the resource appeared.
    pub accepted: u64,
    /// The last thing that went wrong; empty once the kubelet watches.
    pub failure: Option<RegistrationFailure>,
}

/// Where a resource stands. `Unregistered → Accepted → Watched`, and from each back to `Unregistered`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RegistrationState {
    /// Not registered: not yet, or no longer. It is being tried, see `failure`.
    Unregistered,
    /// The kubelet has accepted the registration and has not opened ListAndWatch yet.
    Accepted,
    /// The kubelet watches: the devices are the node's capacity.
    Watched,
}

/// What went wrong, as data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RegistrationFailure {
    /// `code()` of the error, or the reason a session ended.
    pub code: Code,
    /// The error with all its causes.
    pub message: String,
    /// Whether it can get better without anyone doing something. It is tried again in any case.
    pub retryable: bool,
}

impl<E: Coded + 'static> From<&E> for RegistrationFailure {
    fn from(error: &E) -> Self {
        let Reason { code, message } = error.reason();
        Self { code, message, retryable: error.retryable() }
    }
}

/// One resource's line in the published table.
#[derive(Clone, Debug)]
pub(super) struct StatusOut {
    resource: String,
    all: Arc<watch::Sender<Registrations>>,
}

impl StatusOut {
    pub(super) fn new(resource: &str, all: Arc<watch::Sender<Registrations>>) -> Self {
        Self { resource: resource.to_owned(), all }
    }

    /// Makes the line: nothing has been tried yet.
    pub(super) fn appear(&self, socket: &str) {
        let line = Registration {
            socket: socket.to_owned(),
            state: RegistrationState::Unregistered,
            accepted: 0,
            failure: None,
        };
        self.all.send_modify(|all| {
            all.insert(self.resource.clone(), line);
        });
    }

    pub(super) fn accepted(&self) {
        self.change(|line| {
            line.state = RegistrationState::Accepted;
            line.accepted += 1;
        });
    }

    pub(super) fn watched(&self) {
        self.change(|line| {
            line.state = RegistrationState::Watched;
            line.failure = None;
        });
    }

    /// Not registered any more, or still not.
    pub(super) fn unregistered(&self, failure: Option<RegistrationFailure>) {
        self.change(|line| {
            line.state = RegistrationState::Unregistered;
            if failure.is_some() {
                line.failure = failure;
            }
        });
    }

    fn change(&self, change: impl FnOnce(&mut Registration)) {
        self.all.send_if_modified(|all| {
            let Some(line) = all.get_mut(&self.resource) else { return false };
            let before = line.clone();
            change(line);
            *line != before
        });
    }
}
