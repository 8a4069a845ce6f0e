//! Plans and their execution, in one process: the plan is pure, and the simulated kernel answers without a writer.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "test code")]
#![allow(clippy::disallowed_methods, reason = "a test's own files")]

mod node;

use std::collections::{BTreeMap, BTreeSet};

use decide::{
    consumer::Consumer,
    inventory::Inventory,
    plan::{Plan, UnitPlan, Verdict, plan},
    prior::{Prior, Remembered},
    refusal::Refusal,
    step::{Seen, Step, Subject},
    usage::{Hold, HoldBy, PodClaim, PodDevice, Pods, Usage},
    wish::{Desired, WorkloadType},
};
use nix::{errno::Errno, unistd::Pid};
use node::{Node, address, four_groups, function, look_at as look};
use proptest::{prelude::*, sample::select, test_runner::TestCaseError};
use vfio::{
    child::{Cause, Circumstances, Reader, WriteError},
    driver::is_vfio,
    host::Host,
    modules::{Availability, Modules},
    pci::{self, Address},
    sim::{Effect, Fault, Moment, Profile, kernel},
    write::Write,
};
use vfiod::execute::{Attempt, Outcome, Port, StepError, carry_out, spelling};

type Priors = BTreeMap<Address, Remembered>;

/// The simulated kernel without a child process between.
struct InProcess {
    host: Host,
    priors: Priors,
}

impl InProcess {
    fn circumstances(&self, write: &Write) -> Circumstances {
        let function = write.function().and_then(|address| pci::read(&self.host, address).unwrap());
        Circumstances::look(&self.host, write, function, |node| Reader::here(&self.host).holders([node]))
    }
}

impl Port for InProcess {
    fn look(&mut self, subject: &Subject) -> Result<Seen, StepError> {
        match subject {
            Subject::Module(module) => Ok(Seen::Module(Modules::of(&self.host).present(module))),
            Subject::Function { address, driver } => {
                let function = pci::read(&self.host, *address).unwrap();
                let function = Box::new(function.ok_or(StepError::Gone { address: *address })?);
                Ok(Seen::Function {
                    function,
                    driver: driver.as_deref().map(|name| spelling(&self.host, name)),
                })
            }
        }
    }

    fn write(&mut self, attempt: &Attempt) -> Result<(), StepError> {
        if let Some((address, remembered)) = &attempt.remembers {
            self.priors.entry(*address).or_insert_with(|| remembered.clone());
        }
        let write = &attempt.write;
        // No agent to kill: process 0 is nobody.
        kernel::answer(&self.host, write, Pid::from_raw(0)).map_err(|errno| {
            let cause = Cause::of(&self.circumstances(write), write, errno);
            StepError::Write(WriteError::Kernel {
                write: write.clone(),
                path: write.path(&self.host),
                errno,
                cause,
            })
        })
    }
}

/// The functions that a unit's plan moves.
fn moved(plan: &UnitPlan) -> Vec<Address> {
    plan.steps().iter().filter_map(Step::touches).collect()
}

fn desired(workload_type: WorkloadType) -> Desired {
    Desired { workload_type, consumer: Consumer::Kubevirt, adopt_boot_bound: false }
}

fn planned(node: &Node, workload_type: WorkloadType, priors: &Priors) -> Plan {
    plan(&look(node), &desired(workload_type), &Usage::default(), priors)
}

/// Carries out every group of the plan, one after the other.
fn carry_out_all(node: &Node, plan: &Plan, priors: &mut Priors) -> Vec<Outcome> {
    let mut port = InProcess { host: node.sim.host().clone(), priors: priors.clone() };
    let outcomes = plan.moves().map(|plan| carry_out(plan.steps(), &mut port)).collect();
    *priors = port.priors;
    outcomes
}

fn refusals(plan: &Plan, group: u32) -> &[Refusal] {
    match &plan.of_group(group).unwrap().verdict {
        Verdict::Refused { refusals } => refusals,
        other => panic!("group {group}: {other:?}"),
    }
}

/// Each write of a switch, refused with each errno: the group ends as it was, and its neighbours as desired.
#[test]
fn a_refused_write_undoes_its_group_and_no_other() {
    let errnos = [Errno::EBUSY, Errno::EINVAL, Errno::ENODEV, Errno::EIO, Errno::EPERM, Errno::EROFS];
    let mut tried = 0;
    for (there, back) in [
        (WorkloadType::Container, WorkloadType::VmPassthrough),
        (WorkloadType::VmPassthrough, WorkloadType::Container),
    ] {
        for at in 1.. {
            let mut struck = false;
            for errno in errnos {
                let node = Node::new(&four_groups());
                let mut priors = BTreeMap::new();
                let first = planned(&node, there, &priors);
                carry_out_all(&node, &first, &mut priors);
                let before = node.bindings();
                let number = node.writes() + at;
                node.sim
                    .set_faults(&[Fault::at(number, Moment::Before, Effect::Errno(errno as i32))])
                    .unwrap();
                let second = planned(&node, back, &priors);
                let outcomes = carry_out_all(&node, &second, &mut priors);
                let after = node.bindings();
                for (plan, outcome) in second.moves().zip(&outcomes) {
                    let context = format!("to {back}, write {at} {errno}, {}: {outcome:?}", plan.name());
                    for address in moved(plan) {
                        let now = &after[&address];
                        match outcome {
                            Outcome::Done => assert_eq!(
                                now.0.as_deref().is_some_and(is_vfio),
                                back == WorkloadType::VmPassthrough,
                                "{context}"
                            ),
                            Outcome::RolledBack { .. } => {
                                assert_eq!(*now, before[&address], "{context}");
                            }
                            _ => panic!("{context}"),
                        }
                    }
                }
                let failed = outcomes.iter().filter(|outcome| !matches!(outcome, Outcome::Done)).count();
                assert!(failed <= 1);
                struck |= failed == 1;
                tried += 1;
            }
            if !struck {
                break;
            }
        }
    }
    println!("{tried} refused writes");
    assert!(tried > 200, "{tried}");
}

#[test]
fn a_probe_that_nothing_answers_is_not_taken_for_success() {
    let mut profile = four_groups();
    profile.drivers.retain(|driver| driver != "vfio-pci");
    let node = Node::new(&profile);
    let before = node.bindings();
    // The inventory says that the driver is there (it went away since): the probe finds nothing, and answers success.
    let mut observed = look(&node).into_observed();
    for chosen in observed.vfio.values_mut() {
        chosen.availability = Availability::BuiltIn;
    }
    let inventory = Inventory::from(observed);
    let plan = plan(&inventory, &desired(WorkloadType::VmPassthrough), &Usage::default(), &BTreeMap::new());
    for outcome in carry_out_all(&node, &plan, &mut BTreeMap::new()) {
        let Outcome::RolledBack { error: error @ StepError::NotTaken { .. } } = &outcome else {
            panic!("{outcome:?}")
        };
        assert!(error.to_string().contains("on no driver, not on vfio-pci"), "{error}");
    }
    assert_eq!(node.bindings(), before);
}

/// A variant driver that is loaded after the plan was made may be spelt otherwise than the plan has it.
#[test]
fn a_driver_is_called_as_its_directory_is() {
    let node = Node::new(&Profile::four_function_card());
    let spelt = node.sim.host().sys("bus/pci/drivers/odd_board-vfio-pci");
    std::fs::create_dir(&spelt).unwrap();
    for file in ["bind", "unbind"] {
        std::fs::write(spelt.join(file), "").unwrap();
    }
    let mut observed = look(&node).into_observed();
    for chosen in observed.vfio.values_mut() {
        chosen.driver = "odd_board_vfio_pci".to_owned();
    }
    let inventory = Inventory::from(observed);
    let plan = plan(&inventory, &desired(WorkloadType::VmPassthrough), &Usage::default(), &BTreeMap::new());
    assert!(matches!(carry_out_all(&node, &plan, &mut BTreeMap::new())[..], [Outcome::Done]));
    let name = Some("odd_board-vfio-pci".to_owned());
    assert!(node.bindings().values().all(|binding| *binding == (name.clone(), name.clone())));
}

#[test]
fn a_foreign_member_on_its_driver_refuses_the_whole_group() {
    let mut profile = four_groups();
    let mut nic = function("0000:17:00.1", 0x101b, 0x02_00_00, Some("mlx5_core"), 25);
    nic.vendor = 0x15b3;
    profile.functions.push(nic);
    let node = Node::new(&profile);
    let plan = planned(&node, WorkloadType::VmPassthrough, &BTreeMap::new());
    let [Refusal::ForeignMember { address: found, driver, .. }] = refusals(&plan, 25) else {
        panic!("{plan:?}")
    };
    assert_eq!((*found, driver.as_str()), (address("0000:17:00.1"), "mlx5_core"));
    assert_eq!(plan.moves().count(), 3, "the other groups go on");
}

#[test]
fn bridges_and_driverless_strangers_are_left_alone() {
    let mut profile = four_groups();
    let mut port = function("0000:16:00.0", 0x352a, 0x06_04_00, Some("pcieport"), 25);
    port.vendor = 0x8086;
    let mut stranger = function("0000:17:00.1", 0x0001, 0x01_08_02, None, 25);
    stranger.vendor = 0x144d;
    profile.functions.extend([port, stranger]);
    let node = Node::new(&profile);
    let mut priors = BTreeMap::new();
    let first = planned(&node, WorkloadType::VmPassthrough, &priors);
    assert!(carry_out_all(&node, &first, &mut priors).iter().all(|outcome| matches!(outcome, Outcome::Done)));
    assert_eq!(node.driver(address("0000:16:00.0")).as_deref(), Some("pcieport"));
    assert_eq!(node.driver(address("0000:17:00.1")), None);
    assert_eq!(planned(&node, WorkloadType::VmPassthrough, &priors).moves().count(), 0);
}

#[test]
fn without_an_iommu_nothing_moves_and_it_says_why() {
    let node = Node::new(&Profile::without_iommu());
    let plan = planned(&node, WorkloadType::VmPassthrough, &BTreeMap::new());
    assert_eq!(plan.units.len(), 2);
    for group in &plan.units {
        let Verdict::Refused { refusals } = &group.verdict else { panic!("{group:?}") };
        assert!(matches!(refusals[..], [Refusal::NoIommu { .. }]), "{refusals:?}");
        assert!(refusals[0].to_string().contains("intel_iommu=on"));
    }
}

#[test]
fn an_unreadable_member_hides_no_other_and_refuses_its_group() {
    let node = Node::new(&four_groups());
    let class = node.sim.host().function_dir(address("0000:52:00.1")).join("class");
    std::fs::remove_file(class).unwrap();
    let inventory = look(&node);
    assert_eq!(inventory.functions.len(), 6);
    let plan = planned(&node, WorkloadType::VmPassthrough, &BTreeMap::new());
    let [Refusal::Unreadable { address: found, reason }] = refusals(&plan, 35) else { panic!("{plan:?}") };
    assert_eq!(*found, address("0000:52:00.1"));
    assert!(reason.contains("class"), "{reason}");
    assert_eq!(plan.moves().count(), 3);
}

/// A GPU that cannot be read is not passed over in silence, and neither is a member that is in its group alone.
#[test]
fn what_is_not_known_of_a_group_is_said() {
    let node = Node::new(&four_groups());
    std::fs::remove_file(node.sim.host().function_dir(address("0000:17:00.0")).join("class")).unwrap();
    std::fs::remove_file(node.sim.host().sys("bus/pci/devices/0000:52:00.1")).unwrap();
    std::fs::create_dir(node.sim.host().sys("kernel/iommu_groups/60/devices/arm-smmu.1")).unwrap();
    let plan = planned(&node, WorkloadType::VmPassthrough, &BTreeMap::new());
    assert!(matches!(refusals(&plan, 25), [Refusal::Unreadable { .. }]), "{plan:?}");
    assert!(matches!(refusals(&plan, 35), [Refusal::Unreadable { .. }]), "{plan:?}");
    assert!(
        matches!(refusals(&plan, 60), [Refusal::NotPci { name, .. }] if name == "arm-smmu.1"),
        "{plan:?}"
    );
    assert_eq!(plan.moves().count(), 1);
}

/// The way back, case by case of the design's never-event 5.
#[test]
fn the_way_back_follows_each_prior() {
    let [gpu, audio, usb, ucsi] =
        ["0000:52:00.0", "0000:52:00.1", "0000:52:00.2", "0000:52:00.3"].map(address);
    type Case = (Address, (Option<&'static str>, Option<&'static str>), Option<Prior>, Option<&'static str>);
    let vfio = (Some("vfio-pci"), Some("vfio-pci"));
    let by_ids = (Some("vfio-pci"), None);
    let named = |name: &str| Some(Prior::Driver(name.to_owned()));
    let cases: [Case; 9] = [
        (gpu, vfio, named("nvidia"), Some("nvidia")),
        (gpu, vfio, None, Some("nvidia")),
        (gpu, by_ids, None, Some("vfio-pci")),
        (audio, vfio, named("snd_hda_intel"), Some("snd_hda_intel")),
        (audio, vfio, Some(Prior::None), None),
        (usb, vfio, Some(Prior::Unknown), Some("xhci_hcd")),
        (usb, by_ids, None, Some("vfio-pci")),
        (
            usb,
            vfio,
            Some(Prior::AlreadyVfio { driver_override: Some("vfio-pci".to_owned()) }),
            Some("xhci_hcd"),
        ),
        // Moved by vfiod, and its override cleared before a crash: this is not "bound at boot".
        (ucsi, by_ids, named("nvidia-gpu"), Some("nvidia-gpu")),
    ];
    for (function, (driver, driver_override), prior, expected) in cases {
        let node = Node::new(&Profile::four_function_card());
        node.sim.put(function, driver, driver_override).unwrap();
        let mut priors: BTreeMap<_, _> =
            prior.clone().map(|was| (function, Remembered { device: None, was })).into_iter().collect();
        let plan = planned(&node, WorkloadType::Container, &priors);
        let kept = expected == Some("vfio-pci");
        assert_eq!(plan.of_group(35).unwrap().boot_bound.contains(&function), kept, "{function} {prior:?}");
        for outcome in carry_out_all(&node, &plan, &mut priors) {
            assert!(matches!(outcome, Outcome::Done), "{function} {prior:?}: {outcome:?}");
        }
        let (now, now_override) = node.bindings()[&function].clone();
        assert_eq!((now.as_deref(), now_override.as_deref()), (expected, None), "{function} {prior:?}");
    }
}

#[test]
fn boot_bound_functions_are_adopted_when_asked() {
    let node = Node::new(&Profile::four_function_card());
    let gpu = address("0000:52:00.0");
    node.sim.put(gpu, Some("vfio-pci"), None).unwrap();
    let adopting = Desired { adopt_boot_bound: true, ..desired(WorkloadType::Container) };
    let plan = plan(&look(&node), &adopting, &Usage::default(), &BTreeMap::new());
    carry_out_all(&node, &plan, &mut BTreeMap::new());
    assert_eq!(node.driver(gpu).as_deref(), Some("nvidia"));
}

/// A companion must read back as what it was; a GPU may stay driverless where no driver is loaded.
#[test]
fn a_companion_that_does_not_come_back_is_an_error_and_a_driverless_gpu_is_not() {
    let mut profile = Profile::four_function_card();
    let node = Node::new(&profile);
    let mut priors = BTreeMap::new();
    carry_out_all(&node, &planned(&node, WorkloadType::VmPassthrough, &priors), &mut priors);
    for gone in ["snd_hda_intel", "nvidia"] {
        std::fs::remove_dir_all(node.sim.host().sys("bus/pci/drivers").join(gone)).unwrap();
    }
    let writes = node.writes();
    let refused = planned(&node, WorkloadType::Container, &priors);
    let [Refusal::HostDriverAbsent { address: found, driver }] = refusals(&refused, 35) else {
        panic!("{refused:?}")
    };
    assert_eq!((*found, driver.as_str()), (address("0000:52:00.1"), "snd_hda_intel"));
    assert_eq!(
        (refused.moves().count(), node.writes()),
        (0, writes),
        "tried, it would go back and forth for ever"
    );

    // The driver goes away only after the look: then it is tried, and the group is put back.
    let mut observed = look(&node).into_observed();
    observed.drivers.insert("snd_hda_intel".to_owned());
    let inventory = Inventory::from(observed);
    let plan = plan(&inventory, &desired(WorkloadType::Container), &Usage::default(), &priors);
    let outcomes = carry_out_all(&node, &plan, &mut priors);
    let [Outcome::RolledBack { error }] = &outcomes[..] else { panic!("{outcomes:?}") };
    assert!(error.to_string().starts_with("0000:52:00.1 was probed"), "{error}");
    assert!(node.bindings().values().all(|(driver, _)| driver.as_deref() == Some("vfio-pci")));

    profile.functions.truncate(1);
    profile.drivers.retain(|driver| driver != "nvidia");
    profile.functions[0].driver = Some("vfio-pci".to_owned());
    let node = Node::new(&profile);
    node.sim.put(address("0000:52:00.0"), Some("vfio-pci"), Some("vfio-pci")).unwrap();
    let mut priors = BTreeMap::new();
    let plan = planned(&node, WorkloadType::Container, &priors);
    assert!(matches!(carry_out_all(&node, &plan, &mut priors)[..], [Outcome::Done]));
    assert_eq!(node.bindings()[&address("0000:52:00.0")], (None, None));
}

/// Functions with the driver and the override that each shall have.
type State = Vec<(Address, Option<&'static str>, Option<&'static str>)>;

/// A random node: groups with random members, on random drivers, with random overrides.
fn any_node() -> impl Strategy<Value = (Profile, State)> {
    let member = (0_u32..4, select(vec![0x03_02_00, 0x06_80_00, 0x02_00_00, 0x06_04_00]), 0_u8..4, 0_u8..3);
    prop::collection::vec(member, 1..8).prop_map(|members| {
        let mut profile =
            Profile { name: "any".to_owned(), functions: Vec::new(), ..Profile::four_function_card() };
        let mut state = Vec::new();
        for (index, (group, class, driver, driver_override)) in members.into_iter().enumerate() {
            let at = Address::new(0, u8::try_from(index).unwrap() + 1, 0, 0).unwrap();
            let mut made = function(&at.to_string(), 0x22a3, class, None, group);
            let host = match class {
                0x03_02_00 => "nvidia",
                0x06_80_00 => "nvidia-nvswitch",
                0x02_00_00 => "mlx5_core",
                _ => "pcieport",
            };
            made.vendor = if class == 0x02_00_00 { 0x15b3 } else { 0x10de };
            profile.functions.push(made);
            let driver = [None, Some(host), Some("vfio-pci"), Some("pci-stub")][usize::from(driver)];
            let driver_override = [None, Some("vfio-pci"), Some("pci-stub")][usize::from(driver_override)];
            state.push((at, driver, driver_override));
        }
        (profile, state)
    })
}

/// What must hold of every plan, whatever the node.
fn check(node: &Node, workload_type: WorkloadType) -> Result<(), TestCaseError> {
    let inventory = look(node);
    let mut priors = BTreeMap::new();
    let plan = planned(node, workload_type, &priors);
    let before = node.bindings();
    for unit in plan.moves() {
        for address in moved(unit) {
            let found = &inventory.functions[&address];
            prop_assert_eq!(found.iommu_group, unit.group, "a group is never left by its own moves");
            prop_assert!(
                matches!(found.class.0, 0x03_02_00 | 0x06_80_00),
                "{:?} is not vfiod's to move",
                found
            );
        }
    }
    for outcome in carry_out_all(node, &plan, &mut priors) {
        prop_assert!(matches!(outcome, Outcome::Done), "{:?}", outcome);
    }
    let moved: BTreeSet<_> = plan.moves().flat_map(moved).collect();
    for (address, now) in node.bindings() {
        prop_assert!(moved.contains(&address) || now == before[&address], "{address} was not in the plan");
    }
    if workload_type == WorkloadType::VmPassthrough {
        let now = look(node);
        for unit in now.units().iter().filter(|unit| !unit.offerable.is_empty()) {
            let all: Vec<_> = unit.movable.iter().map(|address| node.driver(*address)).collect();
            let bound = all.iter().filter(|driver| driver.as_deref().is_some_and(is_vfio)).count();
            let refused = matches!(plan.of(&unit.id).unwrap().verdict, Verdict::Refused { .. });
            prop_assert!(refused || bound == all.len(), "{} is bound by half", unit.name());
        }
    } else {
        priors.clear();
    }
    let writes = node.writes();
    let again = planned(node, workload_type, &priors);
    prop_assert_eq!(again.moves().count(), 0, "a second plan moves again: {:?}", again);
    carry_out_all(node, &again, &mut priors);
    prop_assert_eq!(node.writes(), writes);
    Ok(())
}

fn put_all(node: &Node, state: &[(Address, Option<&str>, Option<&str>)]) {
    for (address, driver, driver_override) in state {
        node.sim.put(*address, *driver, *driver_override).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// Never-events 2, 4 and the group as the unit, over random nodes.
    #[test]
    fn any_plan_moves_whole_groups_and_is_done_after_one_go((profile, state) in any_node(), to_vfio: bool) {
        let node = Node::new(&profile);
        put_all(&node, &state);
        check(&node, if to_vfio { WorkloadType::VmPassthrough } else { WorkloadType::Container })?;
    }

    /// Never-event 3: a group somebody uses, or may be using, is in no plan.
    #[test]
    fn nothing_in_use_is_ever_moved((profile, state) in any_node(), to_vfio: bool, how in 0_u8..7) {
        let node = Node::new(&profile);
        put_all(&node, &state);
        let wish = desired(if to_vfio { WorkloadType::VmPassthrough } else { WorkloadType::Container });
        let free = plan(&look(&node), &wish, &Usage::default(), &BTreeMap::new());
        let first = free.moves().next();
        prop_assume!(first.is_some());
        let unit = first.unwrap();
        let address = moved(unit)[0];
        let device = |resource: &str, id: String| {
            let (namespace, pod, container) = ("ns".into(), "p".into(), "c".into());
            let device = PodDevice { namespace, pod, container, resource: resource.into(), id };
            Pods::Known { devices: BTreeSet::from([device]), claims: BTreeSet::new() }
        };
        let claim = |driver: &str, device: String| {
            let (namespace, pod, container) = ("ns".into(), "p".into(), "c".into());
            let (claim, driver, cdi) = ("claim".into(), driver.into(), BTreeSet::new());
            let claim = PodClaim { namespace, pod, container, claim, driver, device, cdi };
            Pods::Known { devices: BTreeSet::new(), claims: BTreeSet::from([claim]) }
        };
        let mut usage = Usage::default();
        match how {
            0 => usage.pods = device("nvidia.com/gpu", address.to_string()),
            1 => usage.pods = device("nvidia.com/gpu", "GPU-5e1b".to_owned()),
            2 => usage.pods = Pods::Unknown("no socket".to_owned()),
            3 => {
                let resource = "nvidia.com/X".into();
                let hold = Hold { resource, by: HoldBy::Allocate, answered_at: 0, shown: false };
                usage.holds.insert(address.into(), hold);
            }
            4 => usage.pods = claim("gpu.nvidia.com", "gpu-0".to_owned()),
            5 => usage.pods = claim("fabric.example.com", format!("dev-{address}").replace([':', '.'], "-")),
            _ => {
                // Whoever has any of its nodes open: the group's, the device's, the host driver's.
                let root = node.dir.path();
                let there = |held: &&String| root.join(held.trim_start_matches('/')).exists();
                let held = unit.nodes.iter().find(there);
                prop_assume!(held.is_some());
                node.sim.start_process(4242, "holder", &[held.unwrap().as_str()]).unwrap();
            }
        }
        let blocked = plan(&look(&node), &wish, &usage, &BTreeMap::new());
        let refusals = blocked.of(&unit.unit).unwrap().refusals();
        prop_assert!(matches!(refusals[..], [Refusal::InUse { .. }]), "{:?}", refusals);
    }
}
