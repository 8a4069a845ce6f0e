//! Why something is not as one would wish: a stable code for machines, a sentence for people.
//!
//! The lowest crate of the house: every error and every reason of the others has its [`Code`] from here, so that
//! conditions, metrics, JSON and gRPC answers spell one thing one way.

#![forbid(unsafe_code)]

mod code;

use std::{error::Error, fmt};

use serde::Serialize;

pub use code::Code;

/// One reason.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Reason {
    /// The same in conditions, metrics and JSON.
    pub code: Code,
    /// What, where, why, and the cure.
    pub message: String,
}

impl Reason {
    /// A reason from its two parts.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.message)
    }
}

/// An error that machines can tell from others.
pub trait Coded: Error {
    /// Its stable name: the metric label and the condition reason.
    fn code(&self) -> Code;

    /// Whether the same may succeed later, with nothing changed by people.
    fn retryable(&self) -> bool;

    /// The error as a reason, its sources in the sentence.
    fn reason(&self) -> Reason
    where
        Self: Sized + 'static,
    {
        Reason::new(self.code(), chain(self))
    }
}

/// An error with all its sources, on one line. No error's own text repeats its source, so each is said once.
#[must_use]
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let texts: Vec<_> =
        std::iter::successors(Some(error), |error| (*error).source()).map(ToString::to_string).collect();
    texts.join(": ")
}
