//! What a look at processes makes of those that cannot be looked into.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "test code")]

use std::{collections::BTreeSet, os::unix::fs::symlink};

use tempfile::TempDir;
use vfio::{
    holders::{Holders, Opaque, scan},
    sim::{Profile, Simulation},
};

const GPU: &str = "/dev/nvidia0";
const CONTROL: &str = "/dev/nvidiactl";

struct Node {
    sim: Simulation,
    _dir: TempDir,
}

impl Node {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self { sim: Simulation::create(dir.path(), &Profile::four_function_card()).unwrap(), _dir: dir }
    }

    /// A descriptor of a process, by the text of its link.
    fn open(&self, pid: u32, fd: u32, link: &str) {
        let dir = self.sim.host().proc(&format!("{pid}/fd"));
        std::fs::create_dir_all(&dir).unwrap();
        symlink(link, dir.join(fd.to_string())).unwrap();
    }

    /// A file that cannot be looked at (ELOOP), of this name.
    fn beyond_reach(&self, name: &str) -> String {
        let loops = self.sim.host().root().join("loop");
        if loops.symlink_metadata().is_err() {
            symlink("loop", &loops).unwrap();
        }
        format!("../../../loop/{name}")
    }

    fn scan(&self) -> Holders {
        scan(self.sim.host(), [GPU.to_owned(), CONTROL.to_owned()])
    }
}

/// What is opaque: its process, and what that may have open.
fn may_hold(found: &Holders) -> Vec<(Option<u32>, Option<Vec<String>>)> {
    let nodes = |opaque: &Opaque| opaque.may_hold.clone().map(|nodes| nodes.into_iter().collect());
    found.opaque.iter().map(|opaque| (opaque.pid, nodes(opaque))).collect()
}

#[test]
fn a_file_that_cannot_be_looked_at_may_be_only_what_it_is_called() {
    let node = Node::new();
    node.open(41, 3, &node.beyond_reach("nvidia0"));
    node.open(42, 3, &node.beyond_reach("nvidiactl (deleted)"));
    node.open(42, 4, "../../../dev/nvidia0");
    // A dead network file system: no node is called like that.
    node.open(43, 3, &node.beyond_reach("log"));
    node.open(43, 4, "../../../dev/nvidiactl");
    let found = node.scan();
    assert_eq!(
        may_hold(&found),
        [(Some(41), Some(vec![GPU.to_owned()])), (Some(42), Some(vec![CONTROL.to_owned()]))]
    );
    assert_eq!(found.of(GPU).map(|holder| holder.pid).collect::<Vec<_>>(), [42]);
    assert_eq!(found.of(CONTROL).map(|holder| holder.pid).collect::<Vec<_>>(), [43]);
    assert!(found.opaque.iter().all(|opaque| opaque.reason.contains("/fd/3")), "{found:?}");
}

#[test]
fn a_process_whose_descriptors_cannot_be_listed_may_hold_anything() {
    let node = Node::new();
    std::fs::create_dir_all(node.sim.host().proc("41")).unwrap();
    symlink("comm", node.sim.host().proc("41/fd")).unwrap();
    symlink("fd", node.sim.host().proc("41/comm")).unwrap();
    // A link that cannot be read says nothing of what is behind it.
    std::fs::create_dir_all(node.sim.host().proc("42/fd/3")).unwrap();
    node.open(43, 3, "../../../dev/nvidia0");
    let found = node.scan();
    assert_eq!(may_hold(&found), [(Some(41), None), (Some(42), None)]);
    assert_eq!(found.of(GPU).count(), 1);
    assert_eq!(found.opaque_to(&BTreeSet::new()).count(), 0, "where there is no node, nobody has one open");
}

/// What is no file is not looked at, though it were beyond reach.
#[test]
fn sockets_pipes_and_anonymous_inodes_are_passed_over() {
    let node = Node::new();
    for (fd, link) in
        ["socket:[17]", "pipe:[18]", "anon_inode:[vfio-device]", "anon_inode:inotify"].iter().enumerate()
    {
        let fd = u32::try_from(fd).unwrap();
        node.open(41, fd, link);
        // In a simulated tree such a link leads to a file of that name beside it: one that leads to itself.
        symlink(link, node.sim.host().proc("41/fd").join(link)).unwrap();
    }
    assert_eq!(node.scan(), Holders::default());
}

#[test]
fn without_a_process_list_nothing_is_known_of_any() {
    let node = Node::new();
    std::fs::remove_dir_all(node.sim.host().proc("")).unwrap();
    assert_eq!(may_hold(&node.scan()), [(None, None)]);
    // Nobody has open what is not there.
    assert_eq!(scan(node.sim.host(), ["/dev/vfio/35".to_owned()]), Holders::default());
}

#[test]
fn a_node_that_cannot_be_looked_at_is_the_only_one_not_known() {
    let node = Node::new();
    let path = node.sim.host().dev("nvidiactl");
    std::fs::remove_file(&path).unwrap();
    symlink("nvidiactl", &path).unwrap();
    node.open(41, 3, "../../../dev/nvidia0");
    let found = node.scan();
    assert_eq!(may_hold(&found), [(None, Some(vec![CONTROL.to_owned()]))]);
    assert_eq!(found.of(GPU).count(), 1);
}
