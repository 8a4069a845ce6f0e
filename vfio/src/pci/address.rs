//! PCI addresses as the kernel spells them.

use std::{fmt, ops::RangeInclusive, str::FromStr};

use reason::{Code, Coded};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

/// The address of one PCI function: `0000:3b:00.0`.
///
/// Domains are 32 bits wide: Intel VMD makes domains from `10000` on
/// (drivers/pci/controller/vmd.c). Spelt as the kernel does (`%04x:%02x:%02x.%d`), ordered by number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

/// A text that is no PCI address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no PCI address: it takes DOMAIN:BUS:DEVICE.FUNCTION in hex, such as 0000:3b:00.0")]
pub struct BadAddress(pub String);

impl Coded for BadAddress {
    fn code(&self) -> Code {
        Code::InvalidRequest
    }

    fn retryable(&self) -> bool {
        false
    }
}

impl Address {
    /// An address from its numbers, or nothing where `device` exceeds 31 or `function` 7.
    #[must_use]
    pub const fn new(domain: u32, bus: u8, device: u8, function: u8) -> Option<Self> {
        if device > 31 || function > 7 {
            return None;
        }
        Some(Self { domain, bus, device, function })
    }

    /// The PCI domain (segment).
    #[must_use]
    pub const fn domain(self) -> u32 {
        self.domain
    }

    /// The bus within the domain.
    #[must_use]
    pub const fn bus(self) -> u8 {
        self.bus
    }

    /// The function number within the slot, 0 to 7.
    #[must_use]
    pub const fn function(self) -> u8 {
        self.function
    }

    /// The address `steps` further by routing id (bus, device and function as one number), or nothing past the domain's
    /// last. So are virtual functions numbered from their physical one (`pci_iov_virtfn_bus`, drivers/pci/iov.c).
    #[must_use]
    pub const fn further(self, steps: u32) -> Option<Self> {
        let here = (self.bus as u32) << 8 | (self.device as u32) << 3 | self.function as u32;
        match here.checked_add(steps) {
            Some(there) if there <= 0xffff => {
                let [_, _, bus, slot] = there.to_be_bytes();
                Some(Self { domain: self.domain, bus, device: slot >> 3, function: slot & 7 })
            }
            _ => None,
        }
    }

    /// All addresses of the slot that it is in.
    #[must_use]
    pub const fn slot(self) -> RangeInclusive<Self> {
        RangeInclusive::new(Self { function: 0, ..self }, Self { function: 7, ..self })
    }

    /// Whether both are functions of one card: same domain, bus and device.
    #[must_use]
    pub const fn same_slot(self, other: Self) -> bool {
        self.domain == other.domain && self.bus == other.bus && self.device == other.device
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        f.pad(&format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}"))
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A hex number of `digits.0..=digits.1` digits and nothing else (`from_str_radix` alone would take a sign).
fn hex(text: &str, digits: (usize, usize)) -> Option<u32> {
    let fits = (digits.0..=digits.1).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit());
    fits.then(|| u32::from_str_radix(text, 16).ok()).flatten()
}

impl FromStr for Address {
    type Err = BadAddress;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = || {
            let (rest, function) = text.rsplit_once('.')?;
            let mut parts = rest.split(':');
            let (domain, bus, device) = (parts.next()?, parts.next()?, parts.next()?);
            if parts.next().is_some() {
                return None;
            }
            Self::new(
                hex(domain, (4, 8))?,
                u8::try_from(hex(bus, (2, 2))?).ok()?,
                u8::try_from(hex(device, (2, 2))?).ok()?,
                u8::try_from(hex(function, (1, 1))?).ok()?,
            )
        };
        parse().ok_or_else(|| BadAddress(text.to_owned()))
    }
}

impl Serialize for Address {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Address {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn spells_as_the_kernel_does() {
        for text in ["0000:3b:00.0", "0000:ff:1f.7", "10000:01:00.0", "0001:04:00.0", "fffffffe:00:00.1"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn refuses_what_is_no_address() {
        for text in [
            "",
            "3b:00.0",
            "0000:3b:00",
            "0000:3b:20.0",
            "0000:3b:00.8",
            "0000:3b:00.00",
            "0000:+b:00.0",
            "000:3b:00.0",
            "000000000:3b:00.0",
            "0000:3b:00.0\n",
            "0000:3b:00:0.0",
            "..",
            "0000:3b:0/.0",
        ] {
            assert_eq!(text.parse::<Address>(), Err(BadAddress(text.to_owned())), "{text:?}");
        }
    }

    #[test]
    fn virtual_functions_are_counted_over_slots_and_buses() {
        for (from, steps, to) in [
            ("0001:04:00.0", 2, Some("0001:04:00.2")),
            ("0001:04:00.0", 49, Some("0001:04:06.1")),
            ("0000:d8:00.0", 35, Some("0000:d8:04.3")),
            ("0000:3b:1f.7", 1, Some("0000:3c:00.0")),
            ("0000:ff:1f.7", 1, None),
            ("0000:00:00.0", u32::MAX, None),
        ] {
            let found = from.parse::<Address>().unwrap().further(steps);
            assert_eq!(found.map(|address| address.to_string()).as_deref(), to, "{from} + {steps}");
        }
    }

    proptest! {
        #[test]
        fn any_address_survives_its_spelling(domain: u32, bus: u8, device in 0u8..32, function in 0u8..8) {
            let address = Address::new(domain, bus, device, function).unwrap();
            prop_assert_eq!(address.to_string().parse::<Address>(), Ok(address));
        }
    }
}
