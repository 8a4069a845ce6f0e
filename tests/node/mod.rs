//! A simulated node and the vfiod binary on it, for the tests beside this folder.
#![allow(dead_code, reason = "each test file uses a part of it")]

pub mod stage;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    process::{Command, Output},
};

use decide::inventory::Inventory;
use serde_json::Value;
use tempfile::TempDir;
use vfio::{
    child::Reader,
    pci::{self, Address},
    sim::{Profile, Simulation, profile::ProfileFunction},
};

/// Function by function: driver and override.
pub type Bindings = BTreeMap<Address, (Option<String>, Option<String>)>;

pub struct Node {
    pub dir: TempDir,
    pub sim: Simulation,
}

/// What a run of vfiod came to.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }
}

/// A temporary directory in memory where there is such a place: trees are small files, and journals are fsynced.
pub fn scratch() -> TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap()
}

pub fn vfiod() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_vfiod"))
}

/// A look at the node, taken in this process.
pub fn look_at(node: &Node) -> Inventory {
    let host = node.sim.host();
    vfiod::observe::observe(host, &mut Reader::here(host), &BTreeSet::new()).unwrap()
}

pub fn address(text: &str) -> Address {
    text.parse().unwrap()
}

impl Node {
    pub fn new(profile: &Profile) -> Self {
        let dir = scratch();
        let sim = Simulation::create(dir.path(), profile).unwrap();
        Self { dir, sim }
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(vfiod());
        command.args(arguments).arg("--root").arg(self.dir.path());
        command
    }

    pub fn run(&self, arguments: &[&str]) -> Ran {
        let Output { status, stdout, stderr } = self.command(arguments).output().unwrap();
        Ran {
            code: status.code(),
            stdout: String::from_utf8(stdout).unwrap(),
            stderr: String::from_utf8(stderr).unwrap(),
        }
    }

    pub fn bindings(&self) -> Bindings {
        let functions = pci::functions(self.sim.host()).unwrap();
        assert!(functions.unreadable.is_empty(), "{functions:?}");
        functions.known.into_iter().map(|(a, f)| (a, (f.driver, f.driver_override))).collect()
    }

    pub fn driver(&self, address: Address) -> Option<String> {
        self.bindings()[&address].0.clone()
    }

    pub fn journal(&self) -> Value {
        let text = std::fs::read(self.dir.path().join("var/lib/vfiod/journal.json"));
        text.map_or(Value::Null, |text| serde_json::from_slice(&text).unwrap())
    }

    pub fn writes(&self) -> usize {
        self.sim.writes().unwrap().len()
    }
}

pub fn function(text: &str, device: u16, class: u32, driver: Option<&str>, group: u32) -> ProfileFunction {
    ProfileFunction {
        driver: driver.map(str::to_owned),
        group: Some(group),
        numa: 0,
        ..ProfileFunction::new(address(text), 0x10de, device, class)
    }
}

/// Four groups: two GPUs, an NVSwitch, and a card of four functions one of which is driverless.
pub fn four_groups() -> Profile {
    let mut profile = Profile::four_function_card();
    profile.name = "four-groups".to_owned();
    profile.functions.extend([
        function("0000:17:00.0", 0x2236, 0x03_02_00, Some("nvidia"), 25),
        function("0000:65:00.0", 0x2236, 0x03_02_00, None, 60),
        function("0000:05:00.0", 0x22a3, 0x06_80_00, Some("nvidia-nvswitch"), 86),
    ]);
    profile.functions[3].driver = None;
    profile
}
