//! `vfiod agent` on the real kernel: killed, started again, and walked through from wish to VM.

use std::thread;
use std::time::Duration;

use vfiod::standin::PodName;

use super::Scenario;
use super::cards::{A10, A10_RESOURCE, A10_VARIABLE, THREE_CARDS, TU104_DRIVERS};
use crate::guest::agent::vfiod;
use crate::guest::daemon::{Daemon, until};
use crate::guest::failure::{Step, contains, element, equal, text};
use crate::guest::kubelet::Kubelet;
use crate::guest::machine::Machine;
use crate::guest::paths::{CONTAINER, VMM_NAME};
use crate::guest::pci::Pci;
use crate::guest::trace::Trace;
use crate::guest::vmm::Vmm;

/// Every function of [`THREE_CARDS`] with its host driver.
fn functions(machine: &Machine) -> Vec<(Pci, &'static str)> {
    let card = TU104_DRIVERS.iter().zip(0..).map(|(driver, number)| (machine.function(1, number), *driver));
    let gpus = [(machine.function(0, 0), "nvidia"), (machine.function(2, 0), "nvidia")];
    gpus.into_iter().chain(card).collect()
}

fn expect_on_vfio(functions: &[(Pci, &str)]) -> Step {
    functions.iter().try_for_each(|(function, _)| function.expect_driver("vfio-pci"))
}

fn expect_all_back(functions: &[(Pci, &str)]) -> Step {
    functions.iter().try_for_each(|(function, driver)| function.expect_back(driver))
}

pub(super) const AGENT_KILLED: Scenario = Scenario {
    name: "agent-killed",
    about: "killed between writes on the way there and back, a new agent converges and knows every host driver",
    node: THREE_CARDS,
    seconds: 600,
    run: agent_killed,
};

fn agent_killed(machine: &Machine) -> Step {
    // Each of the six functions has its override set or cleared, its driver unbound and another bound: 18 changes to
    // see at most. Killing after every second one hits every kind.
    const KILLS: [usize; 9] = [0, 1, 3, 5, 7, 9, 11, 13, 16];
    let functions = functions(machine);
    let _kubelet = Kubelet::start()?;
    for changes in KILLS {
        println!("--- killed after {changes} changes");
        kill_after(changes, "vm-passthrough")?;
        let mut agent = Daemon::start("vm-passthrough")?;
        agent.wait_for("Ready")?;
        expect_on_vfio(&functions)?;
        agent.kill()?;

        kill_after(changes, "container")?;
        let mut agent = Daemon::start("container")?;
        agent.wait_for("Ready")?;
        expect_all_back(&functions)?;
        agent.kill()?;
    }
    // And by hand, from wherever a kill left it.
    kill_after(8, "vm-passthrough")?;
    vfiod(&["unbind", "--all"])?.exits(0)?;
    expect_all_back(&functions)
}

/// Starts an agent and kills it when so many drivers and overrides were seen to change.
fn kill_after(changes: usize, workload_type: &str) -> Step {
    let mut last = Trace::functions()?;
    let mut seen = 0;
    let agent = Daemon::start(workload_type)?;
    until(&format!("{changes} changes of drivers and overrides"), || {
        // Faster than `until` looks by itself: a write takes less than its pause.
        for _ in 0..200 {
            if seen >= changes {
                return Ok(Some(()));
            }
            let now = Trace::functions()?;
            seen += last.iter().zip(&now).map(|(a, b)| a.differs(b)).sum::<usize>();
            last = now;
        }
        Ok(None)
    })?;
    agent.kill()
}

pub(super) const RIGHT_NODE: Scenario = Scenario {
    name: "right-node",
    about: "an agent that starts on a node that is already right writes nothing to the kernel",
    node: THREE_CARDS,
    seconds: 300,
    run: right_node,
};

fn right_node(machine: &Machine) -> Step {
    // Long enough for a pass more than the first.
    const WATCHED: Duration = Duration::from_secs(3);
    let functions = functions(machine);
    let _kubelet = Kubelet::start()?;
    for workload_type in ["container", "vm-passthrough", "container"] {
        let mut agent = Daemon::start(workload_type)?;
        agent.wait_for("Ready")?;
        agent.terminate()?;
        let before = Trace::take()?;
        let mut agent = Daemon::start(workload_type)?;
        agent.wait_for("Ready")?;
        thread::sleep(WATCHED);
        before.unchanged()?;
        agent.terminate()?;
        before.unchanged()?;
        if workload_type == "container" { expect_all_back(&functions)? } else { expect_on_vfio(&functions)? }
    }
    Ok(())
}

pub(super) const BLOCKED_UNBIND: Scenario = Scenario {
    name: "blocked-unbind",
    about: "another program's unbind hangs with a function's lock: its group is busy, all others are served on",
    node: THREE_CARDS,
    seconds: 240,
    run: blocked_unbind,
};

fn blocked_unbind(machine: &Machine) -> Step {
    let (gpu, other) = (machine.function(0, 0), machine.function(2, 0));
    let kubelet = Kubelet::start()?;
    let mut agent = Daemon::start("vm-passthrough")?;
    kubelet.wait_for("two healthy A10", |state| state.healthy(A10_RESOURCE) == 2)?;
    let vmm = Vmm::start(CONTAINER, &gpu.group_node()?, &[&gpu.address])?;
    thread::scope(|scope| {
        let unbind = scope.spawn(|| gpu.raw_unbind());
        // What reads the override now waits for the unbind's lock.
        until("the function busy", || {
            let shown = vfiod(&["inspect", "-o", "json"])?.exits(0)?.json()?;
            let busy =
                element(&shown, "functions", "address", &gpu.address)?.get("busy") == Some(&true.into());
            Ok(busy.then_some(()))
        })?;
        let pod = PodName::new("default", "virt-launcher-a10");
        // The first answer may be the refusal that makes the agent look; then the busy one is unhealthy.
        let given = until("the other A10 given out", || Ok(kubelet.allocate_one(&pod, A10_RESOURCE).ok()))?;
        equal("the A10 that was given out", &given.ids, &vec![other.address.clone()])?;
        let status = until("the agent's status", || agent.status())?;
        contains("the agent's status", &text(&status), "Busy")?;
        agent.terminate()?;
        vmm.release()?;
        unbind.join().unwrap_or_else(|_| equal("the unbind after the release", "a panic", "its return"))
    })?;
    gpu.expect_back("nvidia")?;
    other.expect_driver("vfio-pci")
}

pub(super) const FULL_WALK: Scenario = Scenario {
    name: "full-walk",
    about: "from wish to VM and back: bound, offered, allocated, used by a VMM, refused while held, given back",
    node: THREE_CARDS,
    seconds: 300,
    run: full_walk,
};

fn full_walk(machine: &Machine) -> Step {
    let functions = functions(machine);
    let kubelet = Kubelet::start()?;
    let mut agent = Daemon::start("vm-passthrough")?;
    kubelet.wait_for("two healthy A10", |state| state.healthy(A10_RESOURCE) == 2)?;
    agent.wait_for("Ready")?;
    expect_on_vfio(&functions)?;

    let pod = PodName::new("default", "virt-launcher-a10");
    let answer = kubelet.allocate_one(&pod, A10_RESOURCE)?;
    let addresses = answer.env.get(A10_VARIABLE).map(String::as_str).unwrap_or_default();
    equal("the addresses in the answer's environment", addresses, &answer.ids.join(","))?;
    let gpu = Pci::at(addresses);
    let group = gpu.group_node()?;
    let nodes: Vec<&str> = answer.nodes.iter().map(|(host, ..)| host.as_str()).collect();
    equal("whether the answer has the group's node", &nodes.contains(&group.as_str()), &true)?;
    equal("whether the answer has the container's node", &nodes.contains(&CONTAINER), &true)?;
    let mut vmm = Vmm::start(CONTAINER, &group, &[&gpu.address])?;
    equal("device id that the VMM stand-in reads", &vmm.seen.first().map(|s| s.device), &Some(A10.device))?;

    vfiod(&["unbind", &gpu.address])?.exits(1)?.says("agent")?;
    agent.terminate()?;

    let mut agent = Daemon::start("container")?;
    let status = agent.wait_for("Blocked")?;
    contains("the agent's status", &status.to_string(), &vmm.pid().to_string())?;
    contains("the agent's status", &status.to_string(), VMM_NAME)?;
    gpu.expect_driver("vfio-pci")?;
    // One held group stops no other.
    let others: Vec<_> = functions.iter().filter(|(f, _)| *f != gpu).cloned().collect();
    expect_all_back(&others)?;
    equal("requests to give the GPU up", &vmm.asked()?, &0)?;

    vmm.release()?;
    kubelet.pod_gone(&pod);
    agent.wait_for("Ready")?;
    expect_all_back(&functions)?;
    agent.terminate()
}
