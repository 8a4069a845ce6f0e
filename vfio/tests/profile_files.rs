//! Profiles as users write them: the documented example, and what a file must not say.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "test code")]

use std::path::Path;

use proptest::{prelude::*, sample::select};
use vfio::{
    console, iommu,
    pci::{
        self,
        life::{self, Answer},
    },
    sim::{Profile, ProfileError, Simulation},
};

fn refused(text: &str) -> String {
    let error = Profile::parse(text, Path::new("node.yaml")).unwrap_err();
    let text = error.to_string();
    assert!(!text.contains('\n'), "{text}");
    text
}

/// The complete example of the documentation, and that it shows every key.
#[test]
fn the_documented_example_is_a_profile() {
    let text =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/profiles.md")).unwrap();
    let example = text.split("```yaml\n").nth(1).unwrap().split("```").next().unwrap();
    let profile = Profile::parse(example, Path::new("docs/profiles.md")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let node = Simulation::create(dir.path(), &profile).unwrap();
    let read = pci::functions(node.host()).unwrap();
    assert_eq!((read.known.len(), read.unreadable.len()), (profile.functions.len(), 0));
    for key in [
        "name",
        "drivers",
        "cpus",
        "reserved",
        "functions",
        "address",
        "addresses",
        "groups",
        "group",
        "id",
        "class",
        "subsystem",
        "revision",
        "driver",
        "numa",
        "behind",
        "boot_vga",
        "framebuffer",
        "console",
        "answers",
        "reset_method",
        "bars",
        "vfs",
        "count",
        "offset",
        "stride",
        "device",
        "enabled",
    ] {
        assert!(example.contains(&format!("{key}:")), "the example lacks {key}");
        assert!(text.contains(&format!("`{key}`")), "the table lacks {key}");
    }
}

#[test]
fn what_does_not_fit_is_refused_with_file_and_line() {
    // Below `name` on line 1 and `functions` on line 2, the entry is line 3 on.
    let of = |entry: &str| refused(&format!("name: n\nfunctions:\n{entry}\n"));
    let gpu = |more: &str| {
        of(&format!("  - address: 0000:01:00.0\n    id: 10de:2236\n    class: 030200\n    {more}"))
    };
    let vfs = |more: &str| gpu(&format!("group: 1\n    vfs: {{{more}}}"));
    let mut wrong = Vec::new();
    for (found, line, said) in [
        (of("  - address: 01:00.0\n    id: 10de:2236\n    class: 030200"), 3, "0000:3b:00.0"),
        (
            of("  - addresses: [0000:01:00.0, 0000:02:20.0]\n    id: 10de:2236\n    class: 030200"),
            3,
            "\"0000:02:20.0\"",
        ),
        (of("  - address: 0000:0A:00.0\n    id: 10de:2236\n    class: 030200"), 3, "\"0000:0A:00.0\""),
        (of("  - address: 0000:01:00.0\n    id: 10de\n    class: 030200"), 4, "id: \"10de\""),
        (of("  - address: 0000:01:00.0\n    id: 10de:2236\n    class: 0302"), 5, "class: \"0302\""),
        (of("  - address: 0000:01:00.0\n    class: 030200"), 4, "id"),
        (of("  - id: 10de:2236\n    class: 030200"), 3, "has 0 of"),
        (
            of("  - address: 0000:01:00.0\n    addresses: []\n    id: 10de:2236\n    class: 030200"),
            3,
            "has 2 of",
        ),
        (of("  - groups: {x: [0000:01:00.0]}\n    id: 10de:2236\n    class: 030200"), 3, ""),
        (
            of("  - groups: {1: [0000:01:00.0]}\n    group: 2\n    id: 10de:2236\n    class: 030200"),
            4,
            "groups says each",
        ),
        (gpu("group: -1"), 6, ""),
        (gpu("group: 0000:01"), 6, ""),
        (gpu("numa: -2"), 6, "numa: \"-2\""),
        (gpu("revision: 256"), 6, "revision"),
        (gpu("subsystem: 10de"), 6, "subsystem"),
        (gpu("driver: nvida"), 6, "no driver \"nvida\": give one of nvidia, "),
        (gpu("colour: green"), 6, "colour"),
        (gpu("boot_vga: yes"), 6, ""),
        (gpu("boot_vga: true"), 6, "only a VGA controller"),
        (gpu("framebuffer: simpledrm"), 6, "prefetchable BAR"),
        (gpu("framebuffer: vesafb"), 6, "vesafb"),
        (gpu("reset_method: magic"), 6, "\"magic\""),
        (gpu("behind: 0000:00:01.0"), 6, "behind"),
        (gpu("behind: 0000:01:00.0"), 6, "behind"),
        (gpu("console: true"), 6, "give the function one"),
        (gpu("console: yes"), 6, ""),
        (gpu("answers: maybe"), 6, "7f for a header"),
        (gpu("framebuffer: efifb\n    bars: {1: 1M 64 prefetchable unassigned}"), 6, "prefetchable BAR"),
        (gpu("bars: {0: unassigned 1M}"), 6, "power of two"),
        (gpu("bars: {0: 1M unassigned unassigned}"), 6, "unassigned at the end"),
        (gpu("bars: {0: 3M}"), 6, "power of two"),
        (gpu("bars: {0: 2G}"), 6, "at most 1G"),
        (gpu("bars: {6: 1M}"), 6, "0 to 5"),
        (gpu("bars: {5: 1M 64}"), 6, "the next number too"),
        (gpu("bars: {0: 1M 64, 1: 1M}"), 6, "free"),
        (gpu("id: 10de:2236"), 6, "id"),
        (vfs("count: 0, offset: 4"), 7, "vfs.count"),
        (vfs("count: 4, offset: 0"), 7, "vfs.offset"),
        (vfs("count: 4, offset: 4, stride: 0"), 7, "vfs.stride"),
        (vfs("count: 4, offset: 4, enabled: 5, group: 9"), 7, "vfs.enabled"),
        (vfs("count: 4, offset: 4, enabled: 4"), 7, "vfs.group"),
        (vfs("count: 4, offset: 65535"), 7, "last address"),
        (vfs("count: 4"), 7, "offset"),
        (vfs("count: 4, offset: 4, device: 10de:2236"), 7, "vfs.device"),
        (gpu("vfs: {count: 4, offset: 4, group: 9}"), 6, "in no group"),
        (refused("name: n\ndrivers: [nvidia, nvida]\nfunctions: []\n"), 2, "\"nvida\""),
        (refused("name: n\ndrivers: [nvidia, nvidia]\nfunctions: []\n"), 2, "already"),
        (refused("name: HGX\nfunctions: []\n"), 1, "name: \"HGX\""),
        (refused("name: n\nname: m\nfunctions: []\n"), 2, "name"),
        (refused("name: n\ncpus: {0: 5-3}\nfunctions: []\n"), 2, "cpus"),
        (refused("name: n\nreserved: {1: [msi]}\nfunctions: []\n"), 2, "reserved: \"1\""),
        (
            refused(
                "name: n\nreserved: {1: [rmrr]}\nfunctions:\n  - {address: 0000:01:00.0, id: 10de:2236, class: 030200, group: 1}\n",
            ),
            2,
            "direct-relaxable",
        ),
        (refused("functions: []\n"), 1, "name"),
        (refused("name: n\n- x\n"), 2, ""),
    ] {
        if !found.starts_with(&format!("profile node.yaml:{line}")) || !found.contains(said) {
            wrong.push(format!("{line}, {said}: {found}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn what_two_entries_say_against_each_other_is_refused() {
    let two = |first: &str, second: &str, head: &str| {
        let entry = |at: &str| format!("  - {{id: 10de:2204, class: 030000, {at}}}\n");
        refused(&format!("name: n\n{head}functions:\n{}{}", entry(first), entry(second)))
    };
    let at = "address: 0000:01:00.0, group: 1";
    let found = two(at, at, "");
    assert!(found.starts_with("profile node.yaml:4: 0000:01:00.0 is there already (node.yaml:3)"), "{found}");
    let found = two(
        &format!("{at}, vfs: {{count: 8, offset: 4, enabled: 8, group: 9}}"),
        "address: 0000:01:01.0",
        "",
    );
    assert!(found.starts_with("profile node.yaml:4: 0000:01:01.0 is there already (node.yaml:3)"), "{found}");
    let boot = "boot_vga: true";
    let found = two(&format!("{at}, {boot}"), &format!("address: 0000:02:00.0, {boot}"), "");
    assert!(
        found.starts_with("profile node.yaml:4: boot_vga") && found.contains("another function"),
        "{found}"
    );
    let found = two(at, "address: 0000:02:00.0, driver: nvidia", "drivers: [vfio-pci]\n");
    assert!(found.starts_with("profile node.yaml:5: driver nvidia is not among"), "{found}");
    let found = two(at, "address: 0000:02:00.0, numa: 1", "cpus: {0: 0-3}\n");
    assert!(found.starts_with("profile node.yaml:5: numa: \"1\""), "{found}");
    let found = two(&format!("{at}, bars: {{0: 1G}}"), "address: 0000:02:00.0, bars: {0: 1G}", "");
    assert!(
        found.starts_with("profile node.yaml: the BARs do not fit") && found.contains("0000:02:00.0"),
        "{found}"
    );
    let circle = "name: n\nfunctions:\n  - {address: 0000:00:01.0, id: 8086:1901, class: 060400, behind: 0000:01:00.0}\n  \
                  - {address: 0000:01:00.0, id: 8086:1901, class: 060400, behind: 0000:00:01.0}\n";
    assert!(refused(circle).starts_with("profile node.yaml:3: behind"), "{}", refused(circle));
}

#[test]
fn a_profile_is_found_by_name_or_path() {
    let unknown = Profile::find("hgx-h300").unwrap_err().to_string();
    for name in Profile::built_in().iter().map(|profile| &profile.name) {
        assert!(unknown.contains(name.as_str()), "{unknown}");
    }
    assert!(matches!(Profile::find("./nosuch.yaml"), Err(ProfileError::Read { .. })));
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("profiles/hgx-h100.yaml");
    assert_eq!(Profile::find(file.to_str().unwrap()).unwrap(), Profile::find("hgx-h100").unwrap());
}

/// What is wrong with a node is read back as it is on a real one.
#[test]
fn faults_of_a_node_can_be_laid() {
    const TEXT: &str = "
name: faults
reserved: {11: [msi, direct-relaxable, direct], 12: []}
functions:
  - {groups: {11: [0000:21:00.0], 12: [0000:22:00.0], 13: [0000:23:00.0]}, id: 10de:20b5, class: 030200, subsystem: 10de:1533}
  - address: 0000:31:00.0
    id: 10de:2204
    class: 030000
    group: 14
    driver: nvidia
    console: true
    bars: {0: 16M unassigned, 1: 256M 64 prefetchable unassigned, 3: 32M 64 prefetchable, 5: 128 io}
  - {address: 0000:41:00.0, id: 10de:20b5, class: 030200, group: 15, answers: false}
  - {address: 0000:42:00.0, id: 10de:20b5, class: 030200, group: 16, answers: 7f}
";
    let dir = tempfile::tempdir().unwrap();
    let profile = Profile::parse(TEXT, Path::new("node.yaml")).unwrap();
    let node = Simulation::create(dir.path(), &profile).unwrap();
    let host = node.host();
    let at = |text: &str| text.parse().unwrap();

    let functions = pci::functions(host).unwrap();
    let groups = iommu::groups(host, &functions).unwrap();
    let kinds = |id: u32| groups[&id].reserved.iter().map(|region| region.kind.as_str()).collect::<Vec<_>>();
    assert_eq!(kinds(11), ["direct", "direct-relaxable", "msi"]);
    assert_eq!((kinds(12), kinds(13)), (Vec::new(), vec!["msi"]));
    let forbidden: Vec<_> =
        groups.values().filter(|group| group.forbids_vms()).map(|group| group.id).collect();
    assert_eq!(forbidden, [11]);
    let text = std::fs::read_to_string(host.sys("kernel/iommu_groups/13/reserved_regions")).unwrap();
    assert_eq!(text, "0x00000000fee00000 0x00000000feefffff msi\n");

    assert_eq!(
        functions.known[&at("0000:21:00.0")].identity().to_string(),
        "10de:20b5 (subsystem 10de:1533, class 030200)"
    );
    let card = &functions.known[&at("0000:31:00.0")];
    assert_eq!(card.unassigned_bars, [0, 1]);
    let bars = pci::details(host, card, false).bars.unwrap();
    let sizes: Vec<_> = bars.iter().map(|bar| (bar.size, bar.assigned)).collect();
    assert_eq!(sizes, [(16 << 20, false), (256 << 20, false), (32 << 20, true), (128, true)]);

    let found = console::consoles(host);
    let framebuffers = &found.by_function[&at("0000:31:00.0")].framebuffers;
    assert_eq!((found.by_function.len(), found.unknown.as_deref()), (1, None));
    assert!(framebuffers.contains("fb0"), "{framebuffers:?}");

    for (function, answer) in [
        ("0000:21:00.0", Answer::Answers),
        ("0000:41:00.0", Answer::AllOnes),
        ("0000:42:00.0", Answer::HeaderType7f),
    ] {
        assert_eq!(life::look(host, at(function), false), answer, "{function}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    /// A slip of the hand gives a profile that can be laid, or an error; never a panic.
    #[test]
    fn no_file_makes_it_panic(
        name in select(Profile::built_in().into_iter().map(|profile| profile.name).collect::<Vec<_>>()),
        at: prop::sample::Index,
        length in 0_usize..12,
        typed in "[0-9a-f:.,{}\\[\\] \n*&-]{0,6}|18446744073709551615|4294967295|65535|-1|ffff",
    ) {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("profiles/{name}.yaml"));
        let text: Vec<char> = std::fs::read_to_string(file).unwrap().chars().collect();
        let start = at.index(text.len());
        let end = (start + length).min(text.len());
        let edited: String = text[..start].iter().copied().chain(typed.chars()).chain(text[end..].iter().copied()).collect();
        if let Err(error) = Profile::parse(&edited, Path::new("node.yaml")) {
            prop_assert!(error.to_string().starts_with("profile node.yaml"), "{error}");
        }
    }
}
