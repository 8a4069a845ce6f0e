//! The machine that a scenario wants: slots below root ports, and the functions in them.

/// One PCI function, as the `fakepci` module is told to make it.
#[derive(Debug, Clone, Copy)]
pub struct Function {
    /// Function number, 0 to 7.
    pub number: u8,
    /// PCI vendor.
    pub vendor: u16,
    /// PCI device.
    pub device: u16,
    /// The 24-bit class code.
    pub class: u32,
    /// Sizes in MiB of BAR0 (32 bit), BAR1 and BAR3 (64 bit, prefetchable); 0 for none.
    pub bars: [u32; 3],
}

/// The functions of one slot. They share an IOMMU group, since nothing isolates them from each other.
#[derive(Debug, Clone, Copy)]
pub struct Slot {
    /// The slot's functions.
    pub functions: &'static [Function],
}

/// A whole machine.
#[derive(Debug, Clone, Copy)]
pub struct Node {
    /// One slot per root port, in order: the first is bus 01, the second bus 02.
    pub slots: &'static [Slot],
    /// Whether the kernel drives the IOMMU (`intel_iommu=on`).
    pub iommu: bool,
}

/// The address of function `number` in slot `slot` (from 0), as the guest's kernel names it.
///
/// Firmware numbers the root ports' buses in order, from 1.
#[must_use]
pub fn address(slot: usize, number: u8) -> String {
    format!("0000:{:02x}:00.{number:x}", slot + 1)
}

/// PCI device number on the root bus of the first root port; the next ones follow.
pub const FIRST_PORT: usize = 4;

impl Node {
    /// The `functions=` parameter of `fakepci`.
    #[must_use]
    pub fn module_parameter(&self) -> String {
        let specs: Vec<String> = self
            .slots
            .iter()
            .enumerate()
            .flat_map(|(slot, Slot { functions })| functions.iter().map(move |f| spec(slot, f)))
            .collect();
        format!("functions={}", specs.join(","))
    }

    /// Every function with its address.
    pub fn functions(&self) -> impl Iterator<Item = (String, Function)> {
        self.slots
            .iter()
            .enumerate()
            .flat_map(|(slot, s)| s.functions.iter().map(move |f| (address(slot, f.number), *f)))
    }
}

fn spec(slot: usize, f: &Function) -> String {
    let [bar0, bar1, bar3] = f.bars;
    format!(
        "0000:00:{:02x}.0/{}/{:04x}:{:04x}/{:06x}/{bar0}/{bar1}/{bar3}",
        FIRST_PORT + slot,
        f.number,
        f.vendor,
        f.device,
        f.class
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameter_names_port_function_and_ids() {
        const NODE: Node = Node {
            slots: &[
                Slot { functions: &[] },
                Slot {
                    functions: &[Function {
                        number: 1,
                        vendor: 0x15b3,
                        device: 0x101b,
                        class: 0x02_00_00,
                        bars: [1, 32, 0],
                    }],
                },
            ],
            iommu: true,
        };
        assert_eq!(NODE.module_parameter(), "functions=0000:00:05.0/1/15b3:101b/020000/1/32/0");
        assert_eq!(NODE.functions().map(|(a, _)| a).collect::<Vec<_>>(), ["0000:02:00.1"]);
    }
}
