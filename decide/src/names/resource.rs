//! Resource names: Kata's aliases, and what Kubernetes and CDI accept.

use std::fmt;

use reason::{Code, Coded};
use serde::Serialize;
use vfio::vendor;

use super::suffix::upper;
use crate::consumer::Consumer;

/// The domain of what no row of the vendors' table speaks of. Nothing such is ever offered.
const NO_VENDOR: &str = "vfiod.dev";

/// The longest part after the `/`, in characters: Kubernetes' rule for qualified names
/// (`k8s.io/apimachinery`, `IsQualifiedName`), which extended resources must be.
const LONGEST_SUFFIX: usize = 63;

/// What of a node is offered, as far as names go by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OfferedRole {
    /// A GPU: alias variable `P_GPU_ALIAS`, default `pgpu`.
    Gpu,
    /// An NVSwitch: alias variable `NVSWITCH_ALIAS`, default `nvswitch`.
    NvSwitch,
}

/// How one role's resources are called for Kata.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Alias {
    /// All models under this one name, taken verbatim.
    Fixed(String),
    /// Each model under its own name.
    PerModel,
}

/// Names that the vendors' device plugins for containers have for whole GPUs, in either domain.
const TAKEN: [&str; 2] = ["gpu", "gpu.shared"];

/// An alias that is another resource's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{variable}={alias}: that resource name is taken by {by}: give another alias, such as pgpu")]
pub struct AliasTaken {
    /// The variable that names it.
    pub variable: &'static str,
    /// The alias.
    pub alias: String,
    /// Whose the name is.
    pub by: &'static str,
}

impl Coded for AliasTaken {
    fn code(&self) -> Code {
        Code::NameRefused
    }

    fn retryable(&self) -> bool {
        false
    }
}

/// Kata's aliases. KubeVirt has none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Aliases {
    /// For GPUs.
    pub gpu: Alias,
    /// For NVSwitches.
    pub nvswitch: Alias,
}

impl Default for Aliases {
    /// Both variables unset: `pgpu` and `nvswitch`.
    fn default() -> Self {
        Self::from_lookup(|_| None)
    }
}

impl Aliases {
    /// From the variables `P_GPU_ALIAS` and `NVSWITCH_ALIAS`: unset gives the default, a value is taken verbatim, and
    /// the empty value asks for a name per model.
    ///
    /// `variable` answers for the environment (`|key| std::env::var(key).ok()`).
    #[must_use]
    pub fn from_lookup(variable: impl Fn(&str) -> Option<String>) -> Self {
        let alias = |key, default: &str| match variable(key) {
            None => Alias::Fixed(default.to_owned()),
            Some(value) if value.is_empty() => Alias::PerModel,
            Some(value) => Alias::Fixed(value),
        };
        Self { gpu: alias("P_GPU_ALIAS", "pgpu"), nvswitch: alias("NVSWITCH_ALIAS", "nvswitch") }
    }

    /// Whether the aliases can be used beside what else a node offers.
    ///
    /// # Errors
    /// When one is the name of a container device plugin's own resource (`gpu`), or both are one: the kubelet would take the
    /// devices of one for those of the other.
    pub fn check(&self) -> Result<(), AliasTaken> {
        let roles = [(OfferedRole::Gpu, "P_GPU_ALIAS"), (OfferedRole::NvSwitch, "NVSWITCH_ALIAS")];
        for (role, variable) in roles {
            if let Alias::Fixed(alias) = self.of(role)
                && TAKEN.contains(&alias.as_str())
            {
                let by = "the device plugin for containers";
                return Err(AliasTaken { variable, alias: alias.clone(), by });
            }
        }
        match (&self.gpu, &self.nvswitch) {
            (Alias::Fixed(gpu), Alias::Fixed(nvswitch)) if gpu == nvswitch => {
                let by = "GPUs (P_GPU_ALIAS)";
                Err(AliasTaken { variable: "NVSWITCH_ALIAS", alias: gpu.clone(), by })
            }
            _ => Ok(()),
        }
    }

    /// The alias of `role`.
    #[must_use]
    pub fn of(&self, role: OfferedRole) -> &Alias {
        match role {
            OfferedRole::Gpu => &self.gpu,
            OfferedRole::NvSwitch => &self.nvswitch,
        }
    }
}

/// A resource name that Kubernetes takes (`nvidia.com/GA102GL_A10`), and for Kata a CDI kind as well.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct ResourceName(String);

impl ResourceName {
    /// Puts the domain of `vendor` (its PCI id) before `suffix` and judges the whole.
    ///
    /// # Errors
    ///
    /// [`NameError`] when the kubelet would refuse the name, or for Kata a CDI reader the class.
    pub fn new(consumer: Consumer, vendor: u16, suffix: &str) -> Result<Self, NameError> {
        let domain = vendor::of(vendor).map_or(NO_VENDOR, |vendor| vendor.domain);
        let name = format!("{domain}/{suffix}");
        match fault(consumer, suffix) {
            None => Ok(Self(name)),
            Some(fault) => Err(NameError { name, fault, consumer }),
        }
    }

    /// The whole name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The part after the `/`: for Kata the CDI class.
    #[must_use]
    pub fn suffix(&self) -> &str {
        self.0.split_once('/').map_or("", |(_, suffix)| suffix)
    }
}

impl fmt::Display for ResourceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl AsRef<str> for ResourceName {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

/// A name that must not be registered. It is shown all the same, as unhealthy, with this as the reason.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("resource name {name:?} cannot be registered: {fault}; {cure}", cure = cure(*.consumer))]
pub struct NameError {
    /// The whole name, for showing.
    pub name: String,
    /// What is wrong with it.
    pub fault: NameFault,
    /// Whom the name was for.
    pub consumer: Consumer,
}

impl Coded for NameError {
    fn code(&self) -> Code {
        Code::NameRefused
    }

    fn retryable(&self) -> bool {
        false
    }
}

/// What Kubernetes, or a CDI reader, would object to in a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NameFault {
    /// Nothing after the `/`.
    #[error("the part after the / is empty")]
    Empty,
    /// More than 63 characters.
    #[error("the part after the / has {0} characters, Kubernetes takes at most 63")]
    TooLong(usize),
    /// A character outside `[A-Za-z0-9._-]`.
    #[error("{0:?} is not among the characters that Kubernetes takes, [A-Za-z0-9._-]")]
    Character(char),
    /// The first or last character is no letter or digit.
    #[error("the part after the / must start and end with a letter or digit, {0:?} is neither")]
    Edge(char),
    /// A dot, for Kata: a CDI class may have one only from CDI 0.6.0, and specs are written in 0.5.0 so that every
    /// Kata release reads them.
    #[error("as a CDI class it may have no dot before CDI 0.6.0")]
    CdiDot,
    /// A class of one character.
    #[error("as a CDI class it needs at least two characters")]
    CdiTooShort,
    /// A class that starts with a digit.
    #[error("as a CDI class it must start with a letter")]
    CdiStart,
}

impl Coded for NameFault {
    fn code(&self) -> Code {
        Code::NameRefused
    }

    fn retryable(&self) -> bool {
        false
    }
}

fn cure(consumer: Consumer) -> &'static str {
    match consumer {
        Consumer::Kubevirt => {
            "give the device another name in a pci.ids file on the node, and set names.file and names.prefer: nodeFile"
        }
        Consumer::Kata => "set P_GPU_ALIAS (GPUs) or NVSWITCH_ALIAS (NVSwitches) to a name that fits",
    }
}

fn fault(consumer: Consumer, suffix: &str) -> Option<NameFault> {
    let (Some(first), Some(last)) = (suffix.chars().next(), suffix.chars().next_back()) else {
        return Some(NameFault::Empty);
    };
    let alien = |c: &char| !(c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'));
    if let Some(c) = suffix.chars().find(alien) {
        return Some(NameFault::Character(c));
    }
    if suffix.len() > LONGEST_SUFFIX {
        return Some(NameFault::TooLong(suffix.len()));
    }
    if let Some(edge) = [first, last].into_iter().find(|c| !c.is_ascii_alphanumeric()) {
        return Some(NameFault::Edge(edge));
    }
    match consumer {
        Consumer::Kubevirt => None,
        Consumer::Kata if suffix.contains('.') => Some(NameFault::CdiDot),
        Consumer::Kata if suffix.len() < 2 => Some(NameFault::CdiTooShort),
        Consumer::Kata if !first.is_ascii_alphabetic() => Some(NameFault::CdiStart),
        Consumer::Kata => None,
    }
}

/// The variable under which virt-launcher looks for the PCI addresses of a resource.
///
/// `PCI_RESOURCE_` and the name upper-cased with `/` and `.` as `_`; nothing else changes, dashes stay (KubeVirt's
/// `pkg/util/util.go`). So names that differ only in case, or in which of `/._` they have, share a variable.
#[must_use]
pub fn env_name(resource: &str) -> String {
    let transformed = resource.chars().map(|c| if matches!(c, '/' | '.') { '_' } else { upper(c) });
    "PCI_RESOURCE_".chars().chain(transformed).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NVIDIA: u16 = 0x10de;
    const BOTH: [Consumer; 2] = [Consumer::Kubevirt, Consumer::Kata];

    #[test]
    fn aliases_unset_set_and_empty() {
        assert_eq!(
            Aliases::default(),
            Aliases { gpu: Alias::Fixed("pgpu".to_owned()), nvswitch: Alias::Fixed("nvswitch".to_owned()) }
        );
        let set = Aliases::from_lookup(|key| match key {
            "P_GPU_ALIAS" => Some(String::new()),
            "NVSWITCH_ALIAS" => Some("My-Switch".to_owned()),
            _ => None,
        });
        assert_eq!(set, Aliases { gpu: Alias::PerModel, nvswitch: Alias::Fixed("My-Switch".to_owned()) });
    }

    #[test]
    fn an_alias_that_is_another_resources_name_is_refused() {
        let aliases = |gpu: &str, nvswitch: &str| {
            let fixed = |alias: &str| Alias::Fixed(alias.to_owned());
            Aliases { gpu: fixed(gpu), nvswitch: fixed(nvswitch) }.check()
        };
        assert_eq!(aliases("pgpu", "nvswitch"), Ok(()));
        assert_eq!(aliases("gpu", "nvswitch").unwrap_err().variable, "P_GPU_ALIAS");
        assert_eq!(aliases("pgpu", "gpu").unwrap_err().variable, "NVSWITCH_ALIAS");
        assert!(aliases("x1", "x1").unwrap_err().to_string().contains("taken by GPUs"));
        let per_model = Aliases { gpu: Alias::PerModel, nvswitch: Alias::PerModel };
        assert_eq!(per_model.check(), Ok(()));
    }

    #[test]
    fn what_kubernetes_refuses_is_refused_for_both() {
        let too_long = "A".repeat(64);
        for (suffix, expected) in [
            ("", NameFault::Empty),
            ("GA104_RTX_A4500_EMBEDDED_GPU_", NameFault::Edge('_')),
            ("_A", NameFault::Edge('_')),
            ("-A", NameFault::Edge('-')),
            ("a/b", NameFault::Character('/')),
            ("a b", NameFault::Character(' ')),
            ("grüße", NameFault::Character('ü')),
            (&too_long, NameFault::TooLong(64)),
        ] {
            for consumer in BOTH {
                let error = ResourceName::new(consumer, NVIDIA, suffix).unwrap_err();
                assert_eq!(error.fault, expected, "{suffix:?} {consumer}");
                assert_eq!(error.name, format!("nvidia.com/{suffix}"), "the text is there to be shown");
            }
        }
        let longest = "A".repeat(63);
        for suffix in ["pgpu", "GA102GL_A10", "a-b_c", &longest] {
            for consumer in BOTH {
                let name = ResourceName::new(consumer, NVIDIA, suffix).unwrap();
                assert_eq!(name.as_str(), format!("nvidia.com/{suffix}"));
                assert_eq!(name.suffix(), suffix);
            }
        }
    }

    #[test]
    fn cdi_refuses_more_than_kubernetes() {
        for (suffix, expected) in
            [("a.b", NameFault::CdiDot), ("a", NameFault::CdiTooShort), ("2330", NameFault::CdiStart)]
        {
            assert!(ResourceName::new(Consumer::Kubevirt, NVIDIA, suffix).is_ok(), "{suffix:?}");
            assert_eq!(
                ResourceName::new(Consumer::Kata, NVIDIA, suffix).unwrap_err().fault,
                expected,
                "{suffix:?}"
            );
        }
    }

    #[test]
    fn a_refusal_says_cause_and_cure() {
        let text = ResourceName::new(Consumer::Kata, NVIDIA, "my.gpu").unwrap_err().to_string();
        assert_eq!(
            text,
            "resource name \"nvidia.com/my.gpu\" cannot be registered: as a CDI class it may have no dot before CDI \
             0.6.0; set P_GPU_ALIAS (GPUs) or NVSWITCH_ALIAS (NVSwitches) to a name that fits"
        );
    }

    #[test]
    fn virt_launchers_variable() {
        for (resource, expected) in [
            ("nvidia.com/GH100_H100-SXM", "PCI_RESOURCE_NVIDIA_COM_GH100_H100-SXM"),
            ("nvidia.com/ffff", "PCI_RESOURCE_NVIDIA_COM_FFFF"),
            ("nvidia.com/a.b/c", "PCI_RESOURCE_NVIDIA_COM_A_B_C"),
        ] {
            assert_eq!(env_name(resource), expected);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn what_kata_takes_kubevirt_takes(suffix in "[A-Za-z0-9._/ -]{0,70}") {
            if let Ok(name) = ResourceName::new(Consumer::Kata, NVIDIA, &suffix) {
                prop_assert_eq!(ResourceName::new(Consumer::Kubevirt, NVIDIA, name.suffix()), Ok(name));
            }
        }
    }
}
