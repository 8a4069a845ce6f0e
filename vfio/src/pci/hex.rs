//! Ids as PCI people write them: four hex digits.

use serde::{Deserialize, Deserializer, Serializer, de::Error};

pub(super) fn serialize<S: Serializer>(id: &u16, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{id:04x}"))
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u16, D::Error> {
    let text = String::deserialize(deserializer)?;
    u16::from_str_radix(&text, 16).map_err(D::Error::custom)
}
