//! AMD's row.

use super::{Common, Holds, Name, Service, Vendor};
use crate::pci::{Class, Role};

pub(super) const ROW: Vendor = Vendor {
    id: 0x1002,
    name: "AMD",
    // Processing accelerators: the Instinct MI300 series. Its display controllers (0300, 0380) are also what a board or a
    // processor has for its console, and are nobody's to move until one is seen that is.
    gpu_classes: &[Class(0x12_00_00)],
    // XGMI links the GPUs of a board directly; there is no switch that is a PCI function.
    switches: None,
    // An accelerator is alone in its slot.
    companion_classes: &[],
    gpu_drivers: &["amdgpu"],
    switch_drivers: &[],
    directories: &["dev"],
    // Its card and render nodes are DRM's, of which sysfs tells.
    own: None,
    common: COMMON,
    unbind_lock: None,
    domain: "amd.com",
    words: &["instinct", "radeon", "rocm"],
    services: SERVICES,
};

/// `/dev/kfd` is one node for all: its open makes a process of the compute driver (`kfd_open`, by `kfd_create_process`,
/// drivers/gpu/drm/amd/amdkfd/kfd_chardev.c), which has a part on every GPU from then on (`kfd_init_apertures`,
/// kfd_flat_memory.c), and may make queues on each. An unbind from amdgpu sends those processes SIGBUS and waits for them
/// (`kgd2kfd_teardown_processes`, kfd_device.c), or in older kernels pulls the GPU from under them.
const COMMON: &[Common] = &[Common { name: Name::Is("kfd"), role: Role::Gpu, holds: Holds::EveryFunction }];

const SERVICES: &[Service] = &[
    // The exporter of AMD's GPU operator, and the services it asks.
    Service::new("amd-metrics-exp", "amd-metrics-exporter", "amd-metrics-exporter"),
    Service::new("gpuagent", "gpuagent", "gpuagent"),
];
