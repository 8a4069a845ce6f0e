//! The file as it is spelt. `docs/profiles.md` tells of every key.

use std::{collections::BTreeMap, fmt::Display, path::Path};

use serde::Deserialize;
use serde_saphyr::{Location, Spanned};

use super::{Framebuffer, Place, ProfileError};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    pub name: Spanned<String>,
    pub drivers: Option<Vec<Spanned<String>>>,
    pub cpus: Option<BTreeMap<u32, Spanned<String>>>,
    pub reserved: Option<BTreeMap<u32, Spanned<Vec<Spanned<String>>>>>,
    pub functions: Vec<Spanned<Entry>>,
}

/// One or more functions that share a description.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Entry {
    pub address: Option<Spanned<String>>,
    pub addresses: Option<Vec<Spanned<String>>>,
    pub groups: Option<BTreeMap<u32, Vec<Spanned<String>>>>,
    pub group: Option<Spanned<u32>>,
    pub id: Spanned<String>,
    pub class: Spanned<String>,
    pub subsystem: Option<Spanned<String>>,
    pub revision: Option<Spanned<String>>,
    pub driver: Option<Spanned<String>>,
    pub numa: Option<Spanned<i32>>,
    pub behind: Option<Spanned<String>>,
    pub boot_vga: Option<Spanned<bool>>,
    pub framebuffer: Option<Spanned<Framebuffer>>,
    pub reset_method: Option<Spanned<String>>,
    pub bars: Option<BTreeMap<u8, Spanned<String>>>,
    pub console: Option<Spanned<bool>>,
    pub answers: Option<Spanned<String>>,
    pub vfs: Option<Spanned<Vfs>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Vfs {
    pub count: Spanned<u16>,
    pub offset: Spanned<u16>,
    pub stride: Option<Spanned<u16>>,
    pub device: Option<Spanned<String>>,
    pub bars: Option<BTreeMap<u8, Spanned<String>>>,
    pub enabled: Option<Spanned<u16>>,
    pub driver: Option<Spanned<String>>,
    pub group: Option<Spanned<u32>>,
    pub numa: Option<Spanned<i32>>,
}

/// The line of a value.
pub(super) fn line<T>(value: &Spanned<T>) -> Location {
    value.referenced
}

/// A value that does not fit.
pub(super) fn refuse<T: Display>(
    path: &Path,
    given: &Spanned<T>,
    key: &'static str,
    expected: &'static str,
) -> ProfileError {
    ProfileError::Value {
        place: Place::new(path, Some(line(given))),
        key,
        value: given.value.to_string(),
        expected,
    }
}
