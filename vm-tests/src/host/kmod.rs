//! Our kernel modules, built out of tree against the unpacked headers.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::apt::{self, AptError};
use super::cache::{Cache, CacheError, Key};
use super::files::{self, FileError};
use super::kernel::Kernel;
use super::process::{self, ProcessError};
use super::progress::say;

/// The sources, part of this program so that it needs no source tree to run.
const SOURCES: [(&str, &str); 3] = [
    ("Kbuild", include_str!("../../kmod/Kbuild")),
    ("fakepci.c", include_str!("../../kmod/fakepci.c")),
    ("hostdrv.c", include_str!("../../kmod/hostdrv.c")),
];
/// The modules they make.
pub const MODULES: [&str; 2] = ["fakepci", "hostdrv"];
const CURE: &str =
    "If you changed vm-tests/kmod/, the compiler's message is below; else delete the lab's cache";

/// The modules could not be built.
#[derive(Debug, thiserror::Error)]
pub enum KmodError {
    /// A tool is missing.
    #[error("getting the tools to build kernel modules")]
    Apt(#[from] AptError),
    /// The cache failed.
    #[error("keeping the kernel modules")]
    Cache(#[from] CacheError),
    /// A file operation failed.
    #[error("building the kernel modules")]
    File(#[from] FileError),
    /// make failed.
    #[error("building the kernel modules")]
    Process(#[from] ProcessError),
}

/// Builds the modules, or finds them built; gives the folder with the `.ko` files.
pub fn build(cache: &Cache, kernel: &Kernel) -> Result<PathBuf, KmodError> {
    let build = kernel.key.text();
    let sources = SOURCES.iter().flat_map(|(name, text)| [name.as_bytes(), text.as_bytes()]);
    let key = Key::of(sources.chain([build.as_bytes()]));
    cache.entry("kmod", &key, |dir| {
        say("building the kernel modules");
        tools(kernel)?;
        // Built elsewhere, so that only the finished modules are kept.
        let work = tempfile::tempdir().map_err(|source| FileError::new("create a folder in", dir, source))?;
        for (name, text) in SOURCES {
            files::write(&work.path().join(name), text)?;
        }
        let mut make = Command::new("make");
        make.arg("-C")
            .arg(&kernel.headers)
            .arg(format!("M={}", work.path().display()))
            // Type information for BPF needs the kernel's own ELF file and a tool that a bare machine lacks.
            .args(["CONFIG_DEBUG_INFO_BTF_MODULES=", "KCFLAGS=-Werror", "modules"])
            // A make above us hands down a job server that this one cannot use.
            .env_remove("MAKEFLAGS")
            .env_remove("MFLAGS");
        process::run(&mut make, CURE)?;
        for module in MODULES {
            let file = format!("{module}.ko");
            strip(&work.path().join(&file), &dir.join(&file))?;
        }
        Ok(())
    })
}

fn strip(from: &Path, to: &Path) -> Result<(), ProcessError> {
    process::run(Command::new("strip").arg("--strip-debug").arg("-o").arg(to).arg(from), CURE)?;
    Ok(())
}

/// A machine with a Rust toolchain has a C compiler; make and libelf (for the headers' objtool) it may lack.
fn tools(kernel: &Kernel) -> Result<(), KmodError> {
    apt::need("gcc", "gcc")?;
    apt::need("make", "make")?;
    let objtool = kernel.headers.join("../../lib/linux-kbuild-6.1/tools/objtool/objtool");
    let libraries = process::run(Command::new("ldd").arg(objtool), CURE)?;
    if libraries.contains("not found") {
        apt::install("objtool", "libelf1")?;
    }
    Ok(())
}
