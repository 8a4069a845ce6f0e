//! What a function is to a passthrough node, by the vendors' rows and by what shares its slot.

use super::{Class, Function, Role};
use crate::vendor;

/// Base class 06, subclasses host (00), PCI-to-PCI (04) and semi-transparent (09): what every VMM leaves to the host.
fn is_bridge(class: Class) -> bool {
    matches!(class.0 >> 8, 0x0600 | 0x0604 | 0x0609)
}

/// What `function` is by the vendors' rows, given the functions that share its slot (itself may be among them).
#[must_use]
pub fn role<'a>(function: &Function, slot: impl IntoIterator<Item = &'a Function>) -> Role {
    if is_bridge(function.class) {
        return Role::Bridge;
    }
    let by_rule = |f: &Function| vendor::role(f.vendor, f.device, f.class).unwrap_or(Role::Foreign);
    match by_rule(function) {
        Role::Gpu if function.physfn.is_some() => Role::Vf,
        Role::Companion => {
            let beside_gpu = slot.into_iter().any(|mate| {
                mate.address.same_slot(function.address)
                    && mate.vendor == function.vendor
                    && by_rule(mate) == Role::Gpu
            });
            if beside_gpu { Role::Companion } else { Role::Foreign }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn function(address: &str, vendor: u16, device: u16, class: u32) -> Function {
        Function {
            address: address.parse().unwrap(),
            vendor,
            device,
            subsystem_vendor: 0,
            subsystem_device: 0,
            class: Class(class),
            driver: None,
            driver_override: None,
            iommu_group: None,
            numa_node: -1,
            modalias: String::new(),
            physfn: None,
            num_vfs: 0,
            busy: false,
            vfio_dev: None,
            unassigned_bars: Vec::new(),
        }
    }

    #[test]
    fn a_four_function_card_is_one_gpu_and_three_companions() {
        let card = [
            function("0000:52:00.0", 0x10de, 0x1eb1, 0x030000),
            function("0000:52:00.1", 0x10de, 0x10f8, 0x040300),
            function("0000:52:00.2", 0x10de, 0x1ad8, 0x0c0330),
            function("0000:52:00.3", 0x10de, 0x1ad9, 0x0c8000),
        ];
        let roles: Vec<_> = card.iter().map(|f| role(f, &card)).collect();
        assert_eq!(roles, [Role::Gpu, Role::Companion, Role::Companion, Role::Companion]);
    }

    #[test]
    fn exact_classes_decide_not_the_vendor() {
        for (vendor, device, class, expected) in [
            (0x10de, 0x2330, 0x030200, Role::Gpu),
            (0x10de, 0x22a3, 0x068000, Role::NvSwitch),
            (0x10de, 0x0373, 0x068000, Role::Foreign), // MCP55 Ethernet
            (0x10de, 0x22b1, 0x060400, Role::Bridge),  // Grace root port
            (0x10de, 0x10f8, 0x040300, Role::Foreign), // audio without a GPU beside it
            (0x1a03, 0x2000, 0x030000, Role::Foreign), // the board's management VGA
            (0x15b3, 0x101b, 0x020700, Role::Foreign),
            (0x1002, 0x74a1, 0x120000, Role::Gpu),     // MI300X
            (0x1002, 0x67df, 0x030000, Role::Foreign), // RX 580
            (0x10de, 0x74a1, 0x120000, Role::Foreign), // the class is AMD's rule
            (0x8086, 0x1901, 0x060400, Role::Bridge),
        ] {
            let f = function("0000:01:00.0", vendor, device, class);
            assert_eq!(role(&f, [&f]), expected, "{vendor:04x}:{device:04x} {class:06x}");
        }
    }

    #[test]
    fn a_gpus_virtual_function_is_a_vf() {
        let mut f = function("0000:01:00.4", 0x10de, 0x2235, 0x030200);
        f.physfn = Some("0000:01:00.0".parse().unwrap());
        assert_eq!(role(&f, [&f]), Role::Vf);
    }
}
