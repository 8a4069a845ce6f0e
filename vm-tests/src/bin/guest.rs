//! The guest's program: `/init`, the scenario's process, and the VMM's stand-in, by its arguments.

use std::process::ExitCode;

use vm_tests::guest::{init, vmm};
use vm_tests::host::lab::chain;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.split_first() {
        Some((word, rest)) if word == "vmm" => {
            if let Err(error) = vmm::main(rest) {
                eprintln!("{}", chain(&error));
                return ExitCode::FAILURE;
            }
        }
        Some((word, rest)) if word == "scenario" => {
            init::scenario(rest.first().map_or("", String::as_str));
        }
        // The kernel passes process 1 what it does not know of its command line.
        _ if std::process::id() == 1 => init::main(),
        _ => {
            eprintln!(
                "this is the program of the lab's guest: it runs as /init in a machine of `vm-tests run`"
            );
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}
