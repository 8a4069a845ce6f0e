//! The host kernel's side of GPU passthrough: what it says, and what it takes.
//!
//! * [`host`]: where a host's kernel is met, below one root
//! * [`pci`]: addresses, functions, class codes and roles
//! * [`iommu`]: groups and their viability
//! * [`console`]: which functions the kernel's own console may be on
//! * [`driver`]: which write comes next on a function's way from one driver to another
//! * [`drm`]: a function's display and render nodes
//! * [`framebuffer`]: which function's BAR the firmware's picture still holds
//! * [`holders`]: which processes have a device open
//! * [`mdev`]: mediated devices, and whose part each is
//! * [`modules`]: which modules are there or can be loaded, and the vfio driver made for a function
//! * [`process`]: a process of this machine, told from a later one with the same number
//! * [`vendor`]: GPU vendors as rows of one table: classes, drivers, device nodes, services
//! * [`mod@write`]: the kernel writes that exist, as data
//! * [`child`]: the child processes: the one seam through which writes go, and the reads that may block, each under a deadline
//! * `sim`: a simulated kernel over a directory tree, with the feature `simulation`
//!
//! Synchronous, and free of Kubernetes. Reading is a matter of [`host::Host`]; nothing but a [`child`] writes.

#![forbid(unsafe_code)]

pub mod child;
pub mod console;
pub mod driver;
pub mod drm;
pub mod framebuffer;
pub mod holders;
pub mod host;
pub mod iommu;
pub mod mdev;
pub mod modules;
pub mod pci;
mod printable;
pub mod process;
#[cfg(feature = "simulation")]
pub mod sim;
pub mod vendor;
pub mod write;
