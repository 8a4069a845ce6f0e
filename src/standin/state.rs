//! What the stand-in knows, as plain data.

use std::collections::{BTreeMap, BTreeSet};

use crate::kubelet::{Allocation, Claim};

/// Everything the stand-in knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StandinState {
    /// What is registered since its start, by resource name.
    pub resources: BTreeMap<String, ResourceState>,
    /// Who has what; kept over a restart.
    pub allocations: Vec<Allocation>,
    /// Who has what by resource claims; kept over a restart.
    pub claims: Vec<Claim>,
    /// Devices that a plugin is being asked for, by resource and id: nobody else gets them, and they are not listed yet.
    pub asked_for: BTreeSet<(String, String)>,
    /// How many registrations each resource has had over all its lives.
    pub registrations: BTreeMap<String, u64>,
}

impl StandinState {
    /// How many devices of `resource` are healthy; 0 where nothing is registered.
    #[must_use]
    pub fn healthy(&self, resource: &str) -> usize {
        self.resources
            .get(resource)
            .map_or(0, |state| state.devices.values().filter(|device| device.healthy).count())
    }

    /// Whether the plugin of `resource` is registered and watched.
    #[must_use]
    pub fn watched(&self, resource: &str) -> bool {
        self.resources.get(resource).is_some_and(|state| state.stream_open)
    }

    /// Whether it is allocated, or being asked for.
    pub(super) fn taken(&self, resource: &str, id: &str) -> bool {
        self.allocated(resource, id) || self.asked_for.contains(&(resource.to_owned(), id.to_owned()))
    }

    /// Whether any container has the device.
    #[must_use]
    pub fn allocated(&self, resource: &str, id: &str) -> bool {
        self.allocations.iter().any(|one| one.resource == resource && one.ids.iter().any(|has| has == id))
    }
}

/// One resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResourceState {
    /// The plugin's socket, as registered.
    pub endpoint: String,
    /// The devices of the last message, by id. All are unhealthy once the stream has ended.
    pub devices: BTreeMap<String, DeviceState>,
    /// Whether ListAndWatch is open.
    pub stream_open: bool,
    /// How many messages the newest stream has brought.
    pub messages: usize,
}

/// One device of a ListAndWatch message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceState {
    /// Whether it may be allocated.
    pub healthy: bool,
    /// Its NUMA nodes; empty without topology.
    pub numa_nodes: Vec<i64>,
}

/// A pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodName {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl PodName {
    /// The pod `name` in `namespace`.
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }

    pub(super) fn has(&self, allocation: &Allocation) -> bool {
        allocation.namespace == self.namespace && allocation.pod == self.name
    }

    pub(super) fn claims(&self, claim: &Claim) -> bool {
        claim.namespace == self.namespace && claim.pod == self.name
    }
}
