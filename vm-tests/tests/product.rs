//! The product is built without the simulation: a plain tree, such as a support bundle, is read, and nothing is written to it.

#![allow(clippy::panic, clippy::expect_used, reason = "a test fails by a panic")]

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::OnceLock,
    time::{Duration, Instant},
};

use serde_json::Value;
use vfio::sim::{Profile, Simulation};
use vm_tests::host::lab::chain;
use vm_tests::host::product;

/// How long an agent may take to say how it stands.
const PATIENCE: Duration = Duration::from_secs(20);

fn vfiod() -> &'static Path {
    static VFIOD: OnceLock<PathBuf> = OnceLock::new();
    VFIOD.get_or_init(|| product::vfiod().map_err(|error| chain(&error)).expect("the product"))
}

fn run(arguments: &[&str], root: &Path) -> Output {
    Command::new(vfiod()).args(arguments).arg("--root").arg(root).output().expect("vfiod starts")
}

fn json(arguments: &[&str], root: &Path) -> Value {
    let output = run(arguments, root);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{arguments:?}: {output:?}"))
}

/// A node, and all that its kernel shows.
fn node() -> (tempfile::TempDir, BTreeMap<PathBuf, String>) {
    let dir = tempfile::tempdir().expect("a temporary folder");
    Simulation::create(dir.path(), &Profile::four_function_card()).expect("a node in it");
    let shown = shown(dir.path());
    (dir, shown)
}

/// Every file and link below a root, but for the directories that vfiod itself keeps there.
fn shown(root: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut dirs = vec![root.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).expect("a readable folder") {
            let path = entry.expect("an entry").path();
            let own = ["var", "run"].map(OsStr::new);
            if dir == root && path.file_name().is_some_and(|name| own.contains(&name)) {
                continue;
            }
            if let Ok(target) = fs::read_link(&path) {
                found.insert(path, target.to_string_lossy().into_owned());
            } else if path.is_dir() {
                dirs.push(path);
            } else {
                let content = fs::read(&path).expect("a readable file");
                found.insert(path, String::from_utf8_lossy(&content).into_owned());
            }
        }
    }
    found
}

/// An agent, ended with its test.
struct Agent(Child);

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_plain_tree_is_read() {
    let (dir, before) = node();
    let inspected = json(&["inspect", "-o", "json"], dir.path());
    assert_eq!(inspected["functions"].as_array().map(Vec::len), Some(4), "{inspected}");
    let planned = json(&["plan", "-o", "json"], dir.path());
    assert_eq!(planned["groups"][0]["verdict"], "move", "{planned}");
    assert_eq!(shown(dir.path()), before);
}

#[test]
fn a_plain_tree_is_not_written_to() {
    let (dir, before) = node();
    let output = run(&["bind", "--all"], dir.path());
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(text.contains("no simulated kernel") && text.contains("--features simulation"), "{text}");
    assert_eq!(shown(dir.path()), before);
}

#[test]
fn an_agent_on_a_plain_tree_says_that_nothing_can_be_written() {
    let (dir, before) = node();
    let agent = Command::new(vfiod())
        .args(["agent", "--workload-type", "vm-passthrough", "--no-kubernetes", "--root"])
        .arg(dir.path())
        .stderr(Stdio::null())
        .spawn();
    let _agent = Agent(agent.expect("an agent"));
    let until = Instant::now() + PATIENCE;
    loop {
        let output = run(&["status", "-o", "json"], dir.path());
        let status: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let reasons = status["groups"][0]["reasons"].as_array().cloned().unwrap_or_default();
        if reasons.iter().any(|reason| reason["code"] == "NoSimulation") {
            break;
        }
        assert!(Instant::now() < until, "{output:?}");
        std::thread::sleep(PATIENCE / 200);
    }
    assert_eq!(shown(dir.path()), before);
}

#[test]
fn there_is_no_demo_and_whoever_asks_for_it_is_told_how_to_get_it() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let target = dir.path().join("node");
    let laid = Command::new(vfiod()).args(["demo", "--lay"]).arg(&target).output().expect("vfiod starts");
    let text = String::from_utf8_lossy(&laid.stderr);
    assert_eq!(laid.status.code(), Some(1), "{laid:?}");
    assert!(text.contains("--features simulation"), "{text}");
    assert!(!target.exists());
    let help = Command::new(vfiod()).arg("--help").output().expect("vfiod starts");
    assert!(!String::from_utf8_lossy(&help.stdout).contains("demo"), "{help:?}");
}
