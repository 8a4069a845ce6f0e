//! Where a node's things are: host, state, sockets, kubelet, config.

use std::{collections::BTreeSet, path::PathBuf, time::Duration};

use decide::{
    inventory::Inventory,
    names::{Aliases, Naming},
    usage::Usage,
    wish::{Desired, Said, Source, Wish, WorkloadType, resolve},
};
use reason::{Coded, Reason, chain};
use vfio::{
    child::{ChildCommand, READ_DEADLINE, Reader},
    host::{Host, Kernel},
};

use super::{Failure, KERNEL_READER, KERNEL_WRITER, NodeArgs, WishArgs};
use crate::{
    agent::{Settings, Tuning},
    config::{Config, ConfigError},
    execute::Commands,
    journal::{Journal, Store},
    kubelet::{self, KubeletDir},
    node_file,
    observe::observe,
    pods::{IfAbsent, pods},
};

/// The config file, below the root, where none is named.
const CONFIG: &str = "etc/vfiod/config.yaml";

/// How long PodResources may say nothing before a promise that nobody is seen to have shows as unhealthy. A kubelet's start
/// takes a second or two.
const PODS_SILENCE: Duration = Duration::from_secs(10);

/// How long a device that has gone bad three times within minutes has to stay good before it is given out again.
const FLAP_PAUSE: Duration = Duration::from_secs(30);

/// The places of one node.
#[derive(Debug, Clone)]
pub struct Places {
    pub host: Host,
    pub state_dir: PathBuf,
    pub socket: PathBuf,
    pub kubelet: KubeletDir,
    pub if_absent: IfAbsent,
    /// The config file, where one is named or is at its usual place.
    pub config: Option<PathBuf>,
}

impl Places {
    pub fn new(args: &NodeArgs) -> Result<Self, Failure> {
        let host = match &args.root {
            Some(root) => Host::at(root)?,
            None => Host::system()?,
        };
        let below = |path: &str| host.root().join(path);
        let kubelet = KubeletDir::new(args.kubelet_dir.clone().unwrap_or_else(|| below("var/lib/kubelet")));
        // A simulated node runs nothing but what was laid there: where nobody laid a kubelet, there is none.
        let laid_without =
            host.kernel() == Kernel::Simulated && args.kubelet_dir.is_none() && !kubelet.root.exists();
        let usual = || Some(below(CONFIG)).filter(|path| path.exists());
        Ok(Self {
            state_dir: args.state_dir.clone().unwrap_or_else(|| below("var/lib/vfiod")),
            // A state directory of its own stands for an agent of its own.
            socket: args
                .state_dir
                .as_ref()
                .map_or_else(|| below("run/vfiod"), PathBuf::clone)
                .join("vfiod.sock"),
            if_absent: if args.no_kubernetes || laid_without { IfAbsent::NoPods } else { IfAbsent::Unknown },
            config: args.config.clone().or_else(usual),
            kubelet,
            host,
        })
    }

    /// What the config file says; all defaults where there is none.
    pub fn config(&self) -> Result<Config, ConfigError> {
        self.config.as_deref().map_or_else(|| Ok(Config::default()), Config::load)
    }

    pub fn store(&self) -> Store {
        Store::new(&self.state_dir)
    }

    pub fn journal(&self) -> Result<Journal, Failure> {
        Ok(self.store().load(&self.host.boot_id())?)
    }

    /// What is in use, beside what the inventory shows.
    pub async fn usage(&self, journal: &Journal, deadline: Duration) -> Usage {
        let answer = kubelet::list(&self.kubelet, deadline).await;
        Usage { holds: journal.holds.clone(), pods: pods(answer, self.if_absent) }
    }

    /// What an agent of this node is told.
    pub fn settings(&self, config: &Config) -> Result<Settings, Failure> {
        let Commands { writer, reader } = commands(config);
        Ok(Settings {
            host: self.host.clone(),
            kubelet: self.kubelet.clone(),
            if_absent: self.if_absent,
            store: self.store(),
            writer,
            reader,
            tuning: self.tuning(config)?,
        })
    }

    /// What of that the config decides.
    pub fn tuning(&self, config: &Config) -> Result<Tuning, Failure> {
        Ok(Tuning {
            naming: naming(&self.host, config)?,
            write_deadline: config.write_deadline,
            hold_grace: config.hold_grace,
            rescan: config.rescan,
            blocked_retry: config.blocked_retry,
            pod_resources_deadline: config.pod_resources_deadline,
            pods_silence: PODS_SILENCE,
            flap_pause: FLAP_PAUSE,
        })
    }

    pub fn observe(&self, config: &Config) -> Result<Inventory, Failure> {
        let mut reader = Reader::new(&commands(config).reader, &self.host);
        Ok(observe(&self.host, &mut reader, &BTreeSet::new())?)
    }
}

/// What is asked of a node that is only looked at: flags before the config file before what most people look for.
pub fn looked_for(args: &WishArgs, config: &Config) -> Result<Desired, Failure> {
    let usual = Said { workload_type: Some(WorkloadType::VmPassthrough), ..Said::default() };
    match resolve(&[args.said(), config.said(), usual].map(Source::Says)) {
        Wish::Clear(desired) => Ok(desired),
        Wish::Unclear(Reason { message, .. }) => Err(message.into()),
    }
}

/// The names of a node: the built-in ones, and its own pci.ids.
pub fn naming(host: &Host, config: &Config) -> Result<Naming, Failure> {
    let loaded = node_file::load(host, config.names.file.as_deref(), config.names.prefer);
    for warning in &loaded.warnings {
        tracing::warn!(code = %warning.code(), "{}", chain(warning));
    }
    let aliases = Aliases::from_lookup(|key| std::env::var(key).ok());
    aliases.check()?;
    Ok(Naming { names: loaded.names, aliases })
}

/// How this binary starts its own children.
pub fn commands(config: &Config) -> Commands {
    let command = |subcommand: &str, deadline| ChildCommand {
        // The running file itself, whatever has been put in its place since.
        program: PathBuf::from("/proc/self/exe"),
        arguments: vec![subcommand.to_owned()],
        name: env!("CARGO_PKG_NAME").to_owned(),
        deadline,
    };
    Commands {
        writer: command(KERNEL_WRITER, config.write_deadline),
        reader: command(KERNEL_READER, READ_DEADLINE),
    }
}
