//! Whether anything was written to the kernel: what every write to a driver leaves behind, before and after.

use std::fs;
use std::thread;
use std::time::Duration;

use super::failure::{Failure, Step, equal, io_on};
use super::pci::Pci;

/// The traces at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// Rises with every bind, unbind, add and remove.
    uevents: u64,
    functions: Vec<State>,
}

/// A function's driver and override.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    address: String,
    driver: Option<String>,
    driver_override: String,
}

impl State {
    /// How many of the two are different.
    #[must_use]
    pub fn differs(&self, other: &Self) -> usize {
        usize::from(self.driver != other.driver) + usize::from(self.driver_override != other.driver_override)
    }
}

const SEQUENCE: &str = "/sys/kernel/uevent_seqnum";

impl Trace {
    /// Waits until the machine is quiet (late probes make uevents too) and takes the traces.
    pub fn take() -> Step<Self> {
        const QUIET: Duration = Duration::from_millis(300);
        const TRIES: usize = 50;
        let mut last = uevents()?;
        for _ in 0..TRIES {
            thread::sleep(QUIET);
            let now = uevents()?;
            if now == last {
                return Ok(Self { uevents: now, functions: Self::functions()? });
            }
            last = now;
        }
        Err(Failure::Expected {
            what: SEQUENCE.into(),
            expected: "to stand still for 300 ms".into(),
            seen: "new uevents all the time".into(),
        })
    }

    /// Checks that nothing was written since.
    pub fn unchanged(&self) -> Step {
        equal("drivers and overrides after what should write nothing", &Self::functions()?, &self.functions)?;
        equal("uevent_seqnum after what should write nothing", &uevents()?, &self.uevents)
    }

    /// Drivers and overrides of all functions, sorted by address.
    pub fn functions() -> Step<Vec<State>> {
        let of = |f: Pci| {
            Ok(State { driver: f.driver()?, driver_override: f.driver_override()?, address: f.address })
        };
        Pci::all()?.into_iter().map(of).collect()
    }
}

fn uevents() -> Step<u64> {
    let text = fs::read_to_string(SEQUENCE).map_err(io_on("read", SEQUENCE))?;
    text.trim().parse().map_err(|_| Failure::Expected {
        what: SEQUENCE.into(),
        expected: "a number".into(),
        seen: text,
    })
}
