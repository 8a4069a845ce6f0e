//! Simulated processes with devices open: entries below the tree's `proc`.

use std::{io, os::unix::fs::symlink, path::Path};

use reason::{Code, Coded};

use super::{
    Simulation, node,
    tree::{self, Tree},
};
use crate::{
    driver::is_vfio,
    host::Host,
    iommu,
    pci::{self, Function},
};

/// What the kernel shows as the target of an open VFIO device's descriptor.
const VFIO_DEVICE: &str = "anon_inode:[vfio-device]";

/// Why a simulated process could not open a group as a VMM does.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// There is no group node.
    #[error("/dev/vfio/{0} is not there")]
    NoNode(u32),
    /// Another process has it open: the kernel lets only one in (EBUSY).
    #[error("/dev/vfio/{0} is open in another process")]
    Busy(u32),
    /// A member is on a driver that owns its DMA (EPERM).
    #[error("group {0} is not viable")]
    NotViable(u32),
    /// The tree.
    #[error("the simulated node cannot be changed")]
    Tree(#[from] io::Error),
}

impl Coded for OpenError {
    fn code(&self) -> Code {
        match self {
            Self::NoNode(_) => Code::NoGroupNode,
            Self::Busy(_) => Code::InUse,
            Self::NotViable(_) => Code::NotViable,
            Self::Tree(_) => Code::NoSimulation,
        }
    }

    /// Others may close the group, or bind its members; a tree that cannot be changed stays so.
    fn retryable(&self) -> bool {
        match self {
            Self::NoNode(_) | Self::Busy(_) | Self::NotViable(_) => true,
            Self::Tree(_) => false,
        }
    }
}

impl Simulation {
    /// A process that opens `nodes` (paths on the host) and does nothing else.
    ///
    /// # Errors
    /// When the tree cannot be written.
    pub fn start_process(&self, pid: u32, command: &str, nodes: &[&str]) -> io::Result<()> {
        lay_process(self.host(), pid, command, nodes)
    }

    /// A process that opens a group and all its devices, as a VMM does.
    ///
    /// # Errors
    /// As the kernel refuses it.
    pub fn start_vmm(&self, pid: u32, command: &str, group: u32) -> Result<(), OpenError> {
        let _lock = self.tree.lock()?;
        let functions = pci::functions(self.host()).map_err(io::Error::other)?;
        let groups = iommu::groups(self.host(), &functions).map_err(io::Error::other)?;
        let found = groups.get(&group).ok_or(OpenError::NoNode(group))?;
        let node = found.node.clone().ok_or(OpenError::NoNode(group))?;
        if group_open(&self.tree, group)? {
            return Err(OpenError::Busy(group));
        }
        let members = found.members.iter().filter_map(|address| functions.known.get(address));
        if !iommu::blockers(members, |_| false).is_empty() {
            return Err(OpenError::NotViable(group));
        }
        lay_process(self.host(), pid, command, &["/dev/vfio/vfio", &node])?;
        symlink(VFIO_DEVICE, self.host().proc(&format!("{pid}/fd/32")))?;
        Ok(())
    }

    /// Ends a process: all it had open is closed.
    ///
    /// # Errors
    /// When the tree cannot be written.
    pub fn end_process(&self, pid: u32) -> io::Result<()> {
        tree::remove_dir(&self.host().proc(&pid.to_string()))
    }
}

fn lay_process(host: &Host, pid: u32, command: &str, nodes: &[&str]) -> io::Result<()> {
    let dir = host.proc(&pid.to_string());
    tree::put(&dir.join("comm"), &format!("{command}\n"))?;
    tree::put(&dir.join("cmdline"), &format!("{command}\0"))?;
    for (fd, node) in (10..).zip(nodes) {
        let link = dir.join(format!("fd/{fd}"));
        tree::make_parent(&link)?;
        symlink(Path::new("../../..").join(node.trim_start_matches('/')), link)?;
    }
    Ok(())
}

/// The descriptors of every process, as `(pid, target of its link)`.
fn descriptors(tree: &Tree) -> io::Result<Vec<(u32, String)>> {
    let host = tree.host();
    let mut all = Vec::new();
    for pid in
        host.list(&host.proc("")).map_err(io::Error::other)?.iter().filter_map(|n| n.parse::<u32>().ok())
    {
        let dir = host.proc(&format!("{pid}/fd"));
        for fd in host.list(&dir).unwrap_or_default() {
            if let Ok(target) = std::fs::read_link(dir.join(fd)) {
                all.push((pid, target.to_string_lossy().into_owned()));
            }
        }
    }
    Ok(all)
}

fn has_open(descriptors: &[(u32, String)], node: &str) -> Vec<u32> {
    descriptors.iter().filter(|(_, target)| target.ends_with(node)).map(|(pid, _)| *pid).collect()
}

/// Whether some process has the group's node open.
pub(super) fn group_open(tree: &Tree, group: u32) -> io::Result<bool> {
    Ok(!has_open(&descriptors(tree)?, &iommu::group_node(group)).is_empty())
}

/// Whether unbinding `function` from `driver` would wait for somebody to let go of it.
pub(super) fn blocks_unbind(tree: &Tree, function: &Function, driver: &str) -> io::Result<bool> {
    let all = descriptors(tree)?;
    if is_vfio(driver) {
        let Some(group) = function.iommu_group else { return Ok(false) };
        let holders = has_open(&all, &iommu::group_node(group));
        return Ok(all.iter().any(|(pid, target)| holders.contains(pid) && target == VFIO_DEVICE));
    }
    Ok(node::awaited(tree, function, driver).iter().any(|node| !has_open(&all, node).is_empty()))
}

pub(super) fn end_all(tree: &Tree) -> io::Result<()> {
    let host = tree.host();
    for name in host.list(&host.proc("")).map_err(io::Error::other)? {
        if name.parse::<u32>().is_ok() {
            tree::remove_dir(&host.proc(&name))?;
        }
    }
    Ok(())
}
