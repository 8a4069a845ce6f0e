//! The database in the binary: the one place that knows where it comes from.

use pci_ids::Device;

/// The built-in name, without outer white space; an empty one counts as none.
pub(super) fn device(vendor: u16, device: u16) -> Option<&'static str> {
    Device::from_vid_pid(vendor, device).map(|found| found.name().trim()).filter(|name| !name.is_empty())
}
