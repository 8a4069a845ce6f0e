//! What vfiod says to a kubelet, and what it hears from it, over the sockets below the kubelet's root.
//!
//! | socket | who serves it | here |
//! |---|---|---|
//! | `device-plugins/kubelet.sock` | the kubelet | [`register`]; [`PluginDir`] sees it come and go |
//! | `device-plugins/vfiod-*.sock` | vfiod | [`crate::device_plugin`] |
//! | `pod-resources/kubelet.sock` | the kubelet | [`list`] |
//!
//! What goes over the sockets is [`crate::uds`]'s.
//!
//! Facts: kubelet `pkg/kubelet/cm/devicemanager` and `pkg/kubelet/apis/podresources`, KEP-3573, KEP-606.

mod plugin_dir;
mod pod_resources;
pub mod proto;
mod registration;

use std::path::{Path, PathBuf};

pub use self::plugin_dir::{PluginDir, PluginDirSettings, PluginDirState};
pub use self::pod_resources::{Allocation, Claim, PodResources, PodResourcesError, list};
pub use self::registration::{PluginOptions, RegisterError, register};

/// The kubelet's root directory, below which all its sockets are.
///
/// `device-plugins/` is a constant in the kubelet (it does not follow `--root-dir`), `pod-resources/` does follow:
/// a node with another `--root-dir` mounts both below one directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubeletDir {
    /// The root itself.
    pub root: PathBuf,
}

impl Default for KubeletDir {
    fn default() -> Self {
        Self { root: PathBuf::from("/var/lib/kubelet") }
    }
}

impl KubeletDir {
    /// A kubelet whose root is `root`.
    pub fn new(root: impl AsRef<Path>) -> Self {
        Self { root: root.as_ref().to_path_buf() }
    }

    /// Where the kubelet and the device plugins have their sockets.
    #[must_use]
    pub fn device_plugins(&self) -> PathBuf {
        self.root.join("device-plugins")
    }

    /// Where the kubelet takes registrations.
    #[must_use]
    pub fn kubelet_socket(&self) -> PathBuf {
        self.device_plugins().join(KUBELET_SOCKET)
    }

    /// The directory of the PodResources API. A kubelet makes it at its start, whatever else happens.
    #[must_use]
    pub fn pod_resources_dir(&self) -> PathBuf {
        self.root.join("pod-resources")
    }

    /// Where the kubelet answers PodResources.
    #[must_use]
    pub fn pod_resources_socket(&self) -> PathBuf {
        self.pod_resources_dir().join(KUBELET_SOCKET)
    }
}

/// The file name of the kubelet's own socket in both directories.
pub const KUBELET_SOCKET: &str = "kubelet.sock";
