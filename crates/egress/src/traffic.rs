//! Accounts: bytes and connections of each host, and denials, each told at most once a minute.

use crate::{Denied, locked};
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// Most hosts that are counted apart; the rest are "other".
const MOST_HOSTS: usize = 256;
/// Most denied destinations that are told apart within one interval.
const MOST_DENIED: usize = 256;
/// How long after a denial was told the next of the same destination is only counted.
const DENIED_EVERY: Duration = Duration::from_secs(60);
/// The name under which what is too much is counted.
pub(crate) const OTHER: &str = "other";

/// What a host's connections have moved since they were asked last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostTraffic {
    pub host: String,
    pub connections: u64,
    pub sent_bytes: u64,
    pub received_bytes: u64,
}

/// One host's counters.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub connections: AtomicU64,
    pub sent: AtomicU64,
    pub received: AtomicU64,
}

/// The counters of all hosts.
#[derive(Default)]
pub(crate) struct Totals {
    hosts: Mutex<HashMap<String, Arc<Counters>>>,
}

impl Totals {
    /// The counters of a host.
    pub fn of(&self, host: &str) -> Arc<Counters> {
        let mut hosts = locked(&self.hosts);
        let own = host.to_owned();
        // One place is kept for what is too much.
        let name = if hosts.contains_key(host) || hosts.len() < MOST_HOSTS - 1 { own } else { OTHER.to_owned() };
        Arc::clone(hosts.entry(name).or_default())
    }

    /// What was counted since the last call.
    pub fn take(&self) -> Vec<HostTraffic> {
        let mut taken = Vec::new();
        locked(&self.hosts).retain(|host, counters| {
            let traffic = HostTraffic {
                host: host.clone(),
                connections: counters.connections.swap(0, Relaxed),
                sent_bytes: counters.sent.swap(0, Relaxed),
                received_bytes: counters.received.swap(0, Relaxed),
            };
            if traffic.connections + traffic.sent_bytes + traffic.received_bytes > 0 {
                taken.push(traffic);
            }
            Arc::strong_count(counters) > 1
        });
        taken
    }
}

/// Which denials were told, and when.
#[derive(Default)]
pub(crate) struct Denials {
    told: Mutex<HashMap<(String, u16), (Instant, u64)>>,
}

impl Denials {
    /// The event for this denial, unless the same destination had one just now.
    pub fn tell(&self, host: &str, port: u16, reason: &str, now: Instant) -> Option<Denied> {
        let mut told = locked(&self.told);
        let mut key = (host.chars().take(260).collect::<String>(), port);
        if !told.contains_key(&key) && told.len() >= MOST_DENIED - 1 {
            told.retain(|_, (last, _)| now.duration_since(*last) < DENIED_EVERY);
            if told.len() >= MOST_DENIED - 1 {
                key = (OTHER.to_owned(), 0);
            }
        }
        let (host, port) = key.clone();
        let mut count = 0;
        if let Some((last, suppressed)) = told.get_mut(&key) {
            if now.duration_since(*last) < DENIED_EVERY {
                *suppressed += 1;
                return None;
            }
            count = *suppressed;
        }
        told.insert(key, (now, 0));
        Some(Denied { host, port, reason: reason.to_owned(), count })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_denial_is_told_once_a_minute_with_what_was_left_out() {
        let (denials, start) = (Denials::default(), Instant::now());
        assert_eq!(denials.tell("a", 1, "why", start).unwrap().count, 0);
        assert_eq!(denials.tell("a", 1, "why", start), None);
        assert_eq!(denials.tell("a", 1, "why", start + Duration::from_secs(59)), None);
        assert!(denials.tell("a", 2, "why", start).is_some());
        assert_eq!(denials.tell("a", 1, "why", start + DENIED_EVERY).unwrap().count, 2);
    }

    #[test]
    fn many_denied_hosts_become_other() {
        let (denials, start) = (Denials::default(), Instant::now());
        let told: Vec<Denied> = (0..2000).filter_map(|n| denials.tell(&format!("h{n}"), 1, "why", start)).collect();
        assert_eq!(told.len(), MOST_DENIED);
        assert_eq!(told.last().unwrap().host, "other");
    }

    #[test]
    fn many_hosts_become_other_and_idle_ones_are_forgotten() {
        let totals = Totals::default();
        for n in 0..1000 {
            totals.of(&format!("h{n}")).sent.fetch_add(1, Relaxed);
        }
        let taken = totals.take();
        assert_eq!(taken.len(), MOST_HOSTS);
        assert_eq!(taken.iter().map(|host| host.sent_bytes).sum::<u64>(), 1000);
        assert!(taken.iter().any(|host| host.host == "other"));
        assert!(totals.take().is_empty());
        let kept = totals.of("h");
        kept.received.fetch_add(7, Relaxed);
        assert_eq!(totals.take()[0].received_bytes, 7);
        drop(kept);
        totals.take();
        assert!(locked(&totals.hosts).is_empty());
    }
}
