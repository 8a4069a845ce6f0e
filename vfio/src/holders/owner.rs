//! Whose a process is, by the control groups that it is in: a pod's, or a host service's.

use serde::{Deserialize, Serialize};

use crate::printable::printable;

/// Whose a process is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(tag = "owner", rename_all = "kebab-case")]
pub enum Owner {
    /// A pod's.
    Pod {
        /// The pod's UID.
        #[serde(rename = "pod_uid")]
        uid: String,
        /// The container's ID; none for what the runtime runs for the pod as a whole.
        #[serde(rename = "container_id")]
        container: Option<String>,
    },
    /// A systemd unit's: `nvidia-persistenced.service`, `session-3.scope`.
    Unit {
        /// The unit.
        unit: String,
    },
    /// Not known: no control group can be read, or it says nothing.
    #[default]
    Unknown,
}

/// Reads whose a process is from its `/proc/PID/cgroup`: lines of `ID:CONTROLLERS:PATH`, one for version 2 (`0::PATH`), one a
/// hierarchy for version 1 (cgroups(7)).
///
/// A reader in a control group namespace of its own sees paths from there: `/` for itself, `/../..` for others
/// (cgroup_namespaces(7)). What such a path does not name is unknown.
#[must_use]
pub fn owner(cgroup: &str) -> Owner {
    let paths = || {
        let lines = cgroup.lines().filter_map(|line| {
            let (_, rest) = line.split_once(':')?;
            rest.split_once(':')
        });
        // The hierarchies that systemd keeps (`0::`, `name=systemd`) before those that a runtime may have arranged otherwise.
        let (own, others): (Vec<_>, Vec<_>) =
            lines.partition(|(controllers, _)| matches!(*controllers, "" | "name=systemd"));
        own.into_iter().chain(others).map(|(_, path)| path)
    };
    paths().find_map(pod).or_else(|| paths().find_map(unit)).unwrap_or_default()
}

/// The pod of a path, by its component for the pod:
/// * `pod<uid>` of the cgroupfs driver,
/// * `kubepods-burstable-pod<uid with _>.slice` of the systemd driver (`cgroupNamesToSystemd`,
///   pkg/kubelet/cm/cgroup_manager_linux.go),
/// * `kubepods-pod<uid>.slice:cri-containerd:<id>` where kubelet and containerd are set to different drivers.
fn pod(path: &str) -> Option<Owner> {
    let mut components = path.split('/');
    while let Some(component) = components.next() {
        let (name, scope) = component.split_once(':').map_or((component, None), |(a, b)| (a, Some(b)));
        let name = name.strip_suffix(".slice").unwrap_or(name);
        let Some(uid) = name.strip_prefix("pod").or_else(|| Some(name.rsplit_once("-pod")?.1)) else {
            continue;
        };
        let Some(uid) = pod_uid(uid) else { continue };
        let container = scope.and_then(container_id).or_else(|| components.find_map(container_id));
        return Some(Owner::Pod { uid, container });
    }
    None
}

/// A UID as the API server makes it (8-4-4-4-12 hex digits), or a static pod's (32 hex digits, a hash). Units such as
/// `podruntime.slice` are none.
fn pod_uid(text: &str) -> Option<String> {
    let uid = text.replace('_', "-");
    let digits = uid.chars().filter(char::is_ascii_hexdigit).count();
    let separators = uid.chars().filter(|c| *c == '-').count();
    (digits == 32 && matches!(separators, 0 | 4) && digits + separators == uid.len()).then_some(uid)
}

/// The shortest name that counts as a container's ID; runtimes make them 64 digits long.
const SHORTEST_ID: usize = 32;

/// The container's ID in a component: bare, or behind its runtime's name as in `cri-containerd-<id>.scope`, `crio-<id>.scope`,
/// `docker-<id>.scope`, `kata_<id>`, `cri-containerd:<id>`.
fn container_id(component: &str) -> Option<String> {
    let name = component.strip_suffix(".scope").unwrap_or(component);
    let id = name.rsplit(['-', '_', ':']).next()?;
    (id.len() >= SHORTEST_ID && id.chars().all(|c| c.is_ascii_hexdigit())).then(|| id.to_owned())
}

/// The innermost systemd unit of a path.
fn unit(path: &str) -> Option<Owner> {
    let unit = path.rsplit('/').find(|name| name.ends_with(".service") || name.ends_with(".scope"))?;
    Some(Owner::Unit { unit: printable(unit) })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UID: &str = "5f3c1a2b-0d4e-4f60-8a7b-9c0d1e2f3a4b";
    const UNDERSCORED: &str = "5f3c1a2b_0d4e_4f60_8a7b_9c0d1e2f3a4b";
    const ID: &str = "3f8e2d1c0b9a87654321fedcba98765432100123456789abcdef0123456789ab";

    fn pod_of(container: Option<&str>) -> Owner {
        Owner::Pod { uid: UID.to_owned(), container: container.map(str::to_owned) }
    }

    fn unit_of(unit: &str) -> Owner {
        Owner::Unit { unit: unit.to_owned() }
    }

    #[test]
    fn every_driver_and_runtime_names_the_pod() {
        let slice = format!("kubepods-burstable-pod{UNDERSCORED}.slice");
        for (text, container) in [
            (
                format!("0::/kubepods.slice/kubepods-burstable.slice/{slice}/cri-containerd-{ID}.scope\n"),
                Some(ID),
            ),
            (
                format!("0::/kubepods.slice/kubepods-burstable.slice/{slice}/crio-{ID}.scope/container\n"),
                Some(ID),
            ),
            (
                format!("0::/kubepods.slice/kubepods-burstable.slice/{slice}/crio-conmon-{ID}.scope\n"),
                Some(ID),
            ),
            (format!("0::/kubepods.slice/kubepods-burstable.slice/{slice}/docker-{ID}.scope\n"), Some(ID)),
            (format!("0::/kubepods.slice/kubepods-burstable.slice/{slice}/kata_{ID}\n"), Some(ID)),
            // Guaranteed pods have no slice of a class.
            (
                format!("0::/kubepods.slice/kubepods-pod{UNDERSCORED}.slice/cri-containerd-{ID}.scope\n"),
                Some(ID),
            ),
            (format!("0::/kubepods/burstable/pod{UID}/{ID}\n"), Some(ID)),
            (format!("0::/kubepods/pod{UID}/{ID}/system.slice/virtqemud.service\n"), Some(ID)),
            (
                format!("0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{UNDERSCORED}.slice\n"),
                None,
            ),
            (
                format!(
                    "12:devices:/kubepods/besteffort/pod{UID}/{ID}\n1:name=systemd:/kubepods/besteffort/pod{UID}/{ID}\n"
                ),
                Some(ID),
            ),
            (
                format!(
                    "11:memory:/kubepods.slice/kubepods-besteffort.slice/{slice}/docker-{ID}.scope\n0::/system.slice/docker.service\n"
                ),
                Some(ID),
            ),
            (format!("0::/system.slice/containerd.service/{slice}:cri-containerd:{ID}\n"), Some(ID)),
            (format!("0::/kubepods/burstable/pod{UID}\n"), None),
            // From a control group namespace beside it.
            (format!("0::/../../{slice}/cri-containerd-{ID}.scope\n"), Some(ID)),
        ] {
            assert_eq!(owner(&text), pod_of(container), "{text}");
        }
        // A static pod's UID is a hash.
        let hash = "0123456789abcdef0123456789abcdef";
        let of_static = owner(&format!("0::/kubepods/burstable/pod{hash}/{ID}\n"));
        assert_eq!(of_static, Owner::Pod { uid: hash.to_owned(), container: Some(ID.to_owned()) });
    }

    #[test]
    fn what_is_in_no_pod_is_a_units_or_unknown() {
        for (text, expected) in [
            ("0::/system.slice/nvidia-persistenced.service\n", unit_of("nvidia-persistenced.service")),
            (
                "12:devices:/\n1:name=systemd:/system.slice/nvidia-dcgm.service\n",
                unit_of("nvidia-dcgm.service"),
            ),
            ("0::/user.slice/user-1000.slice/session-3.scope\n", unit_of("session-3.scope")),
            ("0::/podruntime.slice/kubelet.service\n", unit_of("kubelet.service")),
            (
                "0::/machine.slice/machine-qemu\\x2d1\\x2dvm.scope/libvirt/emulator\n",
                unit_of("machine-qemu\\x2d1\\x2dvm.scope"),
            ),
            ("0::/\n", Owner::Unknown),
            ("12:devices:/\n0::/\n", Owner::Unknown),
            ("0::/..\n", Owner::Unknown),
            ("0::/../..\n", Owner::Unknown),
            ("0::/../../kubepods.slice\n", Owner::Unknown),
            ("0::/kubepods/burstable/podwhatever/x\n", Owner::Unknown),
            ("", Owner::Unknown),
            ("nonsense", Owner::Unknown),
        ] {
            assert_eq!(owner(text), expected, "{text:?}");
        }
        // Podman's container is no pod, though its name begins like one.
        let podman = owner(&format!("0::/machine.slice/libpod-{ID}.scope/container\n"));
        assert_eq!(podman, unit_of(&format!("libpod-{ID}.scope")));
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in "(?s).{0,300}") {
            let _ = owner(&text);
        }

        #[test]
        fn any_path_is_survived(path in "[a-f0-9/:_.-]{0,80}(pod|slice|scope)[a-f0-9/:_.-]{0,80}") {
            let _ = owner(&format!("0::/{path}\n"));
        }
    }
}
