//! A gRPC connection over a unix socket.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use reason::{Code, Coded};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

/// Why a socket could not be dialled.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// Nobody listens there: no such file, connection refused, no permission, or the path is too long.
    #[error("cannot connect to the unix socket {path}: is its server running, and may vfiod open the file?")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// Something listens there that does not speak HTTP/2.
    #[error("connected to {path}, but no gRPC session came about: is another program serving this socket?")]
    Handshake {
        /// The socket.
        path: PathBuf,
        /// What the transport said.
        #[source]
        source: tonic::transport::Error,
    },
    /// The server did not take the connection in time.
    #[error(
        "no connection to {path} within {deadline:?}: its server is alive but does not accept, see its log"
    )]
    Deadline {
        /// The socket.
        path: PathBuf,
        /// How long was waited.
        deadline: Duration,
    },
}

impl Coded for DialError {
    fn code(&self) -> Code {
        match self {
            Self::Connect { .. } => Code::SocketConnect,
            Self::Handshake { .. } => Code::SocketHandshake,
            Self::Deadline { .. } => Code::SocketDeadline,
        }
    }

    fn retryable(&self) -> bool {
        match self {
            // InvalidInput is the path that does not fit into a socket address: it will not get shorter.
            Self::Connect { source, .. } => source.kind() != io::ErrorKind::InvalidInput,
            Self::Handshake { .. } | Self::Deadline { .. } => true,
        }
    }
}

/// Connects to the gRPC server on the unix socket `path`, within `deadline`.
///
/// The authority sent is `localhost`, which every gRPC server takes.
///
/// # Errors
/// See [`DialError`]. A channel that was connected once never dials again by itself: whoever listens at
/// `path` later is another server, and the caller must know that.
pub async fn dial(path: &Path, deadline: Duration) -> Result<Channel, DialError> {
    let attempt = async {
        let stream = UnixStream::connect(path)
            .await
            .map_err(|source| DialError::Connect { path: path.to_path_buf(), source })?;
        let mut first = Some(TokioIo::new(stream));
        let connector = service_fn(move |_| {
            let stream = first.take().ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected));
            async move { stream }
        });
        Endpoint::from_static("http://localhost")
            .connect_with_connector(connector)
            .await
            .map_err(|source| DialError::Handshake { path: path.to_path_buf(), source })
    };
    tokio::time::timeout(deadline, attempt)
        .await
        .unwrap_or_else(|_| Err(DialError::Deadline { path: path.to_path_buf(), deadline }))
}
