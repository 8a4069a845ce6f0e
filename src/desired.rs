//! What label, config and flags ask of a node. Plain data.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// What a node's GPUs serve: the three values of the label `nvidia.com/gpu.workload.config`.
///
/// A node has exactly one at a time. Values are matched exactly; anything else is no wish at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum WorkloadType {
    /// The host's own driver, for containers.
    Container,
    /// Whole functions on vfio-pci, for virtual machines.
    VmPassthrough,
    /// Slices of a GPU (mediated devices, SR-IOV VFs) for virtual machines.
    VmVgpu,
}

/// Who takes the devices of a VM workload type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Consumer {
    /// KubeVirt: environment variables and device nodes in the virt-launcher container.
    #[default]
    Kubevirt,
    /// Kata Containers: CDI specs looked up by the runtime.
    Kata,
}

/// What a node shall become: the plan's second input, beside the inventory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Desired {
    /// The workload type asked for.
    pub workload_type: WorkloadType,
    /// Who takes the devices of a VM type.
    pub consumer: Consumer,
    /// Give functions that the kernel bound to vfio by ids at boot to the host driver as well.
    pub adopt_boot_bound: bool,
}

/// A workload type that is none of the three.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no workload type: it takes container, vm-passthrough or vm-vgpu, spelt exactly so")]
pub struct UnknownWorkloadType(pub String);

impl FromStr for WorkloadType {
    type Err = UnknownWorkloadType;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "container" => Ok(Self::Container),
            "vm-passthrough" => Ok(Self::VmPassthrough),
            "vm-vgpu" => Ok(Self::VmVgpu),
            other => Err(UnknownWorkloadType(other.to_owned())),
        }
    }
}

impl fmt::Display for WorkloadType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Container => "container",
            Self::VmPassthrough => "vm-passthrough",
            Self::VmVgpu => "vm-vgpu",
        })
    }
}

impl fmt::Display for Consumer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Kubevirt => "kubevirt",
            Self::Kata => "kata",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workload_types_are_matched_exactly() {
        for known in [WorkloadType::Container, WorkloadType::VmPassthrough, WorkloadType::VmVgpu] {
            assert_eq!(known.to_string().parse(), Ok(known));
        }
        for near in ["", "Container", "vm_passthrough", " container", "vm-passthrough\n"] {
            assert_eq!(near.parse::<WorkloadType>(), Err(UnknownWorkloadType(near.to_owned())));
        }
    }
}
