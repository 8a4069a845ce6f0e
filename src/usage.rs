//! What is in use, and by whom. Not known is in use.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde::{Deserialize, Serialize};
use vfio::{holders::Owner, pci::Address};

use crate::{
    inventory::{Inventory, Open},
    kubelet::{Allocation, PodResources},
    reason::chain,
};

/// The domain of the resources whose ids may be this node's GPUs, whoever serves them.
const RESOURCE_PREFIX: &str = "nvidia.com/";

/// An answered Allocate: the device counts as in use from the answer until nobody has it any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    /// The resource it was asked under.
    pub resource: String,
    /// When it was answered: seconds on the clock that runs since boot, suspend included.
    pub answered_at: u64,
    /// Whether PodResources has shown the id since.
    pub shown: bool,
}

/// A device that the kubelet says a pod has.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct PodDevice {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The container's name.
    pub container: String,
    /// The resource.
    pub resource: String,
    /// The device's id under that resource.
    pub id: String,
}

/// What the kubelet answers about pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pods {
    /// Every device that a pod has.
    Known(BTreeSet<PodDevice>),
    /// The kubelet could not be asked, and why.
    Unknown(String),
}

impl From<PodResources> for Pods {
    fn from(answer: PodResources) -> Self {
        match answer {
            PodResources::NoPods => Self::default(),
            PodResources::Unknown(error) => Self::Unknown(chain(&error)),
            PodResources::Known(allocations) => {
                let devices = allocations.into_iter().flat_map(
                    |Allocation { namespace, pod, container, resource, ids }| {
                        ids.into_iter().map(move |id| PodDevice {
                            namespace: namespace.clone(),
                            pod: pod.clone(),
                            container: container.clone(),
                            resource: resource.clone(),
                            id,
                        })
                    },
                );
                Self::Known(devices.collect())
            }
        }
    }
}

impl Default for Pods {
    fn default() -> Self {
        Self::Known(BTreeSet::new())
    }
}

/// All that is known of use, beside the processes that the inventory shows.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Usage {
    /// Answered Allocates, by function.
    pub holds: BTreeMap<Address, Hold>,
    /// What the kubelet says.
    pub pods: Pods,
}

/// Somebody, or something not known, that keeps a group from being touched.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(tag = "user", rename_all = "kebab-case")]
pub enum User {
    /// A process.
    Process(Open),
    /// A pod.
    Pod(PodDevice),
    /// An Allocate that was answered, and whose pod has not been seen, or not been seen to end.
    Hold {
        /// The function.
        address: Address,
        /// The resource.
        resource: String,
    },
    /// Something that cannot be known.
    Unknown {
        /// What, and why not.
        reason: String,
    },
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process(Open { holder, node }) => {
                write!(f, "process {} ({})", holder.pid, holder.command)?;
                if let Owner::Pod { uid, container } = &holder.owner {
                    write!(f, " of pod UID {uid}")?;
                    if let Some(container) = container {
                        write!(f, " (container {container})")?;
                    }
                }
                write!(f, " has {node} open")?;
                holder.cure.iter().try_for_each(|cure| write!(f, "; {cure}"))
            }
            Self::Pod(device) => {
                let PodDevice { namespace, pod, container, resource, id } = device;
                write!(f, "pod {namespace}/{pod} (container {container}) has {resource} {id}")
            }
            Self::Hold { address, resource } => {
                write!(f, "{address} was given out under {resource} and is not known to be free again")
            }
            Self::Unknown { reason } => write!(f, "whether it is in use is not known: {reason}"),
        }
    }
}

impl Usage {
    /// The pods that have `address`, under whatever resource, as far as the kubelet says.
    pub fn pods_with(&self, address: Address) -> impl Iterator<Item = &PodDevice> {
        let devices = match &self.pods {
            Pods::Known(devices) => Some(devices),
            Pods::Unknown(_) => None,
        };
        devices.into_iter().flatten().filter(move |device| device.id.parse() == Ok(address))
    }

    /// Whether a pod has `address`, or was promised it.
    #[must_use]
    pub fn given_out(&self, address: Address) -> bool {
        self.holds.contains_key(&address) || self.pods_with(address).next().is_some()
    }

    /// Everybody who uses a group. Empty means that it is known to be free.
    #[must_use]
    pub fn of_group(&self, inventory: &Inventory, group: u32) -> BTreeSet<User> {
        let mut users: BTreeSet<User> = inventory.open(group).into_iter().map(User::Process).collect();
        users.extend(inventory.opaque(group).map(|opaque| User::Unknown { reason: opaque.to_string() }));
        for address in inventory.groups.get(&group).into_iter().flat_map(|group| &group.members) {
            users.extend(self.pods_with(*address).cloned().map(User::Pod));
            if let Some(hold) = self.holds.get(address) {
                users.insert(User::Hold { address: *address, resource: hold.resource.clone() });
            }
        }
        match &self.pods {
            Pods::Unknown(reason) => {
                users.insert(User::Unknown { reason: reason.clone() });
            }
            // An id that is no address of this node may be any of its GPUs.
            Pods::Known(devices) => users.extend(
                devices
                    .iter()
                    .filter(|device| device.resource.starts_with(RESOURCE_PREFIX))
                    .filter(|device| {
                        device.id.parse::<Address>().map_or(true, |a| !inventory.functions.contains_key(&a))
                    })
                    .cloned()
                    .map(User::Pod),
            ),
        }
        users
    }

    /// Lets go of the holds that are over: PodResources answers without the id, after having shown it or `grace` seconds
    /// after the answer, and no process has the group open. Marks the holds that PodResources shows.
    ///
    /// `now` is on the clock of [`Hold::answered_at`]. Says which were let go.
    pub fn settle(&mut self, inventory: &Inventory, now: u64, grace: u64) -> Vec<Address> {
        let Pods::Known(devices) = &self.pods else { return Vec::new() };
        let listed: BTreeSet<Address> = devices.iter().filter_map(|device| device.id.parse().ok()).collect();
        let mut over = Vec::new();
        for (address, hold) in &mut self.holds {
            if listed.contains(address) {
                hold.shown = true;
                continue;
            }
            let waited = hold.shown || now.saturating_sub(hold.answered_at) >= grace;
            let open = match inventory.group_of(*address) {
                Some(group) => !inventory.open(group).is_empty() || inventory.opaque(group).next().is_some(),
                // Of what cannot be read, and is in no group known, nothing is known.
                None => inventory.unreadable.contains_key(address) || !inventory.holders.opaque.is_empty(),
            };
            if waited && !open {
                over.push(*address);
            }
        }
        for address in &over {
            self.holds.remove(address);
        }
        over
    }
}
