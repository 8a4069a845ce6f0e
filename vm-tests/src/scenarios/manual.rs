//! `vfiod bind` and `unbind` by hand, without an agent.

use super::Scenario;
use super::cards::{
    A10, CONNECTX_DRIVER, FOUR_FUNCTIONS, GPU_AND_NIC, ONE_GPU as GPU_NODE, TU104_DRIVERS, WITHOUT_IOMMU,
};
use crate::guest::agent::vfiod;
use crate::guest::failure::{Step, contains, element, equal, text};
use crate::guest::machine::Machine;
use crate::guest::paths::{CONTAINER, VMM_NAME};
use crate::guest::pci::Pci;
use crate::guest::trace::Trace;
use crate::guest::vmm::Vmm;

pub(super) const ONE_GPU: Scenario = Scenario {
    name: "one-gpu",
    about: "bind moves a GPU to vfio-pci, a VMM can use it, unbind gives it back to its host driver",
    node: GPU_NODE,
    seconds: 180,
    run: one_gpu,
};

fn one_gpu(machine: &Machine) -> Step {
    let gpu = machine.function(0, 0);
    gpu.expect_back("nvidia")?;
    expect_inspected(&gpu)?;

    vfiod(&["bind", &gpu.address])?.exits(0)?;
    gpu.expect_driver("vfio-pci")?;
    expect_inspected(&gpu)?;
    let mut vmm = Vmm::start(CONTAINER, &gpu.group_node()?, &[&gpu.address])?;
    equal("device id that the VMM stand-in reads", &vmm.seen.first().map(|s| s.device), &Some(A10.device))?;
    equal("requests to give the GPU up", &vmm.asked()?, &0)?;
    vmm.release()?;

    let before = Trace::take()?;
    vfiod(&["bind", &gpu.address])?.exits(0)?;
    before.unchanged()?;

    vfiod(&["unbind", &gpu.address])?.exits(0)?;
    gpu.expect_back("nvidia")?;
    let before = Trace::take()?;
    vfiod(&["unbind", "--all"])?.exits(0)?;
    before.unchanged()
}

/// `inspect` shows what sysfs shows, and writes nothing.
fn expect_inspected(function: &Pci) -> Step {
    let before = Trace::take()?;
    let shown = vfiod(&["inspect", "-o", "json"])?.exits(0)?.json()?;
    before.unchanged()?;
    let entry = element(&shown, "functions", "address", &function.address)?;
    let field = |name: &str| entry.get(name).filter(|v| !v.is_null()).map(text);
    let at = |name: &str| format!("{name} of {} in `inspect`", function.address);
    equal(&at("driver"), &field("driver"), &function.driver()?)?;
    equal(&at("iommu_group"), &field("iommu_group"), &function.group()?)?;
    if let Some(group) = function.group()? {
        let group = element(&shown, "groups", "id", &group)?;
        contains(&at("groups[].members"), &group.to_string(), &function.address)?;
    }
    Ok(())
}

pub(super) const FOUR_FUNCTION_CARD: Scenario = Scenario {
    name: "four-function-card",
    about: "all four functions of a card move together, and each comes back to exactly its own host driver",
    node: FOUR_FUNCTIONS,
    seconds: 180,
    run: four_function_card,
};

fn four_function_card(machine: &Machine) -> Step {
    let functions: Vec<Pci> = (0..4).map(|number| machine.function(0, number)).collect();
    for (function, driver) in functions.iter().zip(TU104_DRIVERS) {
        function.expect_back(driver)?;
    }
    // Any member's address stands for the group.
    vfiod(&["bind", &machine.function(0, 0).address])?.exits(0)?;
    for function in &functions {
        function.expect_driver("vfio-pci")?;
    }
    let addresses: Vec<&str> = functions.iter().map(|f| f.address.as_str()).collect();
    let vmm = Vmm::start(CONTAINER, &machine.function(0, 0).group_node()?, &addresses)?;
    equal("functions that the VMM stand-in holds", &vmm.seen.len(), &4)?;
    vmm.release()?;
    vfiod(&["unbind", "--all"])?.exits(0)?;
    for (function, driver) in functions.iter().zip(TU104_DRIVERS) {
        function.expect_back(driver)?;
    }
    Ok(())
}

pub(super) const FOREIGN_NIC: Scenario = Scenario {
    name: "foreign-nic",
    about: "a GPU that shares its group with a foreign network card is refused, and nothing is written",
    node: GPU_AND_NIC,
    seconds: 180,
    run: foreign_nic,
};

fn foreign_nic(machine: &Machine) -> Step {
    let (gpu, nic) = (machine.function(0, 0), machine.function(0, 1));
    nic.expect_back(CONNECTX_DRIVER)?;
    let before = Trace::take()?;
    vfiod(&["bind", &gpu.address])?.exits(1)?.says(&nic.address)?;
    before.unchanged()?;
    vfiod(&["bind", "--all"])?.exits(1)?.says(&nic.address)?;
    before.unchanged()
}

pub(super) const HELD_GROUP: Scenario = Scenario {
    name: "held-group",
    about: "a group that a VM holds is not unbound: the holder is named, and the kernel never asks it",
    node: GPU_NODE,
    seconds: 180,
    run: held_group,
};

fn held_group(machine: &Machine) -> Step {
    let gpu = machine.function(0, 0);
    vfiod(&["bind", "--all"])?.exits(0)?;
    let mut vmm = Vmm::start(CONTAINER, &gpu.group_node()?, &[&gpu.address])?;
    let before = Trace::take()?;
    let pid = vmm.pid().to_string();
    vfiod(&["unbind", &gpu.address])?.exits(1)?.says(&pid)?.says(VMM_NAME)?;
    vfiod(&["unbind", "--all"])?.exits(1)?.says(&pid)?.says(VMM_NAME)?;
    before.unchanged()?;
    equal("requests to give the GPU up", &vmm.asked()?, &0)?;
    vmm.release()?;
    vfiod(&["unbind", &gpu.address])?.exits(0)?;
    gpu.expect_back("nvidia")
}

pub(super) const NO_IOMMU: Scenario = Scenario {
    name: "no-iommu",
    about: "without an IOMMU vfiod says so, refuses, and writes nothing",
    node: WITHOUT_IOMMU,
    seconds: 180,
    run: no_iommu,
};

fn no_iommu(machine: &Machine) -> Step {
    let gpu = machine.function(0, 0);
    gpu.expect_back("nvidia")?;
    let before = Trace::take()?;
    expect_inspected(&gpu)?;
    vfiod(&["plan", "--workload-type", "vm-passthrough"])?.says("IOMMU")?;
    vfiod(&["bind", &gpu.address])?.exits(1)?.says("IOMMU")?;
    vfiod(&["bind", "--all"])?.exits(1)?.says("IOMMU")?;
    before.unchanged()
}
