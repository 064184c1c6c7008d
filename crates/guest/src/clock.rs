//! Time limits that count awake time only.
//!
//! The monotonic clock goes on while a session sleeps in storage, and jumps when it wakes. While there are limits the
//! clock here is looked at four times a second; a step of more than a second is sleep, and isn't counted.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    time::{Duration, Instant},
};
use tokio::sync::Notify;

const TICK: Duration = Duration::from_millis(250);
const ASLEEP: Duration = Duration::from_secs(1);

/// Deadlines by run.
pub struct AwakeClock {
    inner: RefCell<Inner>,
    bell: Notify,
}

struct Inner {
    awake: Duration,
    last: Instant,
    due: BTreeMap<u64, Duration>,
}

impl Inner {
    fn advance(&mut self, now: Instant) {
        let step = now.saturating_duration_since(self.last);
        self.last = now;
        self.awake += if step > ASLEEP { TICK } else { step };
    }

    fn earliest(&self) -> Option<(u64, Duration)> {
        self.due.iter().min_by_key(|(_, due)| **due).map(|(run, due)| (*run, due.saturating_sub(self.awake)))
    }
}

impl AwakeClock {
    pub fn new() -> Self {
        let inner = Inner { awake: Duration::ZERO, last: Instant::now(), due: BTreeMap::new() };
        Self { inner: RefCell::new(inner), bell: Notify::new() }
    }

    /// `run` is due after this time awake.
    pub fn set(&self, run: u64, after: Duration) {
        let mut inner = self.inner.borrow_mut();
        inner.advance(Instant::now());
        let due = inner.awake + after;
        inner.due.insert(run, due);
        self.bell.notify_one();
    }

    pub fn clear(&self, run: u64) {
        self.inner.borrow_mut().due.remove(&run);
    }

    /// Waits for the next run whose time is up, and forgets its deadline.
    pub async fn next_due(&self) -> u64 {
        loop {
            let earliest = {
                let mut inner = self.inner.borrow_mut();
                inner.advance(Instant::now());
                inner.earliest()
            };
            match earliest {
                Some((run, Duration::ZERO)) => {
                    self.clear(run);
                    return run;
                }
                Some((_, left)) => {
                    let _ = tokio::time::timeout(left.min(TICK), self.bell.notified()).await;
                }
                None => self.bell.notified().await,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleep_is_not_counted() {
        let clock = AwakeClock::new();
        clock.set(1, Duration::from_secs(2));
        let mut inner = clock.inner.borrow_mut();
        let mut now = inner.last;
        for _ in 0..4 {
            now += TICK;
            inner.advance(now);
        }
        now += Duration::from_secs(3600);
        inner.advance(now);
        let (run, left) = inner.earliest().unwrap();
        assert_eq!(run, 1);
        assert!(left > Duration::from_millis(700) && left <= Duration::from_millis(750), "{left:?}");
    }
}
