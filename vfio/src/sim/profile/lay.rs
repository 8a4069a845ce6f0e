//! A profile laid as a tree: the files and links of sysfs, procfs and devtmpfs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs, io,
    os::unix::fs::symlink,
    path::Path,
};

use super::{
    Framebuffer, Profile, ProfileFunction, ReservedKind,
    config_space::{Buses, header},
    memory::{self, Regions},
};
use crate::{
    host::Host,
    pci::Address,
    sim::{
        kernel,
        modules::{self, ModuleTree},
        tree::{self, Tree},
    },
};

/// The distance of a NUMA node to itself and to any other, as firmware gives it for two sockets.
const DISTANCES: (u8, u8) = (10, 20);

impl Profile {
    pub(in crate::sim) fn lay(&self, root: &Path) -> io::Result<()> {
        for dir in ["sys/bus/pci/devices", "sys/kernel/iommu_groups", "dev/vfio", "proc", "lib/modules"] {
            fs::create_dir_all(root.join(dir))?;
        }
        tree::put(&root.join("sys/bus/pci/drivers_probe"), "")?;
        tree::put(&root.join("sys/kernel/uevent_seqnum"), "1000\n")?;
        tree::put(&root.join("proc/sys/kernel/random/boot_id"), "5137ab1e-0000-4000-8000-000000000001\n")?;
        tree::put(&root.join("dev/vfio/vfio"), "")?;
        for driver in &self.drivers {
            modules::lay_driver(root, driver)?;
        }
        ModuleTree::of_drivers(&self.drivers).lay(root)?;
        self.lay_numa(root)?;
        let regions = memory::assign(&self.functions)
            .map_err(|address| io::Error::other(format!("no room for the BARs of {address}")))?;
        tree::put(&root.join("proc/iomem"), &memory::iomem(&self.functions, &regions))?;
        let node = Node {
            root,
            profile: self,
            by_address: self.functions.iter().map(|function| (function.address, function)).collect(),
            regions,
        };
        for function in &self.functions {
            node.lay(function)?;
        }
        node.lay_consoles()?;
        let tree = Tree::new(Host::at(root).map_err(io::Error::other)?);
        for function in &self.functions {
            if let Some(driver) = &function.driver {
                kernel::put(&tree, function.address, Some(driver), None)?;
            }
        }
        if root.join("dev/nvidia0").exists() {
            tree::put(&root.join("dev/nvidiactl"), "")?;
        }
        Ok(())
    }

    fn lay_numa(&self, root: &Path) -> io::Result<()> {
        for (node, cpus) in &self.numa_cpus {
            let dir = root.join(format!("sys/devices/system/node/node{node}"));
            tree::put(&dir.join("cpulist"), &format!("{cpus}\n"))?;
            let distance = |other: &u32| if other == node { DISTANCES.0 } else { DISTANCES.1 };
            let distances: Vec<_> = self.numa_cpus.keys().map(|other| distance(other).to_string()).collect();
            tree::put(&dir.join("distance"), &format!("{}\n", distances.join(" ")))?;
        }
        Ok(())
    }

    /// The CPUs near a function; all of them where its node is not known.
    fn local_cpus(&self, function: &ProfileFunction) -> String {
        let all = || {
            let lists: Vec<_> = self.numa_cpus.values().filter(|list| !list.is_empty()).cloned().collect();
            lists.join(",")
        };
        match u32::try_from(function.numa) {
            Ok(node) => self.numa_cpus.get(&node).cloned().unwrap_or_default(),
            Err(_) => all(),
        }
    }
}

/// What laying one function needs of all others.
struct Node<'a> {
    root: &'a Path,
    profile: &'a Profile,
    by_address: BTreeMap<Address, &'a ProfileFunction>,
    regions: Regions,
}

impl Node<'_> {
    /// Where a function's directory is below `sys/devices`: behind its bridges, from the root bus on.
    fn device_path(&self, function: &ProfileFunction) -> String {
        let mut parts = vec![function.address.to_string()];
        let mut here = function;
        // Not more steps than functions: a profile made in a program may go in circles.
        for _ in 0..=self.by_address.len() {
            let above = here.behind.and_then(|above| self.by_address.get(&above));
            if above.is_none_or(|above| above.address.domain() != here.address.domain()) {
                // VFs may be numbered into the buses after their physical function's; they are its siblings all the same.
                let bus = here.physfn.unwrap_or(here.address).bus();
                parts.push(format!("pci{:04x}:{bus:02x}", here.address.domain()));
            }
            let Some(above) = above else { break };
            parts.push(above.address.to_string());
            here = above;
        }
        parts.reverse();
        parts.join("/")
    }

    fn lay(&self, function: &ProfileFunction) -> io::Result<()> {
        let ProfileFunction { address, vendor, device, class, subsystem, .. } = function;
        let path = self.device_path(function);
        let dir = self.root.join("sys/devices").join(&path);
        let attribute = |name: &str, value: &str| tree::put(&dir.join(name), &format!("{value}\n"));
        attribute("vendor", &format!("{vendor:#06x}"))?;
        attribute("device", &format!("{device:#06x}"))?;
        attribute("class", &format!("{class:#08x}"))?;
        attribute("subsystem_vendor", &format!("{:#06x}", subsystem.0))?;
        attribute("subsystem_device", &format!("{:#06x}", subsystem.1))?;
        attribute("revision", &format!("{:#04x}", function.revision))?;
        attribute("driver_override", "(null)")?;
        attribute("numa_node", &function.numa.to_string())?;
        attribute("local_cpulist", &self.profile.local_cpus(function))?;
        attribute("modalias", &modalias(function))?;
        tree::put(&dir.join("resource"), &memory::resource(function, &self.regions))?;
        let header = header(function, self.multifunction(function), self.buses(function), &self.regions);
        tree::put_bytes(&dir.join("config"), &header)?;
        if function.is_vga() {
            attribute("boot_vga", if function.boot_vga { "1" } else { "0" })?;
        }
        if let Some(method) = &function.reset_method {
            attribute("reset_method", method)?;
        }
        self.lay_sriov(function, &dir)?;
        if function.framebuffer.is_some() {
            self.lay_framebuffer(function)?;
        }

        let name = address.to_string();
        symlink(format!("../../../devices/{path}"), self.root.join("sys/bus/pci/devices").join(&name))?;
        if let Some(group) = function.group {
            let group_dir = self.root.join(format!("sys/kernel/iommu_groups/{group}"));
            fs::create_dir_all(group_dir.join("devices"))?;
            let up = "../".repeat(path.split('/').count() + 1);
            symlink(format!("{up}kernel/iommu_groups/{group}"), dir.join("iommu_group"))?;
            symlink(format!("../../../../devices/{path}"), group_dir.join("devices").join(&name))?;
            tree::put(&group_dir.join("reserved_regions"), &self.reserved_regions(group))?;
        }
        Ok(())
    }

    /// A VF's header never has the bit: it is no function of the slot.
    fn multifunction(&self, function: &ProfileFunction) -> bool {
        function.physfn.is_none()
            && self.by_address.values().any(|other| {
                other.physfn.is_none()
                    && other.address != function.address
                    && other.address.same_slot(function.address)
            })
    }

    fn buses(&self, bridge: &ProfileFunction) -> Option<Buses> {
        let behind = |above: Address| {
            self.by_address.values().filter(move |function| {
                function.behind == Some(above) && function.address.domain() == above.domain()
            })
        };
        let secondary = behind(bridge.address).map(|function| function.address.bus()).min()?;
        let mut subordinate = secondary;
        let mut bridges = vec![bridge.address];
        for _ in 0..=self.by_address.len() {
            let Some(next) = bridges.pop() else { break };
            for function in behind(next) {
                subordinate = subordinate.max(function.address.bus());
                bridges.extend(function.is_bridge().then_some(function.address));
            }
        }
        Some(Buses { primary: bridge.address.bus(), secondary, subordinate })
    }

    /// The links between a VF and its physical function lie beside each other: both are on the same bridge's bus.
    fn lay_sriov(&self, function: &ProfileFunction, dir: &Path) -> io::Result<()> {
        if let Some(physfn) = function.physfn {
            symlink(format!("../{physfn}"), dir.join("physfn"))?;
        }
        let Some(sriov) = &function.sriov else { return Ok(()) };
        let vfs = self.profile.functions.iter().filter(|vf| vf.physfn == Some(function.address));
        let mut enabled = 0;
        for (number, vf) in vfs.enumerate() {
            symlink(format!("../{}", vf.address), dir.join(format!("virtfn{number}")))?;
            enabled = number + 1;
        }
        for (name, value) in [
            ("sriov_totalvfs", sriov.total.to_string()),
            ("sriov_numvfs", enabled.to_string()),
            ("sriov_offset", sriov.offset.to_string()),
            ("sriov_stride", sriov.stride.to_string()),
            ("sriov_vf_device", format!("{:x}", sriov.device)),
            ("sriov_drivers_autoprobe", "1".to_owned()),
        ] {
            tree::put(&dir.join(name), &format!("{value}\n"))?;
        }
        Ok(())
    }

    /// The lines of a group's `reserved_regions`, by address as the kernel sorts them.
    fn reserved_regions(&self, group: u32) -> String {
        let usual = BTreeSet::from([ReservedKind::Msi]);
        let kinds = self.profile.reserved.get(&group).unwrap_or(&usual);
        let mut regions: Vec<_> = kinds.iter().map(|kind| (reserved_region(*kind), kind.as_str())).collect();
        regions.sort_unstable();
        regions.iter().map(|((start, end), kind)| format!("{start:#018x} {end:#018x} {kind}\n")).collect()
    }

    /// The framebuffer devices that carry the kernel's console, and fbcon as the console driver that draws on them.
    fn lay_consoles(&self) -> io::Result<()> {
        let carriers: Vec<_> = self.by_address.values().filter(|function| function.console).collect();
        if carriers.is_empty() {
            return Ok(());
        }
        let sys = self.root.join("sys");
        fs::create_dir_all(sys.join("class/vtconsole"))?;
        fs::create_dir_all(sys.join("class/graphics/fbcon"))?;
        for (number, function) in carriers.into_iter().enumerate() {
            let path = format!("{}/graphics/fb{number}", self.device_path(function));
            let dir = sys.join("devices").join(&path);
            tree::put(
                &dir.join("name"),
                &format!("{}drmfb\n", function.driver.as_deref().unwrap_or_default()),
            )?;
            symlink(format!("../../../{}", function.address), dir.join("device"))?;
            symlink(format!("../../devices/{path}"), sys.join(format!("class/graphics/fb{number}")))?;
        }
        for (vtconsole, name, bound) in
            [("vtcon0", "(S) dummy device", "0"), ("vtcon1", "(M) frame buffer device", "1")]
        {
            let dir = sys.join("devices/virtual/vtconsole").join(vtconsole);
            tree::put(&dir.join("name"), &format!("{name}\n"))?;
            tree::put(&dir.join("bind"), &format!("{bound}\n"))?;
            let link = format!("../../devices/virtual/vtconsole/{vtconsole}");
            symlink(link, sys.join("class/vtconsole").join(vtconsole))?;
        }
        Ok(())
    }

    /// The platform device that holds on to the firmware's framebuffer.
    fn lay_framebuffer(&self, function: &ProfileFunction) -> io::Result<()> {
        let name = match function.framebuffer {
            Some(Framebuffer::Efifb) => "efi-framebuffer",
            _ => "simple-framebuffer",
        };
        let device = self.root.join(format!("sys/devices/platform/{name}.0"));
        tree::put(&device.join("driver_override"), "(null)\n")?;
        let driver = self.root.join("sys/bus/platform/drivers").join(name);
        tree::put(&driver.join("unbind"), "")?;
        symlink(format!("../../../bus/platform/drivers/{name}"), device.join("driver"))?;
        symlink(format!("../../../../devices/platform/{name}.0"), driver.join(format!("{name}.0")))
    }
}

/// Where a region of its kind is on an x86 node: firmware tables below 2 GiB, memory stolen for graphics above them, the
/// interrupt controllers, AMD's HyperTransport range.
fn reserved_region(kind: ReservedKind) -> (u64, u64) {
    match kind {
        ReservedKind::Direct => (0x7b80_0000, 0x7fff_ffff),
        ReservedKind::DirectRelaxable => (0x8b00_0000, 0x8f7f_ffff),
        ReservedKind::Msi => (0xfee0_0000, 0xfeef_ffff),
        ReservedKind::Reserved => (0xfd_0000_0000, 0xff_ffff_ffff),
    }
}

fn modalias(function: &ProfileFunction) -> String {
    let ProfileFunction { vendor, device, class, subsystem: (sub_vendor, sub_device), .. } = function;
    let (base, sub, interface) = (class >> 16, class >> 8 & 0xff, class & 0xff);
    let mut out = format!("pci:v{vendor:08X}d{device:08X}sv{sub_vendor:08X}sd{sub_device:08X}");
    let _ = write!(out, "bc{base:02X}sc{sub:02X}i{interface:02X}");
    out
}
