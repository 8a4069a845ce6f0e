//! The vfiod binary: see the library for what it does.

use std::process::ExitCode;

fn main() -> ExitCode {
    vfiod::cli::main(std::env::args_os())
}
