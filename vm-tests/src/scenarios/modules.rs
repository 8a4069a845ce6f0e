//! Kernel modules on the way to vfio.
#![allow(clippy::disallowed_methods, reason = "plays the administrator, who writes to /etc/modprobe.d")]

use std::fs;

use super::Scenario;
use super::cards::{A10, ONE_GPU};
use crate::guest::agent::vfiod;
use crate::guest::failure::{Step, ensure, equal, io_on};
use crate::guest::machine::Machine;
use crate::guest::modules::{ModuleDirectory, is_loaded};
use crate::guest::paths::CONTAINER;
use crate::guest::trace::Trace;
use crate::guest::vmm::Vmm;

pub(super) const MODULES_LOADED: Scenario = Scenario {
    name: "modules-loaded",
    about: "vfio modules that are not loaded are, packed ones too, with their options; one that cannot be is explained",
    node: ONE_GPU,
    seconds: 180,
    run: modules_loaded,
};

fn conf(text: &str) -> Step {
    let dir = "/etc/modprobe.d";
    fs::create_dir_all(dir)
        .and_then(|()| fs::write(format!("{dir}/lab.conf"), text))
        .map_err(io_on("write to", dir))
}

fn parameter(module: &str, name: &str) -> Step<String> {
    let path = format!("/sys/module/{module}/parameters/{name}");
    let text = fs::read_to_string(&path).map_err(io_on("read", path))?;
    Ok(text.trim_end().to_owned())
}

fn modules_loaded(machine: &Machine) -> Step {
    let gpu = machine.function(0, 0);
    let directory = ModuleDirectory::lay()?;
    gpu.expect_back("nvidia")?;

    // What cannot be loaded refuses the group, before anything is written.
    let before = Trace::take()?;
    conf("install vfio-pci /bin/false\n")?;
    vfiod(&["bind", &gpu.address])?.exits(1)?.says("VfioAbsent")?.says("lab.conf")?;
    before.unchanged()?;

    conf("options vfio_iommu_type1 \\\n  allow_unsafe_interrupts=1\noptions vfio-pci disable_idle_d3=1\n")?;
    vfiod(&["plan", "--workload-type", "vm-passthrough"])?.exits(0)?.says("load module vfio_pci")?;
    ensure("vfio-pci after `plan`", !is_loaded("vfio_pci"), "not to be loaded", &"it is")?;
    vfiod(&["bind", &gpu.address])?.exits(0)?;
    gpu.expect_driver("vfio-pci")?;
    equal(
        "allow_unsafe_interrupts",
        parameter("vfio_iommu_type1", "allow_unsafe_interrupts")?.as_str(),
        "Y",
    )?;
    equal("disable_idle_d3", parameter("vfio_pci", "disable_idle_d3")?.as_str(), "Y")?;
    let vmm = Vmm::start(CONTAINER, &gpu.group_node()?, &[&gpu.address])?;
    equal("device id that the VMM stand-in reads", &vmm.seen.first().map(|s| s.device), &Some(A10.device))?;
    vmm.release()?;
    vfiod(&["unbind", &gpu.address])?.exits(0)?;
    gpu.expect_back("nvidia")?;

    // A file that is no module of this kernel: the GPU stays where it is.
    directory.unload()?;
    directory.put("kernel/vfio.ko", b"no module at all")?;
    vfiod(&["bind", &gpu.address])?.exits(1)?.says("made for another kernel")?;
    gpu.expect_back("nvidia")
}
