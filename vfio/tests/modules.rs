//! A node's modules, read from a tree: what is there, what can be loaded, in which order, with which options.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "test code")]
#![allow(clippy::disallowed_methods, reason = "a test's own files")]

use std::fs;

use nix::{errno::Errno, unistd::Pid};
use reason::Coded;
use tempfile::TempDir;
use vfio::{
    modules::{Absence, Availability, Load, ModuleName, Modules},
    pci::{self, Address},
    sim::{Effect, Fault, ModuleTree, Moment, Profile, Simulation, kernel},
    write::Write,
};

/// A function of a GH200, and another of an H100.
const GRACE: &str = "pci:v000010DEd00002941sv000010DEsd00001809bc03sc02i00";
const H100: &str = "pci:v000010DEd00002330sv000010DEsd000016C1bc03sc02i00";

struct Node {
    sim: Simulation,
    dir: TempDir,
}

fn name(text: &str) -> ModuleName {
    ModuleName::new(text).unwrap()
}

fn address(text: &str) -> Address {
    text.parse().unwrap()
}

impl Node {
    /// A node whose kernel has no vfio driver loaded, with these modules.
    fn new(modules: &ModuleTree) -> Self {
        let mut profile = Profile::four_function_card();
        profile.drivers.retain(|driver| driver != "vfio-pci");
        let node = Self::bare(&profile);
        node.sim.lay_modules(modules).unwrap();
        node
    }

    fn bare(profile: &Profile) -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self { sim: Simulation::create(dir.path(), profile).unwrap(), dir }
    }

    fn put(&self, path: &str, text: &str) {
        let path = self.dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn modules(&self) -> Modules {
        Modules::of(self.sim.host())
    }

    fn availability(&self, module: &str) -> Availability {
        self.modules().availability(&name(module))
    }

    fn absence(&self, module: &str) -> Absence {
        match self.availability(module) {
            Availability::Absent(absence) => absence,
            other => panic!("{module}: {other:?}"),
        }
    }

    fn answer(&self, write: &Write) -> Result<(), Errno> {
        kernel::answer(self.sim.host(), write, Pid::from_raw(0))
    }

    fn driver(&self, at: &str) -> Option<String> {
        pci::read(self.sim.host(), address(at)).unwrap().unwrap().driver
    }
}

fn names(loads: &[Load]) -> Vec<&str> {
    loads.iter().map(|load| load.module.as_str()).collect()
}

#[test]
fn a_module_is_built_in_loaded_loadable_or_absent() {
    let mut tree = ModuleTree::distribution();
    tree.built_in.push("kernel/drivers/iommu/iommufd/iommufd.ko".to_owned());
    let node = Node::new(&tree);
    node.put("proc/modules", "vfio 69632 0 - Live 0x0000000000000000\nirqbypass 1 0 - Unloading 0x0\n");
    node.put("sys/module/with_parameters/parameters/x", "1\n");
    node.put("sys/module/just_loaded/initstate", "live\n");
    node.put("sys/module/vfio_pci_core/initstate", "going\n");
    let cases = [
        ("iommufd", Availability::BuiltIn),
        ("with-parameters", Availability::BuiltIn),
        // Its driver is there, and no module is listed for it.
        ("snd_hda_intel", Availability::BuiltIn),
        ("nvidia_nvswitch", Availability::BuiltIn),
        ("vfio", Availability::Loaded),
        ("just_loaded", Availability::Loaded),
        ("vfio-pci", Availability::Loadable),
        ("vfio_pci", Availability::Loadable),
        // On their way out: they have to be loaded anew.
        ("irqbypass", Availability::Loadable),
        ("vfio_pci_core", Availability::Loadable),
    ];
    for (module, expected) in cases {
        assert_eq!(node.availability(module), expected, "{module}");
    }
    assert!(matches!(node.absence("mlx5_vfio_pci"), Absence::NotInTree { .. }));
}

#[test]
fn an_absent_module_says_why_and_what_to_do() {
    let nowhere = Node::bare(&Profile::without_iommu());
    fs::remove_dir_all(nowhere.dir.path().join("sys/bus/pci/drivers/vfio-pci")).unwrap();
    fs::remove_file(nowhere.dir.path().join("proc/sys/kernel/osrelease")).unwrap();
    assert!(matches!(nowhere.absence("vfio_pci"), Absence::NoRelease { .. }));
    nowhere.put("proc/sys/kernel/osrelease", "6.12.1\n");
    assert!(matches!(nowhere.absence("vfio_pci"), Absence::NoTree { .. }));
    assert!(nowhere.absence("vfio_pci").to_string().contains("/lib/modules/6.12.1/modules.dep"));

    let node = Node::new(&ModuleTree::distribution());
    let file = "lib/modules/6.12.95+deb12-amd64/kernel/drivers/vfio/pci/vfio-pci-core.ko.xz";
    fs::remove_file(node.dir.path().join(file)).unwrap();
    let absence = node.absence("vfio_pci");
    assert!(
        matches!(&absence, Absence::Needs { needed, .. } if *needed == name("vfio_pci_core")),
        "{absence}"
    );
    assert_eq!(absence.code(), "ModuleFile");

    let node = Node::new(&ModuleTree::distribution());
    node.put("etc/modprobe.d/hardening.conf", "blacklist vfio_pci\ninstall vfio-iommu-type1 /bin/false\n");
    assert_eq!(
        node.availability("vfio_pci"),
        Availability::Loadable,
        "a blacklist is about loading by alias"
    );
    let absence = node.absence("vfio_iommu_type1").to_string();
    assert!(absence.contains("hardening.conf") && absence.contains("/bin/false"), "{absence}");
    node.put("proc/cmdline", "quiet module_blacklist=vfio\n");
    assert_eq!(node.absence("vfio_pci").code(), "ForbiddenAtBoot");

    let mut tree = ModuleTree::distribution();
    tree.files.push(("kernel/odd.ko.lz4".to_owned(), Vec::new()));
    assert!(Node::new(&tree).absence("odd").to_string().contains("odd.ko.lz4"));
}

#[test]
fn modules_are_loaded_after_what_they_need_and_with_their_options() {
    let node = Node::new(&ModuleTree::distribution());
    node.put("etc/modprobe.d/vfio.conf", "options vfio_iommu_type1 allow_unsafe_interrupts=1\n");
    node.put("etc/modprobe.d/wishes.conf", "softdep vfio-pci pre: nosuch vfio_iommu_type1 post: nosuch\n");
    let chosen = node.modules().vfio_driver(GRACE);
    assert_eq!(
        (chosen.module.as_str(), chosen.driver.as_str()),
        ("nvgrace_gpu_vfio_pci", "nvgrace_gpu_vfio_pci")
    );
    assert_eq!((&chosen.availability, &chosen.notes), (&Availability::Loadable, &Vec::new()));
    // vfio_iommu_type1 comes with vfio (softdep post), as modprobe loads it.
    assert_eq!(
        names(&chosen.loads),
        ["irqbypass", "vfio", "vfio_iommu_type1", "vfio_pci_core", "nvgrace_gpu_vfio_pci"]
    );
    let wished = &chosen.loads[2];
    assert_eq!((wished.options.as_str(), wished.required), ("allow_unsafe_interrupts=1", false));
    assert!(chosen.loads.iter().filter(|load| load.module != wished.module).all(|load| load.required));

    // Without a modules.softdep the memory of VMs is thought of all the same, at the end.
    let node = Node::new(&ModuleTree { soft: Vec::new(), ..ModuleTree::distribution() });
    let loads = node.modules().vfio_driver(H100).loads;
    assert_eq!(names(&loads), ["irqbypass", "vfio", "vfio_pci_core", "vfio_pci", "vfio_iommu_type1"]);
    // What is there is not loaded again.
    node.put("proc/modules", "vfio_pci 1 0 - Live 0x0\nvfio 1 0 - Live 0x0\n");
    assert_eq!(names(&node.modules().vfio_driver(H100).loads), ["vfio_iommu_type1"]);
}

#[test]
fn the_vfio_driver_is_the_one_made_for_the_function() {
    let node = Node::new(&ModuleTree::distribution());
    let chosen = node.modules().vfio_driver(H100);
    assert_eq!((chosen.module.as_str(), chosen.driver.as_str()), ("vfio_pci", "vfio-pci"));

    // A kernel with all of it built in has no module files, and its drivers are there.
    let node = Node::new(&ModuleTree {
        files: Vec::new(),
        built_in: vec!["kernel/drivers/vfio/pci/vfio-pci.ko".to_owned()],
        ..ModuleTree::distribution()
    });
    for driver in ["vfio-pci", "nvgrace-gpu-vfio-pci"] {
        fs::create_dir(node.sim.host().sys("bus/pci/drivers").join(driver)).unwrap();
    }
    let chosen = node.modules().vfio_driver(GRACE);
    // The directory that is there counts, however it is spelt.
    assert_eq!(
        (chosen.driver.as_str(), chosen.availability),
        ("nvgrace-gpu-vfio-pci", Availability::BuiltIn)
    );
    assert_eq!(node.modules().vfio_driver(H100).availability, Availability::BuiltIn);
    assert!(node.modules().vfio_driver(H100).loads.is_empty());

    // No aliases: vfio-pci, and it says so.
    let node = Node::new(&ModuleTree { aliases: None, ..ModuleTree::distribution() });
    let chosen = node.modules().vfio_driver(GRACE);
    assert_eq!(chosen.driver, "vfio-pci");
    assert!(chosen.notes[0].contains("modules.alias"));
    // Aliases of other things only: vfio-pci, and nothing to say.
    let node = Node::new(&ModuleTree { aliases: Some(Vec::new()), ..ModuleTree::distribution() });
    assert_eq!(node.modules().vfio_driver(GRACE).notes, Vec::<String>::new());
}

fn write_of(load: &Load) -> Write {
    Write::LoadModule(Box::new(load.clone()))
}

#[test]
fn the_simulated_kernel_loads_modules_in_their_order_only() {
    let node = Node::new(&ModuleTree::distribution());
    node.put("etc/modprobe.d/vfio.conf", "options vfio-pci ids=10de:1eb1 disable_vga\n");
    let loads = node.modules().vfio_driver(H100).loads;
    let last = write_of(loads.last().unwrap());
    assert_eq!(node.answer(&last), Err(Errno::ENOENT), "what it needs is not there");
    // Its override names vfio-pci already: it is bound as soon as the driver comes.
    node.sim.put(address("0000:52:00.1"), None, Some("vfio-pci")).unwrap();
    for load in &loads {
        assert_eq!(node.answer(&write_of(load)), Ok(()), "{load:?}");
    }
    assert_eq!(node.answer(&last), Err(Errno::EEXIST));
    assert_eq!(node.availability("vfio_pci"), Availability::Loaded);
    let parameter =
        |name: &str| node.sim.host().read(&node.sim.host().sys("module/vfio_pci/parameters").join(name));
    assert_eq!(parameter("ids").unwrap(), "10de:1eb1\n");
    assert_eq!(parameter("disable_vga").unwrap(), "Y\n");
    assert_eq!(node.driver("0000:52:00.1").as_deref(), Some("vfio-pci"));
    assert_eq!(node.driver("0000:52:00.0").as_deref(), Some("nvidia"));

    node.sim.reboot().unwrap();
    assert_eq!(node.availability("vfio_pci"), Availability::Loadable);
    assert_eq!(node.driver("0000:52:00.1").as_deref(), Some("snd_hda_intel"));
}

#[test]
fn a_fault_strikes_a_load() {
    let node = Node::new(&ModuleTree::distribution());
    let loads = node.modules().vfio_driver(H100).loads;
    let fault =
        |moment| Fault::at(node.sim.writes().unwrap().len() + 1, moment, Effect::Errno(Errno::EPERM as i32));
    node.sim.set_faults(&[fault(Moment::Before)]).unwrap();
    assert_eq!(node.answer(&write_of(&loads[0])), Err(Errno::EPERM));
    assert_eq!(node.availability("irqbypass"), Availability::Loadable);
    node.sim.set_faults(&[fault(Moment::After)]).unwrap();
    assert_eq!(node.answer(&write_of(&loads[0])), Err(Errno::EPERM));
    assert_eq!(node.availability("irqbypass"), Availability::Loaded);
    assert_eq!(node.sim.writes().unwrap(), [write_of(&loads[0]), write_of(&loads[0])]);
}
