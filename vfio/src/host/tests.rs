//! How a host is read.

use std::os::{fd::AsRawFd, unix::fs::symlink};

use super::*;

#[test]
fn a_plain_tree_is_simulated_and_the_machines_sysfs_is_real() {
    let tree = tempfile::tempdir().unwrap();
    fs::create_dir(tree.path().join("sys")).unwrap();
    assert_eq!(Host::at(tree.path()).unwrap().kernel(), Kernel::Simulated);
    assert_eq!(Host::at("/").unwrap().kernel(), Kernel::Real);
}

#[test]
fn a_root_without_sys_is_no_host() {
    let tree = tempfile::tempdir().unwrap();
    let error = Host::at(tree.path()).unwrap_err();
    let text = reason::chain(&error);
    assert!(text.contains("sys") && text.contains("--root"), "{text}");
    assert_eq!(text.matches("No such file").count(), 1, "{text}");
    assert_eq!((error.code(), error.retryable()), (Code::NoHost, false));
}

/// What a node's absolute links name is looked for below its root, by every way of reading, and nothing else.
#[test]
#[expect(clippy::disallowed_methods, reason = "a test's own files")]
fn absolute_links_are_the_hosts_own() {
    let tree = tempfile::tempdir().unwrap();
    let root = tree.path();
    for dir in ["usr/lib/modules/6.12", "sys/devices/pci0000:00/0000:00:01.0", "sys/bus/pci/devices", "etc"] {
        fs::create_dir_all(root.join(dir)).unwrap();
    }
    let link = |target: &str, at: &str| {
        fs::create_dir_all(root.join(at).parent().unwrap()).unwrap();
        symlink(target, root.join(at)).unwrap();
    };
    link("/usr/lib/modules", "lib/modules");
    link("/sys/devices/pci0000:00/0000:00:01.0", "sys/bus/pci/devices/0000:00:01.0");
    link("/sys/bus/pci/drivers/nvidia", "sys/devices/pci0000:00/0000:00:01.0/driver");
    link("/etc/passwd", "etc/secret");
    link("/dev/null", "dev/masked");
    fs::write(root.join("usr/lib/modules/6.12/modules.dep"), "here").unwrap();
    fs::write(root.join("sys/devices/pci0000:00/0000:00:01.0/vendor"), "0x10de\n").unwrap();

    let host = Host::at(root).unwrap();
    let dir = host.function_dir("0000:00:01.0".parse().unwrap());
    assert_eq!(host.read(&host.modules("6.12/modules.dep")).unwrap(), "here");
    assert_eq!(host.bytes(&dir.join("vendor"), 4).unwrap(), b"0x10");
    assert_eq!(host.list(&host.sys("bus/pci/devices/0000:00:01.0")).unwrap(), ["driver", "vendor"]);
    assert_eq!(host.list(&host.modules("")).unwrap(), ["6.12"]);
    assert_eq!(host.link_name(&dir.join("driver")).unwrap().as_deref(), Some("nvidia"));
    assert_eq!(host.link_name(&dir.join("nosuch")).unwrap(), None);
    assert!(host.link_name(&dir.join("vendor")).is_err(), "no link");
    let real = host.real_path(&dir).unwrap().unwrap();
    assert_eq!(real, Path::new("/sys/devices/pci0000:00/0000:00:01.0"));
    assert!(host.is_dir(&dir) && host.exists(&dir.join("vendor")) && !host.exists(&dir.join("driver")));
    let plain = |path: &Path| host.plain_file(path).map(|file| file.is_some());
    assert!(plain(&dir.join("vendor")).unwrap() && !plain(&dir).unwrap());

    // The machine has these, the node has not.
    let secret = root.join("etc/secret");
    assert_eq!(host.read(&secret).unwrap_err().kind(), io::ErrorKind::NotFound);
    assert_eq!(host.look_at(&secret).unwrap_err().kind(), io::ErrorKind::NotFound);
    assert!(!host.exists(&secret) && host.plain_file(&secret).is_err());
    assert_eq!(host.node_id(&host.dev("masked")).unwrap(), None);
    assert_eq!(host.real_path(&secret).unwrap(), None);
}

/// Below a root that is not `/`, a real process's descriptor is still the file that it has open, whatever its name is there.
#[test]
fn a_descriptor_is_the_open_file_below_another_root_too() {
    let tree = tempfile::tempdir().unwrap();
    fs::create_dir(tree.path().join("sys")).unwrap();
    let null = File::open("/dev/null").unwrap();
    let expected = Host::at("/").unwrap().node_id(Path::new("/dev/null")).unwrap();
    // Such a host has its /proc mounted below its root; the root is a link, so that there is one without mounting.
    let host = Host { kernel: Kernel::Real, ..Host::at(tree.path()).unwrap() };
    let root = Root::at(Path::new("/")).unwrap();
    let host = Host { root: PathBuf::from("/host"), other: Some(Arc::new(root)), ..host };
    let path = host.proc(&format!("self/fd/{}", null.as_raw_fd()));
    assert_eq!(host.node_id(&path).unwrap(), expected);
    assert_eq!(host.node_id(&host.dev("null")).unwrap(), expected);
    assert_eq!(host.node_id(&host.proc("self/fd/99999")).unwrap(), None);
}
