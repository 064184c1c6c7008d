//! What programs inside are told of the session's life, and what they have said that they wait for.
//!
//! A wake is noticed by the supervisor's Hello: its generation is above the last one, or its session is another: then this
//! is a fork. What is about to happen comes as a
//! request. Both go to whoever listens on the socket inside ([`crate::dialogue`]); those who listen sleep and wake with
//! the session, so that a program learns of a wake that it slept through.

use model::{Generation, SessionId};
use serde_json::{Value, json};
use std::{
    cell::{Cell, RefCell},
    time::{Duration, SystemTime},
};
use tokio::sync::{broadcast, watch};
use wire::guest::{Hello, Waiting};

/// Moments that a slow listener may be behind; then it is told how many it has missed.
const KEPT: usize = 64;

/// Whose sandbox this is and when it woke last.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Life {
    pub session: Option<SessionId>,
    /// `None` until the first Hello.
    pub generation: Option<Generation>,
    /// How long the last sleep was, where there was one and that is known.
    pub gap_ms: Option<u64>,
    /// The session that this one was forked from, where the last wake was a fork.
    pub fork_of: Option<SessionId>,
    /// Wakes that this sandbox has seen.
    pub wakes: u64,
}

impl Life {
    /// The last wake, as listeners are told of it.
    pub fn wake(&self) -> Value {
        let gap = self.gap_ms.map(|ms| ms as f64 / 1000.0);
        let mut wake = json!({ "event": "wake", "generation": self.generation, "gap_seconds": gap });
        if let Some(parent) = self.fork_of {
            wake["fork_of"] = json!(parent);
        }
        wake
    }
}

/// Owned by the main thread.
pub struct Moments {
    life: watch::Sender<Life>,
    told: broadcast::Sender<Value>,
    pub waiting: RefCell<Option<Waiting>>,
    /// By the machine's clock, since the other one need not go on meanwhile.
    quiesced_at: Cell<Option<SystemTime>>,
}

impl Moments {
    pub fn new() -> Self {
        Self {
            life: watch::channel(Life::default()).0,
            told: broadcast::channel(KEPT).0,
            waiting: RefCell::new(None),
            quiesced_at: Cell::new(None),
        }
    }

    /// The memory may be saved from here on.
    pub fn quiesced(&self, at: SystemTime) {
        self.quiesced_at.set(Some(at));
    }

    /// Takes a Hello in. True where it ends a sleep: listeners are told of it then.
    pub fn hello(&self, hello: &Hello, at: SystemTime) -> bool {
        let slept_since = self.quiesced_at.take();
        let (known, was) = {
            let life = self.life.borrow();
            (life.generation, life.session)
        };
        // One that waited for a session belonged to none before.
        let fork_of = was.filter(|was| hello.session.is_some_and(|session| session != *was));
        let woke = fork_of.is_some() || known.is_some_and(|known| hello.generation > known);
        // An older supervisor doesn't say how long it was.
        let since = |from| at.duration_since(from).unwrap_or(Duration::ZERO);
        let measured = || slept_since.map(|from| u64::try_from(since(from).as_millis()).unwrap_or(u64::MAX));
        self.life.send_modify(|life| {
            life.session = hello.session;
            if woke {
                life.gap_ms = hello.gap_ms.or_else(measured);
                life.fork_of = fork_of;
                life.wakes += 1;
            }
            if life.generation.is_none() || woke {
                life.generation = Some(hello.generation);
            }
        });
        if woke {
            self.tell(self.life.borrow().wake());
        }
        woke
    }

    /// Tells listeners what is about to happen.
    pub fn about_to(&self, moment: &str, seconds: Option<u64>) {
        let mut line = json!({ "event": moment });
        if let Some(seconds) = seconds {
            line["seconds"] = seconds.into();
        }
        self.tell(line);
    }

    fn tell(&self, line: Value) {
        // Without listeners nobody is told.
        let _ = self.told.send(line);
    }

    /// Follows the session's life; what is there now counts as seen.
    pub fn follow(&self) -> watch::Receiver<Life> {
        self.life.subscribe()
    }

    /// Listens to moments from now on.
    pub fn listen(&self) -> broadcast::Receiver<Value> {
        self.told.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::guest::PROTOCOL;

    fn hello(generation: u64, gap_ms: Option<u64>) -> Hello {
        serde_json::from_value(json!({ "protocol": PROTOCOL, "generation": generation, "gap_ms": gap_ms })).unwrap()
    }

    #[test]
    fn only_a_later_generation_is_a_wake() {
        let (moments, now) = (Moments::new(), SystemTime::now());
        let mut listener = moments.listen();
        assert!(!moments.hello(&hello(3, Some(5)), now), "a boot, of whatever generation");
        moments.quiesced(now);
        assert!(!moments.hello(&hello(3, None), now), "a capture that was taken back");
        assert!(listener.try_recv().is_err());
        moments.quiesced(now);
        assert!(moments.hello(&hello(4, Some(90_500)), now));
        assert_eq!(listener.try_recv().unwrap(), json!({ "event": "wake", "generation": 4, "gap_seconds": 90.5 }));
        assert!(!moments.hello(&hello(2, None), now), "nothing goes back");
        assert_eq!(moments.follow().borrow().generation, Some(Generation(4)));
    }

    #[test]
    fn another_session_is_a_fork_whatever_its_generation() {
        let (moments, now) = (Moments::new(), SystemTime::now());
        let of = |session, generation| Hello { session, ..hello(generation, Some(10)) };
        let (parent, fork) = (SessionId::new(), SessionId::new());
        assert!(!moments.hello(&of(None, 1), now), "one that waits for a session");
        assert!(!moments.hello(&of(Some(parent), 1), now), "it has become somebody's");
        assert!(moments.hello(&of(Some(parent), 4), now));
        assert_eq!(moments.follow().borrow().wake().get("fork_of"), None);
        assert!(moments.hello(&of(Some(fork), 1), now));
        let life = moments.follow().borrow().clone();
        assert_eq!((life.session, life.generation, life.wakes), (Some(fork), Some(Generation(1)), 2));
        assert_eq!(life.wake()["fork_of"], json!(parent));
        assert!(moments.hello(&of(Some(fork), 2), now));
        assert_eq!(moments.follow().borrow().wake().get("fork_of"), None, "a wake like any other");
    }

    #[test]
    fn where_nobody_says_how_long_the_sleep_was_the_clock_does() {
        let (moments, now) = (Moments::new(), SystemTime::now());
        moments.hello(&hello(1, None), now);
        moments.quiesced(now);
        assert!(moments.hello(&hello(2, None), now + Duration::from_millis(1500)));
        assert_eq!(moments.follow().borrow().gap_ms, Some(1500));
        assert!(moments.hello(&hello(3, None), now), "no quiesce was seen");
        assert_eq!(moments.follow().borrow().wake(), json!({ "event": "wake", "generation": 3, "gap_seconds": null }));
    }

    #[test]
    fn a_moment_carries_its_seconds_where_it_has_some() {
        let moments = Moments::new();
        let mut listener = moments.listen();
        moments.about_to("before_stop", None);
        moments.about_to("timeout_near", Some(30));
        assert_eq!(listener.try_recv().unwrap(), json!({ "event": "before_stop" }));
        assert_eq!(listener.try_recv().unwrap(), json!({ "event": "timeout_near", "seconds": 30 }));
    }
}
