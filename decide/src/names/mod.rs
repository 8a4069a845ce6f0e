//! What a function is called, and under which resource name it is offered.
//!
//! Two sources give names: the database built into the binary, and optionally the node's own pci.ids. The built-in one
//! comes first, so that a distribution's update of its file never renames a resource under people's manifests; the
//! node's file fills in the ids that the built-in one lacks. [`Prefer::NodeFile`] turns that round.
//!
//! * [`suffix`]: from a device's name to the part of a resource name after the `/`
//! * [`resource`]: resource names, Kata's aliases, and what Kubernetes and CDI accept
//! * [`pci_ids`]: the text format

mod builtin;
pub mod pci_ids;
pub mod resource;
pub mod suffix;

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use vfio::pci::{Function, Role};

pub use resource::{Alias, AliasTaken, Aliases, NameError, NameFault, OfferedRole, ResourceName, env_name};
pub use suffix::{kata_suffix, kubevirt_suffix};

use crate::consumer::Consumer;

/// Which source decides where both know an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Prefer {
    /// The binary's: names change only with the agent's version.
    #[default]
    BuiltIn,
    /// The node's: names follow its pci.ids.
    NodeFile,
}

/// The names of PCI devices, from the built-in database and optionally a node's file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Names {
    /// By vendor and device id. Holds only what decides: the preference is applied on building.
    from_node: HashMap<(u16, u16), Box<str>>,
}

impl Names {
    /// The built-in database alone.
    #[must_use]
    pub fn builtin() -> Self {
        Self::default()
    }

    /// The built-in database and the text of a node's pci.ids.
    ///
    /// Never fails: lines that are no entries are passed over (see [`pci_ids::entries`]).
    #[must_use]
    pub fn with_node_file(text: &str, prefer: Prefer) -> Self {
        let mut from_node = HashMap::<_, Box<str>>::new();
        for entry in pci_ids::entries(text) {
            // The first of several entries with one id counts.
            from_node.entry((entry.vendor, entry.device)).or_insert_with(|| entry.name.into());
        }
        // Most of a node's twenty thousand names are the built-in ones again: the agent need not keep them twice.
        from_node.retain(|&(vendor, device), name| match prefer {
            Prefer::BuiltIn => builtin::device(vendor, device).is_none(),
            Prefer::NodeFile => builtin::device(vendor, device) != Some(&**name),
        });
        from_node.shrink_to_fit();
        Self { from_node }
    }

    /// The device's name as the database spells it, without outer white space; `None` when both sources lack the id.
    #[must_use]
    pub fn device(&self, vendor: u16, device: u16) -> Option<&str> {
        self.from_node.get(&(vendor, device)).map(Box::as_ref).or_else(|| builtin::device(vendor, device))
    }

    /// The name under which devices of this vendor and device id are offered to `consumer`.
    ///
    /// KubeVirt: per model, by [`kubevirt_suffix`]. Kata: the alias of `role`, or per model by [`kata_suffix`] where
    /// the alias is empty. A device that no source names, or whose name leaves nothing after sanitising, is called by
    /// its device id, four lower-case hex digits, for both (NVIDIA's Kata plugin says `UNKNOWN_DEVICE` there, one name
    /// for every such model).
    ///
    /// # Errors
    ///
    /// [`NameError`] when Kubernetes, or for Kata CDI, would refuse the name. It carries the name, so that the device
    /// can be shown as unhealthy with the reason; it must not be registered.
    pub fn resource(
        &self,
        consumer: Consumer,
        role: OfferedRole,
        vendor: u16,
        device: u16,
        aliases: &Aliases,
    ) -> Result<ResourceName, NameError> {
        let sanitise = match consumer {
            Consumer::Kubevirt => kubevirt_suffix,
            Consumer::Kata => match aliases.of(role) {
                Alias::Fixed(alias) => return ResourceName::new(consumer, vendor, alias),
                Alias::PerModel => kata_suffix,
            },
        };
        let by_name = self.device(vendor, device).map(sanitise).filter(|suffix| !suffix.is_empty());
        ResourceName::new(consumer, vendor, &by_name.unwrap_or_else(|| format!("{device:04x}")))
    }
}

/// What names the offers of a node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Naming {
    /// The databases.
    pub names: Names,
    /// Kata's aliases.
    pub aliases: Aliases,
}

impl Naming {
    /// The resource under which a GPU or an NVSwitch is offered to `consumer`.
    ///
    /// # Errors
    /// When Kubernetes would refuse the name.
    pub fn resource(
        &self,
        consumer: Consumer,
        role: Role,
        function: &Function,
    ) -> Result<ResourceName, NameError> {
        let role = if role == Role::NvSwitch { OfferedRole::NvSwitch } else { OfferedRole::Gpu };
        self.names.resource(consumer, role, function.vendor, function.device, &self.aliases)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NVIDIA: u16 = 0x10de;

    #[test]
    fn the_node_file_fills_in_what_the_built_in_database_lacks() {
        let text = "10de  NVIDIA\n\t2330  Renamed by an update\n\tfff0  GX999 [Next-Gen]\n";
        let names = Names::with_node_file(text, Prefer::BuiltIn);
        assert_eq!(names.device(NVIDIA, 0x2330), Some("GH100 [H100 SXM5 80GB]"));
        assert_eq!(names.device(NVIDIA, 0xfff0), Some("GX999 [Next-Gen]"));
        assert_eq!(names.device(NVIDIA, 0xffff), None);
    }

    #[test]
    fn the_setting_turns_the_order_round() {
        let text = "10de  NVIDIA\n\t2330  Renamed by an update\n";
        let names = Names::with_node_file(text, Prefer::NodeFile);
        assert_eq!(names.device(NVIDIA, 0x2330), Some("Renamed by an update"));
        assert_eq!(names.device(NVIDIA, 0x2331), Names::builtin().device(NVIDIA, 0x2331), "still filled in");
    }

    #[test]
    fn of_entries_with_one_id_the_first_counts() {
        let known = Names::builtin().device(NVIDIA, 0x2330).unwrap().to_owned();
        let text = format!("10de  NVIDIA\n\t2330  {known}\n\t2330  Second\n\tfff0  First\n\tfff0  Second\n");
        for prefer in [Prefer::BuiltIn, Prefer::NodeFile] {
            let names = Names::with_node_file(&text, prefer);
            assert_eq!(names.device(NVIDIA, 0x2330), Some(known.as_str()));
            assert_eq!(names.device(NVIDIA, 0xfff0), Some("First"));
        }
    }

    #[test]
    fn an_id_that_nobody_knows_is_its_own_name_for_both_consumers() {
        let per_model = Aliases { gpu: Alias::PerModel, nvswitch: Alias::PerModel };
        for consumer in [Consumer::Kubevirt, Consumer::Kata] {
            let name =
                Names::builtin().resource(consumer, OfferedRole::Gpu, NVIDIA, 0xffff, &per_model).unwrap();
            assert_eq!(name.as_str(), "nvidia.com/ffff");
        }
    }

    #[test]
    fn a_name_of_which_nothing_is_left_falls_back_to_the_id() {
        let names = Names::with_node_file("10de  NVIDIA\n\tabcd  -()-\n", Prefer::BuiltIn);
        let name = names
            .resource(Consumer::Kubevirt, OfferedRole::Gpu, NVIDIA, 0xabcd, &Aliases::default())
            .unwrap();
        assert_eq!(name.as_str(), "nvidia.com/abcd");
    }

    #[test]
    fn kata_takes_the_alias_of_the_role_and_kubevirt_none() {
        let names = Names::builtin();
        let aliases = Aliases { gpu: Alias::Fixed("MyGpu-a".to_owned()), ..Aliases::default() };
        let name = |consumer, role| names.resource(consumer, role, NVIDIA, 0x2330, &aliases).unwrap();
        assert_eq!(name(Consumer::Kata, OfferedRole::Gpu).as_str(), "nvidia.com/MyGpu-a");
        assert_eq!(name(Consumer::Kata, OfferedRole::NvSwitch).as_str(), "nvidia.com/nvswitch");
        assert_eq!(name(Consumer::Kubevirt, OfferedRole::Gpu).as_str(), "nvidia.com/GH100_H100_SXM5_80GB");
    }

    #[test]
    fn an_id_that_starts_with_a_digit_is_no_cdi_class() {
        let per_model = Aliases { gpu: Alias::PerModel, nvswitch: Alias::PerModel };
        let error = Names::builtin()
            .resource(Consumer::Kata, OfferedRole::Gpu, NVIDIA, 0x0001, &per_model)
            .unwrap_err();
        assert_eq!((error.name.as_str(), error.fault), ("nvidia.com/0001", NameFault::CdiStart));
    }
}
