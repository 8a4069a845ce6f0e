//! The PCI Express link of a function: how fast and how wide, now and at most.

use std::fmt;

use serde::{Serialize, Serializer};

/// A link's speed, in megatransfers per second and lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct LinkSpeed(u32);

impl LinkSpeed {
    /// The speed of a code in Link Capabilities or Link Status (PCI Express Base Specification, 7.5.3.6 and 7.5.3.8:
    /// 1 is 2.5 GT/s, 6 is 64 GT/s); nothing for a code that no revision gives a meaning.
    #[must_use]
    pub fn from_code(code: u32) -> Option<Self> {
        match code {
            1 => Some(Self(2_500)),
            2 => Some(Self(5_000)),
            3 => Some(Self(8_000)),
            4 => Some(Self(16_000)),
            5 => Some(Self(32_000)),
            6 => Some(Self(64_000)),
            _ => None,
        }
    }

    /// The speed as `current_link_speed` and `max_link_speed` spell it: `8 GT/s`, `32.0 GT/s PCIe`; nothing for
    /// `Unknown` (`pci_speed_string`, drivers/pci/probe.c).
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (number, _) = text.trim().split_once(" GT/s")?;
        let (whole, tenth) = number.split_once('.').unwrap_or((number, "0"));
        let whole: u32 = whole.parse().ok()?;
        let tenth: u32 = tenth.parse().ok().filter(|tenth| *tenth < 10)?;
        Some(Self(whole.checked_mul(1_000)?.checked_add(tenth * 100)?)).filter(|speed| speed.0 > 0)
    }
}

impl fmt::Display for LinkSpeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{} GT/s", self.0 / 1_000, self.0 % 1_000 / 100)
    }
}

impl Serialize for LinkSpeed {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// How many lanes, as `current_link_width` and `max_link_width` say it: 0 and 255 are "not known" (`PCIE_LNK_WIDTH_UNKNOWN`,
/// include/linux/pci.h).
#[must_use]
pub fn parse_width(text: &str) -> Option<u8> {
    text.trim().parse().ok().and_then(known_width)
}

fn known_width(lanes: u8) -> Option<u8> {
    (1..=32).contains(&lanes).then_some(lanes)
}

/// What is known of a link. An idle one may be slow: GPUs lower the speed to save power, so a slow link is no fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Link {
    /// The speed now.
    pub current_speed: Option<LinkSpeed>,
    /// The lanes now.
    pub current_width: Option<u8>,
    /// The highest speed that the function can do.
    pub max_speed: Option<LinkSpeed>,
    /// The most lanes that it has.
    pub max_width: Option<u8>,
}

impl Link {
    /// A link from the registers Link Capabilities and Link Status.
    #[must_use]
    pub fn from_registers(capabilities: u32, status: u16) -> Self {
        let width = |register: u32| u8::try_from(register >> 4 & 0x3f).ok().and_then(known_width);
        Self {
            current_speed: LinkSpeed::from_code(u32::from(status) & 0xf),
            current_width: width(u32::from(status)),
            max_speed: LinkSpeed::from_code(capabilities & 0xf),
            max_width: width(capabilities),
        }
    }

    /// What this link says, and what it does not say from `other`.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            current_speed: self.current_speed.or(other.current_speed),
            current_width: self.current_width.or(other.current_width),
            max_speed: self.max_speed.or(other.max_speed),
            max_width: self.max_width.or(other.max_width),
        }
    }

    /// Whether fewer lanes are in use than the function has: a card in a slot that is too short, or a bad contact.
    #[must_use]
    pub fn narrowed(self) -> bool {
        matches!((self.current_width, self.max_width), (Some(now), Some(most)) if now < most)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_spelling_of_the_kernels_is_read() {
        for (text, shown) in [
            ("32.0 GT/s PCIe\n", Some("32.0 GT/s")),
            ("2.5 GT/s PCIe\n", Some("2.5 GT/s")),
            ("8 GT/s\n", Some("8.0 GT/s")),
            ("8.0 GT/s PCIe", Some("8.0 GT/s")),
            ("Unknown\n", None),
            ("Unknown speed\n", None),
            ("", None),
            ("-1 GT/s", None),
            ("99999999999 GT/s", None),
        ] {
            assert_eq!(LinkSpeed::parse(text).map(|speed| speed.to_string()).as_deref(), shown, "{text:?}");
        }
        for (text, lanes) in [("16\n", Some(16)), ("0\n", None), ("255\n", None), ("x16", None)] {
            assert_eq!(parse_width(text), lanes, "{text:?}");
        }
    }

    #[test]
    fn a_narrowed_link_is_told_from_a_slow_one() {
        // x8 of x16; 2.5 of 32 GT/s while idle.
        let link = Link::from_registers(0x0045_7905, 0x1081);
        assert_eq!((link.current_width, link.max_width), (Some(8), Some(16)));
        assert!(link.narrowed());
        assert!(!Link::from_registers(0x0045_7905, 0x1101).narrowed());
    }

    proptest! {
        #[test]
        fn any_text_and_any_registers_are_survived(text in "(?s).{0,40}", capabilities: u32, status: u16) {
            let _ = (LinkSpeed::parse(&text), parse_width(&text), Link::from_registers(capabilities, status));
        }
    }
}
