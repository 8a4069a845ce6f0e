//! Who takes the devices of a VM workload type. What each gets is rendered in [`crate::grant`], how its resources are called
//! is in [`crate::names`]; nothing else asks which one it is.

use std::{fmt, str::FromStr};

use reason::{Code, Coded, Reason};
use serde::{Deserialize, Serialize};

use crate::id::OfferId;

/// Who takes the devices of a VM workload type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Consumer {
    /// KubeVirt: environment variables and device nodes in the virt-launcher container.
    #[default]
    Kubevirt,
    /// Kata Containers: device nodes, and CDI specs looked up by the runtime.
    Kata,
}

/// A consumer that is none of the two.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no consumer: it takes kubevirt or kata, spelt exactly so")]
pub struct UnknownConsumer(pub String);

impl Coded for UnknownConsumer {
    fn code(&self) -> Code {
        Code::WishUnclear
    }

    fn retryable(&self) -> bool {
        false
    }
}

impl Consumer {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Kubevirt, Self::Kata];

    /// As it is spelt.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Kubevirt => "kubevirt",
            Self::Kata => "kata",
        }
    }

    /// Why this consumer could not use a device at all, if so.
    #[must_use]
    pub fn cannot_use(self, id: OfferId) -> Option<Reason> {
        let wide = id.function().is_some_and(|address| address.domain() > 0xffff);
        let text = "KubeVirt takes PCI domains of four hex digits only";
        (self == Self::Kubevirt && wide).then(|| Reason::new(Code::DomainTooWide, text))
    }
}

impl FromStr for Consumer {
    type Err = UnknownConsumer;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|known| known.as_str() == text);
        found.ok_or_else(|| UnknownConsumer(text.to_owned()))
    }
}

impl fmt::Display for Consumer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}
