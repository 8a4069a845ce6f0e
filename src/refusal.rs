//! Why a group is not touched.

use std::{collections::BTreeSet, fmt};

use serde::{Serialize, Serializer, ser::SerializeStruct};
use vfio::{framebuffer::Claim, pci::Address};

use crate::usage::User;

/// Why a group is not touched.
///
/// In JSON: `code`, `message`, and for a group in use its `users[]`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Refusal {
    /// The function is in no IOMMU group.
    NoIommu {
        /// The function.
        address: Address,
    },
    /// VFIO made the group up: there is no IOMMU behind it.
    NoIommuGroup,
    /// A member could not be read.
    Unreadable {
        /// The member.
        address: Address,
        /// Why.
        reason: String,
    },
    /// A member that is not vfiod's to move is on a driver that owns its DMA.
    ForeignMember {
        /// The member.
        address: Address,
        /// Its vendor and device id.
        id: String,
        /// Its class code.
        class: String,
        /// Its driver.
        driver: String,
    },
    /// A GPU has virtual functions enabled.
    VfsEnabled {
        /// The GPU.
        address: Address,
        /// How many.
        count: u32,
    },
    /// A boot framebuffer holds a member's BAR: vfio-pci would take the function, and no VM could have it.
    BootFramebuffer {
        /// The member.
        address: Address,
        /// What holds it.
        claim: Claim,
    },
    /// A member is no PCI function.
    NotPci {
        /// Its name in the group.
        name: String,
    },
    /// A companion must go back to a driver that is not there.
    HostDriverAbsent {
        /// The companion.
        address: Address,
        /// Its driver before.
        driver: String,
    },
    /// The kernel holds a member's lock and does not let go.
    Busy {
        /// The member.
        address: Address,
    },
    /// An earlier write to the group has not come back from the kernel.
    Wedged {
        /// The process that makes it.
        pid: u32,
        /// The write, in words.
        write: String,
    },
    /// A vfio driver is not there, and cannot be loaded.
    VfioAbsent {
        /// Its module.
        module: String,
        /// Why it cannot be had.
        reason: String,
    },
    /// The group is in use, or not known to be free.
    InUse {
        /// By whom.
        users: BTreeSet<User>,
    },
    /// This version does not serve the workload type.
    NotYet {
        /// The workload type.
        workload_type: String,
    },
}

impl Refusal {
    /// A stable name for conditions and metrics.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::NoIommu { .. } => "NoIommu",
            Self::NoIommuGroup => "NoIommuGroup",
            Self::Unreadable { .. } => "Unreadable",
            Self::ForeignMember { .. } => "ForeignMember",
            Self::VfsEnabled { .. } => "VfsEnabled",
            Self::BootFramebuffer { .. } => "BootFramebuffer",
            Self::NotPci { .. } => "NotPci",
            Self::HostDriverAbsent { .. } => "HostDriverAbsent",
            Self::Busy { .. } => "Busy",
            Self::Wedged { .. } => "Wedged",
            Self::VfioAbsent { .. } => "VfioAbsent",
            Self::InUse { .. } => "InUse",
            Self::NotYet { .. } => "NotYet",
        }
    }
}

impl From<(Address, &Claim)> for Refusal {
    fn from((address, claim): (Address, &Claim)) -> Self {
        Self::BootFramebuffer { address, claim: claim.clone() }
    }
}

impl Serialize for Refusal {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut out = serializer.serialize_struct("Refusal", 3)?;
        out.serialize_field("code", self.code())?;
        out.serialize_field("message", &self.to_string())?;
        if let Self::InUse { users } = self {
            out.serialize_field("users", users)?;
        }
        out.end()
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoIommu { address } => write!(
                f,
                "{address} is in no IOMMU group: the IOMMU is off; switch it on in the firmware (VT-d, AMD-Vi, SMMU) \
                 and on the kernel command line (intel_iommu=on on Intel)"
            ),
            Self::NoIommuGroup => f.write_str(
                "the group has no IOMMU behind it (vfio's noiommu mode): a VM could reach all memory",
            ),
            Self::Unreadable { address, reason } => write!(f, "member {address} cannot be read: {reason}"),
            Self::ForeignMember { address, id, class, driver } => write!(
                f,
                "member {address} ({id}, class {class}) is not a GPU's and is on driver {driver}: a VM cannot have the \
                 group while the host uses it; put the card into another slot, or unbind that function yourself if \
                 the host can do without it"
            ),
            Self::VfsEnabled { address, count } => {
                write!(
                    f,
                    "{address} has {count} virtual functions enabled: write 0 to its sriov_numvfs first"
                )
            }
            Self::BootFramebuffer { address, claim } => {
                write!(f, "{address}: {claim}, so a VM could not have it: {}", claim.cure())
            }
            Self::NotPci { name } => write!(
                f,
                "member {name} is no PCI function: whether the host uses it is not known, so no VM may have the group"
            ),
            Self::HostDriverAbsent { address, driver } => write!(
                f,
                "{address} was on {driver}, which is not loaded: load it (modprobe {driver}), or the function could not go \
                 back to where it was"
            ),
            Self::Busy { address } => write!(
                f,
                "{address} is being bound or unbound, and that hangs: a VM may have it open, or its driver waits (the \
                 kernel log may say for what); the group is left alone until it ends"
            ),
            Self::Wedged { pid, write } => write!(
                f,
                "an earlier write has not come back from the kernel (process {pid}: {write}); the group is left alone"
            ),
            Self::VfioAbsent { module, reason } => {
                write!(f, "the vfio driver {module} is not loaded, and cannot be: {reason}")
            }
            Self::InUse { users } => {
                let texts: Vec<_> = users.iter().map(ToString::to_string).collect();
                write!(f, "in use: {}", texts.join("; "))
            }
            Self::NotYet { workload_type } => write!(f, "{workload_type} is not served by this version yet"),
        }
    }
}
