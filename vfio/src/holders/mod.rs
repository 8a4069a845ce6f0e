//! Who has a device open: by device number, through `/proc/PID/fd`.
//!
//! By number, because a VM's process opens the node in a mount namespace of its own, under whatever path. Needs the
//! host's process namespace, and the right to look into every process (CAP_SYS_PTRACE); where a live process cannot be
//! looked into, the answer says so and what it may have open, and a caller must take that for in use.
//!
//! Any look at a process may block for as long as something of it hangs in the kernel, so an agent looks through
//! [`Reader`](crate::child::Reader)'s child; [`scan`] is for those who may block.

mod gather;
mod owner;
mod service;
mod walk;

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    fmt,
};

pub(crate) use gather::Gathered;
pub use owner::{Owner, owner};
use serde::Serialize;
pub use service::cure;
pub(crate) use walk::{Depth, Request, Seen, walk};

use crate::host::Host;

/// A process with a device node open.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Holder {
    /// Its process id, in the host's namespace.
    pub pid: u32,
    /// Its command (`/proc/PID/comm`, at most 15 characters); `?` where it is not known.
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

/// Something that could not be looked into: a live process, or processes in general.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Opaque {
    /// The process; none where it is no process in particular.
    pub pid: Option<u32>,
    /// Why not.
    pub reason: String,
    /// The nodes that it may have open; none where that may be any.
    pub may_hold: Option<BTreeSet<String>>,
}

impl Opaque {
    /// Whether it may have one of `nodes` open. Nothing can have a node open that is not there.
    #[must_use]
    pub fn may_hold(&self, nodes: &BTreeSet<String>) -> bool {
        match &self.may_hold {
            None => !nodes.is_empty(),
            Some(may_hold) => !may_hold.is_disjoint(nodes),
        }
    }
}

impl fmt::Display for Opaque {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "process {pid} cannot be looked into ({})", self.reason),
            None => f.write_str(&self.reason),
        }
    }
}

/// What a scan of all processes found.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Holders {
    /// For each node (its path on the host, such as `/dev/vfio/12`) that somebody has open: who.
    pub by_node: BTreeMap<String, BTreeSet<Holder>>,
    /// What is not known.
    pub opaque: BTreeSet<Opaque>,
}

impl Holders {
    /// Who has `node` open.
    pub fn of(&self, node: &str) -> impl Iterator<Item = &Holder> {
        self.by_node.get(node).into_iter().flatten()
    }

    /// What may have one of `nodes` open, and cannot be looked into. `nodes` are those that are there.
    pub fn opaque_to(&self, nodes: &BTreeSet<String>) -> impl Iterator<Item = &Opaque> {
        self.opaque.iter().filter(|opaque| opaque.may_hold(nodes))
    }
}

/// Looks through all processes for open file descriptions of `nodes` (paths on the host, such as `/dev/vfio/12`), in this
/// process: it blocks for as long as the kernel does.
#[must_use]
pub fn scan(host: &Host, nodes: impl IntoIterator<Item = String>) -> Holders {
    let mut gathered = Gathered::default();
    let request = Request { nodes: nodes.into_iter().collect(), ..Request::default() };
    let Ok(()) = walk(host, &request, &mut |seen| {
        gathered.take(seen);
        Ok::<(), Infallible>(())
    });
    gathered.finish()
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::{walk::HOST_PID_NAMESPACE, *};

    fn nodes(nodes: &[&str]) -> BTreeSet<String> {
        nodes.iter().map(|node| (*node).to_owned()).collect()
    }

    #[test]
    fn what_is_opaque_keeps_only_what_it_may_hold() {
        let opaque = |pid, may_hold: Option<&[&str]>| Opaque {
            pid: Some(pid),
            reason: "denied".to_owned(),
            may_hold: may_hold.map(nodes),
        };
        let found = Holders {
            opaque: BTreeSet::from([
                opaque(1, None),
                opaque(2, Some(&["/dev/a", "/dev/b"])),
                opaque(3, Some(&[])),
            ]),
            ..Holders::default()
        };
        for (asked, expected) in [
            (&["/dev/a"][..], &[1, 2][..]),
            (&["/dev/c", "/dev/b"], &[1, 2]),
            (&["/dev/c"], &[1]),
            (&[], &[]),
        ] {
            let pids: Vec<_> = found.opaque_to(&nodes(asked)).filter_map(|opaque| opaque.pid).collect();
            assert_eq!(pids, expected, "{asked:?}");
        }
    }

    /// The one test that looks at this machine: it has `/dev/null` open itself, and knows whether it sees all processes.
    #[test]
    fn a_process_namespace_of_its_own_is_not_taken_for_the_host() {
        let open = File::open("/dev/null").unwrap();
        let found = scan(&Host::system().unwrap(), ["/dev/null".to_owned()]);
        drop(open);
        assert!(found.of("/dev/null").any(|holder| holder.pid == std::process::id()));
        let sees_all = fs::read_link("/proc/1/ns/pid").is_ok_and(|ns| ns.as_os_str() == HOST_PID_NAMESPACE);
        let hidden = |opaque: &Opaque| opaque.pid.is_none() && opaque.may_hold.is_none();
        assert_eq!(found.opaque.iter().any(hidden), !sees_all);
    }
}
