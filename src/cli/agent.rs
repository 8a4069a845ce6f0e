//! `vfiod agent`: the loop, wired to the node.

use std::{io::IsTerminal, path::PathBuf, time::Duration};

use clap::Args;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
    time::sleep,
};

use super::{End, Failure, NodeArgs, places::Places, runtime};
use crate::{
    agent::Service,
    config::Config,
    desired::{Consumer, Desired, WorkloadType},
    device_plugin,
    lock::WriterLock,
    reason::chain,
};

/// How often the config file is looked at. By polling, since a mounted ConfigMap is swapped by a link far from the file.
const CONFIG_POLL: Duration = Duration::from_secs(2);

#[derive(Debug, Args)]
pub struct AgentArgs {
    /// What the node's GPUs shall serve (goes before the config file)
    #[arg(long, value_enum)]
    workload_type: Option<WorkloadType>,
    /// Who takes the devices of a VM type (goes before the config file)
    #[arg(long, value_enum)]
    consumer: Option<Consumer>,
    /// The config file; looked at again while the agent runs
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// There is no API server: the wish comes from here alone. The kubelet's sockets are used all the same
    #[arg(long)]
    no_kubernetes: bool,
    /// Log as JSON, a line each
    #[arg(long)]
    log_json: bool,
    #[command(flatten)]
    node: NodeArgs,
}

pub fn run(args: &AgentArgs) -> Result<End, Failure> {
    log(args.log_json);
    let config = match &args.config {
        Some(path) => Config::load(path)?,
        None => Config::default(),
    };
    let desired = desired(args, &config)?;
    if !args.no_kubernetes {
        return Err("this version does not follow the node's label yet: run it with --no-kubernetes, and the wish from \
                    --workload-type or the config file"
            .into());
    }
    let places = Places::new(&args.node)?;
    let _lock = WriterLock::take(&places.host, &places.state_dir, "agent")?;
    let runtime = runtime()?;
    let served = runtime.block_on(serve(args, config, desired, &places));
    // A thread that the kernel keeps must not keep the process.
    runtime.shutdown_timeout(Duration::from_secs(1));
    served?;
    Ok(End::Done)
}

fn log(json: bool) {
    use tracing_subscriber::{EnvFilter, fmt};
    let filter = EnvFilter::try_from_env("VFIOD_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let colour = std::io::stderr().is_terminal();
    let builder = fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colour);
    // A second subscriber in one process is refused; the first goes on.
    let _ = if json { builder.json().try_init() } else { builder.with_target(false).try_init() };
}

/// What is wished for, flags before file; refused where this version cannot serve it.
fn desired(args: &AgentArgs, config: &Config) -> Result<Desired, Failure> {
    let Some(workload_type) = args.workload_type.or(config.workload_type) else {
        return Err(
            "nothing is asked of this node: give --workload-type, or workloadType in the config file".into(),
        );
    };
    let consumer = args.consumer.unwrap_or(config.consumer);
    if workload_type == WorkloadType::VmVgpu {
        return Err("not yet: this version does not serve vm-vgpu; nothing was touched".into());
    }
    if consumer == Consumer::Kata {
        return Err("not yet: this version's agent serves KubeVirt only (inspect and plan answer for Kata); nothing was \
                    touched"
            .into());
    }
    Ok(Desired { workload_type, consumer, adopt_boot_bound: config.adopt_boot_bound })
}

async fn serve(args: &AgentArgs, config: Config, first: Desired, places: &Places) -> Result<(), Failure> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tracing::info!(workload_type = %first.workload_type, consumer = %first.consumer, "vfiod {}", env!("CARGO_PKG_VERSION"));
    let settings = places.settings(&config);
    let mut service = Service::start(settings, device_plugin::Settings::default(), first, &places.socket)?;
    let wish = service.wish.clone();
    let broke_off = tokio::select! {
        () = service.ended() => true,
        () = follow_config(args, config, wish) => false,
        _ = terminate.recv() => false,
        _ = interrupt.recv() => false,
    };
    tracing::info!("ending; VMs keep what they have");
    service.stop().await;
    if broke_off { Err("the agent's loop broke off; the log says where".into()) } else { Ok(()) }
}

/// Looks at the config file again and again. A file that does not fit keeps the present wish, and the log says why.
async fn follow_config(args: &AgentArgs, mut present: Config, wish: watch::Sender<Desired>) {
    let Some(path) = &args.config else { return std::future::pending().await };
    let mut last_error = String::new();
    loop {
        sleep(CONFIG_POLL).await;
        let error = match Config::load(path) {
            Ok(config) if config == present => String::new(),
            Ok(config) => match desired(args, &config) {
                Ok(desired) => {
                    present = config;
                    wish.send_if_modified(|now| {
                        let changed = *now != desired;
                        *now = desired;
                        changed
                    });
                    String::new()
                }
                Err(error) => error.to_string(),
            },
            Err(error) => chain(&error),
        };
        if !error.is_empty() && error != last_error {
            tracing::error!(code = "ConfigRefused", "{error}; the present wish is kept");
        }
        last_error = error;
    }
}
