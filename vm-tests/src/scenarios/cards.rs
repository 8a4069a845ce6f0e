//! The cards that scenarios put into their machines.

use crate::node::{Function, Node, Slot};

const NVIDIA: u16 = 0x10de;

/// A data-centre GPU: one function, class 0302.
pub const A10: Function =
    Function { number: 0, vendor: NVIDIA, device: 0x2236, class: 0x03_02_00, bars: [16, 256, 32] };

/// The four functions of a Quadro RTX 5000: VGA, audio, USB and UCSI.
pub const TU104: &[Function] = &[
    Function { number: 0, vendor: NVIDIA, device: 0x1eb1, class: 0x03_00_00, bars: [16, 256, 32] },
    Function { number: 1, vendor: NVIDIA, device: 0x10f8, class: 0x04_03_00, bars: [1, 0, 0] },
    Function { number: 2, vendor: NVIDIA, device: 0x1ad8, class: 0x0c_03_30, bars: [1, 1, 0] },
    Function { number: 3, vendor: NVIDIA, device: 0x1ad9, class: 0x0c_80_00, bars: [1, 0, 0] },
];
/// The host drivers of [`TU104`], by function number.
pub const TU104_DRIVERS: [&str; 4] = ["nvidia", "snd_hda_intel", "xhci_hcd", "nvidia-gpu"];

/// A network card's function: not NVIDIA's, in the same slot.
pub const CONNECTX: Function =
    Function { number: 1, vendor: 0x15b3, device: 0x101b, class: 0x02_00_00, bars: [1, 32, 0] };
/// The host driver of [`CONNECTX`].
pub const CONNECTX_DRIVER: &str = "mlx5_core";

/// One GPU, alone in its group.
pub const ONE_GPU: Node = Node { slots: &[Slot { functions: &[A10] }], iommu: true };
/// A four-function card, all in one group.
pub const FOUR_FUNCTIONS: Node = Node { slots: &[Slot { functions: TU104 }], iommu: true };
/// A GPU that shares its group with a foreign network card.
pub const GPU_AND_NIC: Node = Node { slots: &[Slot { functions: &[A10, CONNECTX] }], iommu: true };
/// A GPU on a machine whose kernel drives no IOMMU.
pub const WITHOUT_IOMMU: Node = Node { slots: &[Slot { functions: &[A10] }], iommu: false };
/// Two GPUs of one model, each in its own group, and a four-function card.
pub const THREE_CARDS: Node = Node {
    slots: &[Slot { functions: &[A10] }, Slot { functions: TU104 }, Slot { functions: &[A10] }],
    iommu: true,
};
/// The resource that KubeVirt asks for to get an [`A10`].
pub const A10_RESOURCE: &str = "nvidia.com/GA102GL_A10";
/// The variable in which KubeVirt looks for the addresses of [`A10_RESOURCE`].
pub const A10_VARIABLE: &str = "PCI_RESOURCE_NVIDIA_COM_GA102GL_A10";
