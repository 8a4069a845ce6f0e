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
pub fn build() -> Result<Product, ProductError> {
    let given = std::env::var_os("VFIOD_BIN").map(PathBuf::from);
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .args(["build", "--message-format=json-render-diagnostics", "--manifest-path"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml"))
        .args(["-p", "vm-tests", "--bin", "guest"]);
    if given.is_none() {
        command.args(["-p", "vfiod", "--bin", "vfiod"]);
    }
    if !cfg!(debug_assertions) {
        command.arg("--release");
    }
    say("building vfiod and the guest's program");
    let messages = process::run(&mut command, CURE)?;
    let vfiod = match given {
        Some(path) => path,
        None => executable(&messages, "vfiod").ok_or(ProductError::NotNamed { program: "vfiod" })?,
    };
    let guest = executable(&messages, "guest").ok_or(ProductError::NotNamed { program: "guest" })?;
    Ok(Product { vfiod, guest })
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
