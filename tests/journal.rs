//! Journals of every version are read and carried over. `data/journals` keeps one of each, as it was written then.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "test code")]

mod node;

use std::{collections::BTreeSet, fs, path::Path};

use decide::{
    prior::{Prior, Remembered},
    unit::UnitId,
    usage::{Hold, HoldBy},
};
use node::{Node, address};
use serde_json::{Value, json};
use vfio::{pci::Address, sim::Profile};
use vfiod::journal::{Journal, Store};

const BOOT: &str = "5137ab1e-0000-4000-8000-000000000001";

/// With this set, the golden file of the present version is written: `UPDATE_JOURNAL=1 cargo test --test journal`.
const UPDATE: &str = "UPDATE_JOURNAL";

fn golden(version: u32) -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/journals/v{version}.json")))
        .unwrap()
}

fn load(bytes: &[u8]) -> Result<Journal, String> {
    let dir = node::scratch();
    vfiod::atomic_file::replace(&dir.path().join("journal.json"), bytes, 0o600).unwrap();
    Store::new(dir.path()).load(BOOT).map_err(|error| reason::chain(&error))
}

fn unit(functions: &[&str]) -> UnitId {
    UnitId(functions.iter().map(|text| address(text)).collect())
}

#[test]
fn version_1_is_carried_over_whole() {
    let journal = load(&golden(1)).unwrap();
    let was = |text: &str| journal.priors[&address(text)].clone();
    let driver = |name: &str| Prior::Driver(name.to_owned());
    for (function, prior) in [
        ("0000:05:00.0", driver("nvidia-nvswitch")),
        ("0000:17:00.0", driver("nvidia")),
        ("0000:52:00.0", driver("nvidia")),
        ("0000:52:00.1", Prior::None),
        ("0000:52:00.2", Prior::Unknown),
        ("0000:52:00.3", Prior::AlreadyVfio { driver_override: Some("vfio-pci".to_owned()) }),
        ("0000:65:00.0", Prior::AlreadyVfio { driver_override: None }),
    ] {
        assert_eq!(was(function), Remembered { device: None, was: prior }, "{function}");
    }
    assert_eq!(journal.priors.len(), 7);
    let hold = |answered_at, shown| {
        let resource = "nvidia.com/GA102GL_A10".to_owned();
        Hold { resource, by: HoldBy::Allocate, answered_at, shown }
    };
    assert_eq!(journal.holds[&address("0000:17:00.0").into()], hold(77, true));
    assert_eq!(journal.holds[&address("0000:65:00.0").into()], hold(99, false));
    assert_eq!(journal.pending.len(), 4);
    // Each write in flight is still known by the function that it was made to, and one without any may be about all.
    for function in ["0000:17:00.0", "0000:52:00.1", "0000:05:00.0"] {
        assert!(journal.waits(&unit(&[function])).is_some(), "{function}");
    }
    let load = journal.pending.iter().find(|pending| pending.unit.0 == BTreeSet::<Address>::new()).unwrap();
    assert!(load.concerns(&unit(&["0000:99:00.0"])) && load.write.to_string().contains("vfio_pci"));
}

/// What is read is what was written, in the present version too.
#[test]
fn version_2_is_read_as_it_was_written() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/journals/v2.json");
    let mut journal = load(&golden(1)).unwrap();
    for (address, remembered) in &mut journal.priors {
        // One whose device was not written down stays so.
        if *address != node::address("0000:05:00.0") {
            remembered.device = serde_json::from_value(json!({
                "vendor": "10de", "device": "1eb1", "subsystem_vendor": "10de", "subsystem_device": "129f", "class": "030000",
            }))
            .unwrap();
        }
    }
    if std::env::var_os(UPDATE).is_some() {
        Store::new(path.parent().unwrap()).save(&journal).unwrap();
        vfiod::atomic_file::replace(&path, &fs::read(path.with_file_name("journal.json")).unwrap(), 0o644)
            .unwrap();
        fs::remove_file(path.with_file_name("journal.json")).unwrap();
    }
    assert_eq!(load(&golden(2)).unwrap(), journal);
}

#[test]
fn a_version_that_is_not_known_is_refused_with_what_to_do() {
    for (text, said) in [
        (json!({ "version": 3 }).to_string(), "its version is 3"),
        (json!({ "version": 2, "boot_id": "x" }).to_string(), "missing field"),
        ("[]".to_owned(), "invalid length 0"),
        (String::new(), "EOF"),
    ] {
        let error = load(text.as_bytes()).unwrap_err();
        assert!(error.contains(said) && error.contains("Move the file away"), "{error}");
    }
}

/// A node that the landed version bound is given back by this one.
#[test]
fn a_node_bound_by_the_version_before_is_given_back() {
    // All on drivers: a GPU that had none may come back to one.
    let node = Node::new(&Profile::four_function_card());
    let at_boot = node.bindings();
    assert_eq!(node.run(&["bind", "--all"]).code, Some(0));
    let path = node.dir.path().join("var/lib/vfiod/journal.json");
    let new: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let priors: serde_json::Map<String, Value> = new["priors"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(address, remembered)| (address.clone(), remembered["was"].clone()))
        .collect();
    let old =
        json!({ "version": 1, "boot_id": new["boot_id"], "priors": priors, "pending": {}, "holds": {} });
    vfiod::atomic_file::replace(&path, old.to_string().as_bytes(), 0o600).unwrap();
    assert_eq!(node.run(&["unbind", "--all"]).code, Some(0));
    assert_eq!(node.bindings(), at_boot);
    assert_eq!((&node.journal()["version"], &node.journal()["priors"]), (&json!(2), &json!({})));
}
