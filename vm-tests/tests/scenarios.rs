//! One test per scenario, each in a machine of its own; the lab is prepared once for all.

#![allow(clippy::panic, clippy::expect_used, reason = "a test fails by a panic")]

use std::sync::OnceLock;

use vm_tests::host::files;
use vm_tests::host::lab::{Lab, chain};
use vm_tests::host::vm::VmError;
use vm_tests::scenarios::{self, Scenario};

fn lab() -> &'static Lab {
    static LAB: OnceLock<Result<Lab, String>> = OnceLock::new();
    let lab = LAB.get_or_init(|| Lab::prepare().map_err(|error| chain(&error)));
    lab.as_ref().unwrap_or_else(|why| panic!("{why}"))
}

fn scenario(name: &str) -> &'static Scenario {
    scenarios::find(name).expect("a scenario of that name")
}

fn run(test: &str) {
    let report = lab().run(scenario(&test.replace('_', "-")));
    let report = report.unwrap_or_else(|error| panic!("{}", chain(&error)));
    if let Some(why) = report.failure() {
        panic!("{why}");
    }
}

#[test]
fn a_machine_whose_kernel_panics_fails_and_shows_its_console() {
    let mut vm = lab().vm(scenario("one-gpu"));
    let dir = tempfile::tempdir().expect("a temporary folder");
    vm.initramfs = dir.path().join("no-archive");
    files::write(&vm.initramfs, "this is no archive").expect("a file in it");
    let error = vm.run().expect_err("a machine without a root file system gives no result");
    assert!(matches!(error, VmError::NoResult { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("its kernel panicked") && text.contains("Unable to mount root fs"), "{text}");
}

#[test]
fn a_machine_that_takes_too_long_is_ended_and_fails() {
    // This one waits for a second after it has booted.
    let mut vm = lab().vm(scenario("lab-kernel-asks-the-holder"));
    vm.seconds = 1;
    let error = vm.run().expect_err("a machine that is ended early gives no result");
    assert!(matches!(error, VmError::Timeout { .. }), "{error}");
}

macro_rules! scenario_tests {
    ($($name:ident)*) => {
        $(#[test] fn $name() { run(stringify!($name)); })*

        #[test]
        fn every_scenario_has_a_test() {
            let tests = [$(stringify!($name)),*].map(|name| name.replace('_', "-"));
            let names: Vec<&str> = scenarios::ALL.iter().map(|s| s.name).collect();
            assert_eq!(tests.as_slice(), names);
        }
    };
}

scenario_tests! {
    lab_vmm_takes_a_group
    lab_host_driver_spoils_a_group
    lab_kernel_asks_the_holder
    one_gpu
    four_function_card
    foreign_nic
    held_group
    no_iommu
    modules_loaded
    right_node
    agent_killed
    blocked_unbind
    full_walk
}
