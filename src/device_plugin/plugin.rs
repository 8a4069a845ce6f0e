//! One resource: what its sessions need.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::offer::{AllocateCall, Device};
use super::settings::Settings;
use super::status::StatusOut;
use crate::kubelet::{KubeletDir, PluginDirState};
use crate::uds::socket::SocketId;

/// What every resource's task needs.
#[derive(Clone, Debug)]
pub(super) struct Parts {
    pub(super) settings: Arc<Settings>,
    pub(super) kubelet: KubeletDir,
    pub(super) seen: watch::Receiver<PluginDirState>,
    pub(super) allocate: mpsc::Sender<AllocateCall>,
}

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
