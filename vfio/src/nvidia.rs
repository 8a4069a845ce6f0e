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

/// The nodes `/dev/nvidia*` of the host, each with what it stands for.
///
/// `/dev/nvidiaN` is the GPU whose `/proc/driver/nvidia/gpus/ADDRESS/information` says `Device Minor: N`. All others
/// (`nvidiactl`, `nvidia-uvm`, `nvidia-modeset`, `nvidia-nvswitchN`) stand for the driver: an open one may use any GPU.
///
/// # Errors
/// When `/dev` is there and cannot be listed.
pub fn nodes(host: &Host) -> Result<BTreeMap<String, Scope>, ReadError> {
    let names = match host.list(&host.dev("")) {
        Ok(names) => names,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        Err(error) => return Err(error),
    };
    let by_minor = minors(host);
    Ok(names
        .into_iter()
        .filter(|name| name.starts_with("nvidia"))
        .map(|name| {
            let minor = name.strip_prefix("nvidia").and_then(|digits| digits.parse::<u32>().ok());
            let scope = minor
                .and_then(|m| by_minor.get(&m))
                .map_or(Scope::Driver, |address| Scope::Function(*address));
            (format!("/dev/{name}"), scope)
        })
        .collect())
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
