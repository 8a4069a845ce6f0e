//! What goes wrong at an agent's writes: refused and hanging ones, killed agents and writers, drivers changed by others. One
//! bad group stops no other, and nothing is written twice or by two.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "test code")]

mod node;

use std::{
    collections::BTreeSet,
    fs::{self, OpenOptions},
    io::{BufRead, BufReader, Write as _},
    os::{
        fd::AsRawFd,
        unix::fs::{FileTypeExt, OpenOptionsExt},
    },
    path::PathBuf,
    process::Stdio,
    time::Duration,
};

use decide::wish::WorkloadType::{Container, VmPassthrough};
use nix::{errno::Errno, libc::O_NONBLOCK, sys::stat::Mode, unistd};
use node::{
    Node, address, four_groups,
    stage::{
        A10, LIMIT, Stage, eventually, group_codes, group_text, json_codes, json_right, offer_codes, pod,
        three_groups,
    },
};
use serde_json::json;
use tonic::Code;
use vfio::{
    sim::{Effect, Fault, Moment, Profile},
    write::Write,
};
use vfiod::{
    agent::Settings,
    standin::{StandinOptions, Want},
    status::State,
};

const GPU: &str = "0000:17:00.0";
const OTHER: &str = "0000:18:00.0";
const BAD: &str = "0000:65:00.0";
const VMM: u32 = 4242;

fn on(function: &str, effect: Effect) -> Fault {
    Fault::on(address(function), Moment::Before, effect)
}

fn errno(errno: Errno) -> Effect {
    Effect::Errno(errno as i32)
}

/// A write that does not come back within this is given up. Short, where a test is about just that.
fn impatient(settings: &mut Settings) {
    settings.tuning.write_deadline = Duration::from_millis(300);
}

/// A function is read like this while a write to it hangs in the kernel: `driver_override` waits for the device's lock.
fn hold_lock(node: &Node, function: &str) -> PathBuf {
    let file = node.sim.host().function_dir(address(function)).join("driver_override");
    fs::remove_file(&file).unwrap();
    unistd::mkfifo(&file, Mode::S_IRWXU).unwrap();
    file
}

#[expect(clippy::disallowed_methods, reason = "a test's own file")]
fn release_lock(file: &PathBuf, content: &str) {
    // The reader that waits is let go by a writer's coming and going; the next one meets a plain file again.
    let waiting = OpenOptions::new().read(true).write(true).open(file).unwrap();
    fs::remove_file(file).unwrap();
    fs::write(file, content).unwrap();
    drop(waiting);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_function_that_does_not_answer_stops_nothing_but_its_group() {
    let change = |settings: &mut Settings| settings.reader.deadline = Duration::from_millis(200);
    let mut stage = Stage::bound(&three_groups(), change).await;
    let writes = stage.node.writes();
    let file = hold_lock(&stage.node, BAD);
    stage.until("the group said to be busy", |status| group_codes(status, 60) == ["Busy"]).await;
    stage.health(A10, BAD, false).await;
    let (code, text) = stage.node.refused(&stage.kubelet, A10, &[BAD]).await;
    assert!(code == Code::Unavailable && text.contains("[Busy]"), "{code}: {text}");
    stage.kubelet.allocate(&pod("vm"), "compute", A10, Want::Ids(vec![GPU.into()])).await.unwrap();
    // The other free group is moved although this one does not answer, and by hand as well.
    stage.wish(Container);
    stage
        .until("the other free one given back", |status| {
            let right = |group: u32| status.groups.iter().any(|g| g.group == Some(group) && g.right);
            status.workload_type == Container && right(26)
        })
        .await;
    assert!(!stage.node.writes_to(OTHER, writes).is_empty());
    assert!(stage.node.writes_to(BAD, writes).is_empty());
    let shown = stage.node.run(&["inspect", "-o", "json"]).json();
    let busy = |f: &&serde_json::Value| f["address"] == BAD && f["busy"] == true;
    assert!(shown["functions"].as_array().unwrap().iter().any(|f| busy(&f)), "{shown}");
    stage.wish(VmPassthrough);
    stage.healthy(A10, 2).await;

    release_lock(&file, "vfio-pci\n");
    stage.healthy(A10, 3).await;
    assert!(stage.node.writes_to(BAD, writes).is_empty(), "it was right all the time");
    stage.end().await;
}

fn to_vfio(function: &str) -> [Write; 3] {
    let address = address(function);
    [
        Write::Override { address, driver: Some("vfio-pci".to_owned()) },
        Write::Unbind { address, driver: "nvidia".to_owned() },
        Write::Probe { address },
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_write_rolls_its_group_back_and_stops_no_other() {
    let node = Node::new(&four_groups());
    let at_boot = node.bindings();
    // The third of the card's four functions.
    node.sim.set_faults(&[on("0000:52:00.2", errno(Errno::EIO))]).unwrap();
    let mut stage = Stage::start_with(node, VmPassthrough, StandinOptions::default(), |_| {}).await;
    let status = stage
        .until("the others bound", |status| {
            let right = |group| status.groups.iter().any(|found| found.group == Some(group) && found.right);
            right(25) && right(60) && right(86) && status.state == State::Degraded
        })
        .await;
    assert_eq!(group_codes(&status, 35), ["KernelRefused"]);
    let text = group_text(&status, 35);
    assert!(text.contains("0000:52:00.2") && text.contains("I/O error"), "{text}");
    assert!(offer_codes(&status, "0000:52:00.0").contains(&"KernelRefused"));
    stage.healthy(A10, 2).await;
    let card = "nvidia.com/TU104GL_QUADRO_RTX_4000";
    stage.health(card, "0000:52:00.0", false).await;
    // While it is being tried again it is being moved; between two tries it is known why it failed.
    let text = loop {
        let (_, text) = stage.node.refused(&stage.kubelet, card, &["0000:52:00.0"]).await;
        if !text.contains("[Switching]") {
            break text;
        }
    };
    assert!(text.contains("[KernelRefused]") && text.contains("I/O error"), "{text}");
    // Between two tries all functions of the group are as they were: so they are once it is given up.
    stage.node.sim.set_faults(&[on("0000:52:00.0", errno(Errno::EIO))]).unwrap();
    let tried = stage.node.writes();
    eventually("another try", || (stage.node.writes() > tried).then_some(())).await;
    stage.until("the end of the try", |status| status.state == State::Degraded).await;
    for function in 0..4 {
        let function = address(&format!("0000:52:00.{function}"));
        assert_eq!(stage.node.bindings()[&function], at_boot[&function], "{function}");
    }
    stage.node.sim.set_faults(&[]).unwrap();
    stage.until("the card bound as well", |status| status.state == State::Ready).await;
    stage.healthy(card, 1).await;
    assert_eq!(stage.node.on("0000:52:00.3").as_deref(), Some("vfio-pci"));
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hanging_write_wedges_its_group_alone_until_it_comes_back() {
    let node = Node::new(&three_groups());
    node.sim.set_faults(&[on(BAD, Effect::Hang)]).unwrap();
    let mut stage = Stage::start_with(node, VmPassthrough, StandinOptions::default(), impatient).await;
    let status = stage
        .until("the group wedged", |status| {
            group_codes(status, 60) == ["Wedged"] && !status.offers.is_empty()
        })
        .await;
    assert!(
        group_text(&status, 60).contains("the kernel did not answer within"),
        "{}",
        group_text(&status, 60)
    );
    stage.healthy(A10, 2).await;
    stage.health(A10, BAD, false).await;
    let (code, text) = stage.node.refused(&stage.kubelet, A10, &[BAD]).await;
    assert!(code == Code::Unavailable && text.contains("[Wedged]"), "{code}: {text}");
    stage.kubelet.allocate(&pod("vm"), "compute", A10, Want::Ids(vec![GPU.into()])).await.unwrap();
    // It stays so, with one writer and one write, whatever is asked of the node meanwhile.
    let writers = stage.node.writers();
    assert_eq!(writers.len(), 1);
    stage.passes(5).await;
    stage.wish(Container);
    stage
        .until("the other free one given back", |status| {
            status.workload_type == Container
                && status.groups.iter().any(|group| group.group == Some(26) && group.right)
        })
        .await;
    stage.wish(VmPassthrough);
    stage.healthy(A10, 2).await;
    stage.passes(5).await;
    assert_eq!(group_codes(&stage.service.status.borrow().clone(), 60), ["Wedged"]);
    assert_eq!((stage.node.writers(), stage.node.writes_to(BAD, 0).len()), (writers, 1));
    assert_eq!(stage.node.on(BAD).as_deref(), Some("nvidia"));

    stage.node.sim.set_faults(&[]).unwrap();
    stage.healthy(A10, 3).await;
    stage.until("ready", |status| status.state == State::Ready).await;
    assert_eq!(stage.node.writes_to(BAD, 0), to_vfio(BAD), "the write that came back is not made again");
    eventually("the writer's end", || stage.node.writers().is_empty().then_some(())).await;
    stage.end().await;
}

/// Lets go whoever waits to open this pipe, also where the test has failed: nobody else would, ever.
struct Wakes(PathBuf);

impl Drop for Wakes {
    fn drop(&mut self) {
        // One that is a plain file again has nobody waiting.
        let _ = OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(&self.0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_whose_opening_hangs_wedges_its_group_too() {
    let node = Node::new(&four_groups());
    let switch = "0000:05:00.0";
    // What is left is the unbind: nothing has been written, and so nothing been journalled, when the first step hangs.
    node.sim.put(address(switch), Some("nvidia-nvswitch"), Some("vfio-pci")).unwrap();
    let unbind = node.sim.host().sys("bus/pci/drivers/nvidia-nvswitch/unbind");
    fs::remove_file(&unbind).unwrap();
    unistd::mkfifo(&unbind, Mode::S_IRWXU).unwrap();
    let mut stage = Stage::start_with(node, VmPassthrough, StandinOptions::default(), impatient).await;
    let _wakes = Wakes(unbind.clone());
    stage.until("the group wedged", |status| group_codes(status, 86) == ["Wedged"]).await;
    stage.healthy(A10, 2).await;
    let writers = stage.node.writers();
    assert_eq!(writers.len(), 1);
    // Longer than the pause after a first failure: the clock does not send a second writer after the first.
    let begun = tokio::time::Instant::now();
    while begun.elapsed() < Duration::from_secs(3) {
        stage.passes(1).await;
        assert_eq!(stage.node.writers(), writers);
    }
    assert_eq!(stage.node.writes_to(switch, 0), []);
    // The opening comes back, to a writer that nobody tells "go" any more.
    let reader = OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(&unbind).unwrap();
    assert!(reader.metadata().unwrap().file_type().is_fifo());
    eventually("the writer's end", || (!stage.node.writers().contains(&writers[0])).then_some(())).await;
    vfiod::atomic_file::replace(&unbind, b"", 0o644).unwrap();
    stage.until("ready", |status| status.state == State::Ready).await;
    assert_eq!(stage.node.on(switch).as_deref(), Some("vfio-pci"));
    assert_eq!(stage.node.writes_to(switch, 0), to_vfio_from(switch, "nvidia-nvswitch"));
    stage.end().await;
}

fn to_vfio_from(function: &str, driver: &str) -> [Write; 2] {
    let address = address(function);
    [Write::Unbind { address, driver: driver.to_owned() }, Write::Probe { address }]
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_killed_over_a_hanging_write_leaves_it_to_its_writer() {
    let node = Node::new(&three_groups());
    let kubelet = node.kubelet().await;
    node.sim.set_faults(&[on(BAD, Effect::Hang)]).unwrap();
    let agent = node.agent("workloadType: vm-passthrough\nwriteDeadlineSeconds: 30");
    eventually("the write that hangs", || (node.writes_to(BAD, 0).len() == 1).then_some(())).await;
    agent.kill();
    // Idle writers end with their agent; the one in the kernel does not.
    let writers = eventually("the idle writers' end", || {
        let writers = node.writers();
        (writers.len() == 1).then_some(writers)
    })
    .await;
    for end in ["kill", "terminate"] {
        let mut agent = node.agent("workloadType: vm-passthrough");
        let status =
            agent.until("the others bound", |status| json_right(status, 25) && json_right(status, 26)).await;
        assert_eq!(json_codes(&status, 60), ["Wedged"]);
        assert!(status.to_string().contains(&format!("process {}", writers[0])), "{status}");
        kubelet.wait_for(|state| state.healthy(A10) == 2, LIMIT).await.unwrap();
        agent.passes(2).await;
        assert_eq!((node.writes_to(BAD, 0), node.writers()), (to_vfio(BAD)[..1].to_vec(), writers.clone()));
        if end == "kill" {
            agent.kill();
        } else {
            assert_eq!(agent.terminate().await.0, Some(0));
        }
    }
    let mut agent = node.agent("workloadType: vm-passthrough");
    agent.until("the others bound", |status| json_right(status, 25) && json_right(status, 26)).await;
    node.sim.set_faults(&[]).unwrap();
    agent.ready().await;
    kubelet.wait_for(|state| state.healthy(A10) == 3, LIMIT).await.unwrap();
    assert_eq!(node.writes_to(BAD, 0), to_vfio(BAD), "each write once, whoever made it");
    eventually("the writer's end", || node.writers().is_empty().then_some(())).await;
    assert_eq!(node.journal()["priors"][BAD]["was"], json!({ "driver": "nvidia" }));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_told_to_end_over_a_hanging_write_ends() {
    let node = Node::new(&three_groups());
    let _kubelet = node.kubelet().await;
    node.sim.set_faults(&[on(BAD, Effect::Hang)]).unwrap();
    let agent = node.agent("workloadType: vm-passthrough\nwriteDeadlineSeconds: 1");
    eventually("the write that hangs", || (node.writes_to(BAD, 0).len() == 1).then_some(())).await;
    let (code, log) = agent.terminate().await;
    assert_eq!(code, Some(0), "{log}");
    assert_eq!(node.writers().len(), 1);
    assert_eq!(node.journal()["pending"][0]["unit"], json!([BAD]));
    assert_eq!(node.journal()["pending"][0]["write"], "override");
    node.sim.set_faults(&[]).unwrap();
    eventually("the writer's end", || node.writers().is_empty().then_some(())).await;
    assert_eq!(node.writes_to(BAD, 0).len(), 1);
    node.agent("workloadType: vm-passthrough").ready().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_is_killed_at_whichever_write_a_restart_converges() {
    let all = |node: &Node, driver: &str| {
        node.bindings().values().all(|(bound, _)| bound.as_deref() == Some(driver))
    };
    for (moment, effect) in [
        (Moment::Before, Effect::KillAgent),
        (Moment::After, Effect::KillAgent),
        (Moment::Before, Effect::KillChild),
        (Moment::After, Effect::KillChild),
        (Moment::After, Effect::KillBoth),
    ] {
        for at in [1, 5] {
            let context = format!("write {at}, {moment:?}, {effect:?}");
            let node = Node::new(&three_groups());
            let _kubelet = node.kubelet().await;
            node.sim.set_faults(&[Fault::at(at, moment, effect)]).unwrap();
            let mut agent = node.agent("workloadType: vm-passthrough");
            if effect == Effect::KillChild {
                // The agent lives, says so, and tries again by itself.
                agent.ready().await;
                assert!(agent.log().contains("WriterEnded"), "{context}: {}", agent.log());
            } else {
                assert_eq!(agent.ended().await, None, "{context}: {}", agent.log());
                agent = node.agent("workloadType: vm-passthrough");
                agent.ready().await;
            }
            assert!(all(&node, "vfio-pci"), "{context}: {:?}", node.bindings());
            // And on the way back, with the same fault.
            node.sim.set_faults(&[Fault::at(node.writes() + at, moment, effect)]).unwrap();
            node.configure("workloadType: container");
            let home = |status: &serde_json::Value| {
                status["workload_type"] == "container" && status["state"] == "Ready"
            };
            if effect != Effect::KillChild {
                assert_eq!(agent.ended().await, None, "{context}: {}", agent.log());
                agent = node.agent("workloadType: container");
            }
            agent.until("given back", home).await;
            assert!(all(&node, "nvidia"), "{context}: {:?}", node.bindings());
            agent.terminate().await;
            assert_eq!(node.journal()["priors"], json!({}), "{context}");
            assert_eq!(node.journal()["pending"], json!([]), "{context}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_changed_behind_the_agents_back_is_seen_before_anything_is_promised() {
    // Nobody but the request itself makes this agent look.
    let mut stage =
        Stage::bound(&three_groups(), |settings| settings.tuning.rescan = Duration::from_secs(3600)).await;
    stage.node.sim.set_faults(&[on(GPU, errno(Errno::EBUSY))]).unwrap();
    stage.node.sim.put(address(GPU), Some("nvidia"), None).unwrap();
    let (code, text) = stage.node.refused(&stage.kubelet, A10, &[GPU]).await;
    assert!(code == Code::Unavailable && text.contains("it is on nvidia"), "{code}: {text}");
    stage.health(A10, GPU, false).await;
    // What it saw it also acts upon.
    stage.until("the group's trouble", |status| group_codes(status, 25) == ["KernelRefused"]).await;
    stage.node.sim.set_faults(&[]).unwrap();
    stage.healthy(A10, 3).await;
    assert_eq!(stage.node.on(GPU).as_deref(), Some("vfio-pci"));
    stage.end().await;

    // Without a request, at the next look.
    let mut stage = Stage::bound(&three_groups(), |_| {}).await;
    stage.node.sim.set_faults(&[on(GPU, errno(Errno::EBUSY))]).unwrap();
    stage.node.sim.put(address(GPU), None, Some("vfio-pci")).unwrap();
    stage.health(A10, GPU, false).await;
    // A device that a pod has: it is really bad, and left as it is.
    stage.kubelet.allocate(&pod("vm"), "compute", A10, Want::Ids(vec![OTHER.into()])).await.unwrap();
    stage.node.sim.put(address(OTHER), Some("nvidia"), None).unwrap();
    stage.health(A10, OTHER, false).await;
    let before = stage.node.writes();
    stage.passes(3).await;
    assert_eq!(stage.node.writes_to(OTHER, before), []);
    let status = stage.service.status.borrow().clone();
    assert!(offer_codes(&status, OTHER).contains(&"NotBound"), "{status:?}");
    stage.kubelet.pod_gone(&pod("vm"));
    stage.node.sim.set_faults(&[]).unwrap();
    stage.healthy(A10, 3).await;
    stage.wish(Container);
    stage
        .until("given back", |status| status.workload_type == Container && status.state == State::Ready)
        .await;
    assert_eq!(stage.node.on(GPU).as_deref(), Some("nvidia"));
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_with_a_member_that_cannot_be_read_is_not_taken_apart() {
    let node = Node::new(&Profile::four_function_card());
    let at_boot = node.bindings();
    let mut stage = Stage::start_with(node, VmPassthrough, StandinOptions::default(), |_| {}).await;
    stage.until("bound", |status| status.state == State::Ready).await;
    let before = stage.node.writes();
    // Without its GPU a card's audio, USB and UCSI functions are nobody's companions.
    let class = stage.node.sim.host().function_dir(address("0000:52:00.0")).join("class");
    let content = fs::read(&class).unwrap();
    vfiod::atomic_file::replace(&class, b"garbage\n", 0o644).unwrap();
    stage.wish(Container);
    let status = stage
        .until("refused", |status| status.workload_type == Container && status.state == State::Degraded)
        .await;
    assert_eq!(group_codes(&status, 35), ["Unreadable"]);
    stage.passes(3).await;
    assert_eq!(stage.node.writes(), before);
    vfiod::atomic_file::replace(&class, &content, 0o644).unwrap();
    stage
        .until("given back", |status| status.workload_type == Container && status.state == State::Ready)
        .await;
    assert_eq!(stage.node.bindings(), at_boot);
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_cannot_be_looked_at_keeps_its_offers_and_promises_nothing() {
    let mut stage =
        Stage::bound(&three_groups(), |settings| settings.tuning.rescan = Duration::from_secs(3600)).await;
    let devices = stage.node.sim.host().sys("bus/pci/devices");
    let aside = devices.with_file_name("aside");
    let mv = |from, to| nix::fcntl::renameat(nix::fcntl::AT_FDCWD, from, nix::fcntl::AT_FDCWD, to).unwrap();
    mv(&devices, &aside);
    vfiod::atomic_file::replace(&devices, b"in the way", 0o644).unwrap();
    let before = stage.node.writes();
    let (code, text) = stage.node.refused(&stage.kubelet, A10, &[GPU]).await;
    assert!(code == Code::Unavailable && text.contains("[NotObserved]"), "{code}: {text}");
    stage.wish(Container);
    stage.until("failed", |status| status.workload_type == Container && status.state == State::Failed).await;
    stage.passes(2).await;
    stage.wish(VmPassthrough);
    stage
        .until("failed", |status| status.workload_type == VmPassthrough && status.state == State::Failed)
        .await;
    assert_eq!(stage.kubelet.state().borrow().healthy(A10), 3);
    fs::remove_file(&devices).unwrap();
    mv(&aside, &devices);
    stage.until("ready", |status| status.state == State::Ready).await;
    assert_eq!(stage.node.writes(), before);
    stage.kubelet.allocate(&pod("vm"), "compute", A10, Want::Ids(vec![GPU.into()])).await.unwrap();
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_journalled_is_not_done() {
    let node = Node::new(&three_groups());
    let journal = node.dir.path().join("var/lib/vfiod/journal.json");
    let mut stage = Stage::start_with(node, Container, StandinOptions::default(), |_| {}).await;
    stage.until("ready", |status| status.state == State::Ready).await;
    // Nothing was worth journalling yet. A directory cannot be replaced by a file.
    fs::create_dir(&journal).unwrap();
    stage.wish(VmPassthrough);
    let status = stage.until("trouble", |status| group_codes(status, 60) == ["NotRecorded"]).await;
    assert_eq!(status.state, State::Degraded);
    stage.passes(3).await;
    assert_eq!(stage.node.writes(), 0);
    fs::remove_dir(&journal).unwrap();
    stage
        .until("bound", |status| status.state == State::Ready && status.workload_type == VmPassthrough)
        .await;
    stage.healthy(A10, 3).await;
    stage.passes(1).await;

    fs::remove_file(&journal).unwrap();
    fs::create_dir(&journal).unwrap();
    let (code, text) = stage.node.refused(&stage.kubelet, A10, &[GPU]).await;
    assert!(code == Code::Internal && text.contains("could not be made durable"), "{code}: {text}");
    assert!(stage.service.status.borrow().holds.is_empty());
    fs::remove_dir(&journal).unwrap();
    stage.node.ask(&stage.kubelet, A10, &[GPU]).await.unwrap();
    assert_eq!(stage.node.journal()["holds"][GPU]["resource"], A10);
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writer_has_nothing_open_but_its_pipe() {
    let node = Node::new(&three_groups());
    let _kubelet = node.kubelet().await;
    node.sim.set_faults(&[on(BAD, Effect::Hang)]).unwrap();
    // Both ends are inherited by whatever is started: a careless parent's.
    let (read, write) = unistd::pipe().unwrap();
    let agent = node.agent("workloadType: vm-passthrough");
    eventually("the write that hangs", || (node.writes_to(BAD, 0).len() == 1).then_some(())).await;
    let open = |pid: u32| {
        let entries = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
        entries
            .map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap())
            .collect::<BTreeSet<i32>>()
    };
    let inherited = open(agent.pid());
    assert!(inherited.contains(&read.as_raw_fd()) && inherited.contains(&write.as_raw_fd()), "{inherited:?}");
    let writers = eventually("the other writers' end", || {
        let writers = node.writers();
        (writers.len() == 1).then_some(writers)
    })
    .await;
    assert_eq!(open(writers[0]), BTreeSet::from([0, 1, 2]));
    // `ps` says whose it is and what it does.
    let of = |file: &str| fs::read_to_string(format!("/proc/{}/{file}", writers[0])).unwrap();
    assert!(of("cmdline").starts_with("vfiod\0kernel-writer\0"), "{}", of("cmdline"));
    assert_eq!(of("comm"), "kernel-writer\n");
    agent.kill();
    assert_eq!(node.writers(), writers);
    node.sim.set_faults(&[]).unwrap();
    eventually("the writer's end", || node.writers().is_empty().then_some(())).await;
}

#[test]
fn a_writer_whose_agent_dies_before_go_writes_nothing() {
    let node = Node::new(&three_groups());
    let at_boot = node.bindings();
    let mut child = std::process::Command::new(node::vfiod())
        .arg(vfiod::cli::KERNEL_WRITER)
        .arg(node.dir.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
    let ask = json!({ "prepare": to_vfio(GPU)[1] });
    writeln!(input, "{ask}").unwrap();
    assert_eq!(output.next().unwrap().unwrap(), "\"ready\"");
    // All that the death of an agent is to its writer.
    drop(input);
    assert!(output.next().is_none());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert_eq!((node.writes(), node.bindings()), (0, at_boot));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_opens_its_group_in_the_last_moment_wedges_it_and_keeps_it() {
    let mut stage = Stage::bound(&three_groups(), impatient).await;
    // Between the last look and the unbind: the first write is held up, and meanwhile a VM comes from nowhere.
    let bound = stage.node.writes();
    stage.node.sim.set_faults(&[on(BAD, Effect::Hang)]).unwrap();
    stage.wish(Container);
    eventually("the write that is held up", || (!stage.node.writes_to(BAD, bound).is_empty()).then_some(()))
        .await;
    stage.node.sim.start_vmm(VMM, "qemu-kvm", 60).unwrap();
    stage.node.sim.set_faults(&[]).unwrap();
    // Whether that write was late or not: the VM's group is not taken, and its process is named or the write is late.
    let status = stage
        .until("the group left alone", |status| {
            let codes = group_codes(status, 60);
            !status.offers.iter().any(|offer| offer.id == address(GPU).into())
                && (codes.contains(&"InUse") || codes.contains(&"Wedged"))
        })
        .await;
    assert_eq!(status.workload_type, Container);
    stage.passes(3).await;
    assert_eq!(stage.node.on(BAD).as_deref(), Some("vfio-pci"));
    stage.node.sim.end_process(VMM).unwrap();
    stage.until("given back", |status| status.state == State::Ready && status.offers.is_empty()).await;
    assert_eq!(stage.node.on(BAD).as_deref(), Some("nvidia"));
    stage.end().await;
}
