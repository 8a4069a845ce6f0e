//! The programs under test: built by cargo as this one was, or named by the caller.

use std::path::PathBuf;
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
/// By two calls: cargo gives a dependency the features that all packages of one call ask for, and the agent under test
/// is to be the one that `cargo build` makes.
pub fn build() -> Result<Product, ProductError> {
    say("building vfiod and the guest's program");
    let vfiod = match std::env::var_os("VFIOD_BIN") {
        Some(path) => PathBuf::from(path),
        None => build_one("vfiod", "vfiod")?,
    };
    Ok(Product { vfiod, guest: build_one("vm-tests", "guest")? })
}

fn build_one(package: &str, program: &'static str) -> Result<PathBuf, ProductError> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .args(["build", "--message-format=json-render-diagnostics", "--manifest-path"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml"))
        .args(["-p", package, "--bin", program]);
    if !cfg!(debug_assertions) {
        command.arg("--release");
    }
    let messages = process::run(&mut command, CURE)?;
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
