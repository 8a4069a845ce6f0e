//! Reads a node: what the kernel says, made an [`Inventory`] of. Only reading, and what may block in child processes.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
};

use decide::inventory::{Inventory, Observed, cdev_node, is_moved, roles};
use reason::{Code, Coded, chain};
use vfio::{
    child::Reader,
    console, drm, framebuffer,
    host::{Host, ReadError},
    iommu, mdev,
    modules::Modules,
    pci::{Address, Function, Role},
    vendor,
};

/// The host could not be observed at all.
#[derive(Debug, thiserror::Error)]
#[error("cannot observe the node")]
pub struct ObserveError(#[from] ReadError);

impl Coded for ObserveError {
    fn code(&self) -> Code {
        Code::NotObserved
    }

    fn retryable(&self) -> bool {
        true
    }
}

/// Observes the node below `host` through `reader`. The functions of `busy` are not asked for what may block: a write to
/// them has not come back.
///
/// # Errors
/// When functions, groups, drivers or `/dev` cannot be listed at all. A single unreadable function or process is data.
pub fn observe(
    host: &Host,
    reader: &mut Reader,
    busy: &BTreeSet<Address>,
) -> Result<Inventory, ObserveError> {
    let functions = reader.functions(busy)?;
    let groups = iommu::groups(host, &functions)?;
    let driver_nodes = vendor::nodes(host)?;
    let roles = &roles(&functions.known);
    let of_role = |fits: fn(Role) -> bool| {
        let fits = move |function: &&Function| roles.get(&function.address).copied().is_some_and(fits);
        functions.known.values().filter(fits)
    };
    let mut drm_nodes = BTreeMap::new();
    for function in functions.known.values().filter(|function| function.class.0 >> 16 != 0x06) {
        drm_nodes
            .extend(drm::nodes(host, function.address)?.into_iter().map(|node| (node, function.address)));
    }
    let cdevs: BTreeMap<Address, String> = functions
        .known
        .values()
        .filter_map(|function| Some((function.address, cdev_node(function)?)))
        .collect();
    let nodes: BTreeSet<String> = groups
        .values()
        .filter_map(|group| group.node.clone())
        .chain(cdevs.values().cloned())
        .chain(driver_nodes.keys().cloned())
        .chain(drm_nodes.keys().cloned())
        .collect();
    let holders = reader.holders(nodes);
    let drivers = match host.list(&host.sys("bus/pci/drivers")) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        other => other.unwrap_or_default(),
    };
    let modules = Modules::of(host);
    let vfio = of_role(is_moved).map(|f| (f.address, modules.vfio_driver(&f.modalias))).collect();
    let offered: BTreeSet<Address> = of_role(Role::is_offered).map(|function| function.address).collect();
    // A character device is of use with iommufd alone, and a name in sysfs is no node yet.
    let iommufd = host.exists(&host.dev("iommu"));
    let there = |node: &String| host.exists(&host.root().join(node.trim_start_matches('/')));
    let mut inventory = Inventory::from(Observed {
        vfio,
        unreadable: functions.unreadable.iter().map(|(a, error)| (*a, chain(error))).collect(),
        functions: functions.known,
        groups,
        holders,
        driver_nodes,
        drm_nodes,
        framebuffers: framebuffer::framebuffers(host),
        consoles: console::consoles(host),
        mdevs: mdev::devices(host)?,
        drivers: drivers.into_iter().collect(),
        cdevs: cdevs.into_iter().filter(|(_, node)| iommufd && there(node)).collect(),
        lives: BTreeMap::new(),
    });
    // A guest resets what it has when it likes: what is open, or may be, is not asked.
    let free = |address: &Address| {
        inventory
            .unit_of(*address)
            .is_some_and(|unit| unit.opaque.is_empty() && inventory.open(unit).is_empty())
            && inventory.functions.get(address).is_some_and(|function| !function.busy)
    };
    let asked: BTreeSet<Address> = offered.into_iter().filter(free).collect();
    let lives = reader.lives(&asked);
    inventory.set_lives(lives);
    Ok(inventory)
}
