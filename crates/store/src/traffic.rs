//! What has gone over a session's network, host by host.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Connections and bytes of one host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostTotals {
    #[serde(default)]
    pub connections: u64,
    #[serde(default)]
    pub sent_bytes: u64,
    #[serde(default)]
    pub received_bytes: u64,
}

impl HostTotals {
    /// Counts more on top. Stays at the largest number rather than begin anew.
    pub fn add(&mut self, more: HostTotals) {
        self.connections = self.connections.saturating_add(more.connections);
        self.sent_bytes = self.sent_bytes.saturating_add(more.sent_bytes);
        self.received_bytes = self.received_bytes.saturating_add(more.received_bytes);
    }

    /// Both directions together.
    pub fn bytes(&self) -> u64 {
        self.sent_bytes.saturating_add(self.received_bytes)
    }
}

/// Totals by host. Programs inside choose the hosts, so their number is bounded.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Traffic(BTreeMap<String, HostTotals>);

impl Traffic {
    /// How many hosts are counted each by itself.
    pub const MOST: usize = 256;
    /// What is counted of all the others.
    pub const OTHER: &'static str = "other";
    /// Longest name of a host that is kept.
    const LONGEST: usize = 255;

    /// Counts more of a host.
    pub fn add(&mut self, host: &str, more: HostTotals) {
        let known = self.0.contains_key(host);
        let hosts = self.0.len() - usize::from(self.0.contains_key(Self::OTHER));
        let has_room = hosts < Self::MOST && host.len() <= Self::LONGEST;
        let host = if known || has_room { host } else { Self::OTHER };
        self.0.entry(host.to_owned()).or_default().add(more);
    }

    /// Every host with its totals, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &HostTotals)> {
        self.0.iter().map(|(host, totals)| (host.as_str(), totals))
    }

    /// The hosts with the most bytes, and all others as one.
    pub fn top(&self, most: usize) -> Vec<(String, HostTotals)> {
        let mut all: Vec<_> = self.0.iter().map(|(host, totals)| (host.clone(), *totals)).collect();
        all.sort_by(|(a, one), (b, other)| other.bytes().cmp(&one.bytes()).then_with(|| a.cmp(b)));
        let mut rest = HostTotals::default();
        let mut top = Vec::new();
        for (host, totals) in all {
            if host == Self::OTHER || top.len() >= most {
                rest.add(totals);
            } else {
                top.push((host, totals));
            }
        }
        if rest != HostTotals::default() {
            top.push((Self::OTHER.to_owned(), rest));
        }
        top
    }

    /// True where nothing has gone over it.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test fails by panicking.
    use super::*;

    fn bytes(sent_bytes: u64) -> HostTotals {
        HostTotals { connections: 1, sent_bytes, received_bytes: 0 }
    }

    #[test]
    fn hosts_beyond_the_limit_are_counted_together() {
        let mut traffic = Traffic::default();
        for n in 0..300u64 {
            traffic.add(&format!("h{n}"), bytes(n));
            traffic.add(&format!("h{n}"), bytes(1));
        }
        traffic.add(&"x".repeat(300), bytes(1));
        assert_eq!(traffic.iter().count(), Traffic::MOST + 1);
        let other = traffic.iter().find(|(host, _)| *host == Traffic::OTHER).unwrap().1;
        assert_eq!(other.connections, 2 * 44 + 1);
        let top = traffic.top(2);
        assert_eq!(top.iter().map(|(host, _)| host.as_str()).collect::<Vec<_>>(), ["h255", "h254", "other"]);
        let all: u64 = top.iter().map(|(_, totals)| totals.bytes()).sum();
        assert_eq!(all, (0..300).sum::<u64>() + 300 + 1, "nothing is left out");
        let read: Traffic = serde_json::from_str(&serde_json::to_string(&traffic).unwrap()).unwrap();
        assert_eq!(read, traffic);
    }
}
