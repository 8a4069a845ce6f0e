//! What a boot framebuffer holds is neither bound nor offered, whichever functions it holds and whatever is bound already.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "test code")]

mod node;

use std::collections::{BTreeMap, BTreeSet};

use decide::{
    consumer::Consumer,
    names::Naming,
    offers::{Offer, View, offers},
    plan::{Plan, Verdict, plan},
    usage::{PodDevice, Pods, Usage},
    wish::{Desired, WorkloadType},
};
use node::{Node, address, four_groups, look_at};
use proptest::{prelude::*, sample::subsequence, test_runner::TestCaseError};
use vfio::{driver::is_vfio, pci::Address};

const REGIONS: [&str; 6] = ["BOOTFB", "efifb", "vesafb", "simplefb", "simpledrm", "efidrm"];

fn look(node: &Node, usage: &Usage) -> (Plan, Vec<Offer>) {
    let inventory = look_at(node);
    let desired = Desired {
        workload_type: WorkloadType::VmPassthrough,
        consumer: Consumer::Kubevirt,
        adopt_boot_bound: false,
    };
    let plan = plan(&inventory, &desired, usage, &BTreeMap::new());
    let (naming, trouble) = (Naming::default(), BTreeMap::new());
    let view = View {
        inventory: &inventory,
        desired: &desired,
        plan: &plan,
        usage,
        pods_silent: false,
        naming: &naming,
        trouble: &trouble,
    };
    let offers = offers(view);
    (plan, offers)
}

#[expect(clippy::disallowed_methods, reason = "a test's own file")]
fn put_iomem(node: &Node, held: &[(Address, &str)]) {
    let bar = |(address, region): &(Address, &str)| {
        format!("00000000-00000000 : {address}\n  00000000-00000000 : {region}\n")
    };
    std::fs::write(node.sim.host().proc("iomem"), held.iter().map(bar).collect::<String>()).unwrap();
}

fn functions() -> Vec<(Address, u32)> {
    four_groups().functions.iter().map(|f| (f.address, f.group.unwrap())).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn what_a_boot_framebuffer_holds_is_neither_bound_nor_offered(
        held in subsequence(functions(), 0..=4),
        bound in subsequence(vec![25_u32, 35, 60, 86], 0..=4),
        region in prop::sample::select(REGIONS.to_vec()),
    ) {
        let node = Node::new(&four_groups());
        for (function, _) in functions().iter().filter(|(_, group)| bound.contains(group)) {
            node.sim.put(*function, Some("vfio-pci"), Some("vfio-pci")).unwrap();
        }
        let lines: Vec<_> = held.iter().map(|(address, _)| (*address, region)).collect();
        put_iomem(&node, &lines);
        let held: BTreeSet<u32> = held.iter().map(|(_, group)| *group).collect();
        let (plan, offers) = look(&node, &Usage::default());
        for group in [25, 35, 60, 86] {
            let verdict = &plan.of_group(group).unwrap().verdict;
            match (bound.contains(&group), held.contains(&group)) {
                (true, _) => prop_assert_eq!(verdict, &Verdict::Right, "group {}", group),
                (false, false) => prop_assert!(matches!(verdict, Verdict::Move { .. }), "group {group}: {verdict:?}"),
                (false, true) => {
                    let Verdict::Refused { refusals } = verdict else {
                        return Err(TestCaseError::fail(format!("group {group}: {verdict:?}")));
                    };
                    prop_assert!(refusals.iter().all(|refusal| refusal.code() == "BootFramebuffer"));
                }
            }
        }
        for offer in offers {
            let group = offer.iommu_group.unwrap();
            let by_framebuffer = offer.reasons.iter().any(|reason| reason.code == "BootFramebuffer");
            prop_assert_eq!(by_framebuffer, held.contains(&group), "{:?}", offer);
            prop_assert_eq!(offer.healthy, bound.contains(&group) && !held.contains(&group), "{:?}", offer);
        }
    }
}

/// What a pod has stays healthy: the pod has it, and no new one gets it.
#[test]
fn a_device_that_a_pod_has_is_not_taken_from_it() {
    let node = Node::new(&four_groups());
    let gpu = address("0000:17:00.0");
    node.sim.put(gpu, Some("vfio-pci"), Some("vfio-pci")).unwrap();
    assert!(is_vfio(&node.driver(gpu).unwrap()));
    put_iomem(&node, &[(gpu, "BOOTFB")]);
    let device = PodDevice {
        namespace: "vms".to_owned(),
        pod: "virt-launcher-a".to_owned(),
        container: "compute".to_owned(),
        resource: "nvidia.com/GA102GL_A10".to_owned(),
        id: gpu.to_string(),
    };
    let usage = Usage {
        pods: Pods::Known { devices: BTreeSet::from([device]), claims: BTreeSet::new() },
        ..Usage::default()
    };
    let healthy =
        |usage: &Usage| look(&node, usage).1.iter().find(|offer| offer.id == gpu.into()).unwrap().healthy;
    assert!(healthy(&usage));
    assert!(!healthy(&Usage::default()));
}
