//! Runs vfiod on a real Linux kernel: in QEMU (TCG only), with an emulated IOMMU, real `vfio-pci`, and PCI functions
//! of our own kernel module that look like NVIDIA's.
//!
//! ```text
//!  host: Lab ──QEMU, kernel, modules, initramfs (cached)──▶ Vm ──console, results──▶ Verdict
//!  guest: /init ──mounts, modules, topology──▶ Scenario::run(&Guest) ──one line a scenario──▶ serial port
//! ```
//!
//! Host and guest are one crate, so that a scenario is written once: the host reads its [`node::Node`] to lay out the
//! machine, the guest's `/init` (the binary `guest`) runs its steps.

pub mod guest;
pub mod host;
pub mod node;
pub mod scenarios;
pub mod verdict;
