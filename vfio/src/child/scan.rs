//! Who has a device open, looked for through children: a process that gets one stuck costs that child, and no more.
//!
//! ```text
//!   agent                                child
//!   Ask::Holders(nodes)  ───────────▶
//!                        ◀───────────    Seen::Process(41), Links, ...
//!                        ◀───────────    Seen::Process(42)        and nothing more: 42 hangs in the kernel
//!   past the deadline: leaves that child behind, and asks another one
//!   Ask::Holders(nodes, after 42)  ─▶
//!                        ◀───────────    Seen::Process(43), ..., Seen::End
//! ```
//! As long as that child has not come back, 42 is not looked into again beyond what it answered.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    LeftBehind,
    protocol::{Answer, Ask},
    running::{Servant, Unanswered},
};
use crate::holders::{Depth, Gathered, Holders, Request, Seen};

/// How much shorter others are waited for once one process has got a child stuck. Mostly it is one cause (a file system that
/// does not answer) with many processes, and each of their lines is a matter of microseconds.
const IMPATIENCE: u32 = 4;

/// Looks for holders, and remembers which processes got it stuck.
#[derive(Debug, Default)]
pub(super) struct HolderScan {
    stuck: BTreeMap<u32, Vec<(Depth, LeftBehind)>>,
    /// A child that got stuck before it came to any process.
    blind: Option<LeftBehind>,
}

impl HolderScan {
    /// Looks through all processes for open file descriptions of `nodes`. What cannot be found out is in the answer.
    pub(super) fn scan(&mut self, servant: &mut Servant, nodes: BTreeSet<String>) -> Holders {
        let mut gathered = Gathered::default();
        if self.blind.as_mut().is_some_and(|child| !child.ended()) {
            gathered.doubt(NO_LIST.to_owned(), None);
            return gathered.finish();
        }
        self.blind = None;
        self.stuck.retain(|_, children| {
            children.retain_mut(|(_, child)| !child.ended());
            !children.is_empty()
        });
        let mut request = Request { nodes, after: None, depths: self.depths() };
        let mut broken_off = false;
        let mut patience = servant.read_deadline();
        loop {
            let unanswered = match hear(servant, &request, patience, &mut gathered) {
                Ok(()) => return gathered.finish(),
                Err(unanswered) => unanswered,
            };
            match unanswered {
                Unanswered::Late(child) => {
                    // It would fill its pipe with what nobody reads, and never end.
                    let child = child.hang_up();
                    let Some((pid, depth)) = gathered.stuck() else {
                        self.blind = Some(child);
                        gathered.doubt(NO_LIST.to_owned(), None);
                        return gathered.finish();
                    };
                    self.stuck.entry(pid).or_default().push((depth, child));
                    request = Request { after: Some(pid), ..request };
                    patience = servant.read_deadline() / IMPATIENCE;
                }
                // A child that ended (a fault, a kill) is replaced once: looking again does no harm.
                Unanswered::Ended(_) if !broken_off => {
                    broken_off = true;
                    request = Request { after: gathered.broken_off(), ..request };
                }
                Unanswered::Ended(pid) => {
                    gathered.broken_off();
                    let text = format!("the child that looks through the processes (pid {pid}) ended");
                    gathered.doubt(text, None);
                    return gathered.finish();
                }
                Unanswered::NotStarted(error) => {
                    let program = servant.command.program.display();
                    let text = format!(
                        "the child that looks through the processes ({program}) cannot be started: {error}"
                    );
                    gathered.doubt(text, None);
                    return gathered.finish();
                }
            }
        }
    }

    fn depths(&self) -> BTreeMap<u32, Depth> {
        let depth = |children: &Vec<(Depth, LeftBehind)>| children.iter().map(|(depth, _)| *depth).min();
        self.stuck.iter().filter_map(|(pid, children)| Some((*pid, depth(children)?))).collect()
    }
}

/// Why nothing is known of any process.
const NO_LIST: &str = "the list of processes, or a node looked for in it, does not come back from the kernel";

/// Asks a child, and takes in all that it sees up to the end. `patience` is how long each next line may take; the first one
/// has the time that it takes to start a child.
fn hear(
    servant: &mut Servant,
    request: &Request,
    patience: std::time::Duration,
    gathered: &mut Gathered,
) -> Result<(), Unanswered> {
    let (pid, mut answer) = servant.ask(&Ask::Holders(request.clone()), servant.read_deadline())?;
    loop {
        match answer {
            Answer::Seen(Seen::End) => return Ok(()),
            Answer::Seen(seen) => gathered.take(seen),
            // An answer to another question: that child is not ours.
            _ => {
                servant.dismiss();
                return Err(Unanswered::Ended(pid));
            }
        }
        answer = servant.more(patience)?;
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::{child::ChildCommand, host::Host};

    /// A child that says the next of `scripts` each time one is started, then nothing.
    struct Scripted {
        servant: Servant,
        dir: tempfile::TempDir,
    }

    const DEADLINE: Duration = Duration::from_millis(400);

    impl Scripted {
        fn new(scripts: &[&str]) -> Self {
            let dir = tempfile::tempdir().unwrap();
            for (number, script) in scripts.iter().enumerate() {
                put(&dir.path().join(format!("{number}")), script);
            }
            put(&dir.path().join("started"), "0");
            let script = format!(
                "cd {}; read -r ask; n=$(cat started); echo $((n + 1)) > started; echo \"$ask\" > asked$n; . ./$n",
                dir.path().display()
            );
            let command = ChildCommand {
                name: "sh".to_owned(),
                program: "/bin/sh".into(),
                arguments: vec!["-c".to_owned(), script],
                deadline: DEADLINE,
            };
            Self { servant: Servant::new(&command, &Host::at("/").unwrap()), dir }
        }

        fn started(&self) -> String {
            std::fs::read_to_string(self.dir.path().join("started")).unwrap().trim().to_owned()
        }

        fn asked(&self, number: u32) -> Request {
            let text = std::fs::read_to_string(self.dir.path().join(format!("asked{number}"))).unwrap();
            let Ask::Holders(request) = serde_json::from_str(&text).unwrap() else { panic!("{text}") };
            request
        }
    }

    #[expect(clippy::disallowed_methods, reason = "a test's own file")]
    fn put(path: &std::path::Path, text: &str) {
        std::fs::write(path, text).unwrap();
    }

    fn nodes() -> BTreeSet<String> {
        BTreeSet::from(["/dev/a".to_owned(), "/dev/b".to_owned()])
    }

    fn say(lines: &[Seen], then: &str) -> String {
        let text: String = lines
            .iter()
            .map(|seen| serde_json::to_string(&Answer::Seen(seen.clone())).unwrap() + "\n")
            .collect();
        format!("cat <<'X'\n{text}X\n{then}\n")
    }

    fn pids(found: &Holders) -> Vec<Option<u32>> {
        found.opaque.iter().map(|opaque| opaque.pid).collect()
    }

    #[test]
    fn a_process_that_hangs_costs_one_child_and_is_not_looked_into_again() {
        let first =
            say(&[Seen::Process(1), Seen::Links(BTreeSet::new()), Seen::Process(7)], "sleep 3; exec yes");
        let rest = [Seen::Process(8), Seen::Links(nodes()), Seen::Node("/dev/b".to_owned()), Seen::AllNodes];
        let second = say(&[&rest[..], &[Seen::Command("vmm".to_owned()), Seen::End]].concat(), "read -r ask");
        let again = [Seen::Process(7), Seen::Doubt { reason: "stuck".to_owned(), may_hold: None }, Seen::End];
        let mut child = Scripted::new(&[&first, &second, &say(&again, ""), &say(&[Seen::End], "")]);
        let mut scan = HolderScan::default();

        let found = scan.scan(&mut child.servant, nodes());
        assert_eq!((pids(&found), found.of("/dev/b").count()), (vec![Some(7)], 1));
        assert_eq!(child.asked(0), Request { nodes: nodes(), ..Request::default() });
        assert_eq!(child.asked(1).after, Some(7));

        // The child that was stopped by nothing is asked no more here; the stuck one is known to the next.
        child.servant.dismiss();
        let begun = Instant::now();
        let found = scan.scan(&mut child.servant, nodes());
        assert_eq!((pids(&found), child.started().as_str()), (vec![Some(7)], "3"));
        assert!(begun.elapsed() < DEADLINE, "{:?}", begun.elapsed());
        assert_eq!(child.asked(2).depths, BTreeMap::from([(7, Depth::Nothing)]));

        // When it has come back, the process is one like the others. It has much to say yet, that nobody reads.
        while !scan.stuck.values_mut().flatten().all(|(_, child)| child.ended()) {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(scan.scan(&mut child.servant, nodes()), Holders::default());
        assert_eq!(child.asked(3).depths, BTreeMap::new());
    }

    #[test]
    fn a_child_that_comes_to_no_process_leaves_all_unknown_and_is_not_joined_by_another() {
        let mut child = Scripted::new(&["exec sleep 1", &say(&[Seen::End], "")]);
        let mut scan = HolderScan::default();
        for _ in 0..2 {
            let found = scan.scan(&mut child.servant, nodes());
            assert_eq!((pids(&found), child.started().as_str()), (vec![None], "1"));
            assert!(found.opaque.iter().all(|opaque| opaque.may_hold.is_none()));
        }
        while !scan.blind.as_mut().unwrap().ended() {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(scan.scan(&mut child.servant, nodes()), Holders::default());
    }

    #[test]
    fn a_child_that_ends_is_replaced_once() {
        let begun = say(&[Seen::Process(1), Seen::Process(7)], "exit 1");
        let mut child = Scripted::new(&[&begun, &say(&[Seen::Process(7), Seen::End], "")]);
        assert_eq!(HolderScan::default().scan(&mut child.servant, nodes()), Holders::default());
        assert_eq!(child.asked(1).after, Some(1));

        let mut child = Scripted::new(&[&begun, &begun]);
        let found = HolderScan::default().scan(&mut child.servant, nodes());
        assert_eq!((pids(&found), child.started().as_str()), (vec![None], "2"));

        let foreign = format!("echo '{}'", serde_json::to_string(&Answer::Done).unwrap());
        let found = HolderScan::default().scan(&mut Scripted::new(&[&foreign, &foreign]).servant, nodes());
        assert_eq!(pids(&found), [None]);

        child.servant.command.program = "/nonexistent".into();
        let found = HolderScan::default().scan(&mut child.servant, nodes());
        assert!(found.opaque.iter().all(|opaque| opaque.reason.contains("/nonexistent")), "{found:?}");
        assert_eq!(pids(&found), [None]);
    }
}
