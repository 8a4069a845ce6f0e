//! How a function can be reset: what vfio does to it before and after each VM.

use std::io;

use serde::Serialize;

use super::Address;
use crate::{host::Host, printable::printable};

/// What `reset_method` says (Documentation/ABI/testing/sysfs-bus-pci; since Linux 5.15).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "state", content = "methods", rename_all = "kebab-case")]
pub enum ResetMethods {
    /// These methods, in the order in which the kernel tries them: `flr`, `bus`, `pm`, `acpi`, `device_specific`, ...
    Ordered(Vec<String>),
    /// The file is empty: somebody has switched resets off.
    Off,
    /// There is no such file, but one to reset by: a kernel before 5.15.
    Unlisted,
    /// There is neither file: the function cannot be reset alone. On an audio or USB function beside a GPU that is normal.
    Absent,
    /// The file cannot be read.
    Unknown,
}

impl ResetMethods {
    /// What the content of the file says.
    #[must_use]
    pub fn parse(content: &str) -> Self {
        let methods: Vec<_> = content.split_whitespace().map(printable).collect();
        if methods.is_empty() { Self::Off } else { Self::Ordered(methods) }
    }

    /// Reads those of a function.
    #[must_use]
    pub fn read(host: &Host, address: Address) -> Self {
        let dir = host.function_dir(address);
        match host.read(&dir.join("reset_method")) {
            Ok(content) => Self::parse(&content),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if host.exists(&dir.join("reset")) {
                    Self::Unlisted
                } else {
                    Self::Absent
                }
            }
            Err(_) => Self::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn empty_is_not_the_same_as_a_list() {
        assert_eq!(ResetMethods::parse("flr bus\n"), ResetMethods::Ordered(vec!["flr".into(), "bus".into()]));
        assert_eq!(ResetMethods::parse("\n"), ResetMethods::Off);
        assert_eq!(ResetMethods::parse(""), ResetMethods::Off);
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in "(?s).{0,60}") {
            let _ = ResetMethods::parse(&text);
        }
    }
}
