//! An agent at work on a simulated node, with a stand-in kubelet: in this process, or as the real binary.

use std::{
    fs::{File, OpenOptions},
    io,
    path::PathBuf,
    process::{Child, Stdio},
    time::{Duration, Instant},
};

use decide::{
    consumer::Consumer,
    names::Naming,
    wish::{Desired, Wish, WorkloadType},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use tokio::time::{sleep, timeout};
use vfio::{
    child::ChildCommand,
    pci::Address,
    sim::{Profile, Simulation},
    write::Write,
};
use vfiod::{
    agent::{Service, Settings, Tuning},
    cli::{KERNEL_READER, KERNEL_WRITER},
    device_plugin,
    journal::Store,
    kubelet::{
        KubeletDir,
        proto::v1beta1::{self, device_plugin_client::DevicePluginClient},
    },
    pods::IfAbsent,
    standin::{PodName, StandinKubelet, StandinOptions, StandinState},
    status::{self, Status},
    uds::dial::dial,
};

use super::{Node, address, function, vfiod};

/// How long anything may take before a test says that it does not come. Only a failure gets there.
pub const LIMIT: Duration = Duration::from_secs(60);

/// How often is looked at what cannot be waited for.
const LOOK: Duration = Duration::from_millis(10);

pub const A10: &str = "nvidia.com/GA102GL_A10";
pub const H100: &str = "nvidia.com/GH100_H100_SXM5_80GB";

/// Looks until there is an answer.
pub async fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + LIMIT;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < until, "{what} did not come within {LIMIT:?}");
        sleep(LOOK).await;
    }
}

pub fn desired(workload_type: WorkloadType) -> Desired {
    Desired { workload_type, consumer: Consumer::Kubevirt, adopt_boot_bound: false }
}

pub fn wish(workload_type: WorkloadType) -> Wish {
    Wish::Clear(desired(workload_type))
}

pub fn pod(name: &str) -> PodName {
    PodName::new("tenant", name)
}

/// Three A10: two in one IOMMU group, one alone.
pub fn shared_group() -> Profile {
    let mut profile = Profile::four_function_card();
    profile.name = "shared-group".to_owned();
    profile.functions = vec![
        function("0000:17:00.0", 0x2236, 0x03_02_00, Some("nvidia"), 25),
        function("0000:18:00.0", 0x2236, 0x03_02_00, Some("nvidia"), 25),
        function("0000:65:00.0", 0x2236, 0x03_02_00, Some("nvidia"), 60),
    ];
    profile
}

/// Three A10, each in a group of its own: 25, 26 and 60.
pub fn three_groups() -> Profile {
    let mut profile = shared_group();
    profile.name = "three-groups".to_owned();
    profile.functions[1].group = Some(26);
    profile
}

impl Node {
    pub fn kubelet_dir(&self) -> KubeletDir {
        KubeletDir::new(self.dir.path().join("var/lib/kubelet"))
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("run/vfiod/vfiod.sock")
    }

    pub async fn kubelet(&self) -> StandinKubelet {
        self.kubelet_with(StandinOptions::default()).await
    }

    pub async fn kubelet_with(&self, options: StandinOptions) -> StandinKubelet {
        StandinKubelet::start_with(self.kubelet_dir(), options).await.unwrap()
    }

    /// The writes to one function since the first `after` writes of the node.
    pub fn writes_to(&self, to: &str, after: usize) -> Vec<Write> {
        let writes = self.sim.writes().unwrap().into_iter().skip(after);
        writes.filter(|write| write.function() == Some(address(to))).collect()
    }

    pub fn on(&self, function: &str) -> Option<String> {
        self.driver(address(function))
    }

    /// Asks the plugin of `resource` itself, whatever the kubelet would let through.
    pub async fn ask(
        &self,
        kubelet: &StandinKubelet,
        resource: &str,
        ids: &[&str],
    ) -> Result<v1beta1::ContainerAllocateResponse, tonic::Status> {
        let endpoint = kubelet.state().borrow().resources[resource].endpoint.clone();
        let socket = self.kubelet_dir().device_plugins().join(endpoint);
        let channel = dial(&socket, LIMIT).await.unwrap();
        let request = v1beta1::AllocateRequest {
            container_requests: vec![v1beta1::ContainerAllocateRequest {
                device_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
            }],
        };
        let answer = timeout(LIMIT, DevicePluginClient::new(channel).allocate(request)).await.unwrap();
        answer.map(|answer| answer.into_inner().container_responses.remove(0))
    }

    /// The refusal to give out `ids`, as code and text.
    pub async fn refused(
        &self,
        kubelet: &StandinKubelet,
        resource: &str,
        ids: &[&str],
    ) -> (tonic::Code, String) {
        let status = self.ask(kubelet, resource, ids).await.unwrap_err();
        (status.code(), status.message().to_owned())
    }

    /// What tells whether a file was written again: inode, time and content.
    pub fn stamp(&self, below: &str) -> (u64, i64, i64, Vec<u8>) {
        use std::os::unix::fs::MetadataExt;
        let path = self.dir.path().join(below);
        let meta = std::fs::metadata(&path).unwrap();
        (meta.ino(), meta.mtime(), meta.mtime_nsec(), std::fs::read(&path).unwrap())
    }

    /// The stamps of every `driver_override`.
    pub fn override_stamps(&self) -> Vec<(u64, i64, i64, Vec<u8>)> {
        let addresses: Vec<Address> = self.bindings().into_keys().collect();
        addresses.iter().map(|a| self.stamp(&format!("sys/bus/pci/devices/{a}/driver_override"))).collect()
    }

    /// The writers of this node that live, by process id.
    pub fn writers(&self) -> Vec<u32> {
        self.children(KERNEL_WRITER)
    }

    /// The readers.
    pub fn readers(&self) -> Vec<u32> {
        self.children(KERNEL_READER)
    }

    fn children(&self, subcommand: &str) -> Vec<u32> {
        let root = self.dir.path().to_str().unwrap();
        let mine = |pid: &u32| {
            let cmdline = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let words: Vec<_> = cmdline.split(|byte| *byte == 0).collect();
            words.get(1) == Some(&subcommand.as_bytes()) && words.contains(&root.as_bytes())
        };
        let names = std::fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names.filter_map(|name| name.parse().ok()).filter(mine).collect()
    }
}

/// What the kubelet says of one device.
pub fn health(state: &StandinState, resource: &str, id: &str) -> Option<bool> {
    Some(state.resources.get(resource)?.devices.get(id)?.healthy)
}

/// How this test's binary does the work of a child.
pub fn child(subcommand: &str) -> ChildCommand {
    ChildCommand {
        name: "vfiod".to_owned(),
        program: vfiod(),
        arguments: vec![subcommand.to_owned()],
        deadline: LIMIT,
    }
}

/// The times of an agent in a test: what waits for others is looked at again soon.
pub fn settings(node: &Node) -> Settings {
    Settings {
        host: node.sim.host().clone(),
        kubelet: node.kubelet_dir(),
        if_absent: IfAbsent::Unknown,
        store: Store::new(&node.dir.path().join("var/lib/vfiod")),
        writer: child(KERNEL_WRITER),
        reader: child(KERNEL_READER),
        tuning: Tuning {
            naming: Naming::default(),
            write_deadline: LIMIT,
            hold_grace: LIMIT,
            rescan: Duration::from_millis(100),
            blocked_retry: Duration::from_millis(50),
            pod_resources_deadline: LIMIT,
            pods_silence: Duration::from_secs(10),
            flap_pause: Duration::from_millis(10),
        },
    }
}

/// The agent in this process, so that every setting is at hand.
pub struct Stage {
    pub node: Node,
    pub kubelet: StandinKubelet,
    pub service: Service,
}

impl Stage {
    pub async fn start(profile: &Profile, first: WorkloadType) -> Self {
        Self::start_with(Node::new(profile), first, StandinOptions::default(), |_| {}).await
    }

    pub async fn start_with(
        node: Node,
        first: WorkloadType,
        options: StandinOptions,
        change: impl FnOnce(&mut Settings),
    ) -> Self {
        std::fs::create_dir_all(node.dir.path().join("var/lib/vfiod")).unwrap();
        let kubelet = node.kubelet_with(options).await;
        let mut settings = settings(&node);
        change(&mut settings);
        let plugins = device_plugin::Settings::default();
        let service = Service::start(settings, plugins, desired(first), &node.socket()).unwrap();
        Self { node, kubelet, service }
    }

    /// Ends the agent and starts another, with the same wish.
    pub async fn again(self, change: impl FnOnce(&mut Settings)) -> Self {
        let Self { node, kubelet, service } = self;
        let Wish::Clear(present) = service.wish.borrow().clone() else { panic!("an unclear wish") };
        timeout(LIMIT, service.stop()).await.unwrap();
        let mut settings = settings(&node);
        change(&mut settings);
        let plugins = device_plugin::Settings::default();
        let service = Service::start(settings, plugins, present, &node.socket()).unwrap();
        Self { node, kubelet, service }
    }

    /// An agent that has brought its node to vm-passthrough.
    pub async fn bound(profile: &Profile, change: impl FnOnce(&mut Settings)) -> Self {
        let (node, options) = (Node::new(profile), StandinOptions::default());
        let mut stage = Self::start_with(node, WorkloadType::VmPassthrough, options, change).await;
        stage.until("all bound", |status| status.state == status::State::Ready).await;
        let offered = stage.service.status.borrow().offers.len();
        let all = move |state: &StandinState| {
            state.resources.keys().map(|resource| state.healthy(resource)).sum::<usize>() == offered
        };
        stage.kubelet.wait_for(all, LIMIT).await.unwrap();
        stage
    }

    pub fn wish(&self, workload_type: WorkloadType) {
        self.service.wish.send_replace(wish(workload_type));
    }

    pub async fn until(&mut self, what: &str, reached: impl FnMut(&Status) -> bool) -> Status {
        match timeout(LIMIT, self.service.status.wait_for(reached)).await {
            Ok(Ok(status)) => return status.clone(),
            Ok(Err(_)) => panic!("the agent ended before: {what}"),
            Err(_) => {}
        }
        panic!("{what} did not come: {:#?}", self.service.status.borrow().clone())
    }

    /// Until the agent has made `count` more whole passes: what it does by itself, it has done by then.
    pub async fn passes(&mut self, count: u64) {
        let now = self.service.status.borrow().passes;
        self.until("more passes", |status| status.passes > now + count).await;
    }

    pub async fn healthy(&self, resource: &str, count: usize) -> StandinState {
        let named = resource.to_owned();
        self.kubelet.wait_for(move |state| state.healthy(&named) == count, LIMIT).await.unwrap()
    }

    /// Until the kubelet says that `id` is healthy, or not.
    pub async fn health(&self, resource: &str, id: &str, wanted: bool) {
        let (resource, id) = (resource.to_owned(), id.to_owned());
        self.kubelet
            .wait_for(move |state| health(state, &resource, &id) == Some(wanted), LIMIT)
            .await
            .unwrap();
    }

    pub async fn end(self) -> Node {
        let Self { node, kubelet, service } = self;
        node.sim.set_faults(&[]).unwrap();
        timeout(LIMIT, service.stop()).await.unwrap();
        drop(kubelet);
        node
    }
}

/// The codes of the reasons of one group.
pub fn group_codes(status: &Status, group: u32) -> Vec<&'static str> {
    let groups = status.groups.iter().filter(|found| found.group == Some(group));
    groups.flat_map(|found| found.reasons.iter().map(|reason| reason.code.as_str())).collect()
}

/// The text of the reasons of one group.
pub fn group_text(status: &Status, group: u32) -> String {
    let groups = status.groups.iter().filter(|found| found.group == Some(group));
    groups.flat_map(|found| found.reasons.iter().map(|reason| format!("{}\n", reason.message))).collect()
}

/// The codes of the reasons against one offer.
pub fn offer_codes(status: &Status, id: &str) -> Vec<&'static str> {
    let offers = status.offers.iter().filter(|offer| offer.id == address(id).into());
    offers.flat_map(|offer| offer.reasons.iter().map(|reason| reason.code.as_str())).collect()
}

/// The real agent, as a process.
pub struct AgentProcess {
    child: Child,
    log: PathBuf,
    socket: PathBuf,
}

impl Node {
    /// Starts the binary with the shortest times that a config file takes. `config` is added to the file.
    pub fn agent(&self, config: &str) -> AgentProcess {
        self.configure(config);
        self.agent_with(&["--no-kubernetes", "--config", self.config().to_str().unwrap()])
    }

    pub fn config(&self) -> PathBuf {
        self.dir.path().join("config.yaml")
    }

    pub fn configure(&self, config: &str) {
        let text =
            format!("rescanSeconds: 1\nblockedRetrySeconds: 1\npodResourcesDeadlineSeconds: 30\n{config}\n");
        vfiod::atomic_file::replace(&self.config(), text.as_bytes(), 0o600).unwrap();
    }

    #[expect(clippy::disallowed_methods, reason = "a child's log, which outlives the child")]
    pub fn agent_with(&self, arguments: &[&str]) -> AgentProcess {
        let log = self.dir.path().join("agent.log");
        let file: File = OpenOptions::new().create(true).append(true).open(&log).unwrap();
        let mut command = self.command(&[&["agent"], arguments].concat());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
        AgentProcess { child: command.spawn().unwrap(), log, socket: self.socket() }
    }
}

impl AgentProcess {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.pid()).unwrap());
        kill(pid, signal).unwrap();
    }

    /// Its status, or nothing while it does not answer. An answer of an agent before this one is none.
    pub async fn status(&self) -> Option<Value> {
        status::ask(&self.socket).await.ok().filter(|status| status["pid"] == self.pid())
    }

    pub async fn until(&mut self, what: &str, mut reached: impl FnMut(&Value) -> bool) -> Value {
        let until = Instant::now() + LIMIT;
        let mut last = None;
        while Instant::now() < until {
            match self.status().await {
                Some(status) if reached(&status) => return status,
                Some(status) => last = Some(status),
                None => {}
            }
            assert_eq!(
                self.child.try_wait().unwrap(),
                None,
                "the agent ended before: {what}\n{}",
                self.log()
            );
            sleep(LOOK).await;
        }
        panic!("{what} did not come: {last:#?}\n{}", self.log())
    }

    pub async fn ready(&mut self) -> Value {
        self.until("ready", |status| status["state"] == "Ready").await
    }

    /// Until `count` more whole passes are made.
    pub async fn passes(&mut self, count: u64) -> Value {
        let now = self.until("a status", |_| true).await["passes"].as_u64().unwrap();
        self.until("more passes", |status| status["passes"].as_u64().unwrap() > now + count).await
    }

    pub fn kill(mut self) {
        self.signal(Signal::SIGKILL);
        self.child.wait().unwrap();
    }

    /// Waits for its end: the exit code, none for a signal.
    pub async fn ended(&mut self) -> Option<i32> {
        let child = &mut self.child;
        eventually("the agent's end", || child.try_wait().unwrap()).await.code()
    }

    pub async fn terminate(mut self) -> (Option<i32>, String) {
        self.signal(Signal::SIGTERM);
        (self.ended().await, self.log())
    }
}

impl Drop for AgentProcess {
    fn drop(&mut self) {
        // One that has ended is waited for already; then both fail and nothing is left to do.
        let _: io::Result<()> = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The codes of a group's reasons in a status as JSON.
pub fn json_codes(status: &Value, group: u32) -> Vec<String> {
    let groups = status["groups"].as_array().unwrap().iter().filter(|found| found["group"] == group);
    groups
        .flat_map(|found| found["reasons"].as_array().unwrap().iter())
        .map(|reason| reason["code"].as_str().unwrap().to_owned())
        .collect()
}

/// Whether the group is as desired in a status as JSON.
pub fn json_right(status: &Value, group: u32) -> bool {
    status["groups"].as_array().unwrap().iter().any(|found| found["group"] == group && found["right"] == true)
}

/// The node opened by another handle, for threads.
pub fn reopen(node: &Node) -> Simulation {
    Simulation::open(node.dir.path()).unwrap()
}
