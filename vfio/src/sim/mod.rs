//! A simulated kernel over a directory tree.
//!
//! Reads are plain files and links, laid as sysfs, devtmpfs and procfs lay them; writes are answered by
//! [`kernel::answer`] as Linux answers them. The tree is all of its state, so that any number of processes (an agent,
//! its writers, the command line, a stand-in VM) meet the same node. What the simulation keeps for itself lies in
//! `.sim/` below the root: the write log, the faults to play, a lock.
//!
//! It is there with the feature `simulation`: tests and `vfiod demo` run on it, and every `--root DIR` whose `sys` is a plain
//! directory. Where it and a real kernel disagree, it is wrong.

mod drivers;
pub mod fault;
pub mod kernel;
pub mod modules;
mod node;
pub mod process;
pub mod profile;
mod tree;

use std::{
    io,
    path::{Path, PathBuf},
};

pub use fault::{Effect, Fault, Moment};
pub use modules::ModuleTree;
pub use process::OpenError;
pub use profile::{Profile, ProfileError, ProfileFunction};
use reason::{Code, Coded};
use tree::Tree;

use crate::{
    host::{Host, HostError},
    pci::Address,
    write::Write,
};

/// A simulated node, as tests and the demo see it from outside.
#[derive(Debug, Clone)]
pub struct Simulation {
    tree: Tree,
}

/// A simulated node that could not be laid or changed.
#[derive(Debug, thiserror::Error)]
pub enum SimulationError {
    /// A file of the tree.
    #[error("cannot lay the simulated node at {root}", root = root.display())]
    Tree {
        /// The tree's root.
        root: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The tree, once laid, is no host.
    #[error(transparent)]
    Host(#[from] HostError),
}

impl Coded for SimulationError {
    fn code(&self) -> Code {
        match self {
            Self::Tree { .. } => Code::NoSimulation,
            Self::Host(error) => error.code(),
        }
    }

    fn retryable(&self) -> bool {
        match self {
            Self::Tree { .. } => false,
            Self::Host(error) => error.retryable(),
        }
    }
}

impl Simulation {
    /// Lays a node of `profile` below `root`, which is created where it is missing.
    ///
    /// # Errors
    /// When the tree cannot be written.
    pub fn create(root: impl Into<PathBuf>, profile: &Profile) -> Result<Self, SimulationError> {
        let root = root.into();
        profile.lay(&root).map_err(|source| SimulationError::Tree { root: root.clone(), source })?;
        Self::open(root)
    }

    /// The node that was laid below `root` before.
    ///
    /// # Errors
    /// When there is none.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self, SimulationError> {
        Ok(Self { tree: Tree::new(Host::at(root)?) })
    }

    /// Gives the node these modules; its kernel is of their release from now on.
    ///
    /// # Errors
    /// When they cannot be written.
    pub fn lay_modules(&self, modules: &ModuleTree) -> io::Result<()> {
        modules.lay(self.root())
    }

    /// The node as the library's host.
    #[must_use]
    pub fn host(&self) -> &Host {
        self.tree.host()
    }

    /// The tree's root.
    #[must_use]
    pub fn root(&self) -> &Path {
        self.tree.host().root()
    }

    /// Every write that reached the kernel since the tree was laid, in order, failed ones too.
    ///
    /// # Errors
    /// When the log is unreadable.
    pub fn writes(&self) -> io::Result<Vec<Write>> {
        self.tree.log()
    }

    /// Makes these the faults to play from now on.
    ///
    /// # Errors
    /// When they cannot be written.
    pub fn set_faults(&self, faults: &[Fault]) -> io::Result<()> {
        self.tree.set_faults(faults)
    }

    /// Lets the node start anew: another boot ID, no override, no process, every function where the kernel puts it.
    ///
    /// # Errors
    /// When the tree cannot be written.
    pub fn reboot(&self) -> io::Result<()> {
        kernel::reboot(&self.tree)
    }

    /// Sets a function's driver and override outright, as a boot parameter or another program would have.
    ///
    /// # Errors
    /// When the tree cannot be written.
    pub fn put(
        &self,
        address: Address,
        driver: Option<&str>,
        driver_override: Option<&str>,
    ) -> io::Result<()> {
        kernel::put(&self.tree, address, driver, driver_override)
    }
}
