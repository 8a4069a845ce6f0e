//! `vfiod agent`: the loop, wired to the node.

use std::{io::IsTerminal, time::Duration};

use clap::Args;
use decide::wish::{Desired, Source, Wish, resolve};
use reason::{Code, Coded, Reason};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
    task::JoinSet,
    time::sleep,
};

use super::{End, Failure, NodeArgs, WishArgs, places::Places, runtime};
use crate::{
    agent::{Service, Tuning},
    config::{Config, ConfigError},
    device_plugin,
    lock::{Role, WriterLock},
};

/// How often the config file is looked at. By polling, since a mounted ConfigMap is swapped by a link far from the file.
const CONFIG_POLL: Duration = Duration::from_secs(2);

#[derive(Debug, Args)]
pub struct AgentArgs {
    #[command(flatten)]
    wish: WishArgs,
    /// Log as JSON, a line each
    #[arg(long)]
    log_json: bool,
    #[command(flatten)]
    node: NodeArgs,
}

pub fn run(args: &AgentArgs) -> Result<End, Failure> {
    log(args.log_json);
    let places = Places::new(&args.node)?;
    let config = places.config()?;
    let first = match wish(args, Ok(&config)) {
        Wish::Clear(desired) => desired,
        Wish::Unclear(Reason { message, .. }) => return Err(message.into()),
    };
    if !args.node.no_kubernetes {
        return Err("this version does not follow the node's label yet: run it with --no-kubernetes, and the wish from \
                    --workload-type or the config file"
            .into());
    }
    let _lock = WriterLock::take(&places.host, &places.state_dir, Role::Agent)?;
    let runtime = runtime()?;
    let served = runtime.block_on(serve(args, config, first, &places));
    // A thread that the kernel keeps must not keep the process.
    runtime.shutdown_timeout(Duration::from_millis(300));
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

/// What is wished for, flags before file, as far as this version serves it.
fn wish(args: &AgentArgs, config: Result<&Config, Reason>) -> Wish {
    let config = config.map_or_else(Source::Broken, |config| Source::Says(config.said()));
    resolve(&[Source::Says(args.wish.said()), config]).served()
}

async fn serve(args: &AgentArgs, config: Config, first: Desired, places: &Places) -> Result<(), Failure> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tracing::info!(workload_type = %first.workload_type, consumer = %first.consumer, "vfiod {}", env!("CARGO_PKG_VERSION"));
    let settings = places.settings(&config)?;
    let mut service = Service::start(settings, device_plugin::Settings::default(), first, &places.socket)?;
    let followed = Followed { wish: service.wish.clone(), tuning: service.tuning.clone() };
    let broke_off = tokio::select! {
        () = service.ended() => true,
        () = follow_config(args, places, config, followed) => false,
        _ = terminate.recv() => false,
        _ = interrupt.recv() => false,
    };
    tracing::info!("ending; VMs keep what they have");
    service.stop().await;
    if broke_off { Err("the agent's loop broke off; the log says where".into()) } else { Ok(()) }
}

/// Where a changed config goes.
struct Followed {
    wish: watch::Sender<Wish>,
    tuning: watch::Sender<Tuning>,
}

/// Looks at the config file again and again. A file that does not fit changes nothing, and log and status say why.
async fn follow_config(args: &AgentArgs, places: &Places, mut present: Config, followed: Followed) {
    if places.config.is_none() {
        return std::future::pending().await;
    }
    loop {
        sleep(CONFIG_POLL).await;
        let Some(read) = read(places).await else { continue };
        let refused = |code, message| Reason::new(code, message);
        let now = match read {
            Ok((config, _)) if config == present => wish(args, Ok(&present)),
            Ok((config, Ok(tuning))) => {
                let now = wish(args, Ok(&config));
                // A part that is not served leaves the whole file aside, as one that does not parse does.
                if let Wish::Clear(_) = &now {
                    present = config;
                    followed.tuning.send_replace(tuning);
                }
                now
            }
            Ok((_, Err(error))) => wish(args, Err(refused(Code::ConfigRefused, error.to_string()))),
            Err(error) => wish(args, Err(error.reason())),
        };
        followed.wish.send_if_modified(|before| {
            let changed = *before != now;
            if let (true, Wish::Unclear(reason)) = (changed, &now) {
                tracing::error!(code = %reason.code, "{}; the present wish is kept", reason.message);
            }
            *before = now;
            changed
        });
    }
}

/// What the config file says now, with what follows from it; nothing where the reading broke off. The file, and the
/// node's pci.ids, are read off the async threads.
async fn read(places: &Places) -> Option<Result<(Config, Result<Tuning, Failure>), ConfigError>> {
    let places = places.clone();
    let mut task = JoinSet::new();
    task.spawn_blocking(move || {
        let config = places.config()?;
        let tuning = places.tuning(&config);
        Ok((config, tuning))
    });
    task.join_next().await?.ok()
}
