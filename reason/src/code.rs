//! All codes there are.

use std::fmt;

use serde::{Serialize, Serializer};

macro_rules! codes {
    ($($(#[doc = $meaning:literal])+ $name:ident,)+) => {
        /// The stable name of a reason, spelt in CamelCase: it may become a condition's reason.
        ///
        /// `docs/codes.md` lists them all, made from here. A code keeps its meaning for ever; new ones are added.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Code {
            $($(#[doc = $meaning])+ $name,)+
        }

        impl Code {
            /// All of them, by name.
            pub const ALL: &'static [Self] = &[$(Self::$name,)+];

            /// As it is spelt.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)+
                }
            }

            /// What it means, in a sentence.
            #[must_use]
            pub const fn meaning(self) -> &'static str {
                match self {
                    $(Self::$name => concat!($($meaning),+).trim_ascii_start(),)+
                }
            }
        }
    };
}

codes! {
    /// A BAR of the function has no address: the firmware found no place for it, and no VM could use the function.
    BarUnassigned,
    /// A boot framebuffer holds one of the function's BARs.
    BootFramebuffer,
    /// The kernel bound the function to vfio by ids at boot; it is left there unless adopted.
    BoundAtBoot,
    /// The kernel holds the function's lock and does not let go.
    Busy,
    /// The config file, or a part of it, does not fit; nothing of it is applied.
    ConfigRefused,
    /// The consumer takes PCI domains of four hex digits only.
    DomainTooWide,
    /// vfiod is starting or ending and cannot answer now.
    Ending,
    /// The device has gone bad again and again; it is given back when it has stayed good for a while.
    Flapping,
    /// The kernel's command line forbids a module.
    ForbiddenAtBoot,
    /// A member of the group is somebody else's, and on a driver that owns its DMA.
    ForeignMember,
    /// The function is not on the node any more.
    FunctionGone,
    /// The function does not answer any more: it fell off the bus, and needs a power cycle.
    FunctionLost,
    /// Another function of the group is given out; a group goes to one VM.
    GroupHeld,
    /// A process that is no pod's has the group open.
    HeldOutside,
    /// A member of the group is on a host driver, which owns its DMA.
    HostDriver,
    /// A companion must go back to a driver that is not loaded.
    HostDriverAbsent,
    /// The group is in use, or not known to be free.
    InUse,
    /// `modprobe.d` has a command run in place of loading a module.
    InstallCommand,
    /// A request that makes no sense.
    InvalidRequest,
    /// The journal is there and cannot be understood.
    JournalContent,
    /// The journal cannot be read or written.
    JournalFile,
    /// The agent is ending, and does not record any more.
    JournalInterrupted,
    /// The function carries the kernel's own console.
    KernelConsole,
    /// The kernel refused a write.
    KernelRefused,
    /// Which kernel runs is not known.
    KernelUnknown,
    /// The kubelet was started again; its plugins are registered anew.
    KubeletRestarted,
    /// The kubelet could not be reached.
    KubeletUnreachable,
    /// The lock of all writers cannot be had.
    LockFile,
    /// Another process has the lock of all writers.
    LockHeld,
    /// A module's file is not as it should be.
    ModuleFile,
    /// The resource's name is one that Kubernetes would refuse.
    NameRefused,
    /// A node's pci.ids file is passed over.
    NamesFile,
    /// No agent answers on the node.
    NoAgent,
    /// There is no node for the group below `/dev/vfio`.
    NoGroupNode,
    /// No host is found below the root.
    NoHost,
    /// The function is in no IOMMU group.
    NoIommu,
    /// The group has no IOMMU behind it (vfio's noiommu mode).
    NoIommuGroup,
    /// The running kernel's modules are not there.
    NoModuleDirectory,
    /// The simulated node cannot be laid or changed, or this build has no simulated kernel at all.
    NoSimulation,
    /// The kubelet accepted the registration, and does not watch.
    NoStream,
    /// The kernel came without the module.
    NoSuchModule,
    /// The function is not on a vfio driver.
    NotBound,
    /// The node could not be looked at.
    NotObserved,
    /// A member of the group is no PCI function.
    NotPci,
    /// A write could not be recorded first, so it was not made.
    NotRecorded,
    /// The kubelet does not know of the resource.
    NotRegistered,
    /// A driver did not take a function.
    NotTaken,
    /// The group is not viable: a member's driver owns its DMA.
    NotViable,
    /// This version does not serve that yet.
    NotYet,
    /// The pipe between the agent and a child of its own failed.
    PipeFailed,
    /// The kubelet's pod-resources directory cannot be looked at, or is not there.
    PodResourcesAbsent,
    /// The kubelet did not say in time which pods have devices.
    PodResourcesDeadline,
    /// The kubelet refused to say which pods have devices.
    PodResourcesRefused,
    /// The kubelet does not say which pods have devices.
    PodResourcesUnknown,
    /// The kubelet does not answer on its pod-resources socket.
    PodResourcesUnreachable,
    /// A file of the kernel's cannot be read.
    ReadFailed,
    /// The kubelet did not answer a registration in time.
    RegistrationDeadline,
    /// The kubelet did not accept a registration.
    RegistrationRefused,
    /// The firmware demands a direct mapping for a member of the group (RMRR), and the kernel gives no VM such a group.
    ReservedRegion,
    /// A socket cannot be listened on.
    SocketBind,
    /// Nobody listens on a unix socket.
    SocketConnect,
    /// A unix socket's server does not take a connection in time.
    SocketDeadline,
    /// What listens on a unix socket does not speak gRPC.
    SocketHandshake,
    /// Something that is no socket has a socket's name.
    SocketInTheWay,
    /// A plugin's socket was removed; it is made again.
    SocketLost,
    /// A socket's directory does not exist.
    SocketNoDirectory,
    /// A socket's path does not fit into a socket address.
    SocketPathTooLong,
    /// An old socket cannot be removed.
    SocketRemove,
    /// The journal tells of another device than the one that is at its address now.
    StalePrior,
    /// A file of the agent's own cannot be read or replaced.
    StateFile,
    /// The answer of the agent cannot be understood.
    StatusAnswer,
    /// The kubelet ended its watch.
    StreamEnded,
    /// The group is being moved, or is not yet as desired.
    Switching,
    /// The resource has no such device.
    UnknownDevice,
    /// A function cannot be read.
    Unreadable,
    /// The vfio driver is not there, and cannot be loaded.
    VfioAbsent,
    /// A GPU has virtual functions enabled.
    VfsEnabled,
    /// A write has not come back from the kernel; its group is left alone.
    Wedged,
    /// What is asked of the node is not clear; it stays as it is.
    WishUnclear,
    /// The node serves another workload type.
    WorkloadType,
    /// A write that makes no sense was not made.
    WriteRefused,
    /// The child that makes a write ended before it answered.
    WriterEnded,
    /// The child that makes a write cannot be started.
    WriterNotStarted,
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl Serialize for Code {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// A code compares with its spelling, which is what tests and readers of JSON have.
impl PartialEq<&str> for Code {
    fn eq(&self, other: &&str) -> bool {
        self.as_str() == *other
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a condition's reason may be (k8s.io/apimachinery, `metav1.Condition`), narrowed to one spelling.
    #[test]
    fn every_code_is_camel_case_and_has_a_meaning() {
        for code in Code::ALL {
            let text = code.as_str();
            assert!(text.starts_with(|c: char| c.is_ascii_uppercase()), "{text}");
            assert!(text.len() > 3 && text.chars().all(|c| c.is_ascii_alphanumeric()), "{text}");
            assert!(code.meaning().ends_with('.'), "{text}: {}", code.meaning());
        }
    }
}
