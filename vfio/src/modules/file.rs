//! A module's file.

use std::path::{Component, Path};

use reason::{Code, Coded};
use serde::{Deserialize, Serialize};

/// A module's file, below `/lib/modules`: it leads nowhere else.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ModuleFile(String);

/// How a module's file is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// Not at all.
    None,
    /// `.ko.xz`
    Xz,
    /// `.ko.zst`
    Zstd,
    /// `.ko.gz`
    Gzip,
}

/// A path that is no module's file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no module's file below /lib/modules: it has to end in .ko, .ko.xz, .ko.zst or .ko.gz")]
pub struct BadModuleFile(pub String);

impl Coded for BadModuleFile {
    fn code(&self) -> Code {
        Code::ModuleFile
    }

    fn retryable(&self) -> bool {
        false
    }
}

impl ModuleFile {
    /// The file at `path` below `/lib/modules`.
    ///
    /// # Errors
    /// When the path leads elsewhere, or the file is packed in a way that is not known.
    pub fn new(path: &str) -> Result<Self, BadModuleFile> {
        let below = Path::new(path).components().all(|part| matches!(part, Component::Normal(_)));
        if below && packing(path).is_some() {
            Ok(Self(path.to_owned()))
        } else {
            Err(BadModuleFile(path.to_owned()))
        }
    }

    /// The path below `/lib/modules`.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// How it is packed.
    #[must_use]
    pub fn packing(&self) -> Packing {
        packing(&self.0).unwrap_or(Packing::None)
    }
}

fn packing(path: &str) -> Option<Packing> {
    let endings = [
        (".ko", Packing::None),
        (".ko.xz", Packing::Xz),
        (".ko.zst", Packing::Zstd),
        (".ko.gz", Packing::Gzip),
    ];
    endings.into_iter().find(|(ending, _)| path.ends_with(ending)).map(|(_, packing)| packing)
}

impl TryFrom<String> for ModuleFile {
    type Error = BadModuleFile;

    fn try_from(path: String) -> Result<Self, Self::Error> {
        Self::new(&path)
    }
}

impl From<ModuleFile> for String {
    fn from(file: ModuleFile) -> Self {
        file.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_modules_file_lies_below_lib_modules() {
        for path in ["", "/lib/modules/x.ko", "../x.ko", "6.12/../../x.ko", "6.12/x.ko.lz4", "6.12/x"] {
            assert!(ModuleFile::new(path).is_err(), "{path:?}");
            let text = serde_json::to_string(path).unwrap();
            assert!(serde_json::from_str::<ModuleFile>(&text).is_err(), "{text}");
        }
        for (path, packing) in
            [("6.12/x.ko", Packing::None), ("6.12/k/x.ko.xz", Packing::Xz), ("x.ko.zst", Packing::Zstd)]
        {
            assert_eq!(ModuleFile::new(path).unwrap().packing(), packing);
        }
    }
}
