//! Functions in detail, their holders in full, and boot framebuffers, as people and programs meet them.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "test code")]

mod node;

use std::{
    fs::{self, create_dir_all},
    path::{Path, PathBuf},
};

use node::{Node, Ran, address, four_groups};
use serde_json::{Value, json};
use vfio::{sim::Profile, vendor::Scope};

const GPU: &str = "0000:17:00.0";
const QUADRO: &str = "0000:52:00.0";
const UID: &str = "5f3c1a2b-0d4e-4f60-8a7b-9c0d1e2f3a4b";
const ID: &str = "3f8e2d1c0b9a87654321fedcba98765432100123456789abcdef0123456789ab";

#[expect(clippy::disallowed_methods, reason = "a test's own file")]
fn put(path: &Path, content: impl AsRef<[u8]>) {
    create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

fn device_dir(node: &Node, function: &str) -> PathBuf {
    node.sim.host().function_dir(address(function))
}

/// `/proc/iomem` of a node whose firmware draws on `function`, as an unprivileged reader sees it.
fn draw_on(node: &Node, function: &str, drivers: &[&str]) {
    let mut text = format!(
        "00000000-00000000 : System RAM\n00000000-00000000 : PCI Bus 0000:50\n  00000000-00000000 : {function}\n"
    );
    for (depth, driver) in drivers.iter().enumerate() {
        text.push_str(&format!("{}00000000-00000000 : {driver}\n", "  ".repeat(depth + 2)));
    }
    put(&node.sim.host().proc("iomem"), text);
}

fn group(shown: &Value, id: u32) -> Value {
    shown["groups"].as_array().unwrap().iter().find(|g| g["group"] == id || g["id"] == id).unwrap().clone()
}

fn offer(node: &Node, id: &str) -> Value {
    let shown = node.run(&["inspect", "-o", "json"]).json();
    shown["offers"].as_array().unwrap().iter().find(|o| o["id"] == id).unwrap().clone()
}

fn codes(reasons: &Value) -> Vec<&str> {
    reasons.as_array().unwrap().iter().map(|reason| reason["code"].as_str().unwrap()).collect()
}

#[test]
fn a_gpu_that_the_firmware_draws_on_is_not_bound_and_the_cure_is_said() {
    for (drivers, cure) in [
        (&["BOOTFB"][..], "initcall_blacklist=sysfb_init"),
        (&["BOOTFB", "simpledrm"], "initcall_blacklist=sysfb_init"),
        (&["efifb"], "video=efifb:off"),
        (&["vesafb"], "video=vesafb:off"),
    ] {
        let node = Node::new(&four_groups());
        draw_on(&node, QUADRO, drivers);
        let Ran { code, stdout, .. } = node.run(&["bind", "35"]);
        assert_eq!(code, Some(1), "{stdout}");
        assert!(stdout.contains("BootFramebuffer") && stdout.contains(cure), "{stdout}");
        assert_eq!(node.writes(), 0, "the companions stay as well");
        let refused = group(&node.run(&["plan", "-o", "json"]).json(), 35);
        assert_eq!(codes(&refused["refusals"]), ["BootFramebuffer"]);
        assert_eq!(
            codes(&offer(&node, QUADRO)["reasons"]).iter().filter(|code| **code == "BootFramebuffer").count(),
            1
        );
        // The other groups are none the worse.
        assert_eq!(node.run(&["bind", "25"]).code, Some(0));
        assert_eq!(offer(&node, GPU)["healthy"], true);
    }
}

/// Field report 145: the bind succeeds, and the guest's driver fails.
#[test]
fn a_gpu_that_was_bound_under_a_boot_framebuffer_is_not_offered() {
    let node = Node::new(&four_groups());
    assert_eq!(node.run(&["bind", "35"]).code, Some(0));
    assert_eq!(offer(&node, QUADRO)["healthy"], true);
    draw_on(&node, QUADRO, &["BOOTFB", "simpledrm"]);
    let offered = offer(&node, QUADRO);
    assert_eq!((&offered["healthy"], codes(&offered["reasons"])), (&json!(false), vec!["BootFramebuffer"]));
    let message = offered["reasons"][0]["message"].as_str().unwrap();
    assert!(message.contains("BOOTFB > simpledrm") && message.contains("kernel command line"), "{message}");
    // It is right where it is: nothing is refused, and the way back is open.
    assert_eq!(group(&node.run(&["plan", "-o", "json"]).json(), 35)["verdict"], "right");
    assert_eq!(node.run(&["unbind", "35"]).code, Some(0));
    assert_eq!(node.driver(address(QUADRO)).as_deref(), Some("nvidia"));
}

#[test]
fn a_framebuffer_on_the_boards_own_vga_concerns_no_gpu() {
    let node = Node::new(&four_groups());
    draw_on(&node, "0000:04:00.0", &["BOOTFB", "simpledrm"]);
    assert_eq!(node.run(&["bind", "--all"]).code, Some(0));
    assert_eq!(offer(&node, QUADRO)["healthy"], true);
}

#[test]
fn an_iomem_that_cannot_be_read_is_said() {
    let node = Node::new(&four_groups());
    // A directory: root passes any permission bits.
    std::fs::remove_file(node.sim.host().proc("iomem")).unwrap();
    create_dir_all(node.sim.host().proc("iomem")).unwrap();
    let detail = node.run(&["inspect", GPU, "-o", "json"]).json()["details"][0].clone();
    assert_eq!(detail["framebuffer"], Value::Null);
    assert!(detail["framebuffer_unknown"].as_str().unwrap().contains("proc/iomem"), "{detail}");
}

#[test]
fn a_refusal_names_the_holders_pod_and_the_cure() {
    let node = Node::new(&four_groups());
    node.run(&["bind", "25"]);
    node.sim.start_vmm(4242, "qemu-kvm", 25).unwrap();
    let cgroup =
        format!("0::/kubepods.slice/kubepods-pod{}.slice/cri-containerd-{ID}.scope\n", UID.replace('-', "_"));
    put(&node.sim.host().proc("4242/cgroup"), cgroup);
    put(&node.sim.host().proc("4242/cmdline"), b"/usr/libexec/qemu-kvm\0-object\0secret,data=hunter2\0");
    node.sim.start_process(77, "nvidia-persiste", &["/dev/nvidia0"]).unwrap();
    put(&node.sim.host().proc("77/cgroup"), "0::/system.slice/nvidia-persistenced.service\n");

    let unbound = node.run(&["unbind", "25"]);
    assert_eq!(unbound.code, Some(1));
    let said = format!("process 4242 (qemu-kvm) of pod UID {UID} (container {ID}) has /dev/vfio/25 open; ");
    assert!(unbound.stdout.contains(&said), "{unbound:?}");
    let bound = node.run(&["bind", "35"]);
    assert!(bound.stdout.contains("systemctl stop nvidia-persistenced.service"), "{bound:?}");

    let shown = node.run(&["inspect", "-o", "json"]);
    let user = &group(&shown.json(), 25)["users"][0];
    for (key, value) in [
        ("user", json!("process")),
        ("pid", json!(4242)),
        ("command", json!("qemu-kvm")),
        ("program", json!("/usr/libexec/qemu-kvm")),
        ("owner", json!("pod")),
        ("pod_uid", json!(UID)),
        ("container_id", json!(ID)),
        ("node", json!("/dev/vfio/25")),
    ] {
        assert_eq!(user[key], value, "{key}");
    }
    for text in [&unbound.stdout, &bound.stdout, &shown.stdout, &node.run(&["inspect", GPU]).stdout] {
        assert!(!text.contains("hunter2"), "{text}");
    }
}

#[test]
fn display_nodes_and_the_nodes_of_a_drivers_own_root_are_held_too() {
    for held in [
        "/dev/dri/card1",
        "/dev/dri/renderD128",
        "/run/nvidia/driver/dev/nvidia0",
        "/run/nvidia/driver/dev/nvidiactl",
        "/dev/nvidia-caps/nvidia-cap1",
    ] {
        let node = Node::new(&four_groups());
        // What is common to the driver holds the card only where no node is known to be the card's own.
        if held.ends_with("nvidiactl") || held.contains("caps") {
            fs::remove_dir_all(node.dir.path().join(format!("proc/driver/nvidia/gpus/{QUADRO}"))).unwrap();
        }
        for minor in ["card1", "renderD128", "card1-DP-1"] {
            create_dir_all(device_dir(&node, QUADRO).join("drm").join(minor)).unwrap();
        }
        put(&node.dir.path().join(held.trim_start_matches('/')), "");
        assert_eq!(node.run(&["plan"]).code, Some(0), "{held}: nobody has it open yet");
        node.sim.start_process(99, "Xorg", &[held]).unwrap();
        let refused = node.run(&["bind", "35"]);
        assert_eq!((refused.code, node.writes()), (Some(1), 0), "{held}: {refused:?}");
        assert!(refused.stdout.contains(&format!("has {held} open")), "{refused:?}");
        // Another card's display node says nothing of this one.
        if held.starts_with("/dev/dri") {
            assert_eq!(node.run(&["bind", "25"]).code, Some(0), "{held}");
        }
    }
}

/// A daemon keeps one card's node open, and the driver's control node beside it: the other card is free, and the cure is for
/// the one alone.
#[test]
fn a_cards_own_node_holds_that_card_alone() {
    let node = Node::new(&Profile::hgx_h100());
    let nodes = vfio::vendor::nodes(node.sim.host()).unwrap();
    let held = "0000:11:00.0";
    let own = nodes.iter().find(|(_, scope)| **scope == Scope::Function(address(held))).unwrap().0;
    node.sim.start_process(33, "nvidia-persiste", &[own, "/dev/nvidiactl"]).unwrap();
    let bound = node.run(&["bind", "0000:12:00.0"]);
    assert_eq!((bound.code, node.driver(address("0000:12:00.0")).as_deref()), (Some(0), Some("vfio-pci")));
    let refused = node.run(&["bind", held]);
    assert_eq!((refused.code, node.driver(address(held)).as_deref()), (Some(1), Some("nvidia")));
    assert!(refused.stdout.contains(&format!("has {own} open; nvidia-smi -i {held} -pm 0 ")), "{refused:?}");
}

/// AMD's GPUs go by the same rules with the nodes of their own driver: a render node is one card's, `/dev/kfd` is every card's.
#[test]
fn an_amd_gpu_is_held_by_its_render_node_and_by_kfd() {
    const MI300X: &str = "0000:05:00.0";
    for (held, others) in [("/dev/dri/renderD128", Some(0)), ("/dev/kfd", Some(1))] {
        let node = Node::new(&Profile::find("mi300x").unwrap());
        node.sim.start_process(44, "python3", &[held]).unwrap();
        let refused = node.run(&["bind", MI300X]);
        assert_eq!((refused.code, node.writes()), (Some(1), 0), "{refused:?}");
        assert!(refused.stdout.contains(&format!("process 44 (python3) has {held} open")), "{refused:?}");
        assert_eq!(node.run(&["bind", "0000:26:00.0"]).code, others, "{held}");
        node.sim.end_process(44).unwrap();
        assert_eq!(node.run(&["bind", "--all"]).code, Some(0));
        assert!(!node.dir.path().join("dev/kfd").exists(), "no function is on amdgpu any more");
        assert_eq!(node.run(&["unbind", "--all"]).code, Some(0));
        assert_eq!(node.driver(address(MI300X)).as_deref(), Some("amdgpu"));
        assert!(node.dir.path().join("dev/kfd").exists());
    }
}

#[test]
fn functions_are_shown_in_detail() {
    let node = Node::new(&four_groups());
    let dir = device_dir(&node, QUADRO);
    for (name, content) in [
        ("subsystem_vendor", "0x10de\n"),
        ("subsystem_device", "0x12a0\n"),
        ("revision", "0xa1\n"),
        ("reset_method", "bus\n"),
        ("boot_vga", "1\n"),
        ("current_link_speed", "8.0 GT/s PCIe\n"),
        ("current_link_width", "8\n"),
        ("max_link_speed", "8.0 GT/s PCIe\n"),
        ("max_link_width", "16\n"),
        ("resource", "0x0000000090000000 0x0000000090ffffff 0x0000000000040200\n"),
        ("config", "not of this world"),
    ] {
        put(&dir.join(name), content);
    }
    put(&node.dir.path().join("sys/bus/pci/slots/4/address"), "0000:52:00\n");
    draw_on(&node, QUADRO, &["efifb"]);
    let shown = node.run(&["inspect", QUADRO, GPU, "-o", "json"]).json();
    let details = shown["details"].as_array().unwrap();
    assert_eq!(details.len(), 2);
    for (key, value) in [
        ("address", json!(QUADRO)),
        ("role", json!("gpu")),
        ("subsystem_device", json!("12a0")),
        ("revision", json!("a1")),
        ("slot", json!("4")),
        ("boot_vga", json!(true)),
        ("reset", json!({ "state": "ordered", "methods": ["bus"] })),
        ("framebuffer", json!({ "regions": ["efifb"], "devices": [] })),
        ("holders", json!([])),
    ] {
        assert_eq!(details[0][key], value, "{key}");
    }
    assert_eq!(details[0]["bars"][0]["size"], 16 << 20);
    assert_eq!(details[0]["link"]["max_speed"], "8.0 GT/s");
    assert!(details[0]["cure"].as_str().unwrap().contains("video=efifb:off"));
    // The rest of the answer is the same.
    assert_eq!(shown["offers"], node.run(&["inspect", "-o", "json"]).json()["offers"]);

    let text = node.run(&["inspect", QUADRO]).stdout;
    for part in [
        "subsystem 10de:12a0",
        "x8 of at most",
        "wider slot",
        "16 MiB",
        "boot_vga",
        "video=efifb:off",
        "slot         4",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(node.writes(), 0);
}

#[test]
fn a_held_functions_configuration_space_is_not_read() {
    let node = Node::new(&four_groups());
    node.run(&["bind", "25"]);
    put(&device_dir(&node, GPU).join("config"), [0xff; 64]);
    let answer = || node.run(&["inspect", GPU, "-o", "json"]).json()["details"][0]["answer"].clone();
    assert_eq!(answer(), "all-ones");
    node.sim.start_vmm(4242, "qemu-kvm", 25).unwrap();
    assert_eq!(answer(), "held");
    let detail = node.run(&["inspect", GPU, "-o", "json"]).json()["details"][0].clone();
    assert_eq!(detail["config"], json!({ "state": "held" }));
    assert_eq!(detail["holders"][0]["pid"], 4242);
    node.sim.end_process(4242).unwrap();
    assert_eq!(answer(), "all-ones");
}

#[test]
fn a_function_that_is_not_there_is_said() {
    let node = Node::new(&four_groups());
    let ran = node.run(&["inspect", "0000:99:00.0"]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("not on this node"), "{ran:?}");
    assert_eq!(node.run(&["inspect", "99:00.0"]).code, Some(2));
    assert!(node.run(&["inspect", "-o", "json"]).json().get("details").is_none());
}
