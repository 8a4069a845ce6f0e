//! Which of this node's functions a text of somebody else's may mean: a device's id, a claim's device, a CDI name.
//!
//! Not known is in use: a text that may mean one of this node's GPUs, and cannot be tied to one, counts against all of
//! them. A text that has nothing to do with GPUs (a network card's address, `kvm`) counts against none.

use std::collections::BTreeSet;

use vfio::{pci::Address, vendor};

use crate::inventory::Inventory;

/// What a text may mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tie {
    /// This function of the node.
    Function(Address),
    /// Any GPU or NVSwitch of this vendor, or of any vendor where none is given.
    Any(Option<u16>),
    /// Nothing of this node's that vfiod serves.
    Nothing,
}

/// What the thing may mean that is called so: `name` is the resource or driver (`nvidia.com/gpu`, `gpu.nvidia.com`), `ids` are
/// what it says of the one device.
#[must_use]
pub fn tie<'a>(inventory: &Inventory, name: &str, ids: impl IntoIterator<Item = &'a str>) -> Tie {
    let ids: Vec<&str> = ids.into_iter().collect();
    // An address says it all, in whatever text it stands.
    let addresses: BTreeSet<Address> = ids.iter().flat_map(|id| addresses(id)).collect();
    if let Some(address) = addresses.iter().find(|address| inventory.unit_of(**address).is_some()) {
        return Tie::Function(*address);
    }
    if addresses.iter().any(|address| inventory.functions.contains_key(address)) {
        return Tie::Nothing;
    }
    let name = name.to_ascii_lowercase();
    if let Some(vendor) = vendor::TABLE.iter().find(|vendor| in_domain(&name, vendor.domain)) {
        return Tie::Any(Some(vendor.id));
    }
    let all = || vendor::TABLE.iter().map(|vendor| vendor.id);
    let means = [name.as_str()].into_iter().chain(ids).any(|text| vendor::may_mean_gpu(text, all()));
    if means { Tie::Any(None) } else { Tie::Nothing }
}

/// Whether a resource (`nvidia.com/gpu`) or a driver (`gpu.nvidia.com`) is of a domain.
fn in_domain(name: &str, domain: &str) -> bool {
    let of = name.split_once('/').map_or(name, |(of, _)| of);
    of == domain || of.strip_suffix(domain).is_some_and(|before| before.ends_with('.'))
}

/// The PCI addresses that stand in a text, with or without their domain, and with `-` or `_` where names allow no `:`.
fn addresses(text: &str) -> Vec<Address> {
    let parts: Vec<&str> = text.split(|c: char| !(c.is_ascii_hexdigit() || ":.-_".contains(c))).collect();
    parts.into_iter().flat_map(spelt).collect()
}

/// The addresses in a text of hex digits and separators: three or four numbers in a row that fit.
fn spelt(part: &str) -> Vec<Address> {
    let numbers: Vec<&str> = part.split([':', '.', '-', '_']).collect();
    let with_domain = numbers.windows(4).filter_map(|four| {
        let [domain, bus, device, function] = four else { return None };
        format!("{domain}:{bus}:{device}.{function}").parse().ok()
    });
    let without = numbers.windows(3).filter_map(|three| {
        let [bus, device, function] = three else { return None };
        format!("0000:{bus}:{device}.{function}").parse().ok()
    });
    with_domain.chain(without).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_found_in_whatever_text_it_stands() {
        let at = |text: &str| text.parse::<Address>().unwrap();
        for (text, expected) in [
            ("0000:21:00.0", "0000:21:00.0"),
            ("21:00.0", "0000:21:00.0"),
            ("gpu-0000-21-00-0", "0000:21:00.0"),
            ("pci_10000_01_00_0", "10000:01:00.0"),
            ("vendor.com/gpu=0000:21:00.0", "0000:21:00.0"),
            ("GPU at 0000:21:00.0!", "0000:21:00.0"),
        ] {
            assert!(addresses(text).contains(&at(expected)), "{text}: {:?}", addresses(text));
        }
        for text in ["gpu-0", "", "c0ffee00-0000-4000-8000-000000000001", "2024-01-01", "kvm117", "0"] {
            assert_eq!(addresses(text), [], "{text}");
        }
    }

    #[test]
    fn a_domain_is_matched_whole() {
        assert!(in_domain("nvidia.com/gpu", "nvidia.com") && in_domain("gpu.nvidia.com", "nvidia.com"));
        assert!(
            !in_domain("notnvidia.com/gpu", "nvidia.com")
                && !in_domain("nvidia.com.example/gpu", "nvidia.com")
        );
    }
}
