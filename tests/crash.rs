//! Never-event 5: a crash after any single write leaves a state from which a restart converges, and no prior driver that
//! nobody remembers.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "test code")]

mod node;

use std::{sync::Mutex, thread};

use node::{Bindings, Node, four_groups};
use serde_json::Value;
use vfio::sim::{Effect, Fault, Moment};

const CRASHES: [(Moment, Effect); 4] = [
    (Moment::Before, Effect::KillBoth),
    (Moment::After, Effect::KillAgent),
    (Moment::After, Effect::KillChild),
    (Moment::After, Effect::KillBoth),
];

/// How many writes a switch of the node takes when nothing goes wrong.
fn writes_of(direction: &str) -> usize {
    let node = Node::new(&four_groups());
    if direction == "unbind" {
        assert_eq!(node.run(&["bind", "--all"]).code, Some(0));
    }
    let before = node.writes();
    assert_eq!(node.run(&[direction, "--all"]).code, Some(0));
    node.writes() - before
}

/// The driverless GPU of the node is bound by a probe on its way back: nvidia is loaded, and the kernel gives it a driver.
fn home(at_boot: &Bindings) -> Bindings {
    let mut home = at_boot.clone();
    home.get_mut(&node::address("0000:65:00.0")).unwrap().0 = Some("nvidia".to_owned());
    home
}

fn assert_remembered(node: &Node, at_boot: &Bindings, context: &str) {
    let journal = node.journal();
    for (address, now) in node.bindings() {
        let before = &at_boot[&address];
        if now == *before {
            continue;
        }
        let expected = match &before.0 {
            Some(driver) => serde_json::json!({ "driver": driver }),
            None => Value::from("none"),
        };
        let home_again = now == home(at_boot)[&address];
        let remembered = &journal["priors"][address.to_string()]["was"];
        assert!(
            *remembered == expected || home_again,
            "{context}: {address} is {now:?}, journal has {remembered}"
        );
    }
}

fn crash(direction: &str, at: usize, moment: Moment, effect: Effect) {
    let context = format!("{direction}, write {at}, {moment:?}, {effect:?}");
    let node = Node::new(&four_groups());
    let at_boot = node.bindings();
    if direction == "unbind" {
        assert_eq!(node.run(&["bind", "--all"]).code, Some(0), "{context}");
    }
    let first = node.writes();
    node.sim.set_faults(&[Fault::at(first + at, moment, effect)]).unwrap();
    let crashed = node.run(&[direction, "--all"]);
    assert_ne!(crashed.code, Some(0), "{context}: the fault did not strike: {crashed:?}");
    assert_remembered(&node, &at_boot, &context);

    let again = node.run(&[direction, "--all"]);
    assert_eq!(again.code, Some(0), "{context}: {again:?}");
    if direction == "bind" {
        let ours = |driver: &Option<String>| driver.as_deref() == Some("vfio-pci");
        assert!(node.bindings().values().all(|(driver, _)| ours(driver)), "{context}: {:?}", node.bindings());
        assert_remembered(&node, &at_boot, &context);
        let back = node.run(&["unbind", "--all"]);
        assert_eq!(back.code, Some(0), "{context}: {back:?}");
    }
    assert_eq!(node.bindings(), home(&at_boot), "{context}");
    let settled = node.writes();
    assert_eq!(node.run(&["unbind", "--all"]).code, Some(0), "{context}");
    assert_eq!(node.writes(), settled, "{context}: a node that is right was written to");
    assert_eq!(node.journal()["priors"], serde_json::json!({}), "{context}");
}

fn crash_everywhere(direction: &str) {
    let writes = writes_of(direction);
    let cases: Vec<_> =
        (1..=writes).flat_map(|at| CRASHES.map(|(moment, effect)| (at, moment, effect))).collect();
    println!("{direction}: {writes} writes, {} crashes", cases.len());
    let queue = Mutex::new(cases);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                loop {
                    let Some((at, moment, effect)) = queue.lock().unwrap().pop() else { break };
                    crash(direction, at, moment, effect);
                }
            });
        }
    });
}

#[test]
fn a_crash_at_any_write_on_the_way_to_vfio_loses_nothing() {
    crash_everywhere("bind");
}

#[test]
fn a_crash_at_any_write_on_the_way_back_loses_nothing() {
    crash_everywhere("unbind");
}
