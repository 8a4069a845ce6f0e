//! Node profiles: what the built-in ones hold, and how they are laid.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "test code")]

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use tempfile::TempDir;
use vfio::{
    iommu,
    pci::{self, Address, Functions, Role},
    sim::{Profile, Simulation},
    vendor,
};

fn address(text: &str) -> Address {
    text.parse().unwrap()
}

struct Node {
    sim: Simulation,
    _dir: TempDir,
}

impl Node {
    fn new(profile: &Profile) -> Self {
        // In memory where there is such a place: trees are small files.
        let memory = Path::new("/dev/shm");
        let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
        Self { sim: Simulation::create(dir.path(), profile).unwrap(), _dir: dir }
    }

    fn of(name: &str) -> Self {
        Self::new(&Profile::find(name).unwrap())
    }

    fn functions(&self) -> Functions {
        let functions = pci::functions(self.sim.host()).unwrap();
        assert!(functions.unreadable.is_empty(), "{functions:?}");
        functions
    }

    fn attribute(&self, function: &str, name: &str) -> String {
        let path = self.sim.host().function_dir(address(function)).join(name);
        std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path:?}: {e}")).trim_end().to_owned()
    }

    fn config(&self, function: Address) -> Vec<u8> {
        std::fs::read(self.sim.host().function_dir(function).join("config")).unwrap()
    }
}

fn word(config: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([config[at], config[at + 1]])
}

fn link(path: &Path) -> String {
    std::fs::canonicalize(path).unwrap_or_else(|e| panic!("{path:?}: {e}")).to_str().unwrap().to_owned()
}

#[test]
fn each_built_in_file_is_found_under_the_name_it_gives_itself() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("profiles");
    let files: BTreeSet<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_str().unwrap().strip_suffix(".yaml").unwrap().to_owned())
        .collect();
    let mut built_in = BTreeSet::new();
    for profile in Profile::built_in() {
        assert!(!profile.functions.is_empty(), "{profile:?}");
        assert_eq!(Profile::find(&profile.name).unwrap(), profile);
        built_in.insert(profile.name);
    }
    assert_eq!(built_in, files);
}

#[test]
fn every_profile_is_laid_and_reads_back_exactly() {
    for profile in Profile::built_in() {
        let node = Node::new(&profile);
        let functions = node.functions();
        let read: Vec<_> = functions.known.keys().copied().collect();
        let written: Vec<_> = profile.functions.iter().map(|function| function.address).collect();
        assert_eq!(read, written, "{}", profile.name);
        let groups = iommu::groups(node.sim.host(), &functions).unwrap();
        for wanted in &profile.functions {
            let at = wanted.address.to_string();
            let context = format!("{} {at}", profile.name);
            let found = &functions.known[&wanted.address];
            assert_eq!(
                (
                    found.vendor,
                    found.device,
                    found.class.0,
                    &found.driver,
                    found.iommu_group,
                    found.numa_node
                ),
                (wanted.vendor, wanted.device, wanted.class, &wanted.driver, wanted.group, wanted.numa),
                "{context}"
            );
            assert_eq!((found.physfn, &found.driver_override), (wanted.physfn, &None), "{context}");
            let vfs = profile.functions.iter().filter(|vf| vf.physfn == Some(wanted.address)).count();
            assert_eq!(found.num_vfs as usize, vfs, "{context}");
            if let Some(group) = wanted.group {
                assert!(groups[&group].members.contains(&wanted.address), "{context}");
            }
            let (sub_vendor, sub_device) = wanted.subsystem;
            for (name, expected) in [
                ("subsystem_vendor", format!("{sub_vendor:#06x}")),
                ("subsystem_device", format!("{sub_device:#06x}")),
                ("revision", format!("{:#04x}", wanted.revision)),
            ] {
                assert_eq!(node.attribute(&at, name), expected, "{context} {name}");
            }
            let dir = node.sim.host().function_dir(wanted.address);
            assert_eq!(dir.join("boot_vga").exists(), wanted.class >> 8 == 0x0300, "{context}");
            assert_eq!(dir.join("reset_method").exists(), wanted.reset_method.is_some(), "{context}");
            assert_eq!(dir.join("sriov_totalvfs").exists(), wanted.sriov.is_some(), "{context}");
            assert!(!dir.join("label").exists(), "{context}");
            // Every link leads somewhere, and the driver's and the group's lead back.
            let here = link(&dir);
            if let Some(driver) = &wanted.driver {
                let back = node.sim.host().sys("bus/pci/drivers").join(driver).join(&at);
                assert_eq!(link(&back), here, "{context}");
                assert_eq!(link(&dir.join("driver")), link(back.parent().unwrap()), "{context}");
            }
            if wanted.group.is_some() {
                assert_eq!(link(&dir.join("iommu_group/devices").join(&at)), here, "{context}");
            }
        }
        assert!(node.sim.writes().unwrap().is_empty());
    }
}

#[test]
fn the_header_agrees_with_the_attributes() {
    for profile in Profile::built_in() {
        let node = Node::new(&profile);
        for function in &profile.functions {
            let context = format!("{} {}", profile.name, function.address);
            let config = node.config(function.address);
            assert_eq!(config.len(), 64, "{context}");
            let ids = (word(&config, 0), word(&config, 2));
            let class = u32::from(word(&config, 10)) << 8 | u32::from(config[9]);
            assert_eq!((class, config[8]), (function.class, function.revision), "{context}");
            let slot = profile
                .functions
                .iter()
                .filter(|other| other.physfn.is_none() && other.address.same_slot(function.address));
            let bridge = function.class >> 8 == 0x0604;
            let multifunction = function.physfn.is_none() && slot.count() > 1;
            assert_eq!(config[14], u8::from(bridge) | u8::from(multifunction) << 7, "{context}");
            if function.physfn.is_some() {
                assert_eq!(ids, (0xffff, 0xffff), "{context}: a VF's header has no ids");
            } else {
                assert_eq!(ids, (function.vendor, function.device), "{context}");
            }
            if bridge {
                let behind = profile.functions.iter().filter(|other| other.behind == Some(function.address));
                for below in behind {
                    assert!((config[0x19]..=config[0x1a]).contains(&below.address.bus()), "{context}");
                }
            } else {
                assert_eq!((word(&config, 0x2c), word(&config, 0x2e)), function.subsystem, "{context}");
            }
            let lines = node.attribute(&function.address.to_string(), "resource");
            assert_eq!(lines.lines().count(), if bridge { 17 } else { 13 }, "{context}");
        }
    }
}

/// Name; GPUs, NVSwitches, companions, VFs, foreign functions, bridges; groups with a GPU or an NVSwitch.
#[test]
fn the_roles_of_every_profile() {
    let expected: &[(&str, [usize; 6], usize)] = &[
        ("a10", [1, 0, 0, 0, 0, 0], 1),
        ("a30", [1, 0, 0, 0, 0, 0], 1),
        ("a40", [2, 0, 0, 0, 0, 0], 2),
        ("boot-vga", [1, 0, 1, 0, 0, 1], 1),
        ("consumer-x8x8", [2, 0, 6, 0, 0, 2], 1),
        ("consumer-x8x8-amd", [1, 0, 3, 0, 2, 2], 1),
        ("four-function-card", [1, 0, 3, 0, 0, 0], 1),
        ("gb200", [4, 0, 0, 0, 0, 4], 4),
        ("geforce", [2, 0, 6, 0, 0, 0], 2),
        ("gh200", [1, 0, 0, 0, 0, 1], 1),
        ("group-0", [2, 0, 0, 0, 0, 0], 2),
        ("hgx-a100", [8, 6, 0, 0, 0, 0], 14),
        ("hgx-h100", [8, 4, 0, 0, 2, 1], 12),
        ("hgx-h100-pairs", [8, 4, 0, 0, 0, 0], 10),
        ("hgx-h200", [8, 4, 0, 0, 0, 0], 9),
        ("l40s", [2, 0, 0, 32, 0, 0], 2),
        ("mcp55", [0, 0, 0, 0, 2, 1], 0),
        ("mi300x", [8, 0, 0, 0, 1, 0], 8),
        ("mixed-a10-l40s", [2, 0, 0, 0, 0, 0], 2),
        ("quadro", [3, 0, 5, 0, 0, 0], 3),
        ("rtx-pro-6000", [2, 0, 0, 48, 1, 0], 2),
        ("t4", [6, 0, 0, 0, 0, 0], 6),
        ("vmd", [2, 0, 0, 0, 2, 2], 2),
        ("without-iommu", [2, 0, 0, 0, 0, 0], 0),
    ];
    let names: Vec<_> = Profile::built_in().into_iter().map(|profile| profile.name).collect();
    assert_eq!(expected.iter().map(|row| row.0).collect::<Vec<_>>(), names);
    for (name, counts, groups) in expected {
        let functions = Node::of(name).functions().known;
        let mut roles: BTreeMap<Role, usize> = BTreeMap::new();
        let mut offered = BTreeSet::new();
        for function in functions.values() {
            let role = pci::role(function, functions.values());
            *roles.entry(role).or_default() += 1;
            if matches!(role, Role::Gpu | Role::NvSwitch) {
                offered.extend(function.iommu_group);
            }
        }
        let found = [Role::Gpu, Role::NvSwitch, Role::Companion, Role::Vf, Role::Foreign, Role::Bridge]
            .map(|role| roles.get(&role).copied().unwrap_or_default());
        assert_eq!((found, offered.len()), (*counts, *groups), "{name}");
    }
}

#[test]
fn virtual_functions_are_where_the_capability_says_and_linked_both_ways() {
    let node = Node::of("rtx-pro-6000");
    let dir = node.sim.host().function_dir(address("0001:04:00.0"));
    for (link_name, vf) in [
        ("virtfn0", "0001:04:00.2"),
        ("virtfn11", "0001:04:01.5"),
        ("virtfn22", "0001:04:03.0"),
        ("virtfn47", "0001:04:06.1"),
    ] {
        assert!(link(&dir.join(link_name)).ends_with(vf), "{link_name}");
        let there = node.sim.host().function_dir(address(vf));
        assert_eq!(link(&there.join("physfn")), link(&dir));
        assert_eq!(node.attribute(vf, "device"), "0x2bb5");
        assert!(!there.join("sriov_totalvfs").exists());
    }
    for (name, enabled, possible) in
        [("sriov_numvfs", "48", "0"), ("sriov_totalvfs", "48", "48"), ("sriov_offset", "2", "2")]
    {
        assert_eq!(node.attribute("0001:04:00.0", name), enabled);
        assert_eq!(node.attribute("0001:c8:00.0", name), possible);
    }
    let l40s = Node::of("l40s");
    let vf = l40s.functions().known[&address("0000:61:04.3")].clone();
    assert_eq!((vf.physfn, vf.iommu_group), (Some(address("0000:61:00.0")), Some(231)));
    let nodes: Vec<_> = vendor::nodes(l40s.sim.host()).unwrap().into_keys().collect();
    assert_eq!(
        nodes,
        ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"],
        "a VF has no node of the host's driver"
    );
}

/// Against what a real A10 and a real H200 show.
#[test]
fn resource_lines_have_the_kernels_form() {
    let a10 = Node::of("a10");
    let lines = a10.attribute("0000:17:00.0", "resource");
    let sizes: Vec<_> = lines
        .lines()
        .map(|line| {
            let numbers: Vec<_> = line
                .split(' ')
                .map(|n| u64::from_str_radix(n.strip_prefix("0x").unwrap(), 16).unwrap())
                .collect();
            assert!(line.len() == 56 && numbers[0] % 4096 == 0, "{line}");
            (if numbers[2] == 0 { 0 } else { numbers[1] - numbers[0] + 1 }, numbers[2])
        })
        .collect();
    let (mib, gib) = (1 << 20, 1 << 30);
    assert_eq!(sizes[0], (16 * mib, 0x40200));
    assert_eq!(sizes[1], (32 * gib, 0x14_220c));
    assert_eq!(sizes[3], (32 * mib, 0x14_220c));
    assert_eq!([sizes[7].0, sizes[8].0, sizes[10].0], [8 * mib, 64 * gib, gib]);
    let h200 = Node::of("hgx-h200");
    let config = h200.config(address("0000:18:00.0"));
    for (bar, kind) in [(0, 0x0c), (2, 0x0c), (4, 0x0c)] {
        assert_eq!(config[0x10 + bar * 4] & 0x0f, kind, "BAR {bar}");
    }
    assert_eq!(
        h200.attribute("0000:18:00.0", "modalias"),
        "pci:v000010DEd00002335sv000010DEsd000018BFbc03sc02i00"
    );
}

#[test]
fn a_boot_framebuffer_lies_in_the_gpus_bar() {
    let node = Node::of("boot-vga");
    assert_eq!(node.attribute("0000:c3:00.0", "boot_vga"), "1");
    let iomem = node.sim.host().read(&node.sim.host().proc("iomem")).unwrap();
    let at = iomem.lines().position(|line| line.ends_with(" : BOOTFB")).unwrap();
    let lines: Vec<_> = iomem.lines().skip(at - 2).take(4).collect();
    let names: Vec<_> = lines.iter().map(|line| line.split_once(" : ").unwrap().1).collect();
    assert_eq!(names, ["PCI Bus 0000:c3", "0000:c3:00.0", "BOOTFB", "simpledrm"]);
    for (depth, line) in lines.iter().enumerate() {
        assert_eq!(line.len() - line.trim_start().len(), depth * 2, "{line}");
    }
    let bar: Vec<_> = node.attribute("0000:c3:00.0", "resource").lines().map(str::to_owned).collect();
    let start = lines[2].trim_start().split('-').next().unwrap();
    assert!(bar[1].starts_with(&format!("0x{start:0>16} ")), "{start} {bar:?}");
    let driver = node.sim.host().sys("bus/platform/drivers/simple-framebuffer/simple-framebuffer.0/driver");
    assert!(link(&driver).ends_with("simple-framebuffer"));
}

#[test]
fn topology_and_numa_are_as_the_kernel_shows_them() {
    let vmd = Node::of("vmd");
    let dir = vmd.sim.host().function_dir(address("10000:02:00.0"));
    assert!(
        link(&dir).ends_with("sys/devices/pci0000:00/0000:00:0e.0/pci10000:00/10000:00:03.0/10000:02:00.0"),
        "{}",
        link(&dir)
    );
    let gb200 = Node::of("gb200");
    assert_eq!(gb200.attribute("0008:01:00.0", "local_cpulist"), "");
    assert_eq!(gb200.attribute("0018:00:00.0", "local_cpulist"), "72-143");
    let nodes = gb200.sim.host().sys("devices/system/node");
    let read = |name: &str| gb200.sim.host().read(&nodes.join(name)).unwrap();
    assert_eq!(
        (read("node2/cpulist"), read("node0/distance")),
        ("\n".to_owned(), "10 20 20 20 20 20\n".to_owned())
    );
    assert_eq!(Node::of("without-iommu").attribute("0000:17:00.0", "local_cpulist"), "0-15");
}
