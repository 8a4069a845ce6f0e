//! The vfiod agent: keeps a Kubernetes node's GPUs at one workload type, and offers them to virtual machines.
//!
//! Data goes one way: a node is observed ([`mod@observe`]), the crate `decide` says purely what to do and what to offer,
//! [`execute`] and [`transaction`] do it through the one seam of the `vfio` library with the [`journal`] before every write,
//! and [`device_plugin`] publishes what is offered. [`agent`] is the loop round that. `docs/architecture.md` shows the rooms.

#![forbid(unsafe_code)]

pub mod agent;
pub mod atomic_file;
pub mod cli;
pub mod config;
pub mod device_plugin;
pub mod execute;
pub mod journal;
pub mod kubelet;
pub mod lock;
pub mod node_file;
pub mod observe;
pub mod pods;
#[cfg(feature = "simulation")]
pub mod standin;
pub mod status;
pub mod transaction;
pub mod uds;
