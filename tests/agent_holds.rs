//! What is in use, as the agent sees it: answered Allocates, pods, processes; and that what is not known counts as in use.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "test code")]

mod node;

use std::{collections::BTreeSet, fs, time::Duration};

use decide::{
    grant::Grant,
    wish::WorkloadType::{Container, VmPassthrough},
};
use node::{
    Node,
    stage::{
        A10, LIMIT, Stage, eventually, group_codes, group_text, offer_codes, pod, shared_group, three_groups,
    },
};
use serde_json::json;
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use tonic::Code;
use vfio::sim::Profile;
use vfiod::{
    device_plugin::{Advertised, AllocateCall, Device, DevicePlugins, Registrations},
    pods::IfAbsent,
    standin::{PodResourcesMode, StandinOptions, Want},
    status::{State, Status},
};

const GPU: &str = "0000:17:00.0";
const MATE: &str = "0000:18:00.0";
const ALONE: &str = "0000:65:00.0";
const VMM: u32 = 4242;

/// A hold ends when it has been seen, or after this.
const SOON: Duration = Duration::from_secs(1);

fn ids(ids: &[&str]) -> Want {
    Want::Ids(ids.iter().map(|id| (*id).to_owned()).collect())
}

fn holds(status: &Status) -> Vec<String> {
    status.holds.iter().map(ToString::to_string).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_goes_to_one_pod() {
    let mut stage = Stage::bound(&shared_group(), |_| {}).await;
    let one = pod("one");
    stage.kubelet.allocate(&one, "compute", A10, ids(&[GPU])).await.unwrap();
    stage.health(A10, MATE, false).await;
    let status = stage.until("the mate's reason", |status| !offer_codes(status, MATE).is_empty()).await;
    assert_eq!(offer_codes(&status, MATE), ["GroupHeld"]);
    assert_eq!((offer_codes(&status, GPU), offer_codes(&status, ALONE)), (vec![], vec![]));
    let (code, text) = stage.node.refused(&stage.kubelet, A10, &[MATE]).await;
    assert!(code == Code::FailedPrecondition && text.contains("[GroupHeld]"), "{code}: {text}");
    // Together with a device that is free it is refused as well, and that one stays free.
    let (_, text) = stage.node.refused(&stage.kubelet, A10, &[ALONE, MATE]).await;
    assert!(text.contains("[GroupHeld]"), "{text}");
    assert_eq!(holds(&stage.service.status.borrow()), [GPU]);

    stage.passes(2).await;
    stage.kubelet.pod_gone(&one);
    stage.healthy(A10, 3).await;
    let given = stage.kubelet.allocate(&pod("both"), "compute", A10, ids(&[MATE, GPU])).await.unwrap();
    assert_eq!(given.env["PCI_RESOURCE_NVIDIA_COM_GA102GL_A10"], format!("{GPU},{MATE}"));
    let paths: Vec<_> = given.nodes.iter().map(|node| node.0.as_str()).collect();
    assert_eq!(paths, ["/dev/vfio/vfio", "/dev/vfio/25"]);
    stage.passes(2).await;
    // What a pod has stays healthy: the whole group is its own.
    stage.healthy(A10, 3).await;
    let before = stage.node.writes();
    stage.kubelet.pod_gone(&pod("both"));
    stage.until("both free", |status| status.holds.is_empty()).await;
    stage.healthy(A10, 3).await;
    assert_eq!(stage.node.writes(), before);
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_the_kubelet_never_shows_holds_for_the_grace() {
    // As long as the grace lasts ...
    let mut stage = Stage::bound(&three_groups(), |_| {}).await;
    stage.node.ask(&stage.kubelet, A10, &[GPU]).await.unwrap();
    let (code, text) = stage.node.refused(&stage.kubelet, A10, &[GPU]).await;
    assert!(code == Code::FailedPrecondition && text.contains("[InUse]"), "{code}: {text}");
    let before = stage.node.writes();
    stage.wish(Container);
    let status = stage
        .until("only the hold is left", |status| {
            status.state == State::Blocked && status.groups.iter().filter(|group| !group.right).count() == 1
        })
        .await;
    stage.passes(5).await;
    assert_eq!(stage.node.writes_to(GPU, before), []);
    assert_eq!(group_codes(&status, 25), ["InUse"]);
    assert!(group_text(&status, 25).contains("was given out under nvidia.com/GA102GL_A10"));
    stage.health(A10, GPU, true).await;
    stage.end().await;

    // ... and not longer.
    let mut stage = Stage::bound(&three_groups(), |settings| settings.tuning.hold_grace = SOON).await;
    stage.node.ask(&stage.kubelet, A10, &[GPU]).await.unwrap();
    assert_eq!(holds(&stage.service.status.borrow()), [GPU]);
    stage.until("the end of the grace", |status| status.holds.is_empty()).await;
    stage.node.ask(&stage.kubelet, A10, &[GPU]).await.unwrap();
    // A process that has the group open keeps it beyond the grace.
    stage.node.sim.start_vmm(VMM, "qemu-kvm", 25).unwrap();
    let opened = tokio::time::Instant::now();
    let mut later = 0;
    while opened.elapsed() < SOON * 2 {
        stage.passes(1).await;
        assert_eq!(holds(&stage.service.status.borrow()), [GPU]);
        later += 1;
    }
    assert!(later > 0);
    stage.node.sim.end_process(VMM).unwrap();
    stage.until("the end of the hold", |status| status.holds.is_empty()).await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_that_was_shown_ends_with_pod_and_process() {
    let mut stage = Stage::bound(&three_groups(), |_| {}).await;
    let vm = pod("vm");
    for process in [false, true] {
        stage.kubelet.allocate(&vm, "compute", A10, ids(&[GPU])).await.unwrap();
        if process {
            stage.node.sim.start_vmm(VMM, "qemu-kvm", 25).unwrap();
        }
        stage.passes(2).await;
        stage.kubelet.pod_gone(&vm);
        if process {
            stage.passes(3).await;
            assert_eq!(holds(&stage.service.status.borrow()), [GPU]);
            stage.node.sim.end_process(VMM).unwrap();
        }
        // The grace is far away: it is not what ends it.
        stage.until("the end of the hold", |status| status.holds.is_empty()).await;
    }
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_is_looked_after_though_the_next_rescan_is_far_away() {
    let quiet = |settings: &mut vfiod::agent::Settings| settings.tuning.rescan = Duration::from_secs(3600);
    let mut stage = Stage::bound(&three_groups(), quiet).await;
    stage.kubelet.allocate(&pod("vm"), "compute", A10, ids(&[GPU])).await.unwrap();
    stage.passes(2).await;
    stage.kubelet.pod_gone(&pod("vm"));
    stage.until("the end of the hold", |status| status.holds.is_empty()).await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pods_next_container_takes_over_what_its_init_container_had() {
    let mut stage = Stage::bound(&three_groups(), |_| {}).await;
    stage.kubelet.allocate(&pod("vm"), "init", A10, ids(&[GPU])).await.unwrap();
    // The kubelet lists it for one pod, and nobody has opened it: the same pod asks again.
    stage.node.ask(&stage.kubelet, A10, &[GPU]).await.unwrap();
    stage.node.sim.start_vmm(VMM, "qemu-kvm", 25).unwrap();
    let (code, text) = stage.node.refused(&stage.kubelet, A10, &[GPU]).await;
    assert!(code == Code::FailedPrecondition && text.contains("4242 (qemu-kvm)"), "{code}: {text}");
    stage.node.sim.end_process(VMM).unwrap();
    // While the kubelet says nothing, it may be anybody's.
    stage.kubelet.set_pod_resources(PodResourcesMode::Fails(Code::Internal)).await.unwrap();
    let (code, text) = stage.node.refused(&stage.kubelet, A10, &[GPU]).await;
    assert!(code == Code::FailedPrecondition && text.contains("[InUse]"), "{code}: {text}");
    stage.passes(1).await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_makes_no_sense_is_refused() {
    let stage = Stage::bound(&three_groups(), |_| {}).await;
    for (ids, code) in [
        (&[][..], Code::InvalidArgument),
        (&[GPU, GPU], Code::InvalidArgument),
        (&["0000:99:00.0"], Code::NotFound),
        (&["25"], Code::NotFound),
        (&[GPU, "0000:99:00.0"], Code::NotFound),
        // Another spelling of an address is no id that was offered.
        (&["17:00.0"], Code::NotFound),
    ] {
        let (found, text) = stage.node.refused(&stage.kubelet, A10, ids).await;
        assert_eq!(found, code, "{ids:?}: {text}");
    }
    assert_eq!(holds(&stage.service.status.borrow()), [""; 0]);
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_survives_a_killed_agent() {
    let node = Node::new(&three_groups());
    let kubelet = node.kubelet().await;
    let mut agent = node.agent("workloadType: vm-passthrough");
    agent.ready().await;
    kubelet.wait_for(|state| state.healthy(A10) == 3, LIMIT).await.unwrap();
    node.ask(&kubelet, A10, &[GPU]).await.unwrap();
    // Whoever has been answered is remembered already.
    agent.kill();
    assert_eq!(node.journal()["holds"][GPU]["resource"], A10);
    let mut agent = node.agent("workloadType: vm-passthrough");
    agent.ready().await;
    kubelet.wait_for(|state| state.healthy(A10) == 3, LIMIT).await.unwrap();
    let (code, text) = node.refused(&kubelet, A10, &[GPU]).await;
    assert!(code == Code::FailedPrecondition && text.contains("[InUse]"), "{code}: {text}");
    agent.kill();

    let before = node.writes();
    let mut agent = node.agent("workloadType: container");
    agent.until("blocked", |status| status["state"] == "Blocked").await;
    let status = agent.passes(2).await;
    assert_eq!(status["holds"], json!([GPU]));
    assert_eq!(node.writes_to(GPU, before), []);
    assert_eq!(node.on(MATE).as_deref(), Some("nvidia"));
    agent.kill();
    // With a shorter grace, counted from the answer, it is over.
    let mut agent = node.agent("workloadType: container\nholdGraceSeconds: 1");
    agent.ready().await;
    assert_eq!(node.on(GPU).as_deref(), Some("nvidia"));
    assert_eq!(node.journal()["holds"], json!({}));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_of_the_node_does_not_make_a_held_device_free() {
    let node = Node::new(&three_groups());
    let kubelet = node.kubelet().await;
    let mut agent = node.agent("workloadType: vm-passthrough");
    agent.ready().await;
    kubelet.wait_for(|state| state.healthy(A10) == 3, LIMIT).await.unwrap();
    kubelet.allocate(&pod("vm"), "compute", A10, ids(&[GPU])).await.unwrap();
    agent.kill();
    node.sim.reboot().unwrap();
    let before = node.writes();
    let mut agent = node.agent("workloadType: vm-passthrough");
    agent
        .until("the others", |status| {
            node::stage::json_right(status, 26) && node::stage::json_right(status, 60)
        })
        .await;
    let status = agent.passes(1).await;
    assert_eq!(status["state"], "Blocked");
    assert_eq!(node.writes_to(GPU, before), []);
    kubelet.pod_gone(&pod("vm"));
    agent.ready().await;
    assert_eq!(node.on(GPU).as_deref(), Some("vfio-pci"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_journal_that_was_lost_is_made_up_for_by_what_the_kubelet_lists() {
    let node = Node::new(&three_groups());
    let mut kubelet = node.kubelet().await;
    let mut agent = node.agent("workloadType: vm-passthrough");
    agent.ready().await;
    kubelet.wait_for(|state| state.healthy(A10) == 3, LIMIT).await.unwrap();
    kubelet.allocate(&pod("vm"), "compute", A10, ids(&[GPU])).await.unwrap();
    agent.kill();
    fs::remove_file(node.dir.path().join("var/lib/vfiod/journal.json")).unwrap();
    let mut agent = node.agent("workloadType: vm-passthrough");
    agent.until("the hold", |status| status["holds"] == json!([GPU])).await;
    eventually("the journal", || (node.journal()["holds"][GPU]["shown"] == true).then_some(())).await;
    // Now it is a hold, though the kubelet falls silent.
    kubelet.set_pod_resources(PodResourcesMode::NoSocket).await.unwrap();
    agent.passes(1).await;
    let (code, _) = node.refused(&kubelet, A10, &[GPU]).await;
    assert_eq!(code, Code::FailedPrecondition);
    kubelet.pod_gone(&pod("vm"));
    kubelet.set_pod_resources(PodResourcesMode::Answers).await.unwrap();
    agent.until("the end of the hold", |status| status["holds"] == json!([])).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_kubelet_does_not_say_what_pods_have_nothing_is_written() {
    let unknown = [
        PodResourcesMode::NoSocket,
        PodResourcesMode::Fails(Code::ResourceExhausted),
        PodResourcesMode::Fails(Code::Unimplemented),
        PodResourcesMode::Hangs,
    ];
    for mode in unknown {
        let options = StandinOptions { pod_resources: mode, ..StandinOptions::default() };
        let quick = |settings: &mut vfiod::agent::Settings| {
            settings.tuning.pod_resources_deadline = Duration::from_millis(200);
        };
        let node = Node::new(&three_groups());
        let mut stage = Stage::start_with(node, VmPassthrough, options, quick).await;
        let status = stage.until("blocked", |status| status.state == State::Blocked).await;
        assert!(group_text(&status, 60).contains("is not known"), "{mode:?}: {}", group_text(&status, 60));
        stage.passes(3).await;
        assert_eq!(stage.node.writes(), 0, "{mode:?}");
        assert_eq!(stage.kubelet.state().borrow().healthy(A10), 0, "{mode:?}");

        // A time-out short for the machine would be no answer either.
        stage.kubelet.set_pod_resources(PodResourcesMode::Answers).await.unwrap();
        stage.until("bound", |status| status.state == State::Ready).await;
        stage.healthy(A10, 3).await;
        let bound = stage.node.writes();
        stage.kubelet.set_pod_resources(mode).await.unwrap();
        stage.passes(3).await;
        // What is offered stays, as nothing speaks against it.
        assert_eq!(stage.kubelet.state().borrow().healthy(A10), 3, "{mode:?}");
        stage.wish(Container);
        stage
            .until("blocked", |status| status.state == State::Blocked && status.workload_type == Container)
            .await;
        stage.passes(3).await;
        assert_eq!(stage.node.writes(), bound, "{mode:?}");
        stage.kubelet.set_pod_resources(PodResourcesMode::Answers).await.unwrap();
        stage
            .until("given back", |status| status.workload_type == Container && status.state == State::Ready)
            .await;
        stage.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_kubernetes_a_missing_directory_means_no_pods_and_else_that_nothing_is_known() {
    let options =
        StandinOptions { pod_resources: PodResourcesMode::NoDirectory, ..StandinOptions::default() };
    let node = Node::new(&three_groups());
    let mut stage = Stage::start_with(node, VmPassthrough, options.clone(), |_| {}).await;
    let status = stage.until("blocked", |status| status.state == State::Blocked).await;
    assert!(status.reasons.iter().any(|reason| reason.code == "PodResourcesUnknown"), "{status:?}");
    assert_eq!(stage.end().await.writes(), 0);

    let soon = |settings: &mut vfiod::agent::Settings| {
        settings.tuning.hold_grace = SOON;
        settings.if_absent = IfAbsent::NoPods;
    };
    let mut stage = Stage::start_with(Node::new(&three_groups()), VmPassthrough, options, soon).await;
    stage.until("bound", |status| status.state == State::Ready).await;
    stage.healthy(A10, 3).await;
    stage.node.ask(&stage.kubelet, A10, &[GPU]).await.unwrap();
    stage.wish(Container);
    stage
        .until("given back", |status| status.workload_type == Container && status.state == State::Ready)
        .await;
    assert_eq!(stage.node.on(GPU).as_deref(), Some("nvidia"));
    stage.end().await;
}

/// A device plugin of another program: one device, and everybody gets it.
struct OtherPlugin {
    stop: CancellationToken,
    tasks: JoinSet<()>,
    _advertised: watch::Sender<Advertised>,
}

impl OtherPlugin {
    fn start(node: &Node, resource: &str, id: &str) -> Self {
        let device = Device { id: id.to_owned(), healthy: true, numa_node: None };
        let (advertised, seen) = watch::channel(Advertised::from([(resource.to_owned(), vec![device])]));
        let (allocate, mut calls) = mpsc::channel::<AllocateCall>(1);
        let stop = CancellationToken::new();
        let plugins = DevicePlugins {
            settings: vfiod::device_plugin::Settings::default(),
            kubelet: node.kubelet_dir(),
            advertised: seen,
            allocate,
            registrations: watch::Sender::new(Registrations::new()),
            stop: stop.clone(),
        };
        let mut tasks = JoinSet::new();
        tasks.spawn(plugins.run());
        tasks.spawn(async move {
            while let Some(call) = calls.recv().await {
                let grants = call.containers.iter().map(|_| Grant::default()).collect();
                call.reply.send(Ok(grants)).unwrap();
            }
        });
        Self { stop, tasks, _advertised: advertised }
    }

    async fn end(mut self) {
        self.stop.cancel();
        let all = async { while self.tasks.join_next().await.is_some() {} };
        timeout(LIMIT, all).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_of_another_program_blocks_what_it_may_have() {
    // resource, id, and the groups that it may have.
    let every = &[25, 26, 60][..];
    let cases = [
        ("nvidia.com/gpu", "GPU-5f9a8c1e-0000-4000-8000-000000000001", every),
        ("nvidia.com/mig-1g.10gb", "MIG-GPU-5f9a8c1e/1/0", every),
        // An address, but none of this node.
        ("nvidia.com/gpu", "0000:99:00.0", every),
        ("nvidia.com/pgpu", GPU, &[25]),
        ("example.com/nic", GPU, &[25]),
        ("example.com/nic", "0000:99:00.0", &[]),
    ];
    for (resource, id, blocked) in cases {
        let node = Node::new(&three_groups());
        let kubelet = node.kubelet().await;
        let other = OtherPlugin::start(&node, resource, id);
        kubelet.wait_for(|state| state.healthy(resource) == 1, LIMIT).await.unwrap();
        kubelet.allocate(&pod("cuda"), "train", resource, Want::Count(1)).await.unwrap();
        let settings = node::stage::settings(&node);
        fs::create_dir_all(node.dir.path().join("var/lib/vfiod")).unwrap();
        let service = vfiod::agent::Service::start(
            settings,
            vfiod::device_plugin::Settings::default(),
            node::stage::desired(VmPassthrough),
            &node.socket(),
        )
        .unwrap();
        let mut stage = Stage { node, kubelet, service };
        let wrong = |status: &Status| {
            let groups = status.groups.iter().filter(|group| !group.right);
            groups.filter_map(|group| group.group).collect::<Vec<_>>()
        };
        let status = stage
            .until("the rest bound", |status| !status.groups.is_empty() && wrong(status) == blocked)
            .await;
        for group in blocked {
            assert!(group_text(&status, *group).contains("tenant/cuda (container train)"), "{resource} {id}");
        }
        stage.passes(3).await;
        for (address, group) in [(GPU, 25), (MATE, 26), (ALONE, 60)] {
            if blocked.contains(&group) {
                assert_eq!(stage.node.writes_to(address, 0), [], "{resource} {id}");
            } else {
                assert_eq!(stage.node.on(address).as_deref(), Some("vfio-pci"), "{resource} {id}");
            }
        }
        stage.kubelet.pod_gone(&pod("cuda"));
        stage.until("all bound", |status| status.state == State::Ready).await;
        stage.healthy(A10, 3).await;
        stage.end().await;
        other.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_blocks_the_groups_that_its_node_stands_for() {
    let profile = Profile::hgx_h100();
    let node = Node::new(&profile);
    // Which card a node is, its driver says: the file is read, numbers are not guessed from the order of addresses.
    let minor = |id: &str| {
        let text =
            fs::read_to_string(node.dir.path().join(format!("proc/driver/nvidia/gpus/{id}/information")));
        text.unwrap()
            .lines()
            .find_map(|line| Some(line.strip_prefix("Device Minor:")?.trim().to_owned()))
            .unwrap()
    };
    let held = format!("/dev/nvidia{}", minor("0000:86:00.0"));
    node.sim.start_process(700, "nvidia-smi", &[&held]).unwrap();
    let mut stage = Stage::start_with(node, VmPassthrough, StandinOptions::default(), |_| {}).await;
    let status = stage
        .until("the rest bound", |status| {
            let wrong: Vec<_> = status.groups.iter().filter(|group| !group.right).collect();
            wrong.len() == 1 && wrong[0].group == Some(58) && status.state == State::Blocked
        })
        .await;
    let text = group_text(&status, 58);
    assert!(text.contains(&format!("process 700 (nvidia-smi) has {held} open")), "{text}");
    assert_eq!(stage.node.writes_to("0000:86:00.0", 0), []);
    stage.node.sim.end_process(700).unwrap();
    stage.until("all bound", |status| status.state == State::Ready).await;
    stage.end().await;

    // A node that is common to the driver: whatever is on that driver and has no node of its own.
    for (shared, without_own, blocked) in [
        ("/dev/nvidiactl", None, &[][..]),
        ("/dev/nvidiactl", Some("0000:86:00.0"), &[58]),
        ("/dev/nvidia-nvswitch0", None, &[86, 87, 88, 89]),
    ] {
        let node = Node::new(&profile);
        if let Some(address) = without_own {
            fs::remove_file(node.dir.path().join(format!("proc/driver/nvidia/gpus/{address}/information")))
                .unwrap();
        }
        node.sim.start_process(701, "nvidia-persiste", &[shared]).unwrap();
        let mut stage = Stage::start_with(node, VmPassthrough, StandinOptions::default(), |_| {}).await;
        let status = stage
            .until("the rest bound", |status| {
                let wrong = status.groups.iter().filter(|group| !group.right);
                let wrong: BTreeSet<_> = wrong.filter_map(|group| group.group).collect();
                wrong == blocked.iter().copied().collect()
                    && status.state == if blocked.is_empty() { State::Ready } else { State::Blocked }
            })
            .await;
        assert_eq!(status.groups.len(), 12);
        for group in blocked {
            let text = group_text(&status, *group);
            assert!(text.contains("process 701 (nvidia-persiste)"), "{shared}: {text}");
        }
        stage.passes(3).await;
        stage.node.sim.end_process(701).unwrap();
        stage.until("all bound", |status| status.state == State::Ready).await;
        stage.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_cannot_be_looked_into_may_have_anything_open() {
    let node = Node::new(&three_groups());
    let proc = node.dir.path().join("proc");
    let opaque = |pid: u32| {
        fs::create_dir_all(proc.join(pid.to_string())).unwrap();
        vfiod::atomic_file::replace(&proc.join(format!("{pid}/fd")), b"", 0o600).unwrap();
    };
    opaque(900);
    let mut stage = Stage::start_with(node, VmPassthrough, StandinOptions::default(), |settings| {
        settings.tuning.hold_grace = SOON;
    })
    .await;
    let status = stage.until("blocked", |status| status.state == State::Blocked).await;
    for group in [25, 26, 60] {
        assert!(group_text(&status, group).contains("process 900 cannot be looked into"), "{group}");
    }
    stage.passes(3).await;
    assert_eq!(stage.node.writes(), 0);
    fs::remove_dir_all(proc.join("900")).unwrap();
    stage.until("bound", |status| status.state == State::Ready).await;
    stage.healthy(A10, 3).await;

    // Neither is anything written on the way back, nor a hold let go.
    stage.kubelet.allocate(&pod("vm"), "compute", A10, ids(&[GPU])).await.unwrap();
    stage.passes(2).await;
    opaque(901);
    stage.kubelet.pod_gone(&pod("vm"));
    let bound = stage.node.writes();
    stage.wish(Container);
    stage
        .until("blocked", |status| status.state == State::Blocked && status.workload_type == Container)
        .await;
    stage.passes(3).await;
    assert_eq!((stage.node.writes(), holds(&stage.service.status.borrow())), (bound, vec![GPU.to_owned()]));
    fs::remove_dir_all(proc.join("901")).unwrap();
    stage
        .until("given back", |status| status.workload_type == Container && status.state == State::Ready)
        .await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_somebody_else_has_open_is_not_given_out() {
    let quick = |settings: &mut vfiod::agent::Settings| {
        settings.tuning.pod_resources_deadline = Duration::from_millis(200);
    };
    let mut stage = Stage::bound(&shared_group(), quick).await;
    // Found at the moment of the request, before any pass has seen it.
    stage.node.sim.start_vmm(VMM, "qemu-kvm", 60).unwrap();
    let (_, text) = stage.node.refused(&stage.kubelet, A10, &[ALONE]).await;
    assert!(text.contains("[HeldOutside]") && text.contains("4242 (qemu-kvm)"), "{text}");
    stage.health(A10, ALONE, false).await;
    stage.node.sim.end_process(VMM).unwrap();
    stage.healthy(A10, 3).await;

    // While the kubelet does not say what pods have, a VM's group is not given out a second time.
    stage.kubelet.set_pod_resources(PodResourcesMode::NoSocket).await.unwrap();
    stage.node.sim.start_vmm(VMM, "qemu-kvm", 25).unwrap();
    for id in [GPU, MATE] {
        let (_, text) = stage.node.refused(&stage.kubelet, A10, &[id]).await;
        assert!(text.contains("4242 (qemu-kvm)"), "{text}");
    }
    stage.passes(1).await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_pod_has_stays_listed_though_it_cannot_be_read() {
    let mut stage = Stage::bound(&three_groups(), |_| {}).await;
    stage.kubelet.allocate(&pod("vm"), "compute", A10, ids(&[GPU])).await.unwrap();
    stage.node.sim.start_vmm(VMM, "qemu-kvm", 25).unwrap();
    stage.passes(2).await;
    let class = stage.node.sim.host().function_dir(node::address(GPU)).join("class");
    let content = fs::read(&class).unwrap();
    vfiod::atomic_file::replace(&class, b"garbage\n", 0o644).unwrap();
    stage.passes(2).await;
    let state = stage.kubelet.state().borrow().clone();
    assert_eq!(state.resources[A10].devices.len(), 3, "{state:?}");
    assert_eq!(node::stage::health(&state, A10, GPU), Some(false));
    // Its process has the group open: a function that cannot be read does not make it free.
    stage.kubelet.pod_gone(&pod("vm"));
    stage.passes(2).await;
    assert_eq!(holds(&stage.service.status.borrow()), [GPU]);
    vfiod::atomic_file::replace(&class, &content, 0o644).unwrap();
    stage.health(A10, GPU, true).await;
    stage.node.sim.end_process(VMM).unwrap();
    stage.until("the end of the hold", |status| status.holds.is_empty()).await;
    stage.end().await;
}
