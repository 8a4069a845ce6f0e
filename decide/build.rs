//! Refuses a PCI name database other than the pinned one.
//!
//! The build script of the pci-ids crate replaces the crate's database with today's where it gets through to the network.
//! Resource names would then change with the day of the build, under manifests that ask for them.

use pci_ids::Vendors;

/// The database of pci-ids 0.2.6, by [`fnv1a`]. With another version of the crate: take over what the error says.
const PINNED: u64 = 0x1174_f7f2_42ab_8cd0;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let text = Vendors::iter().flat_map(|vendor| {
        let device = move |device: &pci_ids::Device| {
            format!("{:04x} {:04x} {}\n", vendor.id(), device.id(), device.name())
        };
        vendor.devices().map(device)
    });
    let mut lines: Vec<String> = text.collect();
    lines.sort_unstable();
    let found = fnv1a(&lines);
    if found != PINNED {
        println!(
            "cargo::error=the PCI name database is not the pinned one (its hash is {found:#018x}): build with the \
             environment of .cargo/config.toml, which keeps the pci-ids crate from replacing it over the network"
        );
    }
}

/// FNV-1a, 64 bits: the same in every build, which std's hashers do not promise.
fn fnv1a(lines: &[String]) -> u64 {
    lines.iter().flat_map(|line| line.bytes()).fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
