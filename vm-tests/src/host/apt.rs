//! Debian's packages: asked about, downloaded and unpacked. apt's sources are never altered, and nothing is installed
//! but the few build tools that a bare machine may lack.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use super::files::{self, FileError};
use super::process::{self, ProcessError};
use super::progress::say;

const CURE: &str = "The lab needs Debian 12 with its usual apt sources and a reachable mirror; \
                    try `apt-get update` and run it again";

/// apt could not give what the lab needs.
#[derive(Debug, thiserror::Error)]
pub enum AptError {
    /// apt or dpkg failed.
    #[error("asking Debian's packages")]
    Process(#[from] ProcessError),
    /// A file operation failed.
    #[error("handling downloaded packages")]
    File(#[from] FileError),
    /// apt answered, but not with what was asked for.
    #[error("apt knows no {what}. {CURE}")]
    Unknown {
        /// What was looked for.
        what: String,
    },
    /// A tool is missing and may not be installed.
    #[error(
        "the lab needs `{program}`, and only root can install it. Run `apt-get install {package}` as root"
    )]
    NotRoot {
        /// The missing program.
        program: &'static str,
        /// The package that has it.
        package: &'static str,
    },
}

/// A package in one version.
#[derive(Debug, Clone)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
}

/// The package that `package` depends on whose name starts with `prefix`.
pub fn dependency(package: &str, prefix: &str) -> Result<String, AptError> {
    fresh(|| {
        let answer = process::run(apt("apt-cache").args(["depends", package]), CURE)?;
        answer
            .lines()
            .filter_map(|line| line.trim().strip_prefix("Depends: "))
            .find(|name| name.starts_with(prefix))
            .map(str::to_owned)
            .ok_or_else(|| AptError::Unknown { what: format!("{prefix}* that {package} depends on") })
    })
}

/// The version that apt would install.
pub fn candidate(name: &str) -> Result<Package, AptError> {
    fresh(|| {
        let answer = process::run(apt("apt-cache").args(["show", "--no-all-versions", name]), CURE)?;
        let version = answer.lines().find_map(|line| line.strip_prefix("Version: "));
        version
            .map(|version| Package { name: name.to_owned(), version: version.to_owned() })
            .ok_or_else(|| AptError::Unknown { what: format!("package {name}") })
    })
}

/// Downloads packages into `dir`, each in exactly the version named, so that they come from one suite.
pub fn download(packages: &[Package], dir: &Path) -> Result<Vec<PathBuf>, AptError> {
    let names: Vec<String> = packages.iter().map(|p| format!("{}={}", p.name, p.version)).collect();
    fresh(|| {
        let mut command = apt("apt-get");
        command.current_dir(dir).args(SANDBOX).arg("download").args(&names);
        process::run(&mut command, CURE)?;
        Ok(files::list(dir)?)
    })
}

/// Downloads a package with all it needs that is not installed, as if no package named `without*` were installed.
///
/// That is how QEMU is had beside an installed `qemu-utils` of another version, which an installation would remove.
pub fn download_closure(name: &str, without: &str, dir: &Path) -> Result<Vec<PathBuf>, AptError> {
    let status_path = dir.join("status");
    let status = files::read_text(Path::new("/var/lib/dpkg/status"))?;
    files::write(&status_path, without_packages(&status, without))?;
    let archives = dir.join("archives");
    files::create_dir(&archives.join("partial"))?;
    fresh(|| {
        let mut command = apt("apt-get");
        command
            .args(SANDBOX)
            .arg("-o")
            .arg(format!("Dir::State::status={}", status_path.display()))
            .arg("-o")
            .arg(format!("Dir::Cache::archives={}", archives.display()))
            // Nothing of the system is written, so its lock is not needed (and only root could take it).
            .args(["-o", "Debug::NoLocking=1"])
            .args(["install", "-y", "--no-install-recommends", "--no-remove", "--download-only", name]);
        process::run(&mut command, CURE)?;
        let all = files::list(&archives)?;
        Ok(all.into_iter().filter(|path| path.extension().is_some_and(|e| e == "deb")).collect())
    })
}

/// Unpacks a package below `root`; nothing of it is run.
pub fn unpack(package: &Path, root: &Path) -> Result<(), AptError> {
    process::run(Command::new("dpkg-deb").arg("-x").arg(package).arg(root), CURE)?;
    Ok(())
}

/// Makes sure that `program` is there, installing `package` if it is not.
pub fn need(program: &'static str, package: &'static str) -> Result<(), AptError> {
    if process::find(program).is_some() {
        return Ok(());
    }
    install(program, package)
}

/// Installs `package`, which has `program`; never removes anything for it.
pub fn install(program: &'static str, package: &'static str) -> Result<(), AptError> {
    if !nix::unistd::geteuid().is_root() {
        return Err(AptError::NotRoot { program, package });
    }
    say(&format!("installing {package} for {program}"));
    fresh(|| {
        let mut command = apt("apt-get");
        command.args(["install", "-y", "--no-install-recommends", "--no-remove", package]);
        process::run(&mut command, CURE)?;
        Ok(())
    })
}

/// Lets a root run fetch into a folder that apt's own user may not read.
const SANDBOX: [&str; 2] = ["-o", "APT::Sandbox::User=root"];

fn apt(program: &str) -> Command {
    let mut command = Command::new(program);
    command.env("LC_ALL", "C").env("DEBIAN_FRONTEND", "noninteractive");
    command
}

/// Asks; if that fails, fetches the package lists once in this process and asks again: a fresh container has no lists,
/// and old lists name versions that the mirror no longer has.
fn fresh<T>(ask: impl Fn() -> Result<T, AptError>) -> Result<T, AptError> {
    static UPDATED: OnceLock<()> = OnceLock::new();
    ask().or_else(|error| {
        if UPDATED.get().is_some() || !nix::unistd::geteuid().is_root() {
            return Err(error);
        }
        UPDATED.get_or_init(|| {
            say("fetching apt's package lists");
            // A dead third-party source makes this fail although Debian's own lists came; asking again decides.
            let _ = process::run(apt("apt-get").arg("update"), CURE);
        });
        ask()
    })
}

/// dpkg's status without the packages whose names start with `prefix`.
fn without_packages(status: &str, prefix: &str) -> String {
    let start = format!("Package: {prefix}");
    let kept = status.split("\n\n").filter(|record| !record.trim_start().starts_with(&start));
    kept.map(|record| format!("{record}\n\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_left_out_of_the_status_by_prefix() {
        let status =
            "Package: a\nVersion: 1\n\nPackage: qemu-utils\nVersion: 2\n\nPackage: b\nDepends: qemu-x\n";
        let kept = without_packages(status, "qemu-");
        assert!(kept.contains("Package: a\n") && kept.contains("Package: b\n"), "{kept}");
        assert!(!kept.contains("qemu-utils"), "{kept}");
    }
}
