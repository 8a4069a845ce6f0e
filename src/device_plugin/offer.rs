//! What goes in and comes out as plain data.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

/// A device as the kubelet sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// The device id: the PCI address. Unique across all resources of the node.
    pub id: String,
    /// Whether it may be allocated. An unhealthy one still counts as capacity.
    pub healthy: bool,
    /// The NUMA node for the Topology Manager. `None` where the kernel names none: then no topology is sent, which
    /// means "fits anywhere" (a made-up node 0 would align wrongly).
    pub numa_node: Option<u32>,
}

/// All devices by resource name, for example `nvidia.com/GH100_H100_SXM5_80GB`. A resource with an empty list is
/// registered with no devices.
pub type Advertised = BTreeMap<String, Vec<Device>>;

/// A request for devices of one resource, to be answered on `reply` for all its containers or for none.
///
/// When nobody waits for the answer any more (deadline, connection lost) `reply.is_closed()` is true, or sending
/// gives the answer back. Then the kubelet has not allocated anything, as far as vfiod can know.
#[derive(Debug)]
pub struct AllocateCall {
    /// The resource name.
    pub resource: String,
    /// Container by container the device ids, each id once in the whole call, in the kubelet's order, which means nothing.
    /// A kubelet sends one container a call.
    pub containers: Vec<Vec<String>>,
    /// Where the answer goes: a grant a container, in order.
    pub reply: oneshot::Sender<Result<Vec<Grant>, Refusal>>,
}

/// What a container gets. The kubelet keeps it and uses it again whenever the container is restarted, so it must stay
/// true for as long as the pod lives.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// Environment variables of the container.
    pub env: BTreeMap<String, String>,
    /// Device nodes, in the order they are to be listed.
    pub nodes: Vec<DeviceNode>,
}

/// A device node that has the same path on the host and in the container.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DeviceNode {
    /// For example `/dev/vfio/12`.
    pub path: String,
    /// A subset of `rwm`; KubeVirt's own plugin gives `mrw`.
    pub permissions: String,
}

/// Why a container gets nothing. The text reaches the pod's events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refusal {
    /// A stable name, for example `in_use`.
    pub code: &'static str,
    /// Cause and cure, for people.
    pub message: String,
    /// What kind of refusal, which decides the gRPC status.
    pub kind: RefusalKind,
}

/// The kinds of refusal and the gRPC status of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefusalKind {
    /// No such device: `not_found`.
    UnknownDevice,
    /// Not now (a switch is going on, the agent ends): `unavailable`.
    Unavailable,
    /// Someone has it, or has a part of its group: `failed_precondition`.
    InUse,
    /// The request makes no sense (ids named twice, none at all): `invalid_argument`.
    Invalid,
    /// vfiod failed: `internal`.
    Internal,
}

impl RefusalKind {
    /// The gRPC status code.
    #[must_use]
    pub fn grpc_code(self) -> tonic::Code {
        match self {
            Self::UnknownDevice => tonic::Code::NotFound,
            Self::Unavailable => tonic::Code::Unavailable,
            Self::InUse => tonic::Code::FailedPrecondition,
            Self::Invalid => tonic::Code::InvalidArgument,
            Self::Internal => tonic::Code::Internal,
        }
    }
}
