//! Allocating devices to a container, as a kubelet does it at a pod's admission.

use std::collections::{BTreeMap, BTreeSet};

use tokio::time::timeout;

use super::Shared;
use super::error::StandinError;
use super::state::{PodName, StandinState};
use crate::kubelet::Allocation;
use crate::kubelet::proto::v1beta1;
use crate::kubelet::proto::v1beta1::device_plugin_client::DevicePluginClient;

/// Which devices are wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Want {
    /// Any so many.
    Count(usize),
    /// These.
    Ids(Vec<String>),
}

/// What the container got.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allocated {
    /// The device ids, as they were asked for.
    pub ids: Vec<String>,
    /// Its environment.
    pub env: BTreeMap<String, String>,
    /// Its device nodes: path on the host, path in the container, permissions.
    pub nodes: Vec<(String, String, String)>,
    /// CDI devices by their full names.
    pub cdi_devices: Vec<String>,
    /// Annotations of the container.
    pub annotations: BTreeMap<String, String>,
}

pub(super) async fn allocate(
    shared: &Shared,
    pod: &PodName,
    container: &str,
    resource: &str,
    want: Want,
) -> Result<Allocated, StandinError> {
    let client = shared
        .clients
        .get(resource)
        .ok_or_else(|| StandinError::NoPlugin { resource: resource.to_owned() })?;
    // Taken before the plugin is asked, so that nobody else gets the same ones meanwhile; listed in PodResources only
    // once it has answered (manager.go, allocateContainerResources: podDevices.insert comes after the call).
    let mut picked = Err(StandinError::NoPlugin { resource: resource.to_owned() });
    shared.state.send_modify(|state| {
        picked = pick(state, resource, want);
        let ids = picked.iter().flatten();
        state.asked_for.extend(ids.map(|id| (resource.to_owned(), id.clone())));
    });
    let ids = picked?;
    let request = v1beta1::AllocateRequest {
        container_requests: vec![v1beta1::ContainerAllocateRequest { device_ids: ids.clone() }],
    };
    let deadline = shared.options.allocate_deadline;
    let answer = match timeout(deadline, DevicePluginClient::new(client.channel).allocate(request)).await {
        Ok(Ok(answer)) => answer
            .into_inner()
            .container_responses
            .into_iter()
            .next()
            .ok_or_else(|| tonic::Status::internal("the plugin answered for no container")),
        Ok(Err(status)) => Err(status),
        Err(_) => Err(tonic::Status::deadline_exceeded(format!("no answer within {deadline:?}"))),
    };
    shared.state.send_modify(|state| {
        for id in &ids {
            state.asked_for.remove(&(resource.to_owned(), id.clone()));
        }
        if answer.is_ok() {
            state.allocations.push(Allocation {
                namespace: pod.namespace.clone(),
                pod: pod.name.clone(),
                container: container.to_owned(),
                resource: resource.to_owned(),
                ids: ids.clone(),
            });
        }
    });
    match answer {
        Ok(answer) => Ok(allocated(ids, answer)),
        Err(status) => {
            Err(StandinError::Refused { resource: resource.to_owned(), ids, status: Box::new(status) })
        }
    }
}

/// Devices that are healthy and nobody's.
fn pick(state: &StandinState, resource: &str, want: Want) -> Result<Vec<String>, StandinError> {
    let known = state
        .resources
        .get(resource)
        .ok_or_else(|| StandinError::NoPlugin { resource: resource.to_owned() })?;
    let free: BTreeSet<&String> = known
        .devices
        .iter()
        .filter(|(id, device)| device.healthy && !state.taken(resource, id))
        .map(|(id, _)| id)
        .collect();
    let (wanted, ids) = match want {
        Want::Count(count) => (count, free.iter().take(count).map(|id| (*id).clone()).collect::<Vec<_>>()),
        Want::Ids(ids) => (ids.len(), ids.into_iter().filter(|id| free.contains(id)).collect()),
    };
    if ids.len() < wanted {
        return Err(StandinError::TooFew { resource: resource.to_owned(), wanted, free: free.len() });
    }
    Ok(ids)
}

fn allocated(ids: Vec<String>, answer: v1beta1::ContainerAllocateResponse) -> Allocated {
    Allocated {
        ids,
        env: answer.envs,
        nodes: answer
            .devices
            .into_iter()
            .map(|node| (node.host_path, node.container_path, node.permissions))
            .collect(),
        cdi_devices: answer.cdi_devices.into_iter().map(|device| device.name).collect(),
        annotations: answer.annotations,
    }
}
