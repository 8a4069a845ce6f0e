//! Looks at a node through a child process, so that what does not answer stops nothing else.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use super::{
    ChildCommand, LeftBehind, LookError,
    lives::Silence,
    protocol::{Answer, Ask},
    running::{Servant, Unanswered},
    scan::HolderScan,
    writer::look,
};
use crate::{
    holders::{self, Holders},
    host::{Host, ReadError},
    pci::{
        self, Address, Function, FunctionError, Functions, Life, functions_by,
        life::{self, APART},
        read_busy,
    },
};

/// Looks at functions and at who has them open. What does not answer within the deadline is said to be so, and not asked again
/// before its child has come back; all else is found all the same.
#[derive(Debug)]
pub struct Reader {
    /// The shortest time between two looks that together say that a function is dead.
    pub apart: Duration,
    way: Way,
    scan: HolderScan,
    /// Functions that were asked for, and whose child has not come back.
    late: BTreeMap<Address, LeftBehind>,
    /// Functions whose configuration space was.
    late_config: BTreeMap<Address, LeftBehind>,
    silence: Silence,
}

/// Where a reader looks.
#[derive(Debug)]
enum Way {
    /// In a child process.
    Child(Box<Servant>),
    /// In the calling process.
    Here(Host),
}

impl Reader {
    /// A reader of `host`, through `command`, whose child need not serve writes.
    #[must_use]
    pub fn new(command: &ChildCommand, host: &Host) -> Self {
        Self::by(Way::Child(Box::new(Servant::new(command, host))))
    }

    /// A reader of `host` in the calling process, which blocks for as long as the kernel does: for tests, which have no child
    /// and a simulated kernel.
    #[must_use]
    pub fn here(host: &Host) -> Self {
        Self::by(Way::Here(host.clone()))
    }

    fn by(way: Way) -> Self {
        Self {
            apart: APART,
            way,
            scan: HolderScan::default(),
            late: BTreeMap::new(),
            late_config: BTreeMap::new(),
            silence: Silence::default(),
        }
    }

    /// Reads all functions. Those of `busy` are not asked for: a write to them has not come back. One that does not answer
    /// is [`Function::busy`].
    ///
    /// # Errors
    /// Only where the list itself cannot be had.
    pub fn functions(&mut self, busy: &BTreeSet<Address>) -> Result<Functions, ReadError> {
        let host = match &self.way {
            Way::Child(servant) => servant.host.clone(),
            Way::Here(host) => host.clone(),
        };
        functions_by(&host, |address| self.function(address, busy))
    }

    fn function(
        &mut self,
        address: Address,
        busy: &BTreeSet<Address>,
    ) -> Result<Option<Function>, FunctionError> {
        let waits = still_waits(&mut self.late, address) || busy.contains(&address);
        match &mut self.way {
            Way::Here(host) if waits => read_busy(host, address),
            Way::Here(host) => pci::read(host, address),
            Way::Child(servant) if waits => read_busy(&servant.host, address),
            Way::Child(servant) => match look(servant, address) {
                Ok(function) => Ok(function),
                Err(LookError::Function(error)) => Err(error),
                Err(LookError::Late { child, .. }) => {
                    self.late.insert(address, child);
                    read_busy(&servant.host, address)
                }
            },
        }
    }

    /// Looks through all processes for open file descriptions of `nodes` (paths on the host, such as `/dev/vfio/12`). What
    /// cannot be looked into is said, with what it may have open ([`Holders::opaque_to`]).
    pub fn holders(&mut self, nodes: impl IntoIterator<Item = String>) -> Holders {
        match &mut self.way {
            Way::Here(host) => holders::scan(host, nodes),
            Way::Child(servant) => self.scan.scan(servant, nodes.into_iter().collect()),
        }
    }

    /// Says which of `addresses` live. The caller asks for those that nobody has open: a look enters the function, and a guest
    /// resets what it has when it likes.
    ///
    /// No function ends up [`Life::Suspect`]: one that is silent for the first time is looked at again [`Reader::apart`]
    /// later, in the same call. A silence is remembered for as long as the function is asked for, so that a later call does
    /// not wait again. What cannot be read, or does not come back, is [`Life::Unknown`].
    pub fn lives(&mut self, addresses: &BTreeSet<Address>) -> BTreeMap<Address, Life> {
        let Self { apart, way, late_config, silence, .. } = self;
        silence.lives(addresses, *apart, |address| match way {
            Way::Here(host) => life::look(host, address, false),
            Way::Child(servant) => answer(servant, late_config, address),
        })
    }
}

/// Whether the child that was left behind at `address` has not come back yet.
fn still_waits(late: &mut BTreeMap<Address, LeftBehind>, address: Address) -> bool {
    let waits = late.get_mut(&address).is_some_and(|child| !child.ended());
    if !waits {
        late.remove(&address);
    }
    waits
}

/// How a function answers through a child.
fn answer(servant: &mut Servant, late: &mut BTreeMap<Address, LeftBehind>, address: Address) -> life::Answer {
    if still_waits(late, address) {
        return life::Answer::Unreadable;
    }
    match servant.read(&Ask::Life(address)) {
        Ok((_, Answer::Life(answer))) => answer,
        Err(Unanswered::Late(child)) => {
            late.insert(address, child);
            life::Answer::Unreadable
        }
        // An answer to another question: that child is not ours.
        Ok(_) => {
            servant.dismiss();
            life::Answer::Unreadable
        }
        Err(Unanswered::Ended(_) | Unanswered::NotStarted(_)) => life::Answer::Unreadable,
    }
}
