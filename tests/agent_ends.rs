//! An agent ends within two seconds, whatever a look or a write does; what comes between its look and its write is seen; what
//! changes in its config is followed.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "test code")]

mod node;

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    time::{Duration, Instant},
};

use decide::wish::WorkloadType::{Container, VmPassthrough};
use nix::{sys::stat::Mode, unistd};
use node::{
    Node, address, four_groups,
    stage::{A10, LIMIT, Stage, eventually, group_text, pod, three_groups},
};
use serde_json::{Value, json};
use tokio::time::timeout;
use vfio::sim::{Effect, Fault, Moment, Profile};
use vfiod::standin::{StandinOptions, Want};

const GPU: &str = "0000:17:00.0";

/// How long an agent may take to end, with a process's start and end beside it.
const SOON: Duration = Duration::from_secs(2);

/// A file of the kernel's that does not answer: reading it hangs.
fn hang(node: &Node, function: &str, file: &str) {
    let path = node.sim.host().function_dir(address(function)).join(file);
    fs::remove_file(&path).unwrap();
    unistd::mkfifo(&path, Mode::S_IRWXU).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_ends_within_two_seconds_whatever_it_waits_for() {
    for stuck in ["nothing", "a write", "a look"] {
        let node = Node::new(&three_groups());
        let _kubelet = node.kubelet().await;
        match stuck {
            "a write" => {
                node.sim.set_faults(&[Fault::on(address(GPU), Moment::Before, Effect::Hang)]).unwrap();
            }
            "a look" => hang(&node, GPU, "driver_override"),
            _ => {}
        }
        let agent = node.agent("workloadType: vm-passthrough\nwriteDeadlineSeconds: 60");
        match stuck {
            "a write" => eventually("the write", || (node.writes_to(GPU, 0).len() == 1).then_some(())).await,
            "a look" => eventually("the look", || (!node.readers().is_empty()).then_some(())).await,
            _ => eventually("the writes", || (node.writes() == 9).then_some(())).await,
        }
        let begun = Instant::now();
        let (code, log) = agent.terminate().await;
        assert_eq!(code, Some(0), "{stuck}: {log}");
        // The bound is the promise itself, with room for a machine that is busy with other tests.
        assert!(begun.elapsed() < SOON * 3, "{stuck}: {:?}: {log}", begun.elapsed());
        if stuck == "a write" {
            let journal = node.journal();
            let pending = journal["pending"].as_array().unwrap();
            let left = pending.iter().any(|pending| pending["unit"] == json!([GPU]));
            assert!(left, "it is left to its child: {journal}");
        }
        node.sim.set_faults(&[]).unwrap();
    }
}

/// Between the look that allowed a move and its unbind, a process has come to have the unit open.
#[tokio::test(flavor = "multi_thread")]
async fn a_unit_that_somebody_opens_after_the_look_is_not_unbound() {
    let node = Node::new(&four_groups());
    // The first write of the card hangs, as long as the test wants.
    let card = "0000:52:00.0";
    node.sim.set_faults(&[Fault::on(address(card), Moment::Before, Effect::Hang)]).unwrap();
    let mut stage = Stage::start_with(node, VmPassthrough, StandinOptions::default(), |_| {}).await;
    eventually("the write", || (stage.node.writes_to(card, 0).len() == 1).then_some(())).await;
    let nodes = fs::read_dir(stage.node.sim.host().dev("")).unwrap();
    let names = nodes.filter_map(|entry| entry.unwrap().file_name().into_string().ok());
    let information = |minor: &str| {
        let file = stage.node.sim.host().proc(&format!("driver/nvidia/gpus/{card}/information"));
        fs::read_to_string(file).unwrap().contains(&format!("Device Minor: \t {minor}\n"))
    };
    let own = names
        .filter_map(|name| name.strip_prefix("nvidia").map(str::to_owned))
        .find(|m| information(m))
        .unwrap();
    stage.node.sim.start_process(4242, "python3", &[&format!("/dev/nvidia{own}")]).unwrap();
    stage.node.sim.set_faults(&[]).unwrap();
    let status = stage
        .until("the refusal", |status| {
            let text = group_text(status, 35);
            text.contains("python3") && text.contains("in use")
        })
        .await;
    assert!(group_text(&status, 35).contains("4242"), "{}", group_text(&status, 35));
    assert_eq!(stage.node.on(card).as_deref(), Some("nvidia"));
    let unbound = |write: &vfio::write::Write| matches!(write, vfio::write::Write::Unbind { .. });
    assert!(!stage.node.writes_to(card, 0).iter().any(unbound), "{:?}", stage.node.writes_to(card, 0));
    stage.node.sim.end_process(4242).unwrap();
    stage.until("bound", |status| status.groups.iter().all(|group| group.right)).await;
    stage.end().await;
}

/// A look that was begun before an Allocate was answered is no ground for what is decided after it.
#[tokio::test(flavor = "multi_thread")]
async fn a_look_older_than_a_hold_is_thrown_away() {
    let mut stage = Stage::bound(&three_groups(), |_| {}).await;
    let before = stage.node.writes();
    // Allocates are answered while the wish goes back and forth; whatever was given out stays where it is.
    for round in 0..6 {
        let vm = pod(&format!("vm-{round}"));
        let given = stage.kubelet.allocate(&vm, "compute", A10, Want::Ids(vec![GPU.into()])).await;
        stage.wish(if round % 2 == 0 { Container } else { VmPassthrough });
        if given.is_ok() {
            stage.passes(2).await;
            assert_eq!(stage.node.writes_to(GPU, before), [], "round {round}");
            stage.kubelet.pod_gone(&vm);
            stage.wish(VmPassthrough);
            let free = |status: &vfiod::status::Status| status.holds.is_empty();
            stage.until("the hold's end", free).await;
            stage.health(A10, GPU, true).await;
        }
    }
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_config_is_followed_by_agent_and_commands_alike() {
    let node = Node::new(&three_groups());
    let kubelet = node.kubelet().await;
    let ids = "10de  NVIDIA\n\t2236  Ours for rent\n";
    fs::create_dir_all(node.dir.path().join("etc/vfiod")).unwrap();
    vfiod::atomic_file::replace(&node.dir.path().join("etc/vfiod/pci.ids"), ids.as_bytes(), 0o644).unwrap();
    let mut agent = node.agent("workloadType: vm-passthrough");
    agent.ready().await;
    kubelet.wait_for(|state| state.healthy(A10) == 3, LIMIT).await.unwrap();
    let config = "workloadType: vm-passthrough\nnames:\n  prefer: nodeFile\n  file: /etc/vfiod/pci.ids";
    node.configure(config);
    let ours = "nvidia.com/OURS_FOR_RENT";
    kubelet.wait_for(move |state| state.healthy(ours) == 3, LIMIT).await.unwrap();
    // A command reads the very file, named or at its usual place.
    let named = |shown: &Value| shown["offers"][0]["resource"].clone();
    let path = node.config();
    let shown = node.run(&["inspect", "-o", "json", "--config", path.to_str().unwrap()]);
    assert_eq!(named(&shown.json()), ours);
    assert_eq!(named(&node.run(&["inspect", "-o", "json"]).json()), A10);
    fs::copy(&path, node.dir.path().join("etc/vfiod/config.yaml")).unwrap();
    assert_eq!(named(&node.run(&["inspect", "-o", "json"]).json()), ours);
    agent.terminate().await;
    // A file that does not fit stops a command, with its place.
    node.configure("rescanSeconds: soon");
    let refused = node.run(&["bind", "--all", "--config", path.to_str().unwrap()]);
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("config.yaml:4:"), "{}", refused.stderr);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gpu_that_vanishes_is_told_of() {
    let mut stage = Stage::bound(&three_groups(), |_| {}).await;
    let host = stage.node.sim.host().clone();
    fs::remove_file(host.function_dir(address(GPU))).unwrap();
    fs::remove_file(host.sys(&format!("kernel/iommu_groups/25/devices/{GPU}"))).unwrap();
    let gone = |status: &vfiod::status::Status| {
        let told = |reason: &reason::Reason| reason.code == "FunctionGone" && reason.message.contains(GPU);
        status.reasons.iter().any(told)
    };
    let status = stage.until("the reason", gone).await;
    assert!(!status.offers.iter().any(|offer| offer.id == address(GPU).into()), "{status:?}");
    timeout(LIMIT, stage.end()).await.unwrap();
}

#[test]
fn an_alias_of_another_resources_name_stops_the_start() {
    let node = Node::new(&three_groups());
    let mut command = node.command(&["agent", "--no-kubernetes", "--workload-type", "vm-passthrough"]);
    let output = command.env("P_GPU_ALIAS", "gpu").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("P_GPU_ALIAS=gpu") && text.contains("pgpu"), "{text}");
    assert_eq!(node.writes(), 0);
}

#[test]
fn a_gpu_of_a_vendor_that_is_not_served_is_named() {
    let mut profile = Profile::four_function_card();
    profile.functions.truncate(1);
    (profile.functions[0].vendor, profile.functions[0].driver) = (0x8086, Some("i915".to_owned()));
    profile.drivers.push("i915".to_owned());
    let node = Node::new(&profile);
    for command in ["inspect", "plan"] {
        let ran = node.run(&[command]);
        assert!(ran.stdout.contains("No GPU that vfiod serves"), "{}", ran.stdout);
        assert!(ran.stdout.contains("0000:52:00.0 (8086:"), "{}", ran.stdout);
    }
}

/// The status is root's: the socket lies where nobody else gets, from the first moment on.
#[tokio::test(flavor = "multi_thread")]
async fn the_sockets_directory_is_its_owners_alone() {
    let stage = Stage::start(&three_groups(), Container).await;
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let socket = stage.node.socket();
    assert_eq!((mode(socket.parent().unwrap()), mode(&socket)), (0o700, 0o600));
    stage.end().await;
}
