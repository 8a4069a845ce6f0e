//! The nodes below `/dev` that a simulated host driver makes for its functions.

use std::io;

use super::{
    drivers::{self, Nodes},
    tree::{self, Tree},
};
use crate::{
    drm,
    pci::{self, Function, Role},
    vendor::{self, Holds, Scope},
};

/// Compute's one node for all of amdgpu's functions.
const KFD: &str = "dev/kfd";
/// The first render node's number: minors are given out in blocks of 64 a kind (`drm_minor_alloc`, drivers/gpu/drm/drm_drv.c).
const FIRST_RENDER: u32 = 128;

/// Makes the nodes of a function that was bound to `driver`.
pub(super) fn make(tree: &Tree, function: &Function, driver: &str) -> io::Result<()> {
    // A VF on the host's vGPU driver is no GPU of the host's: it has no node of that driver.
    let Some(nodes) = drivers::nodes(driver).filter(|_| function.physfn.is_none()) else { return Ok(()) };
    let (address, host) = (function.address, tree.host());
    let dir = host.function_dir(address);
    match nodes {
        Nodes::Numbered(prefix) => {
            let minor = free_number(|n| host.dev(&format!("{prefix}{n}")).exists());
            tree::put(&host.dev(&format!("{prefix}{minor}")), "")?;
            if driver == "nvidia" {
                tree::put(
                    &host.proc(&format!("driver/nvidia/gpus/{address}/information")),
                    &format!("Model: \t\t Simulated\nBus Location: \t {address}\nDevice Minor: \t {minor}\n"),
                )
            } else {
                // The NVSwitch driver has no such file; the simulation notes whose node it is for itself.
                tree::put(&dir.join("sim_node"), &format!("{prefix}{minor}"))
            }
        }
        Nodes::Drm => {
            let card = free_number(|n| host.dev(&format!("dri/card{n}")).exists());
            for name in [format!("card{card}"), format!("renderD{}", FIRST_RENDER + card)] {
                tree::put(&host.dev(&format!("dri/{name}")), "")?;
                tree::put(&dir.join("drm").join(name).join("dev"), "")?;
            }
            tree::put(&host.root().join(KFD), "")
        }
    }
}

/// Removes the nodes of a function that was unbound from `driver`.
pub(super) fn remove(tree: &Tree, function: &Function, driver: &str) -> io::Result<()> {
    let host = tree.host();
    for node in own(tree, function, driver) {
        tree::remove(&host.root().join(node.trim_start_matches('/')))?;
    }
    let dir = host.function_dir(function.address);
    match drivers::nodes(driver) {
        Some(Nodes::Numbered(_)) => {
            tree::remove_dir(&host.proc(&format!("driver/nvidia/gpus/{}", function.address)))?;
            tree::remove(&dir.join("sim_node"))
        }
        Some(Nodes::Drm) => {
            tree::remove_dir(&dir.join("drm"))?;
            let all =
                pci::functions_by(host, |address| pci::read_busy(host, address)).map_err(io::Error::other)?;
            let another = all.known.values().any(|other| other.driver.as_deref() == Some(driver));
            if another { Ok(()) } else { tree::remove(&host.root().join(KFD)) }
        }
        None => Ok(()),
    }
}

/// The nodes that `driver` made for this function alone.
fn own(tree: &Tree, function: &Function, driver: &str) -> Vec<String> {
    let host = tree.host();
    match drivers::nodes(driver) {
        None => Vec::new(),
        Some(Nodes::Drm) => drm::nodes(host, function.address).unwrap_or_default(),
        Some(Nodes::Numbered(_)) => {
            if let Ok(name) = host.read(&host.function_dir(function.address).join("sim_node")) {
                return vec![format!("/dev/{name}")];
            }
            let nodes = vendor::nodes(host).unwrap_or_default().into_iter();
            nodes
                .filter(|(_, scope)| *scope == Scope::Function(function.address))
                .map(|(node, _)| node)
                .collect()
        }
    }
}

/// The nodes for whose close an unbind of this function from `driver` waits: its own, and those whose holders have every
/// function of the driver.
pub(super) fn awaited(tree: &Tree, function: &Function, driver: &str) -> Vec<String> {
    let mut nodes = own(tree, function, driver);
    let Some(vendor) = vendor::of(function.vendor) else { return nodes };
    let of_every_function = |scope: Scope| {
        matches!(scope, Scope::Common { vendor: id, role, holds: Holds::EveryFunction }
            if id == vendor.id && role_of(vendor, function) == Some(role) && vendor.host_drivers(role).contains(&driver))
    };
    let common = vendor::nodes(tree.host()).unwrap_or_default().into_iter();
    nodes.extend(common.filter(|(_, scope)| of_every_function(*scope)).map(|(node, _)| node));
    nodes
}

fn role_of(vendor: &vendor::Vendor, function: &Function) -> Option<Role> {
    vendor.role(function.device, function.class)
}

/// The lowest number that is not taken.
pub(super) fn free_number(taken: impl Fn(u32) -> bool) -> u32 {
    (0..).find(|number| !taken(*number)).unwrap_or_default()
}
