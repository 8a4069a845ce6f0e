//! PCI functions as the guest's sysfs shows them, and raw writes for the scenarios that check the lab itself.
#![allow(clippy::disallowed_methods, reason = "writes to the guest's own sysfs, to play the administrator")]

use std::fs;
use std::io;
use std::path::PathBuf;

use super::failure::{Failure, Step, equal, io_on};

const DEVICES: &str = "/sys/bus/pci/devices";

/// One function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pci {
    /// Its address.
    pub address: String,
}

/// What a cleared `driver_override` reads as.
pub const NO_OVERRIDE: &str = "(null)";

impl Pci {
    /// The function at an address; it need not be there.
    pub fn at(address: impl Into<String>) -> Self {
        Self { address: address.into() }
    }

    /// All functions of the machine, sorted by address.
    pub fn all() -> Step<Vec<Self>> {
        let entries = fs::read_dir(DEVICES).map_err(io_on("list", DEVICES))?;
        let mut addresses: Vec<String> =
            entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        addresses.sort();
        Ok(addresses.into_iter().map(Self::at).collect())
    }

    fn path(&self, attribute: &str) -> PathBuf {
        PathBuf::from(DEVICES).join(&self.address).join(attribute)
    }

    /// Whether the kernel knows the function.
    #[must_use]
    pub fn exists(&self) -> bool {
        self.path("").exists()
    }

    /// An attribute's content without the line's end.
    pub fn read(&self, attribute: &str) -> Step<String> {
        let path = self.path(attribute);
        let text = fs::read_to_string(&path).map_err(io_on("read", path.to_string_lossy()))?;
        Ok(text.trim_end().to_owned())
    }

    /// The bound driver's name.
    pub fn driver(&self) -> Step<Option<String>> {
        self.link("driver")
    }

    /// `driver_override` as it reads.
    pub fn driver_override(&self) -> Step<String> {
        self.read("driver_override")
    }

    /// The IOMMU group's number.
    pub fn group(&self) -> Step<Option<String>> {
        self.link("iommu_group")
    }

    /// The group's node for VFIO; an error if the function has no group.
    pub fn group_node(&self) -> Step<String> {
        let group = self.group()?.ok_or_else(|| Failure::Expected {
            what: format!("{}'s IOMMU group", self.address),
            expected: "one".into(),
            seen: "none".into(),
        })?;
        Ok(format!("/dev/vfio/{group}"))
    }

    fn link(&self, name: &str) -> Step<Option<String>> {
        let path = self.path(name);
        match fs::read_link(&path) {
            Ok(target) => Ok(target.file_name().map(|n| n.to_string_lossy().into_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(io_on("read", path.to_string_lossy())(error)),
        }
    }

    /// Checks the bound driver.
    pub fn expect_driver(&self, name: &str) -> Step {
        equal(&format!("{}'s driver", self.address), &self.driver()?.as_deref(), &Some(name))
    }

    /// Checks that a host driver has the function back, with no override left.
    pub fn expect_back(&self, name: &str) -> Step {
        self.expect_driver(name)?;
        equal(&format!("{}'s driver_override", self.address), self.driver_override()?.as_str(), NO_OVERRIDE)
    }

    /// Writes an attribute.
    pub fn write(&self, attribute: &str, value: &str) -> Step {
        write(&self.path(attribute).to_string_lossy(), value)
    }

    /// Moves the function to `vfio-pci` by plain writes, without vfiod.
    pub fn raw_bind(&self) -> Step {
        self.write("driver_override", "vfio-pci")?;
        if self.driver()?.is_some() {
            self.write("driver/unbind", &self.address)?;
        }
        write("/sys/bus/pci/drivers_probe", &self.address)
    }

    /// Gives the function back by plain writes; blocks while a VMM has it open.
    pub fn raw_unbind(&self) -> Step {
        self.write("driver_override", "\n")?;
        self.write("driver/unbind", &self.address)?;
        write("/sys/bus/pci/drivers_probe", &self.address)
    }
}

fn write(path: &str, value: &str) -> Step {
    fs::write(path, value).map_err(io_on("write", path))
}
