//! What people and programs meet on the command line: shapes, names, exit codes.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "test code")]

mod node;

use std::{
    fs::Permissions,
    os::unix::fs::PermissionsExt,
    process::{Command, Stdio},
};

use node::{Node, address, four_groups, function, scratch, vfiod};
use serde_json::{Value, json};
use vfio::sim::Profile;

fn names(value: &Value, key: &str) -> Vec<String> {
    value.as_array().unwrap().iter().map(|row| row[key].as_str().unwrap().to_owned()).collect()
}

#[test]
fn inspect_shows_functions_groups_and_offers() {
    let node = Node::new(&four_groups());
    node.run(&["bind", "--all"]);
    let shown = node.run(&["inspect", "-o", "json"]).json();
    let gpu =
        &shown["functions"].as_array().unwrap().iter().find(|f| f["address"] == "0000:52:00.0").unwrap();
    for (key, value) in [
        ("vendor", json!("10de")),
        ("device", json!("1eb1")),
        ("class", json!("030000")),
        ("driver", json!("vfio-pci")),
        ("override", json!("vfio-pci")),
        ("iommu_group", json!(35)),
        ("numa_node", json!(0)),
        ("role", json!("gpu")),
    ] {
        assert_eq!(gpu[key], value, "{key}");
    }
    let group = &shown["groups"].as_array().unwrap().iter().find(|g| g["id"] == 35).unwrap();
    assert_eq!(group["members"], json!(["0000:52:00.0", "0000:52:00.1", "0000:52:00.2", "0000:52:00.3"]));
    assert_eq!((&group["viable"], &group["reasons"]), (&json!(true), &json!([])));
    let offers = &shown["offers"];
    assert_eq!(names(offers, "id"), ["0000:17:00.0", "0000:65:00.0", "0000:05:00.0", "0000:52:00.0"]);
    assert_eq!(
        names(offers, "resource"),
        [
            "nvidia.com/GA102GL_A10",
            "nvidia.com/GA102GL_A10",
            "nvidia.com/GH100_H100_NVSWITCH",
            "nvidia.com/TU104GL_QUADRO_RTX_4000"
        ]
    );
    assert!(
        offers
            .as_array()
            .unwrap()
            .iter()
            .all(|offer| offer["healthy"] == true && offer["reasons"] == json!([]))
    );
}

#[test]
fn an_unbound_node_offers_nothing_healthy_and_says_why() {
    let node = Node::new(&four_groups());
    let shown = node.run(&["inspect", "-o", "json"]).json();
    for offer in shown["offers"].as_array().unwrap() {
        assert_eq!(offer["healthy"], false);
        assert!(names(&offer["reasons"], "code").contains(&"NotBound".to_owned()), "{offer}");
    }
    let group = &shown["groups"].as_array().unwrap().iter().find(|g| g["id"] == 25).unwrap();
    assert_eq!(group["viable"], false);
    assert_eq!(group["reasons"][0]["code"], "HostDriver");
    assert_eq!(
        node.run(&["inspect", "--workload-type", "container", "-o", "json"]).json()["offers"],
        json!([])
    );
    assert_eq!(node.writes(), 0);
}

#[test]
fn kata_names_follow_the_alias_variables() {
    let node = Node::new(&four_groups());
    let shown = |gpu: Option<&str>, switch: Option<&str>| {
        let mut command = node.command(&["inspect", "--consumer", "kata", "-o", "json"]);
        for (key, value) in [("P_GPU_ALIAS", gpu), ("NVSWITCH_ALIAS", switch)] {
            match value {
                Some(value) => command.env(key, value),
                None => command.env_remove(key),
            };
        }
        let output = command.output().unwrap();
        let shown: Value = serde_json::from_slice(&output.stdout).unwrap();
        let mut all = names(&shown["offers"], "resource");
        all.dedup();
        all
    };
    assert_eq!(shown(None, None), ["nvidia.com/nvswitch", "nvidia.com/pgpu"]);
    assert_eq!(shown(Some("gpu-1"), Some("sw")), ["nvidia.com/gpu-1", "nvidia.com/sw"]);
    assert_eq!(
        shown(Some(""), Some("")),
        ["nvidia.com/GA102GL_A10", "nvidia.com/GH100_H100_NVSWITCH", "nvidia.com/TU104GL_QUADRO_RTX_4000"]
    );
}

#[test]
fn a_name_that_kubernetes_refuses_is_shown_with_the_reason() {
    let mut profile = four_groups();
    profile.functions.push(function("0000:70:00.0", 0x24fa, 0x03_02_00, Some("nvidia"), 70));
    profile.functions.push(function("0000:71:00.0", 0xfff1, 0x03_02_00, Some("nvidia"), 71));
    let node = Node::new(&profile);
    node.run(&["bind", "--all"]);
    let shown = node.run(&["inspect", "-o", "json"]).json();
    let offer =
        |id: &str| shown["offers"].as_array().unwrap().iter().find(|o| o["id"] == id).unwrap().clone();
    let refused = offer("0000:70:00.0");
    assert_eq!(refused["resource"], "nvidia.com/GA104_RTX_A4500_EMBEDDED_GPU_");
    assert_eq!((&refused["healthy"], &refused["reasons"][0]["code"]), (&json!(false), &json!("NameRefused")));
    let unknown = offer("0000:71:00.0");
    assert_eq!((&unknown["resource"], &unknown["healthy"]), (&json!("nvidia.com/fff1"), &json!(true)));
}

#[test]
fn a_nodes_own_pci_ids_fills_in_what_the_built_in_names_lack() {
    let mut profile = four_groups();
    profile.functions.push(function("0000:71:00.0", 0xfff1, 0x03_02_00, Some("nvidia"), 71));
    let node = Node::new(&profile);
    let dir = node.dir.path().join("usr/share/misc");
    std::fs::create_dir_all(&dir).unwrap();
    #[expect(clippy::disallowed_methods, reason = "a test's own file")]
    std::fs::write(dir.join("pci.ids"), "10de  NVIDIA\n\t2236  Renamed\n\tfff1  GX100 [New-One]\n").unwrap();
    let shown = node.run(&["inspect", "-o", "json"]).json();
    let all = names(&shown["offers"], "resource");
    assert!(all.contains(&"nvidia.com/GX100_NEWONE".to_owned()), "{all:?}");
    assert!(all.contains(&"nvidia.com/GA102GL_A10".to_owned()), "{all:?}");
}

#[test]
fn plan_touches_nothing_and_its_exit_code_says_whether_something_is_refused() {
    let node = Node::new(&four_groups());
    let planned = node.run(&["plan", "-o", "json"]);
    assert_eq!(planned.code, Some(0));
    let groups = planned.json()["groups"].clone();
    assert_eq!(groups.as_array().unwrap().len(), 4);
    assert!(groups.as_array().unwrap().iter().all(|group| group["verdict"] == "move"));
    assert_eq!(groups[0]["moves"][0]["inverse"]["driver"], json!({ "named": "nvidia" }));
    node.sim.start_process(77, "dcgm", &["/dev/nvidia0"]).unwrap();
    let refused = node.run(&["plan", "-o", "json"]);
    assert_eq!(refused.code, Some(1));
    let text = refused.json().to_string();
    assert!(text.contains("process 77 (dcgm) has /dev/nvidia0 open"), "{text}");
    node.sim.end_process(77).unwrap();
    assert_eq!(node.run(&["plan", "--consumer", "kata"]).code, Some(0));
    let not_yet = node.run(&["plan", "--workload-type", "vm-vgpu"]);
    assert_eq!(not_yet.code, Some(1));
    assert!(not_yet.stdout.contains("NotYet"), "{not_yet:?}");
    assert_eq!(node.writes(), 0);
}

#[test]
fn bind_and_unbind_take_functions_and_groups() {
    let node = Node::new(&four_groups());
    let bound = node.run(&["bind", "0000:52:00.2", "86", "-o", "json"]);
    assert_eq!(bound.code, Some(0));
    assert_eq!(names(&bound.json()["groups"], "result"), ["done", "done"]);
    assert_eq!(node.driver(address("0000:52:00.0")).as_deref(), Some("vfio-pci"));
    assert_eq!(node.driver(address("0000:17:00.0")).as_deref(), Some("nvidia"));
    let writes = node.writes();
    let again = node.run(&["bind", "35", "-o", "json"]);
    assert_eq!(
        (again.code, names(&again.json()["groups"], "result")),
        (Some(0), vec!["unchanged".to_owned()])
    );
    assert_eq!(node.writes(), writes);
    assert_eq!(node.run(&["unbind", "35"]).code, Some(0));
    assert_eq!(node.driver(address("0000:52:00.2")).as_deref(), Some("xhci_hcd"));
}

#[test]
fn what_is_not_there_is_said_and_nothing_is_touched() {
    let node = Node::new(&Profile::hgx_h100());
    for (target, said) in [
        ("0000:99:00.0", "not on this node"),
        ("999", "not on this node"),
        ("0000:5a:00.0", "neither a GPU nor an NVSwitch"),
        ("40", "neither a GPU nor an NVSwitch"),
    ] {
        let ran = node.run(&["bind", "0000:11:00.0", target]);
        assert_eq!(ran.code, Some(1), "{ran:?}");
        assert!(ran.stderr.contains(said), "{ran:?}");
    }
    assert_eq!(node.writes(), 0);
}

#[test]
fn wrong_usage_is_exit_code_2() {
    let node = Node::new(&four_groups());
    for wrong in [
        vec!["bind"],
        vec!["bind", "--all", "35"],
        vec!["bind", "3b:00.0"],
        vec!["plan", "--workload-type", "VM"],
        vec!["inspect", "-o", "xml"],
        vec!["nonsense"],
    ] {
        let ran = node.run(&wrong);
        assert_eq!(ran.code, Some(2), "{wrong:?}: {ran:?}");
        assert!(!ran.stderr.is_empty());
    }
    assert_eq!(Command::new(vfiod()).output().unwrap().status.code(), Some(2));
}

#[test]
fn without_an_iommu_it_is_said_and_refused() {
    let node = Node::new(&Profile::without_iommu());
    let shown = node.run(&["inspect"]);
    assert!(shown.stdout.contains("No IOMMU group"), "{shown:?}");
    let refused = node.run(&["bind", "--all"]);
    assert_eq!(refused.code, Some(1));
    assert!(refused.stdout.contains("NoIommu") && refused.stdout.contains("intel_iommu=on"), "{refused:?}");
    assert_eq!(node.run(&["bind", "0000:17:00.0"]).code, Some(1));
    assert_eq!(node.writes(), 0);
}

#[test]
fn a_root_that_is_no_host_and_a_journal_that_is_none_are_said() {
    let empty = scratch();
    let ran = Command::new(vfiod()).arg("inspect").arg("--root").arg(empty.path()).output().unwrap();
    assert_eq!(ran.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&ran.stderr).contains("no host below"));

    let node = Node::new(&four_groups());
    node.run(&["bind", "35"]);
    let writes = node.writes();
    for broken in ["", "{", "[]", r#"{"version":2,"boot_id":"","priors":{},"pending":{},"holds":{}}"#] {
        #[expect(clippy::disallowed_methods, reason = "a test's own file")]
        std::fs::write(node.dir.path().join("var/lib/vfiod/journal.json"), broken).unwrap();
        let ran = node.run(&["unbind", "--all"]);
        assert_eq!(ran.code, Some(1), "{broken:?}: {ran:?}");
        assert!(ran.stderr.contains("journal"), "{ran:?}");
    }
    assert_eq!(node.writes(), writes);
}

#[test]
fn a_state_directory_that_cannot_be_written_stops_every_write() {
    let node = Node::new(&four_groups());
    let state = node.dir.path().join("state");
    std::fs::create_dir(&state).unwrap();
    // A directory where the journal belongs: root passes any permission bits.
    std::fs::create_dir(state.join("journal.json")).unwrap();
    std::fs::set_permissions(&state, Permissions::from_mode(0o700)).unwrap();
    let ran = node.run(&["bind", "--all", "--state-dir", state.to_str().unwrap()]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert_eq!(node.writes(), 0);
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let node = Node::new(&Profile::hgx_h100());
    let mut child = node.command(&["inspect"]).stdout(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn status_without_an_agent_says_so() {
    let node = Node::new(&four_groups());
    let ran = node.run(&["status"]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("no agent answers"), "{ran:?}");
}

#[test]
fn the_demo_tells_its_story_to_the_end() {
    let ran = Command::new(vfiod()).arg("demo").output().unwrap();
    let text = String::from_utf8(ran.stdout).unwrap();
    assert_eq!(ran.status.code(), Some(0), "{text}\n{}", String::from_utf8_lossy(&ran.stderr));
    for part in
        ["8 of 8 healthy", "PCI_RESOURCE_NVIDIA_COM_GH100_H100_SXM5_80GB=", "refused: InUse", "as it was"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn the_demo_can_be_played_where_it_is_wanted_and_over_no_other_node() {
    let dir = scratch();
    let root = dir.path().join("node");
    let play = || Command::new(vfiod()).arg("demo").arg("--root").arg(&root).output().unwrap();
    assert_eq!(play().status.code(), Some(0));
    let shown = Command::new(vfiod()).arg("inspect").arg("--root").arg(&root).output().unwrap();
    assert_eq!(shown.status.code(), Some(0));
    let again = play();
    assert_eq!(again.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&again.stderr).contains("holds a node already"));
}
