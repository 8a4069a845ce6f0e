//! IOMMU groups: the unit that the kernel hands to one VM.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
};

use serde::Serialize;

use crate::{
    driver::{DmaOwner, dma_owner},
    host::{Host, ReadError},
    pci::{Address, Function, Functions, Role},
    printable::printable,
    vendor,
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
    /// Its reserved regions; read for groups with a GPU or a switch only.
    pub reserved: Vec<Reserved>,
    /// Why its reserved regions could not be read, where they are there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved_unknown: Option<String>,
}

/// A range of addresses that the group's devices cannot, or must not, have mapped freely.
///
/// Source: `iommu_group_show_resv_regions` and `iommu_group_resv_type_string`, drivers/iommu/iommu.c.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Reserved {
    /// Its first address, on the device's side of the IOMMU.
    pub start: u64,
    /// Its last address.
    pub end: u64,
    /// `direct`, `direct-relaxable`, `reserved` or `msi`.
    pub kind: String,
}

impl Group {
    /// The regions that the firmware demands to be mapped one to one, whoever has the device (Intel's RMRR, AMD's IVMD, IORT's
    /// RMR nodes). Those it does not insist on once the device is a VM's are `direct-relaxable`, and are none of these.
    pub fn direct_mappings(&self) -> impl Iterator<Item = &Reserved> {
        self.reserved.iter().filter(|region| region.kind == "direct")
    }

    /// Whether the kernel refuses to give the group to a VM, because of such a region: "Firmware has requested this device have
    /// a 1:1 IOMMU mapping, rejecting configuring the device without a 1:1 mapping" (`__iommu_device_set_domain`,
    /// drivers/iommu/iommu.c), before Linux 6.6 "Device is ineligible for IOMMU domain attach due to platform RMRR
    /// requirement" (drivers/iommu/intel/iommu.c).
    #[must_use]
    pub fn forbids_vms(&self) -> bool {
        self.direct_mappings().next().is_some()
    }
}

/// Reads the text of `reserved_regions`: a line a region, `START END TYPE`. Lines that are none are left out.
#[must_use]
pub fn parse_reserved(text: &str) -> Vec<Reserved> {
    let number = |word: &str| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok();
    text.lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let (start, end) = (number(words.next()?)?, number(words.next()?)?);
            Some(Reserved { start, end, kind: printable(words.next()?) })
        })
        .collect()
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
            let node = host.exists(&host.dev("vfio").join(id.to_string())).then(|| group_node(id));
            let name = host.read(&dir.join(id.to_string()).join("name")).unwrap_or_default();
            let strangers = strangers.remove(&id).unwrap_or_default();
            let (reserved, reserved_unknown) =
                if members.iter().any(|address| is_offered(functions, *address)) {
                    reserved(host, id)
                } else {
                    (Vec::new(), None)
                };
            let noiommu = name.trim() == "vfio-noiommu";
            (id, Group { id, members, strangers, node, noiommu, reserved, reserved_unknown })
        })
        .collect())
}

/// Whether a member is a GPU or a switch: only of their groups it matters what a VM could map.
fn is_offered(functions: &Functions, address: Address) -> bool {
    let Some(function) = functions.known.get(&address) else { return false };
    vendor::role(function.vendor, function.device, function.class).is_some_and(Role::is_offered)
}

/// The reserved regions of a group, or why they are not known. A kernel before 4.11 has no such file.
fn reserved(host: &Host, id: u32) -> (Vec<Reserved>, Option<String>) {
    match host.read_if_there(&host.sys("kernel/iommu_groups").join(id.to_string()).join("reserved_regions")) {
        Ok(text) => (parse_reserved(&text.unwrap_or_default()), None),
        Err(error) => (Vec::new(), Some(error.to_string())),
    }
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn group(text: &str) -> Group {
        Group {
            id: 31,
            members: BTreeSet::new(),
            strangers: BTreeSet::new(),
            node: None,
            noiommu: false,
            reserved: parse_reserved(text),
            reserved_unknown: None,
        }
    }

    #[test]
    fn only_a_mapping_that_the_firmware_insists_on_keeps_vms_out() {
        const MSI: &str = "0x00000000fee00000 0x00000000feefffff msi\n";
        for (text, forbids) in [
            ("", false),
            (MSI, false),
            ("0x000000007b800000 0x000000007fffffff direct-relaxable\n", false),
            ("0x000000fd00000000 0x000000ffffffffff reserved\n", false),
            ("0x000000007b800000 0x000000007fffffff direct\n", true),
        ] {
            let group = group(&[text, MSI].concat());
            assert_eq!(group.forbids_vms(), forbids, "{text}");
            assert_eq!(group.reserved.last().unwrap().start, 0xfee0_0000);
        }
        let found = group("0x000000007b800000 0x000000007fffffff direct\nnot a line\n0x1 direct\n");
        let direct = Reserved { start: 0x7b80_0000, end: 0x7fff_ffff, kind: "direct".to_owned() };
        assert_eq!(found.reserved, [direct]);
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in "(?s).{0,200}", start: u64, end: u64, kind in "[a-z-]{1,20}") {
            let _ = parse_reserved(&text);
            let line = parse_reserved(&format!("{start:#018x} {end:#018x} {kind}\n"));
            prop_assert_eq!(line, [Reserved { start, end, kind }]);
        }
    }
}
