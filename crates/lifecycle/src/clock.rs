//! A session's clocks: what is due when, and how an operation sets them.
//!
//! `timeout_at` ends the present sandbox and counts awake time: it is set anew by everything that brings a sandbox to
//! life, stands still while the session is paused, and is gone while it sleeps. `expires_at` ends the session, whatever
//! it does. `wake_at` ends a sleep. `try_again_at` belongs to a session that was paused because it could not be
//! hibernated. All are instants that are stored, so that a server that comes back finds what is overdue.

use model::{OperationKind, State, Timestamp};
use std::time::Duration;

/// How long before the end of the allowed running time programs are told.
pub const TIMEOUT_NOTICE: Duration = Duration::from_secs(30);

/// All clocks of a session.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Clocks {
    /// How long each sandbox may run.
    pub timeout: Option<Duration>,
    pub timeout_at: Option<Timestamp>,
    /// What was left of the running time when the session was paused.
    pub timeout_left: Option<Duration>,
    /// Programs were told that the present running time is about to end.
    pub timeout_told: bool,
    pub expires_at: Option<Timestamp>,
    pub wake_at: Option<Timestamp>,
    pub try_again_at: Option<Timestamp>,
}

/// Something that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Alarm {
    /// The session's end.
    Expire,
    /// The end of the running time.
    Timeout,
    /// The running time ends within [`TIMEOUT_NOTICE`].
    TimeoutNear,
    Wake,
    /// Look whether the session is idle.
    LookForIdleness,
    /// Hibernate a session that was paused because that had failed.
    TryAgain,
}

impl Clocks {
    /// Each alarm that can go off in `state` with its instant, the weightiest first. `idle_look_at`: when to look for
    /// idleness.
    fn alarms(&self, state: State, idle_look_at: Option<Timestamp>) -> [(Alarm, Option<Timestamp>); 6] {
        let only = |when: bool, at: Option<Timestamp>| at.filter(|_| when);
        let running = state == State::Running;
        let notice = self.timeout_at.filter(|_| !self.timeout_told).map(|at| before(at, TIMEOUT_NOTICE));
        [
            (Alarm::Expire, only(state != State::Deleted && state != State::Creating, self.expires_at)),
            (Alarm::Timeout, only(running, self.timeout_at)),
            (Alarm::TimeoutNear, only(running, notice)),
            (Alarm::Wake, only(matches!(state, State::Hibernated | State::Paused), self.wake_at)),
            (Alarm::TryAgain, only(state == State::Paused, self.try_again_at)),
            (Alarm::LookForIdleness, only(running, idle_look_at)),
        ]
    }

    /// What is due at `now`: of several the weightiest.
    pub fn due(&self, state: State, idle_look_at: Option<Timestamp>, now: Timestamp) -> Option<Alarm> {
        let alarms = self.alarms(state, idle_look_at);
        alarms.into_iter().find(|(_, at)| at.is_some_and(|at| at <= now)).map(|(alarm, _)| alarm)
    }

    /// When the next alarm goes off, if nothing changes until then.
    pub fn next(&self, state: State, idle_look_at: Option<Timestamp>) -> Option<Timestamp> {
        self.alarms(state, idle_look_at).into_iter().filter_map(|(_, at)| at).min()
    }

    /// The clocks after an operation that was done at `now`.
    pub fn after(&self, kind: OperationKind, state: State, now: Timestamp) -> Clocks {
        let anew = self.timeout.map(|timeout| now.plus(timeout));
        let mut clocks = Clocks { timeout_told: false, try_again_at: None, ..*self };
        match (kind, state) {
            // One that goes on where it was goes on with the time that was left.
            (OperationKind::Unpause, _) => {
                clocks.timeout_at = self.timeout_left.map_or(anew, |left| Some(now.plus(left)));
                clocks.timeout_left = None;
                clocks.timeout_told = self.timeout_told && self.timeout_left.is_some();
            }
            // A copy was made beside programs that did not stop, or that sleep on.
            (OperationKind::Snapshot, _) => return *self,
            // The sandbox was changed under programs that did not stop.
            (OperationKind::Recapture, State::Running) => return *self,
            (_, State::Running) => {
                clocks.timeout_at = anew;
                clocks.timeout_left = None;
            }
            (OperationKind::Pause, _) => {
                clocks.timeout_left = self.timeout_at.map(|at| at.since(now));
                clocks.timeout_at = None;
                clocks.timeout_told = self.timeout_told;
            }
            (_, State::Paused) => return *self,
            _ => {
                clocks.timeout_at = None;
                clocks.timeout_left = None;
            }
        }
        // What became due while it was awake would end its sleep at once.
        if (state != State::Hibernated && state != State::Paused) || clocks.wake_at.is_some_and(|at| at <= now) {
            clocks.wake_at = None;
        }
        clocks
    }

    /// The clocks of a session whose sandbox is gone.
    pub fn without_sandbox(&self) -> Clocks {
        Clocks { timeout_at: None, timeout_left: None, timeout_told: false, try_again_at: None, wake_at: None, ..*self }
    }
}

/// How long to wait before a hibernate that failed is tried the next time: a minute, then twice as long each time, at
/// most an hour.
pub fn try_again_after(tries: u32) -> Duration {
    Duration::from_secs(60 << tries.min(6)).min(Duration::from_secs(3600))
}

fn before(at: Timestamp, by: Duration) -> Timestamp {
    Timestamp(at.0.saturating_sub(i64::try_from(by.as_millis()).unwrap_or(i64::MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{prelude::*, sample::select};

    const NOW: Timestamp = Timestamp(1_000_000);

    fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    #[test]
    fn what_is_due_depends_on_the_state() {
        let all = Clocks {
            timeout: Some(seconds(100)),
            timeout_at: Some(NOW),
            expires_at: Some(NOW.plus(seconds(5))),
            wake_at: Some(NOW),
            try_again_at: Some(NOW),
            ..Clocks::default()
        };
        let cases = [
            (State::Running, Some(Alarm::Timeout)),
            (State::Hibernated, Some(Alarm::Wake)),
            (State::Paused, Some(Alarm::Wake)),
            (State::Stopped, None),
            (State::Failed, None),
            (State::Deleted, None),
        ];
        for (state, alarm) in cases {
            assert_eq!(all.due(state, None, NOW), alarm, "{state}");
            let later = NOW.plus(seconds(5));
            let expected = (state != State::Deleted).then_some(Alarm::Expire);
            assert_eq!(all.due(state, None, later), expected, "{state}: the session's end goes before everything");
        }
        assert_eq!(Clocks::default().due(State::Running, Some(NOW), NOW), Some(Alarm::LookForIdleness));
        assert_eq!(Clocks::default().due(State::Paused, Some(NOW), NOW), None);
        assert_eq!(Clocks { try_again_at: Some(NOW), ..Clocks::default() }.due(State::Paused, None, NOW), Some(Alarm::TryAgain));
    }

    #[test]
    fn the_end_of_the_running_time_is_told_ahead_and_once() {
        let clocks = Clocks { timeout_at: Some(NOW.plus(seconds(30))), ..Clocks::default() };
        assert_eq!(clocks.next(State::Running, None), Some(NOW));
        assert_eq!(clocks.due(State::Running, None, NOW), Some(Alarm::TimeoutNear));
        let told = Clocks { timeout_told: true, ..clocks };
        assert_eq!(told.due(State::Running, None, NOW), None);
        assert_eq!(told.next(State::Running, None), Some(NOW.plus(seconds(30))));
    }

    #[test]
    fn the_running_time_counts_awake_time() {
        let running =
            Clocks { timeout: Some(seconds(100)), ..Clocks::default() }.after(OperationKind::Create, State::Running, NOW);
        assert_eq!(running.timeout_at, Some(NOW.plus(seconds(100))));
        let paused = running.after(OperationKind::Pause, State::Paused, NOW.plus(seconds(40)));
        assert_eq!((paused.timeout_at, paused.timeout_left), (None, Some(seconds(60))));
        let later = NOW.plus(seconds(10_000));
        assert_eq!(paused.after(OperationKind::Unpause, State::Running, later).timeout_at, Some(later.plus(seconds(60))));
        let asleep = running.after(OperationKind::Hibernate, State::Hibernated, NOW.plus(seconds(40)));
        assert_eq!((asleep.timeout_at, asleep.timeout_left), (None, None));
        let woken = asleep.after(OperationKind::Wake, State::Running, later);
        assert_eq!(woken.timeout_at, Some(later.plus(seconds(100))), "a wake sets it anew");
        assert_eq!(running.after(OperationKind::Recapture, State::Running, later), running, "a recapture moves nothing");
        for (state, clocks) in [(State::Running, running), (State::Paused, paused), (State::Hibernated, asleep)] {
            let told = Clocks { timeout_told: true, try_again_at: Some(later), wake_at: Some(NOW), ..clocks };
            assert_eq!(told.after(OperationKind::Snapshot, state, later), told, "nor does a snapshot of one that is {state}");
        }
        let back = Clocks { wake_at: Some(later), ..running }.after(OperationKind::Rollback, State::Stopped, NOW);
        assert_eq!((back.timeout_at, back.timeout_left, back.wake_at), (None, None, None), "a way back ends the sandbox");
        assert_eq!(running.without_sandbox().timeout_at, None);
        let overdue = Clocks { wake_at: Some(NOW), ..running };
        assert_eq!(overdue.after(OperationKind::Hibernate, State::Hibernated, NOW).wake_at, None);
        assert_eq!(overdue.after(OperationKind::Hibernate, State::Hibernated, Timestamp(NOW.0 - 1)).wake_at, Some(NOW));
    }

    #[test]
    fn a_hibernate_is_tried_again_less_and_less_often() {
        let waits: Vec<u64> = (0..9).map(|tries| try_again_after(tries).as_secs()).collect();
        assert_eq!(waits, [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]);
        assert_eq!(try_again_after(u32::MAX).as_secs(), 3600);
    }

    fn instant() -> impl Strategy<Value = Option<Timestamp>> {
        proptest::option::of((0i64..2_000_000).prop_map(Timestamp))
    }

    proptest! {
        /// What `next` names goes off then and not before, and no operation moves the session's own end.
        #[test]
        fn an_alarm_goes_off_when_it_was_foretold(
            timeout_at in instant(), expires_at in instant(), wake_at in instant(), try_again_at in instant(),
            look in instant(), told in any::<bool>(), state in select(State::ALL), kind in select(OperationKind::ALL),
        ) {
            let timeout = Some(seconds(7));
            let clocks = Clocks { timeout, timeout_at, expires_at, wake_at, try_again_at, timeout_told: told, timeout_left: None };
            match clocks.next(state, look) {
                Some(at) => {
                    prop_assert!(clocks.due(state, look, at).is_some());
                    prop_assert!(clocks.due(state, look, Timestamp(at.0 - 1)).is_none());
                }
                None => prop_assert!(clocks.due(state, look, Timestamp(i64::MAX)).is_none()),
            }
            let after = clocks.after(kind, state, NOW);
            prop_assert_eq!(after.expires_at, expires_at);
            prop_assert!(kind != OperationKind::Snapshot || after == clocks);
            prop_assert!(after.timeout_at.is_none() || after.timeout_left.is_none());
        }
    }
}
