//! What a function was before vfiod touched it first, and of which device that is remembered.

use serde::{Deserialize, Serialize};
use vfio::{
    driver::{Binding, is_vfio},
    pci::{Function, Identity, Role},
};

/// What a function was before vfiod touched it first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Prior {
    /// Somebody had begun to move it: what it was before that is not known.
    Unknown,
    /// No driver.
    None,
    /// On this host driver.
    Driver(String),
    /// On a vfio driver; with no override it was bound by ids at boot.
    AlreadyVfio {
        /// The override it had.
        #[serde(rename = "override")]
        driver_override: Option<String>,
    },
}

impl From<&Binding> for Prior {
    fn from(binding: &Binding) -> Self {
        let meant_for_vfio = binding.driver_override.as_deref().is_some_and(is_vfio);
        match &binding.driver {
            Some(driver) if is_vfio(driver) => {
                Self::AlreadyVfio { driver_override: binding.driver_override.clone() }
            }
            Some(driver) => Self::Driver(driver.clone()),
            None if meant_for_vfio => Self::Unknown,
            None => Self::None,
        }
    }
}

/// A prior, and the very device that it is remembered of: after a swap within one boot another has its address.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remembered {
    /// The device; none in what an agent before journal version 2 wrote.
    pub device: Option<Identity>,
    /// What it was.
    pub was: Prior,
}

impl Remembered {
    /// Whether this was remembered of the device that `function` is now.
    ///
    /// Where the device was not written down, one that is on vfio, or meant for it, or that vfiod moves, is taken for it.
    #[must_use]
    pub fn is_of(&self, function: &Function, role: Role) -> bool {
        match &self.device {
            Some(device) => *device == function.identity(),
            None => {
                let vfio = |name: &Option<String>| name.as_deref().is_some_and(is_vfio);
                vfio(&function.driver) || vfio(&function.driver_override) || super::inventory::is_moved(role)
            }
        }
    }
}
