//! Who has a device open: by device number, through `/proc/PID/fd`.
//!
//! By number, because a VM's process opens the node in a mount namespace of its own, under whatever path. Needs the
//! host's process namespace, and the right to look into every process (CAP_SYS_PTRACE); where a live process cannot be
//! looked into, the answer says so, and a caller must take the device for in use.

mod owner;
mod service;

use std::collections::{BTreeMap, BTreeSet};

pub use owner::{Owner, owner};
use serde::Serialize;
pub use service::cure;

use crate::{
    host::{Host, Kernel, NodeId, ReadError},
    printable::printable,
};

/// A process with a device node open.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Holder {
    /// Its process id, in the host's namespace.
    pub pid: u32,
    /// Its command (`/proc/PID/comm`, at most 15 characters).
    pub command: String,
    /// The program that it says it is (`/proc/PID/cmdline`, the first word only: what follows may hold secrets).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// Whose it is.
    #[serde(flatten)]
    pub owner: Owner,
    /// What makes it let go, where that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cure: Option<String>,
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
            // One device may have several nodes, below /dev and below a driver's root: the first name stands for it.
            ids.entry(id).or_insert(node);
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
                let holder = holder(host, pid);
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

/// The most that is kept of a program's name.
const LONGEST_PROGRAM: usize = 200;

/// Who a process is. All but the command is best effort: it may end at any moment.
fn holder(host: &Host, pid: u32) -> Holder {
    let file = |name: &str| host.proc(&format!("{pid}/{name}"));
    let command = printable(&host.read(&file("comm")).unwrap_or_default());
    let owner = owner(&host.read(&file("cgroup")).unwrap_or_default());
    let cure = cure(&command, &owner, None);
    let program = host.bytes(&file("cmdline"), LONGEST_PROGRAM).ok().and_then(|bytes| program(&bytes));
    Holder { pid, command, program, owner, cure }
}

/// The first word of a command line. Its arguments end in NUL; a process that names itself anew may put blanks between them.
fn program(cmdline: &[u8]) -> Option<String> {
    let first = cmdline.split(|byte| *byte == 0 || byte.is_ascii_whitespace()).next()?;
    let name = printable(&String::from_utf8_lossy(first));
    (!name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn of_a_command_line_only_the_program_is_kept() {
        for (cmdline, expected) in [
            (&b"/usr/bin/qemu-kvm\0-object\0secret,data=hunter2\0"[..], Some("/usr/bin/qemu-kvm")),
            (b"worker: token=hunter2\0", Some("worker:")),
            (b"qemu\x1b[31m\0-m\0", Some("qemu?[31m")),
            (b"\xff\xfe\0x\0", Some("\u{fffd}\u{fffd}")),
            (b"", None),
            (b"\0hunter2\0", None),
        ] {
            assert_eq!(program(cmdline).as_deref(), expected);
        }
    }

    proptest! {
        #[test]
        fn any_command_line_is_survived(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = program(&bytes);
        }
    }

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
