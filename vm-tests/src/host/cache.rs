//! The lab's cache: folders named by a hash of what went into them, built once and put in place whole.

use std::path::{Path, PathBuf};

use super::files::{self, FileError};

/// The cache cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// Neither variable is set.
    #[error("no place for the lab's cache: neither XDG_CACHE_HOME nor HOME is set. Set one of them")]
    NoHome,
    /// A file operation failed.
    #[error(transparent)]
    File(#[from] FileError),
}

/// The folder `vfiod-lab` in the user's cache.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
}

/// What an entry is made from; equal inputs name the same entry.
#[derive(Debug, Clone)]
pub struct Key(u128);

impl Key {
    /// Hashes the inputs (FNV-1a, 128 bit: against accidents, not against an adversary).
    pub fn of<'a>(inputs: impl IntoIterator<Item = &'a [u8]>) -> Self {
        const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
        const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
        let step = |hash: u128, byte: u8| (hash ^ u128::from(byte)).wrapping_mul(PRIME);
        let hash = inputs.into_iter().fold(OFFSET, |hash, input| {
            // The length goes in first, so that moving a byte to the next input gives another hash.
            let length = input.len().to_le_bytes();
            length.iter().chain(input).fold(hash, |hash, byte| step(hash, *byte))
        });
        Self(hash)
    }

    /// The key as text, to go into another key.
    #[must_use]
    pub fn text(&self) -> String {
        format!("{:032x}", self.0)
    }
}

impl Cache {
    /// Opens `${XDG_CACHE_HOME:-~/.cache}/vfiod-lab`, creating it if need be.
    pub fn open() -> Result<Self, CacheError> {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let base = set("XDG_CACHE_HOME")
            .or_else(|| set("HOME").map(|home| home.join(".cache")))
            .ok_or(CacheError::NoHome)?;
        let root = base.join("vfiod-lab");
        files::create_dir(&root)?;
        Ok(Self { root })
    }

    /// The entry's folder; built by `build` in a temporary folder if it is not there yet.
    ///
    /// A lock per entry lets a second run wait for the first instead of building twice; only a finished folder gets
    /// the entry's name, so an interrupted build leaves nothing that a later run would trust.
    pub fn entry<E: From<CacheError>>(
        &self,
        kind: &str,
        key: &Key,
        build: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<PathBuf, E> {
        let name = format!("{kind}-{}", key.text());
        let entry = self.root.join(&name);
        if entry.is_dir() {
            return Ok(entry);
        }
        let lock_path = self.root.join(format!("{name}.lock"));
        let lock = files::create(&lock_path).map_err(CacheError::from)?;
        files::lock(&lock, &lock_path).map_err(CacheError::from)?;
        if entry.is_dir() {
            return Ok(entry);
        }
        let unfinished = self.root.join(format!("{name}.unfinished"));
        if unfinished.exists() {
            files::remove_dir(&unfinished).map_err(CacheError::from)?;
        }
        files::create_dir(&unfinished).map_err(CacheError::from)?;
        build(&unfinished)?;
        files::rename(&unfinished, &entry).map_err(CacheError::from)?;
        Ok(entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache() -> (tempfile::TempDir, Cache) {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().to_owned();
        (dir, Cache { root })
    }

    #[test]
    fn an_entry_is_built_once_and_a_failed_build_is_not_kept() {
        let (_dir, cache) = cache();
        let key = Key::of([b"a".as_slice()]);
        let failed = cache.entry::<CacheError>("x", &key, |_| Err(CacheError::NoHome));
        assert!(failed.is_err());
        let first =
            cache.entry::<CacheError>("x", &key, |dir| Ok(files::write(&dir.join("f"), "1")?)).unwrap();
        let second = cache.entry::<CacheError>("x", &key, |_| panic!("built twice")).unwrap();
        assert_eq!(first, second);
        assert_eq!(files::read(&second.join("f")).unwrap(), b"1");
    }

    #[test]
    fn keys_tell_where_one_input_ends() {
        let text = |inputs: &[&str]| Key::of(inputs.iter().map(|i| i.as_bytes())).text();
        assert_ne!(text(&["ab", "c"]), text(&["a", "bc"]));
        assert_eq!(text(&["ab", "c"]), text(&["ab", "c"]));
    }
}
