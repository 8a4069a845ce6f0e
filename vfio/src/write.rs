//! The kernel writes that exist. Nothing else can be asked of the writer.

use std::{fmt, path::PathBuf};

use reason::{Code, Coded};
use serde::{Deserialize, Serialize};

use crate::{host::Host, modules::Load, pci::Address};

/// One write to the kernel, as data: it says what it does, to which function or module.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "write", rename_all = "kebab-case")]
pub enum Write {
    /// Sets the function's `driver_override`, or clears it.
    Override {
        /// The function.
        address: Address,
        /// The driver named; none clears (a newline: an empty write is no write at all).
        driver: Option<String>,
    },
    /// Takes the function from this driver. ENODEV when the driver has changed meanwhile: never another's device.
    Unbind {
        /// The function.
        address: Address,
        /// The driver it is taken from.
        driver: String,
    },
    /// Asks the kernel to find the function a driver (`drivers_probe`). Success is no proof that one was found.
    Probe {
        /// The function.
        address: Address,
    },
    /// Loads a module from the host's own file. One that is loaded by then is a success.
    LoadModule(Box<Load>),
}

/// A write that names something no driver is called.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no driver's name: letters, digits, '_', '-' and '.', at most 64, not starting with '.'")]
pub struct BadDriverName(pub String);

impl Coded for BadDriverName {
    fn code(&self) -> Code {
        Code::WriteRefused
    }

    fn retryable(&self) -> bool {
        false
    }
}

/// A driver's name as a path component that cannot lead anywhere else.
fn check_driver(name: &str) -> Result<(), BadDriverName> {
    let fine = (1..=64).contains(&name.len())
        && !name.starts_with('.')
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.'));
    if fine { Ok(()) } else { Err(BadDriverName(name.to_owned())) }
}

impl Write {
    /// The function it concerns; none for a module.
    #[must_use]
    pub fn function(&self) -> Option<Address> {
        match self {
            Self::Override { address, .. } | Self::Unbind { address, .. } | Self::Probe { address } => {
                Some(*address)
            }
            Self::LoadModule(_) => None,
        }
    }

    /// The file on `host` that it goes to; of a module, the file that it comes from.
    #[must_use]
    pub fn path(&self, host: &Host) -> PathBuf {
        match self {
            Self::Override { address, .. } => host.function_dir(*address).join("driver_override"),
            Self::Unbind { driver, .. } => host.sys("bus/pci/drivers").join(driver).join("unbind"),
            Self::Probe { .. } => host.sys("bus/pci/drivers_probe"),
            Self::LoadModule(load) => host.modules(load.file.as_str()),
        }
    }

    /// Checks what types cannot: that a driver's name is one.
    ///
    /// # Errors
    /// With the name.
    pub fn check(&self) -> Result<(), BadDriverName> {
        match self {
            Self::Override { driver: Some(driver), .. } | Self::Unbind { driver, .. } => check_driver(driver),
            Self::Override { driver: None, .. } | Self::Probe { .. } | Self::LoadModule(_) => Ok(()),
        }
    }
}

impl fmt::Display for Write {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Override { address, driver: Some(driver) } => {
                write!(f, "set driver_override of {address} to {driver}")
            }
            Self::Override { address, driver: None } => write!(f, "clear driver_override of {address}"),
            Self::Unbind { address, driver } => write!(f, "unbind {address} from {driver}"),
            Self::Probe { address } => write!(f, "probe {address}"),
            Self::LoadModule(load) if load.options.is_empty() => write!(f, "load module {}", load.module),
            Self::LoadModule(load) => write!(f, "load module {} ({})", load.module, load.options),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_name_cannot_leave_its_directory() {
        let address = "0000:01:00.0".parse().unwrap();
        for name in ["", ".", "..", "../x", "a/b", "a b", "a\n", ".hidden", &"x".repeat(65)] {
            assert!(Write::Unbind { address, driver: name.to_owned() }.check().is_err(), "{name:?}");
        }
        for name in ["vfio-pci", "nvgrace_gpu_vfio_pci", "snd_hda_intel", "8139too"] {
            assert_eq!(Write::Unbind { address, driver: name.to_owned() }.check(), Ok(()));
        }
    }
}
