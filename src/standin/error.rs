//! What can go wrong with the stand-in.

use reason::{Code, Coded};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::state::StandinState;
use crate::uds::socket::SocketError;

/// Why the stand-in kubelet could not do something.
#[derive(Debug, thiserror::Error)]
pub enum StandinError {
    /// A directory could not be made, read or cleared.
    #[error("the stand-in kubelet cannot prepare {path}: give it a directory it may write in")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// A socket could not be served or removed.
    #[error("the stand-in kubelet cannot serve one of its sockets")]
    Serve {
        /// Why not.
        #[source]
        source: SocketError,
    },
    /// What was waited for did not come.
    #[error("the stand-in kubelet did not see what it waited for within {deadline:?}; it sees {state:?}")]
    Deadline {
        /// How long was waited.
        deadline: Duration,
        /// The last state.
        state: Box<StandinState>,
    },
    /// No plugin serves the resource.
    #[error("no plugin is registered for {resource}: wait until it is")]
    NoPlugin {
        /// The resource.
        resource: String,
    },
    /// Not enough devices that are healthy and nobody's.
    #[error("{wanted} of {resource} wanted, {free} healthy and free: end a pod that has some")]
    TooFew {
        /// The resource.
        resource: String,
        /// How many were wanted.
        wanted: usize,
        /// How many there are.
        free: usize,
    },
    /// The plugin refused, or did not answer.
    #[error("the plugin of {resource} refused to allocate {ids:?}")]
    Refused {
        /// The resource.
        resource: String,
        /// What was asked for.
        ids: Vec<String>,
        /// What it said.
        #[source]
        status: Box<tonic::Status>,
    },
}

impl StandinError {
    pub(super) fn directory(path: &Path, source: io::Error) -> Self {
        Self::Directory { path: path.to_path_buf(), source }
    }

    /// The plugin's gRPC status, where it refused.
    #[must_use]
    pub fn status(&self) -> Option<&tonic::Status> {
        match self {
            Self::Refused { status, .. } => Some(status),
            Self::Directory { .. }
            | Self::Serve { .. }
            | Self::Deadline { .. }
            | Self::NoPlugin { .. }
            | Self::TooFew { .. } => None,
        }
    }
}

impl Coded for StandinError {
    fn code(&self) -> Code {
        match self {
            Self::Directory { .. } => Code::SocketNoDirectory,
            Self::Serve { source } => source.code(),
            Self::Deadline { .. } => Code::SocketDeadline,
            Self::NoPlugin { .. } => Code::NotRegistered,
            Self::TooFew { .. } => Code::UnknownDevice,
            Self::Refused { .. } => Code::RegistrationRefused,
        }
    }

    fn retryable(&self) -> bool {
        match self {
            Self::Directory { .. } => false,
            Self::Serve { source } => source.retryable(),
            Self::Deadline { .. } | Self::NoPlugin { .. } | Self::TooFew { .. } | Self::Refused { .. } => {
                true
            }
        }
    }
}
