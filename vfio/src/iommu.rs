//! IOMMU groups: the unit that the kernel hands to one VM.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
};

use serde::Serialize;

use crate::{
    driver::{DmaOwner, dma_owner},
    host::{Host, ReadError},
    pci::{Address, Function, Functions},
};

/// One IOMMU group as `/sys/kernel/iommu_groups` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Group {
    /// The group's number, of this boot only.
    pub id: u32,
    /// All its functions, bridges too, by address.
    pub members: BTreeSet<Address>,
    /// Members that are no PCI functions, by name.
    pub strangers: BTreeSet<String>,
    /// The path of its legacy node on the host (`/dev/vfio/12`), where there is one.
    pub node: Option<String>,
    /// A group that VFIO made up for a device without an IOMMU (`enable_unsafe_noiommu_mode`).
    pub noiommu: bool,
}

/// A member that keeps its group from being handed to a VM: its driver does DMA on the host's behalf.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Blocker {
    /// The member.
    pub address: Address,
    /// Its driver.
    pub driver: String,
}

/// Reads all groups, from the group directory and from the functions' own links.
///
/// No group at all means that the IOMMU is off or missing.
///
/// # Errors
/// When the group directory is there and cannot be read.
pub fn groups(host: &Host, functions: &Functions) -> Result<BTreeMap<u32, Group>, ReadError> {
    let mut members: BTreeMap<u32, BTreeSet<Address>> = BTreeMap::new();
    let mut strangers: BTreeMap<u32, BTreeSet<String>> = BTreeMap::new();
    let dir = host.sys("kernel/iommu_groups");
    let ids = match host.list(&dir) {
        Ok(names) => names.iter().filter_map(|name| name.parse::<u32>().ok()).collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error),
    };
    for id in ids {
        let devices = match host.list(&dir.join(id.to_string()).join("devices")) {
            Ok(names) => names,
            // The last member was unplugged between the two looks.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        for name in devices {
            match name.parse() {
                Ok(address) => {
                    members.entry(id).or_default().insert(address);
                }
                Err(_) => {
                    strangers.entry(id).or_default().insert(name);
                }
            }
        }
    }
    for function in functions.known.values() {
        if let Some(id) = function.iommu_group {
            members.entry(id).or_default().insert(function.address);
        }
    }
    Ok(members
        .into_iter()
        .map(|(id, members)| {
            let node = host.dev("vfio").join(id.to_string()).exists().then(|| group_node(id));
            let name = host.read(&dir.join(id.to_string()).join("name")).unwrap_or_default();
            let strangers = strangers.remove(&id).unwrap_or_default();
            (id, Group { id, members, strangers, node, noiommu: name.trim() == "vfio-noiommu" })
        })
        .collect())
}

/// The path of a group's legacy node on the host.
#[must_use]
pub fn group_node(id: u32) -> String {
    format!("/dev/vfio/{id}")
}

/// The members that keep a group from being viable, by the kernel's rule; none means viable.
///
/// Since Linux 5.18 a group can be claimed for a user only while none of its devices is bound to a driver that uses
/// the kernel's DMA API (`iommu_group_claim_dma_owner`, drivers/iommu/iommu.c): no driver, vfio drivers, pci-stub and
/// pcieport (`driver_managed_dma`) are fine. `vf_with_vgpu` says of a function that it is a VF with a vGPU type set,
/// where the `nvidia` driver does not own its DMA.
pub fn blockers<'a>(
    members: impl IntoIterator<Item = &'a Function>,
    vf_with_vgpu: impl Fn(Address) -> bool,
) -> Vec<Blocker> {
    members
        .into_iter()
        .filter_map(|function| match dma_owner(function.driver.as_deref()) {
            DmaOwner::Host if !vf_with_vgpu(function.address) => {
                function.driver.clone().map(|driver| Blocker { address: function.address, driver })
            }
            _ => None,
        })
        .collect()
}
