//! Puts together what a walk through all processes says.

use std::collections::BTreeSet;

use super::{Depth, Holder, Holders, Opaque, Owner, Seen, cure, walk::STUCK};

/// A walk under way, as far as it has got.
#[derive(Debug, Default)]
pub(crate) struct Gathered {
    found: Holders,
    now: Option<Process>,
    /// The last process that nothing more is to be said of.
    done: Option<u32>,
}

/// The process that is being looked at.
#[derive(Debug)]
struct Process {
    pid: u32,
    /// How deep it can be looked into, should nothing more come.
    depth: Depth,
    /// What it may have open by its links.
    may_hold: BTreeSet<String>,
    nodes: BTreeSet<String>,
    command: Option<String>,
    owner: Owner,
    program: Option<String>,
    doubts: BTreeSet<Opaque>,
}

impl Process {
    fn new(pid: u32) -> Self {
        Self {
            pid,
            depth: Depth::Nothing,
            may_hold: BTreeSet::new(),
            nodes: BTreeSet::new(),
            command: None,
            owner: Owner::Unknown,
            program: None,
            doubts: BTreeSet::new(),
        }
    }

    fn take(&mut self, seen: Seen) {
        match seen {
            Seen::Doubt { reason, may_hold } => {
                self.doubts.insert(Opaque { pid: Some(self.pid), reason, may_hold });
            }
            Seen::Links(may_hold) => {
                self.may_hold = may_hold;
                self.depth = Depth::Links;
            }
            Seen::Node(node) => {
                self.nodes.insert(node);
            }
            Seen::AllNodes => self.depth = Depth::Nodes,
            Seen::Command(command) => {
                self.command = Some(command);
                self.depth = Depth::Command;
            }
            Seen::Owner(owner) => {
                self.owner = owner;
                self.depth = Depth::Owner;
            }
            Seen::Program(program) => self.program = program,
            Seen::Process(_) | Seen::End => {}
        }
    }

    /// What it may have open, beside what it has, should nothing more come of it; nothing where that is known.
    fn stuck(&self) -> Option<Opaque> {
        let may_hold = match self.depth {
            Depth::Nothing => None,
            Depth::Links => Some(self.may_hold.difference(&self.nodes).cloned().collect::<BTreeSet<_>>()),
            Depth::Nodes | Depth::Command | Depth::Owner | Depth::Whole => return None,
        };
        let any = may_hold.as_ref().is_none_or(|may_hold| !may_hold.is_empty());
        any.then(|| Opaque { pid: Some(self.pid), reason: STUCK.to_owned(), may_hold })
    }
}

impl Gathered {
    /// Takes in what is said next.
    pub(crate) fn take(&mut self, seen: Seen) {
        match (seen, &mut self.now) {
            (Seen::Process(pid), _) => {
                self.conclude();
                self.now = Some(Process::new(pid));
            }
            (Seen::End, _) => self.conclude(),
            (seen, Some(process)) => process.take(seen),
            (Seen::Doubt { reason, may_hold }, None) => self.doubt(reason, may_hold),
            // Of no process: a walk does not say that.
            (_, None) => {}
        }
    }

    /// The walk is stuck. Says at which process, and how deep that can be looked into from now on; nothing where it is at
    /// none. The rest can be walked through after it.
    pub(crate) fn stuck(&mut self) -> Option<(u32, Depth)> {
        let process = self.now.as_mut()?;
        process.doubts.extend(process.stuck());
        let stuck = (process.pid, process.depth);
        self.conclude();
        Some(stuck)
    }

    /// The walk broke off, and the process that was being looked at has to be looked at again: after which one.
    pub(crate) fn broken_off(&mut self) -> Option<u32> {
        self.now = None;
        self.done
    }

    /// Something is not known of processes in general.
    pub(crate) fn doubt(&mut self, reason: String, may_hold: Option<BTreeSet<String>>) {
        self.found.opaque.insert(Opaque { pid: None, reason, may_hold });
    }

    /// All that was found.
    pub(crate) fn finish(mut self) -> Holders {
        self.conclude();
        self.found
    }

    fn conclude(&mut self) {
        let Some(process) = self.now.take() else { return };
        self.done = Some(process.pid);
        self.found.opaque.extend(process.doubts);
        if process.nodes.is_empty() {
            return;
        }
        let command = process.command.filter(|command| !command.is_empty()).unwrap_or_else(|| "?".to_owned());
        let cure = cure(&command, &process.owner, None);
        let holder =
            Holder { pid: process.pid, command, program: process.program, owner: process.owner, cure };
        for node in process.nodes {
            self.found.by_node.entry(node).or_default().insert(holder.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(nodes: &[&str]) -> BTreeSet<String> {
        nodes.iter().map(|node| (*node).to_owned()).collect()
    }

    fn unit() -> Owner {
        Owner::Unit { unit: "x.service".to_owned() }
    }

    /// All that a walk says of a process with two nodes open.
    fn said() -> Vec<Seen> {
        vec![
            Seen::Process(7),
            Seen::Links(set(&["/dev/a", "/dev/b", "/dev/c"])),
            Seen::Node("/dev/a".to_owned()),
            Seen::Node("/dev/b".to_owned()),
            Seen::AllNodes,
            Seen::Command("vmm".to_owned()),
            Seen::Owner(unit()),
            Seen::Program(Some("/usr/bin/vmm".to_owned())),
        ]
    }

    #[test]
    fn wherever_a_walk_gets_stuck_no_more_is_unknown_than_need_be() {
        let known = |command: &str, owner: Owner| Some((command.to_owned(), owner, None::<String>));
        type Case = (
            usize,
            Option<Depth>,
            usize,
            Option<(String, Owner, Option<String>)>,
            Option<Option<BTreeSet<String>>>,
        );
        let cases: [Case; 9] = [
            (0, None, 0, None, None),
            (1, Some(Depth::Nothing), 0, None, Some(None)),
            (2, Some(Depth::Links), 0, None, Some(Some(set(&["/dev/a", "/dev/b", "/dev/c"])))),
            (3, Some(Depth::Links), 1, known("?", Owner::Unknown), Some(Some(set(&["/dev/b", "/dev/c"])))),
            (4, Some(Depth::Links), 2, known("?", Owner::Unknown), Some(Some(set(&["/dev/c"])))),
            (5, Some(Depth::Nodes), 2, known("?", Owner::Unknown), None),
            (6, Some(Depth::Command), 2, known("vmm", Owner::Unknown), None),
            (7, Some(Depth::Owner), 2, known("vmm", unit()), None),
            // Stuck between two processes: everything was said of this one.
            (
                8,
                Some(Depth::Owner),
                2,
                Some(("vmm".to_owned(), unit(), Some("/usr/bin/vmm".to_owned()))),
                None,
            ),
        ];
        for (heard, depth, nodes, who, may_hold) in cases {
            let mut gathered = Gathered::default();
            said().into_iter().take(heard).for_each(|seen| gathered.take(seen));
            assert_eq!(gathered.stuck(), depth.map(|depth| (7, depth)), "{heard}");
            // It goes on with the rest.
            gathered.take(Seen::Process(9));
            gathered.take(Seen::Links(BTreeSet::new()));
            gathered.take(Seen::End);
            let found = gathered.finish();
            assert_eq!(found.by_node.len(), nodes, "{heard}: {found:?}");
            for holder in found.by_node.values().flatten() {
                let Holder { command, owner, program, .. } = holder.clone();
                assert_eq!(Some((command, owner, program)), who, "{heard}");
            }
            let opaque: Vec<_> =
                found.opaque.into_iter().map(|opaque| (opaque.pid, opaque.may_hold)).collect();
            assert_eq!(
                opaque,
                may_hold.map(|may_hold| (Some(7), may_hold)).into_iter().collect::<Vec<_>>(),
                "{heard}"
            );
        }
    }

    #[test]
    fn a_walk_that_broke_off_begins_again_after_what_it_knows() {
        let mut gathered = Gathered::default();
        assert_eq!(gathered.broken_off(), None);
        gathered.take(Seen::Process(7));
        assert_eq!(gathered.broken_off(), None);
        said().into_iter().for_each(|seen| gathered.take(seen));
        gathered.take(Seen::Process(9));
        gathered.take(Seen::Node("/dev/c".to_owned()));
        assert_eq!(gathered.broken_off(), Some(7));
        let found = gathered.finish();
        assert_eq!(found.by_node.into_keys().collect::<BTreeSet<_>>(), set(&["/dev/a", "/dev/b"]));
        assert!(found.opaque.is_empty());
    }

    #[test]
    fn what_is_said_of_no_process_is_not_known_of_any() {
        let mut gathered = Gathered::default();
        gathered.take(Seen::Node("/dev/a".to_owned()));
        gathered.take(Seen::Doubt { reason: "no list".to_owned(), may_hold: None });
        assert_eq!(gathered.stuck(), None);
        let found = gathered.finish();
        assert!(found.by_node.is_empty());
        assert_eq!(
            found.opaque,
            BTreeSet::from([Opaque { pid: None, reason: "no list".to_owned(), may_hold: None }])
        );
    }
}
