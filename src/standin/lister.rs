//! PodResources of the stand-in.

use std::collections::BTreeMap;
use std::future::pending;
use std::sync::Arc;

use tonic::{Request, Response, Status};

use super::state::StandinState;
use super::{PodResourcesMode, Shared};
use crate::kubelet::proto::v1;
use crate::kubelet::proto::v1::pod_resources_lister_server::PodResourcesLister;

/// The `PodResourcesLister` service.
pub(super) struct Lister {
    pub(super) shared: Arc<Shared>,
}

impl Lister {
    /// Fails or hangs where the mode says so.
    async fn obey(&self) -> Result<(), Status> {
        let mode = *self.shared.pod_resources.borrow();
        match mode {
            PodResourcesMode::Answers | PodResourcesMode::NoDirectory | PodResourcesMode::NoSocket => Ok(()),
            PodResourcesMode::Fails(code) => Err(Status::new(code, "the stand-in kubelet was told to fail")),
            // Ends with the connection: the caller's deadline, or the end of the server.
            PodResourcesMode::Hangs => pending().await,
        }
    }

    fn pods(&self) -> Vec<v1::PodResources> {
        pods(&self.shared.state.borrow())
    }
}

#[tonic::async_trait]
impl PodResourcesLister for Lister {
    async fn list(
        &self,
        _: Request<v1::ListPodResourcesRequest>,
    ) -> Result<Response<v1::ListPodResourcesResponse>, Status> {
        self.obey().await?;
        Ok(Response::new(v1::ListPodResourcesResponse { pod_resources: self.pods() }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<v1::AllocatableResourcesRequest>,
    ) -> Result<Response<v1::AllocatableResourcesResponse>, Status> {
        self.obey().await?;
        let state = self.shared.state.borrow();
        let devices = state
            .resources
            .iter()
            .map(|(resource, known)| v1::ContainerDevices {
                resource_name: resource.clone(),
                device_ids: known
                    .devices
                    .iter()
                    .filter(|(_, one)| one.healthy)
                    .map(|(id, _)| id.clone())
                    .collect(),
                topology: None,
            })
            .collect();
        Ok(Response::new(v1::AllocatableResourcesResponse { devices, ..Default::default() }))
    }

    async fn get(
        &self,
        request: Request<v1::GetPodResourcesRequest>,
    ) -> Result<Response<v1::GetPodResourcesResponse>, Status> {
        self.obey().await?;
        let wanted = request.into_inner();
        self.pods()
            .into_iter()
            .find(|pod| pod.name == wanted.pod_name && pod.namespace == wanted.pod_namespace)
            .map(|pod| Response::new(v1::GetPodResourcesResponse { pod_resources: Some(pod) }))
            .ok_or_else(|| {
                Status::not_found(format!("pod {}/{} not found", wanted.pod_namespace, wanted.pod_name))
            })
    }
}

/// The allocations as a kubelet lists them.
fn pods(state: &StandinState) -> Vec<v1::PodResources> {
    type Containers<'a> = BTreeMap<&'a str, v1::ContainerResources>;
    let mut pods: BTreeMap<(&str, &str), Containers<'_>> = BTreeMap::new();
    for one in &state.allocations {
        let container =
            pods.entry((&one.namespace, &one.pod)).or_default().entry(&one.container).or_default();
        container.devices.push(v1::ContainerDevices {
            resource_name: one.resource.clone(),
            device_ids: one.ids.clone(),
            topology: None,
        });
    }
    for one in &state.claims {
        let container =
            pods.entry((&one.namespace, &one.pod)).or_default().entry(&one.container).or_default();
        container.dynamic_resources.push(v1::DynamicResource {
            claim_name: one.claim.clone(),
            claim_namespace: one.namespace.clone(),
            claim_resources: vec![v1::ClaimResource {
                cdi_devices: one.cdi.iter().map(|name| v1::CdiDevice { name: name.clone() }).collect(),
                driver_name: one.driver.clone(),
                device_name: one.device.clone(),
                ..Default::default()
            }],
        });
    }
    pods.into_iter()
        .map(|((namespace, name), containers)| v1::PodResources {
            name: name.to_owned(),
            namespace: namespace.to_owned(),
            containers: containers
                .into_iter()
                .map(|(name, container)| v1::ContainerResources { name: name.to_owned(), ..container })
                .collect(),
            ..Default::default()
        })
        .collect()
}
