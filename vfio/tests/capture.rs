//! A real node, laid as a tree from what was read on it: one H200 on the host's driver, no IOMMU, in a virtual machine.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "test code")]

use std::{
    fs::{self, create_dir_all},
    os::unix::fs::symlink,
    path::Path,
};

use tempfile::TempDir;
use vfio::{
    framebuffer,
    host::Host,
    iommu,
    pci::{
        self, Address, ConfigView, Details, PortType, ResetMethods, details,
        life::{Answer, look},
    },
    vendor,
};

/// `== ADDRESS TARGET` begins a device, `-- NAME` a file, `-> NAME TARGET` a link; `config.hex` is configuration space.
const CAPTURE: &str = include_str!("captures/h200-container-node.txt");
const GPU: &str = "0000:00:06.0";

/// As that node's `/proc/iomem` has it: the driver has claimed BAR 0.
const IOMEM: &str = "\
100000000000-103fffffffff : 0000:00:06.0
104000000000-104001ffffff : 0000:00:06.0
104002000000-104002ffffff : 0000:00:06.0
  104002000000-104002ffffff : nvidia
";

#[expect(clippy::disallowed_methods, reason = "a test's own file")]
fn put(path: &Path, content: impl AsRef<[u8]>) {
    create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

fn lay() -> (TempDir, Host) {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let devices = root.join("sys/bus/pci/devices");
    create_dir_all(&devices).unwrap();
    let (functions, _host) = CAPTURE.split_once("\n== host\n").unwrap();
    for section in functions.split("\n== ").skip(1) {
        let (head, body) = section.split_once('\n').unwrap();
        let (address, target) = head.split_once(' ').unwrap();
        symlink(target, devices.join(address)).unwrap();
        let device = root.join("sys").join(target.trim_start_matches("../"));
        for file in format!("\n{body}").split("\n-- ").skip(1) {
            let (name, content) = file.split_once('\n').unwrap();
            if name == "config.hex" {
                let bytes = content.split_whitespace().map(|byte| u8::from_str_radix(byte, 16).unwrap());
                put(&device.join("config"), bytes.collect::<Vec<_>>());
                continue;
            }
            let lines = content.lines().take_while(|line| !line.starts_with("-> "));
            put(&device.join(name), lines.map(|line| format!("{line}\n")).collect::<String>());
        }
        for link in body.lines().filter_map(|line| line.strip_prefix("-> ")) {
            let (name, target) = link.split_once(' ').unwrap();
            symlink(target, device.join(name)).unwrap();
        }
    }
    put(&root.join("proc/iomem"), IOMEM);
    for node in [
        "nvidia0",
        "nvidiactl",
        "nvidia-uvm",
        "nvidia-uvm-tools",
        "nvidia-caps/nvidia-cap1",
        "nvidia-caps/nvidia-cap2",
    ] {
        put(&root.join("dev").join(node), "");
    }
    let host = Host::at(root).unwrap();
    (dir, host)
}

fn detail(host: &Host, address: &str) -> Details {
    let functions = pci::functions(host).unwrap();
    details(host, &functions.known[&address.parse::<Address>().unwrap()], false)
}

#[test]
fn the_h200_is_read_in_full() {
    let (_dir, host) = lay();
    let functions = pci::functions(&host).unwrap();
    assert_eq!((functions.known.len(), functions.unreadable.len()), (7, 0));
    let gpu = &functions.known[&GPU.parse().unwrap()];
    assert_eq!((gpu.driver.as_deref(), gpu.iommu_group, gpu.numa_node), (Some("nvidia"), None, -1));
    assert!(iommu::groups(&host, &functions).unwrap().is_empty());

    let found = detail(&host, GPU);
    assert_eq!((found.subsystem_device, found.revision), (Some(0x18bf), Some(0xa1)));
    assert_eq!(found.reset, ResetMethods::Ordered(vec!["flr".to_owned()]));
    let bars: Vec<_> = found.bars.unwrap().iter().map(|bar| (bar.index, bar.size >> 20)).collect();
    assert_eq!(bars, [(0, 16), (2, 256 << 10), (4, 32)]);
    assert_eq!(found.link.max_speed.unwrap().to_string(), "32.0 GT/s");
    assert_eq!((found.link.current_width, found.link.narrowed()), (Some(16), false));
    let ConfigView::Read(space) = found.config else { panic!("{:?}", found.config) };
    assert_eq!((space.flr, space.express.unwrap().port), (Some(true), PortType::Endpoint));
    assert_eq!((found.power_state.as_deref(), found.d3cold_allowed), (Some("D0"), Some(true)));
    // The hypervisor puts it on the root bus: no port above it, no slot, no node.
    assert_eq!((found.topology.host_bridge.as_deref(), found.topology.hops.len()), (Some("pci0000:00"), 0));
    assert_eq!((found.slot, found.numa_distances, found.boot_vga), (None, None, None));
    assert_eq!(look(&host, GPU.parse().unwrap(), false), Answer::Answers);
}

#[test]
fn every_function_of_the_node_answers_and_only_the_gpu_can_reset_itself() {
    let (_dir, host) = lay();
    for address in pci::functions(&host).unwrap().known.keys() {
        assert_eq!(look(&host, *address, false), Answer::Answers, "{address}");
        let ConfigView::Read(space) = detail(&host, &address.to_string()).config else { panic!("{address}") };
        assert_eq!(space.flr, Some(address.to_string() == GPU), "{address}");
    }
}

#[test]
fn a_drivers_claim_is_no_framebuffer_and_its_capabilities_are_nodes() {
    let (_dir, host) = lay();
    assert_eq!(framebuffer::framebuffers(&host), framebuffer::Framebuffers::default());
    let nodes = vendor::nodes(&host).unwrap();
    assert!(nodes.contains_key("/dev/nvidia-caps/nvidia-cap2") && nodes.len() == 6, "{nodes:?}");
}
