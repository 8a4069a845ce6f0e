//! The simulated kernel answers as Linux does: one test a rule. The real kernel's side of each is in vm-tests.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "test code")]

use std::{thread, time::Duration};

use nix::{errno::Errno, unistd::Pid};
use tempfile::TempDir;
use vfio::{
    drm, holders,
    host::Host,
    iommu,
    pci::{self, Address},
    sim::{Effect, Fault, Moment, OpenError, Profile, Simulation, kernel},
    vendor,
    write::Write,
};

struct Node {
    sim: Simulation,
    _dir: TempDir,
}

fn address(text: &str) -> Address {
    text.parse().unwrap()
}

impl Node {
    fn new(profile: &Profile) -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self { sim: Simulation::create(dir.path(), profile).unwrap(), _dir: dir }
    }

    fn answer(&self, write: &Write) -> Result<(), Errno> {
        kernel::answer(self.sim.host(), write, Pid::from_raw(0))
    }

    fn set_override(&self, at: &str, driver: Option<&str>) {
        self.answer(&Write::Override { address: address(at), driver: driver.map(str::to_owned) }).unwrap();
    }

    fn unbind(&self, at: &str, driver: &str) -> Result<(), Errno> {
        self.answer(&Write::Unbind { address: address(at), driver: driver.to_owned() })
    }

    fn probe(&self, at: &str) -> Result<(), Errno> {
        self.answer(&Write::Probe { address: address(at) })
    }

    fn driver(&self, at: &str) -> Option<String> {
        pci::read(self.sim.host(), address(at)).unwrap().unwrap().driver
    }

    fn to_vfio(&self, at: &str) {
        let driver = self.driver(at).unwrap();
        self.set_override(at, Some("vfio-pci"));
        self.unbind(at, &driver).unwrap();
        self.probe(at).unwrap();
        assert_eq!(self.driver(at).as_deref(), Some("vfio-pci"));
    }

    fn groups(&self) -> std::collections::BTreeMap<u32, iommu::Group> {
        iommu::groups(self.sim.host(), &pci::functions(self.sim.host()).unwrap()).unwrap()
    }
}

const GPU: &str = "0000:52:00.0";
const AUDIO: &str = "0000:52:00.1";

#[test]
fn a_probe_without_a_match_succeeds_and_binds_nothing() {
    let node = Node::new(&Profile::four_function_card());
    node.set_override(GPU, Some("nosuch"));
    node.unbind(GPU, "nvidia").unwrap();
    assert_eq!(node.probe(GPU), Ok(()));
    assert_eq!(node.driver(GPU), None);
    node.set_override(GPU, None);
    let content = node.sim.host().read(&node.sim.host().function_dir(address(GPU)).join("driver_override"));
    assert_eq!(content.unwrap(), "(null)\n");
    node.probe(GPU).unwrap();
    assert_eq!(node.driver(GPU).as_deref(), Some("nvidia"));
}

#[test]
fn unbinding_from_another_driver_than_the_bound_one_is_enodev() {
    let node = Node::new(&Profile::four_function_card());
    assert_eq!(node.unbind(GPU, "vfio-pci"), Err(Errno::ENODEV));
    assert_eq!(node.probe("0000:99:00.0"), Err(Errno::ENODEV));
    assert_eq!(node.driver(GPU).as_deref(), Some("nvidia"));
}

#[test]
fn the_group_node_comes_with_the_first_and_goes_with_the_last_vfio_member() {
    let node = Node::new(&Profile::four_function_card());
    assert_eq!(node.groups()[&35].node, None);
    node.to_vfio(GPU);
    node.to_vfio(AUDIO);
    assert_eq!(node.groups()[&35].node.as_deref(), Some("/dev/vfio/35"));
    node.set_override(GPU, None);
    node.unbind(GPU, "vfio-pci").unwrap();
    assert!(node.groups()[&35].node.is_some());
    node.unbind(AUDIO, "vfio-pci").unwrap();
    assert_eq!(node.groups()[&35].node, None);
}

#[test]
fn a_group_with_a_member_on_a_host_driver_is_not_viable_and_a_driverless_member_is_fine() {
    let node = Node::new(&Profile::four_function_card());
    node.to_vfio(GPU);
    assert!(matches!(node.sim.start_vmm(1, "qemu", 35), Err(OpenError::NotViable(35))));
    for (at, driver) in
        [(AUDIO, "snd_hda_intel"), ("0000:52:00.2", "xhci_hcd"), ("0000:52:00.3", "nvidia-gpu")]
    {
        node.unbind(at, driver).unwrap();
    }
    node.sim.start_vmm(1, "qemu", 35).unwrap();
    assert!(matches!(node.sim.start_vmm(2, "qemu", 35), Err(OpenError::Busy(35))));
    assert_eq!(node.probe(AUDIO), Err(Errno::EINVAL), "a host driver cannot bind into an open group");
}

#[test]
fn an_unbind_from_vfio_waits_for_the_device_to_be_closed() {
    let node = Node::new(&Profile::hgx_h100());
    node.to_vfio("0000:11:00.0");
    node.sim.start_vmm(7, "qemu", 29).unwrap();
    thread::scope(|scope| {
        let unbind = scope.spawn(|| node.unbind("0000:11:00.0", "vfio-pci"));
        thread::sleep(Duration::from_millis(100));
        assert!(!unbind.is_finished());
        assert_eq!(node.driver("0000:11:00.0").as_deref(), Some("vfio-pci"));
        node.to_vfio("0000:12:00.0");
        node.sim.end_process(7).unwrap();
        assert_eq!(unbind.join().unwrap(), Ok(()));
    });
    assert_eq!(node.driver("0000:11:00.0"), None);
}

#[test]
fn amdgpus_nodes_come_and_go_with_its_functions_and_an_unbind_waits_for_their_holders() {
    let node = Node::new(&Profile::find("mi300x").unwrap());
    let (first, second) = ("0000:05:00.0", "0000:26:00.0");
    let root = node.sim.root().to_owned();
    assert_eq!(
        drm::nodes(node.sim.host(), address(second)).unwrap(),
        ["/dev/dri/card1", "/dev/dri/renderD129"]
    );
    for held in ["/dev/dri/renderD129", "/dev/kfd"] {
        node.sim.start_process(7, "python3", &[held]).unwrap();
        thread::scope(|scope| {
            let unbind = scope.spawn(|| node.unbind(second, "amdgpu"));
            thread::sleep(Duration::from_millis(100));
            assert!(!unbind.is_finished(), "{held}");
            node.sim.end_process(7).unwrap();
            assert_eq!(unbind.join().unwrap(), Ok(()));
        });
        assert!(!root.join("dev/dri/renderD129").exists() && root.join("dev/dri/renderD128").exists());
        node.probe(second).unwrap();
        assert_eq!(node.driver(second).as_deref(), Some("amdgpu"));
    }
    // Another card's render node is no reason to wait.
    node.sim.start_process(8, "python3", &["/dev/dri/renderD129"]).unwrap();
    node.unbind(first, "amdgpu").unwrap();
    assert!(root.join("dev/kfd").exists());
}

#[test]
fn vfio_takes_nothing_that_is_in_no_group() {
    let node = Node::new(&Profile::without_iommu());
    assert!(node.groups().is_empty());
    node.set_override("0000:17:00.0", Some("vfio-pci"));
    node.unbind("0000:17:00.0", "nvidia").unwrap();
    assert_eq!(node.probe("0000:17:00.0"), Err(Errno::EINVAL));
}

#[test]
fn faults_strike_where_they_are_set_and_every_write_is_logged() {
    let node = Node::new(&Profile::four_function_card());
    node.sim
        .set_faults(&[Fault::on(address(GPU), Moment::Before, Effect::Errno(Errno::EIO as i32))])
        .unwrap();
    assert_eq!(node.unbind(GPU, "nvidia"), Err(Errno::EIO));
    assert_eq!(node.driver(GPU).as_deref(), Some("nvidia"));
    assert_eq!(node.unbind(AUDIO, "snd_hda_intel"), Ok(()));
    node.sim.set_faults(&[Fault::at(3, Moment::After, Effect::Errno(Errno::EIO as i32))]).unwrap();
    assert_eq!(node.unbind(GPU, "nvidia"), Err(Errno::EIO));
    assert_eq!(node.driver(GPU), None, "after: it was done, and the writer was told otherwise");
    assert_eq!(node.sim.writes().unwrap().len(), 3);
}

#[test]
fn holders_are_found_by_what_they_have_open_and_the_unreadable_are_said() {
    let node = Node::new(&Profile::hgx_h100());
    let host: &Host = node.sim.host();
    let nodes = vendor::nodes(host).unwrap();
    let of_11 =
        nodes.iter().find(|(_, scope)| **scope == vendor::Scope::Function(address("0000:11:00.0"))).unwrap();
    node.sim.start_process(50, "python3", &[of_11.0, "/dev/nvidiactl"]).unwrap();
    node.sim.start_process(51, "bash", &["/dev/null"]).unwrap();
    let found = holders::scan(host, nodes.keys().cloned());
    let held: Vec<_> = found.by_node.keys().map(String::as_str).collect();
    assert_eq!(held, [of_11.0.as_str(), "/dev/nvidiactl"]);
    assert_eq!(found.of(of_11.0).map(|h| (h.pid, h.command.as_str())).collect::<Vec<_>>(), [(50, "python3")]);
    assert!(found.opaque.is_empty());

    // A live process whose descriptors cannot be listed may hold anything.
    let fds = host.proc("51/fd");
    std::fs::remove_dir_all(&fds).unwrap();
    #[expect(clippy::disallowed_methods, reason = "a test's own file")]
    std::fs::write(&fds, "").unwrap();
    let found = holders::scan(host, nodes.keys().cloned());
    assert_eq!(found.opaque.iter().map(|process| process.pid).collect::<Vec<_>>(), [Some(51)]);
}

#[test]
fn a_restart_of_the_node_puts_everything_where_the_kernel_puts_it() {
    let node = Node::new(&Profile::four_function_card());
    let before = node.sim.host().boot_id();
    node.to_vfio(GPU);
    node.sim.start_process(9, "qemu", &["/dev/vfio/35"]).unwrap();
    node.sim.reboot().unwrap();
    assert_ne!(node.sim.host().boot_id(), before);
    assert_eq!(node.driver(GPU).as_deref(), Some("nvidia"));
    assert!(holders::scan(node.sim.host(), ["/dev/vfio/35".to_owned()]).by_node.is_empty());
}

#[test]
fn every_built_in_profile_can_be_read_back() {
    for profile in Profile::built_in() {
        let node = Node::new(&profile);
        let functions = pci::functions(node.sim.host()).unwrap();
        assert!(functions.unreadable.is_empty(), "{}: {functions:?}", profile.name);
        assert_eq!(functions.known.len(), profile.functions.len());
        for wanted in &profile.functions {
            let found = &functions.known[&wanted.address];
            assert_eq!(
                (found.vendor, found.device, found.class.0),
                (wanted.vendor, wanted.device, wanted.class)
            );
            assert_eq!(
                (&found.driver, found.iommu_group, found.numa_node),
                (&wanted.driver, wanted.group, wanted.numa)
            );
        }
        assert!(node.sim.writes().unwrap().is_empty());
    }
}
