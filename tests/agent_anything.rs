//! Whatever happens to an agent in whatever order: what a pod has is left alone, and in the end everything is given back.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "test code")]

mod node;

use std::{collections::BTreeMap, time::Duration};

use decide::wish::WorkloadType::{self, Container, VmPassthrough};
use nix::errno::Errno;
use node::{
    Node, address,
    stage::{A10, Stage, pod},
};
use proptest::{collection::vec, prelude::*, sample::Index};
use serde_json::json;
use tokio::time::sleep;
use tonic::Code;
use vfio::sim::{Effect, Fault, Moment, Profile};
use vfiod::{
    agent::Settings,
    standin::{PodName, PodResourcesMode, Want},
    status::State,
};

/// Everything that can happen.
#[derive(Debug, Clone)]
enum Happening {
    /// People ask for another workload type.
    Wish(WorkloadType),
    /// A pod asks for a device.
    Allocate(Index),
    /// A pod that was given one starts its VM.
    StartVm,
    /// A pod ends, and its VM a little later.
    EndPod(Index),
    /// PodResources behaves otherwise.
    PodResources(PodResourcesMode),
    /// Every write to a function fails from now on.
    Fault(Index),
    /// No write fails from now on.
    NoFault,
    /// The kubelet starts again.
    Kubelet,
    /// The agent ends, and another starts.
    Agent,
    /// The agent comes to rest; where it does not, it is caught in the middle by what comes next.
    Rest,
    /// Somebody asks for the mates of what is held.
    AskMates,
}

fn happening() -> impl Strategy<Value = Happening> {
    let modes = prop_oneof![
        2 => Just(PodResourcesMode::Answers),
        1 => Just(PodResourcesMode::NoSocket),
        1 => Just(PodResourcesMode::Fails(Code::Internal)),
    ];
    prop_oneof![
        2 => prop_oneof![Just(Container), Just(VmPassthrough)].prop_map(Happening::Wish),
        3 => any::<Index>().prop_map(Happening::Allocate),
        2 => Just(Happening::StartVm),
        1 => any::<Index>().prop_map(Happening::EndPod),
        1 => modes.prop_map(Happening::PodResources),
        1 => prop_oneof![any::<Index>().prop_map(Happening::Fault), Just(Happening::NoFault)],
        1 => prop_oneof![Just(Happening::Kubelet), Just(Happening::Agent)],
        6 => Just(Happening::Rest),
        1 => Just(Happening::AskMates),
    ]
}

/// A device that a pod has been given.
struct Held {
    id: String,
    group: u32,
    pod: PodName,
    /// The node's writes when it was given out.
    since: usize,
    vmm: Option<u32>,
}

/// What a pod has, nobody writes to.
fn untouched(node: &Node, held: &Held, context: &str) {
    assert_eq!(node.writes_to(&held.id, held.since), [], "{context}: {} of {:?}", held.id, held.pod);
    assert_eq!(node.on(&held.id).as_deref(), Some("vfio-pci"), "{context}: {}", held.id);
}

async fn release(stage: &Stage, held: Held, context: &str) {
    untouched(&stage.node, &held, context);
    stage.kubelet.pod_gone(&held.pod);
    if let Some(pid) = held.vmm {
        // The kubelet forgets the pod before its process has ended.
        sleep(Duration::from_millis(20)).await;
        untouched(&stage.node, &held, context);
        stage.node.sim.end_process(pid).unwrap();
    }
}

/// Two A10 in one group, three in groups of their own.
fn profile() -> Profile {
    let mut profile = node::stage::shared_group();
    for (bus, group) in [("81", 70), ("a1", 71)] {
        let gpu = format!("0000:{bus}:00.0");
        profile.functions.push(node::function(&gpu, 0x2236, 0x03_02_00, Some("nvidia"), group));
    }
    profile
}

async fn play(happenings: &[Happening]) {
    let groups: BTreeMap<String, u32> =
        profile().functions.iter().map(|f| (f.address.to_string(), f.group.unwrap())).collect();
    let ids: Vec<String> = groups.keys().cloned().collect();
    let quick = |settings: &mut Settings| {
        settings.tuning.hold_grace = Duration::from_secs(3);
        settings.tuning.pod_resources_deadline = Duration::from_millis(500);
    };
    let mut stage = Stage::bound(&profile(), quick).await;
    let mut held: Vec<Held> = Vec::new();
    for (step, happening) in happenings.iter().enumerate() {
        let context = format!("step {step}, {happening:?}");
        match happening {
            Happening::Wish(workload_type) => stage.wish(*workload_type),
            Happening::Allocate(index) => {
                let id = index.get(&ids).clone();
                let (pod, want) = (pod(&format!("vm-{step}")), Want::Ids(vec![id.clone()]));
                if stage.kubelet.allocate(&pod, "compute", A10, want).await.is_ok() {
                    let group = groups[&id];
                    let since = stage.node.writes();
                    assert!(held.iter().all(|other| other.group != group), "{context}: a group for two pods");
                    held.push(Held { id, group, pod, since, vmm: None });
                }
            }
            Happening::StartVm => {
                // Whoever was given a device can use it.
                if let Some(held) = held.iter_mut().find(|held| held.vmm.is_none()) {
                    let pid = 5000 + u32::try_from(step).unwrap();
                    stage.node.sim.start_vmm(pid, "qemu-kvm", held.group).unwrap();
                    held.vmm = Some(pid);
                }
            }
            Happening::EndPod(_) if held.is_empty() => {}
            Happening::EndPod(index) => {
                let ended = held.swap_remove(index.index(held.len()));
                release(&stage, ended, &context).await;
            }
            Happening::PodResources(mode) => stage.kubelet.set_pod_resources(*mode).await.unwrap(),
            Happening::Fault(index) => {
                let on = address(&ids[index.index(ids.len())]);
                let fault = Fault::on(on, Moment::Before, Effect::Errno(Errno::EIO as i32));
                stage.node.sim.set_faults(&[fault]).unwrap();
            }
            Happening::NoFault => stage.node.sim.set_faults(&[]).unwrap(),
            Happening::Kubelet => stage.kubelet.restart().await.unwrap(),
            Happening::Agent => stage = stage.again(quick).await,
            Happening::Rest => stage.passes(1).await,
            Happening::AskMates => ask_mates(&stage, &held, &groups).await,
        }
        held.iter().for_each(|held| untouched(&stage.node, held, &context));
    }
    end(stage, held, ids.len()).await;
}

/// A device that is held is nobody else's, and neither is its mate.
async fn ask_mates(stage: &Stage, held: &[Held], groups: &BTreeMap<String, u32>) {
    for held in held {
        let mates = groups.iter().filter(|(id, group)| **group == held.group && **id != held.id);
        for (mate, _) in mates {
            if stage.kubelet.state().borrow().watched(A10) {
                stage.node.refused(&stage.kubelet, A10, &[mate]).await;
            }
        }
    }
}

async fn end(mut stage: Stage, held: Vec<Held>, all: usize) {
    let context = "the end";
    stage.node.sim.set_faults(&[]).unwrap();
    stage.kubelet.set_pod_resources(PodResourcesMode::Answers).await.unwrap();
    // What is held is listed and healthy in the end, whatever the wish.
    for held in &held {
        stage.health(A10, &held.id, true).await;
    }
    for held in held {
        release(&stage, held, context).await;
    }
    stage.wish(VmPassthrough);
    stage.healthy(A10, all).await;
    stage.wish(Container);
    let home = |status: &vfiod::status::Status| {
        status.workload_type == Container && status.state == State::Ready && status.offers.is_empty()
    };
    stage.until("all given back", home).await;
    let node = stage.end().await;
    for (address, now) in node.bindings() {
        assert_eq!(now, (Some("nvidia".to_owned()), None), "{context}: {address}");
    }
    let journal = node.journal();
    let left = (&journal["priors"], &journal["pending"], &journal["holds"]);
    assert_eq!(left, (&json!({}), &json!([]), &json!({})));
}

proptest! {
    // Each case is a minute of an agent's life at the most, so few; a failing one is made shorter a few times only.
    #![proptest_config(ProptestConfig { cases: 3, max_shrink_iters: 12, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_in_whatever_order_what_a_pod_has_is_left_alone(happenings in vec(happening(), 60..120)) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(play(&happenings));
    }
}
