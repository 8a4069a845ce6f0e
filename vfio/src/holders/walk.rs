//! The walk through all processes: says what it sees as it sees it, so that whoever listens knows where it got stuck.
//!
//! ```text
//!   Process ─▶ Links ─▶ Node* ─▶ AllNodes ─▶ Command ─▶ Owner ─▶ Program      of each process, in order of their ids
//!      │         │        └──────── looking at a descriptor's file may block: a file system that does not answer
//!      │         └───────────────── listing descriptors may block
//!      └─ said before anything of the process is touched
//! ```
//! After `AllNodes` it is about a process that has a node open, and each step may block again; `cmdline` comes last, since it
//! takes the lock of the process's memory (`mmap_lock`), which a process stuck in a page fault keeps.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{Owner, owner};
use crate::{
    host::{Host, Kernel, NodeId, ReadError},
    printable::{printable, printable_some},
};

/// What is to be looked for.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Request {
    /// The nodes, by their paths on the host.
    pub(crate) nodes: BTreeSet<String>,
    /// Only processes with a higher id: those before it have been looked at.
    pub(crate) after: Option<u32>,
    /// How deep processes are looked into that got an earlier look stuck.
    pub(crate) depths: BTreeMap<u32, Depth>,
}

/// How deep a process is looked into.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Depth {
    /// Not at all: it may have anything open.
    Nothing,
    /// What the links of its descriptors say: it may have open what is called like that.
    Links,
    /// Which nodes it has open, and not who it is.
    Nodes,
    /// Its command too.
    Command,
    /// Its owner too.
    Owner,
    /// All there is to know.
    Whole,
}

/// What the walk sees. All but the first two are about the process named last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Seen {
    /// A process is looked at next.
    Process(u32),
    /// Something cannot be looked at: of this process, or, before the first, of all.
    Doubt {
        /// Why.
        reason: String,
        /// The nodes that may be open therefore; none for any.
        may_hold: Option<BTreeSet<String>>,
    },
    /// Its links have been read, and by them it has nothing of all that is looked for but perhaps these.
    Links(BTreeSet<String>),
    /// It has this node open.
    Node(String),
    /// There is no other that it has open.
    AllNodes,
    /// Its command.
    Command(String),
    /// Whose it is.
    Owner(Owner),
    /// The program that it says it is.
    Program(Option<String>),
    /// That was the last process.
    End,
}

/// Why a process is not known that got a look stuck.
pub(super) const STUCK: &str = "looking at it does not come back: something of it hangs in the kernel";

/// How the kernel names the process namespace that it starts with (`PROC_PID_INIT_INO`, include/linux/proc_ns.h).
pub(super) const HOST_PID_NAMESPACE: &str = "pid:[4026531836]";

/// The most that is kept of a program's name.
const LONGEST_PROGRAM: usize = 200;

/// Walks through all processes of `host`, and `say`s what it sees.
///
/// # Errors
/// Where `say` fails, which ends the walk.
pub(crate) fn walk<E>(
    host: &Host,
    request: &Request,
    say: &mut impl FnMut(Seen) -> Result<(), E>,
) -> Result<(), E> {
    let mut wanted = Wanted::default();
    for node in &request.nodes {
        match host.node_id(&host.root().join(node.trim_start_matches('/'))) {
            Ok(Some(id)) => wanted.add(id, node),
            Ok(None) => {}
            Err(error) => {
                say(Seen::Doubt {
                    reason: error.to_string(),
                    may_hold: Some(BTreeSet::from([node.clone()])),
                })?;
            }
        }
    }
    if wanted.by_id.is_empty() {
        return say(Seen::End);
    }
    if host.kernel() == Kernel::Real {
        hidden_processes(host).map_or(Ok(()), |reason| say(Seen::Doubt { reason, may_hold: None }))?;
    }
    match host.list(&host.proc("")) {
        Ok(names) => {
            let pids: BTreeSet<u32> = names.iter().filter_map(|name| name.parse().ok()).collect();
            for pid in pids.into_iter().filter(|pid| request.after.is_none_or(|after| *pid > after)) {
                let depth = request.depths.get(&pid).copied().unwrap_or(Depth::Whole);
                say(Seen::Process(pid))?;
                Look { host, wanted: &wanted, pid }.process(depth, say)?;
            }
        }
        // Without a process list nothing is known of any process.
        Err(error) => say(Seen::Doubt { reason: error.to_string(), may_hold: None })?,
    }
    say(Seen::End)
}

/// Says whether the process list is a part of the host's only: that of a container with a process namespace of its own,
/// where a VM's process cannot be seen.
fn hidden_processes(host: &Host) -> Option<String> {
    let seen = match host.link(&host.proc("1/ns/pid")) {
        Ok(Some(target)) if target.as_os_str() == HOST_PID_NAMESPACE => return None,
        Ok(Some(target)) => target.display().to_string(),
        Ok(None) => "its namespace is not shown".to_owned(),
        Err(error) => error.to_string(),
    };
    Some(format!(
        "process 1 is not the host's first process ({seen}), so the host's other processes cannot be seen; give the agent's \
         pod hostPID: true"
    ))
}

/// The nodes that are looked for and are there.
#[derive(Default)]
struct Wanted {
    /// One device may have several nodes, below `/dev` and below a driver's root: the first name stands for it.
    by_id: BTreeMap<NodeId, String>,
    by_file_name: BTreeMap<String, BTreeSet<String>>,
}

impl Wanted {
    fn add(&mut self, id: NodeId, node: &str) {
        self.by_id.entry(id).or_insert_with(|| node.to_owned());
        let name = node.rsplit('/').next().unwrap_or(node);
        self.by_file_name.entry(name.to_owned()).or_default().insert(node.to_owned());
    }

    /// The nodes that the file behind a descriptor's link may be, where nothing but the link can be read.
    ///
    /// A node is shown under the path of the mount that it was opened through, so only its last component says something.
    /// That is enough: nodes lie in a devtmpfs or tmpfs, which answer from memory and never fail, so a file that cannot be
    /// looked at is one of another file system, most likely no node at all. The name keeps what could yet be one: nodes
    /// that the kernel made (devtmpfs), and those that a runtime made for a container, bear the kernel's name for the device.
    fn called_like(&self, link: &Path) -> BTreeSet<String> {
        let name = link.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
        let name = name.strip_suffix(" (deleted)").unwrap_or(&name);
        self.by_file_name.get(name).cloned().unwrap_or_default()
    }
}

/// What has no node behind it, by how the kernel writes the link: an absolute path is never like this.
const NO_FILES: [&str; 3] = ["socket:", "pipe:", "anon_inode:"];

/// An open descriptor with a file behind it.
struct Descriptor {
    /// Its entry below `/proc/PID/fd`.
    file: PathBuf,
    /// What that says.
    link: PathBuf,
}

/// The look at one process.
struct Look<'a> {
    host: &'a Host,
    wanted: &'a Wanted,
    pid: u32,
}

impl Look<'_> {
    fn process<E>(&self, depth: Depth, say: &mut impl FnMut(Seen) -> Result<(), E>) -> Result<(), E> {
        let stuck = |may_hold| Seen::Doubt { reason: STUCK.to_owned(), may_hold };
        if depth == Depth::Nothing {
            return say(stuck(None));
        }
        let (links, failed) = match self.links() {
            Ok(read) => read,
            Err(error) => return self.doubt(&error, None, say),
        };
        if let Some(error) = failed {
            self.doubt(&error, None, say)?;
        }
        if links.is_empty() {
            return Ok(());
        }
        let may_hold: BTreeSet<String> =
            links.iter().flat_map(|open| self.wanted.called_like(&open.link)).collect();
        if depth == Depth::Links {
            return if may_hold.is_empty() { Ok(()) } else { say(stuck(Some(may_hold))) };
        }
        say(Seen::Links(may_hold))?;
        let mut found = BTreeSet::new();
        for Descriptor { file, link } in &links {
            // A descriptor that was closed during the look answers ENOENT, which is "no node" here.
            match self.host.node_id(file) {
                Ok(id) => {
                    let node = id.and_then(|id| self.wanted.by_id.get(&id));
                    if let Some(node) = node.filter(|node| found.insert((*node).clone())) {
                        say(Seen::Node(node.clone()))?;
                    }
                }
                Err(error) => {
                    let may_hold = self.wanted.called_like(link);
                    if !may_hold.is_empty() {
                        self.doubt(&error, Some(may_hold), say)?;
                    }
                }
            }
        }
        if found.is_empty() { Ok(()) } else { self.who(depth, say) }
    }

    /// The descriptors behind which there may be a node, each with its link's text, and why one could not be read, if any. The
    /// text is the kernel's own, from memory: reading it touches no file system.
    ///
    /// Those below some `dev` come first: should another file get the look stuck, every likely node has been looked at, under
    /// whatever name it is there.
    fn links(&self) -> Result<(Vec<Descriptor>, Option<ReadError>), ReadError> {
        let dir = self.host.proc(&format!("{}/fd", self.pid));
        let (mut links, mut failed) = (Vec::new(), None);
        for fd in self.host.list(&dir)? {
            let file = dir.join(fd);
            match self.host.link(&file) {
                Ok(Some(link)) => {
                    let text = link.to_string_lossy();
                    if !NO_FILES.iter().any(|kind| text.starts_with(kind)) {
                        links.push(Descriptor { file, link });
                    }
                }
                // Closed during the look.
                Ok(None) => {}
                Err(error) => failed = Some(error),
            }
        }
        links.sort_by_key(|open| !open.link.components().any(|component| component.as_os_str() == "dev"));
        Ok((links, failed))
    }

    /// A process that ended during the look holds nothing any more.
    fn doubt<E>(
        &self,
        error: &ReadError,
        may_hold: Option<BTreeSet<String>>,
        say: &mut impl FnMut(Seen) -> Result<(), E>,
    ) -> Result<(), E> {
        if !self.host.exists(&self.host.proc(&self.pid.to_string())) {
            return Ok(());
        }
        say(Seen::Doubt { reason: error.to_string(), may_hold })
    }

    /// Who the process is. All of it is best effort: it may end at any moment.
    fn who<E>(&self, depth: Depth, say: &mut impl FnMut(Seen) -> Result<(), E>) -> Result<(), E> {
        let file = |name: &str| self.host.proc(&format!("{}/{name}", self.pid));
        say(Seen::AllNodes)?;
        if depth >= Depth::Command {
            say(Seen::Command(printable(&self.host.read(&file("comm")).unwrap_or_default())))?;
        }
        if depth >= Depth::Owner {
            say(Seen::Owner(owner(&self.host.read(&file("cgroup")).unwrap_or_default())))?;
        }
        if depth >= Depth::Whole {
            let cmdline = self.host.bytes(&file("cmdline"), LONGEST_PROGRAM);
            say(Seen::Program(cmdline.ok().and_then(|bytes| program(&bytes))))?;
        }
        Ok(())
    }
}

/// The first word of a command line. Its arguments end in NUL; a process that names itself anew may put blanks between them.
fn program(cmdline: &[u8]) -> Option<String> {
    let first = cmdline.split(|byte| *byte == 0 || byte.is_ascii_whitespace()).next()?;
    printable_some(&String::from_utf8_lossy(first))
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn a_link_is_told_by_its_last_component() {
        let mut wanted = Wanted::default();
        for (number, node) in
            ["/dev/vfio/12", "/dev/nvidia0", "/run/nvidia/driver/dev/nvidia0"].iter().enumerate()
        {
            wanted.add(NodeId::Character(u64::try_from(number).unwrap()), node);
        }
        let both = ["/dev/nvidia0", "/run/nvidia/driver/dev/nvidia0"];
        for (link, expected) in [
            ("/dev/vfio/12", &["/dev/vfio/12"][..]),
            ("/dev/vfio/12 (deleted)", &["/dev/vfio/12"]),
            ("/tmp/rootfs/dev/nvidia0", &both),
            ("(unreachable)/nvidia0", &both),
            ("/mnt/nfs/12/log", &[]),
            ("/dev/vfio/120", &[]),
            ("/", &[]),
            ("", &[]),
        ] {
            let found: Vec<_> = wanted.called_like(Path::new(link)).into_iter().collect();
            assert_eq!(found, expected, "{link:?}");
        }
    }
}
