//! Host services that have GPUs open as a matter of course, and how each is made to let go.

use super::Owner;

/// A row of the table below.
struct Known {
    /// The name of its processes, cut to the 15 characters that `/proc/PID/comm` has (`TASK_COMM_LEN`,
    /// include/linux/sched.h).
    command: &'static str,
    /// Its whole name.
    name: &'static str,
    /// The unit that its packages bring.
    unit: &'static str,
}

const fn known(command: &'static str, name: &'static str, unit: &'static str) -> Known {
    Known { command, name, unit }
}

const KNOWN: &[Known] = &[
    known("nvidia-persiste", "nvidia-persistenced", "nvidia-persistenced"),
    known("nv-fabricmanage", "nv-fabricmanager", "nvidia-fabricmanager"),
    known("nv-hostengine", "nv-hostengine (DCGM)", "nvidia-dcgm"),
    known("dcgm-exporter", "dcgm-exporter", "dcgm-exporter"),
    known("nvidia-cuda-mps", "nvidia-cuda-mps-control", "nvidia-mps"),
    known("nvidia-imex", "nvidia-imex", "nvidia-imex"),
    known("nvidia-powerd", "nvidia-powerd", "nvidia-powerd"),
    known("nvidia-gridd", "nvidia-gridd", "nvidia-gridd"),
    known("nvidia-vgpu-mgr", "nvidia-vgpu-mgr", "nvidia-vgpu-mgr"),
    known("nvidia-device-p", "nvidia-device-plugin", "nvidia-device-plugin"),
    known("Xorg", "Xorg", "display-manager"),
    known("gnome-shell", "gnome-shell", "display-manager"),
    // It keeps display nodes open for the sessions that it serves.
    known("systemd-logind", "systemd-logind", "display-manager"),
];

/// Beginnings of units that are not to be stopped for a GPU's sake: the system's own, and runtimes, whose control group may
/// also be that of a container which they gave none.
const KEPT: [&str; 11] =
    ["containerd", "cri-o", "crio", "dbus", "docker", "k0s", "k3s", "kubelet", "rke2", "snap.", "systemd-"];

/// What makes a holder let go, where it is a known service or a pod's.
#[must_use]
pub fn cure(command: &str, owner: &Owner) -> Option<String> {
    let known = KNOWN.iter().find(|known| known.command == command);
    match (known, owner) {
        (Some(known), Owner::Pod { .. }) => Some(format!(
            "{} runs in that pod: end the pod, and keep its DaemonSet off this node while the node serves VMs",
            known.name
        )),
        (None, Owner::Pod { .. }) => Some("delete that pod, or wait for its end".to_owned()),
        (Some(known), Owner::Unit { unit }) if plain_service(unit) => {
            Some(format!("{} is a service of the host: systemctl stop {unit}", known.name))
        }
        (Some(known), Owner::Unit { .. }) => {
            Some(format!("{} is a service of the host: systemctl stop {}", known.name, known.unit))
        }
        (Some(known), Owner::Unknown) => Some(format!(
            "{} is a service: systemctl stop {} where it is the host's, else end its pod",
            known.name, known.unit
        )),
        (None, Owner::Unit { unit }) if plain_service(unit) => {
            Some(format!("it is a service of the host: systemctl stop {unit}"))
        }
        (None, Owner::Unit { .. } | Owner::Unknown) => None,
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
        for known in KNOWN {
            assert!(known.command.len() <= 15 && known.name.starts_with(known.command), "{}", known.command);
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
            let found = cure(command, &owner);
            match expected {
                Some(part) => {
                    let text = found.unwrap_or_default();
                    assert!(text.contains(part), "{command}: {text}");
                }
                None => assert_eq!(found, None, "{command}"),
            }
        }
    }
}
