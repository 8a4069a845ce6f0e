//! The machine that a scenario runs on, as its steps see it.

use std::fs;

use super::failure::{Step, equal, io_on};
use super::pci::Pci;
use crate::node::{Node, address};

/// The machine.
#[derive(Debug)]
pub struct Machine {
    /// How it was laid out.
    pub node: Node,
}

impl Machine {
    /// Checks that the kernel shows exactly what was laid out, so that no scenario fails for the lab's reasons.
    pub fn check(node: Node) -> Step<Self> {
        for (at, wanted) in node.functions() {
            let function = Pci::at(at.as_str());
            let ids = [function.read("vendor")?, function.read("device")?, function.read("class")?];
            let expected = [
                format!("{:#06x}", wanted.vendor),
                format!("{:#06x}", wanted.device),
                format!("{:#08x}", wanted.class),
            ];
            equal(&format!("vendor, device and class of {at}"), &ids, &expected)?;
            equal(&format!("whether {at} has an IOMMU group"), &function.group()?.is_some(), &node.iommu)?;
        }
        Ok(Self { node })
    }

    /// Function `number` of slot `slot`, both from 0.
    #[must_use]
    pub fn function(&self, slot: usize, number: u8) -> Pci {
        Pci::at(address(slot, number))
    }

    /// The parameter `name=` of the kernel's command line.
    pub fn boot_parameter(name: &str) -> Step<Option<String>> {
        const PATH: &str = "/proc/cmdline";
        let line = fs::read_to_string(PATH).map_err(io_on("read", PATH))?;
        let value = line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        Ok(value.map(str::to_owned))
    }
}
