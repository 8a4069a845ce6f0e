//! The command line: one file a subcommand.

mod agent;
mod bind;
mod demo;
mod details;
mod inspect;
mod places;
mod plan;
mod status;
mod table;

use std::{
    error::Error,
    ffi::OsString,
    io::{self, BufReader, Write},
    path::PathBuf,
    process::ExitCode,
};

use clap::{Args, Parser, Subcommand, ValueEnum};
use vfio::{host::Host, writer};

use crate::{
    desired::{Consumer, Desired, WorkloadType},
    reason::chain,
};

/// The hidden subcommand under which the binary makes kernel writes for its agent.
pub const KERNEL_WRITER: &str = "kernel-writer";

/// The hidden subcommand under which it reads functions, some of whose attributes may block.
pub const KERNEL_READER: &str = "kernel-reader";

/// Hands a Kubernetes node's GPUs to virtual machines and takes them back.
#[derive(Debug, Parser)]
#[command(name = "vfiod", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Keep this node at one workload type and offer its GPUs to the kubelet
    Agent(agent::AgentArgs),
    /// Show functions, IOMMU groups, and what is or would be offered
    Inspect(inspect::InspectArgs),
    /// Show what would be done for a workload type, step by step, and touch nothing
    Plan(LookArgs),
    /// Bind GPUs to vfio-pci, whole IOMMU groups at a time
    Bind(bind::BindArgs),
    /// Give GPUs back to the host's drivers, whole IOMMU groups at a time
    Unbind(bind::BindArgs),
    /// Ask the agent on this node how it stands
    Status(status::StatusArgs),
    /// Play the main job on a simulated node, and tell each step
    Demo(demo::DemoArgs),
    #[command(name = KERNEL_WRITER, hide = true)]
    KernelWriter { root: PathBuf },
    #[command(name = KERNEL_READER, hide = true)]
    KernelReader { root: PathBuf },
}

/// Where the node is.
#[derive(Debug, Clone, Args)]
pub struct NodeArgs {
    /// The host is below DIR: its sys, dev, proc and lib/modules (a plain tree there is a simulated node)
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    /// Where the journal and the lock are kept [default: /var/lib/vfiod, below the root]
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// The kubelet's root, with device-plugins/ and pod-resources/ below it [default: /var/lib/kubelet, below the root]
    #[arg(long, value_name = "DIR")]
    kubelet_dir: Option<PathBuf>,
}

/// What the node shall serve, where that is only looked at.
#[derive(Debug, Clone, Args)]
pub struct WishArgs {
    /// The workload type
    #[arg(long, value_enum, default_value = "vm-passthrough")]
    workload_type: WorkloadType,
    /// Who takes the devices of a VM type
    #[arg(long, value_enum, default_value = "kubevirt")]
    consumer: Consumer,
}

/// What a subcommand takes that only looks.
#[derive(Debug, Clone, Args)]
pub struct LookArgs {
    #[command(flatten)]
    node: NodeArgs,
    #[command(flatten)]
    wish: WishArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl WishArgs {
    fn desired(&self) -> Desired {
        Desired { workload_type: self.workload_type, consumer: self.consumer, adopt_boot_bound: false }
    }
}

/// How to print.
#[derive(Debug, Clone, Copy, Args)]
pub struct OutputArgs {
    /// For people, or for programs
    #[arg(short = 'o', long = "output", value_enum, default_value = "table")]
    output: Output,
}

/// A form of output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    /// Tables for people
    Table,
    /// JSON, stable
    Json,
}

type Failure = Box<dyn Error + Send + Sync>;

/// How a subcommand ended, when it did not fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// Done, or nothing to do.
    Done,
    /// Something was refused or failed, and that has been printed.
    Refused,
}

/// Runs the command line: exit code 0 for done or nothing to do, 1 for refused or failed, 2 for wrong usage.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are answers too; clap says which exit code each deserves.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    let end = match cli.command {
        Command::Agent(args) => agent::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Bind(args) => bind::run(&args, WorkloadType::VmPassthrough),
        Command::Unbind(args) => bind::run(&args, WorkloadType::Container),
        Command::Status(args) => status::run(&args),
        Command::Demo(args) => demo::run(&args),
        // A writer that is left behind in a blocked write has nothing open but its pipe.
        Command::KernelWriter { root } => {
            serve(root, |host, input, output| writer::serve(&host.unheld(), input, output))
        }
        Command::KernelReader { root } => serve(root, writer::serve_looks),
    };
    match end {
        Ok(End::Done) => ExitCode::SUCCESS,
        Ok(End::Refused) => ExitCode::from(1),
        Err(failure) => {
            let _ = writeln!(io::stderr(), "vfiod: {}", chain(failure.as_ref()));
            ExitCode::from(1)
        }
    }
}

fn serve(
    root: PathBuf,
    serve: impl FnOnce(&Host, BufReader<io::Stdin>, io::Stdout) -> Result<(), writer::ServeError>,
) -> Result<End, Failure> {
    serve(&Host::at(root)?, BufReader::new(io::stdin()), io::stdout())?;
    Ok(End::Done)
}

/// Prints to standard output; a reader that has gone away (`| head`) is no failure.
fn emit(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

fn emit_json(value: &impl serde::Serialize) -> Result<(), Failure> {
    emit(&format!("{}\n", serde_json::to_string_pretty(value)?))
}

/// A runtime for a subcommand that talks to sockets.
fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?)
}
