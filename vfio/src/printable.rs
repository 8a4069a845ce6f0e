//! Text of the kernel's or of a process's, made fit for terminals and logs.

/// `text` without the white space around it, with a `?` for each control character: a hostile name would else reach
/// terminals and logs with its escapes.
pub(crate) fn printable(text: &str) -> String {
    text.trim().chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// As [`printable`], with nothing for an empty text.
pub(crate) fn printable_some(text: &str) -> Option<String> {
    Some(printable(text)).filter(|text| !text.is_empty())
}
