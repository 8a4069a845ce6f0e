//! What must survive a crash: each moved function's prior driver, writes in flight, holds.
//!
//! The journal is plain data with one owner. [`Store`] makes a snapshot of it durable (temporary file, fsync, rename,
//! fsync of the directory) and is the only one to touch the file.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use vfio::{
    driver::{Wanted, is_vfio},
    pci::Address,
    process::ProcessId,
    write::Write,
};

use crate::{
    atomic_file::{self, AtomicFileError},
    execute::Outcome,
    plan::{Move, Prior},
    usage::Hold,
};

/// The format's version; a file of another one is not read.
const VERSION: u32 = 1;

/// A write that was announced, and whose end has not been recorded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pending {
    /// The write.
    #[serde(flatten)]
    pub write: Write,
    /// The process that makes it.
    pub writer: ProcessId,
}

/// All that vfiod remembers of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Journal {
    version: u32,
    /// The boot that the entries are of.
    pub boot_id: String,
    /// What each function was before vfiod moved it, until it is back.
    pub priors: BTreeMap<Address, Prior>,
    /// Writes in flight, by group.
    pub pending: BTreeMap<u32, Pending>,
    /// Answered Allocates.
    pub holds: BTreeMap<Address, Hold>,
}

/// A journal that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// It cannot be read or written.
    #[error(transparent)]
    File(#[from] AtomicFileError),
    /// It is no journal of this version.
    #[error(
        "the journal {path} is not one of version {VERSION}; nothing is touched while the prior drivers are not known. \
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

impl JournalError {
    /// A stable name for metrics and conditions.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::File(_) => "JournalFile",
            Self::Content { .. } => "JournalContent",
            Self::Interrupted => "JournalInterrupted",
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
            pending: BTreeMap::new(),
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

    /// A write is about to be made by `writer`: to a function that was `prior` when this transaction began, or, where it
    /// loads a module, to none.
    pub fn announce(&mut self, group: u32, write: &Write, prior: Option<&Prior>, writer: ProcessId) {
        if let (Some(address), Some(prior)) = (write.function(), prior) {
            self.priors.entry(address).or_insert_with(|| prior.clone());
        }
        self.pending.insert(group, Pending { write: write.clone(), writer });
    }

    /// A group's transaction has come to its end. Forgets the functions that are where they were; a wedged group's write
    /// stays in flight.
    pub fn conclude(&mut self, group: u32, moves: &[Move], outcome: &Outcome) {
        if !matches!(outcome, Outcome::Wedged { .. }) {
            self.pending.remove(&group);
        }
        for step in moves {
            let to_vfio = matches!(&step.to.driver, Wanted::Named(name) if is_vfio(name));
            let back = match outcome {
                Outcome::Done => !to_vfio,
                Outcome::RolledBack { .. } => {
                    to_vfio && self.priors.get(&step.address) == Some(&Prior::from(&step.from))
                }
                Outcome::Broken { .. } | Outcome::Wedged { .. } => false,
            };
            if back {
                self.priors.remove(&step.address);
            }
        }
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
        let content = |source| JournalError::Content { path: self.path.clone(), source };
        let mut journal: Journal = serde_json::from_slice(&bytes).map_err(content)?;
        if journal.version != VERSION {
            let other = io::Error::other(format!("its version is {}", journal.version));
            return Err(content(serde_json::Error::io(other)));
        }
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
