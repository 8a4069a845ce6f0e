//! What vfiod does on each built-in node profile: the plan, in its own words, and the way there and back.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "test code")]

mod node;

use std::{fs, path::Path, process::Command};

use node::{Node, scratch, vfiod};
use vfio::sim::Profile;

/// With this set, the plans are written down instead of compared: `UPDATE_PLANS=1 cargo test --test profiles`.
const UPDATE: &str = "UPDATE_PLANS";

#[test]
fn the_plan_of_every_profile_is_as_written_down() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/plans");
    let mut wrong = Vec::new();
    let mut names = Vec::new();
    for profile in Profile::built_in() {
        let node = Node::new(&profile);
        let ran = node.run(&["plan"]);
        assert_eq!(
            ran.code,
            Some(i32::from(ran.stdout.contains(": refused\n"))),
            "{}: {ran:?}",
            profile.name
        );
        assert_eq!(node.writes(), 0);
        let path = dir.join(format!("{}.txt", profile.name));
        names.push(path.clone());
        if std::env::var_os(UPDATE).is_some() {
            #[expect(clippy::disallowed_methods, reason = "a test's own file")]
            fs::write(&path, &ran.stdout).unwrap();
        }
        let expected = fs::read_to_string(&path).unwrap_or_default();
        if ran.stdout != expected {
            wrong.push(format!(
                "{}\n--- {}\n{expected}\n+++ now\n{}",
                profile.name,
                path.display(),
                ran.stdout
            ));
        }
    }
    assert!(
        wrong.is_empty(),
        "{}\nif that is right now: {UPDATE}=1 cargo test --test profiles",
        wrong.join("\n")
    );
    names.sort();
    let mut there: Vec<_> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    there.sort();
    assert_eq!(there, names, "a plan without a profile");
}

/// Groups that are refused stay where they are; all others go to vfio, and back to the drivers that they had.
#[test]
fn every_profile_goes_to_vfio_and_comes_back() {
    for profile in Profile::built_in() {
        let node = Node::new(&profile);
        let before = node.bindings();
        let planned = node.run(&["plan", "-o", "json"]);
        let bound = node.run(&["bind", "--all", "-o", "json"]);
        assert_eq!(bound.code, planned.code, "{}: {bound:?}", profile.name);
        // Grace's GPUs have a vfio driver of their own.
        let grace = ["gb200", "gh200"].contains(&profile.name.as_str());
        let vfio = if grace { "nvgrace_gpu_vfio_pci" } else { "vfio-pci" };
        let mut moved = 0;
        for group in bound.json()["groups"].as_array().unwrap() {
            let result = group["result"].as_str().unwrap();
            let context = format!("{}: {group}", profile.name);
            assert!(["done", "refused", "unchanged"].contains(&result), "{context}");
            for function in group["functions"].as_array().unwrap() {
                let at = function.as_str().unwrap().parse().unwrap();
                match result {
                    "refused" => assert_eq!(node.bindings()[&at], before[&at], "{context}"),
                    _ => assert_eq!(node.driver(at).as_deref(), Some(vfio), "{context}"),
                }
                moved += usize::from(result == "done");
            }
        }
        let foreign = node.bindings().iter().filter(|(at, now)| before[at] != **now).count();
        assert_eq!(foreign, moved, "{}: something moved that is in no plan", profile.name);
        let unbound = node.run(&["unbind", "--all"]);
        assert_eq!(unbound.code, Some(0), "{}: {unbound:?}", profile.name);
        assert_eq!(node.bindings(), before, "{}", profile.name);
    }
}

#[test]
fn the_demo_lays_profiles_by_name_and_by_path_and_lists_them_all() {
    let dir = scratch();
    let lay = |below: &str, profile: &str| {
        let mut command = Command::new(vfiod());
        command.args(["demo", "--lay"]).arg(dir.path().join(below)).args(["--profile", profile]);
        let output = command.output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let (code, said, _) = lay("a", "hgx-h200");
    assert_eq!((code, said.contains("(hgx-h200)")), (Some(0), true), "{said}");

    let file = dir.path().join("mine.yaml");
    let text =
        "name: mine\nfunctions:\n  - {address: 0000:01:00.0, id: 10de:2236, class: 030200, group: 1}\n";
    #[expect(clippy::disallowed_methods, reason = "a test's own file")]
    fs::write(&file, text).unwrap();
    let (code, said, _) = lay("b", file.to_str().unwrap());
    assert_eq!((code, said.contains("(mine)")), (Some(0), true), "{said}");
    assert!(dir.path().join("b/sys/bus/pci/devices/0000:01:00.0/config").exists());

    let (code, _, said) = lay("c", "nosuch");
    assert_eq!(code, Some(1));
    for profile in Profile::built_in() {
        assert!(said.contains(&profile.name), "{said}");
    }
    #[expect(clippy::disallowed_methods, reason = "a test's own file")]
    fs::write(&file, text.replace("10de:2236", "A10")).unwrap();
    let (code, _, said) = lay("c", file.to_str().unwrap());
    assert_eq!(code, Some(1));
    assert!(said.contains("mine.yaml:3: id: \"A10\""), "{said}");
    assert!(!dir.path().join("c").exists(), "nothing is laid of a profile that does not fit");
}
