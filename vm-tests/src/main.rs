//! `cargo run -p vm-tests -- list|fetch|run`: the real-kernel lab by hand.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use vm_tests::host::lab::{Ground, Lab, LabError, chain};
use vm_tests::scenarios::{ALL, Scenario};

/// Runs vfiod on a real Linux kernel in QEMU.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Lists the scenarios.
    List,
    /// Fetches and builds what the scenarios need, and runs none.
    Fetch,
    /// Runs the scenarios named, or all.
    Run {
        /// Names, as `list` gives them.
        scenarios: Vec<String>,
        /// Shows each machine's console.
        #[arg(long)]
        console: bool,
    },
}

fn main() -> ExitCode {
    let done = match Arguments::parse().command {
        Action::List => {
            ALL.iter().for_each(|s| println!("{:<34}{}", s.name, s.about));
            Ok(true)
        }
        Action::Fetch => fetch(),
        Action::Run { scenarios, console } => match chosen(&scenarios) {
            Ok(chosen) => run(&chosen, console),
            Err(unknown) => {
                eprintln!("vm-tests: no scenario named '{unknown}'. `list` names them");
                return ExitCode::from(2);
            }
        },
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("vm-tests: {}", chain(&error));
            ExitCode::FAILURE
        }
    }
}

fn fetch() -> Result<bool, LabError> {
    let ground = Ground::prepare()?;
    println!("{}\nLinux {}", ground.qemu.version, ground.kernel.release);
    Ok(true)
}

fn chosen(names: &[String]) -> Result<Vec<&'static Scenario>, &String> {
    if names.is_empty() {
        return Ok(ALL.iter().collect());
    }
    names.iter().map(|name| ALL.iter().find(|s| s.name == name).ok_or(name)).collect()
}

fn run(scenarios: &[&'static Scenario], console: bool) -> Result<bool, LabError> {
    let lab = Lab::prepare()?;
    let mut failed = 0;
    for scenario in scenarios {
        let outcome = lab.run(scenario);
        if let (true, Ok(report)) = (console, &outcome) {
            println!("{}", report.console);
        }
        match outcome {
            Ok(report) => match report.failure() {
                None => println!("{:<34}ok      {:.1} s", scenario.name, report.wall.as_secs_f64()),
                Some(why) => {
                    failed += 1;
                    println!("{why}");
                }
            },
            Err(error) => {
                failed += 1;
                println!("{}", chain(&error));
            }
        }
    }
    println!("{} passed; {failed} failed", scenarios.len() - failed);
    Ok(failed == 0)
}
