//! Process 1 of the guest: mounts, starts the scenario in a child, reaps what is left behind, reports, and ends the
//! machine.
#![allow(clippy::disallowed_methods, reason = "opens the guest's serial and I/O ports for writing")]

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};

use nix::mount::{MsFlags, mount};
use nix::sys::reboot::{RebootMode, reboot};
use nix::sys::termios::tcdrain;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;

use super::failure::{Failure, Step, io_on};
use super::machine::Machine;
use super::{modules, paths};
use crate::host::lab::chain;
use crate::scenarios::{self, Scenario};
use crate::verdict::Verdict;

/// The whole life of process 1. It returns only if the machine cannot be ended.
pub fn main() {
    let prepared = mount_all();
    let name = Machine::boot_parameter("vmlab.scenario").ok().flatten().unwrap_or_default();
    match prepared.and_then(|()| spawn(&name)) {
        Ok(scenario) => reap_until(scenario),
        Err(failure) => report(&name, Err(failure)),
    }
    end();
}

/// The child's life: prepares the machine, runs the scenario and reports.
pub fn scenario(name: &str) {
    report(name, run(name));
}

fn run(name: &str) -> Step {
    let Some(Scenario { node, run, .. }) = scenarios::find(name) else {
        return Err(Failure::Expected {
            what: "vmlab.scenario= on the kernel's command line".into(),
            expected: "a scenario's name".into(),
            seen: name.into(),
        });
    };
    modules::load_all(node)?;
    run(&Machine::check(*node)?)
}

fn mount_all() -> Step {
    let mounts =
        [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"), ("tmpfs", "/run"), ("tmpfs", "/tmp")];
    for (kind, at) in mounts {
        let none: Option<&str> = None;
        mount(Some(kind), at, Some(kind), MsFlags::empty(), none)
            .map_err(|e| io_on("mount", at)(e.into()))?;
    }
    Ok(())
}

/// The scenario is not process 1 itself: agents that are killed leave children behind, and only process 1 can reap
/// those, by waiting for any child; that would take a scenario's own children away from it.
fn spawn(name: &str) -> Step<Pid> {
    let child = Command::new(paths::INIT)
        .args(["scenario", name])
        .env("PATH", "/usr/bin:/bin:/sbin")
        .stdin(Stdio::null())
        .spawn()
        .map_err(io_on("start", paths::INIT))?;
    // A Linux process id fits.
    Ok(Pid::from_raw(i32::try_from(child.id()).unwrap_or_default()))
}

fn reap_until(scenario: Pid) {
    loop {
        match waitpid(None, None) {
            Ok(WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, ..)) if pid == scenario => return,
            Err(nix::errno::Errno::ECHILD) => return,
            _ => {}
        }
    }
}

/// Sends the verdict to the host. A panicking scenario sends none: the host then shows the console.
fn report(name: &str, outcome: Step) {
    let uptime = fs::read_to_string("/proc/uptime").unwrap_or_default();
    let uptime = uptime.split_whitespace().next().and_then(|first| first.parse().ok()).unwrap_or_default();
    let failure = outcome.err().map(|failure| chain(&failure));
    let verdict = Verdict { scenario: name.to_owned(), failure, uptime };
    println!("{}", verdict.line());
    let sent = OpenOptions::new().write(true).open(paths::RESULTS).and_then(|mut port| {
        writeln!(port, "{}", verdict.line())?;
        // The port drains at its own pace, and the machine ends at once after this.
        tcdrain(&port).map_err(Into::into)
    });
    if let Err(error) = sent {
        println!("cannot report on {}: {error}", paths::RESULTS);
    }
}

/// Ends the machine through QEMU's debug port, which needs no ACPI; else the kernel's way.
fn end() {
    const DEBUG_EXIT: u64 = 0xf4;
    // QEMU ends with twice this and one, which no failure of its own gives.
    const FINISHED: u8 = 0x10;
    let _ = tcdrain(std::io::stdout());
    let _ = OpenOptions::new()
        .write(true)
        .open("/dev/port")
        .and_then(|port| port.write_at(&[FINISHED], DEBUG_EXIT));
    let _ = reboot(RebootMode::RB_POWER_OFF);
}
