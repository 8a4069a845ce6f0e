//! The id of what is offered.

use std::{fmt, str::FromStr};

use reason::{Code, Coded};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use uuid::Uuid;
use vfio::pci::Address;

/// What one offered device is called, in offers, holds, Allocates and status alike: in text its PCI address
/// (`0000:3b:00.0`), or a mediated device's UUID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OfferId {
    /// A PCI function, whole.
    Function(Address),
    /// A mediated device.
    Mdev(Uuid),
}

/// A text that is no id of anything offered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is neither a PCI address such as 0000:3b:00.0 nor a UUID")]
pub struct BadOfferId(pub String);

impl Coded for BadOfferId {
    fn code(&self) -> Code {
        Code::InvalidRequest
    }

    fn retryable(&self) -> bool {
        false
    }
}

impl OfferId {
    /// The PCI function, where it is one.
    #[must_use]
    pub fn function(self) -> Option<Address> {
        match self {
            Self::Function(address) => Some(address),
            Self::Mdev(_) => None,
        }
    }
}

impl From<Address> for OfferId {
    fn from(address: Address) -> Self {
        Self::Function(address)
    }
}

impl fmt::Display for OfferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Function(address) => fmt::Display::fmt(address, f),
            Self::Mdev(uuid) => fmt::Display::fmt(uuid, f),
        }
    }
}

impl FromStr for OfferId {
    type Err = BadOfferId;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Ok(address) = text.parse() {
            return Ok(Self::Function(address));
        }
        // Of the spellings that a UUID may have only the kernel's own: another would be another id to the kubelet.
        let uuid = Uuid::try_parse(text).ok().filter(|uuid| uuid.to_string() == text);
        uuid.map(Self::Mdev).ok_or_else(|| BadOfferId(text.to_owned()))
    }
}

impl Serialize for OfferId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for OfferId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_spelt_one_way() {
        for text in ["0000:3b:00.0", "10000:01:00.0", "c0ffee00-0000-4000-8000-000000000001"] {
            assert_eq!(text.parse::<OfferId>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "3b:00.0",
            "C0FFEE00-0000-4000-8000-000000000001",
            "c0ffee00000040008000000000000001",
            "{c0ffee00-0000-4000-8000-000000000001}",
            "gpu-0",
        ] {
            assert_eq!(text.parse::<OfferId>(), Err(BadOfferId(text.to_owned())), "{text:?}");
        }
    }
}
