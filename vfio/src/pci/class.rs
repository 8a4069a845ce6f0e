//! PCI class codes, and what functions can be to a passthrough node.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

/// A PCI class code, 24 bits: base class, subclass, programming interface (`0x030200`).
///
/// Shown as six hex digits. Source: PCI Code and ID Assignment Specification, chapter 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Class(pub u32);

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{:06x}", self.0))
    }
}

impl Serialize for Class {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Class {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        u32::from_str_radix(&text, 16).map(Self).map_err(D::Error::custom)
    }
}

/// What a function is to a passthrough node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// A GPU: moved and offered.
    Gpu,
    /// An NVSwitch: moved and offered.
    NvSwitch,
    /// Audio, USB or UCSI function of a GPU's card: moved with its GPU, never offered by itself.
    Companion,
    /// A virtual function of an SR-IOV GPU: left to the vGPU workload type.
    Vf,
    /// A PCI bridge or host bridge: left alone.
    Bridge,
    /// Anything else: never touched.
    Foreign,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Gpu => "GPU",
            Self::NvSwitch => "NVSwitch",
            Self::Companion => "companion",
            Self::Vf => "VF",
            Self::Bridge => "bridge",
            Self::Foreign => "foreign",
        })
    }
}

impl Role {
    /// Whether functions of this role are offered by themselves: all that can be asked about a function is asked about these.
    #[must_use]
    pub fn is_offered(self) -> bool {
        matches!(self, Self::Gpu | Self::NvSwitch)
    }
}
