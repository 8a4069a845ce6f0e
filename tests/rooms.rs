//! The arrows of docs/architecture.md hold: which crate may know which, which room of the agent which, and no two files each
//! other. Read from manifests and from `use` lines.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "test code")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// What a manifest's `[dependencies]` name.
fn dependencies(manifest: &str) -> BTreeSet<String> {
    let text = fs::read_to_string(root().join(manifest)).unwrap();
    let table = text.split("\n[dependencies]\n").nth(1).unwrap().split("\n[").next().unwrap();
    let names = table.lines().filter_map(|line| line.split(['.', ' ', '=']).next());
    names.filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

#[test]
fn crates_know_only_those_below_them() {
    let ours = |manifest: &str| {
        let known = dependencies(manifest);
        let ours = ["decide", "reason", "vfio", "vfiod"].into_iter().filter(|name| known.contains(*name));
        ours.collect::<Vec<_>>()
    };
    assert_eq!(ours("reason/Cargo.toml"), [""; 0]);
    assert_eq!(ours("vfio/Cargo.toml"), ["reason"]);
    assert_eq!(ours("decide/Cargo.toml"), ["reason", "vfio"]);
    assert_eq!(ours("Cargo.toml"), ["decide", "reason", "vfio"]);
}

/// What is decided depends on nothing that runs, serves or speaks.
#[test]
fn what_is_decided_is_pure() {
    let pure = ["pci-ids", "reason", "serde", "thiserror", "uuid", "vfio"].map(str::to_owned);
    assert_eq!(dependencies("decide/Cargo.toml"), pure.into());
    for (file, text) in files(&root().join("decide/src")) {
        for reach in
            ["std::fs", "std::env", "std::process", "std::net", "std::thread", "std::time::Instant", "fs::"]
        {
            let lines =
                code(&text).lines().filter(|line| line.contains(reach)).collect::<Vec<_>>().join("\n");
            assert!(lines.is_empty(), "{}: {lines}", file.display());
        }
        // Of the library it takes what the kernel said, and nothing that asks it.
        for asks in ["vfio::host", "vfio::child", "vfio::sim", "holders::scan"] {
            assert!(!code(&text).contains(asks), "{}: {asks}", file.display());
        }
    }
    for (file, text) in files(&root().join("vfio/src")).into_iter().chain(files(&root().join("decide/src"))) {
        for async_ in ["tokio", "tonic", "kube::"] {
            let told = code(&text)
                .lines()
                .any(|line| line.trim_start().starts_with("use ") && line.contains(async_));
            assert!(!told, "{}: {async_}", file.display());
        }
    }
}

/// The Rust files below a directory, by their path from there, with their text.
fn files(dir: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut dirs = vec![dir.to_owned()];
    while let Some(here) = dirs.pop() {
        for entry in fs::read_dir(here).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                found.insert(path.strip_prefix(dir).unwrap().to_owned(), text);
            }
        }
    }
    found
}

/// A file's text without its tests and comments.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or(text);
    let plain = |line: &&str| !line.trim_start().starts_with("//");
    text.lines().filter(plain).map(|line| format!("{line}\n")).collect()
}

/// A file as the module that it is: `agent/pass.rs` and `agent/mod.rs` are `agent::pass` and `agent`.
fn module(file: &Path) -> Vec<String> {
    let mut parts: Vec<String> =
        file.with_extension("").iter().map(|part| part.to_string_lossy().into()).collect();
    if matches!(parts.last().map(String::as_str), Some("mod" | "lib" | "main")) {
        parts.pop();
    }
    parts
}

/// The paths of a `use` tree, each as its segments.
fn expand(tree: &str, before: &[String], paths: &mut Vec<Vec<String>>) {
    let mut depth = 0_usize;
    let mut start = 0;
    for (at, c) in tree.char_indices().chain([(tree.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                let part = tree[start..at].trim();
                start = at + 1;
                if part.is_empty() {
                    continue;
                }
                let (head, inner) = match part.split_once('{') {
                    Some((head, inner)) => (head, inner.rsplit_once('}').map(|(inner, _)| inner)),
                    None => (part, None),
                };
                let segments = head.split("::").map(|segment| segment.split(" as ").next().unwrap().trim());
                let mut path = before.to_vec();
                path.extend(segments.filter(|segment| !segment.is_empty()).map(str::to_owned));
                match inner {
                    Some(inner) => expand(inner, &path, paths),
                    None => paths.push(path),
                }
            }
            _ => {}
        }
    }
}

/// The trees of all `use` declarations.
fn use_trees(text: &str) -> Vec<String> {
    let mut trees = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let line = line.trim_start();
        let visible = line.strip_prefix("pub(crate) ").or_else(|| line.strip_prefix("pub(super) "));
        let line = visible.or_else(|| line.strip_prefix("pub ")).unwrap_or(line);
        let Some(begun) = line.strip_prefix("use ") else { continue };
        let mut tree = begun.to_owned();
        while !tree.contains(';') {
            tree.push_str(lines.next().unwrap());
        }
        trees.push(tree.split(';').next().unwrap().to_owned());
    }
    trees
}

/// Which other files of its crate each file names in its `use` lines; a parent and its children do not count.
fn uses(dir: &Path) -> BTreeMap<Vec<String>, BTreeSet<Vec<String>>> {
    let files = files(dir);
    let modules: BTreeSet<Vec<String>> = files.keys().map(|file| module(file)).collect();
    let mut all = BTreeMap::new();
    for (file, text) in &files {
        let here = module(file);
        let mut found = BTreeSet::new();
        for tree in use_trees(&code(text)) {
            let mut paths = Vec::new();
            expand(&tree, &[], &mut paths);
            for path in paths {
                let mut named = match path[0].as_str() {
                    "crate" => Vec::new(),
                    "self" => here.clone(),
                    "super" => here[..here.len().saturating_sub(1)].to_vec(),
                    _ => continue,
                };
                named.extend(path[1..].iter().cloned());
                while !named.is_empty() && !modules.contains(&named) {
                    named.pop();
                }
                if !named.is_empty() && !named.starts_with(&here) && !here.starts_with(&named) {
                    found.insert(named);
                }
            }
        }
        all.insert(here, found);
    }
    all
}

/// A circle of `arrows`, if there is one.
fn circle<T: Ord + Clone>(arrows: &BTreeMap<T, BTreeSet<T>>) -> Option<Vec<T>> {
    fn walk<T: Ord + Clone>(
        at: &T,
        arrows: &BTreeMap<T, BTreeSet<T>>,
        way: &mut Vec<T>,
        done: &mut BTreeSet<T>,
    ) -> Option<Vec<T>> {
        if let Some(start) = way.iter().position(|step| step == at) {
            return Some(way[start..].to_vec());
        }
        if !done.insert(at.clone()) {
            return None;
        }
        way.push(at.clone());
        let found = arrows.get(at).into_iter().flatten().find_map(|next| walk(next, arrows, way, done));
        way.pop();
        found
    }
    let mut done = BTreeSet::new();
    arrows.keys().find_map(|at| walk(at, arrows, &mut Vec::new(), &mut done))
}

#[test]
fn no_two_files_need_each_other() {
    for dir in ["src", "decide/src", "vfio/src", "reason/src"] {
        let arrows = uses(&root().join(dir));
        assert!(
            dir == "reason/src" || arrows.values().any(|found| !found.is_empty()),
            "{dir}: nothing was read"
        );
        assert_eq!(circle(&arrows), None, "{dir}");
    }
}

/// The rooms of the agent, each with those that it may know.
const ROOMS: &[(&str, &[&str])] = &[
    ("atomic_file", &[]),
    ("uds", &[]),
    ("execute", &[]),
    ("observe", &[]),
    ("node_file", &[]),
    ("config", &[]),
    ("lock", &["atomic_file"]),
    ("journal", &["atomic_file", "execute"]),
    ("transaction", &["execute", "journal"]),
    ("kubelet", &["uds"]),
    ("pods", &["kubelet"]),
    ("device_plugin", &["kubelet", "uds"]),
    ("standin", &["kubelet", "uds"]),
    ("status", &["device_plugin"]),
    (
        "agent",
        &["device_plugin", "execute", "journal", "kubelet", "observe", "pods", "status", "transaction"],
    ),
    (
        "cli",
        &[
            "agent",
            "config",
            "device_plugin",
            "execute",
            "journal",
            "kubelet",
            "lock",
            "node_file",
            "observe",
            "pods",
            "standin",
            "status",
            "transaction",
        ],
    ),
];

#[test]
fn rooms_know_only_those_that_they_may() {
    let mut arrows: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (from, to) in uses(&root().join("src")) {
        let Some(room) = from.first() else { continue };
        let others = to.iter().map(|path| path[0].clone()).filter(|other| other != room);
        arrows.entry(room.clone()).or_default().extend(others);
    }
    let allowed = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    let expected: BTreeMap<String, BTreeSet<String>> =
        ROOMS.iter().map(|(room, others)| ((*room).to_owned(), allowed(others))).collect();
    assert_eq!(arrows, expected);
    assert_eq!(circle(&arrows), None);
}

/// Every error has a code and says whether trying again helps, and no error's text repeats its source.
#[test]
fn every_error_is_coded() {
    let (mut errors, mut coded) = (BTreeSet::new(), BTreeSet::new());
    for dir in ["src", "decide/src", "vfio/src"] {
        for text in files(&root().join(dir)).values() {
            let text = code(text);
            for derived in text.split("thiserror::Error").skip(1) {
                let item = derived.lines().find_map(|line| {
                    let line = line.split_once("enum ").or_else(|| line.split_once("struct "));
                    line.filter(|(before, _)| before.starts_with("pub")).map(|(_, name)| name)
                });
                let name = item.unwrap().split(|c: char| !c.is_alphanumeric()).next().unwrap();
                errors.insert(name.to_owned());
                let head = derived.split("\n}").next().unwrap();
                assert!(
                    !head.contains("{source}") && !head.contains(": {0}\")]"),
                    "{name} says its source itself"
                );
            }
            let named = text.split("impl Coded for ").skip(1);
            coded.extend(named.map(|rest| rest.split(' ').next().unwrap().to_owned()));
        }
    }
    assert!(errors.len() > 20, "{errors:?}");
    assert_eq!(errors.difference(&coded).collect::<Vec<_>>(), [&String::new(); 0]);
}

#[test]
fn a_circle_is_found() {
    let arrows = |pairs: &[(u8, u8)]| {
        let mut all: BTreeMap<u8, BTreeSet<u8>> = BTreeMap::new();
        for (from, to) in pairs {
            all.entry(*from).or_default().insert(*to);
        }
        all
    };
    assert_eq!(circle(&arrows(&[(1, 2), (2, 3), (1, 3), (3, 4)])), None);
    assert_eq!(circle(&arrows(&[(1, 2), (2, 3), (3, 2)])), Some(vec![2, 3]));
}
