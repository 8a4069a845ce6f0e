//! Display and render nodes (`/dev/dri`), and which function each is of.

use std::io;

use crate::{
    host::{Host, ReadError},
    pci::Address,
};

/// The paths on the host of a function's DRM nodes (`/dev/dri/card0`, `/dev/dri/renderD128`): its directory `drm` has one for
/// each minor (`drm_sysfs_minor_alloc`, drivers/gpu/drm/drm_sysfs.c), beside those of connectors, which have no node.
///
/// # Errors
/// When the directory is there and cannot be listed.
pub fn nodes(host: &Host, address: Address) -> Result<Vec<String>, ReadError> {
    match host.list(&host.function_dir(address).join("drm")) {
        Ok(names) => {
            Ok(names.iter().filter(|name| is_minor(name)).map(|name| format!("/dev/dri/{name}")).collect())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

fn is_minor(name: &str) -> bool {
    let number = ["card", "renderD", "controlD"].iter().find_map(|kind| name.strip_prefix(kind));
    number.is_some_and(|number| !number.is_empty() && number.chars().all(|c| c.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connectors_are_no_nodes() {
        for (name, expected) in [
            ("card0", true),
            ("renderD128", true),
            ("controlD64", true),
            ("card0-HDMI-A-1", false),
            ("card", false),
            ("version", false),
        ] {
            assert_eq!(is_minor(name), expected, "{name}");
        }
    }
}
