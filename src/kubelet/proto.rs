//! The generated messages, clients and servers (from `proto/`). Generated code is held to no lint of ours.

/// The device plugin API `v1beta1`: `Registration` and `DevicePlugin`.
#[allow(missing_docs, unreachable_pub, rust_2018_idioms, clippy::all, clippy::pedantic, clippy::restriction)]
pub mod v1beta1 {
    tonic::include_proto!("v1beta1");

    /// The only version a kubelet takes in a `RegisterRequest`.
    pub const VERSION: &str = "v1beta1";
    /// `Device.health` of a device that may be allocated.
    pub const HEALTHY: &str = "Healthy";
    /// `Device.health` of a device that counts as capacity but may not be allocated.
    pub const UNHEALTHY: &str = "Unhealthy";
}

/// The PodResources API `v1`.
#[allow(missing_docs, unreachable_pub, rust_2018_idioms, clippy::all, clippy::pedantic, clippy::restriction)]
pub mod v1 {
    tonic::include_proto!("v1");
}
