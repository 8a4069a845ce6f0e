//! A function in detail, its life, its holders, on trees as real nodes show them.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "test code")]

use std::{
    collections::BTreeMap,
    fs::{self, create_dir_all},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use tempfile::TempDir;
use vfio::{
    holders::{self, Owner},
    host::Host,
    pci::{
        self, Address, ConfigView, Details, Function, Life, PortType, ResetMethods, details,
        life::{APART, Answer, judge, look},
    },
    sim::{Profile, Simulation},
};

/// Where a GPU behind a switch is, on a node with two sockets.
const GPU: &str = "0000:18:00.0";
const WAY: &str = "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0";

struct Node {
    host: Host,
    gpu: PathBuf,
    dir: TempDir,
}

fn address(text: &str) -> Address {
    text.parse().unwrap()
}

#[expect(clippy::disallowed_methods, reason = "a test's own file")]
fn put(path: &Path, content: impl AsRef<[u8]>) {
    create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

/// The configuration space of a bridge whose PCI Express capability says `port`.
fn bridge(port: u8) -> Vec<u8> {
    let mut bytes = vec![0; 256];
    (bytes[0x06], bytes[0x0e], bytes[0x34]) = (0x10, 0x01, 0x40);
    bytes[0x40..0x44].copy_from_slice(&[0x10, 0, port << 4 | 2, 0]);
    bytes
}

fn h200() -> Vec<u8> {
    let hex = include_str!("../src/pci/config/h200.hex").split_whitespace();
    hex.map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect()
}

impl Node {
    /// A GPU with the attributes that no kernel leaves out.
    fn bare() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let devices = root.join("sys/bus/pci/devices");
        create_dir_all(&devices).unwrap();
        let gpu = root.join("sys/devices").join(WAY);
        for (name, content) in [("vendor", "0x10de\n"), ("device", "0x2335\n"), ("class", "0x030200\n")] {
            put(&gpu.join(name), content);
        }
        symlink(format!("../../../devices/{WAY}"), devices.join(GPU)).unwrap();
        let host = Host::at(root).unwrap();
        Self { host, gpu, dir }
    }

    /// With all that a node of today shows.
    fn full() -> Self {
        let node = Self::bare();
        for (name, content) in [
            ("subsystem_vendor", "0x10de\n"),
            ("subsystem_device", "0x18bf\n"),
            ("revision", "0xa1\n"),
            ("numa_node", "1\n"),
            ("reset_method", "flr bus\n"),
            ("current_link_speed", "2.5 GT/s PCIe\n"),
            ("current_link_width", "16\n"),
            ("max_link_speed", "32.0 GT/s PCIe\n"),
            ("max_link_width", "16\n"),
            ("label", "GPU 3\n"),
            ("power_state", "D3hot\n"),
            ("d3cold_allowed", "1\n"),
            ("boot_vga", "0\n"),
            ("sriov_totalvfs", "16\n"),
            ("resource", "0x0000104002000000 0x0000104002ffffff 0x000000000014220c\n"),
        ] {
            put(&node.gpu.join(name), content);
        }
        put(&node.gpu.join("config"), h200());
        // Out of order in a listing: virtfn10 comes before virtfn2.
        for (number, name) in [(0, "0000:18:00.2"), (2, "0000:18:00.4"), (10, "0000:18:01.4")] {
            symlink(format!("../{name}"), node.gpu.join(format!("virtfn{number}"))).unwrap();
        }
        let root = node.dir.path();
        for (upper, port) in [(1, 6), (2, 5), (3, 4)] {
            let dir = node.gpu.ancestors().nth(upper).unwrap();
            put(&dir.join("config"), bridge(port));
            let name = dir.file_name().unwrap();
            symlink(dir, root.join("sys/bus/pci/devices").join(name)).unwrap();
        }
        for (slot, place) in [("7", "0000:17:00\n"), ("12", "0000:16:00\n"), ("3", "0000:3b\n")] {
            put(&root.join("sys/bus/pci/slots").join(slot).join("address"), place);
        }
        for (name, distance) in [("node0", "10 21\n"), ("node1", "21 10\n")] {
            put(&root.join("sys/devices/system/node").join(name).join("distance"), distance);
        }
        put(&root.join("sys/devices/system/node/online"), "0-1\n");
        node
    }

    fn function(&self) -> Function {
        pci::read(&self.host, address(GPU)).unwrap().unwrap()
    }

    fn details(&self, held: bool) -> Details {
        details(&self.host, &self.function(), held)
    }
}

#[test]
fn everything_that_a_node_shows_is_read() {
    let node = Node::full();
    let found = node.details(false);
    assert_eq!((found.subsystem_vendor, found.subsystem_device), (Some(0x10de), Some(0x18bf)));
    assert_eq!((found.revision, found.total_vfs), (Some(0xa1), Some(16)));
    let vfs: Vec<_> = found.virtfns.iter().map(ToString::to_string).collect();
    assert_eq!(vfs, ["0000:18:00.2", "0000:18:00.4", "0000:18:01.4"]);
    assert_eq!(found.reset, ResetMethods::Ordered(vec!["flr".to_owned(), "bus".to_owned()]));
    assert_eq!(found.bars.unwrap()[0].size, 16 << 20);
    let ConfigView::Read(space) = found.config else { panic!("{:?}", found.config) };
    assert_eq!(space.flr, Some(true));
    // What sysfs shows counts before what configuration space says.
    assert_eq!(found.link.current_speed.unwrap().to_string(), "2.5 GT/s");
    assert_eq!((found.label.as_deref(), found.power_state.as_deref()), (Some("GPU 3"), Some("D3hot")));
    assert_eq!((found.boot_vga, found.d3cold_allowed), (Some(false), Some(true)));
    assert_eq!(found.numa_distances, Some(BTreeMap::from([(0, 21), (1, 10)])));
    // The slot of the nearest bridge that has one; the slot of another bus is not it.
    assert_eq!(found.slot.as_deref(), Some("7"));
    assert_eq!(found.topology.host_bridge.as_deref(), Some("pci0000:15"));
    let ports: Vec<_> = found.topology.hops.iter().map(|hop| hop.port).collect();
    assert_eq!(ports, [PortType::RootPort, PortType::SwitchUpstream, PortType::SwitchDownstream]);
    assert_eq!(found.topology.switch(), Some(address("0000:16:00.0")));
}

#[test]
fn what_is_not_there_is_unknown_and_the_function_is_read_all_the_same() {
    let node = Node::bare();
    let found = node.details(false);
    assert_eq!((found.subsystem_vendor, found.revision, found.bars.clone()), (None, None, None));
    assert_eq!((found.reset.clone(), found.link), (ResetMethods::Absent, pci::Link::default()));
    assert!(matches!(found.config, ConfigView::Unreadable { .. }));
    assert_eq!((found.slot, found.label, found.boot_vga, found.numa_distances), (None, None, None, None));
    // The way needs no attribute, and without configuration space the bridges' places tell what they are.
    assert_eq!(found.topology.root_port(), Some(address("0000:15:01.0")));
    put(&node.gpu.join("reset"), "");
    assert_eq!(node.details(false).reset, ResetMethods::Unlisted);
    put(&node.gpu.join("reset_method"), "\n");
    assert_eq!(node.details(false).reset, ResetMethods::Off);
}

#[test]
fn garbage_in_every_attribute_is_survived() {
    let node = Node::full();
    for name in [
        "subsystem_vendor",
        "revision",
        "reset_method",
        "current_link_speed",
        "max_link_width",
        "label",
        "boot_vga",
        "sriov_totalvfs",
        "resource",
        "config",
    ] {
        put(&node.gpu.join(name), b"\xff\x00\x1b[31m 0x 99999999999999999999999 :: \n\n\n");
    }
    let found = node.details(false);
    assert_eq!((found.subsystem_vendor, found.revision, found.total_vfs), (None, None, None));
    assert_eq!(found.bars, Some(Vec::new()));
    assert!(found.label.unwrap().chars().all(|c| !c.is_control()));
}

#[test]
fn a_kernel_without_link_files_leaves_it_to_configuration_space() {
    let node = Node::full();
    for name in ["current_link_speed", "current_link_width", "max_link_speed", "max_link_width"] {
        fs::remove_file(node.gpu.join(name)).unwrap();
    }
    let link = node.details(false).link;
    assert_eq!(link.current_speed.unwrap().to_string(), "32.0 GT/s");
    assert_eq!((link.current_width, link.narrowed()), (Some(16), false));
}

#[test]
fn a_held_functions_configuration_space_is_left_alone() {
    let node = Node::full();
    assert_eq!(node.details(true).config, ConfigView::Held);
    put(&node.gpu.join("config"), [0xff; 64]);
    assert_eq!(look(&node.host, address(GPU), true), Answer::Held);
    assert_eq!(look(&node.host, address(GPU), false), Answer::AllOnes);
}

#[test]
fn a_function_that_fell_off_the_bus_is_dead_at_the_second_look_only() {
    let node = Node::full();
    let at = address(GPU);
    let first = look(&node.host, at, false);
    assert_eq!(judge(None, first, APART, APART), Life::Alive);
    put(&node.gpu.join("config"), [0xff; 4096]);
    let second = look(&node.host, at, false);
    assert_eq!(judge(Some(first), second, APART, APART), Life::Suspect);
    let third = look(&node.host, at, false);
    assert_eq!(judge(Some(second), third, APART / 2, APART), Life::Suspect);
    assert_eq!(judge(Some(second), third, APART, APART), Life::Dead);
    // It comes back after a reset.
    put(&node.gpu.join("config"), h200());
    assert_eq!(judge(Some(third), look(&node.host, at, false), APART, APART), Life::Alive);
    fs::remove_file(node.gpu.join("config")).unwrap();
    assert_eq!(judge(Some(third), look(&node.host, at, false), APART, APART), Life::Unknown);
}

#[test]
fn a_holder_is_named_with_its_pod_program_and_cure() {
    let dir = tempfile::tempdir().unwrap();
    let sim = Simulation::create(dir.path(), &Profile::four_function_card()).unwrap();
    let uid = "5f3c1a2b_0d4e_4f60_8a7b_9c0d1e2f3a4b";
    let id = "3f8e2d1c0b9a87654321fedcba98765432100123456789abcdef0123456789ab";
    sim.start_process(4242, "qemu-kvm", &["/dev/nvidia0"]).unwrap();
    put(
        &sim.host().proc("4242/cgroup"),
        format!("0::/kubepods.slice/kubepods-pod{uid}.slice/cri-containerd-{id}.scope\n"),
    );
    put(&sim.host().proc("4242/cmdline"), b"/usr/libexec/qemu-kvm\0-object\0secret,data=hunter2\0");
    sim.start_process(77, "nvidia-persiste", &["/dev/nvidia0"]).unwrap();
    put(&sim.host().proc("77/cgroup"), "0::/system.slice/nvidia-persistenced.service\n");
    sim.start_process(78, "python3", &["/dev/nvidia0"]).unwrap();

    let found = holders::scan(sim.host(), ["/dev/nvidia0".to_owned()]);
    let holders: Vec<_> = found.of("/dev/nvidia0").collect();
    let owners: Vec<_> = holders.iter().map(|holder| holder.owner.clone()).collect();
    assert_eq!(
        owners,
        [
            Owner::Unit { unit: "nvidia-persistenced.service".to_owned() },
            Owner::Unknown,
            Owner::Pod { uid: uid.replace('_', "-"), container: Some(id.to_owned()) },
        ]
    );
    assert!(holders[0].cure.as_deref().unwrap().contains("systemctl stop nvidia-persistenced.service"));
    assert_eq!(holders[1].cure, None);
    assert_eq!(holders[2].program.as_deref(), Some("/usr/libexec/qemu-kvm"));
    assert!(!format!("{found:?}").contains("hunter2"));
}
