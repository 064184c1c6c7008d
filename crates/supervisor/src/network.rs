//! The session's network: what programs inside ask for goes to the edge, what comes for them goes in.
//!
//! ```text
//!  guest ══ Dial ══► Inside (a stream of the link) ──► egress ──► the world
//!  guest ◄══ Dial ══ Inside ◄── a connection of the server's (previews)
//! ```
//! Connections go on through a capture that the sandbox outlives, and end with its generation. Nothing goes out before
//! the policy is known, and nothing that needs credentials before those have come.

mod inside;

use crate::{
    activity::Kind,
    core::{Core, State},
    facts::now,
};
use egress::{Ask, Egress, Grant, HostTraffic, Observer, RequestLine, Settings};
use inside::Inside;
use model::Timestamp;
use serde_json::json;
use std::sync::{Arc, OnceLock, Weak};
use tokio::time::Instant;
use wire::{
    Code, FrameError, StreamId, WireError,
    control::{CaSeed, Credentials, NetworkSpec, OpenConnection, Phase},
    facts::{Fact, HostTraffic as TrafficFact},
    guest::{
        CONNECTION_STREAMS, Dial, GuestEvent, HelloReply, ListeningPort, Network, PROXY_PORT, Reply, Request, Role, StreamAt,
    },
    layout::JournalName,
    window::SendWindow,
};

pub use inside::{Arrived, Incoming, Outgoing};

/// Open connections that are listed.
const LISTED: usize = 200;
/// Most connections at once.
const MOST_CONNECTIONS: usize = 2048;
/// The same with those that wait to be forgotten: more than any guest has that keeps to its own limits.
const MOST_KNOWN: usize = 8192;
/// Hosts of which traffic is told at once, those with the most; the rest is one.
const MOST_HOSTS: usize = 32;
/// Facts that wait for room on the disk before what happens on the network is left out.
const MOST_WAITING: usize = 1000;
/// Listening ports that are listed, and characters of what is said of each.
const MOST_PORTS: usize = 1000;
const LONGEST_WORD: usize = 100;
/// Bytes of a line of the requests' log.
const LONGEST_LINE: usize = 4096;

/// What the supervisor has of the network.
#[derive(Default)]
pub struct Edge {
    egress: OnceLock<Egress>,
}

/// Writes down what happens at the edge.
struct Scribe(Weak<Core>);

impl Observer for Scribe {
    fn denied(&self, denied: egress::Denied) {
        let Some(core) = self.0.upgrade() else { return };
        let mut state = core.state();
        // A program inside that knocks at many doors doesn't fill the session's history.
        if state.denials.may(Instant::now()) && state.facts.waiting() < MOST_WAITING {
            let egress::Denied { host, port, reason, count } = denied;
            state.facts.record(Fact::NetworkDenied { host, port, reason, repeated: count });
        }
    }

    fn traffic(&self) {
        if let Some(core) = self.0.upgrade() {
            core.note_activity(Kind::Traffic, "");
        }
    }

    fn request(&self, request: RequestLine) {
        let Some(core) = self.0.upgrade() else { return };
        let at = now();
        let RequestLine { method, host, path, status, sent_bytes, received_bytes, duration_ms } = request;
        let path: String = path.chars().take(LONGEST_LINE / 4).collect();
        let line = json!({ "at": at, "method": method, "host": host, "path": path, "status": status,
            "sent_bytes": sent_bytes, "received_bytes": received_bytes, "duration_ms": duration_ms });
        // Whole lines or none: a log that has no room has a hole, and stops nobody.
        let written = core.state().journals.append(&JournalName::Requests, format!("{line}\n").as_bytes(), at);
        if let Err(error) = written {
            tracing::warn!(%error, "a request is not written down");
        }
    }
}

impl Core {
    /// Says what the session may reach; what is open and denied now is cut.
    pub fn apply_network(&self, network: &NetworkSpec) {
        let edge = self.edge.egress.get_or_init(|| {
            let settings =
                Settings { extra_roots: network.roots.clone(), max_connections: MOST_CONNECTIONS, ..Settings::default() };
            Egress::new(settings, Arc::new(Scribe(self.me.clone())))
        });
        edge.set_policy(Grant { policy: network.policy.clone(), closed: network.closed.clone() });
    }

    /// The same with credentials, and with what the guest has to set up.
    ///
    /// # Errors
    /// The guest can't be told.
    pub async fn set_network(&self, network: NetworkSpec, credentials: Credentials, inside: Network) -> Result<(), WireError> {
        self.apply_network(&network);
        if let Some(edge) = self.edge.egress.get() {
            edge.set_credentials(at_the_edge(credentials)?);
        }
        if let Some(identity) = &mut self.state().identity {
            identity.network = Some(inside);
        }
        self.tell_network().await
    }

    /// Has the guest set up what it was not told yet, where it runs.
    ///
    /// # Errors
    /// It can't be told.
    pub async fn tell_network(&self) -> Result<(), WireError> {
        let network = {
            let state = self.state();
            let network = state.identity.as_ref().and_then(|identity| identity.network.clone());
            network.filter(|network| state.network_told.as_ref() != Some(network) && self.phase() == Phase::Running)
        };
        let Some(network) = network else { return Ok(()) };
        match self.link.request(Request::SetNetwork { network: network.clone() }).await {
            // One that is older than the network has no use for it.
            Ok(_) | Err(WireError { code: Code::Unsupported, .. }) => {
                self.state().network_told = Some(network);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// A program inside wants to go out.
    ///
    /// # Errors
    /// A number that no guest may use, or that is in use.
    pub fn dialed(&self, stream: StreamId, to: Dial) -> Result<(), FrameError> {
        if stream.0 < CONNECTION_STREAMS || self.receives(stream) || self.link.is_sending(stream) {
            return Err(FrameError::BadControl(format!("stream {} can't be a new connection's", stream.0)));
        }
        if self.connections().max(self.link.connections()) >= MOST_KNOWN {
            return Err(FrameError::BadControl("more connections than there can be".to_owned()));
        }
        let (Some(core), Some(egress)) = (self.me.upgrade(), self.edge.egress.get().cloned()) else {
            self.link.reset(stream, "there is no network");
            return Ok(());
        };
        self.link.open_sending(stream, SendWindow::of_connection());
        let ask = match to {
            Dial::Proxy => Ask::Proxy,
            Dial::To { host, port } => Ask::To { host, port },
            Dial::Name { name } => {
                self.answer_name(stream, egress.lookup(&name));
                return Ok(());
            }
        };
        let inside = Inside::new(core.clone(), stream);
        tokio::spawn(async move { egress.serve(inside, ask, move |to| core.link.connected(stream, to)).await });
        Ok(())
    }

    fn answer_name(&self, stream: StreamId, ports: Option<Vec<u16>>) {
        let answer = wire::guest::NameAnswer { allowed: ports.is_some(), ports: ports.unwrap_or_default() };
        let json = serde_json::to_vec(&answer).unwrap_or_default();
        self.link.offer(stream, &json);
        self.link.finish(stream);
    }

    /// Connects to a port inside.
    ///
    /// # Errors
    /// `NotFound` where nobody listens, or the guest can't be asked.
    pub async fn dial(self: &Arc<Self>, port: u16) -> Result<(Incoming, Outgoing), WireError> {
        if port == PROXY_PORT {
            // Whoever comes in by a preview must not go out again as the session.
            return Err(WireError::new(Code::NotFound, format!("port {port} is the session's own way out")));
        }
        let stream = self.link.new_stream();
        let inside = Inside::new(self.clone(), stream);
        self.link.open_sending(stream, SendWindow::of_connection());
        self.link.request(Request::Dial { stream, port }).await?;
        self.note_activity(Kind::Traffic, &format!("port {port}"));
        Ok(inside.split())
    }

    /// The ports on which programs listen.
    ///
    /// # Errors
    /// The guest can't be asked.
    pub async fn ports(&self) -> Result<Vec<ListeningPort>, WireError> {
        match self.link.request(Request::Ports).await {
            Ok(Reply::Ports { items }) => Ok(items.into_iter().take(MOST_PORTS).map(clipped).collect()),
            Ok(_) => Err(WireError::new(Code::Protocol, "the guest answered with something else")),
            Err(error) => Err(error),
        }
    }

    /// What is open now, and how many that is. What has gone over the network up to now is written down first.
    pub fn open_connections(&self) -> (Vec<OpenConnection>, u64) {
        self.record_traffic();
        let open = self.edge.egress.get().map(Egress::open).unwrap_or_default();
        let count = open.len() as u64;
        let millis = |duration: std::time::Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        let told = |open: egress::OpenConnection| OpenConnection {
            to: open.to,
            age_ms: millis(open.age),
            sent_bytes: open.sent_bytes,
            received_bytes: open.received_bytes,
            awaits_ms: open.awaits_answer_for.map(millis),
        };
        (open.into_iter().take(LISTED).map(told).collect(), count)
    }

    /// An answer from outside that a program waits for is activity, however long it takes.
    pub fn note_awaited(&self) {
        let open = self.edge.egress.get().map(Egress::open).unwrap_or_default();
        if let Some(awaited) = open.iter().find(|open| open.awaits_answer_for.is_some()) {
            self.note_activity(Kind::Traffic, &format!("waits for {}", awaited.to));
        }
    }

    /// Writes down what has gone over the network since the last time.
    pub fn record_traffic(&self) {
        let Some(egress) = self.edge.egress.get() else { return };
        let told = |traffic: HostTraffic| TrafficFact {
            host: traffic.host,
            connections: traffic.connections,
            sent_bytes: traffic.sent_bytes,
            received_bytes: traffic.received_bytes,
        };
        if self.state().facts.waiting() >= MOST_WAITING {
            // The disk is full: it is counted on, and written down later.
            return;
        }
        let mut items: Vec<TrafficFact> = egress.take_traffic().into_iter().map(told).collect();
        items.sort_by_key(|host| std::cmp::Reverse(host.sent_bytes + host.received_bytes));
        if items.len() > MOST_HOSTS {
            let rest = items.split_off(MOST_HOSTS).into_iter().fold(others(), add);
            items.push(rest);
        }
        if !items.is_empty() {
            self.record(Fact::Traffic { items });
        }
    }

    /// The generation has ended, and all its connections with it.
    pub fn end_connections(&self) {
        if let Some(egress) = self.edge.egress.get() {
            egress.close_all();
        }
        self.link.end_connections();
        self.drop_connections("the session slept");
    }

    /// Goes on with the connections that a guest still has after a greeting; the offsets from which it shall send.
    pub fn rejoin_connections(&self, reply: &HelloReply) -> Vec<StreamAt> {
        let mut acks = Vec::new();
        for sending in reply.sending.iter().filter(|sending| sending.role == Role::Connection) {
            // One that has ended is told again to nobody, and then forgotten by the guest.
            let offset = self.acked(sending.stream).unwrap_or(if sending.ended { sending.to } else { sending.from });
            acks.push(StreamAt { stream: sending.stream, offset });
        }
        let sent = |stream: &StreamId| reply.sending.iter().any(|sending| sending.stream == *stream);
        self.drop_connections_but(sent);
        acks
    }

    /// The connections that only the guest still has: it is told that they are gone.
    pub fn reset_strays(&self, reply: &HelloReply) {
        let sends = reply.sending.iter().filter(|sending| sending.role == Role::Connection && !sending.ended);
        // A question for a name expects an answer and nothing else.
        let is_stray = |stream: &StreamId| !self.receives(*stream) && !self.link.is_sending(*stream);
        let strays = sends.map(|sending| sending.stream).filter(is_stray);
        let receives = reply.receiving.iter().filter(|receiving| receiving.role == Role::Connection && !receiving.ended);
        let unsent = receives.map(|receiving| receiving.stream).filter(|stream| !self.link.is_sending(*stream));
        for stream in strays.chain(unsent).collect::<std::collections::BTreeSet<_>>() {
            self.link.reset(stream, "the connection is gone");
        }
    }
}

/// Writes down that a program has begun or ceased to listen, in bounded words: the guest is hostile.
pub fn port_changed(state: &mut State, event: GuestEvent) {
    if !state.ports.may(Instant::now()) || state.facts.waiting() >= MOST_WAITING {
        return;
    }
    match event {
        GuestEvent::PortOpened { port } => state.facts.record(Fact::PortOpened { port: clipped(port) }),
        GuestEvent::PortClosed { port } => state.facts.record(Fact::PortClosed { port }),
        _ => {}
    }
}

fn others() -> TrafficFact {
    TrafficFact { host: "other".to_owned(), ..TrafficFact::default() }
}

fn add(sum: TrafficFact, one: TrafficFact) -> TrafficFact {
    TrafficFact {
        host: sum.host,
        connections: sum.connections + one.connections,
        sent_bytes: sum.sent_bytes + one.sent_bytes,
        received_bytes: sum.received_bytes + one.received_bytes,
    }
}

fn clipped(port: ListeningPort) -> ListeningPort {
    let clip = |text: String| text.chars().filter(|c| !c.is_control()).take(LONGEST_WORD).collect();
    ListeningPort { address: clip(port.address), program: port.program.map(clip), ..port }
}

fn at_the_edge(credentials: Credentials) -> Result<egress::Credentials, WireError> {
    let Credentials { secrets, ca, withheld } = credentials;
    let key = |ca: CaSeed| -> Result<egress::CaKey, WireError> {
        let seed = ca.bytes().ok_or_else(|| WireError::new(Code::Invalid, "the seed of an authority is 32 bytes"))?;
        Ok(egress::CaKey { seed, label: ca.label.clone(), not_before: ca.from.since(Timestamp(0)).as_secs() })
    };
    Ok(egress::Credentials { secrets, ca: ca.map(key).transpose()?, withheld })
}
