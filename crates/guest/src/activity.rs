//! How busy the inside is: the CPU that programs use, looked at every few seconds, and how long one of them wants the
//! session to be kept awake.
//!
//! All times here are awake time. The monotonic clock goes on while a session sleeps or is paused; a step between two
//! looks that is far longer than the time between them is sleep, and what was used around it belongs to nobody: looking
//! begins anew, as it does with each wake.

use crate::{figures, guest::Guest};
use std::{
    collections::VecDeque,
    rc::Rc,
    time::{Duration, Instant},
};
use wire::guest::GuestActivity;

/// Between two looks.
const INTERVAL: Duration = Duration::from_secs(5);
/// A longer step isn't a look that came late on a busy machine.
const ASLEEP: Duration = Duration::from_secs(15);
/// From this share of a core on, in percent, programs do more than wait.
const BUSY_PERCENT: f64 = 5.0;
/// A shorter stretch says nothing about whether programs are busy.
const SHORTEST: Duration = Duration::from_secs(1);
/// Looks that are kept one by one: an hour.
const FINE: usize = 720;
/// What is older is kept by the minute, for a day.
const COARSE: usize = 24 * 60;
const COARSE_LENGTH: Duration = Duration::from_secs(60);

/// What was used in a stretch of time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Stretch {
    awake_ms: u64,
    cpu_ms: u64,
}

impl Stretch {
    fn add(&mut self, other: Stretch) {
        self.awake_ms = self.awake_ms.saturating_add(other.awake_ms);
        self.cpu_ms = self.cpu_ms.saturating_add(other.cpu_ms);
    }

    /// Percent of one core.
    fn percent(self) -> f64 {
        if self.awake_ms == 0 { 0.0 } else { self.cpu_ms as f64 * 100.0 / self.awake_ms as f64 }
    }

    fn is_busy(self) -> bool {
        Duration::from_millis(self.awake_ms) >= SHORTEST && self.percent() >= BUSY_PERCENT
    }
}

/// The looks so far.
pub struct Looks {
    last: Instant,
    cpu_at_last: u64,
    /// Awake time up to the last look.
    awake: Duration,
    /// The newest stretches, oldest first.
    fine: VecDeque<Stretch>,
    /// Fills up to a minute, then joins `coarse`.
    filling: Stretch,
    coarse: VecDeque<Stretch>,
    /// The end of the last busy stretch.
    busy_at: Option<Duration>,
    keep_until: Option<Duration>,
}

impl Looks {
    /// Looking begins; `cpu_ms` is what programs have used up to now.
    pub fn new(now: Instant, cpu_ms: u64) -> Self {
        Self {
            last: now,
            cpu_at_last: cpu_ms,
            awake: Duration::ZERO,
            fine: VecDeque::new(),
            filling: Stretch::default(),
            coarse: VecDeque::new(),
            busy_at: None,
            keep_until: None,
        }
    }

    fn step(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.last)
    }

    /// Awake time up to now.
    fn awake_at(&self, now: Instant) -> Duration {
        let step = self.step(now);
        self.awake + if step > ASLEEP { INTERVAL } else { step }
    }

    /// What was used since the last look; `None` after a sleep.
    fn since_last(&self, now: Instant, cpu_ms: u64) -> Option<Stretch> {
        let step = self.step(now);
        let awake_ms = u64::try_from(step.as_millis()).unwrap_or(u64::MAX);
        (step <= ASLEEP).then_some(Stretch { awake_ms, cpu_ms: cpu_ms.saturating_sub(self.cpu_at_last) })
    }

    /// Looks again.
    pub fn look(&mut self, now: Instant, cpu_ms: u64) {
        let Some(stretch) = self.since_last(now, cpu_ms) else { return self.begin_anew(now, cpu_ms) };
        self.awake = self.awake_at(now);
        (self.last, self.cpu_at_last) = (now, cpu_ms);
        if stretch.is_busy() {
            self.busy_at = Some(self.awake);
        }
        self.fine.push_back(stretch);
        if self.fine.len() > FINE
            && let Some(oldest) = self.fine.pop_front()
        {
            self.filling.add(oldest);
        }
        if Duration::from_millis(self.filling.awake_ms) >= COARSE_LENGTH {
            self.coarse.push_back(std::mem::take(&mut self.filling));
            if self.coarse.len() > COARSE {
                self.coarse.pop_front();
            }
        }
    }

    /// The session has woken: what was before says nothing about now. A wish to be kept awake stands.
    pub fn begin_anew(&mut self, now: Instant, cpu_ms: u64) {
        let (awake, keep_until) = (self.awake + self.step(now).min(INTERVAL), self.keep_until);
        *self = Self { awake, keep_until, ..Self::new(now, cpu_ms) };
    }

    /// A program wants the session to be kept awake for so long; zero: no longer.
    pub fn keep_awake(&mut self, now: Instant, how_long: Duration) {
        self.keep_until = (!how_long.is_zero()).then(|| self.awake_at(now) + how_long);
    }

    /// How long the session is to be kept awake yet.
    pub fn kept_awake_for(&self, now: Instant) -> Option<Duration> {
        let left = self.keep_until?.saturating_sub(self.awake_at(now));
        (!left.is_zero()).then_some(left)
    }

    /// How busy the inside was during the last `window`.
    pub fn tell(&mut self, now: Instant, cpu_ms: u64, window: Duration) -> GuestActivity {
        if self.since_last(now, cpu_ms).is_none() {
            self.begin_anew(now, cpu_ms);
        }
        let newest = self.since_last(now, cpu_ms).unwrap_or_default();
        let awake = self.awake_at(now);
        let older = self.fine.iter().rev().chain([&self.filling]).chain(self.coarse.iter().rev());
        let mut all = newest;
        for stretch in older {
            if Duration::from_millis(all.awake_ms) >= window {
                break;
            }
            all.add(*stretch);
        }
        let busy_at = if newest.is_busy() { Some(awake) } else { self.busy_at };
        GuestActivity {
            cpu_percent: all.percent(),
            known_ms: all.awake_ms.min(millis(window)),
            busy_ago_ms: busy_at.map(|at| millis(awake.saturating_sub(at))),
            keep_awake_ms: self.kept_awake_for(now).map(millis),
            waiting: None,
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Looks every few seconds, for as long as the process lives.
pub async fn look_forever(guest: Rc<Guest>) {
    loop {
        tokio::time::sleep(INTERVAL).await;
        guest.looks.borrow_mut().look(Instant::now(), figures::programs_cpu_ms());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks as they come every five seconds.
    struct Clock {
        now: Instant,
        cpu_ms: u64,
        looks: Looks,
    }

    impl Clock {
        fn new() -> Self {
            let now = Instant::now();
            Self { now, cpu_ms: 700, looks: Looks::new(now, 700) }
        }

        fn looks(&mut self, count: usize, cpu_ms_each: u64) {
            for _ in 0..count {
                self.now += INTERVAL;
                self.cpu_ms += cpu_ms_each;
                self.looks.look(self.now, self.cpu_ms);
            }
        }

        fn tell(&mut self, window_s: u64) -> GuestActivity {
            self.looks.tell(self.now, self.cpu_ms, Duration::from_secs(window_s))
        }
    }

    #[test]
    fn the_mean_is_over_the_window_and_over_no_more_than_is_known() {
        let mut clock = Clock::new();
        assert_eq!(clock.tell(60), GuestActivity::default());
        clock.looks(6, 5000);
        clock.looks(6, 0);
        let told = clock.tell(60);
        assert_eq!((told.known_ms, told.cpu_percent), (60_000, 50.0));
        assert_eq!(clock.tell(30).cpu_percent, 0.0);
        assert_eq!(clock.tell(3600).known_ms, 60_000);
        assert_eq!(clock.tell(30).busy_ago_ms, Some(30_000), "also where the window doesn't reach back so far");
    }

    #[test]
    fn only_more_than_idle_programs_use_is_busy() {
        let mut clock = Clock::new();
        clock.looks(10, 249);
        assert_eq!(clock.tell(60).busy_ago_ms, None);
        clock.looks(1, 250);
        clock.looks(1, 0);
        assert_eq!(clock.tell(60).busy_ago_ms, Some(5000));
        // Between two looks, once it is long enough to tell.
        clock.now += Duration::from_millis(500);
        clock.cpu_ms += 400;
        assert_eq!(clock.tell(60).busy_ago_ms, Some(5500));
        clock.now += Duration::from_millis(500);
        assert_eq!(clock.tell(60).busy_ago_ms, Some(0));
    }

    #[test]
    fn a_sleep_is_not_counted_and_looking_begins_anew() {
        let mut clock = Clock::new();
        clock.looks(3, 5000);
        clock.looks.keep_awake(clock.now, Duration::from_secs(60));
        clock.now += Duration::from_secs(7 * 3600);
        clock.cpu_ms += 9_000_000;
        let told = clock.tell(60);
        assert_eq!((told.known_ms, told.busy_ago_ms, told.cpu_percent), (0, None, 0.0));
        assert_eq!(told.keep_awake_ms, Some(55_000), "the wish counts awake time");
        clock.looks(1, 0);
        assert_eq!(clock.tell(60).known_ms, 5000);
        // A sleep that was too short to be seen, but of which the supervisor tells.
        clock.looks(2, 5000);
        clock.looks.begin_anew(clock.now, clock.cpu_ms);
        assert_eq!(clock.tell(60), GuestActivity { keep_awake_ms: Some(40_000), ..GuestActivity::default() });
    }

    #[test]
    fn a_wish_to_be_kept_awake_ends_with_its_time_or_when_it_is_taken_back() {
        let mut clock = Clock::new();
        clock.looks.keep_awake(clock.now, Duration::from_secs(12));
        clock.looks(2, 0);
        assert_eq!(clock.tell(60).keep_awake_ms, Some(2000));
        clock.looks(1, 0);
        assert_eq!(clock.tell(60).keep_awake_ms, None);
        clock.looks.keep_awake(clock.now, Duration::from_secs(12));
        clock.looks.keep_awake(clock.now, Duration::ZERO);
        assert_eq!(clock.tell(60).keep_awake_ms, None);
    }

    #[test]
    fn a_long_life_takes_bounded_memory_and_its_last_day_is_known() {
        let mut clock = Clock::new();
        clock.looks(3 * 24 * 720, 500);
        assert!(clock.looks.fine.len() <= FINE && clock.looks.coarse.len() <= COARSE);
        let told = clock.tell(24 * 3600);
        assert_eq!((told.known_ms, told.cpu_percent), (24 * 3_600_000, 10.0));
    }
}
