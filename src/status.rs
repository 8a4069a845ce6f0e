//! How a node stands, and the unix socket on which the agent says so.
//!
//! The protocol is one line of JSON each way: `{"ask":"status"}`, answered with a [`Status`]. The socket is root's alone.

use std::{
    fs::DirBuilder,
    io,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::{Path, PathBuf},
    time::Duration,
};

use decide::{consumer::Consumer, id::OfferId, offers::Offer, wish::WorkloadType};
use reason::{Code, Coded, Reason};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream},
    sync::watch,
    task::JoinSet,
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use vfio::pci::Address;

use crate::device_plugin::Registrations;

/// How long either side waits for the other.
const PATIENCE: Duration = Duration::from_secs(5);

/// The longest question that is read.
const LONGEST_ASK: u64 = 4096;

/// How a node stands, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum State {
    /// The first look has not been taken yet.
    Starting,
    /// Everything is as desired.
    Ready,
    /// Groups are being moved.
    Switching,
    /// Something in use keeps the node from what is desired.
    Blocked,
    /// Some group is not as desired, and waiting alone will not mend it.
    Degraded,
    /// The node could not be looked at.
    Failed,
}

/// How one group stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GroupStatus {
    /// The lowest of its groups; none for a function that is in no group.
    pub group: Option<u32>,
    /// All groups that move with it.
    pub groups: Vec<u32>,
    /// Its functions that matter here.
    pub functions: Vec<Address>,
    /// Whether it is as desired.
    pub right: bool,
    /// Why it is not, or what is to be known of it.
    pub reasons: Vec<Reason>,
}

/// All that an agent says of its node.
#[derive(Debug, Clone, Serialize)]
pub struct Status {
    /// The agent's version.
    pub version: &'static str,
    /// Its process id.
    pub pid: u32,
    /// What the node shall serve.
    pub workload_type: WorkloadType,
    /// For whom.
    pub consumer: Consumer,
    /// How it stands.
    pub state: State,
    /// Why, where it is not simply ready.
    pub reasons: Vec<Reason>,
    /// Group by group.
    pub groups: Vec<GroupStatus>,
    /// What is advertised, and what is not and why.
    pub offers: Vec<Offer>,
    /// Devices that count as in use because an Allocate was answered.
    pub holds: Vec<OfferId>,
    /// The kubelet's side of each resource.
    pub registrations: Registrations,
    /// How many passes were made.
    pub passes: u64,
    /// Why the last one was made.
    pub last_pass: String,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "kebab-case")]
enum Ask {
    Status,
}

/// The socket cannot be served, or not be asked.
#[derive(Debug, thiserror::Error)]
pub enum StatusError {
    /// It cannot be served.
    #[error("cannot serve {path}", path = path.display())]
    Serve {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Nobody answers.
    #[error("no agent answers on {path}: is vfiod agent running on this node?", path = path.display())]
    NoAgent {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The answer is none.
    #[error("what answers on {path} is no agent of this version", path = path.display())]
    Answer {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
}

impl Coded for StatusError {
    fn code(&self) -> Code {
        match self {
            Self::Serve { .. } => Code::SocketBind,
            Self::NoAgent { .. } => Code::NoAgent,
            Self::Answer { .. } => Code::StatusAnswer,
        }
    }

    fn retryable(&self) -> bool {
        match self {
            Self::Serve { .. } | Self::Answer { .. } => false,
            Self::NoAgent { .. } => true,
        }
    }
}

/// Opens the socket at `path`. The caller has the state directory's lock, so whatever is there is left over.
///
/// # Errors
/// With the path.
pub fn listen(path: &Path) -> Result<UnixListener, StatusError> {
    let failed = |source| StatusError::Serve { path: path.to_owned(), source };
    if let Some(dir) = path.parent() {
        // A directory that is there keeps its mode: it may be somebody else's, given by --state-dir.
        DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed)?;
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
    Ok(listener)
}

/// Answers on `listener` until `stop`.
pub async fn serve(listener: UnixListener, status: watch::Receiver<Status>, stop: CancellationToken) {
    let mut answers = JoinSet::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            // A finished answer needs nothing more; taking it keeps the set small.
            Some(_) = answers.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) if !is_trusted(&stream) => {
                    tracing::debug!("somebody who is not root asked for the status");
                }
                Ok((stream, _)) => {
                    let status = status.clone();
                    answers.spawn(async move {
                        // One that hangs up, or asks nothing sensible, gets no answer.
                        let _ = timeout(PATIENCE, answer(stream, status)).await;
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "the status socket does not accept");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            },
        }
    }
    answers.shutdown().await;
}

/// Whether the one who asks is root, or who runs this agent. The socket's mode says so too, but only from a moment after it
/// was made.
fn is_trusted(stream: &UnixStream) -> bool {
    let own = nix::unistd::geteuid().as_raw();
    stream.peer_cred().is_ok_and(|peer| peer.uid() == 0 || peer.uid() == own)
}

async fn answer(stream: UnixStream, status: watch::Receiver<Status>) -> io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut line = String::new();
    BufReader::new(read.take(LONGEST_ASK)).read_line(&mut line).await?;
    let text = match serde_json::from_str(&line) {
        Ok(Ask::Status) => serde_json::to_string(&*status.borrow())?,
        Err(error) => serde_json::json!({ "error": error.to_string() }).to_string(),
    };
    write.write_all(text.as_bytes()).await?;
    write.write_all(b"\n").await
}

/// Asks the agent behind `path` how its node stands. The answer is a [`Status`] as JSON.
///
/// # Errors
/// When nobody answers, or not in time.
pub async fn ask(path: &Path) -> Result<Value, StatusError> {
    let absent = |source| StatusError::NoAgent { path: path.to_owned(), source };
    let exchange = async {
        let mut stream = UnixStream::connect(path).await?;
        let line = format!("{}\n", serde_json::to_string(&Ask::Status)?);
        stream.write_all(line.as_bytes()).await?;
        let mut text = String::new();
        stream.read_to_string(&mut text).await?;
        Ok(text)
    };
    let text = match timeout(PATIENCE, exchange).await {
        Ok(result) => result.map_err(absent)?,
        Err(_) => return Err(absent(io::ErrorKind::TimedOut.into())),
    };
    serde_json::from_str(&text).map_err(|source| StatusError::Answer { path: path.to_owned(), source })
}
