//! Whether a function still answers: a GPU that fell off the bus reads as all ones.
//!
//! One look proves nothing: a function in reset, or on its way out of D3, reads as all ones for up to a second (PCI Express
//! Base Specification, 6.6.1), so a verdict takes two looks. A function that somebody has open is not looked at, since a guest
//! resets it when it likes. `power_state` is no sign at all: idle functions sleep.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Address, config::HEADER};
use crate::host::Host;

/// The shortest time between two looks of which both must fail: how long a function may take to answer after a reset.
pub const APART: Duration = Duration::from_secs(1);

/// Where the header's layout stands (`PCI_HEADER_TYPE`, include/uapi/linux/pci_regs.h).
const HEADER_TYPE: usize = 0x0e;
/// The shortest read that says something: one that has the header's layout in it.
const SHORTEST: usize = 16;

/// What one look at a function's configuration space came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// It answers.
    Answers,
    /// Every byte of the header is all ones.
    AllOnes,
    /// The header's layout is 0x7f, which none has: QEMU's "unknown PCI header type 127".
    HeaderType7f,
    /// It was not looked at, since somebody has it open.
    Held,
    /// It could not be read.
    Unreadable,
}

/// Whether a function lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Life {
    /// It answers.
    Alive,
    /// It did not answer at the last look; a reset would look the same.
    Suspect,
    /// It did not answer in two looks at least [`APART`]: it needs a power cycle of the slot or the node.
    Dead,
    /// Nothing is known: it is held, or cannot be read.
    Unknown,
}

impl Answer {
    /// What the first bytes of configuration space say.
    ///
    /// A vendor id of 0xffff alone says nothing: every VF has that (Single Root I/O Virtualization Specification, 3.4.1.1).
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        let header = bytes.get(..HEADER).unwrap_or(bytes);
        if header.len() < SHORTEST {
            Self::Unreadable
        } else if header.iter().all(|byte| *byte == 0xff) {
            Self::AllOnes
        } else if header.get(HEADER_TYPE).is_some_and(|byte| byte & 0x7f == 0x7f) {
            Self::HeaderType7f
        } else {
            Self::Answers
        }
    }

    /// Whether this is how a dead function reads.
    #[must_use]
    pub fn silent(self) -> bool {
        matches!(self, Self::AllOnes | Self::HeaderType7f)
    }
}

/// Looks at a function once. `held` says that somebody has it open: then it is left alone.
#[must_use]
pub fn look(host: &Host, address: Address, held: bool) -> Answer {
    if held {
        return Answer::Held;
    }
    match host.bytes(&host.function_dir(address).join("config"), HEADER) {
        Ok(bytes) => Answer::of(&bytes),
        Err(_) => Answer::Unreadable,
    }
}

/// The verdict of two looks that follow each other directly, the second one `elapsed` after the first, where `apart` is the
/// shortest time between two that both count ([`APART`]). A look at a held function counts as one: what was silent before a
/// VM had it says nothing of it after.
#[must_use]
pub fn judge(first: Option<Answer>, second: Answer, elapsed: Duration, apart: Duration) -> Life {
    match second {
        Answer::Answers => Life::Alive,
        Answer::Held | Answer::Unreadable => Life::Unknown,
        Answer::AllOnes | Answer::HeaderType7f => {
            if first.is_some_and(Answer::silent) && elapsed >= apart {
                Life::Dead
            } else {
                Life::Suspect
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ALL: [Answer; 5] =
        [Answer::Answers, Answer::AllOnes, Answer::HeaderType7f, Answer::Held, Answer::Unreadable];

    #[test]
    fn only_two_silent_looks_a_second_apart_are_death() {
        for first in ALL {
            for second in ALL {
                for elapsed in [Duration::ZERO, Duration::from_millis(999), APART, APART * 60] {
                    let expected = match second {
                        Answer::Answers => Life::Alive,
                        Answer::Held | Answer::Unreadable => Life::Unknown,
                        _ if first.silent() && elapsed >= APART => Life::Dead,
                        _ => Life::Suspect,
                    };
                    assert_eq!(
                        judge(Some(first), second, elapsed, APART),
                        expected,
                        "{first:?} {second:?} {elapsed:?}"
                    );
                }
            }
        }
        assert_eq!(judge(None, Answer::AllOnes, APART * 60, APART), Life::Suspect);
    }

    #[test]
    fn what_a_header_says() {
        let mut answering = vec![0; HEADER];
        answering[..4].copy_from_slice(&[0xde, 0x10, 0x35, 0x23]);
        let mut vf = answering.clone();
        vf[..4].fill(0xff);
        let mut confused = answering.clone();
        confused[HEADER_TYPE] = 0x7f;
        let mut multifunction = answering.clone();
        multifunction[HEADER_TYPE] = 0x80;
        for (bytes, expected) in [
            (answering.clone(), Answer::Answers),
            (vf, Answer::Answers),
            (confused, Answer::HeaderType7f),
            (multifunction, Answer::Answers),
            (vec![0xff; HEADER], Answer::AllOnes),
            (vec![0xff; 4096], Answer::AllOnes),
            (vec![0xff; 4], Answer::Unreadable),
            (Vec::new(), Answer::Unreadable),
        ] {
            assert_eq!(Answer::of(&bytes), expected, "{bytes:x?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = Answer::of(&bytes);
        }
    }
}
