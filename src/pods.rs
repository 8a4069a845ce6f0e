//! What the kubelet answers about pods, as the decisions take it.

use decide::usage::{PodClaim, PodDevice, Pods};
use reason::chain;

use crate::kubelet::{Allocation, Claim, PodResources, PodResourcesError};

/// What a kubelet's missing directory means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IfAbsent {
    /// Nothing is known of pods: on a node the kubelet makes it at its start, so it is only not mounted here.
    Unknown,
    /// There are no pods: people have said that there is no Kubernetes, or the node is a simulated one that has none.
    NoPods,
}

/// What is known of pods by the kubelet's answer.
#[must_use]
pub fn pods(answer: Result<PodResources, PodResourcesError>, if_absent: IfAbsent) -> Pods {
    match answer {
        Err(PodResourcesError::Absent { .. }) if if_absent == IfAbsent::NoPods => Pods::default(),
        Err(error) => Pods::Unknown(chain(&error)),
        Ok(PodResources { allocations, claims }) => Pods::Known {
            devices: allocations.into_iter().flat_map(devices).collect(),
            claims: claims.into_iter().map(claim).collect(),
        },
    }
}

fn devices(allocation: Allocation) -> impl Iterator<Item = PodDevice> {
    let Allocation { namespace, pod, container, resource, ids } = allocation;
    ids.into_iter().map(move |id| PodDevice {
        namespace: namespace.clone(),
        pod: pod.clone(),
        container: container.clone(),
        resource: resource.clone(),
        id,
    })
}

fn claim(claim: Claim) -> PodClaim {
    let Claim { namespace, pod, container, claim, driver, device, cdi } = claim;
    PodClaim { namespace, pod, container, claim, driver, device, cdi: cdi.into_iter().collect() }
}
