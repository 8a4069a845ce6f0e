//! Base address registers, as a function's `resource` file lists them.

use serde::Serialize;

/// Memory space (`IORESOURCE_MEM`, include/linux/ioport.h).
const MEMORY: u64 = 0x0000_0200;
/// I/O port space (`IORESOURCE_IO`).
const IO: u64 = 0x0000_0100;
/// Reads have no side effects (`IORESOURCE_PREFETCH`).
const PREFETCH: u64 = 0x0000_2000;
/// A 64-bit register (`IORESOURCE_MEM_64`).
const MEMORY_64: u64 = 0x0010_0000;
/// No address was given to it (`IORESOURCE_UNSET`).
const UNSET: u64 = 0x2000_0000;

/// Number of BARs of a function (`PCI_STD_NUM_BARS`, include/uapi/linux/pci_regs.h), and of its VFs.
const BARS: usize = 6;
/// The line of the expansion ROM (`PCI_ROM_RESOURCE`, include/linux/pci.h).
const ROM_LINE: usize = BARS;
/// A kernel with SR-IOV lists the VFs' BARs after the ROM: 13 lines, or 17 for a bridge. Without it there are 7, or 11.
const LINES_WITH_VFS: usize = ROM_LINE + 1 + BARS;

/// What a region is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Region {
    /// A BAR of the function itself.
    Bar,
    /// Its expansion ROM.
    Rom,
    /// A BAR of its virtual functions; the size is that of all VFs together.
    VfBar,
}

/// The address space that a region is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Space {
    /// I/O ports.
    Io,
    /// Memory.
    Memory,
}

/// One implemented region of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Bar {
    /// What it is of.
    pub region: Region,
    /// Its number, 0 to 5; 0 for the ROM.
    pub index: u8,
    /// Memory or I/O ports.
    pub space: Space,
    /// Where it is on the bus; without meaning unless [`Bar::assigned`].
    pub start: u64,
    /// How many bytes it has.
    pub size: u64,
    /// Whether its register has 64 bits.
    #[serde(rename = "64bit")]
    pub wide: bool,
    /// Whether it is prefetchable.
    pub prefetchable: bool,
    /// Whether it has an address: firmware and kernel may have found no place for it.
    pub assigned: bool,
}

/// Reads the text of a `resource` file: a line a region, `START END FLAGS` in hex (`resource_show`,
/// drivers/pci/pci-sysfs.c). Regions that are not implemented, and lines that are none, are left out.
#[must_use]
pub fn parse(resource: &str) -> Vec<Bar> {
    let lines: Vec<&str> = resource.lines().collect();
    let of_vfs = lines.len() >= LINES_WITH_VFS;
    let regions = lines.iter().enumerate().filter_map(|(line, text)| {
        let (region, index) = match line {
            ..BARS => (Region::Bar, line),
            ROM_LINE => (Region::Rom, 0),
            _ if of_vfs && line < LINES_WITH_VFS => (Region::VfBar, line - ROM_LINE - 1),
            // What follows are a bridge's windows.
            _ => return None,
        };
        parse_line(region, u8::try_from(index).ok()?, text)
    });
    regions.collect()
}

fn parse_line(region: Region, index: u8, line: &str) -> Option<Bar> {
    let mut numbers =
        line.split_whitespace().map(|text| u64::from_str_radix(text.strip_prefix("0x")?, 16).ok());
    let (start, end, flags) = (numbers.next()??, numbers.next()??, numbers.next()??);
    let space = match flags & (MEMORY | IO) {
        MEMORY => Space::Memory,
        IO => Space::Io,
        _ => return None,
    };
    let size = end.checked_sub(start)?.checked_add(1)?;
    Some(Bar {
        region,
        index,
        space,
        start,
        size,
        wide: flags & MEMORY_64 != 0,
        prefetchable: flags & PREFETCH != 0,
        assigned: flags & UNSET == 0 && start != 0,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NONE: &str = "0x0000000000000000 0x0000000000000000 0x0000000000000000\n";

    /// An H200 on a kernel without SR-IOV: seven lines.
    fn h200() -> String {
        [
            "0x0000104002000000 0x0000104002ffffff 0x000000000014220c\n",
            NONE,
            "0x0000100000000000 0x0000103fffffffff 0x000000000014220c\n",
            NONE,
            "0x0000104000000000 0x0000104001ffffff 0x000000000014220c\n",
            NONE,
            NONE,
        ]
        .concat()
    }

    #[test]
    fn an_h200_has_three_64_bit_prefetchable_bars() {
        let bars = parse(&h200());
        let sizes: Vec<_> = bars.iter().map(|bar| (bar.region, bar.index, bar.size)).collect();
        assert_eq!(
            sizes,
            [(Region::Bar, 0, 16 << 20), (Region::Bar, 2, 256 << 30), (Region::Bar, 4, 32 << 20)]
        );
        assert!(bars.iter().all(|bar| bar.wide && bar.prefetchable && bar.assigned));
        assert!(bars.iter().all(|bar| bar.space == Space::Memory));
    }

    /// An A10 with its VFs' BARs: 32 times 256 KiB, 2 GiB and 32 MiB; a 32-bit BAR 0, an I/O BAR, a ROM.
    #[test]
    fn a_kernel_with_sriov_lists_the_vfs_bars_after_the_rom() {
        let text = [
            "0x00000000a4000000 0x00000000a4ffffff 0x0000000000040200\n",
            "0x0000206000000000 0x00002067ffffffff 0x000000000014220c\n",
            NONE,
            "0x0000207840000000 0x0000207841ffffff 0x000000000014220c\n",
            NONE,
            "0x0000000000003000 0x000000000000307f 0x0000000000040101\n",
            "0x00000000a5000000 0x00000000a507ffff 0x0000000000046200\n",
            "0x0000207842000000 0x00002078427fffff 0x0000000000140204\n",
            "0x0000206800000000 0x00002077ffffffff 0x000000000014220c\n",
            NONE,
            "0x0000207800000000 0x000020783fffffff 0x000000000014220c\n",
            NONE,
            NONE,
        ]
        .concat();
        let bars = parse(&text);
        let found: Vec<_> = bars.iter().map(|bar| (bar.region, bar.index, bar.size >> 10)).collect();
        assert_eq!(
            found,
            [
                (Region::Bar, 0, 16 << 10),
                (Region::Bar, 1, 32 << 20),
                (Region::Bar, 3, 32 << 10),
                (Region::Bar, 5, 0),
                (Region::Rom, 0, 512),
                (Region::VfBar, 0, 8 << 10),
                (Region::VfBar, 1, 64 << 20),
                (Region::VfBar, 3, 1 << 20),
            ]
        );
        assert_eq!((bars[3].space, bars[3].size), (Space::Io, 128));
        assert!(!bars[0].wide && !bars[0].prefetchable);
    }

    #[test]
    fn a_bar_without_an_address_keeps_its_size() {
        let bars = parse("0x0000000000000000 0x00000007ffffffff 0x000000002014220c\n");
        assert_eq!((bars[0].size, bars[0].assigned), (32 << 30, false));
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in "(?s).{0,400}") {
            let _ = parse(&text);
        }

        #[test]
        fn any_three_numbers_are_survived(start: u64, end: u64, flags: u64) {
            let _ = parse(&format!("{start:#018x} {end:#018x} {flags:#018x}\n"));
        }
    }
}
