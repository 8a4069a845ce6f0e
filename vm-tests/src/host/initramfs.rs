//! The guest's root file system: its `/init`, vfiod, their libraries and the kernel modules.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::closure;
use super::cpio::Archive;
use super::files::{self, FileError};
use super::kernel::Kernel;
use super::kmod;
use super::modules::{self, ModuleError};
use super::process::{self, ProcessError};
use super::product::Product;
use crate::guest::paths;

/// The stock modules that the guest loads, besides what they depend on. `vfio_iommu_type1` is asked for by `vfio` at
/// run time through modprobe, which the guest has not.
const STOCK: [&str; 2] = ["vfio_iommu_type1", "vfio-pci"];

/// The archive could not be made.
#[derive(Debug, thiserror::Error)]
pub enum InitramfsError {
    /// A file operation failed.
    #[error("building the initramfs")]
    File(#[from] FileError),
    /// A kernel module is missing.
    #[error("building the initramfs")]
    Module(#[from] ModuleError),
    /// A program failed.
    #[error("building the initramfs")]
    Process(#[from] ProcessError),
}

/// Writes the archive to `to`.
pub fn build(kernel: &Kernel, kmods: &Path, product: &Product, to: &Path) -> Result<(), InitramfsError> {
    let mut archive = Archive::default();
    for folder in ["/proc", "/sys", "/dev", "/run", "/tmp", "/var/lib", "/etc", "/root"] {
        archive.folder(folder);
    }
    add_program(&mut archive, &product.guest, paths::INIT)?;
    add_program(&mut archive, &product.vfiod, paths::VFIOD)?;
    // Under a name of its own, so that /proc tells it from the test that started it.
    archive.symlink(paths::VMM, paths::INIT);
    let mut libraries = closure::libraries(&product.guest)?;
    libraries.extend(closure::libraries(&product.vfiod)?);
    libraries.sort();
    libraries.dedup();
    for library in libraries {
        archive.file(&library.to_string_lossy(), &files::read(&library)?);
    }

    let mut order = String::new();
    let stock = modules::load_order(&kernel.modules, &STOCK)?;
    let ours = kmod::MODULES.iter().map(|name| kmods.join(format!("{name}.ko")));
    for file in stock.into_iter().chain(ours) {
        let name = file.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        archive.file(&format!("{}/{name}", paths::MODULES), &files::read(&file)?);
        order.push_str(&name);
        order.push('\n');
    }
    archive.file(&format!("{}/order", paths::MODULES), order.as_bytes());
    Ok(files::write(to, archive.finish())?)
}

/// Adds a program without its debugging sections, which can be most of it.
fn add_program(archive: &mut Archive, program: &Path, at: &str) -> Result<(), InitramfsError> {
    let dir = tempfile::tempdir()
        .map_err(|source| FileError::new("create a temporary copy of", program, source))?;
    let stripped: PathBuf = dir.path().join("program");
    let mut strip = Command::new("strip");
    strip.arg("-o").arg(&stripped).arg(program);
    process::run(&mut strip, "strip is part of binutils, which the C compiler brings")?;
    archive.file(at, &files::read(&stripped)?);
    Ok(())
}
