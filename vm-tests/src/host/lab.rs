//! The whole lab: everything fetched and built once, then a machine per scenario.

use std::path::PathBuf;

use super::apt::{self, AptError};
use super::cache::{Cache, CacheError};
use super::initramfs::{self, InitramfsError};
use super::kernel::{Kernel, KernelError};
use super::kmod::{self, KmodError};
use super::product::{self, ProductError};
use super::qemu::{Qemu, QemuError};
use super::vm::{Report, Vm, VmError};
use crate::scenarios::Scenario;

/// The lab cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// The cache failed.
    #[error("the lab has no cache")]
    Cache(#[from] CacheError),
    /// A tool is missing.
    #[error("the lab lacks a tool")]
    Apt(#[from] AptError),
    /// No QEMU.
    #[error("the lab has no QEMU")]
    Qemu(#[from] QemuError),
    /// No kernel.
    #[error("the lab has no kernel")]
    Kernel(#[from] KernelError),
    /// No modules.
    #[error("the lab has no kernel modules of its own")]
    Kmod(#[from] KmodError),
    /// No program under test.
    #[error("the lab has nothing to test")]
    Product(#[from] ProductError),
    /// No root file system.
    #[error("the lab's guest has no root file system")]
    Initramfs(#[from] InitramfsError),
    /// No temporary folder.
    #[error("the lab has no temporary folder. Is TMPDIR writable?")]
    Temporary(#[source] std::io::Error),
    /// A machine failed.
    #[error("the lab's machine")]
    Vm(#[from] VmError),
}

/// What does not change with the program under test, all of it cached.
#[derive(Debug)]
pub struct Ground {
    /// QEMU.
    pub qemu: Qemu,
    /// The kernel.
    pub kernel: Kernel,
    /// The folder of our own kernel modules.
    pub kmods: PathBuf,
}

impl Ground {
    /// Fetches and builds whatever the cache lacks.
    pub fn prepare() -> Result<Self, LabError> {
        let cache = Cache::open()?;
        let kernel = Kernel::fetch(&cache)?;
        let kmods = kmod::build(&cache, &kernel)?;
        let qemu = Qemu::find_or_fetch(&cache)?;
        Ok(Self { qemu, kernel, kmods })
    }
}

/// A lab that is ready to boot machines.
#[derive(Debug)]
pub struct Lab {
    ground: Ground,
    initramfs: PathBuf,
    /// Holds the initramfs; gone with the lab.
    _dir: tempfile::TempDir,
}

impl Lab {
    /// Prepares the ground, builds the programs and packs them for the guest.
    pub fn prepare() -> Result<Self, LabError> {
        let ground = Ground::prepare()?;
        apt::need("strip", "binutils")?;
        let product = product::build()?;
        let dir = tempfile::tempdir().map_err(LabError::Temporary)?;
        let initramfs = dir.path().join("initramfs.cpio");
        initramfs::build(&ground.kernel, &ground.kmods, &product, &initramfs)?;
        Ok(Self { ground, initramfs, _dir: dir })
    }

    /// The machine of a scenario, ready to run.
    #[must_use]
    pub fn vm(&self, scenario: &Scenario) -> Vm<'_> {
        Vm {
            qemu: &self.ground.qemu,
            vmlinux: self.ground.kernel.vmlinux.clone(),
            initramfs: self.initramfs.clone(),
            node: scenario.node,
            scenario: scenario.name,
            seconds: scenario.seconds,
        }
    }

    /// Runs one scenario in a machine of its own.
    pub fn run(&self, scenario: &Scenario) -> Result<Report, LabError> {
        Ok(self.vm(scenario).run()?)
    }
}

/// An error with all its causes, outermost first.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |e| e.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
