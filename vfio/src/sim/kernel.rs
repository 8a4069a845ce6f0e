//! How the simulated kernel answers writes.
//!
//! Each rule is what Linux was seen to do, or what its source says:
//! * `drivers_probe`: ENODEV for an unknown address, EINVAL when a driver matched and failed, success when none matched
//!   (drivers/base/bus.c, `drivers_probe_store`);
//! * `unbind`: ENODEV when the function is not on that driver (`unbind_store`);
//! * unbinding from vfio-pci blocks while the device is open, from a GPU's host driver while one of its nodes is;
//! * a module is loaded once (EEXIST), after those it needs (ENOENT), and its driver is tried on every driverless function;
//! * a DMA-owning driver cannot bind while the group is open for a user (`iommu_device_use_default_domain`).

use std::{io, thread, time::Duration};

use nix::{
    errno::Errno,
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::{
    Effect, Moment, drivers, modules, node, process,
    tree::{self, Tree},
};
use crate::{
    driver::{DmaOwner, dma_owner},
    host::Host,
    pci::{self, Address, Function, Functions},
    write::Write,
};

/// How often a blocked write looks again.
const BLOCKED_POLL: Duration = Duration::from_millis(5);

/// What one look at a write came to.
enum Step {
    Done,
    Blocked,
}

/// Answers `write` on the simulated `host`; blocks where Linux would. `agent` is whom a fault kills.
///
/// # Errors
/// With the errno that Linux answers. A tree that cannot be changed answers EIO.
pub fn answer(host: &Host, write: &Write, agent: Pid) -> Result<(), Errno> {
    let tree = Tree::new(host.clone());
    let number = {
        let _lock = tree.lock().map_err(io_errno)?;
        tree.count(write).map_err(io_errno)?
    };
    play(&tree, number, write, Moment::Before, agent)?;
    loop {
        let step = {
            let _lock = tree.lock().map_err(io_errno)?;
            act(&tree, write)?
        };
        match step {
            Step::Done => break,
            Step::Blocked => thread::sleep(BLOCKED_POLL),
        }
    }
    play(&tree, number, write, Moment::After, agent)
}

fn io_errno(error: impl Into<io::Error>) -> Errno {
    Errno::from_raw(error.into().raw_os_error().unwrap_or(Errno::EIO as i32))
}

fn play(tree: &Tree, number: usize, write: &Write, moment: Moment, agent: Pid) -> Result<(), Errno> {
    loop {
        let faults = tree.faults().map_err(io_errno)?;
        let Some(fault) = faults.iter().find(|fault| fault.strikes(number, write, moment)) else {
            return Ok(());
        };
        match fault.effect {
            Effect::Errno(errno) => return Err(Errno::from_raw(errno)),
            Effect::Hang => thread::sleep(BLOCKED_POLL),
            Effect::KillAgent => {
                kill_agent(agent);
                return Ok(());
            }
            Effect::KillChild => kill_self(),
            Effect::KillBoth => {
                kill_agent(agent);
                kill_self();
            }
        }
    }
}

/// Kills the agent, as long as it is one: a writer whose agent has died already is another process's child.
fn kill_agent(agent: Pid) {
    let exe = |pid: &str| std::fs::read_link(format!("/proc/{pid}/exe")).ok();
    if exe(&agent.to_string()).is_some_and(|theirs| Some(theirs) == exe("self")) {
        let _ = kill(agent, Signal::SIGKILL);
    }
}

fn kill_self() {
    let _ = kill(Pid::this(), Signal::SIGKILL);
}

fn act(tree: &Tree, write: &Write) -> Result<Step, Errno> {
    let function = |address| tree.function(address).map_err(io_errno)?.ok_or(Errno::ENODEV);
    match write {
        Write::Override { address, driver } => {
            function(*address)?;
            let value = driver.as_deref().unwrap_or("(null)");
            tree.set_attribute(*address, "driver_override", value).map_err(io_errno)?;
            Ok(Step::Done)
        }
        Write::Unbind { address, driver } => {
            let function = function(*address)?;
            if function.driver.as_ref() != Some(driver) {
                return Err(Errno::ENODEV);
            }
            if process::blocks_unbind(tree, &function, driver).map_err(io_errno)? {
                return Ok(Step::Blocked);
            }
            unbind(tree, &function, driver).map_err(io_errno)?;
            Ok(Step::Done)
        }
        Write::Probe { address } => {
            let function = function(*address)?;
            if function.driver.is_some() {
                return Ok(Step::Done);
            }
            match drivers::pick(&function, |name| tree.loaded(name)) {
                None => {}
                Some(driver) => probe(tree, &function, &driver)?,
            }
            Ok(Step::Done)
        }
        Write::LoadModule(load) => {
            if let Some(driver) = modules::load(tree, &load.module, &load.options)? {
                attach(tree, &driver)?;
            }
            Ok(Step::Done)
        }
    }
}

/// What a new driver does first: it is tried on every driverless function (`driver_attach`, drivers/base/dd.c). One that it
/// does not take stays as it is.
fn attach(tree: &Tree, driver: &str) -> Result<(), Errno> {
    let functions = pci::functions(tree.host()).map_err(|_| Errno::EIO)?;
    for function in functions.known.values().filter(|function| function.driver.is_none()) {
        if drivers::pick(function, |name| name == driver).is_some() {
            let _ = probe(tree, function, driver);
        }
    }
    Ok(())
}

fn probe(tree: &Tree, function: &Function, driver: &str) -> Result<(), Errno> {
    let refused = match (dma_owner(Some(driver)), function.iommu_group) {
        (DmaOwner::Vfio, None) => true,
        (DmaOwner::Host, Some(group)) => process::group_open(tree, group).map_err(io_errno)?,
        _ => false,
    };
    if refused {
        return Err(Errno::EINVAL);
    }
    bind(tree, function, driver).map_err(io_errno)
}

/// The files that come with a driver.
fn bind(tree: &Tree, function: &Function, driver: &str) -> io::Result<()> {
    let address = function.address;
    let host = tree.host();
    tree.link_driver(address, driver)?;
    if let (true, Some(group)) = (drivers::has_group_node(driver), function.iommu_group) {
        tree::put(&host.dev("vfio").join(group.to_string()), "")?;
        let taken = taken_vfio_devs(tree)?;
        let number = node::free_number(|n| taken.contains(&format!("vfio{n}")));
        tree::put(&host.function_dir(address).join(format!("vfio-dev/vfio{number}/dev")), "")?;
    }
    node::make(tree, function, driver)?;
    tree.uevent()
}

fn unbind(tree: &Tree, function: &Function, driver: &str) -> io::Result<()> {
    let address = function.address;
    let host = tree.host();
    tree.unlink_driver(address, driver)?;
    if let (true, Some(group)) = (drivers::has_group_node(driver), function.iommu_group) {
        tree::remove_dir(&host.function_dir(address).join("vfio-dev"))?;
        let mates = without_overrides(host)?;
        let another = mates.known.values().any(|mate| {
            mate.iommu_group == Some(group) && mate.driver.as_deref().is_some_and(drivers::has_group_node)
        });
        if !another {
            tree::remove(&host.dev("vfio").join(group.to_string()))?;
        }
    }
    node::remove(tree, function, driver)?;
    tree.uevent()
}

fn taken_vfio_devs(tree: &Tree) -> io::Result<Vec<String>> {
    let functions = without_overrides(tree.host())?;
    Ok(functions.known.into_values().filter_map(|function| function.vfio_dev).collect())
}

/// All functions, read without what their own locks guard: one function's lock is no other's business.
fn without_overrides(host: &Host) -> io::Result<Functions> {
    pci::functions_by(host, |address| pci::read_busy(host, address)).map_err(io::Error::other)
}

/// Sets driver and override outright.
pub(super) fn put(
    tree: &Tree,
    address: Address,
    driver: Option<&str>,
    driver_override: Option<&str>,
) -> io::Result<()> {
    let _lock = tree.lock()?;
    let function = tree.function(address)?.ok_or(io::ErrorKind::NotFound)?;
    if let Some(old) = &function.driver {
        unbind(tree, &function, old)?;
    }
    tree.set_attribute(address, "driver_override", driver_override.unwrap_or("(null)"))?;
    driver.map_or(Ok(()), |driver| bind(tree, &function, driver))
}

pub(super) fn reboot(tree: &Tree) -> io::Result<()> {
    process::end_all(tree)?;
    let path = tree.host().proc("sys/kernel/random/boot_id");
    let before = tree.host().boot_id();
    tree::put(&path, &format!("{before}'\n"))?;
    let functions = pci::functions(tree.host()).map_err(io::Error::other)?;
    for function in functions.known.values() {
        put(tree, function.address, None, None)?;
    }
    modules::forget_loaded(tree.host())?;
    for function in functions.known.values() {
        let fresh = Function { driver_override: None, ..function.clone() };
        let driver = drivers::pick(&fresh, |name| tree.loaded(name));
        put(tree, function.address, driver.as_deref(), None)?;
    }
    Ok(())
}
