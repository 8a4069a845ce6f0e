//! Driver moves: which write comes next on a function's way from one driver to another.
//!
//! ```text
//!   wrong driver ──override──▶ override right ──unbind──▶ driverless ──probe──▶ right driver ──override──▶ done
//!                                                          (drivers_probe answers success even when
//!                                                           nothing matched: the caller reads back)
//! ```
//! Each step is derived from what sysfs shows at that moment, so a move that was cut off anywhere goes on from there.
//! `new_id` is never used: it would catch every other card with that id, and it outlives the agent.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{pci::Function, write::Write};

/// The vfio driver for functions without a driver of their own.
pub const VFIO_PCI: &str = "vfio-pci";

/// Who does DMA for a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DmaOwner {
    /// Nobody: no driver.
    None,
    /// A VM, by a vfio driver.
    Vfio,
    /// Nobody, although a driver is bound: pci-stub, pcieport (`driver_managed_dma`).
    Unowned,
    /// The host, through the kernel's DMA API.
    Host,
}

/// Whether `driver` is vfio-pci or one of its variants. `_` and `-` are one: module and driver names differ in them.
#[must_use]
pub fn is_vfio(driver: &str) -> bool {
    let name = driver.replace('-', "_");
    name == "vfio_pci" || name.ends_with("_vfio_pci")
}

/// Who does DMA for a function bound to `driver`.
///
/// Source: `driver_managed_dma` in drivers/vfio/pci, drivers/pci/pci-stub.c and drivers/pci/pcie/portdrv.c.
#[must_use]
pub fn dma_owner(driver: Option<&str>) -> DmaOwner {
    match driver {
        None => DmaOwner::None,
        Some(name) if is_vfio(name) => DmaOwner::Vfio,
        Some("pci-stub" | "pcieport") => DmaOwner::Unowned,
        Some(_) => DmaOwner::Host,
    }
}

/// A function's driver and override: what a move changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Binding {
    /// The bound driver.
    pub driver: Option<String>,
    /// The `driver_override`.
    #[serde(rename = "override")]
    pub driver_override: Option<String>,
}

impl From<&Function> for Binding {
    fn from(function: &Function) -> Self {
        Self { driver: function.driver.clone(), driver_override: function.driver_override.clone() }
    }
}

/// The driver that a move shall end with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Wanted {
    /// Exactly this one.
    Named(String),
    /// Whichever host driver the kernel picks, or none where none is loaded.
    AnyHost,
    /// No vfio driver, and no probe for another.
    NoProbe,
}

/// Where a move ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// The driver.
    pub driver: Wanted,
    /// The override to leave behind.
    #[serde(rename = "override")]
    pub driver_override: Option<String>,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.driver {
            Wanted::Named(name) => f.write_str(name),
            Wanted::AnyHost => f.write_str("the host's driver, if one is loaded"),
            Wanted::NoProbe => f.write_str("no driver"),
        }
    }
}

impl Target {
    /// Bound to the vfio driver `driver`, with the override that keeps a later probe from giving it to another.
    #[must_use]
    pub fn vfio(driver: &str) -> Self {
        Self { driver: Wanted::Named(driver.to_owned()), driver_override: Some(driver.to_owned()) }
    }

    /// Exactly as `binding` was: a move's inverse.
    #[must_use]
    pub fn restore(binding: &Binding) -> Self {
        let driver = binding.driver.clone().map_or(Wanted::NoProbe, Wanted::Named);
        Self { driver, driver_override: binding.driver_override.clone() }
    }

    /// Whether `binding` is the target. `probed` says that a probe was made on the way, after which a driverless function
    /// is a right answer where any host driver would do.
    #[must_use]
    pub fn reached(&self, binding: &Binding, probed: bool) -> bool {
        self.driver_reached(binding, probed) && self.driver_override == binding.driver_override
    }

    fn driver_reached(&self, binding: &Binding, probed: bool) -> bool {
        match (&self.driver, binding.driver.as_deref()) {
            (Wanted::Named(name), Some(driver)) => name == driver,
            (Wanted::Named(_), None) => false,
            (Wanted::AnyHost, None) => probed,
            (Wanted::AnyHost | Wanted::NoProbe, Some(driver)) => !is_vfio(driver),
            (Wanted::NoProbe, None) => true,
        }
    }

    /// The override that leads a probe to the wanted driver.
    fn leading_override(&self) -> Option<&str> {
        match &self.driver {
            Wanted::Named(name) if is_vfio(name) => Some(name),
            _ => None,
        }
    }
}

/// What to do next on a move.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// This write, then look again.
    Write(Write),
    /// The target is reached.
    Done,
    /// The probe left the function with another driver, or with none.
    Stuck,
}

/// The next write that brings `function` to `target`, from what it shows now.
///
/// `probed`: a probe was already made on this move; a second one would not do better.
#[must_use]
pub fn next(function: &Function, target: &Target, probed: bool) -> Next {
    let address = function.address;
    let now = Binding::from(function);
    let write_override =
        |driver: Option<&str>| Next::Write(Write::Override { address, driver: driver.map(str::to_owned) });
    if target.driver_reached(&now, probed) {
        if now.driver_override == target.driver_override {
            return Next::Done;
        }
        return write_override(target.driver_override.as_deref());
    }
    if now.driver_override.as_deref() != target.leading_override() {
        return write_override(target.leading_override());
    }
    match now.driver {
        Some(_) if probed => Next::Stuck,
        Some(driver) => Next::Write(Write::Unbind { address, driver }),
        None if probed => Next::Stuck,
        None => Next::Write(Write::Probe { address }),
    }
}
