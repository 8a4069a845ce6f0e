//! The nodes of the vendors' host drivers below `/dev`, and what an open one says of a function.
//!
//! A card's own node holds that card; what is common to a driver holds as its row says.

use std::{
    cell::OnceCell,
    collections::{BTreeMap, BTreeSet},
    io,
};

use serde::Serialize;

use super::{TABLE, Vendor};
use crate::{
    host::{Host, ReadError},
    pci::{Address, Role},
};

/// A directory below the root that may hold nodes.
pub type Directory = &'static str;

/// How a node is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Name {
    /// Exactly so.
    Is(&'static str),
    /// By this beginning.
    StartsWith(&'static str),
    /// Whatever it is called, in a directory with this beginning.
    Below(&'static str),
}

/// The nodes of one function each, numbered by the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Own {
    /// What comes before the number.
    pub prefix: &'static str,
    /// The directory below `/proc` with an entry for each function of the driver, by its address.
    pub functions: &'static str,
    /// The file there that tells the number.
    pub file: &'static str,
    /// What its line with the number starts with.
    pub key: &'static str,
}

/// A node that is common to the functions of a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Common {
    /// How it is called.
    pub name: Name,
    /// Of which functions its driver is.
    pub role: Role,
    /// Which of them its holder has.
    pub holds: Holds,
}

/// Which functions of its driver the holder of a common node has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Holds {
    /// All of them.
    EveryFunction,
    /// Those that have no node of their own: whoever uses one of the others has its node open.
    WithoutOwnNode,
}

/// What a node gives its holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scope {
    /// One function.
    Function(Address),
    /// Something of the driver as a whole, or a function that cannot be told.
    Common {
        /// The vendor's PCI id.
        vendor: u16,
        /// Of which functions the driver is.
        role: Role,
        /// Which of them it holds.
        holds: Holds,
    },
}

impl Name {
    /// Whether an entry of a directory is called so: itself, or for [`Name::Below`] as a directory.
    fn fits(self, name: &str) -> bool {
        match self {
            Self::Is(whole) => name == whole,
            Self::StartsWith(beginning) | Self::Below(beginning) => name.starts_with(beginning),
        }
    }
}

/// All nodes of the vendors' host drivers, those below a driver container's root too, each with what it stands for.
///
/// # Errors
/// When one of the directories is there and cannot be listed.
pub fn nodes(host: &Host) -> Result<BTreeMap<String, Scope>, ReadError> {
    let mut nodes = BTreeMap::new();
    let directories: BTreeSet<Directory> =
        TABLE.iter().flat_map(|vendor| vendor.directories).copied().collect();
    for directory in directories {
        let names = list_if_there(host, directory)?;
        for vendor in TABLE.iter().filter(|vendor| vendor.directories.contains(&directory)) {
            vendor.add_nodes(host, directory, &names, &mut nodes)?;
        }
    }
    Ok(nodes)
}

impl Vendor {
    fn add_nodes(
        &self,
        host: &Host,
        directory: &str,
        names: &[String],
        nodes: &mut BTreeMap<String, Scope>,
    ) -> Result<(), ReadError> {
        // Read with the first node that may be one function's.
        let by_number = OnceCell::new();
        for name in names {
            if let Some(own) = &self.own {
                let number = name.strip_prefix(own.prefix).and_then(|digits| digits.parse::<u32>().ok());
                let functions = || by_number.get_or_init(|| own.functions(host));
                if let Some(address) = number.and_then(|number| functions().get(&number)) {
                    nodes.insert(format!("/{directory}/{name}"), Scope::Function(*address));
                    continue;
                }
            }
            let Some(common) = self.common.iter().find(|common| common.name.fits(name)) else { continue };
            let scope = Scope::Common { vendor: self.id, role: common.role, holds: common.holds };
            if let Name::Below(_) = common.name {
                let below = format!("{directory}/{name}");
                nodes.extend(
                    list_if_there(host, &below)?.iter().map(|node| (format!("/{below}/{node}"), scope)),
                );
            } else {
                nodes.insert(format!("/{directory}/{name}"), scope);
            }
        }
        Ok(())
    }
}

impl Own {
    /// Which function has which number. What cannot be read is left out: its node is then one of the common ones.
    fn functions(&self, host: &Host) -> BTreeMap<u32, Address> {
        let dir = host.proc(self.functions);
        let names = host.list(&dir).unwrap_or_default();
        names
            .iter()
            .filter_map(|name| {
                let address = name.to_ascii_lowercase().parse::<Address>().ok()?;
                let text = host.read(&dir.join(name).join(self.file)).ok()?;
                let number = text.lines().find_map(|line| line.strip_prefix(self.key))?;
                Some((number.trim().parse().ok()?, address))
            })
            .collect()
    }
}

fn list_if_there(host: &Host, dir: &str) -> Result<Vec<String>, ReadError> {
    match host.list(&host.root().join(dir)) {
        // A path that is no directory holds no node either.
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(Vec::new())
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{File, create_dir_all};

    use super::*;

    const fn common(vendor: u16, role: Role, holds: Holds) -> Scope {
        Scope::Common { vendor, role, holds }
    }

    /// The nodes of a real H200 node, those of a driver in a container, and those of an AMD node.
    #[test]
    fn capabilities_and_a_drivers_own_root_are_seen() {
        let tree = tempfile::tempdir().unwrap();
        let root = tree.path();
        for dir in ["sys", "dev/nvidia-caps", "run/nvidia/driver/dev/nvidia-caps-imex-channels", "dev/dri"] {
            create_dir_all(root.join(dir)).unwrap();
        }
        let gpu = root.join("proc/driver/nvidia/gpus/0000:00:06.0");
        create_dir_all(&gpu).unwrap();
        #[expect(clippy::disallowed_methods, reason = "a test's own files")]
        {
            std::fs::write(gpu.join("information"), "Model: \t\t NVIDIA H200\nDevice Minor: \t 0\n").unwrap();
            for node in [
                "dev/nvidia0",
                "dev/nvidia1",
                "dev/nvidiactl",
                "dev/nvidia-uvm",
                "dev/nvidia-caps/nvidia-cap1",
                "dev/nvidia-nvswitch0",
                "dev/null",
                "dev/kfd",
                "dev/kfd0",
                "dev/dri/renderD128",
                "run/nvidia/driver/dev/kfd",
                "run/nvidia/driver/dev/nvidia0",
                "run/nvidia/driver/dev/nvidia-caps-imex-channels/channel0",
            ] {
                File::create(root.join(node)).unwrap();
            }
        }
        let function = Scope::Function("0000:00:06.0".parse().unwrap());
        let driver = common(0x10de, Role::Gpu, Holds::WithoutOwnNode);
        let found = nodes(&Host::at(root).unwrap()).unwrap();
        let expected = [
            ("/dev/kfd", common(0x1002, Role::Gpu, Holds::EveryFunction)),
            ("/dev/nvidia-caps/nvidia-cap1", driver),
            ("/dev/nvidia-nvswitch0", common(0x10de, Role::NvSwitch, Holds::WithoutOwnNode)),
            ("/dev/nvidia-uvm", driver),
            ("/dev/nvidia0", function),
            ("/dev/nvidia1", driver),
            ("/dev/nvidiactl", driver),
            ("/run/nvidia/driver/dev/nvidia-caps-imex-channels/channel0", driver),
            ("/run/nvidia/driver/dev/nvidia0", function),
        ];
        assert_eq!(found, expected.map(|(node, scope)| (node.to_owned(), scope)).into());
    }

    #[test]
    fn a_scope_says_what_it_is() {
        let json = |scope| serde_json::to_value(scope).unwrap();
        let function = Scope::Function("0000:00:06.0".parse().unwrap());
        assert_eq!(json(function), serde_json::json!({"function": "0000:00:06.0"}));
        assert_eq!(
            json(common(0x10de, Role::NvSwitch, Holds::WithoutOwnNode)),
            serde_json::json!({"common": {"vendor": 0x10de, "role": "nv-switch", "holds": "without-own-node"}})
        );
    }
}
