//! Reports of people who do this job, in which vfiod was once wrong: each a small node, what is done to it, and the right
//! answer. The names are those of the reports' kinds.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "test code")]
#![expect(clippy::disallowed_methods, reason = "a test's own files")]

mod node;

use std::{fs, path::Path, time::Duration};

use decide::wish::WorkloadType::{Container, VmPassthrough};
use node::{
    Node, address,
    stage::{Stage, group_codes, group_text, offer_codes, pod},
};
use serde_json::Value;
use tonic::Code;
use vfio::sim::Profile;
use vfiod::{
    kubelet::{Claim, proto::v1beta1},
    standin::{PodResourcesMode, StandinOptions, Want},
    status::State,
};

const A100: &str = "nvidia.com/GA100_A100_PCIE_80GB";

fn profile(name: &str) -> Profile {
    Profile::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/cases/{name}.yaml")))
        .unwrap()
}

fn codes(group: &Value) -> Vec<&str> {
    group["refusals"].as_array().unwrap().iter().map(|refusal| refusal["code"].as_str().unwrap()).collect()
}

fn messages(value: &Value) -> String {
    value["refusals"].as_array().unwrap().iter().map(|refusal| refusal["message"].as_str().unwrap()).collect()
}

fn of_group(shown: &Value, group: u32) -> Value {
    let groups = shown["groups"].as_array().unwrap();
    groups.iter().find(|found| found["group"] == group).unwrap_or_else(|| panic!("{group}: {shown}")).clone()
}

/// harvester/harvester#6518: after a hot swap within one boot another device has the address that the journal knows.
#[test]
fn stale_prior_foreign_device() {
    let node = Node::new(&profile("stale-prior-before"));
    assert_eq!(node.run(&["bind", "--all"]).code, Some(0));
    let journal = node.journal();
    assert_eq!(journal["priors"]["0000:03:00.0"]["was"]["driver"], "nvidia");
    // The card is changed for a network card and a disk; state and boot stay.
    let state = fs::read(node.dir.path().join("var/lib/vfiod/journal.json")).unwrap();
    let swapped = Node::new(&profile("stale-prior-after"));
    fs::create_dir_all(swapped.dir.path().join("var/lib/vfiod")).unwrap();
    fs::write(swapped.dir.path().join("var/lib/vfiod/journal.json"), state).unwrap();
    let at_boot = swapped.bindings();

    let plan = swapped.run(&["plan", "--workload-type", "container"]);
    assert_eq!(plan.code, Some(0));
    assert!(plan.stdout.contains("StalePrior") && plan.stdout.contains("15b3:101d"), "{}", plan.stdout);
    assert!(!plan.stdout.contains("->"), "{}", plan.stdout);
    assert_eq!(swapped.run(&["unbind", "--all"]).code, Some(0));
    assert_eq!((swapped.writes(), swapped.bindings()), (0, at_boot.clone()));
    assert_eq!(swapped.journal()["priors"], serde_json::json!({}), "the entries are dropped");
}

#[tokio::test(flavor = "multi_thread")]
async fn stale_prior_foreign_device_under_an_agent() {
    let mut profile = profile("stale-prior-before");
    profile.drivers.push("nvme".to_owned());
    let mut stage = Stage::start(&profile, VmPassthrough).await;
    stage.until("bound", |status| status.state == State::Ready).await;
    // Under the feet of a living agent: the same tree with other devices at the same addresses.
    let devices = stage.node.sim.host().sys("bus/pci/devices");
    let put = |address: &str, id: (&str, &str), class: &str, driver: &str| {
        let dir = devices.join(address);
        for (file, value) in [("vendor", id.0), ("device", id.1), ("class", class)] {
            fs::write(dir.join(file), format!("{value}\n")).unwrap();
        }
        stage.node.sim.put(node::address(address), Some(driver), None).unwrap();
    };
    put("0000:03:00.0", ("0x15b3", "0x101d"), "0x020000", "mlx5_core");
    put("0000:03:00.1", ("0x144d", "0xa80a"), "0x010802", "nvme");
    let before = stage.node.writes();
    stage.wish(Container);
    stage.until("on its way to container", |status| status.workload_type == Container).await;
    stage.passes(3).await;
    assert_eq!(stage.node.writes(), before);
    assert_eq!(stage.node.on("0000:03:00.0").as_deref(), Some("mlx5_core"));
    assert_eq!(stage.node.on("0000:03:00.1").as_deref(), Some("nvme"));
    stage.end().await;
}

fn claim(driver: &str, device: &str) -> Claim {
    let [namespace, name, container, claim] = ["tenant", "train", "main", "train-gpu"].map(str::to_owned);
    let (driver, device) = (driver.to_owned(), device.to_owned());
    Claim { namespace, pod: name, container, claim, driver, device, cdi: Vec::new() }
}

/// kata-containers/kata-containers#13323: a claim's devices stand in no `devices` of PodResources.
#[tokio::test(flavor = "multi_thread")]
async fn dra_claim_not_in_use() {
    let other = "0000:22:00.0";
    for (claim, free) in [
        (claim("gpu.nvidia.com", "gpu-0"), None),
        (claim("gpu.example.org", "slot-7"), None),
        (claim("devices.example.org", "pci-0000-21-00-0"), Some(other)),
        (
            Claim { cdi: vec!["vendor.example/gpu=0000:21:00.0".to_owned()], ..claim("x.example", "y") },
            Some(other),
        ),
    ] {
        let node = Node::new(&profile("dra-claim-not-in-use"));
        let kubelet = node.kubelet().await;
        kubelet.claim(claim.clone());
        let ran = tokio::task::spawn_blocking(move || {
            let plan = node.run(&["plan", "-o", "json"]);
            let bind = node.run(&["bind", "--all"]);
            (node, plan, bind)
        });
        let (node, plan, bind) = ran.await.unwrap();
        let group = of_group(&plan.json(), 11);
        assert_eq!(codes(&group), ["InUse"], "{claim:?}");
        let text = messages(&group);
        assert!(text.contains("tenant/train") && text.contains("train-gpu"), "{text}");
        assert_eq!((plan.code, bind.code), (Some(1), Some(1)), "{bind:?}");
        assert_eq!(node.on("0000:21:00.0").as_deref(), Some("nvidia"));
        let expected = if free.is_some() { "vfio-pci" } else { "nvidia" };
        assert_eq!(node.on(other).as_deref(), Some(expected), "{claim:?}");
    }
    // What has nothing to do with GPUs blocks nothing.
    let node = Node::new(&profile("dra-claim-not-in-use"));
    let kubelet = node.kubelet().await;
    kubelet.claim(claim("sriov.example.net", "0000:99:00.1"));
    kubelet.claim(claim("cpu.example.org", "core-3"));
    let bind = tokio::task::spawn_blocking(move || (node.run(&["bind", "--all"]), node)).await.unwrap().0;
    assert_eq!(bind.code, Some(0), "{bind:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_keeps_a_bound_gpu_from_being_given_out() {
    let mut stage = Stage::bound(&profile("dra-claim-not-in-use"), |_| {}).await;
    stage.kubelet.claim(claim("gpu.example.org", "slot-7"));
    stage
        .until("both unhealthy", |status| {
            ["0000:21:00.0", "0000:22:00.0"].iter().all(|id| offer_codes(status, id).contains(&"InUse"))
        })
        .await;
    let (_, text) = stage.node.refused(&stage.kubelet, A100, &["0000:21:00.0"]).await;
    assert!(text.contains("train-gpu"), "{text}");
    stage.kubelet.pod_gone(&node::stage::pod("train"));
    stage.healthy(A100, 2).await;
    stage.end().await;
}

/// kubevirt/kubevirt#18895: a name in sysfs is no node, and `/dev/iommu` alone is of no use.
#[tokio::test(flavor = "multi_thread")]
async fn iommufd_without_cdev() {
    let stage = Stage::bound(&profile("iommufd-without-cdev"), |_| {}).await;
    let dev = |path: &str| stage.node.sim.host().dev(path);
    fs::write(dev("iommu"), "").unwrap();
    let paths = |given: &v1beta1::ContainerAllocateResponse| {
        given.devices.iter().map(|device| device.host_path.clone()).collect::<Vec<_>>()
    };
    let resource = "nvidia.com/GA102GL_A10";
    let given = stage.node.ask(&stage.kubelet, resource, &["0000:17:00.0"]).await.unwrap();
    assert_eq!(paths(&given), ["/dev/vfio/vfio", "/dev/vfio/25"]);
    let node = stage.end().await;

    // The node is there, and iommufd is not.
    let stage = Stage::start_with(node, VmPassthrough, StandinOptions::default(), |settings| {
        settings.tuning.hold_grace = Duration::ZERO;
    })
    .await;
    fs::create_dir_all(stage.node.sim.host().dev("vfio/devices")).unwrap();
    fs::write(stage.node.sim.host().dev("vfio/devices/vfio0"), "").unwrap();
    stage.healthy(resource, 1).await;
    let given = stage.node.ask(&stage.kubelet, resource, &["0000:17:00.0"]).await.unwrap();
    assert_eq!(paths(&given), ["/dev/vfio/devices/vfio0", "/dev/vfio/vfio", "/dev/vfio/25", "/dev/iommu"]);
    fs::remove_file(stage.node.sim.host().dev("iommu")).unwrap();
    stage.end().await;
}

/// NVIDIA/k8s-device-plugin#231: what has fallen off the bus is neither moved nor given out.
#[tokio::test(flavor = "multi_thread")]
async fn dead_gpu_offered() {
    let dead = "0000:c1:00.0";
    for layout in [0xff_u8, 0x7f] {
        let node = Node::new(&profile("dead-gpu-offered"));
        let config = node.sim.host().function_dir(address(dead)).join("config");
        let mut bytes = fs::read(&config).unwrap();
        if layout == 0xff {
            bytes.fill(0xff);
        } else {
            bytes[0x0e] = 0x7f;
        }
        fs::write(&config, &bytes).unwrap();
        let mut stage = Stage::start_with(node, VmPassthrough, StandinOptions::default(), |_| {}).await;
        let status = stage
            .until("the others bound", |status| {
                let right =
                    |group| status.groups.iter().any(|found| found.group == Some(group) && found.right);
                right(11) && right(12) && right(13) && status.state == State::Degraded
            })
            .await;
        assert_eq!(group_codes(&status, 14), ["FunctionLost"]);
        assert!(group_text(&status, 14).contains("power-cycle"), "{}", group_text(&status, 14));
        assert_eq!(stage.node.writes_to(dead, 0), []);
        stage.healthy(A100, 3).await;
        stage.health(A100, dead, false).await;
        let (code, text) = stage.node.refused(&stage.kubelet, A100, &[dead]).await;
        assert!(code == Code::Unavailable && text.contains("[FunctionLost]"), "{code}: {text}");
        stage.end().await;
    }
    // One that dies after it was bound is not unbound either.
    let mut stage = Stage::bound(&profile("dead-gpu-offered"), |_| {}).await;
    let before = stage.node.writes();
    let config = stage.node.sim.host().function_dir(address(dead)).join("config");
    let alive = fs::read(&config).unwrap();
    fs::write(&config, [0xff; 64]).unwrap();
    stage.health(A100, dead, false).await;
    stage.wish(Container);
    stage
        .until("the others given back", |status| {
            let right = |group| status.groups.iter().any(|found| found.group == Some(group) && found.right);
            status.workload_type == Container && right(11) && right(12) && right(13)
        })
        .await;
    assert_eq!(stage.node.writes_to(dead, before), []);
    fs::write(&config, alive).unwrap();
    stage.until("given back", |status| status.state == State::Ready).await;
    stage.end().await;
}

/// harvester/harvester#7340: the kernel gives no VM a group that the firmware demands a direct mapping for.
#[test]
fn rmrr() {
    let node = Node::new(&profile("rmrr"));
    let regions = node.sim.host().sys("kernel/iommu_groups/31/reserved_regions");
    let msi = "0x00000000fee00000 0x00000000feefffff msi\n";
    fs::write(&regions, format!("0x00000000bdf6f000 0x00000000bdf7efff direct\n{msi}")).unwrap();
    let plan = node.run(&["plan", "-o", "json"]).json();
    assert_eq!(codes(&of_group(&plan, 31)), ["ReservedRegion"]);
    let text = messages(&of_group(&plan, 31));
    assert!(text.contains("group 31") && text.contains("firmware"), "{text}");
    assert_eq!(node.run(&["bind", "--all"]).code, Some(1));
    assert_eq!(node.writes(), 0);
    for passes in ["direct-relaxable", "reserved"] {
        fs::write(&regions, format!("0x00000000bdf6f000 0x00000000bdf7efff {passes}\n{msi}")).unwrap();
        assert_eq!(node.run(&["plan"]).code, Some(0), "{passes}");
    }
    // Bound by somebody else all the same: it is not healthy.
    assert_eq!(node.run(&["bind", "--all"]).code, Some(0));
    fs::write(&regions, format!("0x00000000bdf6f000 0x00000000bdf7efff direct\n{msi}")).unwrap();
    let shown = node.run(&["inspect", "-o", "json"]).json();
    assert_eq!(shown["offers"][0]["healthy"], false);
    assert_eq!(shown["offers"][0]["reasons"][0]["code"], "ReservedRegion");
}

/// Coydood/ultimate-macOS-KVM#145: a card is of use as a whole, though its functions sit in several groups.
#[test]
fn card_split_over_groups() {
    for target in ["0000:04:00.0", "0000:04:00.1", "36", "37"] {
        let node = Node::new(&profile("card-split-over-groups"));
        let plan = node.run(&["plan"]);
        assert!(plan.stdout.contains("groups 36 and 37 (0000:04:00.0 0000:04:00.1)"), "{}", plan.stdout);
        let bound = node.run(&["bind", target, "-o", "json"]);
        assert_eq!(bound.code, Some(0), "{target}: {bound:?}");
        assert_eq!(of_group(&bound.json(), 36)["groups"], serde_json::json!([36, 37]));
        for function in ["0000:04:00.0", "0000:04:00.1"] {
            assert_eq!(node.on(function).as_deref(), Some("vfio-pci"), "{target}: {function}");
        }
        assert_eq!(node.run(&["unbind", target]).code, Some(0));
        assert_eq!(node.on("0000:04:00.1").as_deref(), Some("snd_hda_intel"), "{target}");
    }
    // Where it cannot be, a reason names the group.
    let mut profile = profile("card-split-over-groups");
    let mut nic = node::function("0000:05:00.0", 0x101b, 0x02_00_00, Some("mlx5_core"), 37);
    nic.vendor = 0x15b3;
    profile.functions.push(nic);
    let node = Node::new(&profile);
    let plan = node.run(&["plan", "-o", "json"]).json();
    assert_eq!(codes(&of_group(&plan, 36)), ["ForeignMember"]);
    assert!(messages(&of_group(&plan, 36)).contains("group 37"), "{plan}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_split_card_goes_to_one_vm_with_both_groups() {
    let mut stage = Stage::bound(&profile("card-split-over-groups"), |_| {}).await;
    let status = stage.service.status.borrow().clone();
    let resource = status.offers[0].resource.clone();
    let given = stage.node.ask(&stage.kubelet, &resource, &["0000:04:00.0"]).await.unwrap();
    let paths: Vec<_> = given.devices.iter().map(|device| device.host_path.as_str()).collect();
    assert_eq!(paths, ["/dev/vfio/vfio", "/dev/vfio/36", "/dev/vfio/37"]);
    assert_eq!(given.envs.values().collect::<Vec<_>>(), ["0000:04:00.0"]);
    // Whoever has the companion's group alone open holds the card.
    let before = stage.node.writes();
    stage.node.sim.start_process(4242, "qemu-kvm", &["/dev/vfio/37"]).unwrap();
    stage.wish(Container);
    stage.until("blocked", |status| status.state == State::Blocked).await;
    stage.passes(2).await;
    assert_eq!(stage.node.writes(), before);
    stage.node.sim.end_process(4242).unwrap();
    stage.end().await;
}

/// NVIDIA/k8s-device-plugin#2037's kind: a kubelet that says nothing is not a node that is fine.
#[tokio::test(flavor = "multi_thread")]
async fn podresources_silent_is_ready() {
    let soon = |settings: &mut vfiod::agent::Settings| {
        settings.tuning.pods_silence = Duration::from_millis(300);
        settings.tuning.pod_resources_deadline = Duration::from_millis(200);
    };
    let mut stage = Stage::bound(&profile("podresources-silent-is-ready"), soon).await;
    let (gpu, other) = ("0000:21:00.0", "0000:22:00.0");
    let want = Want::Ids(vec![gpu.to_owned()]);
    stage.kubelet.allocate(&pod("vm"), "compute", A100, want).await.unwrap();
    stage.node.sim.start_vmm(4242, "qemu-kvm", 11).unwrap();
    stage.passes(2).await;
    stage.kubelet.set_pod_resources(PodResourcesMode::NoSocket).await.unwrap();
    stage
        .until("degraded", |status| {
            let told = status.reasons.iter().any(|reason| reason.code == "PodResourcesUnknown");
            told && status.state == State::Degraded
        })
        .await;
    // While the VM runs it is somebody's, and stays healthy, however long the kubelet is silent.
    tokio::time::sleep(Duration::from_millis(600)).await;
    stage.passes(2).await;
    assert!(offer_codes(&stage.service.status.borrow().clone(), gpu).is_empty());
    stage.node.sim.end_process(4242).unwrap();
    stage.kubelet.pod_gone(&pod("vm"));
    stage.health(A100, gpu, false).await;
    let status = stage.service.status.borrow().clone();
    assert_eq!(offer_codes(&status, gpu), ["PodResourcesUnknown"]);
    let (code, text) = stage.node.refused(&stage.kubelet, A100, &[gpu]).await;
    assert!(code == Code::FailedPrecondition && text.contains("not known"), "{code}: {text}");
    stage.health(A100, other, true).await;
    stage.node.ask(&stage.kubelet, A100, &[other]).await.unwrap();
    stage.kubelet.set_pod_resources(PodResourcesMode::Answers).await.unwrap();
    stage.health(A100, gpu, true).await;
    stage.end().await;
}

/// kubernetes-sigs/dra-driver-nvidia-gpu#1037: the driver's common nodes hold no card that has a node of its own.
#[test]
fn nvidiactl_blocks_every_gpu() {
    let node = Node::new(&profile("nvidiactl-blocks-every-gpu"));
    let nodes = ["/dev/nvidia0", "/dev/nvidiactl"];
    node.sim.start_process(812, "nvidia-persiste", &nodes).unwrap();
    let bound = node.run(&["bind", "0000:22:00.0"]);
    assert_eq!(bound.code, Some(0), "{bound:?}");
    let refused = node.run(&["bind", "0000:21:00.0"]);
    assert_eq!(refused.code, Some(1));
    assert!(refused.stdout.contains("nvidia-smi -i 0000:21:00.0 -pm 0"), "{}", refused.stdout);
    assert!(!refused.stdout.contains("/dev/nvidiactl open"), "{}", refused.stdout);
    assert_eq!(node.on("0000:21:00.0").as_deref(), Some("nvidia"));
    // A card whose own node is not known may be held by whoever has the driver open.
    let node = Node::new(&profile("nvidiactl-blocks-every-gpu"));
    fs::remove_dir_all(node.sim.host().proc("driver/nvidia/gpus/0000:22:00.0")).unwrap();
    node.sim.start_process(812, "nvidia-persiste", &nodes).unwrap();
    assert_eq!(node.run(&["bind", "0000:22:00.0"]).code, Some(1));
}

/// A kubelet's directory that is not there says nothing of pods.
#[test]
fn a_missing_pod_resources_directory_is_no_empty_one() {
    let node = Node::new(&profile("rmrr"));
    let absent = ["--kubelet-dir", "/nonexistent/kubelet"];
    let refused = node.run(&[&["bind", "--all"][..], &absent].concat());
    assert_eq!((refused.code, node.writes()), (Some(1), 0));
    assert!(refused.stdout.contains("--no-kubernetes"), "{}", refused.stdout);
    let bound = node.run(&[&["bind", "--all", "--no-kubernetes"][..], &absent].concat());
    assert_eq!(bound.code, Some(0), "{bound:?}");
}
