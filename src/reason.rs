//! Why something is not as one would wish: a stable code for machines, a sentence for people.

use std::{error::Error, fmt};

use serde::Serialize;

use crate::refusal::Refusal;

/// One reason.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Reason {
    /// A stable name (`GroupHeld`), the same in conditions, metrics and JSON.
    pub code: &'static str,
    /// What, where, why, and the cure.
    pub message: String,
}

impl Reason {
    /// A reason from its two parts.
    pub fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

impl From<&Refusal> for Reason {
    fn from(refusal: &Refusal) -> Self {
        Self::new(refusal.code(), refusal.to_string())
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.message)
    }
}

/// An error with all its sources, on one line.
#[must_use]
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}
