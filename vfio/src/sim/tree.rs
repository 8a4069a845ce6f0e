//! The tree's files and links.
#![expect(
    clippy::disallowed_methods,
    reason = "the simulated kernel's own files; nothing here is a real kernel's"
)]

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::symlink,
    path::{Component, Path, PathBuf},
};

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use super::Fault;
use crate::{
    host::Host,
    pci::{self, Address, Function},
    write::Write,
};

/// A line of the write log.
#[derive(Serialize, Deserialize)]
struct Logged {
    pid: u32,
    #[serde(flatten)]
    write: Write,
}

#[derive(Debug, Clone)]
pub(super) struct Tree {
    host: Host,
}

impl Tree {
    pub(super) fn new(host: Host) -> Self {
        Self { host }
    }

    pub(super) fn host(&self) -> &Host {
        &self.host
    }

    fn own(&self, name: &str) -> PathBuf {
        self.host.root().join(".sim").join(name)
    }

    /// Keeps every other process of this node out, as a device lock would. Released on drop.
    pub(super) fn lock(&self) -> io::Result<Flock<File>> {
        let path = self.own("lock");
        make_parent(&path)?;
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| errno.into())
    }

    pub(super) fn log(&self) -> io::Result<Vec<Write>> {
        let text = match fs::read_to_string(self.own("log")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            other => other?,
        };
        text.lines().map(|line| Ok(serde_json::from_str::<Logged>(line)?.write)).collect()
    }

    /// Appends a write to the log and says its number, counted from 1. The caller has the lock.
    pub(super) fn count(&self, write: &Write) -> io::Result<usize> {
        let line = serde_json::to_string(&Logged { pid: std::process::id(), write: write.clone() })?;
        let mut file = OpenOptions::new().create(true).append(true).open(self.own("log"))?;
        file.write_all(format!("{line}\n").as_bytes())?;
        Ok(self.log()?.len())
    }

    pub(super) fn set_faults(&self, faults: &[Fault]) -> io::Result<()> {
        // By rename, so that a writer never sees half of them.
        let path = self.own("faults");
        make_parent(&path)?;
        let new = self.own("faults.new");
        fs::write(&new, serde_json::to_vec(faults)?)?;
        fs::rename(new, path)
    }

    pub(super) fn faults(&self) -> io::Result<Vec<Fault>> {
        match fs::read(self.own("faults")) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    pub(super) fn function(&self, address: Address) -> io::Result<Option<Function>> {
        pci::read(&self.host, address).map_err(io::Error::other)
    }

    pub(super) fn loaded(&self, driver: &str) -> bool {
        self.host.sys("bus/pci/drivers").join(driver).is_dir()
    }

    pub(super) fn set_attribute(&self, address: Address, name: &str, value: &str) -> io::Result<()> {
        put(&self.host.function_dir(address).join(name), &format!("{value}\n"))
    }

    /// Links function and driver, each to the other.
    pub(super) fn link_driver(&self, address: Address, driver: &str) -> io::Result<()> {
        let dir = self.host.function_dir(address);
        // Trees laid here have the function below sys/devices, as the kernel's; trees made by hand may have it in place.
        let to_bus = match fs::read_link(&dir) {
            // From `../../../devices/pci0000:00/…`, however many bridges it is behind.
            Ok(target) => {
                let below = target.components().filter(|part| matches!(part, Component::Normal(_))).count();
                format!("{}bus/pci", "../".repeat(below))
            }
            Err(_) => "../..".to_owned(),
        };
        symlink(format!("{to_bus}/drivers/{driver}"), dir.join("driver"))?;
        let back = self.host.sys("bus/pci/drivers").join(driver).join(address.to_string());
        if back.is_symlink() { Ok(()) } else { symlink(format!("../../devices/{address}"), back) }
    }

    pub(super) fn unlink_driver(&self, address: Address, driver: &str) -> io::Result<()> {
        remove(&self.host.function_dir(address).join("driver"))?;
        remove(&self.host.sys("bus/pci/drivers").join(driver).join(address.to_string()))
    }

    /// One more uevent.
    pub(super) fn uevent(&self) -> io::Result<()> {
        let path = self.host.sys("kernel/uevent_seqnum");
        let before: u64 = fs::read_to_string(&path).unwrap_or_default().trim().parse().unwrap_or(0);
        put(&path, &format!("{}\n", before + 1))
    }
}

/// Writes a file, with the directories above it.
pub(super) fn put(path: &Path, content: &str) -> io::Result<()> {
    make_parent(path)?;
    fs::write(path, content)
}

/// Writes a file that is no text.
pub(super) fn put_bytes(path: &Path, content: &[u8]) -> io::Result<()> {
    make_parent(path)?;
    fs::write(path, content)
}

pub(super) fn make_parent(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), fs::create_dir_all)
}

/// Removes a file or link; one that is not there is fine.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Removes a directory with all in it; one that is not there is fine.
pub(super) fn remove_dir(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
