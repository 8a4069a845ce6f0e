//! Devices that go bad and come back again and again are not given back each time.
//!
//! A device that comes back is healthy at once, the first two times within [`WINDOW`]. From the third time on it has to stay
//! good for longer and longer before it is shown as healthy: the kubelet would else start one VM after the other on
//! hardware that does not hold.

use std::{collections::BTreeMap, time::Duration};

use decide::id::OfferId;
use tokio::time::Instant;

/// Faults that lie further back than this do not count.
const WINDOW: Duration = Duration::from_secs(600);

/// How often a device may come back at once.
const FREE: u32 = 2;

/// The longest time that a device is kept back.
const LONGEST: Duration = Duration::from_secs(600);

/// How often one device has gone bad, and when it was bad last.
#[derive(Debug, Clone, Copy)]
struct Flap {
    times: u32,
    bad: bool,
    last_bad: Instant,
}

/// Every device that has gone bad.
#[derive(Debug, Default)]
pub(super) struct Flaps {
    of: BTreeMap<OfferId, Flap>,
}

impl Flaps {
    /// Notes that a device is bad, or good, now.
    pub(super) fn see(&mut self, id: OfferId, bad: bool, now: Instant) {
        match self.of.get_mut(&id) {
            Some(flap) if bad => {
                flap.times += u32::from(!flap.bad);
                (flap.bad, flap.last_bad) = (true, now);
            }
            Some(flap) if now.duration_since(flap.last_bad) > WINDOW => {
                self.of.remove(&id);
            }
            Some(flap) => flap.bad = false,
            None if bad => {
                self.of.insert(id, Flap { times: 1, bad: true, last_bad: now });
            }
            None => {}
        }
    }

    /// Until when a device that is good now is kept back, if it is, and how often it has gone bad.
    ///
    /// `first` is how long it has to stay good the first time that it is kept back; doubles each time.
    pub(super) fn kept_back(&self, id: OfferId, first: Duration, now: Instant) -> Option<(Instant, u32)> {
        let Flap { times, bad, last_bad } = *self.of.get(&id)?;
        let doublings = times.checked_sub(FREE + 1)?;
        let until = last_bad + LONGEST.min(first.saturating_mul(2_u32.saturating_pow(doublings)));
        (!bad && now < until).then_some((until, times))
    }

    /// When the first device that is kept back is given back.
    pub(super) fn next(&self, first: Duration, now: Instant) -> Option<Instant> {
        self.of.keys().filter_map(|id| self.kept_back(*id, first, now)).map(|(until, _)| until).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_flaps_is_given_back_later_and_later_and_forgiven_in_the_end() {
        let id: OfferId = "0000:17:00.0".parse().unwrap();
        let mut flaps = Flaps::default();
        let mut now = Instant::now();
        let first = Duration::from_secs(30);
        let mut kept = Vec::new();
        for _ in 0..9 {
            flaps.see(id, true, now);
            flaps.see(id, true, now);
            assert!(flaps.kept_back(id, first, now).is_none(), "what is bad is not kept back, it is bad");
            flaps.see(id, false, now);
            kept.push(flaps.kept_back(id, first, now).map_or(0, |(until, _)| (until - now).as_secs()));
            now += Duration::from_secs(1);
        }
        assert_eq!(kept, [0, 0, 30, 60, 120, 240, 480, 600, 600]);
        assert!(flaps.next(first, now).is_some());
        now += WINDOW + Duration::from_secs(1);
        flaps.see(id, false, now);
        flaps.see(id, true, now);
        flaps.see(id, false, now);
        assert!(flaps.kept_back(id, first, now).is_none());
    }
}
