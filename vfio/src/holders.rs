//! Who has a device open: by device number, through `/proc/PID/fd`.
//!
//! By number, because a VM's process opens the node in a mount namespace of its own, under whatever path. Needs the
//! host's process namespace, and the right to look into every process (CAP_SYS_PTRACE); where a live process cannot be
//! looked into, the answer says so, and a caller must take the device for in use.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::host::{Host, Kernel, NodeId, ReadError};

/// A process with a device node open.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Holder {
    /// Its process id, in the host's namespace.
    pub pid: u32,
    /// Its command (`/proc/PID/comm`, at most 15 characters).
    pub command: String,
}

/// A live process that could not be looked into.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Opaque {
    /// Its process id.
    pub pid: u32,
    /// Why not.
    pub reason: String,
}

/// What a scan of all processes found.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Holders {
    /// For each node (its path on the host, such as `/dev/vfio/12`) that somebody has open: who.
    pub by_node: BTreeMap<String, BTreeSet<Holder>>,
    /// Processes that may hold anything.
    pub opaque: BTreeSet<Opaque>,
}

impl Holders {
    /// Who has `node` open.
    pub fn of(&self, node: &str) -> impl Iterator<Item = &Holder> {
        self.by_node.get(node).into_iter().flatten()
    }
}

/// How the kernel names the process namespace that it starts with (`PROC_PID_INIT_INO`, include/linux/proc_ns.h).
const HOST_PID_NAMESPACE: &str = "pid:[4026531836]";

/// Looks through all processes for open file descriptions of `nodes` (paths on the host, such as `/dev/vfio/12`).
///
/// # Errors
/// When a node, or the process list itself, cannot be looked at.
pub fn scan(host: &Host, nodes: impl IntoIterator<Item = String>) -> Result<Holders, ReadError> {
    let mut ids: BTreeMap<NodeId, String> = BTreeMap::new();
    for node in nodes {
        if let Some(id) = host.node_id(&host.root().join(node.trim_start_matches('/')))? {
            ids.insert(id, node);
        }
    }
    let mut found = Holders::default();
    if ids.is_empty() {
        return Ok(found);
    }
    if host.kernel() == Kernel::Real {
        found.opaque.extend(hidden_processes(host));
    }
    for pid in host.list(&host.proc(""))?.iter().filter_map(|name| name.parse::<u32>().ok()) {
        match open_nodes(host, pid, &ids) {
            Ok(open) if open.is_empty() => {}
            Ok(open) => {
                let holder = Holder { pid, command: command(host, pid) };
                for node in open {
                    found.by_node.entry(node).or_default().insert(holder.clone());
                }
            }
            // A process that ended during the look holds nothing any more.
            Err(_) if !host.proc(&pid.to_string()).exists() => {}
            Err(error) => {
                found.opaque.insert(Opaque { pid, reason: error.to_string() });
            }
        }
    }
    Ok(found)
}

/// Says whether the process list is a part of the host's only: that of a container with a process namespace of its own,
/// where a VM's process cannot be seen.
fn hidden_processes(host: &Host) -> Option<Opaque> {
    let seen = match std::fs::read_link(host.proc("1/ns/pid")) {
        Ok(target) if target.as_os_str() == HOST_PID_NAMESPACE => return None,
        Ok(target) => target.display().to_string(),
        Err(error) => error.to_string(),
    };
    let reason = format!(
        "it is not the host's first process ({seen}), so the host's other processes cannot be seen; give the agent's pod \
         hostPID: true"
    );
    Some(Opaque { pid: 1, reason })
}

fn open_nodes(host: &Host, pid: u32, ids: &BTreeMap<NodeId, String>) -> Result<BTreeSet<String>, ReadError> {
    let dir = host.proc(&format!("{pid}/fd"));
    let mut open = BTreeSet::new();
    for fd in host.list(&dir)? {
        // A descriptor that was closed during the look answers ENOENT, which is "no node" here.
        if let Some(node) = host.node_id(&dir.join(fd))?.and_then(|id| ids.get(&id)) {
            open.insert(node.clone());
        }
    }
    Ok(open)
}

fn command(host: &Host, pid: u32) -> String {
    // Control characters of a hostile name would reach terminals and logs.
    let comm = host.read(&host.proc(&format!("{pid}/comm"))).unwrap_or_default();
    comm.trim_end_matches('\n').chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::*;

    /// The one test that looks at this machine: it has `/dev/null` open itself, and knows whether it sees all processes.
    #[test]
    fn a_process_namespace_of_its_own_is_not_taken_for_the_host() {
        let open = File::open("/dev/null").unwrap();
        let found = scan(&Host::system().unwrap(), ["/dev/null".to_owned()]).unwrap();
        drop(open);
        assert!(found.of("/dev/null").any(|holder| holder.pid == std::process::id()));
        let sees_all = fs::read_link("/proc/1/ns/pid").is_ok_and(|ns| ns.as_os_str() == HOST_PID_NAMESPACE);
        assert_eq!(found.opaque.iter().any(|process| process.pid == 1), !sees_all);
    }
}
