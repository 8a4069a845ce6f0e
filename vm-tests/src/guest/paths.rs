//! Where things lie in the guest: what the host packs and what the guest looks for.

/// The guest's own program, run by the kernel as process 1.
pub const INIT: &str = "/init";
/// The program under test.
pub const VFIOD: &str = "/usr/bin/vfiod";
/// The VMM's stand-in: a link to [`INIT`], so that `/proc` shows it under this name.
pub const VMM: &str = "/usr/bin/vmm-stand-in";
/// The name that `/proc/PID/comm` gives for [`VMM`].
pub const VMM_NAME: &str = "vmm-stand-in";
/// The kernel modules, with the file `order`.
pub const MODULES: &str = "/lib/lab-modules";
/// The serial port for results; the console has the first one.
pub const RESULTS: &str = "/dev/ttyS1";
/// VFIO's own node, through which a VMM sets up its IOMMU.
pub const CONTAINER: &str = "/dev/vfio/vfio";
