//! The pauses between two tries.

use std::time::Duration;

use tokio::time::Instant;

/// Pauses that double from `first` to `max`.
#[derive(Debug)]
pub(super) struct Backoff {
    first: Duration,
    max: Duration,
    next: Duration,
    watched: Option<Instant>,
}

impl Backoff {
    pub(super) fn new(first: Duration, max: Duration) -> Self {
        Self { first, max, next: first, watched: None }
    }

    /// The pause now; the longest one where trying again does not help by itself.
    pub(super) fn next(&mut self, retryable: bool) -> Duration {
        let now = if retryable { self.next } else { self.max };
        self.next = self.next.saturating_mul(2).min(self.max);
        now
    }

    pub(super) fn reset(&mut self) {
        self.next = self.first;
    }

    /// The kubelet watches (again said while it does).
    pub(super) fn watched(&mut self) {
        self.watched.get_or_insert_with(Instant::now);
    }

    /// A session has ended: if it was watched for long enough, what comes is no failure in a row.
    pub(super) fn session_over(&mut self, stable_after: Duration) {
        if self.watched.take().is_some_and(|since| since.elapsed() >= stable_after) {
            self.reset();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_until_a_session_was_stable() {
        let (first, max) = (Duration::from_millis(20), Duration::from_millis(100));
        let mut backoff = Backoff::new(first, max);
        let pauses: Vec<u128> = (0..4).map(|_| backoff.next(true).as_millis()).collect();
        assert_eq!(pauses, [20, 40, 80, 100]);
        backoff.watched();
        backoff.session_over(Duration::from_secs(3600));
        assert_eq!(backoff.next(true), max, "a short session is one more failure");
        backoff.watched();
        backoff.session_over(Duration::ZERO);
        assert_eq!(backoff.next(true), first);
        assert_eq!(backoff.next(false), max, "what cannot get better by itself is not tried often");
    }
}
