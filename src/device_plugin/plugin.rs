//! The task of one resource: session after session, with growing pauses where they fail.

use std::path::Path;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::Parts;
use super::offer::Device;
use super::session::{End, live};
use super::status::{RegistrationFailure, StatusOut};
use crate::kubelet::socket::SocketId;

/// One resource.
pub(super) struct Plugin {
    pub(super) resource: String,
    /// The socket's file name.
    pub(super) endpoint: String,
    pub(super) devices: watch::Receiver<Vec<Device>>,
    pub(super) parts: Parts,
    pub(super) status: StatusOut,
    pub(super) stop: CancellationToken,
}

impl Plugin {
    /// Serves the resource from `after` now until `stop`.
    pub(super) async fn run(self, after: Duration) {
        if self.stop.run_until_cancelled(sleep(after)).await.is_none() {
            return;
        }
        self.status.appear(&self.endpoint);
        let mut backoff = Backoff::new(self.parts.settings.retry_first, self.parts.settings.retry_max);
        let mut said: Option<RegistrationFailure> = None;
        while !self.stop.is_cancelled() {
            let kubelet = SocketId::at(&self.parts.kubelet.kubelet_socket());
            let retryable = match live(&self, &mut backoff).await {
                Ok(End::Stop) => return,
                Ok(end) => {
                    said = None;
                    tracing::info!(resource = self.resource, reason = ?end, "registering with the kubelet again");
                    true
                }
                Err(error) => {
                    let failure = RegistrationFailure::from(&error);
                    // Once a cause: it is tried again many times a second at first.
                    if said.as_ref() != Some(&failure) {
                        let reason = &failure.message;
                        tracing::warn!(resource = self.resource, reason, "cannot serve the resource");
                        said = Some(failure.clone());
                    }
                    self.status.unregistered(Some(failure));
                    error.retryable()
                }
            };
            if self.pause(backoff.next(retryable), kubelet, None).await {
                backoff.reset();
            }
        }
    }

    /// Waits for `pause`, less if there is a kubelet's socket other than `kubelet`, if the own socket is lost, or on
    /// `stop`. Other changes in the directory do not shorten it: they come from other plugins that try again, too.
    /// True if there is a new kubelet.
    pub(super) async fn pause(
        &self,
        pause: Duration,
        kubelet: Option<SocketId>,
        own: Option<(&Path, &SocketId)>,
    ) -> bool {
        let socket = self.parts.kubelet.kubelet_socket();
        let new_kubelet = || SocketId::at(&socket).is_some_and(|now| Some(now) != kubelet);
        let lost =
            || own.is_some_and(|(path, id)| !SocketId::at(path).is_some_and(|there| there.same_file(id)));
        let mut seen = self.parts.seen.clone();
        tokio::select! {
            () = self.stop.cancelled() => {}
            () = sleep(pause) => {}
            true = async { seen.wait_for(|_| new_kubelet() || lost()).await.is_ok() } => {}
        }
        new_kubelet()
    }
}

/// Pauses that double from `first` to `max`.
#[derive(Debug)]
pub(super) struct Backoff {
    first: Duration,
    max: Duration,
    next: Duration,
    watched: Option<Instant>,
}

impl Backoff {
    pub(super) fn new(first: Duration, max: Duration) -> Self {
        Self { first, max, next: first, watched: None }
    }

    /// The pause now; the longest one where trying again does not help by itself.
    pub(super) fn next(&mut self, retryable: bool) -> Duration {
        let now = if retryable { self.next } else { self.max };
        self.next = self.next.saturating_mul(2).min(self.max);
        now
    }

    pub(super) fn reset(&mut self) {
        self.next = self.first;
    }

    /// The kubelet watches (again said while it does).
    pub(super) fn watched(&mut self) {
        self.watched.get_or_insert_with(Instant::now);
    }

    /// A session has ended: if it was watched for long enough, what comes is no failure in a row.
    pub(super) fn session_over(&mut self, stable_after: Duration) {
        if self.watched.take().is_some_and(|since| since.elapsed() >= stable_after) {
            self.reset();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_until_a_session_was_stable() {
        let (first, max) = (Duration::from_millis(20), Duration::from_millis(100));
        let mut backoff = Backoff::new(first, max);
        let pauses: Vec<u128> = (0..4).map(|_| backoff.next(true).as_millis()).collect();
        assert_eq!(pauses, [20, 40, 80, 100]);
        backoff.watched();
        backoff.session_over(Duration::from_secs(3600));
        assert_eq!(backoff.next(true), max, "a short session is one more failure");
        backoff.watched();
        backoff.session_over(Duration::ZERO);
        assert_eq!(backoff.next(true), first);
        assert_eq!(backoff.next(false), max, "what cannot get better by itself is not tried often");
    }
}
