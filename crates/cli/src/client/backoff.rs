//! Pauses between attempts: longer each time, and never the same for two clients.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(5);

/// Counts attempts and says how long to wait before the next.
#[derive(Debug, Default)]
pub struct Backoff {
    attempts: u32,
}

impl Backoff {
    /// How many attempts have failed in a row.
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    /// An attempt failed: the pause before the next, from half of it to the whole by `chance` (any number).
    pub fn pause(&mut self, chance: u32) -> Duration {
        let whole = FIRST.saturating_mul(1 << self.attempts.min(10)).min(LONGEST);
        self.attempts = self.attempts.saturating_add(1);
        let half = whole / 2;
        half + half.mul_f64(f64::from(chance) / f64::from(u32::MAX))
    }

    /// The same by this process's own chance.
    pub fn next_pause(&mut self) -> Duration {
        let random = uuid::Uuid::new_v4().as_u128();
        self.pause(random as u32)
    }

    /// An attempt succeeded.
    pub fn reset(&mut self) {
        self.attempts = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_five_seconds_and_start_again() {
        let mut backoff = Backoff::default();
        let whole: Vec<u128> = (0..9).map(|_| backoff.pause(u32::MAX).as_millis()).collect();
        assert_eq!(whole, [100, 200, 400, 800, 1600, 3200, 5000, 5000, 5000]);
        assert_eq!(backoff.pause(0).as_millis(), 2500);
        backoff.reset();
        assert_eq!((backoff.attempts(), backoff.pause(0).as_millis()), (0, 50));
    }
}
