//! The gRPC service of one resource.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use decide::grant::Grant;
use reason::Reason;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::offer::{AllocateCall, Device, grpc_code};
use super::stream::{DeviceStream, StreamLog};
use crate::kubelet::PluginOptions;
use crate::kubelet::proto::v1beta1;
use crate::kubelet::proto::v1beta1::device_plugin_server::DevicePlugin;

/// What vfiod's plugins ask of the kubelet: nothing.
pub(super) const OPTIONS: PluginOptions =
    PluginOptions { pre_start_required: false, preferred_allocation: false };

/// One resource in one session.
pub(super) struct Service {
    pub(super) resource: String,
    pub(super) devices: watch::Receiver<Vec<Device>>,
    pub(super) allocate: mpsc::Sender<AllocateCall>,
    pub(super) allocate_deadline: Duration,
    pub(super) streams: Arc<watch::Sender<StreamLog>>,
    pub(super) stop: CancellationToken,
}

#[tonic::async_trait]
impl DevicePlugin for Service {
    type ListAndWatchStream = DeviceStream;

    async fn get_device_plugin_options(
        &self,
        _: Request<v1beta1::Empty>,
    ) -> Result<Response<v1beta1::DevicePluginOptions>, Status> {
        Ok(Response::new(OPTIONS.into()))
    }

    async fn list_and_watch(
        &self,
        _: Request<v1beta1::Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let stream = DeviceStream::new(self.devices.clone(), Arc::clone(&self.streams), self.stop.clone());
        Ok(Response::new(stream))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<v1beta1::PreferredAllocationRequest>,
    ) -> Result<Response<v1beta1::PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented(format!(
            "{} has no preferred allocation, as GetDevicePluginOptions says",
            self.resource
        )))
    }

    async fn allocate(
        &self,
        request: Request<v1beta1::AllocateRequest>,
    ) -> Result<Response<v1beta1::AllocateResponse>, Status> {
        let containers =
            request.into_inner().container_requests.into_iter().map(|one| one.device_ids).collect();
        let grants = self.ask(containers).await?;
        let container_responses = grants.into_iter().map(response).collect();
        Ok(Response::new(v1beta1::AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        _: Request<v1beta1::PreStartContainerRequest>,
    ) -> Result<Response<v1beta1::PreStartContainerResponse>, Status> {
        // Not asked for; a kubelet that calls it all the same must not have its container fail.
        Ok(Response::new(v1beta1::PreStartContainerResponse {}))
    }
}

impl Service {
    async fn ask(&self, containers: Vec<Vec<String>>) -> Result<Vec<Grant>, Status> {
        let resource = &self.resource;
        if containers.iter().any(Vec::is_empty) {
            return Err(Status::invalid_argument(format!("an allocation of {resource} names no device")));
        }
        let mut seen = BTreeSet::new();
        if let Some(twice) = containers.iter().flatten().find(|id| !seen.insert(id.as_str())) {
            return Err(Status::invalid_argument(format!("an allocation of {resource} names {twice} twice")));
        }
        if containers.is_empty() {
            return Ok(Vec::new());
        }
        let asked = async {
            let (reply, answer) = oneshot::channel();
            let call = AllocateCall { resource: resource.clone(), containers, reply };
            self.allocate.send(call).await.map_err(|_| self.ending())?;
            answer.await.map_err(|_| self.ending())?.map_err(|reason| status(&reason))
        };
        match timeout(self.allocate_deadline, asked).await {
            Ok(answer) => answer,
            Err(_) => Err(Status::unavailable(format!(
                "vfiod did not decide on an allocation of {resource} within {:?}: see `vfiod status` on the node",
                self.allocate_deadline
            ))),
        }
    }

    fn ending(&self) -> Status {
        Status::unavailable(format!(
            "vfiod is ending or starting and cannot allocate {}: the pod can be created again in a moment",
            self.resource
        ))
    }
}

fn status(reason: &Reason) -> Status {
    Status::new(grpc_code(reason.code), format!("{} [{}]", reason.message, reason.code))
}

fn response(grant: Grant) -> v1beta1::ContainerAllocateResponse {
    let devices = grant
        .nodes
        .into_iter()
        .map(|node| v1beta1::DeviceSpec {
            container_path: node.path.clone(),
            host_path: node.path,
            permissions: node.permissions,
        })
        .collect();
    v1beta1::ContainerAllocateResponse { envs: grant.env, devices, ..Default::default() }
}
