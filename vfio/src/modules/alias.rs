//! Which vfio driver takes a function: the aliases `vfio_pci:` of a kernel's modules.
//!
//! A vfio driver names the functions that it is made for in a table for overrides only, which the kernel's build turns
//! into aliases beginning with `vfio_pci:` instead of `pci:` (scripts/mod/file2alias.c, `do_pci_entry`;
//! `PCI_DRIVER_OVERRIDE_DEVICE_VFIO`). vfio-pci itself has one of nothing but stars. libvirt and NVIDIA's vfio-manage
//! choose by the same rule.

use super::ModuleName;

/// Vendor, device, subsystem's vendor and device, base class, subclass, interface: in this order in every alias.
const LABELS: [&str; 7] = ["v", "d", "sv", "sd", "bc", "sc", "i"];

/// The seven fields of an alias: upper case hexadecimal digits, or one star. Anything else (a pattern within a field is
/// nothing that the kernel's build makes) is no alias of a function.
fn fields(text: &str) -> Option<[&str; 7]> {
    let mut fields = [""; 7];
    let mut rest = text;
    for (field, label) in fields.iter_mut().zip(LABELS) {
        rest = rest.strip_prefix(label)?;
        let digits = |c: char| c.is_ascii_digit() || ('A'..='F').contains(&c);
        let end = match rest.strip_prefix('*') {
            Some(_) => 1,
            None => rest.find(|c| !digits(c)).unwrap_or(rest.len()),
        };
        let (value, after) = rest.split_at_checked(end)?;
        if value.is_empty() {
            return None;
        }
        *field = value;
        rest = after;
    }
    rest.is_empty().then_some(fields)
}

/// How many stars `pattern` needs to match `function`; nothing where it does not match.
fn stars(pattern: &[&str; 7], function: &[&str; 7]) -> Option<usize> {
    pattern.iter().zip(function).try_fold(0, |stars, (pattern, value)| match *pattern {
        "*" => Some(stars + 1),
        exact => (exact == *value).then_some(stars),
    })
}

/// Of `aliases` (what stands after `vfio_pci:`, and the module) the most specific that matches the function's
/// `modalias`: the one with the fewest stars, of several the first.
pub(super) fn most_specific<'a>(
    modalias: &str,
    aliases: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Option<ModuleName> {
    let function = fields(modalias.trim().strip_prefix("pci:")?)?;
    let mut best: Option<(usize, ModuleName)> = None;
    for (pattern, module) in aliases {
        let Some(stars) = fields(pattern).and_then(|pattern| stars(&pattern, &function)) else { continue };
        if best.as_ref().is_some_and(|(fewest, _)| *fewest <= stars) {
            continue;
        }
        // A name that is none comes from a damaged file: another alias serves.
        if let Ok(module) = ModuleName::new(module) {
            best = Some((stars, module));
        }
    }
    best.map(|(_, module)| module)
}

/// The `vfio_pci:` aliases of `modules.alias`: lines `alias vfio_pci:PATTERN MODULE`.
pub(super) fn of_modules(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines().filter_map(|line| {
        let (pattern, module) = line.strip_prefix("alias vfio_pci:")?.split_once(' ')?;
        Some((pattern, module.trim()))
    })
}

/// The `vfio_pci:` aliases of built-in modules, from `modules.builtin.modinfo`: texts `MODULE.alias=vfio_pci:PATTERN`, each
/// ended by a zero byte (Documentation/kbuild/kbuild.rst). Kernels that say nothing of the kind are the rule.
pub(super) fn of_built_in(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.split('\0').filter_map(|entry| {
        let (key, value) = entry.split_once('=')?;
        Some((value.strip_prefix("vfio_pci:")?, key.strip_suffix(".alias")?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALIASES: &str = "\
# Aliases extracted from modules themselves.
alias pci:v000010DEd*sv*sd*bc03sc02i00* nvidia
alias vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci
alias vfio_pci:v000010DEd00002941sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci
alias vfio_pci:v000010DEd00002941sv000010DEsd00001234bc*sc*i* board_vfio_pci
alias vfio_pci:v000015B3d0000101Esv*sd*bc*sc*i* mlx5_vfio_pci
alias vfio_pci:v000010DEd00002342sv*sd*bc*sc*i* first_vfio_pci
alias vfio_pci:v*d00002342sv*sd*bc*sc*i00 second_vfio_pci
alias vfio_pci:v000010DEd000029[0-9]*sv*sd*bc*sc*i* globbing_vfio_pci
alias vfio_pci:broken broken_vfio_pci
alias vfio_pci:v000010DEd00002999sv*sd*bc*sc*i* ../evil
";

    fn chosen(modalias: &str) -> Option<String> {
        most_specific(modalias, of_modules(ALIASES)).map(String::from)
    }

    #[test]
    fn the_most_specific_alias_wins() {
        let cases = [
            // A GH200's GPU: the variant beats vfio-pci's stars.
            ("pci:v000010DEd00002941sv000010DEsd00001809bc03sc02i00", Some("nvgrace_gpu_vfio_pci")),
            // Two more fields exact beat two.
            ("pci:v000010DEd00002941sv000010DEsd00001234bc03sc02i00", Some("board_vfio_pci")),
            // Any other function is vfio-pci's.
            ("pci:v000010DEd00002330sv000010DEsd000016C1bc03sc02i00", Some("vfio_pci")),
            ("pci:v000015B3d0000101Esv000015B3sd00000001bc02sc00i00\n", Some("mlx5_vfio_pci")),
            // As many stars each: the first.
            ("pci:v000010DEd00002342sv000010DEsd00000001bc03sc02i00", Some("first_vfio_pci")),
            // Patterns within a field match nothing; a name that is none is passed over.
            ("pci:v000010DEd00002901sv000010DEsd00000001bc03sc02i00", Some("vfio_pci")),
            ("pci:v000010DEd00002999sv000010DEsd00000001bc03sc02i00", Some("vfio_pci")),
            // Fields are compared as the kernel writes them: in upper case.
            ("pci:v000010ded00002941sv000010DEsd00001809bc03sc02i00", None),
            ("usb:v1D6Bp0002", None),
            ("", None),
        ];
        for (modalias, module) in cases {
            assert_eq!(chosen(modalias).as_deref(), module, "{modalias}");
        }
    }

    #[test]
    fn built_in_modules_have_their_aliases_elsewhere() {
        let modinfo = "vfio_pci.license=GPL v2\0vfio_pci.alias=vfio_pci:v*d*sv*sd*bc*sc*i*\0\
                       nvgrace_gpu_vfio_pci.alias=vfio_pci:v000010DEd00002941sv*sd*bc*sc*i*\0\
                       ext4.alias=fs-ext4\0";
        let found =
            most_specific("pci:v000010DEd00002941sv000010DEsd00001809bc03sc02i00", of_built_in(modinfo));
        assert_eq!(found.map(String::from).as_deref(), Some("nvgrace_gpu_vfio_pci"));
    }
}
