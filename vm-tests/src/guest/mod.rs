//! The guest's side: the binary `guest` is the machine's `/init`, runs the scenario, and is the VMM's stand-in.

pub mod agent;
pub mod daemon;
pub mod failure;
pub mod init;
pub mod kubelet;
pub mod machine;
pub mod modules;
pub mod paths;
pub mod pci;
pub mod trace;
pub mod vfio;
pub mod vmm;
