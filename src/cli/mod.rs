//! The command line: one file a subcommand.

mod agent;
mod bind;
#[cfg(feature = "simulation")]
mod demo;
mod details;
mod inspect;
mod nothing;
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

use clap::{
    Args, Parser, Subcommand, ValueEnum,
    builder::{PossibleValuesParser, TypedValueParser},
};
use decide::{
    consumer::Consumer,
    wish::{Said, WorkloadType},
};
use reason::chain;
use vfio::{
    child::{ServeError, serve, serve_looks},
    host::Host,
};

/// The hidden subcommand under which the binary makes kernel writes for its agent.
pub const KERNEL_WRITER: &str = "kernel-writer";

/// The hidden subcommand under which it looks at functions and processes, where that may block.
pub const KERNEL_READER: &str = "kernel-reader";

/// What `vfiod demo` says where it is not.
#[cfg(not(feature = "simulation"))]
const NO_DEMO: &str = "this build has no demo, since it has no simulated kernel: `cargo build --features simulation` makes one \
                       that has both";

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
    #[cfg(feature = "simulation")]
    Demo(demo::DemoArgs),
    /// Not in this build: it has no simulated kernel
    // Whoever follows a page that has it is told, whatever comes after it.
    #[cfg(not(feature = "simulation"))]
    #[command(hide = true, disable_help_flag = true)]
    Demo {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
        ignored: Vec<OsString>,
    },
    #[command(name = KERNEL_WRITER, hide = true)]
    KernelWriter { root: PathBuf },
    #[command(name = KERNEL_READER, hide = true)]
    KernelReader { root: PathBuf },
}

/// Where the node is.
#[derive(Debug, Clone, Args)]
pub struct NodeArgs {
    /// The host is below DIR: its sys, dev, proc and lib/modules. A plain tree there can be looked at; writes to it only a
    /// build with the feature `simulation` answers
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    /// Where the journal and the lock are kept [default: /var/lib/vfiod, below the root]
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// The kubelet's root, with device-plugins/ and pod-resources/ below it [default: /var/lib/kubelet, below the root]
    #[arg(long, value_name = "DIR")]
    kubelet_dir: Option<PathBuf>,
    /// The config file [default: /etc/vfiod/config.yaml below the root, where it is there]
    #[arg(long, value_name = "FILE", env = "VFIOD_CONFIG")]
    config: Option<PathBuf>,
    /// There is no Kubernetes here: nothing is asked of an API server, and a kubelet's directory that is missing means that
    /// there are no pods, where it else counts as not known. A kubelet that is there is asked all the same
    #[arg(long)]
    no_kubernetes: bool,
}

/// What the node shall serve.
#[derive(Debug, Clone, Args)]
pub struct WishArgs {
    /// The workload type (goes before the config file)
    #[arg(long, value_name = "TYPE", value_parser = workload_types())]
    workload_type: Option<WorkloadType>,
    /// Who takes the devices of a VM type (goes before the config file)
    #[arg(long, value_parser = consumers())]
    consumer: Option<Consumer>,
}

fn workload_types() -> impl TypedValueParser<Value = WorkloadType> {
    PossibleValuesParser::new(WorkloadType::ALL.map(WorkloadType::as_str)).try_map(|text| text.parse())
}

fn consumers() -> impl TypedValueParser<Value = Consumer> {
    PossibleValuesParser::new(Consumer::ALL.map(Consumer::as_str)).try_map(|text| text.parse())
}

impl WishArgs {
    fn said(&self) -> Said {
        let Self { workload_type, consumer } = *self;
        Said { workload_type, consumer, adopt_boot_bound: None }
    }
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
        #[cfg(feature = "simulation")]
        Command::Demo(args) => demo::run(&args),
        #[cfg(not(feature = "simulation"))]
        Command::Demo { .. } => Err(NO_DEMO.into()),
        // A writer that is left behind in a blocked write has nothing open but its pipe.
        Command::KernelWriter { root } => {
            answer(root, |host, input, output| serve(&host.unheld(), input, output))
        }
        Command::KernelReader { root } => answer(root, serve_looks),
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

fn answer(
    root: PathBuf,
    serve: impl FnOnce(&Host, BufReader<io::Stdin>, io::Stdout) -> Result<(), ServeError>,
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
