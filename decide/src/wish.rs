//! What flags, config and (later) the node's label ask of a node, resolved into one wish.
//!
//! Each source says some of it, and the first that says a thing decides. What cannot be understood is no wish: the node
//! keeps its present state, and the reason is shown.

use std::{fmt, str::FromStr};

use reason::{Code, Coded, Reason};
use serde::{Deserialize, Serialize};

use crate::consumer::Consumer;

/// What a node's GPUs serve: the three values of the label `nvidia.com/gpu.workload.config`.
///
/// A node has exactly one at a time. Values are matched exactly; anything else is no wish at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WorkloadType {
    /// The host's own driver, for containers.
    Container,
    /// Whole functions on vfio-pci, for virtual machines.
    VmPassthrough,
    /// Slices of a GPU (mediated devices, SR-IOV VFs) for virtual machines.
    VmVgpu,
}

/// What a node shall become: the plan's second input, beside the inventory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Desired {
    /// The workload type asked for.
    pub workload_type: WorkloadType,
    /// Who takes the devices of a VM type.
    pub consumer: Consumer,
    /// Give functions that the kernel bound to vfio by ids at boot to the host driver as well.
    pub adopt_boot_bound: bool,
}

/// What one source says; none: it says nothing of that.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Said {
    /// The workload type.
    pub workload_type: Option<WorkloadType>,
    /// Who takes the devices of a VM type.
    pub consumer: Option<Consumer>,
    /// Whether functions bound at boot are given to the host driver as well.
    pub adopt_boot_bound: Option<bool>,
}

/// A source of wishes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// It says this.
    Says(Said),
    /// It cannot be understood, and why.
    Broken(Reason),
}

/// What comes of all sources.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wish {
    /// This is asked.
    Clear(Desired),
    /// It is not clear what is asked: the present state is kept.
    Unclear(Reason),
}

/// Puts together what `sources` say, the first of them that says a thing deciding it.
///
/// One that cannot be understood makes the whole unclear: what it would have said is not known.
#[must_use]
pub fn resolve(sources: &[Source]) -> Wish {
    let mut all = Said::default();
    for source in sources {
        match source {
            Source::Broken(reason) => return Wish::Unclear(reason.clone()),
            Source::Says(said) => {
                all.workload_type = all.workload_type.or(said.workload_type);
                all.consumer = all.consumer.or(said.consumer);
                all.adopt_boot_bound = all.adopt_boot_bound.or(said.adopt_boot_bound);
            }
        }
    }
    let Some(workload_type) = all.workload_type else {
        let text = "nothing is asked of this node: give --workload-type, or workloadType in the config file";
        return Wish::Unclear(Reason::new(Code::WishUnclear, text));
    };
    Wish::Clear(Desired {
        workload_type,
        consumer: all.consumer.unwrap_or_default(),
        adopt_boot_bound: all.adopt_boot_bound.unwrap_or_default(),
    })
}

impl Wish {
    /// The wish, as far as this version's agent serves it: what it does not serve yet is unclear.
    #[must_use]
    pub fn served(self) -> Self {
        let not_yet = |text: &str| Self::Unclear(Reason::new(Code::NotYet, text));
        match &self {
            Self::Clear(desired) if desired.workload_type == WorkloadType::VmVgpu => {
                not_yet("not yet: this version does not serve vm-vgpu; nothing was touched")
            }
            Self::Clear(desired) if desired.consumer == Consumer::Kata => not_yet(
                "not yet: this version's agent serves KubeVirt only (inspect and plan answer for Kata); nothing was \
                 touched",
            ),
            Self::Clear(_) | Self::Unclear(_) => self,
        }
    }
}

/// A workload type that is none of the three.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no workload type: it takes container, vm-passthrough or vm-vgpu, spelt exactly so")]
pub struct UnknownWorkloadType(pub String);

impl Coded for UnknownWorkloadType {
    fn code(&self) -> Code {
        Code::WishUnclear
    }

    fn retryable(&self) -> bool {
        false
    }
}

impl WorkloadType {
    /// All three.
    pub const ALL: [Self; 3] = [Self::Container, Self::VmPassthrough, Self::VmVgpu];

    /// As it is spelt.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Container => "container",
            Self::VmPassthrough => "vm-passthrough",
            Self::VmVgpu => "vm-vgpu",
        }
    }
}

impl FromStr for WorkloadType {
    type Err = UnknownWorkloadType;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|known| known.as_str() == text);
        found.ok_or_else(|| UnknownWorkloadType(text.to_owned()))
    }
}

impl fmt::Display for WorkloadType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn says(workload_type: Option<WorkloadType>, consumer: Option<Consumer>) -> Source {
        Source::Says(Said { workload_type, consumer, adopt_boot_bound: None })
    }

    #[test]
    fn workload_types_are_matched_exactly() {
        for known in WorkloadType::ALL {
            assert_eq!(known.to_string().parse(), Ok(known));
        }
        for near in ["", "Container", "vm_passthrough", " container", "vm-passthrough\n"] {
            assert_eq!(near.parse::<WorkloadType>(), Err(UnknownWorkloadType(near.to_owned())));
        }
    }

    #[test]
    fn the_first_source_that_says_a_thing_decides_it() {
        let flags = says(Some(WorkloadType::Container), None);
        let config = says(Some(WorkloadType::VmPassthrough), Some(Consumer::Kata));
        let Wish::Clear(desired) = resolve(&[flags, config]) else { panic!() };
        assert_eq!((desired.workload_type, desired.consumer), (WorkloadType::Container, Consumer::Kata));
        let Wish::Clear(desired) = resolve(&[says(Some(WorkloadType::Container), None)]) else { panic!() };
        assert_eq!(desired.consumer, Consumer::Kubevirt);
    }

    #[test]
    fn what_cannot_be_understood_is_no_wish() {
        let reason = Reason::new(Code::ConfigRefused, "config file /etc/x:3 does not fit");
        let broken = Source::Broken(reason.clone());
        let flags = says(Some(WorkloadType::Container), None);
        assert_eq!(resolve(&[flags, broken]), Wish::Unclear(reason));
        let Wish::Unclear(reason) = resolve(&[says(None, Some(Consumer::Kata))]) else { panic!() };
        assert_eq!(reason.code, Code::WishUnclear);
    }

    #[test]
    fn what_is_not_served_yet_is_unclear() {
        let wish = |workload_type, consumer| {
            Wish::Clear(Desired { workload_type, consumer, adopt_boot_bound: false })
        };
        for wish in [
            wish(WorkloadType::VmVgpu, Consumer::Kubevirt),
            wish(WorkloadType::VmPassthrough, Consumer::Kata),
        ] {
            assert!(matches!(wish.served(), Wish::Unclear(Reason { code: Code::NotYet, .. })));
        }
        let served = wish(WorkloadType::VmPassthrough, Consumer::Kubevirt);
        assert_eq!(served.clone().served(), served);
    }
}
