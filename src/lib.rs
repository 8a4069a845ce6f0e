//! The vfiod agent: keeps a Kubernetes node's GPUs at one workload type, and offers them to virtual machines.
//!
//! Data goes one way: [`inventory`] is observed, [`desired`] is asked for, [`plan`] says what to do (purely),
//! [`execute`] and [`conduct`] do it through the one seam of the `vfio` library with the [`journal`] before every write,
//! [`offers`] says what is advertised (purely), and [`device_plugin`] publishes it. [`agent`] is the loop round that.

#![forbid(unsafe_code)]

pub mod agent;
pub mod atomic_file;
pub mod cli;
pub mod conduct;
pub mod config;
pub mod desired;
pub mod device_plugin;
pub mod execute;
pub mod inventory;
pub mod journal;
pub mod kubelet;
pub mod lock;
pub mod names;
pub mod offers;
pub mod plan;
pub mod reason;
pub mod refusal;
pub mod standin;
pub mod status;
pub mod usage;
