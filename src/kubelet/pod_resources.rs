//! The PodResources client: which pod has which device. The kubelet never says "deallocate"; this is the only
//! place where the end of an allocation can be seen.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::KubeletDir;
use super::dial::{DialError, dial};
use super::proto::v1;

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

/// The kubelet's answer, or why there is none. **Not known is in use**: only `Known` without an id and `NoPods`
/// say that a device is free.
#[derive(Debug)]
pub enum PodResources {
    /// All that pods have, sorted. Includes resources of other plugins.
    Known(Vec<Allocation>),
    /// The kubelet's root has no `pod-resources/` at all: no kubelet has ever run here, so there are no pods.
    NoPods,
    /// The kubelet could not be asked.
    Unknown(PodResourcesError),
}

/// Why the kubelet could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum PodResourcesError {
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

impl PodResourcesError {
    /// A stable name for metrics and conditions.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Inspect { .. } => "pod_resources_inspect",
            Self::Dial { .. } => "pod_resources_unreachable",
            Self::Refused { .. } => "pod_resources_refused",
            Self::Deadline { .. } => "pod_resources_deadline",
        }
    }

    /// Whether the same call can succeed later without anyone changing the configuration.
    #[must_use]
    pub fn retryable(&self) -> bool {
        match self {
            Self::Inspect { .. } => false,
            Self::Dial { source } => source.retryable(),
            // ResourceExhausted is the kubelet's rate limit (100 a second).
            Self::Refused { source, .. } => source.code() != tonic::Code::Unimplemented,
            Self::Deadline { .. } => true,
        }
    }
}

/// Asks the kubelet what every pod has (`v1.PodResourcesLister/List`), within `deadline`.
///
/// A missing socket, a refused connection, a time-out or an error is [`PodResources::Unknown`]; only a kubelet root
/// without `pod-resources/` is [`PodResources::NoPods`]. Recent kubelets list active pods only.
pub async fn list(kubelet: &KubeletDir, deadline: Duration) -> PodResources {
    let directory = kubelet.pod_resources_dir();
    match tokio::fs::symlink_metadata(&directory).await {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return PodResources::NoPods,
        Err(source) => return PodResources::Unknown(PodResourcesError::Inspect { path: directory, source }),
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
        Ok(Ok(answer)) => PodResources::Known(allocations(answer.into_inner())),
        Ok(Err(error)) => PodResources::Unknown(error),
        Err(_) => PodResources::Unknown(PodResourcesError::Deadline {
            socket: kubelet.pod_resources_socket(),
            deadline,
        }),
    }
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
