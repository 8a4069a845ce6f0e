//! Which device a function is, wherever it sits.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Class, hex};

/// What tells one device from another at the same address: an address names a slot, and a card may be swapped. Two cards of the
/// same make are one here.
///
/// Source of each field: PCI Express Base Specification, 7.5.1 (Vendor ID, Device ID, Class Code, Subsystem IDs).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Identity {
    /// Vendor id.
    #[serde(with = "hex")]
    pub vendor: u16,
    /// Device id.
    #[serde(with = "hex")]
    pub device: u16,
    /// Who made the board; 0 where the function does not say.
    #[serde(with = "hex")]
    pub subsystem_vendor: u16,
    /// Which board it is; 0 where the function does not say.
    #[serde(with = "hex")]
    pub subsystem_device: u16,
    /// Exact class code.
    pub class: Class,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vendor, device, subsystem_vendor, subsystem_device, class } = self;
        write!(
            f,
            "{vendor:04x}:{device:04x} (subsystem {subsystem_vendor:04x}:{subsystem_device:04x}, class {class})"
        )
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn it_is_shown_as_pci_ids_are() {
        let identity = Identity {
            vendor: 0x10de,
            device: 0x2330,
            subsystem_vendor: 0x10de,
            subsystem_device: 0x16c1,
            class: Class(0x03_02_00),
        };
        assert_eq!(identity.to_string(), "10de:2330 (subsystem 10de:16c1, class 030200)");
        let json = serde_json::json!({"vendor": "10de", "device": "2330", "subsystem_vendor": "10de",
                                      "subsystem_device": "16c1", "class": "030200"});
        assert_eq!(serde_json::to_value(identity).unwrap(), json);
    }

    proptest! {
        #[test]
        fn any_identity_survives_its_spelling(ids: [u16; 4], class in 0_u32..1 << 24) {
            let [vendor, device, subsystem_vendor, subsystem_device] = ids;
            let identity = Identity { vendor, device, subsystem_vendor, subsystem_device, class: Class(class) };
            let text = serde_json::to_string(&identity).unwrap();
            prop_assert_eq!(serde_json::from_str::<Identity>(&text).unwrap(), identity);
        }
    }
}
