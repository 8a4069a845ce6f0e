//! GPU vendors: what differs between them is a row of one table, and adding one touches that table and its tests.
//!
//! A row says which functions are GPUs, switches and companions, which host drivers they have, what the nodes of those
//! drivers below `/dev` give their holder, how the vendor's resources are called, and which services of the host keep its
//! devices open. All of it is data; the rules that read it are here and in [`crate::pci::role`].

mod amd;
mod node;
mod nvidia;
mod service;

use std::path::PathBuf;

pub use node::{Common, Directory, Holds, Name, Own, Scope, nodes};
pub use service::Service;

use crate::{
    host::Host,
    pci::{Address, Class, Role},
};

/// A vendor's row.
#[derive(Debug)]
pub struct Vendor {
    /// Its PCI vendor id.
    pub id: u16,
    /// Its name, for people.
    pub name: &'static str,
    /// The exact class codes of its GPUs.
    pub gpu_classes: &'static [Class],
    /// Which of its functions are switches between GPUs; none where it has none that are PCI functions.
    pub switches: Option<Switches>,
    /// The exact class codes of what belongs to a GPU in the same slot.
    pub companion_classes: &'static [Class],
    /// The host drivers of its GPUs, by their directories below `/sys/bus/pci/drivers`.
    pub gpu_drivers: &'static [&'static str],
    /// The host drivers of its switches.
    pub switch_drivers: &'static [&'static str],
    /// Where the nodes of those drivers are, below the root.
    pub directories: &'static [Directory],
    /// The nodes of one function; none where sysfs tells of them ([`crate::drm`]).
    pub own: Option<Own>,
    /// The nodes that are common to the driver. The first row whose name fits a node counts.
    pub common: &'static [Common],
    /// The file below `/proc` that keeps the driver's other users away from a function about to be unbound, `ADDRESS`
    /// standing for it; none where the driver has none.
    pub unbind_lock: Option<&'static str>,
    /// The domain of its resources in Kubernetes.
    pub domain: &'static str,
    /// Words, in lower case, by which the name of a resource, DRA driver or CDI kind of any domain may mean one of its GPUs,
    /// beside [`WORDS`].
    pub words: &'static [&'static str],
    /// Its services on a host that have GPUs open as a matter of course.
    pub services: &'static [Service],
}

/// Which functions are switches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Switches {
    /// Their exact class code.
    pub class: Class,
    /// The lowest device id: older parts of the same vendor may carry the class.
    pub from_device: u16,
}

/// All vendors. Another one is another row here.
pub const TABLE: &[&Vendor] = &[&nvidia::ROW, &amd::ROW];

/// Words, in lower case, by which a name may mean a GPU of any vendor.
pub const WORDS: &[&str] = &["accelerator", "cuda", "gpu", "graphics", "vfio"];

/// The row of a vendor id.
#[must_use]
pub fn of(id: u16) -> Option<&'static Vendor> {
    TABLE.iter().copied().find(|vendor| vendor.id == id)
}

/// What a function is by its own ids, whatever sits beside it ([`Vendor::role`]); none for a vendor without a row.
#[must_use]
pub fn role(vendor: u16, device: u16, class: Class) -> Option<Role> {
    of(vendor)?.role(device, class)
}

/// Whether the name of a resource, DRA driver or CDI kind may mean a GPU of one of `vendors` (PCI vendor ids). A name that
/// says nothing of the kind may still do so: nobody is made to name things after what they are.
#[must_use]
pub fn may_mean_gpu(name: &str, vendors: impl IntoIterator<Item = u16>) -> bool {
    let name = name.to_ascii_lowercase();
    let meant = |words: &[&str]| words.iter().any(|word| name.contains(word));
    meant(WORDS)
        || vendors
            .into_iter()
            .filter_map(of)
            .any(|vendor| name.contains(vendor.domain) || meant(vendor.words))
}

impl Vendor {
    /// What a function of this vendor is by its own ids: GPU, switch, or what is a companion where it is beside a GPU.
    #[must_use]
    pub fn role(&self, device: u16, class: Class) -> Option<Role> {
        if self.gpu_classes.contains(&class) {
            return Some(Role::Gpu);
        }
        if self.switches.is_some_and(|rule| rule.class == class && device >= rule.from_device) {
            return Some(Role::NvSwitch);
        }
        self.companion_classes.contains(&class).then_some(Role::Companion)
    }

    /// The vendor's own host drivers for functions of `role`: none for companions, which have the host's usual ones.
    #[must_use]
    pub fn host_drivers(&self, role: Role) -> &'static [&'static str] {
        match role {
            Role::Gpu => self.gpu_drivers,
            Role::NvSwitch => self.switch_drivers,
            Role::Companion | Role::Vf | Role::Bridge | Role::Foreign => &[],
        }
    }

    /// The file whose lock keeps others away from `address` while it is unbound. It exists only while the driver has the
    /// function, and not with every version of it.
    #[must_use]
    pub fn unbind_lock(&self, host: &Host, address: Address) -> Option<PathBuf> {
        self.unbind_lock.map(|pattern| host.proc(&pattern.replace("ADDRESS", &address.to_string())))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_row_is_complete_and_none_is_there_twice() {
        let ids: BTreeSet<u16> = TABLE.iter().map(|vendor| vendor.id).collect();
        assert_eq!(ids.len(), TABLE.len());
        for vendor in TABLE {
            assert!(!vendor.gpu_classes.is_empty() && !vendor.gpu_drivers.is_empty(), "{}", vendor.name);
            assert_eq!(vendor.switches.is_some(), !vendor.switch_drivers.is_empty(), "{}", vendor.name);
            assert!(vendor.words.iter().chain(WORDS).all(|word| *word == word.to_ascii_lowercase()));
            assert!(vendor.unbind_lock.is_none_or(|pattern| pattern.contains("ADDRESS")));
            assert!(vendor.common.iter().all(|common| !vendor.host_drivers(common.role).is_empty()));
            assert_eq!(of(vendor.id).unwrap().domain, vendor.domain);
        }
        assert!(of(0x8086).is_none());
    }

    #[test]
    fn names_that_may_mean_a_gpu() {
        const NVIDIA: u16 = 0x10de;
        const AMD: u16 = 0x1002;
        for (name, vendors, expected) in [
            ("nvidia.com/GA102GL_A10", &[NVIDIA][..], true),
            ("NVIDIA.com/mig-1g.5gb", &[NVIDIA], true),
            ("nvidia.com/GA102GL_A10", &[AMD], false),
            ("amd.com/mi300x", &[AMD], true),
            ("amd.com/mi300x", &[NVIDIA], false),
            ("gpu.example.org", &[], true),
            ("devices.kubevirt.io/vfio", &[], true),
            ("kubernetes.io/arch-amd64", &[AMD], false),
            ("intel.com/sriov_net", &[NVIDIA, AMD], false),
        ] {
            assert_eq!(may_mean_gpu(name, vendors.iter().copied()), expected, "{name} {vendors:x?}");
        }
    }

    #[test]
    fn the_unbind_lock_is_a_path_of_its_function() {
        let tree = tempfile::tempdir().unwrap();
        std::fs::create_dir(tree.path().join("sys")).unwrap();
        let host = Host::at(tree.path()).unwrap();
        let address = "0000:3b:00.0".parse().unwrap();
        let lock = |id| of(id).unwrap().unbind_lock(&host, address);
        let path = "proc/driver/nvidia/gpus/0000:3b:00.0/unbindLock";
        assert_eq!(lock(0x10de), Some(tree.path().join(path)));
        assert_eq!(lock(0x1002), None);
    }
}
