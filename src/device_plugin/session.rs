//! One life of a resource's socket: bound, served, registered, watched, ended.
//!
//! ```text
//!            register: refused, no kubelet (again after a pause)
//!             ┌───┐
//!             │   ▼           accepted                  ListAndWatch opened
//!  bind ─▶ Serving ─────────────▶ Accepted ──────────────────▶ Watched
//!             │                      │ no stream in time          │ newest stream ended
//!             │ own socket gone      │ own socket gone            │ own socket gone
//!             ▼                      ▼ kubelet.sock is a new one  ▼ kubelet.sock is a new one
//!           ended ◀──────────────────┴────────────────────────────┘   stop ends it from everywhere
//! ```
//!
//! Every registration after the first is a new session on a new socket, because of what a kubelet does (facts:
//! kubelet `pkg/kubelet/cm/devicemanager/plugin/v1beta1`, `runClient`): the end of an OLD stream runs a cleanup that
//! is looked up by resource name, so it closes the NEW client's connection and marks its devices unhealthy. Hence:
//! 1. a session ends its own streams and waits until the kubelet has closed its connections, and only then the next
//!    one registers;
//! 2. if the cleanup comes late all the same, the newest stream ends, and that is taken as "register again". By then
//!    the kubelet has no old client left, so the second time holds. Pauses grow unless a session was stable, so
//!    that no kubelet can make vfiod spin.

use std::path::Path;
use std::sync::Arc;

use reason::{Code, Coded};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use super::backoff::Backoff;
use super::plugin::Plugin;
use super::service::{OPTIONS, Service};
use super::status::RegistrationFailure;
use super::stream::StreamLog;
use crate::kubelet::proto::v1beta1::device_plugin_server::DevicePluginServer;
use crate::kubelet::register;
use crate::uds::server::UdsServer;
use crate::uds::socket::{SocketError, SocketId, bind, remove_own};

/// Why a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The resource is withdrawn, or vfiod ends.
    Stop,
    /// The socket file is gone, or is another one's: no kubelet can dial it any more.
    SocketLost,
    /// `kubelet.sock` is another file than the one registered with.
    KubeletRestarted,
    /// The kubelet ended the newest ListAndWatch.
    StreamEnded,
    /// The kubelet accepted the registration and never opened ListAndWatch.
    NoStream,
}

impl End {
    /// What is published about it; nothing for what is part of a normal life.
    pub(super) fn failure(self) -> Option<RegistrationFailure> {
        let (code, message) = match self {
            Self::Stop => return None,
            Self::SocketLost => {
                (Code::SocketLost, "the socket was removed: it is made again and registered again")
            }
            Self::KubeletRestarted => {
                (Code::KubeletRestarted, "the kubelet was started again: registering again")
            }
            Self::StreamEnded => (Code::StreamEnded, "the kubelet ended ListAndWatch: registering again"),
            Self::NoStream => (
                Code::NoStream,
                "the kubelet accepted the registration but does not watch: registering again \
                 (its log says why; PROTOCOL_ERROR there: it names the socket's path as the authority of its calls, as \
                 kubelets before 1.26 do, and cannot be served)",
            ),
        };
        Some(RegistrationFailure { code, message: message.to_owned(), retryable: true })
    }
}

/// What a session knows at one moment.
#[derive(Clone, Debug)]
struct View {
    /// The socket file is there and is ours.
    own_socket: bool,
    /// The kubelet's socket at the time of the accepted registration.
    registered_with: Option<Option<SocketId>>,
    /// The kubelet's socket now.
    kubelet: Option<SocketId>,
    streams: StreamLog,
    /// The time for the first stream is over.
    waited: bool,
}

/// What to do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Register,
    /// Accepted, no stream yet.
    AwaitStream,
    Watched,
    End(End),
}

fn judge(view: &View) -> Verdict {
    if !view.own_socket {
        return Verdict::End(End::SocketLost);
    }
    let Some(registered_with) = view.registered_with else { return Verdict::Register };
    // A kubelet without a socket is one that ends or is between two lives; its new socket, or the end of the stream,
    // will say so.
    if view.kubelet.is_some() && view.kubelet != registered_with {
        return Verdict::End(End::KubeletRestarted);
    }
    if view.streams.newest_open() {
        Verdict::Watched
    } else if view.streams.opened > 0 {
        Verdict::End(End::StreamEnded)
    } else if view.waited {
        Verdict::End(End::NoStream)
    } else {
        Verdict::AwaitStream
    }
}

/// Lives one session and leaves nothing of it behind.
///
/// # Errors
/// Only if the socket could not be served; then there was no session.
pub(super) async fn live(plugin: &Plugin, backoff: &mut Backoff) -> Result<End, SocketError> {
    let settings = &plugin.parts.settings;
    let path = plugin.parts.kubelet.device_plugins().join(&plugin.endpoint);
    let bound = bind(&path)?;
    let streams = Arc::new(watch::Sender::new(StreamLog::default()));
    let stop_streams = CancellationToken::new();
    let service = Service {
        resource: plugin.resource.clone(),
        devices: plugin.devices.clone(),
        allocate: plugin.parts.allocate.clone(),
        allocate_deadline: settings.allocate_deadline,
        streams: Arc::clone(&streams),
        stop: stop_streams.clone(),
    };
    let server = UdsServer::start(bound.listener, Routes::new(DevicePluginServer::new(service)));

    let end = follow(plugin, backoff, &path, &bound.id, streams.subscribe()).await;
    backoff.session_over(settings.stable_after);

    plugin.status.unregistered(end.failure());
    stop_streams.cancel();
    server.peers_gone(settings.goodbye).await;
    server.end(settings.drain).await;
    if let Err(error) = remove_own(&path, &bound.id) {
        tracing::warn!(resource = plugin.resource, %error, "a socket is left behind");
    }
    Ok(end)
}

/// Registers and watches over the registration until something ends it.
async fn follow(
    plugin: &Plugin,
    backoff: &mut Backoff,
    path: &Path,
    own: &SocketId,
    mut streams: watch::Receiver<StreamLog>,
) -> End {
    let settings = &plugin.parts.settings;
    let kubelet_socket = plugin.parts.kubelet.kubelet_socket();
    let mut seen = plugin.parts.seen.clone();
    let mut registered_with = None;
    let mut stream_due = Instant::now();
    loop {
        // Marked as seen before the look itself: what happens after it wakes the select below.
        seen.borrow_and_update();
        let view = View {
            own_socket: SocketId::at(path).is_some_and(|there| there.same_file(own)),
            registered_with,
            kubelet: SocketId::at(&kubelet_socket),
            streams: streams.borrow_and_update().clone(),
            waited: Instant::now() >= stream_due,
        };
        let mut due = None;
        match judge(&view) {
            Verdict::End(end) => return end,
            Verdict::Register => {
                let deadline = settings.register_deadline;
                let answer = tokio::select! {
                    () = plugin.stop.cancelled() => return End::Stop,
                    answer = register(&plugin.parts.kubelet, &plugin.endpoint, &plugin.resource, OPTIONS, deadline)
                        => answer,
                };
                match answer {
                    Ok(()) => {
                        tracing::info!(resource = plugin.resource, "registered with the kubelet");
                        registered_with = Some(view.kubelet);
                        stream_due = Instant::now() + settings.first_stream;
                        plugin.status.accepted();
                    }
                    Err(error) => {
                        let failure = RegistrationFailure::from(&error);
                        tracing::debug!(
                            resource = plugin.resource,
                            reason = failure.message,
                            "not registered"
                        );
                        plugin.status.unregistered(Some(failure));
                        let pause = backoff.next(error.retryable());
                        if plugin.pause(pause, view.kubelet, Some((path, own))).await {
                            backoff.reset();
                        }
                        if plugin.stop.is_cancelled() {
                            return End::Stop;
                        }
                    }
                }
                continue;
            }
            Verdict::AwaitStream => due = Some(stream_due),
            Verdict::Watched => {
                backoff.watched();
                plugin.status.watched();
            }
        }
        tokio::select! {
            () = plugin.stop.cancelled() => return End::Stop,
            // Both cancel safe: a change not seen is seen by the next `changed`.
            Ok(()) = seen.changed() => {}
            Ok(()) = streams.changed() => {}
            () = at(due) => {}
        }
    }
}

/// At a time, or never.
async fn at(when: Option<Instant>) {
    match when {
        Some(when) => sleep_until(when).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device_plugin::stream::DeviceStream;

    /// A log with `opened` streams of which the newest is open or not.
    fn log(opened: usize, newest_open: bool) -> StreamLog {
        let sender = Arc::new(watch::Sender::new(StreamLog::default()));
        let (_devices, receiver) = watch::channel(Vec::new());
        let mut streams: Vec<DeviceStream> = (0..opened)
            .map(|_| DeviceStream::new(receiver.clone(), Arc::clone(&sender), CancellationToken::new()))
            .collect();
        if !newest_open {
            streams.pop();
        }
        sender.borrow().clone()
    }

    #[test]
    fn every_state_and_every_event() {
        let dir = tempfile::tempdir().unwrap();
        // A directory has an identity as well as a socket has.
        let (one, two) = (SocketId::at(dir.path()), SocketId::at(Path::new("/")));
        assert_ne!(one, two);
        let serving = View {
            own_socket: true,
            registered_with: None,
            kubelet: one,
            streams: log(0, false),
            waited: true,
        };
        let accepted = View { registered_with: Some(one), waited: false, ..serving.clone() };
        let watched = View { streams: log(2, true), waited: true, ..accepted.clone() };
        let ended = View { streams: log(2, false), ..accepted.clone() };
        let new = Verdict::End(End::KubeletRestarted);
        let table = [
            // state, as it is, kubelet.sock another file, kubelet.sock gone
            (&serving, Verdict::Register, Verdict::Register, Verdict::Register),
            (&accepted, Verdict::AwaitStream, new, Verdict::AwaitStream),
            (&watched, Verdict::Watched, new, Verdict::Watched),
            (&ended, Verdict::End(End::StreamEnded), new, Verdict::End(End::StreamEnded)),
        ];
        for (view, same, other, gone) in table {
            assert_eq!(judge(view), same, "{view:?}");
            assert_eq!(judge(&View { kubelet: two, ..view.clone() }), other, "{view:?}");
            assert_eq!(judge(&View { kubelet: None, ..view.clone() }), gone, "{view:?}");
            let lost = View { own_socket: false, ..view.clone() };
            assert_eq!(judge(&lost), Verdict::End(End::SocketLost), "{view:?}");
        }
        assert_eq!(judge(&View { waited: true, ..accepted.clone() }), Verdict::End(End::NoStream));
        // Registered while the kubelet's socket could not be seen: a socket seen later is a new one.
        assert_eq!(judge(&View { registered_with: Some(None), ..watched }), new);
    }
}
