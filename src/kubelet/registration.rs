//! The registration client: says to a kubelet that a plugin serves a resource.

use std::path::PathBuf;
use std::time::Duration;

use reason::{Code, Coded};

use super::KubeletDir;
use super::proto::v1beta1;
use crate::uds::dial::{DialError, dial};

/// What a plugin tells the kubelet about itself. In force is what the plugin's `GetDevicePluginOptions`
/// answers; the registration repeats it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PluginOptions {
    /// The kubelet calls `PreStartContainer` before each start of a container.
    pub pre_start_required: bool,
    /// The kubelet may ask `GetPreferredAllocation`.
    pub preferred_allocation: bool,
}

impl From<PluginOptions> for v1beta1::DevicePluginOptions {
    fn from(options: PluginOptions) -> Self {
        Self {
            pre_start_required: options.pre_start_required,
            get_preferred_allocation_available: options.preferred_allocation,
        }
    }
}

/// Why a resource could not be registered.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// The kubelet could not be reached.
    #[error("cannot register {resource}: the kubelet does not answer on its socket")]
    Dial {
        /// The resource.
        resource: String,
        /// Why not.
        #[source]
        source: DialError,
    },
    /// The kubelet was reached and said no, or the connection broke before it answered.
    #[error("the kubelet at {socket} did not accept the registration of {resource}: see the kubelet's log")]
    Refused {
        /// The resource.
        resource: String,
        /// The kubelet's socket.
        socket: PathBuf,
        /// What it said.
        #[source]
        source: Box<tonic::Status>,
    },
    /// The kubelet was reached and did not answer in time.
    #[error("the kubelet at {socket} did not answer the registration of {resource} within {deadline:?}")]
    Deadline {
        /// The resource.
        resource: String,
        /// The kubelet's socket.
        socket: PathBuf,
        /// How long was waited.
        deadline: Duration,
    },
}

impl Coded for RegisterError {
    fn code(&self) -> Code {
        match self {
            Self::Dial { .. } => Code::KubeletUnreachable,
            Self::Refused { .. } => Code::RegistrationRefused,
            Self::Deadline { .. } => Code::RegistrationDeadline,
        }
    }

    fn retryable(&self) -> bool {
        match self {
            Self::Dial { source, .. } => source.retryable(),
            // A kubelet answers Unknown to all it does not like, a failed dial of the plugin among it.
            Self::Refused { source, .. } => {
                !matches!(source.code(), tonic::Code::InvalidArgument | tonic::Code::Unimplemented)
            }
            Self::Deadline { .. } => true,
        }
    }
}

/// Registers `resource`, served on the socket file `endpoint` (a name in `device-plugins/`, not a path), with
/// the kubelet, within `deadline`.
///
/// The plugin must be serving already, on another task: the kubelet's handler dials it and asks for its options
/// before it answers (up to 10 s; kubelet `pkg/kubelet/cm/devicemanager/plugin/v1beta1`).
///
/// # Errors
/// See [`RegisterError`]. None of them means that the kubelet has not registered the resource: an answer can be lost.
pub async fn register(
    kubelet: &KubeletDir,
    endpoint: &str,
    resource: &str,
    options: PluginOptions,
    deadline: Duration,
) -> Result<(), RegisterError> {
    let socket = kubelet.kubelet_socket();
    let attempt = async {
        let channel = dial(&socket, deadline)
            .await
            .map_err(|source| RegisterError::Dial { resource: resource.to_owned(), source })?;
        let request = v1beta1::RegisterRequest {
            version: v1beta1::VERSION.to_owned(),
            endpoint: endpoint.to_owned(),
            resource_name: resource.to_owned(),
            options: Some(options.into()),
        };
        v1beta1::registration_client::RegistrationClient::new(channel).register(request).await.map_err(
            |status| RegisterError::Refused {
                resource: resource.to_owned(),
                socket: socket.clone(),
                source: Box::new(status),
            },
        )
    };
    match tokio::time::timeout(deadline, attempt).await {
        Ok(answer) => answer.map(drop),
        Err(_) => {
            Err(RegisterError::Deadline { resource: resource.to_owned(), socket: socket.clone(), deadline })
        }
    }
}
