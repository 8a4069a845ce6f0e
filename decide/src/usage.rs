//! What is in use, and by whom. Not known is in use.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde::{Deserialize, Serialize};
use vfio::{
    holders::{Holders, Opaque, Owner},
    pci::Address,
};

use crate::{
    id::OfferId,
    inventory::{Inventory, Open},
    tie::{Tie, tie},
    unit::Unit,
};

/// By what a hold came.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HoldBy {
    /// An Allocate of the kubelet's was answered.
    #[default]
    Allocate,
}

/// A promise: the device counts as in use from then on, until nobody has it any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    /// The resource it was asked under.
    pub resource: String,
    /// By what it came.
    #[serde(default)]
    pub by: HoldBy,
    /// When it was given: seconds on the clock that runs since boot, suspend included.
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

/// A device that the kubelet says a pod has by a resource claim (DRA).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct PodClaim {
    /// The pod's namespace, which is the claim's as well.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The container's name.
    pub container: String,
    /// The claim's name.
    pub claim: String,
    /// The DRA driver (`gpu.nvidia.com`).
    pub driver: String,
    /// The device in the driver's pool (`gpu-0`).
    pub device: String,
    /// The CDI devices that the container gets by it.
    pub cdi: BTreeSet<String>,
}

/// What the kubelet answers about pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pods {
    /// All that pods have.
    Known {
        /// By device plugins.
        devices: BTreeSet<PodDevice>,
        /// By claims.
        claims: BTreeSet<PodClaim>,
    },
    /// The kubelet could not be asked, and why.
    Unknown(String),
}

impl Default for Pods {
    fn default() -> Self {
        Self::Known { devices: BTreeSet::new(), claims: BTreeSet::new() }
    }
}

/// All that is known of use, beside the processes that the inventory shows.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Usage {
    /// What was promised, by its id.
    pub holds: BTreeMap<OfferId, Hold>,
    /// What the kubelet says.
    pub pods: Pods,
}

/// Somebody, or something not known, that keeps a unit from being touched.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(tag = "user", rename_all = "kebab-case")]
pub enum User {
    /// A process.
    Process(Open),
    /// A pod, by a device plugin.
    Pod(PodDevice),
    /// A pod, by a claim.
    Claim(PodClaim),
    /// A promise whose pod has not been seen, or not been seen to end.
    Hold {
        /// What was promised.
        #[serde(rename = "address")]
        id: OfferId,
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
            Self::Pod(PodDevice { namespace, pod, container, resource, id }) => {
                write!(f, "pod {namespace}/{pod} (container {container}) has {resource} {id}")
            }
            Self::Claim(PodClaim { namespace, pod, container, claim, driver, device, .. }) => write!(
                f,
                "pod {namespace}/{pod} (container {container}) has {device} of {driver} by its claim {claim}"
            ),
            Self::Hold { id, resource } => {
                write!(f, "{id} was given out under {resource} and is not known to be free again")
            }
            Self::Unknown { reason } => write!(f, "whether it is in use is not known: {reason}"),
        }
    }
}

impl User {
    /// The users that a scan of processes shows for `nodes`, those of which it is not known among them.
    #[must_use]
    pub fn of_nodes(holders: &Holders, nodes: &BTreeSet<String>) -> BTreeSet<Self> {
        let open = nodes.iter().flat_map(|node| holders.of(node).map(move |holder| (node, holder)));
        let open =
            open.map(|(node, holder)| Self::Process(Open { holder: holder.clone(), node: node.clone() }));
        open.chain(holders.opaque_to(nodes).map(Self::from)).collect()
    }
}

impl From<&Opaque> for User {
    fn from(process: &Opaque) -> Self {
        Self::Unknown { reason: process.to_string() }
    }
}

impl Usage {
    fn devices(&self) -> impl Iterator<Item = &PodDevice> {
        let devices = match &self.pods {
            Pods::Known { devices, .. } => Some(devices),
            Pods::Unknown(_) => None,
        };
        devices.into_iter().flatten()
    }

    fn claims(&self) -> impl Iterator<Item = &PodClaim> {
        let claims = match &self.pods {
            Pods::Known { claims, .. } => Some(claims),
            Pods::Unknown(_) => None,
        };
        claims.into_iter().flatten()
    }

    /// The pods that have what is called `id`, under whatever resource, as far as the kubelet says.
    pub fn pods_with(&self, id: OfferId) -> impl Iterator<Item = &PodDevice> {
        self.devices().filter(move |device| device.id.parse() == Ok(id))
    }

    /// Whether a pod has `id`, or was promised it.
    #[must_use]
    pub fn given_out(&self, id: OfferId) -> bool {
        self.holds.contains_key(&id) || self.pods_with(id).next().is_some()
    }

    /// Who uses what, worked out once for a look.
    #[must_use]
    pub fn of(&self, inventory: &Inventory) -> Users {
        let mut users = Users::default();
        let devices = self.devices().map(|device| {
            let tied = tie(inventory, &device.resource, [device.id.as_str()]);
            (tied, User::Pod(device.clone()))
        });
        let claims = self.claims().map(|claim| {
            let ids = claim.cdi.iter().map(String::as_str).chain([claim.device.as_str()]);
            (tie(inventory, &claim.driver, ids), User::Claim(claim.clone()))
        });
        for (tied, user) in devices.chain(claims) {
            match tied {
                Tie::Function(address) => users.of_function.entry(address).or_default().push(user),
                Tie::Any(vendor) => users.of_any.push((vendor, user)),
                Tie::Nothing => {}
            }
        }
        for (id, hold) in &self.holds {
            let user = User::Hold { id: *id, resource: hold.resource.clone() };
            match id.function() {
                Some(address) => users.of_function.entry(address).or_default().push(user),
                // No function of this version's offers is meant by another id: it may be on any.
                None => users.of_any.push((None, user)),
            }
        }
        if let Pods::Unknown(reason) = &self.pods {
            users.of_all.push(User::Unknown { reason: reason.clone() });
        }
        users
    }

    /// Lets go of the holds that are over: PodResources answers without the id, after having shown it or `grace` seconds
    /// after the answer, and no process has the unit open. Marks the holds that PodResources shows.
    ///
    /// `now` is on the clock of [`Hold::answered_at`]. Says which were let go.
    pub fn settle(&mut self, inventory: &Inventory, now: u64, grace: u64) -> Vec<OfferId> {
        if matches!(self.pods, Pods::Unknown(_)) {
            return Vec::new();
        }
        let listed: BTreeSet<OfferId> = self.devices().filter_map(|device| device.id.parse().ok()).collect();
        let mut over = Vec::new();
        for (id, hold) in &mut self.holds {
            if listed.contains(id) {
                hold.shown = true;
                continue;
            }
            let waited = hold.shown || now.saturating_sub(hold.answered_at) >= grace;
            let open = match id.function().map(|address| (address, inventory.unit_of(address))) {
                Some((_, Some(unit))) => !unit.opaque.is_empty() || !inventory.open(unit).is_empty(),
                // Of what cannot be read, and is in no group known, nothing is known.
                Some((address, None)) => inventory.unreadable.contains_key(&address),
                None => true,
            };
            if waited && !open {
                over.push(*id);
            }
        }
        for id in &over {
            self.holds.remove(id);
        }
        over
    }
}

/// Who uses what on a node, as one look has it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Users {
    of_function: BTreeMap<Address, Vec<User>>,
    /// Users of something that may be any GPU or NVSwitch, of one vendor or of all.
    of_any: Vec<(Option<u16>, User)>,
    /// What counts against everything.
    of_all: Vec<User>,
}

impl Users {
    /// Everybody who uses a unit. Empty means that it is known to be free.
    #[must_use]
    pub fn of_unit(&self, inventory: &Inventory, unit: &Unit) -> BTreeSet<User> {
        let mut users: BTreeSet<User> = inventory.open(unit).into_iter().map(User::Process).collect();
        users.extend(unit.opaque.iter().map(User::from));
        for address in &unit.id.0 {
            users.extend(self.of_function.get(address).into_iter().flatten().cloned());
        }
        users.extend(self.of_all.iter().cloned());
        let vendors: BTreeSet<u16> = inventory.movable(unit).map(|function| function.vendor).collect();
        let means = |vendor: &Option<u16>| match vendor {
            Some(vendor) => vendors.contains(vendor),
            None => !unit.offerable.is_empty(),
        };
        // What cannot be read may be a GPU of any vendor.
        let concerns = |vendor: &Option<u16>| !unit.unreadable.is_empty() || means(vendor);
        users.extend(self.of_any.iter().filter(|(vendor, _)| concerns(vendor)).map(|(_, user)| user.clone()));
        users
    }

    /// What pods have of a unit by other resources than vfiod's own, or by claims, or may have.
    pub fn by_pods<'a>(&'a self, inventory: &Inventory, unit: &'a Unit) -> impl Iterator<Item = &'a User> {
        let vendors: BTreeSet<u16> = inventory.movable(unit).map(|function| function.vendor).collect();
        let tied = unit.id.0.iter().filter_map(|address| self.of_function.get(address)).flatten();
        let any = self
            .of_any
            .iter()
            .filter(move |(vendor, _)| vendor.is_none_or(|vendor| vendors.contains(&vendor)));
        tied.chain(any.map(|(_, user)| user)).filter(|user| matches!(user, User::Pod(_) | User::Claim(_)))
    }
}
