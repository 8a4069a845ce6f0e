//! The times of the device plugins.

use std::time::Duration;

use crate::kubelet::PluginDirSettings;

/// The times of the device plugins; the defaults are for production.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The pause before the second try to serve or register; doubles with each try.
    pub retry_first: Duration,
    /// The longest pause between two tries.
    pub retry_max: Duration,
    /// How long the kubelet may take to answer a registration. It dials the plugin meanwhile, for up to 10 s.
    pub register_deadline: Duration,
    /// How long after an accepted registration the kubelet may take to open ListAndWatch before it is
    /// registered again.
    pub first_stream: Duration,
    /// How long a session must have been watched for its end not to count as one more failure in a row.
    pub stable_after: Duration,
    /// How long the kubelet gets, at the end of a session, to close its connection once its stream has ended. Only
    /// then is its old client gone, which would take the next one with it (see `session.rs`).
    pub goodbye: Duration,
    /// How long calls in flight get at the end of a session, after `goodbye`.
    pub drain: Duration,
    /// How long the agent may take to answer an Allocate. The kubelet itself waits for ever.
    pub allocate_deadline: Duration,
    /// How long the end of all resources may take before they are cut off.
    pub stop_deadline: Duration,
    /// How the kubelet's directory is watched.
    pub plugin_dir: PluginDirSettings,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            retry_first: Duration::from_millis(20),
            retry_max: Duration::from_secs(10),
            register_deadline: Duration::from_secs(12),
            first_stream: Duration::from_secs(15),
            stable_after: Duration::from_secs(30),
            goodbye: Duration::from_millis(500),
            drain: Duration::from_secs(1),
            allocate_deadline: Duration::from_secs(30),
            stop_deadline: Duration::from_secs(10),
            plugin_dir: PluginDirSettings::default(),
        }
    }
}
