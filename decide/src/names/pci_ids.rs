//! The text format of pci.ids, read for its devices' names alone.
//!
//! ```text
//! # comment
//! 10de  NVIDIA Corporation               vendor: id in column 0
//!     2330  GH100 [H100 SXM5 80GB]       device: one tab
//!         10de 16c1  a board's name      subsystem: two tabs, passed over
//! C 03  Display controller               classes come last, and own the tabbed lines below them
//!     00  VGA compatible controller
//! ```
//!
//! Source: the head of <https://pci-ids.ucw.cz/v2.2/pci.ids>.

/// The longest name taken, in bytes. The longest in use has about 120; a line beyond any sense is damage, and its
/// device counts as unknown rather than as something cut short.
const LONGEST_NAME: usize = 1024;

/// One device of a pci.ids text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry<'a> {
    /// The vendor whose section it stands in.
    pub vendor: u16,
    /// Its own id.
    pub device: u16,
    /// Its name, without outer white space, never empty.
    pub name: &'a str,
}

/// The devices of a pci.ids text, in its order. Of several with one id the first counts, as for NVIDIA's plugins:
/// that is the caller's to observe.
///
/// Any text is taken. Comments, empty lines, subsystems, classes and lines that make no sense are passed over; a line in
/// column 0 that is no vendor ends the vendor before it. CRLF and a missing last newline do no harm.
pub fn entries(text: &str) -> impl Iterator<Item = Entry<'_>> {
    let mut vendor = None;
    text.lines().filter_map(move |line| {
        if line.is_empty() || line.starts_with('#') {
            return None;
        }
        match line.strip_prefix('\t') {
            None => {
                vendor = id_and_rest(line).map(|(id, _)| id);
                None
            }
            Some(inner) => {
                let vendor = vendor?;
                // A second tab is a subsystem's: no id starts with one.
                let (device, rest) = id_and_rest(inner)?;
                let name = rest.trim();
                let usable = !name.is_empty() && name.len() <= LONGEST_NAME;
                usable.then_some(Entry { vendor, device, name })
            }
        }
    })
}

/// Splits off an id of exactly four hex digits; what follows it starts with white space or is nothing.
fn id_and_rest(line: &str) -> Option<(u16, &str)> {
    let (id, rest) = line.split_at_checked(4)?;
    let separated = rest.is_empty() || rest.starts_with(char::is_whitespace);
    if !separated || !id.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    u16::from_str_radix(id, 16).ok().map(|id| (id, rest))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn nvidia(text: &str) -> Vec<(u16, &str)> {
        entries(text).filter(|e| e.vendor == 0x10de).map(|e| (e.device, e.name)).collect()
    }

    #[test]
    fn only_the_vendors_own_devices() {
        let text = "# head\n\n\
            8086  Intel Corporation\n\t2331  Not this one\n\
            10de  NVIDIA Corporation\n\
            # within the section\n\
            \t2330  GH100 [H100 SXM5 80GB]\n\
            \t\t10de 16c1  a board\n\
            \n\
            \t2331  GH100 [H100 PCIe]\n\
            10df  Emulex Corporation\n\t2332  Not this one either\n\
            C 03  Display controller\n\t00  VGA\n\t0300  No such thing\n\t\t01  prog-if\n";
        assert_eq!(nvidia(text), [(0x2330, "GH100 [H100 SXM5 80GB]"), (0x2331, "GH100 [H100 PCIe]")]);
    }

    #[test]
    fn a_class_section_ends_the_vendor() {
        assert_eq!(nvidia("10de  NVIDIA\n\t0001  A\nC 03  Display\n\t0002  B\n"), [(1, "A")]);
    }

    #[test]
    fn crlf_no_last_newline_and_odd_spacing() {
        assert_eq!(
            nvidia("10de  NVIDIA\r\n\t2330  GH100 \r\n\t2331\tGH100 [H100 PCIe]"),
            [(0x2330, "GH100"), (0x2331, "GH100 [H100 PCIe]")]
        );
        assert_eq!(nvidia("10DE  NVIDIA\n\t1AEF  GA102 Audio"), [(0x1aef, "GA102 Audio")]);
    }

    #[test]
    fn lines_that_make_no_sense_are_passed_over() {
        let huge = "x".repeat(1 << 20);
        let text = format!(
            "\t0001  before any vendor\n10de  NVIDIA\n\t23301  five digits\n\t+330  sign\n\t23é  cut\n\t2333\n\
             \t2334   \n\t2335  {huge}\n\t2336  sane\n{huge}\n\t2337  after a line that is no vendor\n"
        );
        assert_eq!(nvidia(&text), [(0x2336, "sane")]);
    }

    #[test]
    fn bytes_that_were_no_utf8_stay_within_their_line() {
        let text = String::from_utf8_lossy(b"10de  NVIDIA\n\t2330  GH\xff100\n\t2331  GH100\n");
        assert_eq!(nvidia(&text), [(0x2330, "GH\u{fffd}100"), (0x2331, "GH100")]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn any_text_is_taken(text in "([\t\n #C\r]|10de|2330|.){0,40}") {
            for entry in entries(&text) {
                prop_assert_eq!(entry.name.trim(), entry.name);
                prop_assert!(!entry.name.is_empty());
            }
        }
    }
}
