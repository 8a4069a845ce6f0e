//! Why a unit is not touched.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use reason::{Code, Reason};
use serde::{Serialize, Serializer, ser::SerializeStruct};
use vfio::{console::Console, framebuffer::Claim, iommu::Reserved, pci::Address};

use crate::usage::User;

/// Why a unit is not touched.
///
/// In JSON: `code`, `message`, and for one in use its `users[]`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Refusal {
    /// The function is in no IOMMU group.
    NoIommu {
        /// The function.
        address: Address,
        /// Other functions of the node are in groups: then it is not the whole IOMMU that is off.
        others_have: bool,
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
        /// Its group.
        group: u32,
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
        /// Who uses which of them, or of the mediated devices on them.
        users: BTreeMap<String, BTreeSet<User>>,
    },
    /// A boot framebuffer holds a member's BAR: vfio-pci would take the function, and no VM could have it.
    BootFramebuffer {
        /// The member.
        address: Address,
        /// What holds it.
        claim: Claim,
    },
    /// The kernel's own console is on a member.
    KernelConsole {
        /// The member.
        address: Address,
        /// What shows that.
        console: Console,
    },
    /// The firmware demands that a member reaches a piece of memory directly: the kernel gives no VM such a group.
    ReservedRegion {
        /// The group.
        group: u32,
        /// The piece of memory.
        region: Reserved,
    },
    /// What the firmware demands of a group's memory cannot be read.
    ReservedUnknown {
        /// The group.
        group: u32,
        /// Why not.
        reason: String,
    },
    /// A member does not answer any more.
    FunctionLost {
        /// The member.
        address: Address,
    },
    /// BARs of a member have no address.
    BarUnassigned {
        /// The member.
        address: Address,
        /// Their numbers.
        bars: Vec<u8>,
    },
    /// A member is no PCI function.
    NotPci {
        /// Its name in the group.
        name: String,
        /// The group.
        group: u32,
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
    /// The unit is in use, or not known to be free.
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
    /// Its stable name.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            Self::NoIommu { .. } => Code::NoIommu,
            Self::NoIommuGroup => Code::NoIommuGroup,
            Self::Unreadable { .. } => Code::Unreadable,
            Self::ForeignMember { .. } => Code::ForeignMember,
            Self::VfsEnabled { .. } => Code::VfsEnabled,
            Self::BootFramebuffer { .. } => Code::BootFramebuffer,
            Self::KernelConsole { .. } => Code::KernelConsole,
            Self::ReservedRegion { .. } => Code::ReservedRegion,
            Self::ReservedUnknown { .. } => Code::Unreadable,
            Self::FunctionLost { .. } => Code::FunctionLost,
            Self::BarUnassigned { .. } => Code::BarUnassigned,
            Self::NotPci { .. } => Code::NotPci,
            Self::HostDriverAbsent { .. } => Code::HostDriverAbsent,
            Self::Busy { .. } => Code::Busy,
            Self::Wedged { .. } => Code::Wedged,
            Self::VfioAbsent { .. } => Code::VfioAbsent,
            Self::InUse { .. } => Code::InUse,
            Self::NotYet { .. } => Code::NotYet,
        }
    }
}

impl From<(Address, &Claim)> for Refusal {
    fn from((address, claim): (Address, &Claim)) -> Self {
        Self::BootFramebuffer { address, claim: claim.clone() }
    }
}

impl From<&Refusal> for Reason {
    fn from(refusal: &Refusal) -> Self {
        Self::new(refusal.code(), refusal.to_string())
    }
}

impl Serialize for Refusal {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut out = serializer.serialize_struct("Refusal", 3)?;
        out.serialize_field("code", &self.code())?;
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
            Self::NoIommu { address, others_have: false } => write!(
                f,
                "{address} is in no IOMMU group: the IOMMU is off; switch it on in the firmware (VT-d, AMD-Vi, SMMU) \
                 and on the kernel command line (intel_iommu=on on Intel)"
            ),
            Self::NoIommu { address, others_have: true } => write!(
                f,
                "{address} is in no IOMMU group, though other functions of this node are: no IOMMU stands before its slot; \
                 put the card into another slot, or see whether the firmware leaves this one out (its DMAR or IVRS table)"
            ),
            Self::NoIommuGroup => f.write_str(
                "the group has no IOMMU behind it (vfio's noiommu mode): a VM could reach all memory",
            ),
            Self::Unreadable { address, reason } => write!(f, "member {address} cannot be read: {reason}"),
            Self::ForeignMember { address, group, id, class, driver } => write!(
                f,
                "member {address} of group {group} ({id}, class {class}) is not a GPU's and is on driver {driver}: a VM cannot have the \
                 group while the host uses it; put the card into another slot, or unbind that function yourself if \
                 the host can do without it"
            ),
            Self::VfsEnabled { address, count, users } => {
                write!(f, "{address} has {count} virtual functions enabled: ")?;
                for (on, users) in users {
                    let texts: Vec<_> = users.iter().map(ToString::to_string).collect();
                    write!(f, "{on} is in use ({}); ", texts.join("; "))?;
                }
                if users.is_empty() {
                    write!(
                        f,
                        "nobody is seen to use one; write 0 to its sriov_numvfs first, which takes them all away"
                    )
                } else {
                    write!(
                        f,
                        "end what runs on them; only then write 0 to its sriov_numvfs, which takes them all away"
                    )
                }
            }
            Self::BootFramebuffer { address, claim } => {
                write!(f, "{address}: {claim}, so a VM could not have it: {}", claim.cure())
            }
            Self::KernelConsole { address, console } => write!(
                f,
                "{address} carries the kernel's own console ({console}): taken away, the node's screen goes dark; boot with \
                 another card as its display or with a serial console (console=ttyS0)"
            ),
            Self::ReservedRegion { group, region } => write!(
                f,
                "the firmware demands a direct mapping of memory {:#x} to {:#x} for group {group} (RMRR), and the kernel gives no VM such a \
                 group: switch off what claims it in the firmware (HPE: \"Shared Memory\" or HP_SCAN of the slot; others: USB \
                 legacy support, remote management of the slot), update the firmware, or put the card into another slot",
                region.start, region.end
            ),
            Self::ReservedUnknown { group, reason } => write!(
                f,
                "whether the firmware demands a direct mapping for group {group} is not known, and no VM could have it then: \
                 {reason}"
            ),
            Self::FunctionLost { address } => write!(
                f,
                "{address} is lost: it did not answer in two looks a second apart (its configuration space reads as all \
                 ones); power-cycle its slot or the node, and see the kernel log for Xid 79 or AER errors"
            ),
            Self::BarUnassigned { address, bars } => {
                let texts: Vec<_> = bars.iter().map(ToString::to_string).collect();
                write!(
                    f,
                    "{address}: the firmware left BAR {} without an address, so no VM could use it: switch on \"Above 4G \
                     Decoding\" (large MMIO) in the firmware, or boot with pci=realloc",
                    texts.join(", ")
                )
            }
            Self::NotPci { name, group } => write!(
                f,
                "member {name} of group {group} is no PCI function: whether the host uses it is not known, so no VM may have the group"
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
