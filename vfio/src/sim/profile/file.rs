//! What is checked of a file, and the profile that it makes.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use serde_saphyr::{Location, Spanned, UserMessageFormatter};

use super::{
    DRIVERS, Place, Profile, ProfileError, ProfileFunction, memory,
    spelling::{Entry, File, Vfs, line, refuse},
    values,
};
use crate::{pci::Address, sim::drivers};

pub(super) fn parse(text: &str, path: &Path) -> Result<Profile, ProfileError> {
    let options = serde_saphyr::options! { strict_booleans: true };
    let file = serde_saphyr::from_str_with_options::<File>(text, options).map_err(|error| {
        // The snippet of several lines is for terminals; this text is one line.
        let reason = error.without_snippet().render_with_formatter(&UserMessageFormatter);
        let words: Vec<_> = reason.split_whitespace().collect();
        ProfileError::Parse { place: Place::new(path, error.location()), reason: words.join(" ") }
    })?;
    let name = file.name.value.clone();
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if name.is_empty() || !name.chars().all(fits) {
        return Err(refuse(path, &file.name, "name", "small letters, digits and dashes, such as hgx-h100"));
    }
    let mut reader = Reader { path, loaded: None, seen: BTreeMap::new(), functions: Vec::new() };
    reader.loaded = file.drivers.map(|drivers| reader.drivers(drivers)).transpose()?;
    for entry in &file.functions {
        reader.entry(entry)?;
    }
    reader.behind(&file.functions)?;
    let Reader { loaded, mut functions, .. } = reader;
    functions.sort_by_key(|function| function.address);
    memory::assign(&functions).map_err(|address| ProfileError::NoRoom { path: path.to_owned(), address })?;
    let numa_cpus = numa_cpus(path, file.cpus, &functions, &file.functions)?;
    let reserved = values::reserved(path, file.reserved, &functions)?;
    let bound = functions.iter().filter_map(|function| function.driver.clone());
    let drivers = loaded
        .unwrap_or_else(|| DRIVERS.into_iter().map(str::to_owned).chain(bound).collect::<BTreeSet<_>>());
    Ok(Profile { name, functions, drivers: drivers.into_iter().collect(), numa_cpus, reserved })
}

struct Reader<'a> {
    path: &'a Path,
    /// The drivers that the file names; none where it leaves them out.
    loaded: Option<BTreeSet<String>>,
    seen: BTreeMap<Address, Location>,
    functions: Vec<ProfileFunction>,
}

impl Reader<'_> {
    fn place(&self, at: Location) -> Place {
        Place::new(self.path, Some(at))
    }

    fn misplaced<T>(&self, given: &Spanned<T>, key: &'static str, reason: &'static str) -> ProfileError {
        ProfileError::Misplaced { place: self.place(line(given)), key, reason }
    }

    fn drivers(&self, names: Vec<Spanned<String>>) -> Result<BTreeSet<String>, ProfileError> {
        let mut loaded = BTreeSet::new();
        for name in names {
            self.known(&name)?;
            if !loaded.insert(name.value.clone()) {
                return Err(self.misplaced(&name, "drivers", "it names this driver already"));
            }
        }
        Ok(loaded)
    }

    fn known(&self, driver: &Spanned<String>) -> Result<(), ProfileError> {
        if drivers::knows(&driver.value) {
            return Ok(());
        }
        let (place, driver) = (self.place(line(driver)), driver.value.clone());
        Err(ProfileError::UnknownDriver { place, driver, known: drivers::names().join(", ") })
    }

    fn driver(&self, given: Option<&Spanned<String>>) -> Result<Option<String>, ProfileError> {
        let Some(driver) = given else { return Ok(None) };
        self.known(driver)?;
        if self.loaded.as_ref().is_some_and(|loaded| !loaded.contains(&driver.value)) {
            let (place, driver) = (self.place(line(driver)), driver.value.clone());
            return Err(ProfileError::NotLoaded { place, driver });
        }
        Ok(Some(driver.value.clone()))
    }

    fn add(&mut self, function: ProfileFunction, at: Location) -> Result<(), ProfileError> {
        let address = function.address;
        if let Some(first) = self.seen.insert(address, at) {
            let (place, first) = (self.place(at), self.place(first));
            return Err(ProfileError::Duplicate { place, address, first });
        }
        self.functions.push(function);
        Ok(())
    }

    /// Where an entry's functions are, each with its group and line.
    fn addresses(
        &self,
        entry: &Spanned<Entry>,
    ) -> Result<Vec<(Address, Option<u32>, Location)>, ProfileError> {
        let Entry { address, addresses, groups, group, .. } = &entry.value;
        let count =
            [address.is_some(), addresses.is_some(), groups.is_some()].into_iter().filter(|g| *g).count();
        if count != 1 {
            return Err(ProfileError::Addresses { place: self.place(line(entry)), count });
        }
        if let (Some(group), Some(_)) = (group, groups) {
            return Err(self.misplaced(group, "group", "groups says each function's group already"));
        }
        let shared = group.as_ref().map(|group| group.value);
        let listed = address.iter().chain(addresses.iter().flatten()).map(|given| (given, shared));
        let grouped = groups.iter().flatten();
        let grouped = grouped.flat_map(|(group, given)| given.iter().map(|given| (given, Some(*group))));
        listed
            .chain(grouped)
            .map(|(given, group)| Ok((values::address(self.path, given, "address")?, group, line(given))))
            .collect()
    }

    fn entry(&mut self, entry: &Spanned<Entry>) -> Result<(), ProfileError> {
        let path = self.path;
        let given = &entry.value;
        let (vendor, device) = values::ids(path, &given.id, "id")?;
        let class = values::class(path, &given.class)?;
        let subsystem =
            given.subsystem.as_ref().map(|ids| values::ids(path, ids, "subsystem")).transpose()?;
        let revision = given.revision.as_ref().map(|text| values::revision(path, text)).transpose()?;
        let numa = given.numa.as_ref().map(|numa| values::numa(path, numa)).transpose()?.unwrap_or(-1);
        let reset = given.reset_method.as_ref().map(|text| values::reset_method(path, text)).transpose()?;
        let behind = given.behind.as_ref().map(|at| values::address(path, at, "behind")).transpose()?;
        let driver = self.driver(given.driver.as_ref())?;
        let bars = values::bars(path, given.bars.as_ref())?;
        let framebuffer = given.framebuffer.as_ref().map(|framebuffer| framebuffer.value);
        let answers = given.answers.as_ref().map(|text| values::answers(path, text)).transpose()?;
        let places = self.addresses(entry)?;
        for (nth, (address, group, at)) in (0_u32..).zip(places) {
            let function = ProfileFunction {
                subsystem: subsystem.unwrap_or_default(),
                revision: revision.unwrap_or_default(),
                driver: driver.clone(),
                group,
                numa,
                behind,
                boot_vga: given.boot_vga.as_ref().is_some_and(|boot_vga| boot_vga.value),
                framebuffer,
                console: given.console.as_ref().is_some_and(|console| console.value),
                answers: answers.unwrap_or_default(),
                reset_method: reset.clone(),
                bars: bars.clone(),
                ..ProfileFunction::new(address, vendor, device, class)
            };
            self.console(given, &function)?;
            match &given.vfs {
                Some(vfs) => self.with_vfs(function, vfs, nth, at)?,
                None => self.add(function, at)?,
            }
        }
        Ok(())
    }

    /// At most one function has the firmware's console, and only where a firmware could have it; the kernel's needs a driver.
    fn console(&self, given: &Entry, function: &ProfileFunction) -> Result<(), ProfileError> {
        let taken = |of: fn(&ProfileFunction) -> bool| self.functions.iter().any(of);
        if let Some(boot_vga) = given.boot_vga.as_ref().filter(|boot_vga| boot_vga.value) {
            if !function.is_vga() {
                return Err(self.misplaced(
                    boot_vga,
                    "boot_vga",
                    "only a VGA controller (class 0300xx) has it",
                ));
            }
            if taken(|other| other.boot_vga) {
                return Err(self.misplaced(boot_vga, "boot_vga", "another function has the console already"));
            }
        }
        if let Some(console) = given.console.as_ref().filter(|console| console.value)
            && function.driver.is_none()
        {
            let reason = "its framebuffer device is the driver's: give the function one";
            return Err(self.misplaced(console, "console", reason));
        }
        if let Some(framebuffer) = &given.framebuffer {
            if memory::framebuffer_bar(function).is_none() {
                let reason = "it lies in a prefetchable BAR, and this function has none: give it one in bars";
                return Err(self.misplaced(framebuffer, "framebuffer", reason));
            }
            if taken(|other| other.framebuffer.is_some()) {
                return Err(self.misplaced(framebuffer, "framebuffer", "another function has it already"));
            }
        }
        Ok(())
    }

    /// A physical function and its enabled VFs. It is the `nth` of its entry: the groups of VFs count on.
    fn with_vfs(
        &mut self,
        mut physfn: ProfileFunction,
        given: &Spanned<Vfs>,
        nth: u32,
        at: Location,
    ) -> Result<(), ProfileError> {
        let vfs = &given.value;
        let sriov = values::sriov(self.path, &physfn, vfs)?;
        let enabled = vfs.enabled.as_ref().map_or(0, |enabled| enabled.value);
        let driver = self.driver(vfs.driver.as_ref())?;
        let numa = vfs.numa.as_ref().map(|numa| values::numa(self.path, numa)).transpose()?;
        if let (Some(group), None) = (&vfs.group, physfn.group) {
            return Err(self.misplaced(group, "vfs.group", "the physical function is in no group"));
        }
        if enabled > 0 && physfn.group.is_some() && vfs.group.is_none() {
            let reason = "enabled VFs need vfs.group, the first one's group; each has a group of its own";
            return Err(self.misplaced(given, "vfs.enabled", reason));
        }
        let (pf, pf_numa, behind) = (physfn.address, physfn.numa, physfn.behind);
        let taken = nth.saturating_mul(u32::from(enabled));
        let first_group = vfs.group.as_ref().map(|group| group.value.saturating_add(taken));
        let template = ProfileFunction {
            physfn: Some(pf),
            driver,
            numa: numa.unwrap_or(pf_numa),
            behind,
            subsystem: physfn.subsystem,
            revision: physfn.revision,
            reset_method: Some("flr".to_owned()),
            bars: sriov.bars.clone(),
            ..ProfileFunction::new(pf, physfn.vendor, sriov.device, physfn.class)
        };
        let (offset, stride) = (u32::from(sriov.offset), u32::from(sriov.stride));
        let place = |number: u32| pf.further(offset.saturating_add(stride.saturating_mul(number)));
        if place(u32::from(sriov.total).saturating_sub(1)).is_none() {
            return Err(self.misplaced(
                given,
                "vfs",
                "the last of them would be past the domain's last address",
            ));
        }
        physfn.sriov = Some(sriov);
        self.add(physfn, at)?;
        for number in 0..u32::from(enabled) {
            let Some(address) = place(number) else { continue };
            let group = first_group.map(|first| first.saturating_add(number));
            self.add(ProfileFunction { address, group, ..template.clone() }, at)?;
        }
        Ok(())
    }

    /// What a function is behind must be a bridge on its way to the root, or the controller that made its domain.
    fn behind(&self, entries: &[Spanned<Entry>]) -> Result<(), ProfileError> {
        let by_address: BTreeMap<Address, &ProfileFunction> =
            self.functions.iter().map(|function| (function.address, function)).collect();
        for entry in entries {
            let Some(given) = &entry.value.behind else { continue };
            for (address, ..) in self.addresses(entry)? {
                Self::way_to_root(address, &by_address)
                    .ok_or_else(|| refuse(self.path, given, "behind", BEHIND))?;
            }
        }
        Ok(())
    }

    /// Follows `behind` up; nothing where it goes in circles, or over what is no bridge within one domain.
    fn way_to_root(from: Address, all: &BTreeMap<Address, &ProfileFunction>) -> Option<()> {
        let mut here = from;
        for _ in 0..=all.len() {
            let Some(above) = all.get(&here)?.behind else { return Some(()) };
            let same_domain = above.domain() == here.domain();
            if same_domain && !all.get(&above)?.is_bridge() {
                return None;
            }
            here = above;
        }
        None
    }
}

const BEHIND: &str = "the address of a bridge (class 060400) of this profile that is not behind this function itself, or of \
                      the controller that made the function's domain";

/// The CPUs of each NUMA node; sixteen a node where the file leaves them out.
fn numa_cpus(
    path: &Path,
    given: Option<BTreeMap<u32, Spanned<String>>>,
    functions: &[ProfileFunction],
    entries: &[Spanned<Entry>],
) -> Result<BTreeMap<u32, String>, ProfileError> {
    let Some(given) = given else {
        let last = functions.iter().filter_map(|function| u32::try_from(function.numa).ok()).max();
        let cpus = |node: u32| format!("{}-{}", node * 16, node * 16 + 15);
        return Ok((0..=last.unwrap_or(0)).map(|node| (node, cpus(node))).collect());
    };
    let there =
        |numa: &Spanned<i32>| u32::try_from(numa.value).map_or(true, |node| given.contains_key(&node));
    for entry in entries {
        let of_vfs = entry.value.vfs.as_ref().and_then(|vfs| vfs.value.numa.as_ref());
        for numa in entry.value.numa.iter().chain(of_vfs) {
            if !there(numa) {
                return Err(refuse(path, numa, "numa", "a node that cpus lists, or -1"));
            }
        }
    }
    given.into_iter().map(|(node, list)| Ok((node, values::cpu_list(path, list)?))).collect()
}
