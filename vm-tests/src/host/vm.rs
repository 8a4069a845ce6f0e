//! One machine: booted, watched, and its result read.

use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use super::files::{self, FileError};
use super::process;
use super::qemu::Qemu;
use crate::node::{FIRST_PORT, Node};
use crate::verdict::Verdict;

/// How many of the console's last lines a failure shows.
const SHOWN: usize = 40;

/// The machine gave no result.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// A file operation failed.
    #[error("running the machine")]
    File(#[from] FileError),
    /// QEMU could not be started.
    #[error("starting QEMU under `timeout`: both must be there and runnable")]
    Start(#[source] std::io::Error),
    /// The time was up.
    #[error(
        "{scenario}: no result after {seconds} s: the guest hangs, or the machine is badly overloaded\n{console}"
    )]
    Timeout {
        /// The scenario.
        scenario: String,
        /// Seconds waited.
        seconds: u64,
        /// The console's end.
        console: String,
    },
    /// It ended without saying how the scenario went.
    #[error("{scenario}: the machine ended ({status}) without a result: {cause}\n{console}")]
    NoResult {
        /// The scenario.
        scenario: String,
        /// How QEMU ended.
        status: ExitStatus,
        /// What the console suggests.
        cause: &'static str,
        /// The console's end.
        console: String,
    },
}

/// A machine to be booted.
#[derive(Debug)]
pub struct Vm<'a> {
    /// QEMU.
    pub qemu: &'a Qemu,
    /// The kernel's ELF image.
    pub vmlinux: PathBuf,
    /// The first root file system.
    pub initramfs: PathBuf,
    /// What the machine looks like.
    pub node: Node,
    /// The scenario that the guest runs.
    pub scenario: &'static str,
    /// Seconds until it is ended.
    pub seconds: u64,
}

/// What came out of a machine.
#[derive(Debug)]
pub struct Report {
    /// How the scenario ended.
    pub verdict: Verdict,
    /// All that the console said.
    pub console: String,
    /// From the start of QEMU to its end.
    pub wall: Duration,
}

impl Report {
    /// The failure with the console's end, for people; none if the scenario passed.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        let why = self.verdict.failure.as_ref()?;
        Some(format!("{} FAILED: {why}\n{}", self.verdict.scenario, shown(&self.console)))
    }
}

impl Vm<'_> {
    /// Boots it, waits for its end and reads the result.
    pub fn run(&self) -> Result<Report, VmError> {
        let dir = tempfile::tempdir().map_err(VmError::Start)?;
        let results = dir.path().join("results");
        let mut command = self.qemu.command_for_seconds(self.seconds);
        // Never KVM: that /dev/kvm opens proves nothing (on some clouds it opens and then cannot run a kernel).
        command.args(["-accel", "tcg", "-cpu", "max,phys-bits=39", "-M", "q35,kernel-irqchip=split"]);
        command.args([
            "-m",
            "768M",
            "-smp",
            "1",
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-no-reboot",
        ]);
        command.args(["-serial", "stdio", "-serial"]).arg(format!("file:{}", results.display()));
        command.args(["-device", "isa-debug-exit,iobase=0xf4,iosize=1"]);
        command.args(["-device", "intel-iommu,intremap=on,caching-mode=on"]);
        for slot in 0..self.node.slots.len() {
            // Windows for BARs that appear long after firmware has laid out the buses.
            command.arg("-device").arg(format!(
                "pcie-root-port,id=rp{slot},bus=pcie.0,addr={:x}.0,chassis={},mem-reserve=64M,pref64-reserve=1G",
                FIRST_PORT + slot,
                slot + 1
            ));
        }
        command.arg("-kernel").arg(&self.vmlinux).arg("-initrd").arg(&self.initramfs);
        command.arg("-append").arg(self.command_line());

        let start = Instant::now();
        let output = command.stdin(std::process::Stdio::null()).output().map_err(VmError::Start)?;
        let wall = start.elapsed();
        let mut console = String::from_utf8_lossy(&output.stdout).into_owned();
        console.push_str(&String::from_utf8_lossy(&output.stderr));
        let found = if results.exists() { Verdict::find(&files::read_text(&results)?) } else { None };
        match found {
            Some(verdict) if verdict.scenario == self.scenario => Ok(Report { verdict, console, wall }),
            _ => Err(self.without_result(output.status, &console)),
        }
    }

    fn without_result(&self, status: ExitStatus, console: &str) -> VmError {
        // What `timeout` answers when the time was up.
        const TIMED_OUT: [i32; 2] = [124, 137];
        let scenario = self.scenario.to_owned();
        let end = shown(console);
        if status.code().is_some_and(|code| TIMED_OUT.contains(&code)) {
            return VmError::Timeout { scenario, seconds: self.seconds, console: end };
        }
        let cause = if console.contains("Kernel panic") {
            "its kernel panicked"
        } else if status.code() == Some(1) {
            "QEMU did not accept it"
        } else if console.is_empty() {
            "its console said nothing, so the kernel did not start"
        } else {
            "its /init ended early"
        };
        VmError::NoResult { scenario, status, cause, console: end }
    }

    fn command_line(&self) -> String {
        let iommu = if self.node.iommu { "intel_iommu=on" } else { "intel_iommu=off" };
        // panic=-1 and -no-reboot end the machine at once on a panic. On a loaded host the timer check can fail.
        format!("console=ttyS0 panic=-1 quiet no_timer_check {iommu} vmlab.scenario={}", self.scenario)
    }
}

fn shown(console: &str) -> String {
    format!("--- the end of its console:\n{}\n---", process::tail(console, SHOWN))
}
