//! The lab itself, without vfiod: what the other scenarios rest on really happens on this kernel.

use std::thread;
use std::time::{Duration, Instant};

use super::Scenario;
use super::cards::{A10, CONNECTX_DRIVER, FOUR_FUNCTIONS, GPU_AND_NIC, ONE_GPU, TU104, TU104_DRIVERS};
use crate::guest::failure::{Failure, Step, contains, ensure, equal};
use crate::guest::machine::Machine;
use crate::guest::paths::CONTAINER;
use crate::guest::vmm::{Seen, Vmm};

pub(super) const VMM_TAKES_A_GROUP: Scenario = Scenario {
    name: "lab-vmm-takes-a-group",
    about: "the lab: four functions bound by plain writes, and the VMM stand-in reads their ids through VFIO",
    node: FOUR_FUNCTIONS,
    seconds: 120,
    run: vmm_takes_a_group,
};

fn vmm_takes_a_group(machine: &Machine) -> Step {
    let functions: Vec<_> = (0..4).map(|number| machine.function(0, number)).collect();
    let group = functions.first().map(|f| f.group()).transpose()?.flatten();
    for (function, driver) in functions.iter().zip(TU104_DRIVERS) {
        function.expect_back(driver)?;
        equal(&format!("{}'s group", function.address), &function.group()?, &group)?;
        function.raw_bind()?;
        function.expect_driver("vfio-pci")?;
    }
    let node = machine.function(0, 0).group_node()?;
    let addresses: Vec<&str> = functions.iter().map(|f| f.address.as_str()).collect();
    let mut vmm = Vmm::start(CONTAINER, &node, &addresses)?;
    let expected: Vec<Seen> = functions
        .iter()
        .zip(TU104)
        .map(|(f, t)| Seen { address: f.address.clone(), vendor: t.vendor, device: t.device, class: t.class })
        .collect();
    equal("what the VMM stand-in reads", &vmm.seen, &expected)?;
    equal("requests to give the functions up", &vmm.asked()?, &0)?;
    let second = Vmm::start(CONTAINER, &node, &[]).err();
    let said = second.map(|failure| failure.to_string()).unwrap_or_default();
    contains("what a second VMM gets from a held group", &said, "busy")?;
    vmm.release()?;
    for (function, driver) in functions.iter().zip(TU104_DRIVERS) {
        function.raw_unbind()?;
        function.expect_back(driver)?;
    }
    Ok(())
}

pub(super) const HOST_DRIVER_SPOILS_A_GROUP: Scenario = Scenario {
    name: "lab-host-driver-spoils-a-group",
    about: "the lab: a group with a network card on its host driver is not viable",
    node: GPU_AND_NIC,
    seconds: 120,
    run: host_driver_spoils_a_group,
};

fn host_driver_spoils_a_group(machine: &Machine) -> Step {
    let (gpu, nic) = (machine.function(0, 0), machine.function(0, 1));
    nic.expect_back(CONNECTX_DRIVER)?;
    equal("the network card's group", &nic.group()?, &gpu.group()?)?;
    gpu.raw_bind()?;
    gpu.expect_driver("vfio-pci")?;
    let refused = Vmm::start(CONTAINER, &gpu.group_node()?, &[&gpu.address]).err();
    contains(
        "what the VMM stand-in says",
        &refused.map(|f| f.to_string()).unwrap_or_default(),
        "not viable",
    )?;
    // Without a driver the member does no harm.
    nic.write("driver/unbind", &nic.address)?;
    Vmm::start(CONTAINER, &gpu.group_node()?, &[&gpu.address])?.release()
}

pub(super) const KERNEL_ASKS_THE_HOLDER: Scenario = Scenario {
    name: "lab-kernel-asks-the-holder",
    about: "the lab: an unbind of a held function blocks and fires the request eventfd, so a test can see that",
    node: ONE_GPU,
    seconds: 120,
    run: kernel_asks_the_holder,
};

fn kernel_asks_the_holder(machine: &Machine) -> Step {
    const BLOCKED: Duration = Duration::from_secs(1);
    let gpu = machine.function(0, 0);
    gpu.raw_bind()?;
    let mut vmm = Vmm::start(CONTAINER, &gpu.group_node()?, &[&gpu.address])?;
    equal("device id that the VMM stand-in reads", &vmm.seen.first().map(|s| s.device), &Some(A10.device))?;
    thread::scope(|scope| {
        let start = Instant::now();
        let unbind = scope.spawn(|| gpu.raw_unbind());
        thread::sleep(BLOCKED);
        ensure("unbind of a held function", !unbind.is_finished(), "to block", &start.elapsed())?;
        let asked = vmm.asked()?;
        ensure("requests to give the function up", asked > 0, "at least one", &asked)?;
        vmm.release()?;
        unbind.join().unwrap_or_else(|_| {
            Err(Failure::Expected {
                what: "the unbind after the release".into(),
                expected: "to return".into(),
                seen: "a panic".into(),
            })
        })
    })?;
    gpu.expect_back("nvidia")
}
