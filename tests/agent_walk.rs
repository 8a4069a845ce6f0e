//! The agent's main job on a simulated node: from workload type to offers to a VM and back, over restarts of agent and
//! kubelet, by its flags, its config file and its lock.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "test code")]

mod node;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use decide::wish::WorkloadType::{Container, VmPassthrough};
use node::{
    Node, four_groups,
    stage::{
        A10, H100, LIMIT, Stage, eventually, group_codes, health, json_codes, json_right, pod, reopen,
        three_groups,
    },
};
use serde_json::{Value, json};
use tokio::{task::JoinSet, time::timeout};
use tonic::Code;
use vfio::{
    pci,
    sim::{Effect, Fault, Moment, Profile},
    write::Write,
};
use vfiod::{
    standin::{StandinOptions, StandinState, Want},
    status::State,
};

const VMM: u32 = 4242;

#[tokio::test(flavor = "multi_thread")]
async fn the_walk_from_containers_to_a_vm_and_back() {
    let node = Node::new(&Profile::hgx_h100());
    let at_boot = node.bindings();
    let mut stage = Stage::start_with(node, Container, StandinOptions::default(), |_| {}).await;
    stage.until("ready", |status| status.state == State::Ready).await;
    stage.passes(2).await;
    assert_eq!(stage.node.writes(), 0);
    assert_eq!(stage.kubelet.state().borrow().resources, BTreeMap::new());

    stage.wish(VmPassthrough);
    let ready = |status: &vfiod::status::Status| {
        status.state == State::Ready && status.workload_type == VmPassthrough && status.offers.len() == 12
    };
    stage.until("all bound", ready).await;
    let state = stage.healthy(H100, 8).await;
    assert_eq!(state.resources.len(), 2, "GPUs and NVSwitches: {:?}", state.resources.keys());
    stage.healthy("nvidia.com/GH100_H100_NVSWITCH", 4).await;
    for (id, numa) in [("0000:11:00.0", 0), ("0000:be:00.0", 1)] {
        assert_eq!(state.resources[H100].devices[id].numa_nodes, [numa], "{id}");
    }
    for (address, (driver, _)) in stage.node.bindings() {
        let before = at_boot[&address].0.as_deref().unwrap();
        let expected = if before.starts_with("nvidia") { "vfio-pci" } else { before };
        assert_eq!(driver.as_deref(), Some(expected), "{address}");
    }

    let ids = ["0000:11:00.0", "0000:41:00.0"].map(str::to_owned);
    let given = stage.kubelet.allocate(&pod("vm"), "compute", H100, Want::Ids(ids.to_vec())).await.unwrap();
    let env = "PCI_RESOURCE_NVIDIA_COM_GH100_H100_SXM5_80GB".to_owned();
    assert_eq!(given.env, BTreeMap::from([(env, ids.join(","))]));
    let mut nodes = given.nodes;
    nodes.sort();
    let expected = ["/dev/vfio/17", "/dev/vfio/29", "/dev/vfio/vfio"]
        .map(|path| (path.to_owned(), path.to_owned(), "mrw".to_owned()));
    assert_eq!(nodes, expected);
    assert_eq!((given.cdi_devices, given.annotations), (Vec::new(), BTreeMap::new()));
    stage.node.sim.start_vmm(VMM, "qemu-kvm", 29).unwrap();
    stage.node.sim.start_vmm(VMM + 1, "qemu-kvm", 17).unwrap();

    let before = stage.node.writes();
    let registered = stage.kubelet.state().borrow().registrations.clone();
    stage.wish(Container);
    let blocked = stage
        .until("only the VM's groups are left", |status| {
            status.state == State::Blocked && status.groups.iter().filter(|group| !group.right).count() == 2
        })
        .await;
    stage.passes(3).await;
    for (id, group) in [(&ids[0], 29), (&ids[1], 17)] {
        assert_eq!(stage.node.writes_to(id, before), [], "{id}");
        assert_eq!(group_codes(&blocked, group), ["InUse"]);
        let text = node::stage::group_text(&blocked, group);
        assert!(text.contains("tenant/vm") && text.contains("qemu-kvm"), "{text}");
    }
    let free = stage.node.bindings().into_iter().filter(|(a, _)| !ids.contains(&a.to_string()));
    for (address, now) in free {
        assert_eq!(now, at_boot[&address], "{address}");
    }
    // Only what the VM has is left of the offers: healthy, under the same registration, and nobody else's.
    let left = |state: &StandinState| {
        state.resources[H100].devices.len() == 2 && state.healthy(H100) == 2 && state.watched(H100)
    };
    let state = stage.kubelet.wait_for(left, LIMIT).await.unwrap();
    assert_eq!(state.registrations[H100], registered[H100]);
    let (code, text) = stage.node.refused(&stage.kubelet, H100, &[&ids[0]]).await;
    assert_eq!(code, Code::Unavailable, "{text}");
    assert!(text.contains("on its way to container"), "{text}");

    // The pod is gone from the kubelet's list, its process is not.
    stage.kubelet.pod_gone(&pod("vm"));
    stage.passes(3).await;
    assert_eq!(stage.node.writes_to(&ids[0], before), []);
    stage.node.sim.end_process(VMM).unwrap();
    stage.node.sim.end_process(VMM + 1).unwrap();
    stage.until("all given back", |status| status.state == State::Ready && status.offers.is_empty()).await;
    assert_eq!(stage.node.bindings(), at_boot);
    let sockets = stage.node.kubelet_dir().device_plugins();
    eventually("the end of the plugins' sockets", || {
        let left = std::fs::read_dir(&sockets).unwrap().map(|entry| entry.unwrap().file_name());
        left.eq(["kubelet.sock"]).then_some(())
    })
    .await;
    let node = stage.end().await;
    assert_eq!(node.journal()["holds"], json!({}));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wish_taken_back_in_the_middle_gives_everything_back() {
    let node = Node::new(&four_groups());
    let home = {
        let mut home = node.bindings();
        // Driverless at boot though nvidia is loaded: the probe on its way back finds it that driver.
        home.get_mut(&node::address("0000:65:00.0")).unwrap().0 = Some("nvidia".to_owned());
        home
    };
    let on = |address| Fault::on(node::address(address), Moment::Before, Effect::Hang);
    node.sim.set_faults(&[on("0000:52:00.2")]).unwrap();
    let mut stage = Stage::start_with(node, VmPassthrough, StandinOptions::default(), |_| {}).await;
    // Two functions of the card have moved, the third's write hangs, the fourth waits.
    eventually("the write that hangs", || {
        (!stage.node.writes_to("0000:52:00.2", 0).is_empty()).then_some(())
    })
    .await;
    stage.wish(Container);
    stage.node.sim.set_faults(&[]).unwrap();
    stage
        .until("all given back", |status| {
            status.workload_type == Container && status.state == State::Ready && status.offers.is_empty()
        })
        .await;
    let node = stage.end().await;
    assert_eq!(node.bindings(), home);
    let journal = node.journal();
    assert_eq!((&journal["priors"], &journal["pending"]), (&json!({}), &json!([])));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_on_a_right_node_writes_nothing() {
    let node = Node::new(&four_groups());
    let kubelet = node.kubelet().await;
    let mut agent = node.agent("workloadType: vm-passthrough");
    agent.ready().await;
    kubelet.wait_for(|state| state.healthy(A10) == 2, LIMIT).await.unwrap();
    kubelet.allocate(&pod("vm"), "compute", A10, Want::Ids(vec!["0000:17:00.0".into()])).await.unwrap();
    node.sim.start_vmm(VMM, "qemu-kvm", 25).unwrap();
    eventually("the hold to be seen", || {
        (node.journal()["holds"]["0000:17:00.0"]["shown"] == true).then_some(())
    })
    .await;
    agent.passes(1).await;
    let seen = |node: &Node| {
        (
            node.writes(),
            node.override_stamps(),
            node.stamp("var/lib/vfiod/journal.json"),
            node.stamp("sys/kernel/uevent_seqnum"),
        )
    };
    let before = seen(&node);
    agent.passes(2).await;
    assert_eq!(seen(&node), before, "an agent at rest");
    agent.kill();
    for killed in [true, false] {
        let mut agent = node.agent("workloadType: vm-passthrough");
        let status = agent.ready().await;
        assert_eq!(status["holds"], json!(["0000:17:00.0"]));
        kubelet.wait_for(|state| state.healthy(A10) == 2, LIMIT).await.unwrap();
        agent.passes(2).await;
        if killed {
            agent.kill();
        } else {
            assert_eq!(agent.terminate().await.0, Some(0));
        }
        assert_eq!(seen(&node), before, "killed: {killed}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_offered_before_its_group_is_read_back() {
    let node = Node::new(&three_groups());
    let every = |node: &Node| {
        let all = node.bindings();
        all.into_keys().map(|a| Fault::on(a, Moment::After, Effect::Hang)).collect::<Vec<_>>()
    };
    node.sim.set_faults(&every(&node)).unwrap();
    let mut stage = Stage::start_with(node, VmPassthrough, StandinOptions::default(), |_| {}).await;
    // Each time the kubelet hears something, every device that it takes for healthy is on vfio.
    let heard: Arc<Mutex<Vec<usize>>> = Arc::default();
    let mut listening = JoinSet::new();
    let (sim, mut state, log) = (reopen(&stage.node), stage.kubelet.state(), Arc::clone(&heard));
    listening.spawn(async move {
        while state.changed().await.is_ok() {
            let now = state.borrow_and_update().clone();
            let functions = pci::functions(sim.host()).unwrap();
            let devices = now.resources.get(A10).map(|resource| resource.devices.clone()).unwrap_or_default();
            let healthy: Vec<_> =
                devices.iter().filter(|(_, device)| device.healthy).map(|(id, _)| id).collect();
            for id in &healthy {
                let driver = &functions.known[&node::address(id)].driver;
                assert_eq!(driver.as_deref(), Some("vfio-pci"), "{id} was healthy too early");
            }
            log.lock().unwrap().push(healthy.len());
        }
    });
    let listed = |state: &StandinState| state.resources.get(A10).is_some_and(|one| one.devices.len() == 3);
    stage.kubelet.wait_for(listed, LIMIT).await.unwrap();
    eventually("a write of each group", || (stage.node.writes() == 3).then_some(())).await;
    assert_eq!(stage.kubelet.state().borrow().healthy(A10), 0);
    let (_, text) = stage.node.refused(&stage.kubelet, A10, &["0000:17:00.0"]).await;
    assert!(text.contains("[Switching]"), "{text}");
    stage.node.sim.set_faults(&[]).unwrap();
    stage.healthy(A10, 3).await;
    stage.until("ready", |status| status.state == State::Ready).await;
    eventually("the kubelet to be heard", || heard.lock().unwrap().contains(&3).then_some(())).await;

    // On the way back the kubelet sees them withdrawn while the first write to each has not been made yet.
    let bound = stage.node.writes();
    let faults: Vec<_> = every(&stage.node);
    let faults: Vec<_> = faults.into_iter().map(|fault| Fault { moment: Moment::Before, ..fault }).collect();
    stage.node.sim.set_faults(&faults).unwrap();
    stage.wish(Container);
    stage.kubelet.wait_for(|state| state.healthy(A10) == 0, LIMIT).await.unwrap();
    eventually("a write of each group", || (stage.node.writes() == bound + 3).then_some(())).await;
    let unbinds = |stage: &Stage| {
        let writes = stage.node.sim.writes().unwrap().into_iter().skip(bound);
        writes.filter(|write| matches!(write, Write::Unbind { .. })).count()
    };
    assert_eq!(unbinds(&stage), 0);
    stage.node.sim.set_faults(&[]).unwrap();
    stage.until("given back", |status| status.state == State::Ready && status.offers.is_empty()).await;
    assert_eq!(unbinds(&stage), 3);
    stage.end().await;
    // The kubelet is gone with its channel: what was heard is complete.
    timeout(LIMIT, listening.join_next()).await.unwrap().unwrap().unwrap();
    assert_eq!(heard.lock().unwrap().last(), Some(&0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kubelet_restart_while_a_pod_holds_changes_nothing_for_it() {
    let mut stage = Stage::bound(&three_groups(), |_| {}).await;
    let mine = "0000:17:00.0";
    stage.kubelet.allocate(&pod("vm"), "compute", A10, Want::Ids(vec![mine.into()])).await.unwrap();
    stage.node.sim.start_vmm(VMM, "qemu-kvm", 25).unwrap();
    let before = stage.node.writes();
    for round in 1..=2 {
        stage.kubelet.restart().await.unwrap();
        let state = stage.healthy(A10, 3).await;
        assert!(state.registrations[A10] > round && health(&state, A10, mine) == Some(true));
    }
    // The same with a switch under way: the one device that is held comes back, and is healthy.
    stage.wish(Container);
    stage
        .until("only the VM's group is left", |status| {
            status.state == State::Blocked && status.groups.iter().filter(|group| !group.right).count() == 1
        })
        .await;
    stage.kubelet.restart().await.unwrap();
    let state = stage.healthy(A10, 1).await;
    assert_eq!(state.resources[A10].devices.keys().collect::<Vec<_>>(), [mine]);
    assert_eq!(stage.node.writes_to(mine, before), []);
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_one_writer_at_a_time() {
    let node = Node::new(&three_groups());
    let _kubelet = node.kubelet().await;
    let mut agent = node.agent("workloadType: vm-passthrough");
    agent.ready().await;
    let before = node.writes();
    for direction in ["bind", "unbind"] {
        let ran = node.run(&[direction, "--all"]);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(1), ""), "{ran:?}");
        let said = ["the agent is alive", &agent.pid().to_string(), "nothing was touched"];
        assert!(said.iter().all(|word| ran.stderr.contains(word)), "{ran:?}");
    }
    let mut second = node.agent_with(&["--no-kubernetes", "--workload-type", "container"]);
    assert_eq!(second.ended().await, Some(1));
    assert!(second.log().contains("another vfiod works on this node"), "{}", second.log());
    drop(second);
    agent.passes(1).await;
    assert_eq!(node.writes(), before);

    // A writer that hangs does not keep its killed agent's lock.
    let hang = |address| Fault::on(node::address(address), Moment::Before, Effect::Hang);
    node.sim.set_faults(&[hang("0000:65:00.0")]).unwrap();
    node.configure("workloadType: container");
    eventually("the write that hangs", || (!node.writes_to("0000:65:00.0", before).is_empty()).then_some(()))
        .await;
    agent.kill();
    assert_eq!(node.writers().len(), 1);
    let ran = node.run(&["unbind", "--all"]);
    assert!(ran.code == Some(1) && ran.stdout.contains("has not come back from the kernel"), "{ran:?}");
    node.sim.set_faults(&[]).unwrap();
    eventually("the writer's end", || node.writers().is_empty().then_some(())).await;
    assert_eq!(node.run(&["unbind", "--all"]).code, Some(0));
    assert!(node.bindings().values().all(|(driver, _)| driver.as_deref() == Some("nvidia")));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_config_file_is_followed() {
    let node = Node::new(&three_groups());
    let kubelet = node.kubelet().await;
    let mut agent = node.agent("workloadType: container");
    agent.ready().await;
    assert_eq!(node.writes(), 0);
    node.configure("workloadType: vm-passthrough");
    agent
        .until("bound", |status| status["workload_type"] == "vm-passthrough" && status["state"] == "Ready")
        .await;
    kubelet.wait_for(|state| state.healthy(A10) == 3, LIMIT).await.unwrap();

    // What does not fit, or is not served yet, keeps the present state; log and status say why, once each.
    let before = node.writes();
    for (wrong, code, said) in [
        ("workloadType: containers", "ConfigRefused", "config.yaml:4:15"),
        ("workloadType: [", "ConfigRefused", "does not fit, nothing of it is applied"),
        ("workloadType: vm-vgpu", "NotYet", "not yet"),
        ("workloadType: container\nconsumer: kata", "NotYet", "not yet"),
        ("", "WishUnclear", "nothing is asked of this node"),
    ] {
        let known = agent.log().len();
        node.configure(wrong);
        let log = eventually("a line in the log", || {
            let new = agent.log().split_off(known);
            new.contains(code).then_some(new)
        })
        .await;
        assert!(log.contains(said) && log.contains("the present wish is kept"), "{wrong:?}: {log}");
        let tells = |status: &Value| {
            let reasons = status["reasons"].as_array().unwrap();
            let told = |reason: &Value| reason["message"].as_str().unwrap().contains(said);
            reasons.iter().any(|reason| reason["code"] == code && told(reason))
        };
        let status = agent.until("the reason in the status", tells).await;
        assert_eq!(
            (&status["workload_type"], &status["state"]),
            (&json!("vm-passthrough"), &json!("Degraded"))
        );
    }
    std::fs::remove_file(node.config()).unwrap();
    eventually("a line in the log", || agent.log().contains("cannot read config file").then_some(())).await;
    let status = agent.passes(1).await;
    assert_eq!((&status["workload_type"], &status["state"]), (&json!("vm-passthrough"), &json!("Degraded")));
    assert_eq!(node.writes(), before);
    assert_eq!(kubelet.state().borrow().healthy(A10), 3);
    node.configure("workloadType: vm-passthrough");
    agent.ready().await;

    node.configure("workloadType: container");
    agent
        .until("given back", |status| status["workload_type"] == "container" && status["state"] == "Ready")
        .await;
    assert!(
        node.bindings().values().all(|(driver, over)| driver.as_deref() == Some("nvidia") && over.is_none())
    );
}

#[test]
fn what_is_not_served_is_refused_at_the_start() {
    let node = Node::new(&three_groups());
    for (arguments, said) in [
        (&["--no-kubernetes", "--workload-type", "vm-vgpu"][..], "not yet"),
        (&["--no-kubernetes", "--workload-type", "vm-passthrough", "--consumer", "kata"], "not yet"),
        (&["--no-kubernetes"], "nothing is asked of this node"),
        (&["--workload-type", "container"], "--no-kubernetes"),
        (&["--no-kubernetes", "--config", "/nonexistent.yaml"], "cannot read config file"),
    ] {
        let ran = node.run(&[&["agent"], arguments].concat());
        assert_eq!(ran.code, Some(1), "{ran:?}");
        assert!(ran.stderr.contains(said), "{ran:?}");
    }
    assert_eq!(node.run(&["agent", "--no-kubernetes", "--workload-type", "vm"]).code, Some(2));
    assert_eq!(node.writes(), 0);
    assert!(!node.dir.path().join("var/lib/vfiod").exists(), "nothing was begun");
}

#[test]
fn a_journal_that_cannot_be_read_stops_the_agent_before_anything() {
    let node = Node::new(&three_groups());
    let path = node.dir.path().join("var/lib/vfiod/journal.json");
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    for text in ["", "{}", "{\"version\":2}", "not a journal"] {
        vfiod::atomic_file::replace(&path, text.as_bytes(), 0o600).unwrap();
        let ran = node.run(&["agent", "--no-kubernetes", "--workload-type", "vm-passthrough"]);
        assert_eq!(ran.code, Some(1), "{text:?}: {ran:?}");
        assert!(ran.stderr.contains("journal.json") && ran.stderr.contains("nothing is touched"), "{ran:?}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    }
    assert_eq!(node.writes(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_is_told_to_end_leaves_the_node_to_its_vms() {
    let node = Node::new(&three_groups());
    let kubelet = node.kubelet().await;
    let mut agent = node.agent("workloadType: vm-passthrough");
    agent.ready().await;
    kubelet.wait_for(|state| state.healthy(A10) == 3, LIMIT).await.unwrap();
    kubelet.allocate(&pod("vm"), "compute", A10, Want::Ids(vec!["0000:17:00.0".into()])).await.unwrap();
    node.sim.start_vmm(VMM, "qemu-kvm", 25).unwrap();
    node.configure("workloadType: container");
    let blocked = agent
        .until("only the VM's group is left", |status| {
            status["workload_type"] == "container"
                && status["state"] == "Blocked"
                && json_right(status, 26)
                && json_right(status, 60)
        })
        .await;
    assert_eq!(json_codes(&blocked, 25), ["InUse"]);
    let (before, bindings) = (node.writes(), node.bindings());
    let (code, log) = agent.terminate().await;
    assert_eq!(code, Some(0), "{log}");
    assert_eq!((node.writes(), node.bindings()), (before, bindings));
    assert_eq!(node.on("0000:17:00.0").as_deref(), Some("vfio-pci"));
    kubelet.wait_for(|state| !state.watched(A10), LIMIT).await.unwrap();
    let sockets = std::fs::read_dir(node.kubelet_dir().device_plugins()).unwrap();
    let left: Vec<_> = sockets.map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["kubelet.sock"]);
    // The next agent finds the hold, and lets go once pod and process are gone.
    let mut agent = node.agent("workloadType: container");
    let status = agent.until("blocked", |status| status["state"] == "Blocked").await;
    assert_eq!(status["holds"], json!(["0000:17:00.0"]));
    kubelet.wait_for(|state| health(state, A10, "0000:17:00.0") == Some(true), LIMIT).await.unwrap();
    kubelet.pod_gone(&pod("vm"));
    node.sim.end_process(VMM).unwrap();
    agent.ready().await;
    assert_eq!(node.on("0000:17:00.0").as_deref(), Some("nvidia"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_without_an_iommu_offers_nothing_healthy_and_says_why_of_each() {
    let options = StandinOptions::default();
    let mut stage =
        Stage::start_with(Node::new(&Profile::without_iommu()), VmPassthrough, options, |_| {}).await;
    let status = stage.until("degraded", |status| status.state == State::Degraded).await;
    for id in ["0000:17:00.0", "0000:65:00.0"] {
        let offer = status.offers.iter().find(|offer| offer.id == node::address(id).into()).unwrap();
        let reasons: Vec<_> = offer.reasons.iter().map(ToString::to_string).collect();
        assert!(
            reasons.len() == 1 && reasons[0].starts_with(&format!("NoIommu: {id} is in no")),
            "{reasons:?}"
        );
    }
    let listed = |state: &StandinState| state.resources.get(A10).is_some_and(|one| one.devices.len() == 2);
    let state = stage.kubelet.wait_for(listed, LIMIT).await.unwrap();
    assert_eq!(state.healthy(A10), 0);
    // The kernel knows no NUMA node here: nothing is made up.
    assert!(state.resources[A10].devices.values().all(|device| device.numa_nodes.is_empty()));
    let (_, text) = stage.node.refused(&stage.kubelet, A10, &["0000:65:00.0"]).await;
    assert!(text.contains("[NoIommu]"), "{text}");
    assert_eq!(stage.end().await.writes(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_kernel_bound_at_boot_stays_unless_it_is_adopted() {
    let node = Node::new(&three_groups());
    let kept = "0000:17:00.0";
    node.sim.put(node::address(kept), Some("vfio-pci"), None).unwrap();
    let mut agent = node.agent("workloadType: container");
    let status = agent.until("a state", |status| status["state"] == "Degraded").await;
    assert_eq!(json_codes(&status, 25), ["BoundAtBoot"]);
    assert!(status.to_string().contains("adoptBootBound"));
    agent.passes(1).await;
    assert_eq!(node.writes(), 0);
    // There and back it is left as it was found.
    node.configure("workloadType: vm-passthrough");
    agent
        .until("bound", |status| status["workload_type"] == "vm-passthrough" && json_right(status, 60))
        .await;
    node.configure("workloadType: container");
    agent
        .until("given back", |status| status["workload_type"] == "container" && json_right(status, 60))
        .await;
    assert_eq!((node.on(kept).as_deref(), node.writes_to(kept, 0)), (Some("vfio-pci"), Vec::new()));
    node.configure("workloadType: container\nadoptBootBound: true");
    agent.ready().await;
    assert_eq!(node.on(kept).as_deref(), Some("nvidia"));
}
