//! `vfiod agent`: the loop, wired to the node.

use std::{path::PathBuf, time::Duration};

use clap::Args;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, watch},
    time::sleep,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    End, Failure, NodeArgs,
    places::{Places, naming, writer_command},
    runtime,
};
use crate::{
    agent::{Agent, Channels, Settings, starting},
    config::Config,
    desired::{Consumer, Desired, WorkloadType},
    device_plugin::{self, Advertised, DevicePlugins, Registrations},
    lock::WriterLock,
    reason::chain,
    status,
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
    let _lock = WriterLock::take(&places.state_dir, "agent")?;
    runtime()?.block_on(serve(args, config, desired, &places))?;
    Ok(End::Done)
}

fn log(json: bool) {
    use tracing_subscriber::{EnvFilter, fmt};
    let filter = EnvFilter::try_from_env("VFIOD_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = fmt().with_env_filter(filter).with_writer(std::io::stderr);
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
    let (wish, wish_seen) = watch::channel(first.clone());
    let (allocate, allocate_seen) = mpsc::channel(16);
    let (registrations, registrations_seen) = watch::channel(Registrations::new());
    let (advertised, advertised_seen) = watch::channel(Advertised::new());
    let (status_out, status_seen) = watch::channel(starting(&first));
    // The loop ends first, then what serves its outputs: a pass under way is never cut off.
    let (stop_loop, stop_servers) = (CancellationToken::new(), CancellationToken::new());

    let agent = Agent::new(
        Settings {
            host: places.host.clone(),
            kubelet: places.kubelet.clone(),
            store: places.store(),
            writer: writer_command(config.write_deadline),
            naming: naming(places.host.root(), &config),
            hold_grace: config.hold_grace,
            rescan: config.rescan,
            blocked_retry: config.blocked_retry,
            pod_resources_deadline: config.pod_resources_deadline,
        },
        Channels {
            wish: wish_seen,
            allocate: allocate_seen,
            registrations: registrations_seen,
            advertised,
            status: status_out,
            stop: stop_loop.clone(),
        },
    )?;
    let socket = status::listen(&places.socket)?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;

    let servers = TaskTracker::new();
    servers.spawn(status::serve(socket, status_seen, stop_servers.clone()));
    servers.spawn(
        DevicePlugins {
            settings: device_plugin::Settings::default(),
            kubelet: places.kubelet.clone(),
            advertised: advertised_seen,
            allocate,
            registrations,
            stop: stop_servers.clone(),
        }
        .run(),
    );
    servers.close();
    tracing::info!(workload_type = %first.workload_type, consumer = %first.consumer, "vfiod {}", env!("CARGO_PKG_VERSION"));

    let looping = agent.run();
    let wishes = follow_config(args, config, wish);
    let stopping = async {
        tokio::select! {
            () = wishes => {}
            _ = terminate.recv() => tracing::info!("told to end (SIGTERM)"),
            _ = interrupt.recv() => tracing::info!("told to end (SIGINT)"),
        }
        stop_loop.cancel();
        std::future::pending::<()>().await;
    };
    // The loop ends by itself once it is told to: a pass under way is never cut off.
    tokio::select! {
        () = looping => {}
        () = stopping => {}
    }
    stop_servers.cancel();
    servers.wait().await;
    Ok(())
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
