//! What is wrong with a profile, and where.

use std::{
    fmt, io,
    path::{Path, PathBuf},
};

use reason::{Code, Coded};
use serde_saphyr::Location;

use crate::pci::Address;

/// Where in which file. Shown as `path:line`, or `path` alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The file.
    pub path: PathBuf,
    /// The line, counted from 1; `None` where the parser has none.
    pub line: Option<u64>,
}

impl Place {
    pub(super) fn new(path: &Path, location: Option<Location>) -> Self {
        // The parser's line 0 stands for "not known".
        Self { path: path.to_owned(), line: location.map(|at| at.line()).filter(|line| *line > 0) }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        self.line.map_or(Ok(()), |line| write!(f, ":{line}"))
    }
}

/// A profile that cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// No built-in profile has the name.
    #[error("there is no profile {name:?}: give one of {known}, or the path of a file ending in .yaml")]
    Unknown {
        /// The name asked for.
        name: String,
        /// All there are.
        known: String,
    },
    /// The file cannot be read.
    #[error("cannot read profile {path}; give the path of a YAML file", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// No YAML, a key that is not known or missing, or a value of the wrong kind.
    #[error("profile {place} does not fit: {reason}; docs/profiles.md has every key")]
    Parse {
        /// File and line.
        place: Place,
        /// What the parser expected and found, one line.
        reason: String,
    },
    /// A value that stands for nothing a node could have.
    #[error("profile {place}: {key}: {value:?} does not fit: give {expected}")]
    Value {
        /// File and line.
        place: Place,
        /// The key as spelt in the file.
        key: &'static str,
        /// The value as given.
        value: String,
        /// What belongs there.
        expected: &'static str,
    },
    /// An entry that does not say where its functions are, or says it twice.
    #[error(
        "profile {place}: this entry has {count} of address, addresses and groups: give exactly one of them"
    )]
    Addresses {
        /// File and line.
        place: Place,
        /// How many it has.
        count: usize,
    },
    /// An entry with two keys that say the same thing, or one that only makes sense with another.
    #[error("profile {place}: {key} does not go here: {reason}")]
    Misplaced {
        /// File and line.
        place: Place,
        /// The key.
        key: &'static str,
        /// Why not.
        reason: &'static str,
    },
    /// Two functions at one address.
    #[error(
        "profile {place}: {address} is there already ({first}): a slot has each function once, move one of them"
    )]
    Duplicate {
        /// File and line.
        place: Place,
        /// The address.
        address: Address,
        /// Where it was first.
        first: Place,
    },
    /// A driver that the simulated kernel knows nothing of.
    #[error("profile {place}: the simulated kernel has no driver {driver:?}: give one of {known}")]
    UnknownDriver {
        /// File and line.
        place: Place,
        /// The name given.
        driver: String,
        /// Those that it has.
        known: String,
    },
    /// A function's driver is not among those that are loaded.
    #[error(
        "profile {place}: driver {driver} is not among this profile's drivers: add it there, or leave drivers out"
    )]
    NotLoaded {
        /// File and line.
        place: Place,
        /// The driver.
        driver: String,
    },
    /// The BARs of all functions do not fit into the address space.
    #[error(
        "profile {path}: the BARs do not fit, {address} is the first without room: make them smaller, or 64-bit \
         (\"16M 64 prefetchable\"), all others lie below 4 GiB", path = path.display()
    )]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// The function.
        address: Address,
    },
}

impl Coded for ProfileError {
    fn code(&self) -> Code {
        match self {
            Self::Unknown { .. }
            | Self::Read { .. }
            | Self::Parse { .. }
            | Self::Value { .. }
            | Self::Addresses { .. }
            | Self::Misplaced { .. }
            | Self::Duplicate { .. }
            | Self::UnknownDriver { .. }
            | Self::NotLoaded { .. }
            | Self::NoRoom { .. } => Code::NoSimulation,
        }
    }

    fn retryable(&self) -> bool {
        match self {
            Self::Unknown { .. }
            | Self::Read { .. }
            | Self::Parse { .. }
            | Self::Value { .. }
            | Self::Addresses { .. }
            | Self::Misplaced { .. }
            | Self::Duplicate { .. }
            | Self::UnknownDriver { .. }
            | Self::NotLoaded { .. }
            | Self::NoRoom { .. } => false,
        }
    }
}
