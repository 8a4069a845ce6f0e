//! Where a node's things are: host, state, sockets, kubelet.

use std::{collections::BTreeSet, path::PathBuf, time::Duration};

use vfio::{
    host::Host,
    writer::{READ_DEADLINE, Reader, WriterCommand},
};

use super::{Failure, KERNEL_READER, KERNEL_WRITER, NodeArgs};
use crate::{
    agent::Settings,
    config::Config,
    inventory::{Inventory, observe},
    journal::{Journal, Store},
    kubelet::{self, KubeletDir},
    names,
    offers::Naming,
    usage::Usage,
};

/// The places of one node.
#[derive(Debug, Clone)]
pub struct Places {
    pub host: Host,
    pub state_dir: PathBuf,
    pub socket: PathBuf,
    pub kubelet: KubeletDir,
}

impl Places {
    pub fn new(args: &NodeArgs) -> Result<Self, Failure> {
        let host = match &args.root {
            Some(root) => Host::at(root)?,
            None => Host::system()?,
        };
        let below = |path: &str| host.root().join(path);
        Ok(Self {
            state_dir: args.state_dir.clone().unwrap_or_else(|| below("var/lib/vfiod")),
            // A state directory of its own stands for an agent of its own.
            socket: args
                .state_dir
                .as_ref()
                .map_or_else(|| below("run/vfiod"), PathBuf::clone)
                .join("vfiod.sock"),
            kubelet: KubeletDir::new(args.kubelet_dir.clone().unwrap_or_else(|| below("var/lib/kubelet"))),
            host,
        })
    }

    pub fn store(&self) -> Store {
        Store::new(&self.state_dir)
    }

    pub fn journal(&self) -> Result<Journal, Failure> {
        Ok(self.store().load(&self.host.boot_id())?)
    }

    /// What is in use, beside what the inventory shows.
    pub async fn usage(&self, journal: &Journal, deadline: Duration) -> Usage {
        let pods = kubelet::list(&self.kubelet, deadline).await.into();
        Usage { holds: journal.holds.clone(), pods }
    }

    /// What an agent of this node is told, with the config's times.
    pub fn settings(&self, config: &Config) -> Settings {
        Settings {
            host: self.host.clone(),
            kubelet: self.kubelet.clone(),
            store: self.store(),
            writer: writer_command(config.write_deadline),
            reader: reader_command(),
            naming: naming(&self.host, config),
            hold_grace: config.hold_grace,
            rescan: config.rescan,
            blocked_retry: config.blocked_retry,
            pod_resources_deadline: config.pod_resources_deadline,
        }
    }

    pub fn observe(&self) -> Result<Inventory, Failure> {
        let functions = Reader::new(&reader_command(), &self.host).functions(&BTreeSet::new())?;
        Ok(observe(&self.host, functions)?)
    }
}

/// The names of a node: the built-in ones, and its own pci.ids.
pub fn naming(host: &Host, config: &Config) -> Naming {
    let loaded = names::load(host, config.names.file.as_deref(), config.names.prefer);
    for warning in &loaded.warnings {
        tracing::warn!("{warning}");
    }
    let aliases = names::Aliases::from_lookup(|key| std::env::var(key).ok());
    Naming { names: loaded.names, aliases }
}

/// How this binary reads functions.
fn reader_command() -> WriterCommand {
    WriterCommand { arguments: vec![KERNEL_READER.to_owned()], ..writer_command(READ_DEADLINE) }
}

/// How this binary makes its kernel writes.
pub fn writer_command(deadline: Duration) -> WriterCommand {
    WriterCommand {
        // The running file itself, whatever has been put in its place since.
        program: PathBuf::from("/proc/self/exe"),
        arguments: vec![KERNEL_WRITER.to_owned()],
        deadline,
    }
}
