//! A vendor beside NVIDIA, from its row of the table to a VM: eight AMD MI300X.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "test code")]

mod node;

use decide::wish::WorkloadType::{Container, VmPassthrough};
use node::{
    Node,
    stage::{Stage, group_codes, pod},
};
use vfio::sim::Profile;
use vfiod::{standin::Want, status::State};

const MI300X: &str = "amd.com/AQUA_VANJARAM_INSTINCT_MI300X";

fn mi300x() -> Profile {
    Profile::find("mi300x").unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn amd_cards_go_to_vms_and_back() {
    let node = Node::new(&mi300x());
    let at_boot = node.bindings();
    let options = vfiod::standin::StandinOptions::default();
    let mut stage = Stage::start_with(node, VmPassthrough, options, |_| {}).await;
    stage.until("bound", |status| status.state == State::Ready).await;
    let state = stage.healthy(MI300X, 8).await;
    let id = state.resources[MI300X].devices.keys().next().unwrap().clone();
    let want = Want::Ids(vec![id.clone()]);
    let given = stage.kubelet.allocate(&pod("vm"), "compute", MI300X, want).await.unwrap();
    assert_eq!(given.env["PCI_RESOURCE_AMD_COM_AQUA_VANJARAM_INSTINCT_MI300X"], id);
    let status = stage.service.status.borrow().clone();
    let offer = status.offers.iter().find(|offer| offer.id.to_string() == id).unwrap();
    let group = offer.iommu_group.unwrap();
    assert!(given.nodes.iter().any(|(path, _, _)| *path == format!("/dev/vfio/{group}")), "{given:?}");
    stage.wish(Container);
    let status = stage.until("blocked", |status| status.state == State::Blocked).await;
    assert_eq!(group_codes(&status, group), ["InUse"]);
    assert_eq!(stage.node.on(&id).as_deref(), Some("vfio-pci"));
    stage.kubelet.pod_gone(&pod("vm"));
    stage.until("given back", |status| status.state == State::Ready && status.offers.is_empty()).await;
    assert_eq!(stage.end().await.bindings(), at_boot);
}

/// A render node holds its own card, `/dev/kfd` holds them all.
#[test]
fn kfd_and_render_nodes_hold_what_they_are_of() {
    let refused = |node: &Node| {
        let plan = node.run(&["plan", "-o", "json"]).json();
        let groups = plan["groups"].as_array().unwrap().clone();
        let refused = groups.iter().filter(|group| group["verdict"] == "refused").count();
        (refused, plan.to_string())
    };
    let node = Node::new(&mi300x());
    assert_eq!(refused(&node).0, 0);
    node.sim.start_process(4242, "python3", &["/dev/dri/renderD128"]).unwrap();
    let (count, text) = refused(&node);
    assert_eq!(count, 1, "{text}");
    assert!(text.contains("process 4242 (python3) has /dev/dri/renderD128 open"), "{text}");
    node.sim.start_process(4243, "rocm-smi", &["/dev/kfd"]).unwrap();
    assert_eq!(refused(&node).0, 8);
}

#[test]
fn names_for_both_consumers_are_under_the_vendors_domain() {
    let node = Node::new(&mi300x());
    let offers = |consumer: &str| {
        let shown = node.run(&["inspect", "--consumer", consumer, "-o", "json"]).json();
        shown["offers"][0]["resource"].as_str().unwrap().to_owned()
    };
    assert_eq!((offers("kubevirt").as_str(), offers("kata").as_str()), (MI300X, "amd.com/pgpu"));
}
