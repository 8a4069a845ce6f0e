//! The device plugins against the stand-in kubelet, and the PodResources client, over real sockets in a temporary
//! directory. Nothing waits for a fixed time: every wait is for a state, with a deadline that only a failure reaches.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test's own functions, as well as its test functions"
)]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener as StdUnixListener;
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;

use decide::grant::{DeviceNode, Grant};
use reason::{Coded, Reason};
use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Response, Status};
use vfiod::device_plugin::{
    Advertised, AllocateCall, Device, DevicePlugins, RegistrationState, Registrations, Settings, endpoint,
};
use vfiod::kubelet::proto::v1beta1;
use vfiod::kubelet::proto::v1beta1::device_plugin_client::DevicePluginClient;
use vfiod::kubelet::proto::v1beta1::device_plugin_server::{DevicePlugin, DevicePluginServer};
use vfiod::kubelet::proto::v1beta1::registration_server::{Registration, RegistrationServer};
use vfiod::kubelet::{
    KubeletDir, PluginDirSettings, PluginOptions, PodResources, PodResourcesError, list, register,
};
use vfiod::standin::{
    PodName, PodResourcesMode, StandinError, StandinKubelet, StandinOptions, StandinState, Want,
};
use vfiod::uds::dial::dial;

const LIMIT: Duration = Duration::from_secs(30);
const A10: &str = "nvidia.com/GA102GL_A10";
const GPU: &str = "0000:3b:00.0";
const OTHER: &str = "0000:5e:00.0";

/// vfiod's plugins on a temporary node.
struct Node {
    dir: TempDir,
    kubelet: KubeletDir,
    advertised: watch::Sender<Advertised>,
    calls: Option<mpsc::Receiver<AllocateCall>>,
    registrations: watch::Receiver<Registrations>,
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

fn device(id: &str, healthy: bool) -> Device {
    Device { id: id.into(), healthy, numa_node: Some(1) }
}

fn settings() -> Settings {
    Settings {
        retry_first: Duration::from_millis(2),
        retry_max: Duration::from_millis(200),
        plugin_dir: PluginDirSettings {
            first: Duration::from_millis(2),
            poll: Duration::from_millis(20),
            // Only inotify may be what is fast here.
            recheck: Duration::from_secs(3600),
        },
        ..Settings::default()
    }
}

impl Node {
    fn start() -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), "", settings())
    }

    fn start_in(dir: TempDir, below: &str, settings: Settings) -> Self {
        let kubelet = KubeletDir::new(dir.path().join(below));
        let (advertised, wanted) = watch::channel(Advertised::from([(
            A10.to_owned(),
            vec![device(GPU, true), device(OTHER, true)],
        )]));
        let (allocate, calls) = mpsc::channel(4);
        let (status, registrations) = watch::channel(Registrations::new());
        let stop = CancellationToken::new();
        let plugins = DevicePlugins {
            settings,
            kubelet: kubelet.clone(),
            advertised: wanted,
            allocate,
            registrations: status,
            stop: stop.clone(),
        };
        let mut tasks = JoinSet::new();
        tasks.spawn(plugins.run());
        Self { dir, kubelet, advertised, calls: Some(calls), registrations, stop, tasks }
    }

    /// Answers every Allocate as the agent would: an env and a node for each device, and a refusal for others.
    fn answer_allocations(&mut self) {
        let mut calls = self.calls.take().unwrap();
        self.tasks.spawn(async move {
            while let Some(call) = calls.recv().await {
                let one = |ids: &Vec<String>| {
                    if ids.iter().any(|id| id == OTHER) {
                        let message = "a VM has it";
                        return Err(Reason::new(reason::Code::InUse, message));
                    }
                    if ids.iter().any(|id| id.starts_with("ffff")) {
                        let message = "no such";
                        return Err(Reason::new(reason::Code::UnknownDevice, message));
                    }
                    Ok(Grant {
                        env: BTreeMap::from([(format!("PCI_{}", ids.join("_")), ids.join(","))]),
                        nodes: vec![DeviceNode { path: "/dev/vfio/12".into(), permissions: "mrw".into() }],
                    })
                };
                let answer = call.containers.iter().map(one).collect();
                call.reply.send(answer).ok();
            }
        });
    }

    fn socket(&self) -> PathBuf {
        self.kubelet.device_plugins().join(endpoint(&self.kubelet.device_plugins(), A10))
    }

    async fn client(&self) -> DevicePluginClient<tonic::transport::Channel> {
        DevicePluginClient::new(dial(&self.socket(), LIMIT).await.unwrap())
    }

    async fn until(&mut self, what: impl FnMut(&Registrations) -> bool) -> Registrations {
        timeout(LIMIT, self.registrations.wait_for(what)).await.unwrap().unwrap().clone()
    }

    /// Stops and joins everything.
    async fn stop(mut self) -> TempDir {
        self.stop.cancel();
        timeout(LIMIT, async { while self.tasks.join_next().await.is_some_and(|end| end.is_ok()) {} })
            .await
            .unwrap();
        assert!(self.registrations.borrow().is_empty());
        if self.kubelet.device_plugins().exists() {
            let left: Vec<_> = fs::read_dir(self.kubelet.device_plugins())
                .unwrap()
                .map(|entry| entry.unwrap().file_name())
                .filter(|name| name.to_string_lossy().starts_with("vfiod-"))
                .collect();
            assert!(left.is_empty(), "{left:?}");
        }
        if let Some(mut calls) = self.calls {
            // Each stream and each connection's task has a sender: none is left.
            assert!(timeout(LIMIT, calls.recv()).await.unwrap().is_none());
        }
        self.dir
    }
}

/// The kubelet watches and counts so many healthy devices.
fn offered(count: usize) -> impl FnMut(&StandinState) -> bool {
    move |state| state.watched(A10) && state.healthy(A10) == count
}

fn pod(name: &str) -> PodName {
    PodName::new("vms", name)
}

#[tokio::test]
async fn registers_after_serving_and_sends_the_whole_list_at_every_change() {
    let mut node = Node::start();
    let kubelet = StandinKubelet::start(node.kubelet.clone()).await.unwrap();
    let state = kubelet.wait_for(offered(2), LIMIT).await.unwrap();
    assert_eq!(state.resources[A10].devices[GPU].numa_nodes, [1]);
    assert_eq!(state.resources[A10].messages, 1);
    assert_eq!(state.registrations[A10], 1);

    // The same again is no message, a difference is one with the whole list.
    node.advertised.send_modify(|_| {});
    node.advertised.send_modify(|all| {
        all.insert(A10.into(), vec![device(GPU, false), Device { numa_node: None, ..device(OTHER, true) }]);
    });
    let state = kubelet.wait_for(offered(1), LIMIT).await.unwrap();
    assert_eq!(state.resources[A10].messages, 2);
    assert!(!state.resources[A10].devices[GPU].healthy);
    assert!(state.resources[A10].devices[OTHER].numa_nodes.is_empty(), "no node known, no topology");

    let all = node.until(|all| all[A10].state == RegistrationState::Watched).await;
    assert_eq!((all[A10].accepted, &all[A10].failure), (1, &None));
    assert_eq!(all[A10].socket, "vfiod-GA102GL_A10.sock");
    node.stop().await;
}

#[tokio::test]
async fn two_streams_each_get_every_state_and_the_older_ones_end_is_nothing() {
    let node = Node::start();
    let kubelet = StandinKubelet::start(node.kubelet.clone()).await.unwrap();
    kubelet.wait_for(offered(2), LIMIT).await.unwrap();
    let mut client = node.client().await;
    let options = client.get_device_plugin_options(v1beta1::Empty {}).await.unwrap().into_inner();
    assert!(!options.pre_start_required && !options.get_preferred_allocation_available);
    let mut streams = Vec::new();
    for _ in 0..2 {
        let mut stream = client.list_and_watch(v1beta1::Empty {}).await.unwrap().into_inner();
        assert_eq!(timeout(LIMIT, stream.message()).await.unwrap().unwrap().unwrap().devices.len(), 2);
        streams.push(stream);
    }
    node.advertised.send_modify(|all| {
        all.insert(A10.into(), vec![device(GPU, true)]);
    });
    for stream in &mut streams {
        assert_eq!(timeout(LIMIT, stream.message()).await.unwrap().unwrap().unwrap().devices.len(), 1);
    }
    kubelet.wait_for(offered(1), LIMIT).await.unwrap();
    // The older of the two goes; a change then still reaches the kubelet over its first stream.
    drop(streams.remove(0));
    node.advertised.send_modify(|all| {
        all.insert(A10.into(), vec![device(GPU, true), device(OTHER, true)]);
    });
    let state = kubelet.wait_for(offered(2), LIMIT).await.unwrap();
    assert_eq!(state.registrations[A10], 1);
    node.stop().await;
}

#[tokio::test]
async fn allocates_what_the_agent_grants_and_says_why_it_does_not() {
    let mut node = Node::start();
    node.answer_allocations();
    let kubelet = StandinKubelet::start(node.kubelet.clone()).await.unwrap();
    kubelet.wait_for(offered(2), LIMIT).await.unwrap();

    let got = kubelet.allocate(&pod("a"), "compute", A10, Want::Count(1)).await.unwrap();
    assert_eq!(got.ids, [GPU]);
    assert_eq!(got.env, BTreeMap::from([(format!("PCI_{GPU}"), GPU.to_owned())]));
    assert_eq!(got.nodes, [("/dev/vfio/12".to_owned(), "/dev/vfio/12".to_owned(), "mrw".to_owned())]);
    let all = list(&node.kubelet, LIMIT).await.unwrap().allocations;
    assert_eq!((all[0].pod.as_str(), all[0].container.as_str(), &all[0].ids), ("a", "compute", &got.ids));

    // The only one left is refused by the agent; then nothing was allocated.
    let refused = kubelet.allocate(&pod("b"), "compute", A10, Want::Count(1)).await.unwrap_err();
    let status = refused.status().unwrap();
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert_eq!(status.message(), "a VM has it [InUse]");
    let few = kubelet.allocate(&pod("b"), "compute", A10, Want::Count(2)).await.unwrap_err();
    assert!(matches!(few, StandinError::TooFew { wanted: 2, free: 1, .. }), "{few}");
    let unknown =
        kubelet.allocate(&pod("b"), "compute", "nvidia.com/NONE", Want::Count(1)).await.unwrap_err();
    assert_eq!(unknown.code(), "NotRegistered");

    kubelet.pod_gone(&pod("a"));
    let all = list(&node.kubelet, LIMIT).await.unwrap().allocations;
    assert!(all.is_empty());
    let again = kubelet.allocate(&pod("c"), "compute", A10, Want::Ids(vec![GPU.into()])).await.unwrap();
    assert_eq!(again.ids, [GPU]);
    node.stop().await;
}

async fn ask(node: &Node, containers: &[&[&str]]) -> Result<v1beta1::AllocateResponse, Status> {
    let container_requests = containers
        .iter()
        .map(|ids| v1beta1::ContainerAllocateRequest {
            device_ids: ids.iter().map(|id| (*id).into()).collect(),
        })
        .collect();
    let mut client = node.client().await;
    let answer = client.allocate(v1beta1::AllocateRequest { container_requests });
    timeout(LIMIT, answer).await.unwrap().map(Response::into_inner)
}

#[tokio::test]
async fn requests_of_two_containers_do_not_leak_and_nonsense_is_refused() {
    let mut node = Node::start();
    let kubelet = StandinKubelet::start(node.kubelet.clone()).await.unwrap();
    kubelet.wait_for(offered(2), LIMIT).await.unwrap();
    node.answer_allocations();

    let answer = ask(&node, &[&["a", "b"], &["c"]]).await.unwrap();
    let envs: Vec<_> = answer.container_responses.iter().map(|one| one.envs.clone()).collect();
    assert_eq!(
        envs,
        [
            BTreeMap::from([("PCI_a_b".to_owned(), "a,b".to_owned())]),
            BTreeMap::from([("PCI_c".to_owned(), "c".to_owned())]),
        ]
    );
    assert_eq!(ask(&node, &[&["a", "a"]]).await.unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(ask(&node, &[&[]]).await.unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(ask(&node, &[&["ffff:00:00.0"]]).await.unwrap_err().code(), Code::NotFound);
    node.stop().await;
}

#[tokio::test]
async fn an_agent_that_does_not_answer_is_unavailable() {
    let quick = Settings { allocate_deadline: Duration::from_millis(50), ..settings() };
    let mut node = Node::start_in(tempfile::tempdir().unwrap(), "", quick);
    let kubelet = StandinKubelet::start(node.kubelet.clone()).await.unwrap();
    kubelet.wait_for(offered(2), LIMIT).await.unwrap();
    let mut calls = node.calls.take().unwrap();

    // Late: the caller is gone, and the agent can see it.
    assert_eq!(ask(&node, &[&["a"]]).await.unwrap_err().code(), Code::Unavailable);
    let mut late = timeout(LIMIT, calls.recv()).await.unwrap().unwrap();
    timeout(LIMIT, late.reply.closed()).await.unwrap();
    assert!(late.reply.send(Ok(vec![Grant::default()])).is_err());

    // The reply dropped, then nobody there at all.
    let (answer, ()) = tokio::join!(ask(&node, &[&["a"]]), async {
        drop(timeout(LIMIT, calls.recv()).await.unwrap());
    });
    assert_eq!(answer.unwrap_err().code(), Code::Unavailable);
    drop(calls);
    assert_eq!(ask(&node, &[&["a"]]).await.unwrap_err().code(), Code::Unavailable);
    node.stop().await;
}

#[tokio::test]
async fn registers_again_when_the_kubelet_comes_back() {
    let mut node = Node::start();
    node.answer_allocations();
    let mut kubelet = StandinKubelet::start(node.kubelet.clone()).await.unwrap();
    kubelet.wait_for(offered(2), LIMIT).await.unwrap();
    kubelet.allocate(&pod("a"), "compute", A10, Want::Ids(vec![GPU.into()])).await.unwrap();
    for _ in 0..3 {
        kubelet.restart().await.unwrap();
        let state = kubelet.wait_for(offered(2), LIMIT).await.unwrap();
        assert!(state.allocated(A10, GPU), "the checkpoint outlives the kubelet");
    }
    node.until(|all| all[A10].state == RegistrationState::Watched).await;
    // A stop, a longer absence, a start.
    kubelet.stop().await.unwrap();
    let all = node.until(|all| all[A10].state == RegistrationState::Unregistered).await;
    assert!(all[A10].failure.is_some());
    kubelet.restart().await.unwrap();
    kubelet.wait_for(offered(2), LIMIT).await.unwrap();
    let all = node.until(|all| all[A10].state == RegistrationState::Watched).await;
    assert_eq!(all[A10].failure, None);
    node.stop().await;
}

#[tokio::test]
async fn makes_its_socket_again_when_it_was_deleted() {
    let node = Node::start();
    let kubelet = StandinKubelet::start(node.kubelet.clone()).await.unwrap();
    kubelet.wait_for(offered(2), LIMIT).await.unwrap();
    fs::remove_file(node.socket()).unwrap();
    let again =
        |state: &StandinState| state.registrations[A10] == 2 && state.watched(A10) && state.healthy(A10) == 2;
    kubelet.wait_for(again, LIMIT).await.unwrap();
    assert!(node.socket().exists());
    node.stop().await;
}

#[tokio::test]
async fn waits_for_a_kubelet_that_starts_later() {
    let mut node = Node::start();
    let all = node.until(|all| all.get(A10).is_some_and(|one| one.failure.is_some())).await;
    assert_eq!(all[A10].failure.as_ref().unwrap().code, "SocketNoDirectory");
    assert!(all[A10].failure.as_ref().unwrap().retryable);
    // The directory alone is not the kubelet.
    fs::create_dir_all(node.kubelet.device_plugins()).unwrap();
    let unreachable = |all: &Registrations| all[A10].failure.as_ref().unwrap().code == "KubeletUnreachable";
    node.until(unreachable).await;
    let kubelet = StandinKubelet::start(node.kubelet.clone()).await.unwrap();
    kubelet.wait_for(offered(2), LIMIT).await.unwrap();
    node.stop().await;
}

/// Another process's plugin for the same resource, as in a rolling upgrade: its stream stays open until `end`.
struct OldPlugin {
    end: CancellationToken,
}

#[tonic::async_trait]
impl DevicePlugin for OldPlugin {
    type ListAndWatchStream =
        Pin<Box<dyn Stream<Item = Result<v1beta1::ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<v1beta1::Empty>,
    ) -> Result<Response<v1beta1::DevicePluginOptions>, Status> {
        Ok(Response::new(v1beta1::DevicePluginOptions::default()))
    }

    async fn list_and_watch(
        &self,
        _: Request<v1beta1::Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let (sender, receiver) = mpsc::channel(1);
        let end = self.end.clone();
        sender.send(Ok(v1beta1::ListAndWatchResponse::default())).await.unwrap();
        // The stream has its own sender, which it drops when it is told to end.
        let ended = tokio_stream::wrappers::ReceiverStream::new(receiver);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            end.cancelled().await;
            drop(sender);
        });
        let kept = ended.map(move |item| {
            let _owned = &tasks;
            item
        });
        Ok(Response::new(Box::pin(kept)))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<v1beta1::PreferredAllocationRequest>,
    ) -> Result<Response<v1beta1::PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("old"))
    }

    async fn allocate(
        &self,
        _: Request<v1beta1::AllocateRequest>,
    ) -> Result<Response<v1beta1::AllocateResponse>, Status> {
        Err(Status::unimplemented("old"))
    }

    async fn pre_start_container(
        &self,
        _: Request<v1beta1::PreStartContainerRequest>,
    ) -> Result<Response<v1beta1::PreStartContainerResponse>, Status> {
        Err(Status::unimplemented("old"))
    }
}

#[tokio::test]
async fn survives_the_kubelet_taking_the_new_client_with_the_old_stream() {
    let dir = tempfile::tempdir().unwrap();
    let root = KubeletDir::new(dir.path());
    let options = StandinOptions { old_stream_takes_new: true, ..StandinOptions::default() };
    let kubelet = StandinKubelet::start_with(root.clone(), options).await.unwrap();
    let end = CancellationToken::new();
    let listener = UnixListener::bind(root.device_plugins().join("old.sock")).unwrap();
    let old = tonic::transport::Server::builder()
        .add_service(DevicePluginServer::new(OldPlugin { end: end.clone() }))
        .serve_with_incoming(UnixListenerStream::new(listener));
    let mut olds = JoinSet::new();
    olds.spawn(old);
    register(&root, "old.sock", A10, PluginOptions::default(), LIMIT).await.unwrap();
    kubelet.wait_for(|state| state.watched(A10), LIMIT).await.unwrap();

    // However loaded the machine: the kubelet's goodbye is waited for.
    let patient = Settings { goodbye: LIMIT, ..settings() };
    let mut node = Node::start_in(dir, "", patient);
    kubelet.wait_for(offered(2), LIMIT).await.unwrap();
    // Now the old stream ends: the kubelet marks the NEW client's devices unhealthy.
    end.cancel();
    let again =
        |state: &StandinState| state.registrations[A10] == 3 && state.watched(A10) && state.healthy(A10) == 2;
    kubelet.wait_for(again, LIMIT).await.unwrap();
    node.until(|all| all[A10].state == RegistrationState::Watched).await;
    // The same fault with vfiod's own old stream, again and again: it ends that first, so once is enough.
    for round in 1..=3 {
        fs::remove_file(node.socket()).unwrap();
        kubelet.wait_for(|state| state.registrations[A10] >= 3 + round, LIMIT).await.unwrap();
        kubelet.wait_for(offered(2), LIMIT).await.unwrap();
        node.until(|all| all[A10].state == RegistrationState::Watched).await;
    }
    // No spin: a change makes its way, and there was no registration that nobody asked for.
    node.advertised.send_modify(|all| {
        all.insert(A10.into(), vec![device(GPU, true)]);
    });
    let state = kubelet.wait_for(offered(1), LIMIT).await.unwrap();
    assert_eq!(state.registrations[A10], 6);
    node.stop().await;
    olds.shutdown().await;
}

/// A kubelet that accepts registrations and then does nothing, as one too old for vfiod's sockets does.
struct Deaf {
    heard: mpsc::UnboundedSender<v1beta1::RegisterRequest>,
}

#[tonic::async_trait]
impl Registration for Deaf {
    async fn register(
        &self,
        request: Request<v1beta1::RegisterRequest>,
    ) -> Result<Response<v1beta1::Empty>, Status> {
        self.heard.send(request.into_inner()).unwrap();
        Ok(Response::new(v1beta1::Empty {}))
    }
}

#[tokio::test]
async fn a_kubelet_that_accepts_and_never_watches_is_registered_with_again() {
    let quick = Settings { first_stream: Duration::from_millis(10), ..settings() };
    let mut node = Node::start_in(tempfile::tempdir().unwrap(), "", quick);
    fs::create_dir_all(node.kubelet.device_plugins()).unwrap();
    let (heard, mut requests) = mpsc::unbounded_channel();
    let listener = UnixListener::bind(node.kubelet.kubelet_socket()).unwrap();
    let deaf = tonic::transport::Server::builder()
        .add_service(RegistrationServer::new(Deaf { heard }))
        .serve_with_incoming(UnixListenerStream::new(listener));
    let mut kubelets = JoinSet::new();
    kubelets.spawn(deaf);
    for _ in 0..3 {
        let request = timeout(LIMIT, requests.recv()).await.unwrap().unwrap();
        assert_eq!(
            request,
            v1beta1::RegisterRequest {
                version: "v1beta1".into(),
                endpoint: "vfiod-GA102GL_A10.sock".into(),
                resource_name: A10.into(),
                options: Some(v1beta1::DevicePluginOptions::default()),
            }
        );
    }
    let no_stream = |all: &Registrations| all[A10].failure.as_ref().is_some_and(|one| one.code == "NoStream");
    node.until(no_stream).await;
    node.stop().await;
    kubelets.shutdown().await;
}

#[tokio::test]
async fn a_withdrawn_resource_is_gone_and_can_come_back() {
    let mut node = Node::start();
    let kubelet = StandinKubelet::start(node.kubelet.clone()).await.unwrap();
    kubelet.wait_for(offered(2), LIMIT).await.unwrap();
    let second = "nvidia.com/GH100_H100_SXM5_80GB";
    node.advertised.send_modify(|all| {
        all.remove(A10);
        all.insert(second.into(), vec![device("0000:18:00.0", true)]);
    });
    node.until(|all| !all.contains_key(A10)).await;
    assert!(!node.socket().exists());
    let state = kubelet.wait_for(|state| state.watched(second) && !state.watched(A10), LIMIT).await.unwrap();
    assert_eq!(state.healthy(A10), 0, "its stream has ended, so the kubelet has marked all unhealthy");
    // There and back within one breath: the old socket is ended before the new one is made.
    for _ in 0..5 {
        node.advertised.send_modify(|all| {
            all.insert(A10.into(), vec![device(GPU, true)]);
        });
        node.advertised.send_modify(|all| {
            all.remove(A10);
        });
    }
    node.advertised.send_modify(|all| {
        all.insert(A10.into(), vec![device(GPU, true)]);
    });
    kubelet.wait_for(offered(1), LIMIT).await.unwrap();
    assert!(kubelet.state().borrow().watched(second));
    node.stop().await;
}

#[tokio::test]
async fn a_name_too_long_for_a_socket_is_hashed() {
    let node = Node::start();
    let kubelet = StandinKubelet::start(node.kubelet.clone()).await.unwrap();
    let depth = 107 - node.kubelet.device_plugins().as_os_str().len();
    assert!(depth > 30 && depth < 90, "the test needs a directory of usual length");
    // As long as Kubernetes lets a resource's name be, in a domain that makes the path too long.
    let long = format!("{}.example.com/{}", "gpu".repeat(10), "X".repeat(63));
    node.advertised.send_modify(|all| {
        all.insert(long.clone(), vec![device("0000:18:00.0", true)]);
    });
    let state = kubelet.wait_for(|state| state.watched(&long), LIMIT).await.unwrap();
    let socket = &state.resources[&long].endpoint;
    assert_eq!(socket.len(), "vfiod-0123456789abcdef.sock".len(), "{socket}");
    node.stop().await;
}

#[tokio::test]
async fn one_resource_that_cannot_be_served_says_why_and_stops_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let root = KubeletDir::new(dir.path());
    let in_the_way = root.device_plugins().join("vfiod-BAD.sock");
    fs::create_dir_all(&in_the_way).unwrap();
    let mut node = Node::start_in(dir, "", settings());
    node.advertised.send_modify(|all| {
        all.insert("nvidia.com/BAD".into(), vec![]);
        all.insert("kubernetes.io/REFUSED".into(), vec![]);
    });
    let kubelet = StandinKubelet::start(node.kubelet.clone()).await.unwrap();
    kubelet.wait_for(offered(2), LIMIT).await.unwrap();
    let code = |all: &Registrations, resource: &str| {
        all.get(resource).and_then(|one| one.failure.as_ref()).map(|failure| failure.code)
    };
    let all = node
        .until(|all| {
            code(all, "nvidia.com/BAD").is_some_and(|code| code == "SocketInTheWay")
                && code(all, "kubernetes.io/REFUSED").is_some_and(|code| code == "RegistrationRefused")
        })
        .await;
    assert!(!all["nvidia.com/BAD"].failure.as_ref().unwrap().retryable);
    // The cure works without a restart.
    fs::remove_dir(&in_the_way).unwrap();
    kubelet.wait_for(|state| state.watched("nvidia.com/BAD"), LIMIT).await.unwrap();
    node.stop().await;
}

#[tokio::test]
async fn a_directory_too_deep_for_any_socket_is_an_error_of_its_own() {
    let mut node = Node::start_in(tempfile::tempdir().unwrap(), &"d".repeat(100), settings());
    fs::create_dir_all(node.kubelet.device_plugins()).unwrap();
    let all = node.until(|all| all.get(A10).is_some_and(|one| one.failure.is_some())).await;
    let failure = all[A10].failure.clone().unwrap();
    assert_eq!((failure.code.as_str(), failure.retryable), ("SocketPathTooLong", false));
    node.stop().await;
}

#[tokio::test]
async fn stop_ends_streams_and_connections_of_others_too() {
    let node = Node::start();
    let kubelet = StandinKubelet::start(node.kubelet.clone()).await.unwrap();
    kubelet.wait_for(offered(2), LIMIT).await.unwrap();
    // A peer that neither reads nor closes must not keep vfiod from ending.
    let mut client = node.client().await;
    let mut stream = client.list_and_watch(v1beta1::Empty {}).await.unwrap().into_inner();
    let raw = tokio::net::UnixStream::connect(node.socket()).await.unwrap();
    timeout(LIMIT, stream.message()).await.unwrap().unwrap().unwrap();
    node.stop().await;
    assert!(timeout(LIMIT, stream.message()).await.unwrap().unwrap().is_none(), "the stream ended in order");
    kubelet.wait_for(|state| !state.watched(A10), LIMIT).await.unwrap();
    drop(raw);
}

#[tokio::test]
async fn pod_resources_not_known_is_not_free() {
    let dir = tempfile::tempdir().unwrap();
    let root = KubeletDir::new(dir.path());
    let unknown = |answer: Result<PodResources, PodResourcesError>| answer.unwrap_err().code();
    let absent = || async { unknown(list(&root, LIMIT).await) };
    assert_eq!(absent().await, "PodResourcesAbsent");
    let options =
        StandinOptions { pod_resources: PodResourcesMode::NoDirectory, ..StandinOptions::default() };
    let mut kubelet = StandinKubelet::start_with(root.clone(), options).await.unwrap();
    assert_eq!(absent().await, "PodResourcesAbsent");
    kubelet.set_pod_resources(PodResourcesMode::NoSocket).await.unwrap();
    assert_eq!(unknown(list(&root, LIMIT).await), "PodResourcesUnreachable");
    kubelet.set_pod_resources(PodResourcesMode::Fails(Code::ResourceExhausted)).await.unwrap();
    assert_eq!(unknown(list(&root, LIMIT).await), "PodResourcesRefused");
    kubelet.set_pod_resources(PodResourcesMode::Hangs).await.unwrap();
    assert_eq!(unknown(list(&root, Duration::from_millis(50)).await), "PodResourcesDeadline");
    kubelet.set_pod_resources(PodResourcesMode::Answers).await.unwrap();
    assert_eq!(list(&root, LIMIT).await.unwrap(), PodResources::default());
    kubelet.stop().await.unwrap();
    assert_eq!(unknown(list(&root, LIMIT).await), "PodResourcesUnreachable");
    // A socket file that nobody serves.
    drop(StdUnixListener::bind(root.pod_resources_socket()).unwrap());
    assert_eq!(unknown(list(&root, LIMIT).await), "PodResourcesUnreachable");
    // A plain file where the directory should be.
    fs::remove_dir_all(root.pod_resources_dir()).unwrap();
    symlink("nowhere", root.pod_resources_dir()).unwrap();
    assert_eq!(unknown(list(&root, LIMIT).await), "PodResourcesUnreachable");
}
