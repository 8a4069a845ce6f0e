//! What a kernel's error number means, from what else the host shows at that moment.

use std::fmt;

use nix::errno::Errno;

use crate::{
    driver::{VFIO_PCI, is_vfio},
    holders::Holders,
    host::Host,
    iommu,
    pci::Function,
    write::Write,
};

/// How far the kernel locks down what root may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lockdown {
    /// Not at all.
    None,
    /// Nothing unsigned gets into the kernel: what secure boot brings on most distributions.
    Integrity,
    /// Nor does anything secret get out.
    Confidentiality,
}

impl Lockdown {
    /// As `/sys/kernel/security/lockdown` shows it (`[none] integrity confidentiality`: the one in brackets holds);
    /// nothing where the kernel has no such thing, or securityfs is not mounted.
    #[must_use]
    pub fn of(host: &Host) -> Option<Self> {
        Self::parse(&host.read(&host.sys("kernel/security/lockdown")).ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        let (_, rest) = text.split_once('[')?;
        match rest.split_once(']')?.0 {
            "none" => Some(Self::None),
            "integrity" => Some(Self::Integrity),
            "confidentiality" => Some(Self::Confidentiality),
            _ => None,
        }
    }
}

impl fmt::Display for Lockdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Integrity => "integrity",
            Self::Confidentiality => "confidentiality",
        })
    }
}

/// What the host shows when a write was refused.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Circumstances {
    /// The function that the write was about; none for a module, or where it cannot be read.
    pub function: Option<Function>,
    /// Whether it is there.
    pub present: bool,
    /// Processes with its group open, in words.
    pub openers: Vec<String>,
    /// The lockdown.
    pub lockdown: Option<Lockdown>,
    /// `kernel.modules_disabled=1`: no module is loaded until the node starts anew.
    pub modules_disabled: bool,
}

impl Circumstances {
    /// Looks at what may have been in the way of `write`. Its function, as it is now, is given, and so is what says who has a
    /// node open: some attributes may block, and so may a look at a process, so both are read in a child process.
    #[must_use]
    pub fn look(
        host: &Host,
        write: &Write,
        function: Option<Function>,
        holders: impl FnOnce(String) -> Holders,
    ) -> Self {
        let address = write.function();
        // An open group keeps a driver from a function, and nothing else.
        let group = function.as_ref().filter(|_| matches!(write, Write::Probe { .. }));
        let node = group.and_then(|function| function.iommu_group).map(iommu::group_node);
        let openers = node.map(|node| {
            let found = holders(node.clone());
            found.of(&node).map(|h| format!("process {} ({})", h.pid, h.command)).collect()
        });
        let disabled = host.read(&host.proc("sys/kernel/modules_disabled")).unwrap_or_default();
        Self {
            present: address.is_some_and(|address| host.exists(&host.function_dir(address))),
            function,
            openers: openers.unwrap_or_default(),
            lockdown: Lockdown::of(host),
            modules_disabled: disabled.trim() == "1",
        }
    }
}

/// Why the kernel refused a write, as far as that can be told. Shown after the error number, with what can be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cause {
    /// The tree is mounted read-only.
    ReadOnly,
    /// Root's rights are missing, or a security module forbids it.
    NotPermitted,
    /// The kernel's lockdown forbids an unsigned module. (It forbids no move from driver to driver:
    /// security/lockdown, `lockdown_reasons`.)
    LockedDown(Lockdown),
    /// The function is not there any more.
    FunctionGone,
    /// It is on another driver, or on none, by now.
    DriverChanged {
        /// The driver it is on.
        now: Option<String>,
    },
    /// The group is open for a VM, and a host driver cannot have a member of it.
    GroupOpen {
        /// The group.
        group: u32,
        /// Who has it open.
        by: Vec<String>,
    },
    /// No IOMMU stands before the function, and vfio takes none such.
    NoIommu,
    /// The override names a driver that takes no function like this, or that refused this one.
    DriverRefused {
        /// The override.
        named: Option<String>,
    },
    /// Something is in use.
    Busy,
    /// A module could not be loaded.
    Module(Refused),
    /// Nothing more is known.
    Unknown,
}

/// Why a module could not be loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// `kernel.modules_disabled`.
    Disabled,
    /// Not signed by a key that this kernel trusts.
    Signature,
    /// Made for another kernel, or damaged.
    Foreign,
    /// It needs something of another module that is not there.
    Symbols,
    /// Options that it does not take.
    Options,
    /// It says itself that it has nothing to do here.
    Itself,
}

impl Cause {
    /// What `errno` means for `write` under these circumstances.
    ///
    /// Source: `drivers_probe_store`, `unbind_store` and `driver_set_override` (drivers/base), `vfio_pci_core_register_device`,
    /// `iommu_device_use_default_domain` (drivers/iommu/iommu.c), kernel/module/main.c and signing.c.
    #[must_use]
    pub fn of(seen: &Circumstances, write: &Write, errno: Errno) -> Self {
        if errno == Errno::EROFS {
            return Self::ReadOnly;
        }
        match write {
            Write::LoadModule(load) => of_module(seen, &load.options, errno),
            _ => of_function(seen, write, errno),
        }
    }

    /// Whether the same write may succeed later, with nothing changed by people.
    #[must_use]
    pub fn retryable(&self) -> bool {
        match self {
            Self::ReadOnly | Self::NotPermitted | Self::LockedDown(_) | Self::NoIommu => false,
            Self::Module(refused) => match refused {
                Refused::Disabled | Refused::Signature | Refused::Foreign | Refused::Options => false,
                Refused::Symbols | Refused::Itself => true,
            },
            Self::FunctionGone
            | Self::DriverChanged { .. }
            | Self::GroupOpen { .. }
            | Self::DriverRefused { .. }
            | Self::Busy
            | Self::Unknown => true,
        }
    }
}

fn of_function(seen: &Circumstances, write: &Write, errno: Errno) -> Cause {
    let function = seen.function.as_ref();
    let named = function.and_then(|function| function.driver_override.clone());
    let for_vfio = named.as_deref().is_some_and(is_vfio);
    let group = function.and_then(|function| function.iommu_group);
    match (errno, write) {
        (Errno::EPERM | Errno::EACCES, _) => Cause::NotPermitted,
        (Errno::ENODEV | Errno::ENOENT, _) if !seen.present => Cause::FunctionGone,
        (Errno::ENODEV | Errno::ENOENT, Write::Unbind { .. }) => {
            Cause::DriverChanged { now: function.and_then(|function| function.driver.clone()) }
        }
        (Errno::EINVAL, Write::Probe { .. }) if for_vfio && function.is_some() && group.is_none() => {
            Cause::NoIommu
        }
        // A vfio driver may join an open group: only a host driver is kept out.
        (Errno::EINVAL | Errno::EBUSY, Write::Probe { .. }) if !for_vfio && !seen.openers.is_empty() => {
            Cause::GroupOpen { group: group.unwrap_or_default(), by: seen.openers.clone() }
        }
        (Errno::EINVAL | Errno::ENODEV, Write::Probe { .. }) => Cause::DriverRefused { named },
        (Errno::EBUSY, _) => Cause::Busy,
        _ => Cause::Unknown,
    }
}

fn of_module(seen: &Circumstances, options: &str, errno: Errno) -> Cause {
    match errno {
        Errno::EPERM if seen.modules_disabled => Cause::Module(Refused::Disabled),
        Errno::EPERM => match seen.lockdown {
            Some(lockdown @ (Lockdown::Integrity | Lockdown::Confidentiality)) => Cause::LockedDown(lockdown),
            _ => Cause::NotPermitted,
        },
        Errno::EACCES => Cause::NotPermitted,
        Errno::ENOKEY | Errno::EKEYREJECTED | Errno::EBADMSG | Errno::ENOPKG => {
            Cause::Module(Refused::Signature)
        }
        Errno::ENOEXEC => Cause::Module(Refused::Foreign),
        Errno::ENOENT => Cause::Module(Refused::Symbols),
        Errno::EINVAL if !options.is_empty() => Cause::Module(Refused::Options),
        Errno::EINVAL | Errno::ENODEV => Cause::Module(Refused::Itself),
        Errno::EBUSY => Cause::Busy,
        _ => Cause::Unknown,
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ReadOnly => {
                f.write_str(": /sys is mounted read-only here; mount it read-write into the agent's container")
            }
            Self::NotPermitted => f.write_str(
                ": the agent needs to be root with its capabilities (privileged: true in a pod), and SELinux or AppArmor must \
                 allow it",
            ),
            Self::LockedDown(lockdown) => write!(
                f,
                ": the kernel's lockdown ({lockdown}; secure boot brings it) allows only what is signed by a key it trusts: \
                 sign the module, or switch secure boot off"
            ),
            Self::FunctionGone => f.write_str(": the function is gone"),
            Self::DriverChanged { now: Some(driver) } => {
                write!(f, ": it is on {driver} by now; it is looked at anew")
            }
            Self::DriverChanged { now: None } => f.write_str(": it is on no driver by now; it is looked at anew"),
            Self::GroupOpen { group, by } => write!(
                f,
                ": group {group} is open for a VM ({}), and the host's driver cannot have a member of it until it is closed",
                by.join(", ")
            ),
            Self::NoIommu => f.write_str(
                ": the function is in no IOMMU group, and vfio takes none such; switch the IOMMU on in the firmware (VT-d, \
                 AMD-Vi, SMMU) and on the kernel command line (intel_iommu=on on Intel)",
            ),
            Self::DriverRefused { named: Some(driver) } => write!(
                f,
                ": driver {driver}, which driver_override names, refused the function; the kernel log says why{}",
                if is_vfio(driver) && driver != VFIO_PCI { " (a variant driver takes only its own boards)" } else { "" }
            ),
            Self::DriverRefused { named: None } => {
                f.write_str(": the driver that the kernel tried refused the function; the kernel log says why")
            }
            Self::Busy => f.write_str(": another process has the group or the device open"),
            Self::Module(refused) => f.write_str(match refused {
                Refused::Disabled => {
                    ": kernel.modules_disabled is 1: no module is loaded until the node starts anew; have it loaded at boot"
                }
                Refused::Signature => ": the module is not signed by a key that this kernel trusts",
                Refused::Foreign => ": the module was made for another kernel, or its file is damaged",
                Refused::Symbols => ": it needs something of another module that is not there; run depmod",
                Refused::Options => ": it may not take its options (options lines of modprobe.d); the kernel log says which",
                Refused::Itself => ": the module refused to start; the kernel log says why",
            }),
            Self::Unknown => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        modules::{Load, ModuleFile, ModuleName},
        pci::{Address, Class},
    };

    fn at() -> Address {
        "0000:3b:00.0".parse().unwrap()
    }

    fn seen(driver_override: Option<&str>, iommu_group: Option<u32>) -> Circumstances {
        let function = Function {
            address: at(),
            vendor: 0x10de,
            device: 0x2236,
            subsystem_vendor: 0,
            subsystem_device: 0,
            class: Class(0x03_02_00),
            driver: None,
            driver_override: driver_override.map(str::to_owned),
            iommu_group,
            numa_node: -1,
            modalias: String::new(),
            physfn: None,
            num_vfs: 0,
            vfio_dev: None,
            unassigned_bars: Vec::new(),
            busy: false,
        };
        Circumstances { function: Some(function), present: true, ..Circumstances::default() }
    }

    fn gone() -> Circumstances {
        Circumstances::default()
    }

    fn opened(mut seen: Circumstances) -> Circumstances {
        seen.openers = vec!["process 7 (qemu)".to_owned()];
        seen
    }

    fn locked(mut seen: Circumstances) -> Circumstances {
        seen.lockdown = Some(Lockdown::Integrity);
        seen
    }

    #[test]
    fn a_refused_write_to_a_function_says_what_is_in_the_way() {
        let probe = || Write::Probe { address: at() };
        let unbind = || Write::Unbind { address: at(), driver: "nvidia".to_owned() };
        let set = || Write::Override { address: at(), driver: Some("vfio-pci".to_owned()) };
        let vfio = Some("vfio-pci");
        let refused = |named: Option<&str>| Cause::DriverRefused { named: named.map(str::to_owned) };
        let open = Cause::GroupOpen { group: 12, by: vec!["process 7 (qemu)".to_owned()] };
        let cases = [
            (seen(vfio, None), probe(), Errno::EINVAL, Cause::NoIommu, false),
            (seen(vfio, Some(12)), probe(), Errno::EINVAL, refused(vfio), true),
            (seen(None, Some(12)), probe(), Errno::EINVAL, refused(None), true),
            (opened(seen(None, Some(12))), probe(), Errno::EINVAL, open.clone(), true),
            (opened(seen(None, Some(12))), probe(), Errno::EBUSY, open, true),
            (opened(seen(vfio, Some(12))), probe(), Errno::EINVAL, refused(vfio), true),
            (gone(), probe(), Errno::ENODEV, Cause::FunctionGone, true),
            (gone(), set(), Errno::ENOENT, Cause::FunctionGone, true),
            (seen(None, Some(12)), unbind(), Errno::ENODEV, Cause::DriverChanged { now: None }, true),
            (seen(None, Some(12)), unbind(), Errno::EBUSY, Cause::Busy, true),
            (seen(None, Some(12)), set(), Errno::EPERM, Cause::NotPermitted, false),
            (locked(seen(None, None)), set(), Errno::EPERM, Cause::NotPermitted, false),
            (seen(None, None), set(), Errno::EACCES, Cause::NotPermitted, false),
            (seen(None, None), set(), Errno::EROFS, Cause::ReadOnly, false),
            (seen(None, None), set(), Errno::EIO, Cause::Unknown, true),
        ];
        for (seen, write, errno, cause, retryable) in cases {
            let found = Cause::of(&seen, &write, errno);
            assert_eq!(found, cause, "{write}: {errno}");
            assert_eq!(found.retryable(), retryable, "{write}: {errno}");
        }
    }

    #[test]
    fn a_refused_module_says_what_is_wrong_with_it() {
        let load = |options: &str| {
            Write::LoadModule(Box::new(Load {
                module: ModuleName::vfio_pci(),
                file: ModuleFile::new("6.12/vfio-pci.ko").unwrap(),
                options: options.to_owned(),
                required: true,
            }))
        };
        let disabled = Circumstances { modules_disabled: true, ..gone() };
        let cases = [
            (gone(), "", Errno::EPERM, Cause::NotPermitted),
            (disabled, "", Errno::EPERM, Cause::Module(Refused::Disabled)),
            (locked(gone()), "", Errno::EPERM, Cause::LockedDown(Lockdown::Integrity)),
            (gone(), "", Errno::EKEYREJECTED, Cause::Module(Refused::Signature)),
            (gone(), "", Errno::ENOEXEC, Cause::Module(Refused::Foreign)),
            (gone(), "", Errno::ENOENT, Cause::Module(Refused::Symbols)),
            (gone(), "ids=nonsense", Errno::EINVAL, Cause::Module(Refused::Options)),
            (gone(), "", Errno::ENODEV, Cause::Module(Refused::Itself)),
            (gone(), "", Errno::ENOMEM, Cause::Unknown),
        ];
        for (seen, options, errno, cause) in cases {
            assert_eq!(Cause::of(&seen, &load(options), errno), cause, "{errno} {options}");
        }
    }

    #[test]
    fn the_lockdown_in_brackets_holds() {
        for (text, lockdown) in [
            ("[none] integrity confidentiality\n", Some(Lockdown::None)),
            ("none [integrity] confidentiality\n", Some(Lockdown::Integrity)),
            ("none integrity [confidentiality]\n", Some(Lockdown::Confidentiality)),
            ("", None),
        ] {
            assert_eq!(Lockdown::parse(text), lockdown, "{text:?}");
        }
    }
}
