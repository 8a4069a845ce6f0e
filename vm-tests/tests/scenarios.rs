//! One test per scenario, each in a machine of its own; the lab is prepared once for all.

#![allow(clippy::panic, clippy::expect_used, reason = "a test fails by a panic")]

use std::sync::OnceLock;

use vm_tests::host::lab::{Lab, chain};
use vm_tests::scenarios;

fn run(test: &str) {
    static LAB: OnceLock<Result<Lab, String>> = OnceLock::new();
    let lab = LAB.get_or_init(|| Lab::prepare().map_err(|error| chain(&error)));
    let lab = lab.as_ref().unwrap_or_else(|why| panic!("{why}"));
    let scenario = scenarios::find(&test.replace('_', "-")).expect("a scenario of the test's name");
    let report = lab.run(scenario).unwrap_or_else(|error| panic!("{}", chain(&error)));
    if let Some(why) = report.failure() {
        panic!("{why}");
    }
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
    right_node
    agent_killed
    full_walk
}
