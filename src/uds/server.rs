//! A gRPC server on a unix socket that can be ended for certain: tonic alone leaves a connection open for as long
//! as its peer likes. Every connection is counted and can be cut.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio::time::{Sleep, sleep, timeout};
use tokio_stream::Stream;
use tokio_util::sync::{CancellationToken, DropGuard, WaitForCancellationFutureOwned};
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::Connected;

/// How long accepting pauses after an error: out of descriptors stays so for a while, and must not cost a core.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);
/// How long a cut connection may take until its task has seen it.
const CUT: Duration = Duration::from_secs(1);

/// A running server. Dropped, it is cut off at once.
#[derive(Debug)]
pub(crate) struct UdsServer {
    task: JoinSet<()>,
    connections: TaskTracker,
    shutdown: CancellationToken,
    cut: CancellationToken,
    _cut_on_drop: DropGuard,
}

impl UdsServer {
    /// Serves `routes` on `listener`, on a task of its own.
    pub(crate) fn start(listener: UnixListener, routes: Routes) -> Self {
        let connections = TaskTracker::new();
        // A closed tracker still counts; closed is what lets `wait` end at zero.
        connections.close();
        let shutdown = CancellationToken::new();
        let cut = CancellationToken::new();
        let incoming = Incoming { listener, pause: None, connections: connections.clone(), cut: cut.clone() };
        let mut task = JoinSet::new();
        let signal = shutdown.clone().cancelled_owned();
        task.spawn(async move {
            let served =
                Server::builder().add_routes(routes).serve_with_incoming_shutdown(incoming, signal).await;
            if let Err(error) = served {
                tracing::warn!(%error, "a unix socket server ended");
            }
        });
        let guard = cut.clone().drop_guard();
        Self { task, connections, shutdown, cut, _cut_on_drop: guard }
    }

    /// Waits until every peer has closed its connection; false when `limit` came first.
    pub(crate) async fn peers_gone(&self, limit: Duration) -> bool {
        timeout(limit, self.connections.wait()).await.is_ok()
    }

    /// Ends the server: no new connection, calls in flight get `drain`, then the connections are cut.
    /// Takes at most `drain` and two seconds.
    pub(crate) async fn end(mut self, drain: Duration) {
        self.shutdown.cancel();
        if !self.peers_gone(drain).await {
            self.cut.cancel();
            if !self.peers_gone(CUT).await {
                tracing::warn!(left = self.connections.len(), "connections did not end after they were cut");
            }
        }
        if timeout(CUT, self.task.join_next()).await.is_err() {
            self.task.shutdown().await;
        }
    }
}

/// Accepts connections. Ends never by itself; an error is a pause.
struct Incoming {
    listener: UnixListener,
    pause: Option<Pin<Box<Sleep>>>,
    connections: TaskTracker,
    cut: CancellationToken,
}

impl Stream for Incoming {
    type Item = io::Result<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(pause) = self.pause.as_mut() {
                std::task::ready!(pause.as_mut().poll(context));
                self.pause = None;
            }
            match std::task::ready!(self.listener.poll_accept(context)) {
                Ok((stream, _)) => {
                    return Poll::Ready(Some(Ok(Connection {
                        stream,
                        cut: Box::pin(self.cut.clone().cancelled_owned()),
                        _counted: self.connections.token(),
                    })));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection on a unix socket");
                    self.pause = Some(Box::pin(sleep(ACCEPT_PAUSE)));
                }
            }
        }
    }
}

/// One connection: counted while it lives, at its end of file as soon as it is cut.
struct Connection {
    stream: UnixStream,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    _counted: TaskTrackerToken,
}

impl Connected for Connection {
    type ConnectInfo = ();

    fn connect_info(&self) -> Self::ConnectInfo {}
}

fn was_cut() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "the server ends")
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.cut.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(was_cut()));
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.cut.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(was_cut()));
        }
        Pin::new(&mut self.stream).poll_write(context, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
