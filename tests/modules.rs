//! Kernel modules on the way to vfio: loaded before the first move, once a node, and never run past a refusal.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "test code")]
#![allow(clippy::disallowed_methods, reason = "a test's own files")]

mod node;

use nix::errno::Errno;
use node::{Node, address, function};
use vfio::{
    modules::ModuleName,
    sim::{Effect, Fault, ModuleTree, Moment, Profile},
    write::Write,
};

const GRACE: [&str; 2] = ["0008:01:00.0", "0009:01:00.0"];
const A10: &str = "0000:17:00.0";

/// Two GH200 GPUs and an A10, each in its group, on a kernel that has its vfio drivers as modules.
fn grace(modules: &ModuleTree) -> Node {
    let mut profile = Profile::four_function_card();
    profile.name = "grace".to_owned();
    profile.functions = vec![
        function(GRACE[0], 0x2342, 0x03_02_00, Some("nvidia"), 1),
        function(GRACE[1], 0x2342, 0x03_02_00, Some("nvidia"), 2),
        function(A10, 0x2236, 0x03_02_00, Some("nvidia"), 25),
    ];
    profile.drivers.retain(|driver| driver != "vfio-pci");
    let node = Node::new(&profile);
    node.sim.lay_modules(modules).unwrap();
    node
}

fn put(node: &Node, path: &str, text: &str) {
    let path = node.dir.path().join(path);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

/// The modules loaded so far, with their options.
fn loaded(node: &Node) -> Vec<(String, String)> {
    let load = |write: Write| match write {
        Write::LoadModule(load) => Some((load.module.to_string(), load.options)),
        _ => None,
    };
    node.sim.writes().unwrap().into_iter().filter_map(load).collect()
}

#[test]
fn each_module_is_loaded_once_and_each_function_gets_its_own_driver() {
    let node = grace(&ModuleTree::distribution());
    put(&node, "etc/modprobe.d/vfio.conf", "options vfio_iommu_type1 \\\n  allow_unsafe_interrupts=1\n");
    let plan = node.run(&["plan", "--workload-type", "vm-passthrough"]);
    assert!(plan.stdout.contains("load module vfio_iommu_type1 (allow_unsafe_interrupts=1)"), "{plan:?}");
    assert_eq!(node.writes(), 0);

    let ran = node.run(&["bind", "--all", "-o", "json"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    for gpu in GRACE {
        assert_eq!(
            node.bindings()[&address(gpu)],
            (Some("nvgrace_gpu_vfio_pci".to_owned()), Some("nvgrace_gpu_vfio_pci".to_owned()))
        );
    }
    assert_eq!(node.driver(address(A10)).as_deref(), Some("vfio-pci"));
    let mut loaded = loaded(&node);
    let type1 = ("vfio_iommu_type1".to_owned(), "allow_unsafe_interrupts=1".to_owned());
    assert!(loaded.contains(&type1), "{loaded:?}");
    loaded.sort();
    let names: Vec<_> = loaded.iter().map(|(module, _)| module.as_str()).collect();
    assert_eq!(
        names,
        ["irqbypass", "nvgrace_gpu_vfio_pci", "vfio", "vfio_iommu_type1", "vfio_pci", "vfio_pci_core"]
    );
    let unsafe_interrupts = "module/vfio_iommu_type1/parameters/allow_unsafe_interrupts";
    assert_eq!(node.sim.host().read(&node.sim.host().sys(unsafe_interrupts)).unwrap(), "1\n");

    let ran = node.run(&["unbind", "--all"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(node.bindings().values().all(|binding| *binding == (Some("nvidia".to_owned()), None)));
    // What is loaded stays, and is not loaded again.
    let before = self::loaded(&node).len();
    assert_eq!(node.run(&["bind", "--all"]).code, Some(0));
    assert_eq!(self::loaded(&node).len(), before);
    let writes = node.writes();
    assert_eq!(node.run(&["bind", "--all"]).code, Some(0));
    assert_eq!(node.writes(), writes, "a node that is right gets no write");
}

#[test]
fn a_driver_that_cannot_be_had_refuses_those_that_need_it_and_no_other() {
    let mut modules = ModuleTree::distribution();
    modules.files.retain(|(file, _)| !file.contains("nvgrace"));
    let node = grace(&modules);
    let ran = node.run(&["bind", "--all", "-o", "json"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let results = ran.json();
    for group in results["groups"].as_array().unwrap() {
        if group["group"] == 25 {
            assert_eq!(group["result"], "done", "{group}");
        } else {
            let refusal = &group["refusals"][0];
            assert_eq!(
                (&group["result"], &refusal["code"]),
                (&"refused".into(), &"VfioAbsent".into()),
                "{group}"
            );
            assert!(refusal["message"].as_str().unwrap().contains("nvgrace_gpu_vfio_pci"), "{group}");
        }
    }
    assert_eq!(node.driver(address(GRACE[0])).as_deref(), Some("nvidia"));
}

#[test]
fn a_module_that_is_refused_leaves_every_function_where_it_is() {
    let node = grace(&ModuleTree::distribution());
    put(&node, "sys/kernel/security/lockdown", "none [integrity] confidentiality\n");
    let faults: Vec<_> =
        (1..=9).map(|at| Fault::at(at, Moment::Before, Effect::Errno(Errno::EPERM as i32))).collect();
    node.sim.set_faults(&faults).unwrap();
    let ran = node.run(&["bind", "--all"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(
        ran.stdout.contains("load module irqbypass") && ran.stdout.contains("lockdown (integrity"),
        "{ran:?}"
    );
    assert!(node.bindings().values().all(|binding| *binding == (Some("nvidia".to_owned()), None)));
    assert_eq!(loaded(&node).len(), 3, "one try a group");
    assert!(node.journal()["priors"].as_object().unwrap().is_empty(), "{}", node.journal());

    // Nothing stays behind: the next go succeeds.
    node.sim.set_faults(&[]).unwrap();
    assert_eq!(node.run(&["bind", "--all"]).code, Some(0));
}

#[test]
fn a_module_that_is_only_wished_for_may_be_refused() {
    let node = grace(&ModuleTree { soft: Vec::new(), ..ModuleTree::distribution() });
    // The fifth load of the first group: vfio_iommu_type1, after the driver.
    node.sim.set_faults(&[Fault::at(5, Moment::Before, Effect::Errno(Errno::EKEYREJECTED as i32))]).unwrap();
    let ran = node.run(&["bind", A10]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(loaded(&node).last().unwrap().0, ModuleName::vfio_iommu_type1().to_string());
    assert_eq!(node.driver(address(A10)).as_deref(), Some("vfio-pci"));
}

#[test]
fn an_agent_killed_finds_its_way_after_any_load() {
    for at in 1..=5 {
        for (moment, effect) in [(Moment::Before, Effect::KillBoth), (Moment::After, Effect::KillBoth)] {
            let node = grace(&ModuleTree::distribution());
            node.sim.set_faults(&[Fault::at(at, moment, effect)]).unwrap();
            let ran = node.run(&["bind", A10]);
            assert_eq!(ran.code, None, "killed: {ran:?}");
            node.sim.set_faults(&[]).unwrap();
            let ran = node.run(&["bind", "--all"]);
            assert_eq!(ran.code, Some(0), "load {at}, {moment:?}: {ran:?}");
            assert_eq!(node.driver(address(A10)).as_deref(), Some("vfio-pci"));
            assert_eq!(node.run(&["unbind", "--all"]).code, Some(0));
            assert_eq!(node.driver(address(A10)).as_deref(), Some("nvidia"));
        }
    }
}
