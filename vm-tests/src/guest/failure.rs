//! Why a scenario failed, and the checks that say it.

use std::fmt::Debug;
use std::io;

use serde_json::Value;

/// A scenario's step failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// Something else was seen than expected.
    #[error("{what}: expected {expected}, saw {seen}")]
    Expected {
        /// What was looked at.
        what: String,
        /// What it should be.
        expected: String,
        /// What it is.
        seen: String,
    },
    /// A file of the guest could not be read or written.
    #[error("cannot {action} {path}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file or program.
        path: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The VMM's stand-in did not get its device.
    #[error("the VMM stand-in cannot use {node}: {said}")]
    Vmm {
        /// The group's node.
        node: String,
        /// What it said.
        said: String,
    },
    /// A program's answer is no JSON of the expected form.
    #[error("{what} is not the JSON expected: {text}")]
    Json {
        /// Which answer.
        what: String,
        /// The answer.
        text: String,
        /// The parser's word.
        source: serde_json::Error,
    },
}

/// What a step gives.
pub type Step<T = ()> = Result<T, Failure>;

/// For `map_err`: puts file and action to the kernel's answer.
pub fn io_on(action: &'static str, path: impl Into<String>) -> impl FnOnce(io::Error) -> Failure {
    let path = path.into();
    move |source| Failure::Io { action, path, source }
}

/// Two values must be equal.
pub fn equal<T: PartialEq + Debug + ?Sized>(what: &str, seen: &T, expected: &T) -> Step {
    if seen == expected {
        return Ok(());
    }
    Err(Failure::Expected { what: what.into(), expected: format!("{expected:?}"), seen: format!("{seen:?}") })
}

/// A condition must hold; `seen` is shown when it does not.
pub fn ensure(what: &str, holds: bool, expected: &str, seen: &dyn Debug) -> Step {
    if holds {
        return Ok(());
    }
    Err(Failure::Expected { what: what.into(), expected: expected.into(), seen: format!("{seen:?}") })
}

/// A text must contain another, whatever the case of its letters.
pub fn contains(what: &str, text: &str, part: &str) -> Step {
    if text.to_lowercase().contains(&part.to_lowercase()) {
        return Ok(());
    }
    Err(Failure::Expected {
        what: what.into(),
        expected: format!("a text with '{part}'"),
        seen: format!("{text:?}"),
    })
}

/// The element of the list at `list` whose member `key` is `value`.
pub fn element<'a>(document: &'a Value, list: &str, key: &str, value: &str) -> Step<&'a Value> {
    let elements = document.get(list).and_then(Value::as_array);
    let found = elements.and_then(|all| all.iter().find(|e| e.get(key).is_some_and(|v| text(v) == value)));
    found.ok_or_else(|| Failure::Expected {
        what: format!("{list}[] of the JSON"),
        expected: format!("an element with {key} {value}"),
        seen: document.to_string(),
    })
}

/// A JSON string or number as plain text; an IOMMU group's id may be written as either.
#[must_use]
pub fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
