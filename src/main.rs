//! The vfiod binary: see the library for what it does.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    vfiod::cli::main(std::env::args_os())
}
