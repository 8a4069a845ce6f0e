//! Boot framebuffers: which function's BAR still belongs to the picture that the firmware drew.
//!
//! The kernel keeps the firmware's framebuffer as a region `BOOTFB` inside a display function's BAR (drivers/firmware/sysfb.c),
//! and a driver may claim it. A bind to vfio-pci succeeds all the same, but a VM that opens the function cannot have that BAR
//! ("cannot reserve [mem ...]"). The region has no link to a driver: `/proc/iomem` is the one place that always shows it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, io,
};

use serde::Serialize;

use crate::{
    host::{Host, ReadError},
    pci::Address,
    printable::printable,
};

/// How framebuffer drivers, and the kernel itself, name their regions in `/proc/iomem`: `BOOTFB`
/// (drivers/firmware/sysfb_simplefb.c), `efifb`, `vesafb`, `simplefb` (drivers/video/fbdev), `simpledrm`, `efidrm`, `vesadrm`
/// (drivers/gpu/drm/sysfb, by the name of the DRM driver), and the names of their platform devices.
const REGIONS: [&str; 11] = [
    "BOOTFB",
    "efi-framebuffer",
    "efidrm",
    "efifb",
    "ofdrm",
    "simple-framebuffer",
    "simpledrm",
    "simplefb",
    "vesa-framebuffer",
    "vesadrm",
    "vesafb",
];

/// The platform drivers of those; simplefb and simpledrm share one name.
const PLATFORM_DRIVERS: [&str; 4] =
    ["efi-framebuffer", "simple-framebuffer", "simpledrm", "vesa-framebuffer"];

/// A platform device of the firmware's framebuffer, bound to a driver.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct PlatformDevice {
    /// The driver, by its directory below `/sys/bus/platform/drivers`.
    pub driver: String,
    /// The device (`simple-framebuffer.0`).
    pub device: String,
}

/// What holds a function's BAR.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default, Serialize)]
pub struct Claim {
    /// The regions inside the BAR, from the outermost on: `BOOTFB`, `simpledrm`.
    pub regions: Vec<String>,
    /// The platform devices that are known to be this function's.
    pub devices: BTreeSet<PlatformDevice>,
}

impl Claim {
    fn names(&self) -> impl Iterator<Item = &str> {
        self.regions.iter().map(String::as_str).chain(self.devices.iter().map(|bound| bound.driver.as_str()))
    }

    /// The kernel parameter that keeps this holder away: a driver's own switch, or for what has none the one that keeps the
    /// kernel from making the framebuffer at all.
    #[must_use]
    pub fn kernel_parameter(&self) -> &'static str {
        // `video=NAME:off` is fbdev's (fb_get_options); the DRM drivers do not listen to it.
        if self.names().any(|name| matches!(name, "efifb")) {
            "video=efifb:off"
        } else if self.names().any(|name| matches!(name, "vesafb")) {
            "video=vesafb:off"
        } else {
            "initcall_blacklist=sysfb_init"
        }
    }

    /// What to do.
    #[must_use]
    pub fn cure(&self) -> String {
        format!(
            "add {} to the kernel command line and restart the node, or let the firmware use another card (the board's own \
             VGA) for its display",
            self.kernel_parameter()
        )
    }
}

impl fmt::Display for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the boot framebuffer ")?;
        if self.regions.is_empty() {
            let devices: Vec<_> = self.devices.iter().map(|bound| bound.device.as_str()).collect();
            write!(f, "{} holds one of its BARs", devices.join(", "))
        } else {
            write!(f, "{} holds one of its BARs", self.regions.join(" > "))
        }
    }
}

/// All boot framebuffers of a node.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Framebuffers {
    /// The functions whose BAR is held, each with what holds it.
    pub by_function: BTreeMap<Address, Claim>,
    /// Bound platform devices of which no path says whose they are; `/proc/iomem` shows the BAR that they hold, if it is one.
    pub unplaced: BTreeSet<PlatformDevice>,
    /// Why `/proc/iomem` could not be read, where it is there.
    pub unknown: Option<String>,
}

/// Reads which boot framebuffers `host` has.
#[must_use]
pub fn framebuffers(host: &Host) -> Framebuffers {
    let mut found = Framebuffers::default();
    match host.read_if_there(&host.proc("iomem")) {
        Ok(text) => {
            for (address, regions) in regions(&text.unwrap_or_default()) {
                found.by_function.entry(address).or_default().regions = regions;
            }
        }
        Err(error) => found.unknown = Some(error.to_string()),
    }
    for driver in PLATFORM_DRIVERS {
        let dir = host.sys("bus/platform/drivers").join(driver);
        match host.list(&dir) {
            Ok(names) => {
                // Beside its files (bind, unbind, uevent, module) a driver has a link for each device: NAME.NUMBER.
                for device in names.into_iter().filter(|name| name.contains("framebuffer.")) {
                    let path = host.real_path(&dir.join(&device)).ok().flatten().unwrap_or_default();
                    let bound = PlatformDevice { driver: driver.to_owned(), device: printable(&device) };
                    // Since Linux 6.9 the device is below its PCI function (`sysfb_parent_dev`).
                    match path.iter().rev().find_map(|name| name.to_str()?.parse().ok()) {
                        Some(address) => {
                            found.by_function.entry(address).or_default().devices.insert(bound);
                        }
                        None => {
                            found.unplaced.insert(bound);
                        }
                    }
                }
            }
            Err(error) => note(&mut found.unknown, &error),
        }
    }
    found
}

fn note(unknown: &mut Option<String>, error: &ReadError) {
    if error.kind() != io::ErrorKind::NotFound && unknown.is_none() {
        *unknown = Some(error.to_string());
    }
}

/// The framebuffer regions inside the BARs of each function, by the text of `/proc/iomem`.
///
/// Only nesting and names count (two blanks a level, `r_show`, kernel/resource.c): an unprivileged reader sees zeros for every
/// address.
#[must_use]
pub fn regions(iomem: &str) -> BTreeMap<Address, Vec<String>> {
    let mut found: BTreeMap<Address, Vec<String>> = BTreeMap::new();
    // The regions around the line that is being read: each one's depth, and the function whose BAR it is or lies in.
    let mut around: Vec<(usize, Option<Address>)> = Vec::new();
    for line in iomem.lines() {
        let Some((range, name)) = line.split_once(" : ") else { continue };
        let depth = range.len() - range.trim_start_matches(' ').len();
        let name = name.trim();
        while around.last().is_some_and(|(outer, _)| *outer >= depth) {
            around.pop();
        }
        let outer = around.last().and_then(|(_, function)| *function);
        if let Some(function) = outer.filter(|_| is_framebuffer(name)) {
            let regions = found.entry(function).or_default();
            if !regions.iter().any(|region| region == name) {
                regions.push(name.to_owned());
            }
        }
        around.push((depth, name.parse().ok().or(outer)));
    }
    found
}

fn is_framebuffer(name: &str) -> bool {
    let device = name.split_once('.').map_or(name, |(device, _)| device);
    REGIONS.contains(&device)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink, path::Path};

    use proptest::prelude::*;

    use super::*;

    /// As root sees it: the GPU is the firmware's display, and simpledrm draws on it.
    const SIMPLEDRM: &str = "\
00000000-00000fff : Reserved
00001000-0009ffff : System RAM
c0000000-dfffffff : PCI Bus 0000:c0
  d0000000-dbffffff : PCI Bus 0000:c3
    d0000000-d0ffffff : 0000:c3:00.0
    d1000000-d107ffff : 0000:c3:00.0
    d2000000-d2003fff : 0000:c3:00.1
      d2000000-d2003fff : ICH HD audio
3c000000000-3cfffffffff : PCI Bus 0000:c0
  3c000000000-3c811ffffff : PCI Bus 0000:c3
    3c000000000-3c7ffffffff : 0000:c3:00.0
      3c000000000-3c0007e8fff : BOOTFB
        3c000000000-3c0007e8fff : simpledrm
    3c810000000-3c811ffffff : 0000:c3:00.0
fee00000-fee00fff : Local APIC
  fee00000-fee00fff : Reserved
";

    /// As others see it: no address, and a driver on another BAR of the function.
    const EFIFB: &str = "\
00000000-00000000 : PCI Bus 0000:00
  00000000-00000000 : PCI Bus 0000:01
    00000000-00000000 : 0000:01:00.0
      00000000-00000000 : nvidia
    00000000-00000000 : 0000:01:00.0
      00000000-00000000 : efifb
    00000000-00000000 : 0000:01:00.1
00000000-00000000 : 0000:04:00.0
  00000000-00000000 : ast
";

    /// Nobody draws: the region alone keeps the BAR.
    const NO_DRIVER: &str = "\
e0000000-efffffff : 0000:02:00.0
  e0000000-e02fffff : BOOTFB
";

    fn function(text: &str) -> Address {
        text.parse().unwrap()
    }

    #[test]
    fn nesting_and_names_say_whose_bar_is_held() {
        for (text, address, expected) in [
            (SIMPLEDRM, "0000:c3:00.0", &["BOOTFB", "simpledrm"][..]),
            (EFIFB, "0000:01:00.0", &["efifb"]),
            (NO_DRIVER, "0000:02:00.0", &["BOOTFB"]),
        ] {
            let found = regions(text);
            assert_eq!(found.len(), 1, "{found:?}");
            assert_eq!(found[&function(address)], expected);
        }
        // A framebuffer that is in no BAR, and a node without one.
        assert!(regions("80000000-802fffff : BOOTFB\n").is_empty());
        assert!(regions("e0000000-efffffff : 0000:02:00.0\ne0000000-e02fffff : BOOTFB\n").is_empty());
        assert!(regions("").is_empty());
    }

    #[test]
    fn the_cure_is_the_holders_own() {
        let cure = |regions: &[&str]| {
            let claim =
                Claim { regions: regions.iter().map(|r| (*r).to_owned()).collect(), ..Claim::default() };
            claim.kernel_parameter()
        };
        assert_eq!(cure(&["efifb"]), "video=efifb:off");
        assert_eq!(cure(&["BOOTFB", "efifb"]), "video=efifb:off");
        assert_eq!(cure(&["vesafb"]), "video=vesafb:off");
        for regions in [&["BOOTFB"][..], &["BOOTFB", "simpledrm"], &["BOOTFB", "simplefb"], &["efidrm"]] {
            assert_eq!(cure(regions), "initcall_blacklist=sysfb_init", "{regions:?}");
        }
    }

    #[test]
    fn a_bound_platform_device_is_its_functions_where_its_path_says_so() {
        let tree = tempfile::tempdir().unwrap();
        let root = tree.path();
        let driver = root.join("sys/bus/platform/drivers/simple-framebuffer");
        let below = "sys/devices/pci0000:c0/0000:c0:01.0/0000:c3:00.0/simple-framebuffer.0";
        fs::create_dir_all(root.join(below)).unwrap();
        fs::create_dir_all(root.join("sys/devices/platform/efi-framebuffer.0")).unwrap();
        fs::create_dir_all(&driver).unwrap();
        fs::create_dir_all(driver.with_file_name("efi-framebuffer")).unwrap();
        // An absolute link is meant below the root.
        symlink(Path::new("/").join(below), driver.join("simple-framebuffer.0")).unwrap();
        symlink("../../../../devices/platform", driver.join("module")).unwrap();
        symlink(
            "../../../../devices/platform/efi-framebuffer.0",
            driver.with_file_name("efi-framebuffer").join("efi-framebuffer.0"),
        )
        .unwrap();
        let found = framebuffers(&Host::at(root).unwrap());
        let claim = &found.by_function[&function("0000:c3:00.0")];
        assert_eq!(claim.to_string(), "the boot framebuffer simple-framebuffer.0 holds one of its BARs");
        assert_eq!(claim.kernel_parameter(), "initcall_blacklist=sysfb_init");
        let unplaced: Vec<_> = found.unplaced.iter().map(|bound| bound.device.as_str()).collect();
        assert_eq!(unplaced, ["efi-framebuffer.0"]);
        assert_eq!(found.unknown, None);
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in "(?s).{0,400}") {
            let _ = regions(&text);
        }

        #[test]
        fn any_nesting_is_survived(lines in prop::collection::vec((0_usize..20, 0_usize..4), 0..40)) {
            let names = ["BOOTFB", "0000:c3:00.0", "simpledrm", "PCI Bus 0000:c0"];
            let line = |(depth, name): &(usize, usize)| format!("{}0-0 : {}\n", " ".repeat(*depth), names[*name]);
            let found = regions(&lines.iter().map(line).collect::<String>());
            prop_assert!(found.keys().all(|address| address.to_string() == "0000:c3:00.0"));
        }
    }
}
