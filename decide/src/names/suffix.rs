//! From a device's name to the part of a resource name after the `/`.
//!
//! The steps are those of NVIDIA's two plugins (`kubevirt-gpu-device-plugin` v1.6.0, `sandbox-device-plugin` v0.0.5), in
//! their order, since manifests written for them must keep working: trim outer white space; upper-case; `/` and `.`
//! become `_`; each run of blank, tab, newline, form feed and carriage return becomes one `_`; everything else outside the
//! consumer's alphabet is deleted. Underscores are neither collapsed nor trimmed.

/// The KubeVirt plugin's form: `-` is deleted (`Max-Q` becomes `MAXQ`).
///
/// Not every result is a name that Kubernetes takes: [`super::ResourceName::new`] judges that.
#[must_use]
pub fn kubevirt_suffix(name: &str) -> String {
    sanitise(name, |c| c == '_')
}

/// The Kata plugin's form: as [`kubevirt_suffix`], but `-` is kept (`MAX-Q`).
#[must_use]
pub fn kata_suffix(name: &str) -> String {
    sanitise(name, |c| matches!(c, '_' | '-'))
}

fn sanitise(name: &str, keeps: impl Fn(char) -> bool) -> String {
    let mut suffix = String::with_capacity(name.len());
    let mut after_blank = false;
    for c in name.trim().chars().map(upper) {
        let blank = matches!(c, '\t' | '\n' | '\x0c' | '\r' | ' ');
        if blank && !after_blank || matches!(c, '/' | '.') {
            suffix.push('_');
        } else if c.is_ascii_alphanumeric() || keeps(c) {
            suffix.push(c);
        }
        after_blank = blank;
    }
    suffix
}

/// Upper-cases as Go's `strings.ToUpper` does, which maps one character to one: a German `ß` stays (and is deleted
/// later), where Rust's own mapping would give `SS` and so another resource name.
pub(super) fn upper(c: char) -> char {
    let mut mapped = c.to_uppercase();
    match (mapped.next(), mapped.next()) {
        (Some(single), None) => single,
        _ => c,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn blanks_are_joined_before_other_characters_are_deleted() {
        for (name, expected) in [
            ("a \t\r\n b", "A_B"),
            ("a ( b", "A__B"),    // two runs, the bracket between them goes
            ("a \x0b b", "A__B"), // a vertical tab is no blank to the plugins' pattern
            (" \x0b a \n", "A"),  // but outer white space it is
            ("a / b", "A___B"),
            ("é-straße ſı", "STRAE_SI"),
        ] {
            assert_eq!(kubevirt_suffix(name), expected, "{name:?}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn a_suffix_is_of_its_alphabet_and_stays_as_it_is(name in ".{0,80}") {
            let kubevirt = kubevirt_suffix(&name);
            prop_assert!(kubevirt.bytes().all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'_'));
            prop_assert_eq!(kubevirt_suffix(&kubevirt), kubevirt.as_str());

            let kata = kata_suffix(&name);
            prop_assert_eq!(kata_suffix(&kata), kata.as_str());
            prop_assert_eq!(kata.replace('-', ""), kubevirt, "they differ by the dash alone");
        }
    }
}
