//! The programs under test: built by cargo as this one was, or named by the caller.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::process::{self, ProcessError};
use super::progress::say;

const CURE: &str = "The compiler's message is below; VFIOD_BIN=/path/to/vfiod uses a built one";

/// A program could not be built.
#[derive(Debug, thiserror::Error)]
pub enum ProductError {
    /// cargo failed.
    #[error("building vfiod and the guest's program")]
    Process(#[from] ProcessError),
    /// cargo did not say where the program is.
    #[error("cargo built {program} but named no such file in its messages")]
    NotNamed {
        /// The program.
        program: &'static str,
    },
    /// cargo did not say where it builds.
    #[error("cargo's metadata do not say where it builds")]
    NoDirectory,
}

/// The programs that go into the guest.
#[derive(Debug, Clone)]
pub struct Product {
    /// The agent.
    pub vfiod: PathBuf,
    /// The guest's `/init`.
    pub guest: PathBuf,
}

/// Builds both programs in this program's profile; `VFIOD_BIN` stands in for the agent.
///
/// By two calls: cargo gives a dependency the features that all packages of one call ask for, and the guest's stand-in
/// kubelet asks for the simulation, which the agent is to be without.
pub fn build() -> Result<Product, ProductError> {
    say("building vfiod and the guest's program");
    Ok(Product { vfiod: vfiod()?, guest: built(&mut build_command("vm-tests", "guest"), "guest")? })
}

/// The agent as `cargo build` makes it, without features; or the one that `VFIOD_BIN` names.
pub fn vfiod() -> Result<PathBuf, ProductError> {
    if let Some(path) = std::env::var_os("VFIOD_BIN") {
        return Ok(PathBuf::from(path));
    }
    let directories = Directories::ask()?;
    let mut command = build_command("vfiod", "vfiod");
    // To a place of its own, from the same parts: where cargo else puts it lies the one with the simulation, which the
    // agent's own tests start, perhaps just now.
    command
        .arg("--target-dir")
        .arg(directories.target.join("product"))
        .env("CARGO_BUILD_BUILD_DIR", &directories.build);
    built(&mut command, "vfiod")
}

/// Where cargo puts what it makes.
#[derive(Debug, serde::Deserialize)]
struct Directories {
    #[serde(rename = "target_directory")]
    target: PathBuf,
    #[serde(rename = "build_directory")]
    build: PathBuf,
}

impl Directories {
    fn ask() -> Result<Self, ProductError> {
        let metadata = process::run(cargo("metadata").args(["--no-deps", "--format-version=1"]), CURE)?;
        serde_json::from_str(&metadata).map_err(|_| ProductError::NoDirectory)
    }
}

fn cargo(subcommand: &str) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .arg(subcommand)
        .arg("--manifest-path")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("Cargo.toml"));
    command
}

fn build_command(package: &str, program: &str) -> Command {
    let mut command = cargo("build");
    command.args(["--message-format=json-render-diagnostics", "-p", package, "--bin", program]);
    if !cfg!(debug_assertions) {
        command.arg("--release");
    }
    command
}

fn built(command: &mut Command, program: &'static str) -> Result<PathBuf, ProductError> {
    let messages = process::run(command, CURE)?;
    executable(&messages, program).ok_or(ProductError::NotNamed { program })
}

/// The file that cargo's messages give for a binary target.
fn executable(messages: &str, name: &str) -> Option<PathBuf> {
    messages.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok()).find_map(
        |message| {
            let named = message.pointer("/target/name")?.as_str()? == name;
            let path = message.get("executable")?.as_str()?;
            named.then(|| PathBuf::from(path))
        },
    )
}
