//! gRPC over unix sockets: dialled, served so that it can be ended for certain, and bound on a file of one's own.
//!
//! Whose protocol goes over them is the business of others: the kubelet's in [`crate::kubelet`] and
//! [`crate::device_plugin`].

pub mod dial;
pub(crate) mod server;
pub mod socket;
