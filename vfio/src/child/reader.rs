//! Reads functions through a child process, so that one that does not answer stops nothing else.

use std::collections::{BTreeMap, BTreeSet};

use super::{ChildCommand, LeftBehind, LookError, running::Servant, writer::look};
use crate::{
    host::{Host, ReadError},
    pci::{Address, Function, FunctionError, Functions, functions_by, read_busy},
};

/// Reads functions. One that does not answer within the deadline is [`Function::busy`], and not asked again before its
/// child has come back.
#[derive(Debug)]
pub struct Reader {
    servant: Servant,
    late: BTreeMap<Address, LeftBehind>,
}

impl Reader {
    /// A reader of `host`'s functions, through `command`, whose child need not serve writes.
    #[must_use]
    pub fn new(command: &ChildCommand, host: &Host) -> Self {
        Self { servant: Servant::new(command, host), late: BTreeMap::new() }
    }

    /// Reads all functions. Those of `busy` are not asked for: a write to them has not come back.
    ///
    /// # Errors
    /// Only where the list itself cannot be had.
    pub fn functions(&mut self, busy: &BTreeSet<Address>) -> Result<Functions, ReadError> {
        let host = self.servant.host.clone();
        functions_by(&host, |address| self.read(address, busy))
    }

    fn read(
        &mut self,
        address: Address,
        busy: &BTreeSet<Address>,
    ) -> Result<Option<Function>, FunctionError> {
        let waits = self.late.get_mut(&address).is_some_and(|child| !child.ended());
        if waits || busy.contains(&address) {
            return read_busy(&self.servant.host, address);
        }
        self.late.remove(&address);
        match look(&mut self.servant, address) {
            Ok(function) => Ok(function),
            Err(LookError::Function(error)) => Err(error),
            Err(LookError::Late { child, .. }) => {
                self.late.insert(address, child);
                read_busy(&self.servant.host, address)
            }
        }
    }
}
