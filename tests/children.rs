//! Looks through a child: what hangs costs that child, and hides nothing else.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "test code")]
#![allow(clippy::disallowed_methods, reason = "a test's own files")]

mod node;

use std::{
    collections::BTreeSet,
    fs::{self, OpenOptions},
    os::unix::fs::{OpenOptionsExt, symlink},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use decide::{
    inventory::Inventory,
    usage::{Usage, User},
};
use nix::{libc::O_NONBLOCK, sys::stat::Mode, unistd};
use node::{Node, address, four_groups, stage};
use proptest::{prelude::*, sample::subsequence};
use vfio::{
    child::{ChildCommand, Reader},
    holders::{Holders, Owner},
    pci::Life,
    sim::Profile,
};
use vfiod::{cli::KERNEL_READER, observe::observe};

/// Long beside the time that a line takes, also on a machine with much to do.
const DEADLINE: Duration = Duration::from_secs(1);
const GPU: &str = "/dev/nvidia0";
const CONTROL: &str = "/dev/nvidiactl";
const DETAILS: [&str; 3] = ["comm", "cgroup", "cmdline"];

fn reader(node: &Node) -> Reader {
    let command = ChildCommand { deadline: DEADLINE, ..stage::child(KERNEL_READER) };
    Reader::new(&command, node.sim.host())
}

fn scan(reader: &mut Reader) -> Holders {
    reader.holders([GPU.to_owned(), CONTROL.to_owned()])
}

fn holding(found: &Holders, node: &str) -> Vec<u32> {
    found.of(node).map(|holder| holder.pid).collect()
}

/// Files that hang whoever reads them, until this is dropped.
#[derive(Default)]
struct Hanging(Vec<PathBuf>);

impl Hanging {
    fn at(&mut self, file: PathBuf) {
        // Some processes have no such file.
        let _ = fs::remove_file(&file);
        unistd::mkfifo(&file, Mode::S_IRWXU).unwrap();
        self.0.push(file);
    }
}

impl Drop for Hanging {
    fn drop(&mut self) {
        for file in &self.0 {
            // Whoever waits to open it is let go by the coming and going of a writer.
            let _ = OpenOptions::new().read(true).write(true).custom_flags(O_NONBLOCK).open(file);
        }
    }
}

#[test]
fn a_holder_whose_details_hang_is_a_holder_all_the_same() {
    for (hangs, file) in DETAILS.iter().enumerate() {
        let node = Node::new(&Profile::four_function_card());
        node.sim.start_process(41, "before", &[GPU]).unwrap();
        node.sim.start_process(42, "stuck", &[GPU]).unwrap();
        node.sim.start_process(43, "after", &[GPU, CONTROL]).unwrap();
        let cgroup = node.sim.host().proc("42/cgroup");
        vfiod::atomic_file::replace(&cgroup, b"0::/system.slice/stuck.service\n", 0o644).unwrap();
        let mut hanging = Hanging::default();
        hanging.at(node.sim.host().proc(&format!("42/{file}")));
        let mut reader = reader(&node);
        let unit = Owner::Unit { unit: "stuck.service".to_owned() };
        let known = [("?", Owner::Unknown), ("stuck", Owner::Unknown), ("stuck", unit.clone())];

        let begun = Instant::now();
        let found = scan(&mut reader);
        assert!(begun.elapsed() < DEADLINE * 3, "{:?}", begun.elapsed());
        assert_eq!((holding(&found, GPU), holding(&found, CONTROL)), (vec![41, 42, 43], vec![43]), "{file}");
        assert!(found.opaque.is_empty(), "{file}: {found:?}");
        let stuck = |found: &Holders| {
            let holder = found.of(GPU).find(|holder| holder.pid == 42).unwrap();
            (holder.command.clone(), holder.owner.clone(), holder.program.clone())
        };
        let (command, owner) = known[hangs].clone();
        assert_eq!(stuck(&found), (command.to_owned(), owner, None), "{file}");

        // It is known by now: nothing waits for it, and no child follows that one.
        let children = node.readers().len();
        assert_eq!(children, 2, "{file}: the one that is stuck, and the one that went on");
        let begun = Instant::now();
        assert_eq!(scan(&mut reader), found, "{file}");
        assert!(begun.elapsed() < DEADLINE, "{:?}", begun.elapsed());
        assert_eq!(node.readers().len(), children, "{file}");

        // What it has open is looked at each time all the same.
        fs::remove_dir_all(node.sim.host().proc("42/fd")).unwrap();
        assert_eq!(holding(&scan(&mut reader), GPU), [41, 43], "{file}");
        fs::create_dir(node.sim.host().proc("42/fd")).unwrap();
        symlink("../../../dev/nvidia0", node.sim.host().proc("42/fd/9")).unwrap();

        // It comes back, and is like the others; its child has ended although much was left to say.
        let path = hanging.0[0].clone();
        let waiting = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let content: &[u8] = if *file == "cgroup" { b"0::/system.slice/stuck.service\n" } else { b"stuck\0" };
        vfiod::atomic_file::replace(&path, content, 0o644).unwrap();
        drop(waiting);
        let whole = |found: &Holders| {
            let (command, owner, program) = stuck(found);
            command.starts_with("stuck") && owner == unit && program.as_deref() == Some("stuck")
        };
        let until = Instant::now() + stage::LIMIT;
        while !whole(&scan(&mut reader)) || node.readers().len() > 1 {
            assert!(Instant::now() < until, "{file}: {:?} {:?}", scan(&mut reader), node.readers());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whichever processes hang, and wherever each does, every holder is found.
    #[test]
    fn whoever_hangs_every_other_holder_is_found(
        stuck in subsequence((40..46_u32).collect::<Vec<_>>(), 0..=4),
        at in prop::collection::vec(0..DETAILS.len(), 6),
    ) {
        let node = Node::new(&Profile::four_function_card());
        let mut hanging = Hanging::default();
        for pid in 40..46 {
            node.sim.start_process(pid, "holder", &[if pid % 2 == 0 { GPU } else { CONTROL }]).unwrap();
        }
        for (pid, at) in stuck.iter().zip(at) {
            hanging.at(node.sim.host().proc(&format!("{pid}/{}", DETAILS[at])));
        }
        let mut reader = reader(&node);
        for _ in 0..2 {
            let found = scan(&mut reader);
            prop_assert_eq!(holding(&found, GPU), vec![40, 42, 44]);
            prop_assert_eq!(holding(&found, CONTROL), vec![41, 43, 45]);
            prop_assert!(found.opaque.is_empty(), "{:?}", found);
            for holder in found.by_node.values().flatten().filter(|holder| !stuck.contains(&holder.pid)) {
                prop_assert_eq!((holder.command.as_str(), holder.program.as_deref()), ("holder", Some("holder")));
            }
            prop_assert_eq!(node.readers().len(), stuck.len() + 1);
        }
    }
}

fn users(inventory: &Inventory, group: u32) -> BTreeSet<User> {
    Usage::default().of(inventory).of_unit(inventory, inventory.unit_of_group(group).unwrap())
}

/// A process that cannot be looked into keeps only the groups whose nodes it may have open.
#[test]
fn what_is_not_known_of_a_process_blocks_what_it_may_hold() {
    let node = Node::new(&four_groups());
    let look = || observe(node.sim.host(), &mut reader(&node), &BTreeSet::new()).unwrap();
    let inventory = look();
    assert!(inventory.groups.keys().all(|group| users(&inventory, *group).is_empty()), "{inventory:?}");
    // The node of one GPU, on a file system that does not answer.
    let of = |function: &str| {
        let scope = vfio::vendor::Scope::Function(address(function));
        let nodes = inventory.driver_nodes.iter().find(|(_, found)| **found == scope);
        nodes.unwrap().0.rsplit('/').next().unwrap().to_owned()
    };
    symlink("loop", node.dir.path().join("loop")).unwrap();
    fs::create_dir_all(node.sim.host().proc("900/fd")).unwrap();
    symlink(Path::new("/loop").join(of("0000:17:00.0")), node.sim.host().proc("900/fd/3")).unwrap();
    let inventory = look();
    let blocked = |inventory: &Inventory| {
        let groups = inventory.groups.keys().copied().filter(|group| !users(inventory, *group).is_empty());
        groups.collect::<Vec<_>>()
    };
    assert_eq!(blocked(&inventory), [25]);
    let text = users(&inventory, 25).first().unwrap().to_string();
    assert!(text.contains("process 900 cannot be looked into"), "{text}");

    // One that may have anything open: all but the group that has no node.
    fs::create_dir_all(node.sim.host().proc("901")).unwrap();
    vfiod::atomic_file::replace(&node.sim.host().proc("901/fd"), b"", 0o600).unwrap();
    let inventory = look();
    assert_eq!(inventory.groups.keys().copied().collect::<Vec<_>>(), [25, 35, 60, 86]);
    assert_eq!(blocked(&inventory), [25, 35, 86]);
}

#[test]
fn a_dead_function_is_told_from_one_in_reset_and_from_one_that_does_not_come_back() {
    let node = Node::new(&four_groups());
    let [dead, confused, alive, hangs] =
        ["0000:17:00.0", "0000:65:00.0", "0000:05:00.0", "0000:52:00.0"].map(address);
    let config = |function| node.sim.host().function_dir(function).join("config");
    let answering = fs::read(config(dead)).unwrap();
    let mut header_7f = answering.clone();
    header_7f[0x0e] = 0x7f;
    vfiod::atomic_file::replace(&config(dead), &[0xff; 256], 0o644).unwrap();
    vfiod::atomic_file::replace(&config(confused), &header_7f, 0o644).unwrap();
    let mut hanging = Hanging::default();
    hanging.at(config(hangs));

    let mut reader = reader(&node);
    reader.apart = Duration::from_millis(300);
    let all = BTreeSet::from([dead, confused, alive, hangs]);
    let begun = Instant::now();
    let lives = reader.lives(&all);
    assert!(begun.elapsed() >= reader.apart);
    let expected = [(alive, Life::Alive), (dead, Life::Dead), (hangs, Life::Unknown), (confused, Life::Dead)];
    assert_eq!(lives, expected.into());

    // All is remembered: no pause, and no other child for the one that hangs.
    std::thread::sleep(reader.apart);
    let children = node.readers();
    let begun = Instant::now();
    assert_eq!(reader.lives(&all), expected.into());
    assert!(begun.elapsed() < DEADLINE, "{:?}", begun.elapsed());
    assert_eq!(node.readers(), children);

    // It comes back between two looks: that was a reset.
    vfiod::atomic_file::replace(&config(dead), &answering, 0o644).unwrap();
    assert_eq!(reader.lives(&BTreeSet::from([dead]))[&dead], Life::Alive);
    vfiod::atomic_file::replace(&config(dead), &[0xff; 256], 0o644).unwrap();
    reader.apart = Duration::from_secs(2);
    std::thread::scope(|scope| {
        let lives = scope.spawn(|| reader.lives(&BTreeSet::from([dead])));
        std::thread::sleep(Duration::from_millis(500));
        vfiod::atomic_file::replace(&config(dead), &answering, 0o644).unwrap();
        assert_eq!(lives.join().unwrap()[&dead], Life::Alive);
    });
    // One that nobody is there of is not dead either.
    let absent = address("0000:99:00.0");
    assert_eq!(reader.lives(&BTreeSet::from([absent]))[&absent], Life::Unknown);
}
