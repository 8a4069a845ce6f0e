//! What makes a holder let go: host services that have GPUs open as a matter of course, VMs, pods.

use super::Owner;
use crate::{
    pci::Address,
    vendor::{self, Service},
};

/// Services of no vendor; each vendor's own are in its row.
const DESKTOP: &[Service] = &[
    Service { ends: DESKTOPS, ..Service::new("Xorg", "Xorg", "display-manager") },
    Service { ends: DESKTOPS, ..Service::new("gnome-shell", "gnome-shell", "display-manager") },
    // It keeps display nodes open for the sessions that it serves.
    Service { ends: DESKTOPS, ..Service::new("systemd-logind", "systemd-logind", "display-manager") },
];

/// What a display manager takes with it.
const DESKTOPS: Option<&str> = Some("the graphical sessions");

/// The commands of virtual machine monitors, by their beginnings.
const MONITORS: [&str; 4] = ["cloud-hyperviso", "crosvm", "firecracker", "qemu"];

/// All services that are known.
fn services() -> impl Iterator<Item = &'static Service> {
    vendor::TABLE.iter().flat_map(|vendor| vendor.services).chain(DESKTOP)
}

/// Beginnings of units that are not to be stopped for a GPU's sake: the system's own, and runtimes, whose control group may
/// also be that of a container which they gave none.
const KEPT: [&str; 11] =
    ["containerd", "cri-o", "crio", "dbus", "docker", "k0s", "k3s", "kubelet", "rke2", "snap.", "systemd-"];

/// What makes a holder let go, where it is a known service, a VM or a pod's. `function` is the one that it has open, where
/// that is known: some services let go of one alone.
///
/// A cure that ends more than the holder itself says what.
#[must_use]
pub fn cure(command: &str, owner: &Owner, function: Option<Address>) -> Option<String> {
    if let Some(service) = services().find(|service| service.command == command) {
        return Some(of_service(service, owner, function));
    }
    let is_vm = MONITORS.iter().any(|monitor| command.starts_with(monitor));
    match owner {
        Owner::Pod { .. } if is_vm => Some(
            "it is a VM: shut that VM down, or wait for its end; whoever deletes the pod ends the VM"
                .to_owned(),
        ),
        Owner::Pod { .. } => Some("delete that pod, or wait for its end".to_owned()),
        Owner::Unit { .. } | Owner::Unknown if is_vm => {
            Some("it is a VM: shut that VM down first".to_owned())
        }
        Owner::Unit { unit } if plain_service(unit) => {
            Some(format!("it is a service of the host: systemctl stop {unit}"))
        }
        Owner::Unit { .. } | Owner::Unknown => None,
    }
}

fn of_service(service: &Service, owner: &Owner, function: Option<Address>) -> String {
    let name = service.name;
    let whole = match owner {
        Owner::Pod { .. } => format!(
            "{name} runs in that pod: end the pod, and keep its DaemonSet off this node while the node serves VMs"
        ),
        Owner::Unit { unit } if plain_service(unit) => {
            format!("{name} is a service of the host: systemctl stop {unit}")
        }
        Owner::Unit { .. } => format!("{name} is a service of the host: systemctl stop {}", service.unit),
        Owner::Unknown => {
            format!(
                "{name} is a service: systemctl stop {} where it is the host's, else end its pod",
                service.unit
            )
        }
    };
    let whole = match service.ends {
        Some(ends) => format!("{whole}, which ends {ends}: shut those down first"),
        None => whole,
    };
    match (service.one_function, function) {
        (Some(pattern), Some(address)) => {
            let command = pattern.replace("ADDRESS", &address.to_string());
            format!("{command} has it let go of {address} alone; or for all: {whole}")
        }
        _ => whole,
    }
}

/// Whether a unit may be given to people to type: any process's control group can have any name.
fn plain_service(unit: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '@');
    unit.ends_with(".service")
        && !unit.starts_with('-')
        && unit.chars().all(plain)
        && !KEPT.iter().any(|kept| unit.starts_with(kept))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_name_is_one_that_the_kernel_can_show() {
        for service in services() {
            let Service { command, name, one_function, .. } = service;
            assert!(command.len() <= 15 && name.starts_with(command), "{command}");
            assert!(one_function.is_none_or(|pattern| pattern.contains("ADDRESS")), "{command}");
        }
    }

    #[test]
    fn a_host_service_is_named_with_its_cure() {
        let unit = |unit: &str| Owner::Unit { unit: unit.to_owned() };
        let pod = Owner::Pod { uid: "u".to_owned(), container: None };
        for (command, owner, expected) in [
            (
                "nvidia-persiste",
                unit("nvidia-persistenced.service"),
                Some("systemctl stop nvidia-persistenced.service"),
            ),
            ("nvidia-persiste", Owner::Unknown, Some("systemctl stop nvidia-persistenced")),
            ("nv-fabricmanage", Owner::Unknown, Some("systemctl stop nvidia-fabricmanager")),
            ("nv-hostengine", unit("dcgm.service"), Some("systemctl stop dcgm.service")),
            ("nvidia-cuda-mps", unit("session-3.scope"), Some("systemctl stop nvidia-mps")),
            ("dcgm-exporter", pod.clone(), Some("keep its DaemonSet off this node")),
            ("python3", pod, Some("delete that pod")),
            ("python3", unit("train.service"), Some("systemctl stop train.service")),
            ("python3", unit("x;rm -rf $HOME.service"), None),
            ("kata-shim", unit("containerd.service"), None),
            ("kata-shim", unit("k3s.service"), None),
            ("systemd-logind", unit("systemd-logind.service"), Some("systemctl stop display-manager")),
            ("python3", unit("session-3.scope"), None),
            ("python3", Owner::Unknown, None),
        ] {
            let found = cure(command, &owner, None);
            match expected {
                Some(part) => {
                    let text = found.unwrap_or_default();
                    assert!(text.contains(part), "{command}: {text}");
                }
                None => assert_eq!(found, None, "{command}"),
            }
        }
    }

    #[test]
    fn a_cure_for_one_card_comes_before_one_for_all() {
        let unit = Owner::Unit { unit: "nvidia-persistenced.service".to_owned() };
        let address = "0000:21:00.0".parse().unwrap();
        assert_eq!(
            cure("nvidia-persiste", &unit, Some(address)).unwrap(),
            "nvidia-smi -i 0000:21:00.0 -pm 0 has it let go of 0000:21:00.0 alone; or for all: nvidia-persistenced is a \
             service of the host: systemctl stop nvidia-persistenced.service"
        );
        // What knows no such thing says nothing of one card.
        assert_eq!(cure("nvidia-imex", &unit, Some(address)), cure("nvidia-imex", &unit, None));
    }

    /// Followed to the letter, no cure may end a VM that it does not speak of.
    #[test]
    fn what_ends_vms_says_so() {
        let unit = |unit: &str| Owner::Unit { unit: unit.to_owned() };
        let pod = Owner::Pod { uid: "u".to_owned(), container: None };
        for owner in [unit("nvidia-vgpu-mgr.service"), Owner::Unknown, pod.clone()] {
            let text = cure("nvidia-vgpu-mgr", &owner, None).unwrap();
            assert!(
                text.ends_with("which ends every VM with a vGPU of this node: shut those down first"),
                "{text}"
            );
        }
        for (command, owner) in [
            ("qemu-kvm", pod.clone()),
            ("qemu-system-x86", unit("vm@1.service")),
            ("cloud-hyperviso", Owner::Unknown),
            ("firecracker", pod),
        ] {
            let text = cure(command, &owner, None).unwrap();
            assert!(text.starts_with("it is a VM: ") && !text.contains("systemctl"), "{text}");
        }
    }
}
