//! Which functions live: silence is remembered from look to look, since one alone proves nothing.
//!
//! ```text
//!             answers                      silent again, `apart` later
//!   Alive ◀──────────── (first silence) ────────────────────────────────▶ Dead
//! ```
//! A function that is silent for the first time is looked at once more in the same call; so a call ends with a verdict.

use std::{
    collections::{BTreeMap, BTreeSet},
    thread::sleep,
    time::{Duration, Instant},
};

use crate::pci::{
    Address, Life,
    life::{self, Answer},
};

/// The functions that were silent at their last look.
#[derive(Debug, Default)]
pub(super) struct Silence {
    since: BTreeMap<Address, (Answer, Instant)>,
}

impl Silence {
    /// Looks at all of `addresses` by `look`, once or twice, and says which live. Two silent looks count where they are
    /// `apart`. What is not among `addresses` is held by somebody: its silence before says nothing of it after.
    pub(super) fn lives(
        &mut self,
        addresses: &BTreeSet<Address>,
        apart: Duration,
        mut look: impl FnMut(Address) -> Answer,
    ) -> BTreeMap<Address, Life> {
        self.since.retain(|address, _| addresses.contains(address));
        let mut lives: BTreeMap<Address, Life> =
            addresses.iter().map(|address| (*address, self.judge(*address, apart, &mut look))).collect();
        let suspects: BTreeSet<Address> =
            lives.iter().filter(|(_, life)| **life == Life::Suspect).map(|(address, _)| *address).collect();
        // One pause for all of them.
        let last =
            suspects.iter().filter_map(|address| self.since.get(address)).map(|(_, since)| *since).max();
        if let Some(last) = last {
            sleep((last + apart).saturating_duration_since(Instant::now()));
        }
        for address in suspects {
            lives.insert(address, self.judge(address, apart, &mut look));
        }
        lives
    }

    fn judge(&mut self, address: Address, apart: Duration, look: &mut impl FnMut(Address) -> Answer) -> Life {
        let first = self.since.get(&address).copied();
        // From the end of the first look to the beginning of this one.
        let elapsed = first.map_or(Duration::ZERO, |(_, since)| since.elapsed());
        let answer = look(address);
        if answer.silent() {
            self.since.entry(address).or_insert_with(|| (answer, Instant::now()));
        } else {
            self.since.remove(&address);
        }
        life::judge(first.map(|(answer, _)| answer), answer, elapsed, apart)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const APART: Duration = Duration::from_millis(50);

    fn gpu() -> Address {
        "0000:c1:00.0".parse().unwrap()
    }

    /// One call over one function, which gives these answers; with how many looks it took.
    fn call(silence: &mut Silence, answers: &[Answer]) -> (Life, usize) {
        let mut looks = 0;
        let lives = silence.lives(&BTreeSet::from([gpu()]), APART, |_| {
            looks += 1;
            answers[looks - 1]
        });
        (lives[&gpu()], looks)
    }

    #[test]
    fn silence_in_two_looks_is_death() {
        for silent in [Answer::AllOnes, Answer::HeaderType7f] {
            let begun = Instant::now();
            assert_eq!(call(&mut Silence::default(), &[silent, silent]), (Life::Dead, 2));
            assert!(begun.elapsed() >= APART);
        }
        assert_eq!(call(&mut Silence::default(), &[Answer::AllOnes, Answer::HeaderType7f]), (Life::Dead, 2));
    }

    #[test]
    fn a_reset_is_no_death() {
        let mut silence = Silence::default();
        assert_eq!(call(&mut silence, &[Answer::AllOnes, Answer::Answers]), (Life::Alive, 2));
        assert_eq!(call(&mut silence, &[Answer::AllOnes, Answer::Unreadable]), (Life::Unknown, 2));
        // Each time it is a first silence: the one before was broken.
        assert_eq!(call(&mut silence, &[Answer::AllOnes, Answer::AllOnes]), (Life::Dead, 2));
    }

    #[test]
    fn a_later_call_remembers_and_does_not_wait() {
        let mut silence = Silence::default();
        assert_eq!(call(&mut silence, &[Answer::AllOnes, Answer::AllOnes]), (Life::Dead, 2));
        sleep(APART);
        let begun = Instant::now();
        for _ in 0..3 {
            assert_eq!(call(&mut silence, &[Answer::AllOnes]), (Life::Dead, 1));
        }
        assert!(begun.elapsed() < APART);
        // It may come back after all.
        assert_eq!(call(&mut silence, &[Answer::Answers]), (Life::Alive, 1));
        assert_eq!(call(&mut silence, &[Answer::AllOnes, Answer::Answers]), (Life::Alive, 2));
    }

    #[test]
    fn who_is_held_meanwhile_is_not_remembered_as_silent() {
        let mut silence = Silence::default();
        call(&mut silence, &[Answer::AllOnes, Answer::AllOnes]);
        sleep(APART);
        assert!(silence.lives(&BTreeSet::new(), APART, |_| Answer::AllOnes).is_empty());
        assert_eq!(call(&mut silence, &[Answer::AllOnes, Answer::Answers]), (Life::Alive, 2));
    }

    #[test]
    fn many_silent_ones_are_waited_for_once() {
        let all: BTreeSet<Address> =
            (0..32).map(|number| format!("0000:c1:{number:02x}.0").parse().unwrap()).collect();
        let begun = Instant::now();
        let lives = Silence::default().lives(&all, APART, |_| Answer::AllOnes);
        assert!(begun.elapsed() < APART * 10, "{:?}", begun.elapsed());
        assert!(lives.len() == 32 && lives.values().all(|life| *life == Life::Dead));
    }

    proptest! {
        /// Whatever each look shows, a call ends with a verdict, and death takes two silent looks.
        #[test]
        fn no_call_ends_with_a_suspicion(answers in prop::collection::vec(0..5_usize, 2..8)) {
            let all = [Answer::Answers, Answer::AllOnes, Answer::HeaderType7f, Answer::Held, Answer::Unreadable];
            let mut said = answers.iter().map(|index| all[*index]);
            let mut heard = Vec::new();
            let lives = Silence::default().lives(&BTreeSet::from([gpu()]), Duration::ZERO, |_| {
                let answer = said.next().unwrap();
                heard.push(answer);
                answer
            });
            let life = lives[&gpu()];
            prop_assert_ne!(life, Life::Suspect);
            prop_assert_eq!(life == Life::Dead, heard.len() == 2 && heard.iter().all(|answer| answer.silent()));
            prop_assert_eq!(heard.len(), 1 + usize::from(heard[0].silent()));
        }
    }
}
