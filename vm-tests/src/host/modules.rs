//! Which module files a set of module names needs, in the order to load them.
//!
//! An unpacked kernel package has no `modules.dep` (depmod writes it at installation), so the dependencies are read
//! where depmod reads them: from the `.modinfo` of each module.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::files::{self, FileError};

/// A module cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum ModuleError {
    /// A file operation failed.
    #[error("reading the kernel's modules")]
    File(#[from] FileError),
    /// The kernel has no such module.
    #[error("the kernel in {dir} has no module {name}: the lab's list of modules does not fit it", dir = dir.display())]
    Missing {
        /// The module.
        name: String,
        /// Where it was looked for.
        dir: PathBuf,
    },
}

/// The files of the modules `names` and of all they depend on, each after what it needs. Built-in ones need no file.
pub fn load_order(dir: &Path, names: &[&str]) -> Result<Vec<PathBuf>, ModuleError> {
    let mut index = Index {
        dir,
        files: listed(&dir.join("modules.order"))?,
        builtin: listed(&dir.join("modules.builtin"))?,
        order: Vec::new(),
    };
    for name in names {
        index.add(name)?;
    }
    Ok(index.order)
}

struct Index<'a> {
    dir: &'a Path,
    files: BTreeMap<String, PathBuf>,
    builtin: BTreeMap<String, PathBuf>,
    order: Vec<PathBuf>,
}

impl Index<'_> {
    fn add(&mut self, name: &str) -> Result<(), ModuleError> {
        let name = name.replace('-', "_");
        if self.builtin.contains_key(&name) {
            return Ok(());
        }
        let relative = self.files.get(&name);
        let relative = relative.ok_or_else(|| ModuleError::Missing { name, dir: self.dir.to_owned() })?;
        let path = self.dir.join(relative);
        if self.order.contains(&path) {
            return Ok(());
        }
        // The kernel's dependencies have no cycles, so this ends.
        for needed in depends(&files::read(&path)?) {
            self.add(&needed)?;
        }
        self.order.push(path);
        Ok(())
    }
}

/// Module name (with underscores, as the kernel has it) to file, from a list of paths.
fn listed(path: &Path) -> Result<BTreeMap<String, PathBuf>, FileError> {
    let text = files::read_text(path)?;
    let named = text.lines().filter_map(|line| {
        let stem = Path::new(line).file_stem()?.to_str()?;
        Some((stem.replace('-', "_"), PathBuf::from(line)))
    });
    Ok(named.collect())
}

/// The value of `depends=` among the NUL-terminated strings of a module's `.modinfo`.
fn depends(module: &[u8]) -> Vec<String> {
    let value = module.split(|b| *b == 0).find_map(|s| s.strip_prefix(b"depends="));
    let text = String::from_utf8_lossy(value.unwrap_or_default()).into_owned();
    text.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_come_first_and_once() {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, depends: &str| {
            files::write(&dir.path().join(name), format!("ELF\0depends={depends}\0x=1\0")).unwrap();
        };
        files::write(&dir.path().join("modules.order"), "a-a.ko\nb.ko\nc.ko\n").unwrap();
        files::write(&dir.path().join("modules.builtin"), "kernel/d.ko\n").unwrap();
        put("a-a.ko", "b,c");
        put("b.ko", "c");
        put("c.ko", "");
        let order = load_order(dir.path(), &["a-a", "d", "c"]).unwrap();
        let names: Vec<_> = order.iter().map(|p| p.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["c.ko", "b.ko", "a-a.ko"]);
        assert!(load_order(dir.path(), &["nosuch"]).is_err());
    }
}
