//! The kubelet's side of the device plugins: takes registrations, watches ListAndWatch.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

use super::Shared;
use super::state::{DeviceState, ResourceState};
use crate::kubelet::proto::v1beta1;
use crate::kubelet::proto::v1beta1::device_plugin_client::DevicePluginClient;
use crate::kubelet::proto::v1beta1::registration_server::Registration;
use crate::uds::dial::dial;

/// The connection to the plugin of a resource.
#[derive(Clone, Debug)]
pub(super) struct Client {
    /// Which registration it came from, over all resources.
    number: u64,
    pub(super) channel: Channel,
    /// Closes the connection.
    close: CancellationToken,
}

/// The clients by resource name. A lock, since gRPC handlers use them; never held across a wait.
#[derive(Debug, Default)]
pub(super) struct Clients {
    all: Mutex<(u64, BTreeMap<String, Client>)>,
}

impl Clients {
    fn lock(&self) -> MutexGuard<'_, (u64, BTreeMap<String, Client>)> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn get(&self, resource: &str) -> Option<Client> {
        self.lock().1.get(resource).cloned()
    }

    /// Puts a client in the place of the one there was. That one's connection stays open, as in a kubelet.
    fn put(&self, resource: &str, channel: Channel) -> Client {
        let mut all = self.lock();
        all.0 += 1;
        let client = Client { number: all.0, channel, close: CancellationToken::new() };
        all.1.insert(resource.to_owned(), client.clone());
        client
    }

    /// Takes away the client of `resource` if `which` says so.
    fn take(&self, resource: &str, which: impl FnOnce(&Client) -> bool) -> Option<Client> {
        let mut all = self.lock();
        if all.1.get(resource).is_some_and(which) { all.1.remove(resource) } else { None }
    }

    pub(super) fn clear(&self) {
        self.lock().1.clear();
    }
}

/// The `Registration` service of one life of the stand-in.
pub(super) struct Registry {
    pub(super) shared: Arc<Shared>,
    pub(super) tasks: TaskTracker,
    pub(super) stop: CancellationToken,
}

#[tonic::async_trait]
impl Registration for Registry {
    async fn register(
        &self,
        request: Request<v1beta1::RegisterRequest>,
    ) -> Result<Response<v1beta1::Empty>, Status> {
        let request = request.into_inner();
        check(&request)?;
        let (shared, resource) = (&self.shared, request.resource_name);
        let deadline = shared.options.dial_deadline;
        let path = shared.directory.device_plugins().join(&request.endpoint);
        let channel = dial(&path, deadline).await.map_err(|error| {
            Status::unknown(format!("failed to dial device plugin with endpoint {path:?}: {error}"))
        })?;
        timeout(
            deadline,
            DevicePluginClient::new(channel.clone()).get_device_plugin_options(v1beta1::Empty {}),
        )
        .await
        .map_err(|_| Status::unknown(format!("failed to get the options of {resource}: no answer")))?
        .map_err(|status| Status::unknown(format!("failed to get the options of {resource}: {status}")))?;
        if self.stop.is_cancelled() {
            return Err(Status::unavailable("the kubelet is ending"));
        }
        let client = shared.clients.put(&resource, channel);
        shared.state.send_modify(|state| {
            *state.registrations.entry(resource.clone()).or_default() += 1;
            let entry = state.resources.entry(resource.clone()).or_default();
            entry.endpoint = request.endpoint;
            entry.stream_open = false;
            entry.messages = 0;
        });
        let watch = watch(Arc::clone(shared), resource, client);
        let stop = self.stop.clone();
        self.tasks.spawn(async move { stop.run_until_cancelled(watch).await });
        Ok(Response::new(v1beta1::Empty {}))
    }
}

/// What a kubelet refuses (`pkg/kubelet/cm/devicemanager/plugin/v1beta1/server.go`).
fn check(request: &v1beta1::RegisterRequest) -> Result<(), Status> {
    if request.version != v1beta1::VERSION {
        return Err(Status::unknown(format!("unsupported device plugin API version {:?}", request.version)));
    }
    let extended = request.resource_name.split_once('/').is_some_and(|(domain, name)| {
        let in_kubernetes = domain == "kubernetes.io" || domain.ends_with(".kubernetes.io");
        let characters = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let ends = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
        !domain.is_empty()
            && !in_kubernetes
            && !domain.starts_with("requests.")
            && name.len() <= 63
            && name.bytes().all(characters)
            && ends(name.bytes().next())
            && ends(name.bytes().last())
    });
    if !extended {
        return Err(Status::unknown(format!(
            "invalid name of device plugin socket: {:?}",
            request.resource_name
        )));
    }
    if request.endpoint.contains('/') {
        return Err(Status::unknown(format!("the endpoint {:?} is not a file name", request.endpoint)));
    }
    Ok(())
}

/// Watches a plugin until its stream ends, then cleans up as a kubelet does.
async fn watch(shared: Arc<Shared>, resource: String, client: Client) {
    let number = client.number;
    let close = client.close.clone();
    close.run_until_cancelled(follow(&shared, &resource, client)).await;
    // Here a kubelet looks its client up by the resource's name. It closes whatever it finds, which may be the next one.
    let by_name = shared.options.old_stream_takes_new;
    if let Some(found) = shared.clients.take(&resource, |there| by_name || there.number == number) {
        found.close.cancel();
        shared.state.send_modify(|state| {
            if let Some(entry) = state.resources.get_mut(&resource) {
                entry.stream_open = false;
                for device in entry.devices.values_mut() {
                    device.healthy = false;
                }
            }
        });
    }
}

/// Reads ListAndWatch until it ends. The connection ends with it: the channel of a replaced client is nowhere else.
async fn follow(shared: &Shared, resource: &str, client: Client) {
    let number = client.number;
    let mut plugin = DevicePluginClient::new(client.channel);
    let Ok(answer) = plugin.list_and_watch(v1beta1::Empty {}).await else { return };
    let mut stream = answer.into_inner();
    while let Ok(Some(message)) = stream.message().await {
        // Messages of a replaced client are heard by nobody.
        if shared.clients.get(resource).is_none_or(|current| current.number != number) {
            continue;
        }
        shared.state.send_modify(|state| {
            if let Some(entry) = state.resources.get_mut(resource) {
                take_in(entry, message);
            }
        });
    }
}

/// A message is the whole list.
fn take_in(entry: &mut ResourceState, message: v1beta1::ListAndWatchResponse) {
    entry.stream_open = true;
    entry.messages += 1;
    entry.devices = message
        .devices
        .into_iter()
        .map(|device| {
            let numa_nodes =
                device.topology.into_iter().flat_map(|topology| topology.nodes).map(|node| node.id).collect();
            (device.id, DeviceState { healthy: device.health == v1beta1::HEALTHY, numa_nodes })
        })
        .collect();
}
