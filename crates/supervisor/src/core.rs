//! What the supervisor knows, and what it does with what the guest says.

use crate::{
    activity::{Allowance, Kind, Quiet},
    disk::DiskLimit,
    facts::{FactLog, now},
    journals::Journals,
    link::{Incoming, Link},
    network::{Arrived, Edge, port_changed},
    terminals::Terminals,
    works::Works,
};
use bytes::Bytes;
use model::{Generation, Offset, ServiceName, SessionId, Timestamp};
use runtime::Sandbox;
use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, Weak},
};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use wire::{
    FrameError, StreamId, WireError,
    control::{Phase, SuperviseSpec},
    facts::Fact,
    guest::{Dial, GuestEvent, Identity, Network, ResetConnections, Work},
    layout::{JournalName, SessionLayout},
    window::{Arrival, CONNECTION_WINDOW, WINDOW, arrive},
};

/// Where the supervisor stands, and why if it failed.
#[derive(Debug, Clone)]
pub struct Now {
    pub phase: Phase,
    pub failure: Option<WireError>,
}

/// Everything shared by the supervisor's tasks.
pub struct Core {
    pub spec: SuperviseSpec,
    pub layout: SessionLayout,
    pub sandbox: Arc<dyn Sandbox>,
    pub link: Link,
    pub edge: Edge,
    /// Itself, for tasks that it starts.
    pub me: Weak<Core>,
    pub disk: DiskLimit,
    pub now: watch::Sender<Now>,
    /// Cancelled when the process should end.
    pub quit: CancellationToken,
    /// True while it stands still for a snapshot, after which it goes on as it was.
    pub still: watch::Sender<bool>,
    /// One lifecycle step at a time.
    pub step: tokio::sync::Mutex<()>,
    /// What has happened in the session, and its awake time.
    pub quiet: Mutex<Quiet>,
    /// Interrupts a confirmation that is under way.
    pub interrupt_confirm: Mutex<CancellationToken>,
    /// Held by a confirmation until it has cleaned up: the next one uses the same names.
    pub confirming: tokio::sync::Mutex<()>,
    state: Mutex<State>,
}

/// What changes while the sandbox runs.
pub struct State {
    pub session: Option<SessionId>,
    pub generation: Generation,
    /// How long the session slept, for the next greeting.
    pub gap_ms: Option<u64>,
    pub identity: Option<Identity>,
    /// What the guest has been told of its network.
    pub network_told: Option<Network>,
    /// The connections that were reset when this generation began.
    pub reset: ResetConnections,
    pub guest_version: Option<String>,
    pub journals: Journals,
    pub facts: FactLog,
    pub works: Works,
    pub terminals: Terminals,
    receivers: HashMap<StreamId, Receiver>,
    /// Output that waits for room on the disk.
    stalled: bool,
    /// Ends that wait for their output to arrive.
    pending: Vec<(u64, GuestEvent)>,
    /// The highest number of an event that is handled; all below are, but for those that wait.
    highest_event: u64,
    /// What programs inside may still say.
    pub said: Allowance,
    /// How many refused connections may still be told of.
    pub denials: Allowance,
    /// How many listeners that come and go may still be told of.
    pub ports: Allowance,
    /// When the reason for a sandbox's end is known ahead of it.
    pub expected_end: Option<(model::EndReason, String)>,
}

/// Where a stream from the guest goes.
struct Receiver {
    sink: Sink,
    /// Everything below has arrived.
    next: Offset,
    /// Everything below is acknowledged.
    acked: Offset,
    /// Arrived, but the disk has no room for it.
    waiting: VecDeque<Bytes>,
    ended: bool,
}

enum Sink {
    Journal(JournalName),
    Transfer(mpsc::UnboundedSender<Piece>),
    Connection(Arc<Arrived>),
    /// A connection of which nobody wants more; what has been said to its program still has to arrive.
    Discarded,
}

/// A piece of a file request's bytes.
#[derive(Debug)]
pub enum Piece {
    Data { end: Offset, bytes: Bytes },
    End,
    Failed(String),
}

impl Core {
    /// A core around a sandbox that hasn't been started.
    ///
    /// # Errors
    /// The facts journal can't be opened.
    pub fn new(spec: SuperviseSpec, sandbox: Arc<dyn Sandbox>) -> Result<Arc<Core>, journal::OpenError> {
        let layout = SessionLayout::new(&spec.dir);
        let facts = FactLog::open(layout.journal(&JournalName::Facts), spec.generation)?;
        let state = State {
            session: spec.session,
            generation: spec.generation,
            gap_ms: spec.gap_ms,
            identity: spec.identity.clone(),
            network_told: None,
            reset: ResetConnections::default(),
            guest_version: None,
            journals: Journals::new(layout.clone(), spec.keep_output_bytes),
            facts,
            works: Works::default(),
            terminals: Terminals::default(),
            receivers: HashMap::new(),
            stalled: false,
            pending: Vec::new(),
            highest_event: 0,
            said: Allowance::new(tokio::time::Instant::now()),
            denials: Allowance::new(tokio::time::Instant::now()),
            ports: Allowance::new(tokio::time::Instant::now()),
            expected_end: None,
        };
        let core = Arc::new_cyclic(|me| Core {
            disk: DiskLimit::new(&spec, &layout),
            layout,
            sandbox,
            link: Link::new(),
            edge: Edge::default(),
            me: me.clone(),
            now: watch::channel(Now { phase: Phase::Starting, failure: None }).0,
            quit: CancellationToken::new(),
            still: watch::channel(false).0,
            step: tokio::sync::Mutex::new(()),
            quiet: Mutex::new(Quiet::new(tokio::time::Instant::now())),
            interrupt_confirm: Mutex::new(CancellationToken::new()),
            confirming: tokio::sync::Mutex::new(()),
            state: Mutex::new(state),
            spec,
        });
        if let Some(network) = &core.spec.network {
            core.apply_network(network);
        }
        Ok(core)
    }

    /// The changing part. Never held across an await.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no code panics while it holds the state")
    }

    pub fn phase(&self) -> Phase {
        self.now.borrow().phase
    }

    pub fn set_phase(&self, phase: Phase) {
        self.phase_changes(self.phase(), phase);
        self.now.send_modify(|now| now.phase = phase);
    }

    /// Writes a fact down.
    pub fn record(&self, fact: Fact) {
        self.state().facts.record(fact);
    }

    /// Expects a stream from the guest that goes into a journal.
    ///
    /// # Errors
    /// The journal can't be opened.
    pub fn receive_journal(&self, stream: StreamId, name: JournalName) -> Result<(), WireError> {
        let mut state = self.state();
        let next = state.journals.ensure_open(&name)?;
        state.receivers.insert(stream, Receiver::new(Sink::Journal(name), next));
        Ok(())
    }

    /// Where the output of these services has come to, over all boots of the session.
    ///
    /// # Errors
    /// A journal can't be opened.
    pub fn service_offsets<'a>(
        &self,
        names: impl Iterator<Item = &'a ServiceName>,
    ) -> Result<BTreeMap<ServiceName, Offset>, WireError> {
        let mut state = self.state();
        names.map(|name| Ok((name.clone(), state.journals.ensure_open(&JournalName::Service(name.clone()))?))).collect()
    }

    /// Expects a stream from the guest that a file request waits for.
    pub fn receive_transfer(&self, stream: StreamId) -> mpsc::UnboundedReceiver<Piece> {
        let (tell, pieces) = mpsc::unbounded_channel();
        self.state().receivers.insert(stream, Receiver::new(Sink::Transfer(tell), Offset::ZERO));
        pieces
    }

    /// Expects a stream from the guest that is a connection's.
    pub fn receive_connection(&self, stream: StreamId) -> Arc<Arrived> {
        let arrived = Arc::new(Arrived::default());
        self.state().receivers.insert(stream, Receiver::new(Sink::Connection(arrived.clone()), Offset::ZERO));
        arrived
    }

    /// How many connections something is expected of.
    pub fn connections(&self) -> usize {
        self.state().receivers.values().filter(|receiver| receiver.is_connection()).count()
    }

    /// Takes what still comes of a connection and drops it.
    pub fn discard_connection(&self, stream: StreamId) {
        let Some(arrived) = self.state().receivers.get_mut(&stream).map(|receiver| {
            receiver.sink = Sink::Discarded;
            receiver.acked = receiver.next;
            receiver.next
        }) else {
            return;
        };
        self.link.ack(stream, arrived);
    }

    /// Whether a stream from the guest is expected.
    pub fn receives(&self, stream: StreamId) -> bool {
        self.state().receivers.contains_key(&stream)
    }

    /// How far a stream from the guest is acknowledged: it can send again from there, and what has arrived is known.
    pub fn acked(&self, stream: StreamId) -> Option<Offset> {
        self.state().receivers.get(&stream).map(|receiver| receiver.acked)
    }

    /// Breaks off every connection.
    pub fn drop_connections(&self, why: &str) {
        self.drop_receivers(|_, receiver| receiver.is_connection(), why);
    }

    /// Breaks off the connections for which `keep` doesn't hold.
    pub fn drop_connections_but(&self, keep: impl Fn(&StreamId) -> bool) {
        let gone = |stream: &StreamId, receiver: &Receiver| receiver.is_connection() && !keep(stream);
        self.drop_receivers(gone, "the connection was reset");
    }

    fn drop_receivers(&self, gone: impl Fn(&StreamId, &Receiver) -> bool, why: &str) {
        self.state().receivers.retain(|stream, receiver| {
            let gone = gone(stream, receiver);
            match &receiver.sink {
                Sink::Transfer(tell) if gone => drop(tell.send(Piece::Failed(why.to_owned()))),
                Sink::Connection(arrived) if gone => arrived.fail(),
                _ => {}
            }
            !gone
        });
    }

    /// A piece of a transfer or connection has been passed on: the guest may send more.
    pub fn transfer_taken(&self, stream: StreamId, end: Offset) {
        if let Some(receiver) = self.state().receivers.get_mut(&stream) {
            receiver.acked = end;
            self.link.ack(stream, end);
        }
    }

    /// A stream is of no interest any more.
    pub fn forget_stream(&self, stream: StreamId) {
        self.state().receivers.remove(&stream);
    }

    /// Goes on with a stream that the guest of a restored or greeted sandbox holds. Returns the
    /// offset from which it shall send.
    ///
    /// # Errors
    /// The journal has more than the guest ever said: this memory is older than this journal.
    pub fn rejoin_journal(&self, stream: StreamId, name: JournalName, from: Offset, to: Offset) -> Result<Offset, WireError> {
        let mut state = self.state();
        let mut tail = state.journals.ensure_open(&name)?;
        if tail > to {
            let text = format!("the journal of {name} reaches {tail}, but the guest has only said {to}");
            return Err(WireError::new(wire::Code::Protocol, text));
        }
        if tail < from {
            let gap_from = state.journals.skip_to(&name, from)?;
            state.facts.record(Fact::Gap { stream: name.to_string(), from: gap_from, to: from });
            if let JournalName::Terminal(id) = &name {
                state.terminals.output(*id, &[], from);
            }
            tail = from;
        }
        state.receivers.insert(stream, Receiver::new(Sink::Journal(name), tail));
        Ok(tail)
    }

    /// Forgets all streams but connections, which may go on: before a greeting tells which there are.
    pub fn forget_streams(&self) {
        let ended = |_: &StreamId, receiver: &Receiver| !receiver.is_connection();
        self.drop_receivers(ended, "the session was hibernated meanwhile; try again");
    }

    /// True while output waits for room on the disk.
    pub fn is_stalled(&self) -> bool {
        self.state().stalled
    }

    /// Tries again to write what waits for room.
    pub fn retry_stalled(&self) {
        let mut state = self.state();
        state.facts.flush();
        if !state.stalled {
            return;
        }
        state.stalled = false;
        let streams: Vec<StreamId> = state.receivers.iter().filter(|(_, r)| !r.waiting.is_empty()).map(|(s, _)| *s).collect();
        for stream in streams {
            if let Some(offset) = state.store_waiting(stream, now()) {
                self.link.ack(stream, offset);
            }
        }
        self.settle(&mut state);
    }

    /// True where the end of a work has been told and waits to be handled.
    pub fn end_is_pending(&self, state: &State, work: &Work) -> bool {
        state.pending.iter().any(|(_, event)| matches!(event, GuestEvent::Ended { work: ended, .. } if ended == work))
    }

    /// Handles the ends whose output has arrived and whose beginning is written down.
    pub fn settle(&self, state: &mut State) {
        let waiting = std::mem::take(&mut state.pending);
        for (seq, event) in waiting {
            let GuestEvent::Ended { work, ends, .. } = &event else { continue };
            let arrived = ends.iter().all(|end| state.receivers.get(&end.stream).is_none_or(|r| r.stored() >= end.offset));
            if arrived && !state.works.is_starting(work) && !state.terminals.is_starting(work) {
                self.work_ended(state, event);
                state.highest_event = state.highest_event.max(seq);
            } else {
                state.pending.push((seq, event));
            }
        }
        self.ack_events(state);
    }

    /// Lets the guest forget the events that are handled. It forgets all up to a number, so none beyond one that waits.
    fn ack_events(&self, state: &State) {
        let waits = state.pending.iter().map(|(seq, _)| *seq).min();
        let upto = waits.map_or(state.highest_event, |waits| state.highest_event.min(waits.saturating_sub(1)));
        if upto > 0 {
            self.link.ack_events(upto);
        }
    }
}

impl Receiver {
    fn new(sink: Sink, next: Offset) -> Receiver {
        Receiver { sink, next, acked: next, waiting: VecDeque::new(), ended: false }
    }

    fn is_connection(&self) -> bool {
        matches!(self.sink, Sink::Connection(_) | Sink::Discarded)
    }

    /// Everything below is in the journal.
    fn stored(&self) -> Offset {
        Offset(self.next.0 - self.waiting.iter().map(|b| b.len() as u64).sum::<u64>())
    }
}

impl State {
    /// Moves a stream's waiting bytes into its journal; returns how far it is stored.
    fn store_waiting(&mut self, stream: StreamId, at: Timestamp) -> Option<Offset> {
        let receiver = self.receivers.get_mut(&stream)?;
        let Sink::Journal(name) = &receiver.sink else { return None };
        let name = name.clone();
        while let Some(bytes) = receiver.waiting.front_mut() {
            let accepted = match self.journals.append(&name, bytes, at) {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::error!(%error, journal = %name, "output waits for the disk");
                    0
                }
            };
            let piece = bytes.split_to(accepted);
            if let JournalName::Terminal(id) = &name {
                self.terminals.output(*id, &piece, self.journals.ensure_open(&name).unwrap_or_default());
            }
            if !bytes.is_empty() {
                self.stalled = true;
                break;
            }
            receiver.waiting.pop_front();
        }
        receiver.acked = receiver.stored();
        if receiver.ended && receiver.waiting.is_empty() {
            self.journals.end(&name);
        }
        Some(receiver.acked)
    }
}

impl Incoming for Core {
    fn data(&self, stream: StreamId, offset: Offset, bytes: Bytes) -> Result<(), FrameError> {
        let mut state = self.state();
        // Bytes of a stream that was given up meanwhile.
        let Some(receiver) = state.receivers.get_mut(&stream) else { return Ok(()) };
        let violation = |text: String| FrameError::BadControl(format!("stream {}: {text}", stream.0));
        let bytes = match arrive(receiver.next, offset, bytes).map_err(|hole| violation(hole.to_string()))? {
            Arrival::Duplicate => return Ok(()),
            Arrival::Append(bytes) => bytes,
        };
        if receiver.ended {
            return Err(violation("data after its end".to_owned()));
        }
        receiver.next = receiver.next.plus(bytes.len());
        let window = if receiver.is_connection() { CONNECTION_WINDOW } else { WINDOW };
        if receiver.next.since(receiver.acked) > 2 * window as u64 {
            return Err(violation("more data than its window allows".to_owned()));
        }
        match &receiver.sink {
            Sink::Transfer(tell) => {
                let _ = tell.send(Piece::Data { end: receiver.next, bytes });
            }
            Sink::Connection(arrived) => arrived.push(&bytes),
            Sink::Discarded => {
                receiver.acked = receiver.next;
                self.link.ack(stream, receiver.acked);
            }
            Sink::Journal(name) => {
                if let JournalName::Terminal(id) = name {
                    self.note_activity(Kind::Output, &format!("terminal {id}"));
                }
                receiver.waiting.push_back(bytes);
                if let Some(stored) = state.store_waiting(stream, now()) {
                    self.link.ack(stream, stored);
                }
                self.answer_queries(&mut state);
                if !state.pending.is_empty() {
                    self.settle(&mut state);
                }
            }
        }
        Ok(())
    }

    fn end(&self, stream: StreamId, offset: Offset) -> Result<(), FrameError> {
        let mut state = self.state();
        let Some(receiver) = state.receivers.get_mut(&stream) else { return Ok(()) };
        if receiver.next != offset {
            return Err(FrameError::BadControl(format!("stream {} ends at {offset}, but {} arrived", stream.0, receiver.next)));
        }
        receiver.ended = true;
        match &receiver.sink {
            Sink::Transfer(tell) => {
                let _ = tell.send(Piece::End);
                state.receivers.remove(&stream);
            }
            Sink::Connection(arrived) => {
                arrived.end();
                state.receivers.remove(&stream);
            }
            Sink::Discarded => drop(state.receivers.remove(&stream)),
            Sink::Journal(name) => {
                if receiver.waiting.is_empty() {
                    let name = name.clone();
                    state.journals.end(&name);
                }
            }
        }
        self.link.ack(stream, offset);
        Ok(())
    }

    fn reset(&self, stream: StreamId, reason: &str) {
        let mut state = self.state();
        match state.receivers.remove(&stream).map(|receiver| receiver.sink) {
            Some(Sink::Transfer(tell)) => drop(tell.send(Piece::Failed(reason.to_owned()))),
            Some(Sink::Connection(arrived)) => arrived.fail(),
            _ => {}
        }
    }

    fn dial(&self, stream: StreamId, to: Dial) -> Result<(), FrameError> {
        self.dialed(stream, to)
    }

    fn event(&self, seq: u64, event: GuestEvent) {
        let mut state = self.state();
        if let GuestEvent::Ended { .. } = event {
            state.pending.retain(|(known, _)| *known != seq);
            state.pending.push((seq, event));
            return self.settle(&mut state);
        }
        match event {
            GuestEvent::ServiceStarted { name, pid, restarts, stream } => {
                if let Some(stream) = stream
                    && !state.receivers.contains_key(&stream)
                {
                    let journal = JournalName::Service(name.clone());
                    match state.journals.ensure_open(&journal) {
                        Ok(next) => {
                            state.receivers.insert(stream, Receiver::new(Sink::Journal(journal), next));
                        }
                        Err(error) => tracing::error!(%error, "a service's output is not kept"),
                    }
                }
                state.facts.record(Fact::ServiceStarted { name, pid, restarts });
            }
            GuestEvent::ServiceEnded { name, exit_code, signal, restart_in_ms } => {
                state.facts.record(Fact::ServiceEnded { name, exit_code, signal, restart_in_ms });
            }
            GuestEvent::Unsaveable { items } => state.facts.record(Fact::Unsaveable { items }),
            said @ (GuestEvent::Note { .. } | GuestEvent::KeepAwake { .. } | GuestEvent::Waiting { .. }) => {
                self.said_inside(&mut state, said);
            }
            port @ (GuestEvent::PortOpened { .. } | GuestEvent::PortClosed { .. }) => port_changed(&mut state, port),
            GuestEvent::Ended { .. } | GuestEvent::Unknown => {}
        }
        state.highest_event = state.highest_event.max(seq);
        self.ack_events(&state);
    }
}

/// The journal that a work's stream goes into.
pub fn journal_of(role: &wire::guest::Role) -> Option<JournalName> {
    use wire::guest::Role;
    match role {
        Role::Stdout(Work::Exec(id)) => Some(JournalName::Stdout(*id)),
        Role::Stderr(Work::Exec(id)) => Some(JournalName::Stderr(*id)),
        Role::Stdout(Work::Terminal(id)) => Some(JournalName::Terminal(*id)),
        Role::Stdout(Work::Service(name)) | Role::Stderr(Work::Service(name)) => Some(JournalName::Service(name.clone())),
        Role::Stderr(Work::Terminal(_)) | Role::Stdin(_) | Role::Transfer | Role::Connection => None,
    }
}
