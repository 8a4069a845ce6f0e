//! What goes in and comes out as plain data.

use std::collections::BTreeMap;

use decide::{grant::Grant, offers::Offer};
use reason::{Code, Reason};
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
    /// Where the answer goes: a grant a container, in order, or why there is none. The text reaches the pod's events.
    pub reply: oneshot::Sender<Result<Vec<Grant>, Reason>>,
}

/// The offers as the kubelet is told them: only resources whose names it takes.
#[must_use]
pub fn advertised(offers: &[Offer]) -> Advertised {
    let mut resources = Advertised::new();
    for offer in offers.iter().filter(|offer| offer.registrable) {
        resources.entry(offer.resource.clone()).or_default().push(Device {
            id: offer.id.to_string(),
            healthy: offer.healthy,
            numa_node: u32::try_from(offer.numa_node).ok(),
        });
    }
    resources
}

/// The gRPC status code with which a container is refused: no such device is `not_found`, somebody has it
/// `failed_precondition`, a request that makes no sense `invalid_argument`, a fault of vfiod's own `internal`. All else may
/// pass: `unavailable`.
#[must_use]
pub fn grpc_code(code: Code) -> tonic::Code {
    match code {
        Code::UnknownDevice => tonic::Code::NotFound,
        Code::InUse | Code::GroupHeld | Code::HeldOutside => tonic::Code::FailedPrecondition,
        Code::InvalidRequest => tonic::Code::InvalidArgument,
        Code::JournalFile | Code::JournalContent | Code::JournalInterrupted => tonic::Code::Internal,
        _ => tonic::Code::Unavailable,
    }
}
