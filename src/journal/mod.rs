//! What must survive a crash: what each moved function was before, writes in flight, holds.
//!
//! The journal is plain data with one owner. [`Store`] makes a snapshot of it durable (temporary file, fsync, rename,
//! fsync of the directory) and is the only one to touch the file.

mod v1;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use decide::{
    id::OfferId,
    plan::Plan,
    prior::{Prior, Remembered},
    step::{Step, Way},
    unit::UnitId,
    usage::Hold,
};
use reason::{Code, Coded};
use serde::{Deserialize, Serialize};
use vfio::{pci::Address, process::ProcessId, write::Write};

use crate::{
    atomic_file::{self, AtomicFileError},
    execute::{Attempt, Outcome},
};

/// The format's version. Files of version 1 are read and carried over; other ones are not read.
const VERSION: u32 = 2;

/// A write that was announced, and whose end has not been recorded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pending {
    /// The unit it is about; without functions where that was not written down, which may be any.
    pub unit: UnitId,
    /// The write.
    #[serde(flatten)]
    pub write: Write,
    /// The process that makes it.
    pub writer: ProcessId,
}

impl Pending {
    /// Whether it may be about `unit`.
    #[must_use]
    pub fn concerns(&self, unit: &UnitId) -> bool {
        self.unit.0.is_empty() || self.unit.meets(unit)
    }
}

/// All that vfiod remembers of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Journal {
    version: u32,
    /// The boot that the entries are of.
    pub boot_id: String,
    /// What each function was before vfiod moved it, until it is back.
    pub priors: BTreeMap<Address, Remembered>,
    /// Writes in flight, one a unit.
    pub pending: Vec<Pending>,
    /// What was promised.
    pub holds: BTreeMap<OfferId, Hold>,
}

/// A journal that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// It cannot be read or written.
    #[error(transparent)]
    File(#[from] AtomicFileError),
    /// It is no journal of a version that is read.
    #[error(
        "the journal {path} is not one of version 1 or {VERSION}; nothing is touched while the prior drivers are not known. \
         Move the file away to start without it: functions on vfio then go back to whatever driver the kernel picks",
        path = path.display()
    )]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// The agent is ending, and does not record any more.
    #[error("the agent is ending")]
    Interrupted,
}

impl Coded for JournalError {
    fn code(&self) -> Code {
        match self {
            Self::File(_) => Code::JournalFile,
            Self::Content { .. } => Code::JournalContent,
            Self::Interrupted => Code::JournalInterrupted,
        }
    }

    fn retryable(&self) -> bool {
        match self {
            Self::File(error) => error.retryable(),
            Self::Content { .. } => false,
            Self::Interrupted => true,
        }
    }
}

impl Journal {
    /// An empty journal of the boot `boot_id`.
    #[must_use]
    pub fn new(boot_id: &str) -> Self {
        Self {
            version: VERSION,
            boot_id: boot_id.to_owned(),
            priors: BTreeMap::new(),
            pending: Vec::new(),
            holds: BTreeMap::new(),
        }
    }

    /// Brings the journal to the present boot. After a restart of the node the kernel has put every function where it
    /// belongs and no write is in flight; holds stay until PodResources has answered, their time counted anew.
    pub fn enter_boot(&mut self, boot_id: &str) {
        if self.boot_id == boot_id {
            return;
        }
        boot_id.clone_into(&mut self.boot_id);
        self.priors.clear();
        self.pending.clear();
        for hold in self.holds.values_mut() {
            hold.answered_at = 0;
        }
    }

    /// An attempt on a function of `unit` is about to be made by `writer`. What the function was stays as it was
    /// remembered first, unless that was of another device.
    pub fn announce(&mut self, unit: &UnitId, attempt: &Attempt, writer: ProcessId) {
        if let Some((address, remembered)) = &attempt.remembers {
            let known = self.priors.entry(*address).or_insert_with(|| remembered.clone());
            match &known.device {
                None => known.device.clone_from(&remembered.device),
                Some(_) if known.device != remembered.device => known.clone_from(remembered),
                Some(_) => {}
            }
        }
        self.pending.retain(|pending| pending.unit != *unit);
        self.pending.push(Pending { unit: unit.clone(), write: attempt.write.clone(), writer });
    }

    /// A unit's transaction has come to its end. Forgets the functions that are where they were; a wedged unit's write
    /// stays in flight.
    pub fn conclude(&mut self, unit: &UnitId, steps: &[Step], outcome: &Outcome) {
        if !matches!(outcome, Outcome::Wedged { .. }) {
            self.pending.retain(|pending| pending.unit != *unit);
        }
        for step in steps {
            let Some((address, remembered)) = step.remembers() else { continue };
            let back = match (outcome, step.way()) {
                (Outcome::Done, Way::Back) => true,
                (Outcome::RolledBack { .. }, Way::Out) => {
                    self.priors.get(&address).map(|known: &Remembered| -> &Prior { &known.was })
                        == Some(&remembered.was)
                }
                _ => false,
            };
            if back {
                self.priors.remove(&address);
            }
        }
    }

    /// Forgets what tells of devices that are not there any more.
    pub fn forget_stale(&mut self, plan: &Plan) {
        for stale in &plan.stale {
            self.priors.remove(&stale.address);
        }
    }

    /// The write in flight that may be about `unit`.
    #[must_use]
    pub fn waits(&self, unit: &UnitId) -> Option<&Pending> {
        self.pending.iter().find(|pending| pending.concerns(unit))
    }
}

/// Where the journal is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Store {
    path: PathBuf,
}

impl Store {
    /// The journal of a state directory.
    #[must_use]
    pub fn new(state_dir: &Path) -> Self {
        Self { path: state_dir.join("journal.json") }
    }

    /// Loads the journal, brought to the boot `boot_id`; an empty one where there is none.
    ///
    /// # Errors
    /// When it is there and cannot be understood: nothing may be touched then.
    pub fn load(&self, boot_id: &str) -> Result<Journal, JournalError> {
        let Some(bytes) = atomic_file::read_if_there(&self.path)? else { return Ok(Journal::new(boot_id)) };
        let mut journal =
            parse(&bytes).map_err(|source| JournalError::Content { path: self.path.clone(), source })?;
        journal.enter_boot(boot_id);
        Ok(journal)
    }

    /// Makes the journal durable.
    ///
    /// # Errors
    /// When it cannot be; the old one is there still.
    pub fn save(&self, journal: &Journal) -> Result<(), JournalError> {
        let content = |source| JournalError::Content { path: self.path.clone(), source };
        let bytes = serde_json::to_vec_pretty(journal).map_err(content)?;
        Ok(atomic_file::replace(&self.path, &bytes, 0o600)?)
    }
}

/// Reads a journal of whichever version.
fn parse(bytes: &[u8]) -> Result<Journal, serde_json::Error> {
    use serde::de::Error as _;
    #[derive(Deserialize)]
    struct Head {
        version: u32,
    }
    match serde_json::from_slice::<Head>(bytes)?.version {
        1 => Ok(serde_json::from_slice::<v1::Journal>(bytes)?.into()),
        VERSION => serde_json::from_slice(bytes),
        other => Err(serde_json::Error::custom(format!("its version is {other}"))),
    }
}
