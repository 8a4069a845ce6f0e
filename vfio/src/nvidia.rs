//! The NVIDIA host driver's device nodes, and which function each stands for.

use std::{collections::BTreeMap, io};

use serde::Serialize;

use crate::{
    host::{Host, ReadError},
    pci::Address,
};

/// What a node below `/dev` gives its holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scope {
    /// One function.
    Function(Address),
    /// The driver as a whole, or a function that cannot be told: it counts against every function on that driver.
    Driver,
}

/// Where the driver's nodes are: the host's own, and those of a driver that a container has installed below its own root
/// (the GPU Operator's driver DaemonSet). There a VM host may have no node below `/dev` at all.
const DEV_DIRS: [&str; 2] = ["dev", "run/nvidia/driver/dev"];

/// The nodes `/dev/nvidia*` and `/dev/nvidia-caps*/*` of the host, and those below a driver's root, each with what it stands for.
///
/// `/dev/nvidiaN` is the GPU whose `/proc/driver/nvidia/gpus/ADDRESS/information` says `Device Minor: N`. All others
/// (`nvidiactl`, `nvidia-uvm`, `nvidia-modeset`, `nvidia-nvswitchN`, the capabilities of MIG and IMEX) stand for the driver: an
/// open one may use any GPU.
///
/// # Errors
/// When one of the directories is there and cannot be listed.
pub fn nodes(host: &Host) -> Result<BTreeMap<String, Scope>, ReadError> {
    let by_minor = minors(host);
    let mut nodes = BTreeMap::new();
    for dir in DEV_DIRS {
        for name in list_if_there(host, dir)?.into_iter().filter(|name| name.starts_with("nvidia")) {
            if name.starts_with("nvidia-caps") {
                let below = format!("{dir}/{name}");
                let capabilities = list_if_there(host, &below)?;
                nodes.extend(capabilities.iter().map(|node| (format!("/{below}/{node}"), Scope::Driver)));
                continue;
            }
            let minor = name.strip_prefix("nvidia").and_then(|digits| digits.parse::<u32>().ok());
            let scope = minor
                .and_then(|m| by_minor.get(&m))
                .map_or(Scope::Driver, |address| Scope::Function(*address));
            nodes.insert(format!("/{dir}/{name}"), scope);
        }
    }
    Ok(nodes)
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

/// Which function has which minor. What cannot be read is left out, so that its node counts against the whole driver.
fn minors(host: &Host) -> BTreeMap<u32, Address> {
    let dir = host.proc("driver/nvidia/gpus");
    let names = host.list(&dir).unwrap_or_default();
    names
        .iter()
        .filter_map(|name| {
            let address = name.to_ascii_lowercase().parse::<Address>().ok()?;
            let information = host.read(&dir.join(name).join("information")).ok()?;
            let minor = information.lines().find_map(|line| line.strip_prefix("Device Minor:"))?;
            Some((minor.trim().parse().ok()?, address))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::fs::{File, create_dir_all};

    use super::*;

    /// The nodes of a real H200 node, and those of a driver in a container.
    #[test]
    fn capabilities_and_a_drivers_own_root_are_seen() {
        let tree = tempfile::tempdir().unwrap();
        let root = tree.path();
        for dir in ["sys", "dev/nvidia-caps", "run/nvidia/driver/dev/nvidia-caps-imex-channels"] {
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
                "dev/nvidia-caps/nvidia-cap1",
                "dev/null",
                "run/nvidia/driver/dev/nvidia0",
                "run/nvidia/driver/dev/nvidia-caps-imex-channels/channel0",
            ] {
                File::create(root.join(node)).unwrap();
            }
        }
        let function = Scope::Function("0000:00:06.0".parse().unwrap());
        let found = nodes(&Host::at(root).unwrap()).unwrap();
        let expected = [
            ("/dev/nvidia-caps/nvidia-cap1", Scope::Driver),
            ("/dev/nvidia0", function),
            ("/dev/nvidia1", Scope::Driver),
            ("/dev/nvidiactl", Scope::Driver),
            ("/run/nvidia/driver/dev/nvidia-caps-imex-channels/channel0", Scope::Driver),
            ("/run/nvidia/driver/dev/nvidia0", function),
        ];
        assert_eq!(found, expected.map(|(node, scope)| (node.to_owned(), scope)).into());
    }
}
