//! Resource names against what NVIDIA's own plugins make of the same pci.ids.

use decide::{
    consumer::Consumer,
    names::{Alias, Aliases, NameFault, Names, OfferedRole, Prefer, kata_suffix, kubevirt_suffix},
};

const NVIDIA: u16 = 0x10de;
const GOLDEN: &str = include_str!("data/resource-names.tsv");

fn per_model() -> Aliases {
    Aliases { gpu: Alias::PerModel, nvswitch: Alias::PerModel }
}

/// The name as offered, or the refused one as shown.
fn shown(names: &Names, consumer: Consumer, device: u16) -> (String, Option<NameFault>) {
    match names.resource(consumer, OfferedRole::Gpu, NVIDIA, device, &per_model()) {
        Ok(name) => (name.to_string(), None),
        Err(error) => (error.name, Some(error.fault)),
    }
}

#[test]
fn every_golden_row_for_both_consumers() {
    let names = Names::builtin();
    let (mut rows, mut refused, mut differing) = (0, Vec::new(), Vec::new());
    for line in GOLDEN.lines().filter(|line| !line.starts_with('#')) {
        let [id, text, kubevirt, kata] = line.split('\t').collect::<Vec<_>>()[..] else {
            panic!("not four columns: {line:?}");
        };
        let device = u16::from_str_radix(id, 16).unwrap();
        rows += 1;
        let (for_kubevirt, kubevirt_fault) = shown(&names, Consumer::Kubevirt, device);
        let (for_kata, kata_fault) = shown(&names, Consumer::Kata, device);
        if kubevirt_fault.is_some() || kata_fault.is_some() {
            refused.push((device, kubevirt_fault, kata_fault));
        }
        let same = names.device(NVIDIA, device) == Some(text)
            && for_kubevirt == format!("nvidia.com/{kubevirt}")
            && for_kata == format!("nvidia.com/{kata}");
        if !same {
            let database = names.device(NVIDIA, device);
            differing.push(format!("{line:?}\n  database {database:?}, {for_kubevirt}, {for_kata}"));
        }
    }
    println!("{rows} golden rows, {} of them refused as names", refused.len());
    assert_eq!(rows, 966, "the golden file is cut short");
    assert!(
        differing.is_empty(),
        "{} of {rows} rows differ; all at once means that the built-in database is not pci.ids 2025.07.11: the build \
         script of the pci-ids crate replaces it with today's when curl gets through (see the Makefile)\n{}",
        differing.len(),
        differing[..differing.len().min(20)].join("\n")
    );
    // "GA104 [RTX A4500 Embedded GPU ]": the blank before the bracket becomes a last `_`.
    assert_eq!(refused, [(0x24fa, Some(NameFault::Edge('_')), Some(NameFault::Edge('_')))]);
}

/// Asserted by the plugins' own unit tests.
#[test]
fn sanitising_as_the_plugins_own_tests_have_it() {
    for (name, expected) in [
        ("GK104GL [GRID K520]", "GK104GL_GRID_K520"),
        ("gk104gl [grid k520]", "GK104GL_GRID_K520"),
        ("gk104.gl [grid/k./520]", "GK104_GL_GRID_K__520"),
        ("geforce gtx 1080", "GEFORCE_GTX_1080"),
        ("GK104.GL [GRID/K520]", "GK104_GL_GRID_K520"),
        ("GeForce   GTX  1080", "GEFORCE_GTX_1080"),
        ("Device [Name] (Rev A)", "DEVICE_NAME_REV_A"),
        ("NVIDIA H100 PCIe [Hopper]", "NVIDIA_H100_PCIE_HOPPER"),
        ("", ""),
    ] {
        assert_eq!(kubevirt_suffix(name), expected, "{name:?}");
        assert_eq!(kata_suffix(name), expected, "{name:?}");
    }
}

/// Seen when the plugins were run on pci.ids 2025.07.11.
#[test]
fn names_from_the_built_in_database() {
    let names = Names::builtin();
    for (device, kubevirt, kata) in [
        (0x2331, "GH100_H100_PCIE", "GH100_H100_PCIE"), // Intel has a 2331 too, earlier in the file
        (0x1b38, "GP102GL_TESLA_P40", "GP102GL_TESLA_P40"),
        (0x1e30, "TU102GL_QUADRO_RTX_6000_8000", "TU102GL_QUADRO_RTX_6000_8000"),
        (0x20b1, "GA100_A100_PCIE_40GB", "GA100_A100_PCIE_40GB"),
        (0x20f1, "GA100_A100_PCIE_40GB", "GA100_A100_PCIE_40GB"),
        (0x2335, "GH100_H200_SXM_141GB", "GH100_H200_SXM_141GB"),
        (0x2342, "GH100_GH200_120GB___480GB", "GH100_GH200_120GB___480GB"),
        (0x2941, "GB100_HGX_GB200", "GB100_HGX_GB200"),
        (0x22a3, "GH100_H100_NVSWITCH", "GH100_H100_NVSWITCH"),
        (
            0x2bb4,
            "GB202GL_RTX_PRO_6000_BLACKWELL_MAXQ_WORKSTATION_EDITION",
            "GB202GL_RTX_PRO_6000_BLACKWELL_MAX-Q_WORKSTATION_EDITION",
        ),
        (0x2c2c, "GB6256N22WESA1", "GB6-256N22W-ES-A1"),
        (0xabcd, "abcd", "abcd"),
        (0xffff, "ffff", "ffff"),
    ] {
        assert_eq!(shown(&names, Consumer::Kubevirt, device), (format!("nvidia.com/{kubevirt}"), None));
        assert_eq!(shown(&names, Consumer::Kata, device), (format!("nvidia.com/{kata}"), None));
    }
}

#[test]
fn a_refused_name_is_shown_as_it_is() {
    let names = Names::builtin();
    for consumer in [Consumer::Kubevirt, Consumer::Kata] {
        let expected = ("nvidia.com/GA104_RTX_A4500_EMBEDDED_GPU_".to_owned(), Some(NameFault::Edge('_')));
        assert_eq!(shown(&names, consumer, 0x24fa), expected);
        let (name, fault) = shown(&names, consumer, 0x05be);
        assert!(matches!(fault, Some(NameFault::TooLong(81))), "{name}: {fault:?}");
    }
}

#[test]
fn without_aliases_kata_offers_pgpu_and_nvswitch() {
    let names = Names::builtin();
    for (role, device, expected) in [
        (OfferedRole::Gpu, 0x2330, "nvidia.com/pgpu"),
        (OfferedRole::Gpu, 0xffff, "nvidia.com/pgpu"),
        (OfferedRole::NvSwitch, 0x22a3, "nvidia.com/nvswitch"),
    ] {
        let name = names.resource(Consumer::Kata, role, NVIDIA, device, &Aliases::default());
        assert_eq!(name.unwrap().as_str(), expected);
    }
}

/// A name that Kubernetes refuses is cured as the refusal says.
#[test]
fn a_node_file_cures_a_refused_name() {
    let text = "10de  NVIDIA Corporation\n\t24fa  GA104 [RTX A4500 Embedded GPU]\n";
    let cured = Names::with_node_file(text, Prefer::NodeFile);
    let expected = ("nvidia.com/GA104_RTX_A4500_EMBEDDED_GPU".to_owned(), None);
    assert_eq!(shown(&cured, Consumer::Kubevirt, 0x24fa), expected);
}
