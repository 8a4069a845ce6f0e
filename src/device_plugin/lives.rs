//! The task of one resource: session after session, with growing pauses where they fail.

use std::time::Duration;

use reason::Coded;
use tokio::time::sleep;

use super::backoff::Backoff;
use super::plugin::Plugin;
use super::session::{End, live};
use super::status::RegistrationFailure;
use crate::uds::socket::SocketId;

/// Serves `plugin`'s resource from `after` now until its `stop`.
pub(super) async fn run(plugin: Plugin, after: Duration) {
    if plugin.stop.run_until_cancelled(sleep(after)).await.is_none() {
        return;
    }
    plugin.status.appear(&plugin.endpoint);
    let mut backoff = Backoff::new(plugin.parts.settings.retry_first, plugin.parts.settings.retry_max);
    let mut said: Option<RegistrationFailure> = None;
    while !plugin.stop.is_cancelled() {
        let kubelet = SocketId::at(&plugin.parts.kubelet.kubelet_socket());
        let retryable = match live(&plugin, &mut backoff).await {
            Ok(End::Stop) => return,
            Ok(end) => {
                said = None;
                tracing::info!(resource = plugin.resource, reason = ?end, "registering with the kubelet again");
                true
            }
            Err(error) => {
                let failure = RegistrationFailure::from(&error);
                // Once a cause: it is tried again many times a second at first.
                if said.as_ref() != Some(&failure) {
                    let reason = &failure.message;
                    tracing::warn!(resource = plugin.resource, reason, "cannot serve the resource");
                    said = Some(failure.clone());
                }
                plugin.status.unregistered(Some(failure));
                error.retryable()
            }
        };
        if plugin.pause(backoff.next(retryable), kubelet, None).await {
            backoff.reset();
        }
    }
}
