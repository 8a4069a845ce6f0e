//! Mediated devices: which there are, and of which function.
//!
//! `/sys/bus/mdev/devices` has a link for each, by its UUID, to its directory below the function that it is a part of; that
//! has the links `mdev_type` and, while a vfio driver is bound, `iommu_group` (Documentation/ABI/testing/sysfs-bus-vfio-mdev).

use std::{collections::BTreeMap, io};

use serde::Serialize;

use crate::{
    host::{Host, ReadError},
    pci::Address,
    printable::{printable, printable_some},
};

/// A mediated device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Mdev {
    /// The function that it is a part of: a GPU, or one of its VFs.
    pub parent: Address,
    /// Its own IOMMU group, which has a node `/dev/vfio/N` as any other; none while no driver is bound to it.
    pub group: Option<u32>,
    /// Its type (`nvidia-63`).
    pub kind: Option<String>,
}

/// All mediated devices of `host` that are part of a PCI function, by UUID.
///
/// # Errors
/// When the list is there and cannot be had, or the way of one that is listed.
pub fn devices(host: &Host) -> Result<BTreeMap<String, Mdev>, ReadError> {
    let dir = host.sys("bus/mdev/devices");
    let names = match host.list(&dir) {
        Ok(names) => names,
        // No module mdev.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        Err(error) => return Err(error),
    };
    let mut found = BTreeMap::new();
    for name in names {
        let link = dir.join(&name);
        // One that was removed during the look is none.
        let Some(path) = host.real_path(&link)? else { continue };
        // Those of other parents (s390's channels, the kernel's samples) are nobody's GPU.
        let parent = path.parent().and_then(|above| above.file_name()?.to_str()?.parse().ok());
        let Some(parent) = parent else { continue };
        let group = host.link_name(&link.join("iommu_group"))?.and_then(|group| group.parse().ok());
        let kind = host.link_name(&link.join("mdev_type"))?.and_then(|kind| printable_some(&kind));
        found.insert(printable(&name), Mdev { parent, group, kind });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    const UUID: &str = "5f3c1a2b-0d4e-4f60-8a7b-9c0d1e2f3a4b";

    #[test]
    fn a_device_is_told_with_its_parent_group_and_type() {
        let tree = tempfile::tempdir().unwrap();
        let root = tree.path();
        let bus = root.join("sys/bus/mdev/devices");
        fs::create_dir_all(root.join("sys")).unwrap();
        let host = Host::at(root).unwrap();
        assert!(devices(&host).unwrap().is_empty(), "no module mdev");
        fs::create_dir_all(&bus).unwrap();
        for (uuid, below) in [
            (UUID, "pci0000:40/0000:40:01.0/0000:41:00.4"),
            ("0d4e5f3c-4f60-8a7b-9c0d-1e2f3a4b1a2b", "virtual/mtty/mtty"),
        ] {
            fs::create_dir_all(root.join("sys/devices").join(below).join(uuid)).unwrap();
            symlink(format!("../../../devices/{below}/{uuid}"), bus.join(uuid)).unwrap();
        }
        let parent = "0000:41:00.4".parse().unwrap();
        let bare = Mdev { parent, group: None, kind: None };
        assert_eq!(devices(&host).unwrap(), BTreeMap::from([(UUID.to_owned(), bare.clone())]));

        symlink("../../../../../kernel/iommu_groups/76", bus.join(UUID).join("iommu_group")).unwrap();
        symlink("../mdev_supported_types/nvidia-63", bus.join(UUID).join("mdev_type")).unwrap();
        // Removed during the look.
        symlink("../../../devices/gone", bus.join("1a2b5f3c-4f60-8a7b-9c0d-1e2f3a4b0d4e")).unwrap();
        let whole = Mdev { group: Some(76), kind: Some("nvidia-63".to_owned()), ..bare };
        assert_eq!(devices(&host).unwrap(), BTreeMap::from([(UUID.to_owned(), whole)]));
    }
}
