//! The PodResources client: which pod has which device. The kubelet never says "deallocate"; this is the only
//! place where the end of an allocation can be seen.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use reason::{Code, Coded};
use serde::{Deserialize, Serialize};

use super::KubeletDir;
use super::proto::v1;
use crate::uds::dial::{DialError, dial};

/// The largest answer taken, in bytes. gRPC's own limit of 4 MiB is too small for a node with hundreds of pods
/// and thousands of device ids; this one only guards against a broken server.
const MAX_ANSWER: usize = 64 << 20;

/// What a container of a pod has of one resource.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Allocation {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The container's name.
    pub container: String,
    /// The resource, for example `nvidia.com/GA102GL_A10`.
    pub resource: String,
    /// The device ids, sorted.
    pub ids: Vec<String>,
}

/// What a container of a pod has by one resource claim (DRA, KEP-3063; in PodResources since KEP-3695): one entry a device
/// of the claim.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Claim {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The container's name.
    pub container: String,
    /// The claim's name.
    pub claim: String,
    /// The driver that serves it.
    pub driver: String,
    /// The device in the driver's pool.
    pub device: String,
    /// The CDI devices that the container gets by it, sorted.
    pub cdi: Vec<String>,
}

/// All that pods have, sorted. Includes resources of other plugins and drivers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodResources {
    /// By device plugins.
    pub allocations: Vec<Allocation>,
    /// By claims.
    pub claims: Vec<Claim>,
}

/// Why the kubelet could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum PodResourcesError {
    /// There is no `pod-resources/` at all.
    #[error(
        "{path} is not there, so which pods have devices is not known: mount the kubelet's pod-resources directory, or name \
         the kubelet's root with --kubelet-dir; on a machine without a kubelet give --no-kubernetes"
    )]
    Absent {
        /// The directory.
        path: PathBuf,
    },
    /// The directory could not be looked at.
    #[error(
        "cannot look at {path}: mount the kubelet's pod-resources directory into vfiod's container, readable"
    )]
    Inspect {
        /// The directory.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// There is a `pod-resources/` but nobody answers in it.
    #[error("cannot ask the kubelet which pods have devices (PodResources): is it running?")]
    Dial {
        /// Why not.
        #[source]
        source: DialError,
    },
    /// The kubelet answered with an error.
    #[error("the kubelet at {socket} refused to list pod resources: see the kubelet's log")]
    Refused {
        /// The socket.
        socket: PathBuf,
        /// What it said.
        #[source]
        source: Box<tonic::Status>,
    },
    /// The kubelet did not answer in time.
    #[error("the kubelet at {socket} did not list pod resources within {deadline:?}: see the kubelet's log")]
    Deadline {
        /// The socket.
        socket: PathBuf,
        /// How long was waited.
        deadline: Duration,
    },
}

impl Coded for PodResourcesError {
    fn code(&self) -> Code {
        match self {
            Self::Absent { .. } | Self::Inspect { .. } => Code::PodResourcesAbsent,
            Self::Dial { .. } => Code::PodResourcesUnreachable,
            Self::Refused { .. } => Code::PodResourcesRefused,
            Self::Deadline { .. } => Code::PodResourcesDeadline,
        }
    }

    fn retryable(&self) -> bool {
        match self {
            Self::Absent { .. } | Self::Inspect { .. } => false,
            Self::Dial { source } => source.retryable(),
            // ResourceExhausted is the kubelet's rate limit (100 a second).
            Self::Refused { source, .. } => source.code() != tonic::Code::Unimplemented,
            Self::Deadline { .. } => true,
        }
    }
}

/// Asks the kubelet what every pod has (`v1.PodResourcesLister/List`), within `deadline`.
///
/// **Not known is in use**: no error says that a device is free. Recent kubelets list active pods only.
///
/// # Errors
/// See [`PodResourcesError`]. Whether [`PodResourcesError::Absent`] means that there are no pods is the caller's to know.
pub async fn list(kubelet: &KubeletDir, deadline: Duration) -> Result<PodResources, PodResourcesError> {
    let directory = kubelet.pod_resources_dir();
    match tokio::fs::symlink_metadata(&directory).await {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(PodResourcesError::Absent { path: directory });
        }
        Err(source) => return Err(PodResourcesError::Inspect { path: directory, source }),
    }
    let socket = kubelet.pod_resources_socket();
    let attempt = async {
        let channel = dial(&socket, deadline).await.map_err(|source| PodResourcesError::Dial { source })?;
        v1::pod_resources_lister_client::PodResourcesListerClient::new(channel)
            .max_decoding_message_size(MAX_ANSWER)
            .list(v1::ListPodResourcesRequest {})
            .await
            .map_err(|status| PodResourcesError::Refused { socket: socket.clone(), source: Box::new(status) })
    };
    match tokio::time::timeout(deadline, attempt).await {
        Ok(answer) => {
            let answer = answer?.into_inner();
            Ok(PodResources { claims: claims(&answer), allocations: allocations(answer) })
        }
        Err(_) => Err(PodResourcesError::Deadline { socket: kubelet.pod_resources_socket(), deadline }),
    }
}

/// The claims of an answer as plain, sorted data.
fn claims(answer: &v1::ListPodResourcesResponse) -> Vec<Claim> {
    let containers =
        answer.pod_resources.iter().flat_map(|pod| pod.containers.iter().map(move |one| (pod, one)));
    let mut all: Vec<Claim> = containers
        .flat_map(|(pod, container)| {
            container.dynamic_resources.iter().flat_map(move |dynamic| {
                dynamic.claim_resources.iter().map(move |resource| {
                    let mut cdi: Vec<_> =
                        resource.cdi_devices.iter().map(|device| device.name.clone()).collect();
                    cdi.sort_unstable();
                    Claim {
                        namespace: pod.namespace.clone(),
                        pod: pod.name.clone(),
                        container: container.name.clone(),
                        claim: dynamic.claim_name.clone(),
                        driver: resource.driver_name.clone(),
                        device: resource.device_name.clone(),
                        cdi,
                    }
                })
            })
        })
        .collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// The devices of an answer as plain, sorted data: one entry a container and resource, though a kubelet sends one
/// `ContainerDevices` for each NUMA node.
fn allocations(answer: v1::ListPodResourcesResponse) -> Vec<Allocation> {
    let mut all: Vec<Allocation> = Vec::new();
    for pod in answer.pod_resources {
        for container in pod.containers {
            for devices in container.devices {
                let same = all.iter_mut().find(|one| {
                    one.namespace == pod.namespace
                        && one.pod == pod.name
                        && one.container == container.name
                        && one.resource == devices.resource_name
                });
                if let Some(one) = same {
                    one.ids.extend(devices.device_ids);
                } else {
                    all.push(Allocation {
                        namespace: pod.namespace.clone(),
                        pod: pod.name.clone(),
                        container: container.name.clone(),
                        resource: devices.resource_name,
                        ids: devices.device_ids,
                    });
                }
            }
        }
    }
    for one in &mut all {
        one.ids.sort_unstable();
        one.ids.dedup();
    }
    all.sort_unstable();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_of_two_numa_nodes_are_one_allocation() {
        let devices = |resource: &str, ids: &[&str]| v1::ContainerDevices {
            resource_name: resource.into(),
            device_ids: ids.iter().map(|id| (*id).into()).collect(),
            topology: None,
        };
        let answer = v1::ListPodResourcesResponse {
            pod_resources: vec![v1::PodResources {
                name: "virt-launcher".into(),
                namespace: "vms".into(),
                containers: vec![v1::ContainerResources {
                    name: "compute".into(),
                    devices: vec![
                        devices("nvidia.com/B", &["0000:b0:00.0"]),
                        devices("nvidia.com/A", &["0000:3b:00.0"]),
                        devices("nvidia.com/B", &["0000:a0:00.0"]),
                    ],
                    ..Default::default()
                }],
                ..Default::default()
            }],
        };
        let all = allocations(answer);
        assert_eq!(all.len(), 2);
        assert_eq!(all[0].resource, "nvidia.com/A");
        assert_eq!(all[1].ids, ["0000:a0:00.0", "0000:b0:00.0"]);
    }
}
