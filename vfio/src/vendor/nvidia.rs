//! NVIDIA's row.

use super::{Common, Holds, Name, Own, Service, Switches, Vendor};
use crate::pci::{Class, Role};

pub(super) const ROW: Vendor = Vendor {
    id: 0x10de,
    name: "NVIDIA",
    // VGA and 3D controllers.
    gpu_classes: &[Class(0x03_00_00), Class(0x03_02_00)],
    // NVIDIA's old nForce chipset parts (MCP55 Ethernet, 10de:0373) carry the NVSwitch's class, and all have ids below the
    // first NVSwitch (1ac1).
    switches: Some(Switches { class: Class(0x06_80_00), from_device: 0x1ac0 }),
    // Audio, xHCI, UCSI: the consumers that the kernel links to function 0 (drivers/pci/quirks.c, quirk_gpu_*).
    companion_classes: &[Class(0x04_03_00), Class(0x0c_03_30), Class(0x0c_80_00)],
    gpu_drivers: &["nvidia", "nouveau"],
    switch_drivers: &["nvidia-nvswitch"],
    // The host's own, and those of a driver that a container has installed below its own root (the GPU Operator's driver
    // DaemonSet). There a VM host may have no node below `/dev` at all.
    directories: &["dev", "run/nvidia/driver/dev"],
    own: Some(Own {
        prefix: "nvidia",
        functions: "driver/nvidia/gpus",
        file: "information",
        key: "Device Minor:",
    }),
    common: COMMON,
    // Reads 1 once the driver lets nobody new in (kernel-open/nvidia/nv-procfs.c, `nv_procfs_write_unbind_lock`).
    unbind_lock: Some("driver/nvidia/gpus/ADDRESS/unbindLock"),
    domain: "nvidia.com",
    words: &["geforce", "nvidia", "nvswitch", "quadro", "tesla"],
    services: SERVICES,
};

/// Whoever uses a GPU has its own node open: the control node, memory management, modesetting and the capabilities of MIG and
/// IMEX are of no use without it, and an unbind waits for a GPU's own node alone (`nv_pci_remove`, kernel-open/nvidia/nv-pci.c,
/// waits for the use count of that device, which its node's opens raise). Of an NVSwitch no file says which node is its.
const COMMON: &[Common] = &[
    common(Name::Below("nvidia-caps"), Role::Gpu),
    common(Name::StartsWith("nvidia-nvswitch"), Role::NvSwitch),
    common(Name::StartsWith("nvidia"), Role::Gpu),
];

const fn common(name: Name, role: Role) -> Common {
    Common { name, role, holds: Holds::WithoutOwnNode }
}

const SERVICES: &[Service] = &[
    Service {
        // The daemon itself closes the card's node (nvidia-persistenced's nvPdSetDevicePersistenceMode, which nvidia-smi calls).
        one_function: Some("nvidia-smi -i ADDRESS -pm 0"),
        ..Service::new("nvidia-persiste", "nvidia-persistenced", "nvidia-persistenced")
    },
    Service {
        // ABORT_CUDA_JOBS_ON_FM_EXIT, which is on unless it is switched off (Fabric Manager User Guide).
        ends: Some("the CUDA programs on this node's GPUs"),
        ..Service::new("nv-fabricmanage", "nv-fabricmanager", "nvidia-fabricmanager")
    },
    Service::new("nv-hostengine", "nv-hostengine (DCGM)", "nvidia-dcgm"),
    Service::new("dcgm-exporter", "dcgm-exporter", "dcgm-exporter"),
    Service {
        ends: Some("the CUDA programs that run through it"),
        ..Service::new("nvidia-cuda-mps", "nvidia-cuda-mps-control", "nvidia-mps")
    },
    Service::new("nvidia-imex", "nvidia-imex", "nvidia-imex"),
    Service::new("nvidia-powerd", "nvidia-powerd", "nvidia-powerd"),
    Service::new("nvidia-gridd", "nvidia-gridd", "nvidia-gridd"),
    Service {
        // It has a process for every VM with a vGPU.
        ends: Some("every VM with a vGPU of this node"),
        ..Service::new("nvidia-vgpu-mgr", "nvidia-vgpu-mgr", "nvidia-vgpu-mgr")
    },
    Service::new("nvidia-device-p", "nvidia-device-plugin", "nvidia-device-plugin"),
];
