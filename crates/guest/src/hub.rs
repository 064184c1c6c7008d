//! The guest's end of all streams: what is kept, what has come, what to say next.
//!
//! ```text
//!   Silent ──Hello──► Greeting ──Ready──► Open ──Quiesce──► Quiescing ──Quiesced written──► Silent
//!      ▲                                    │ channel broken
//!      └────────────────────────────────────┘
//! ```
//! A Hello is accepted in every state and begins a new epoch: what belonged to the old one (replies,
//! transfers) is dropped, what is durable (output of works, events) is sent again from where the
//! supervisor says. Network connections belong to a generation: a Hello of the same one goes on with them, that of
//! another ends them. Nothing here does I/O; tasks wait on the [`Notify`]s.

mod connections;

use bytes::{Bytes, BytesMut};
use model::Offset;
use std::{
    collections::{BTreeMap, VecDeque},
    rc::Rc,
};
use tokio::sync::Notify;
use wire::{
    Frame, StreamId, WireError,
    frame::{MAX_DATA, PREAMBLE},
    guest::{CONNECTION_STREAMS, Dial, FromGuest, GuestEvent, HelloReply, ReceivingStream, Reply, Role, SendingStream, StreamAt},
    window::{Arrival, Outgoing, SendWindow, WINDOW, arrive},
};

/// Most bytes that are made ready for the channel at once. Small, so that an answer never waits
/// behind much output.
const BATCH: usize = 256 * 1024;

/// First of the numbers that the guest itself gives to streams of services; the supervisor's are below.
pub const SERVICE_STREAMS: u32 = 0x8000_0000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Silent,
    Greeting,
    Open,
    Quiescing,
}

struct Sending {
    window: SendWindow,
    role: Role,
    queued: bool,
    room: Rc<Notify>,
}

struct Receiving {
    role: Role,
    queue: VecDeque<Bytes>,
    /// Everything below has come.
    received: Offset,
    /// Everything below has been used up; that is what is acknowledged.
    taken: Offset,
    /// Handed to the consumer, not yet used up.
    in_flight: usize,
    /// Everything below counts as acknowledged, used up or not: its sender is gone.
    kept: Offset,
    /// So does the end.
    keeps_end: bool,
    end: Option<Offset>,
    news: Rc<Notify>,
}

/// What a consumer of a received stream gets next.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    Bytes(Bytes),
    End,
    /// The stream was reset, or its connection is gone.
    Gone,
    Nothing,
}

/// All streams, replies and events of the guest. Owned by the main thread.
pub struct Hub {
    epoch: u64,
    mode: Mode,
    greeting: BytesMut,
    control: VecDeque<Frame>,
    acks: BTreeMap<StreamId, Offset>,
    sending: BTreeMap<StreamId, Sending>,
    ready: VecDeque<StreamId>,
    receiving: BTreeMap<StreamId, Receiving>,
    events: VecDeque<(u64, GuestEvent)>,
    next_event: u64,
    max_stream: u32,
    next_service: u32,
    next_connection: u32,
    /// Asked for, and not said yet.
    dials: VecDeque<(StreamId, Dial)>,
    writer: Rc<Notify>,
}

impl Hub {
    pub fn new() -> Self {
        Self {
            epoch: 0,
            mode: Mode::Silent,
            greeting: BytesMut::new(),
            control: VecDeque::new(),
            acks: BTreeMap::new(),
            sending: BTreeMap::new(),
            ready: VecDeque::new(),
            receiving: BTreeMap::new(),
            events: VecDeque::new(),
            next_event: 1,
            max_stream: 0,
            next_service: SERVICE_STREAMS,
            next_connection: CONNECTION_STREAMS,
            dials: VecDeque::new(),
            writer: Rc::new(Notify::new()),
        }
    }

    /// Rings when there may be something to write.
    pub fn writer_bell(&self) -> Rc<Notify> {
        self.writer.clone()
    }

    /// Counts the Hellos. A reply carries the epoch of its request and is dropped in a later one.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    // ---- connection ----

    /// A new connection begins. `reply` is completed with the streams as they stand. With `keep_input` what has come of
    /// the streams to the guest is kept for good: their sender is gone and can't send it again. With `woke` it is that of
    /// another generation, and the network connections of the one before have ended.
    pub fn hello(&mut self, mut reply: HelloReply, keep_input: bool, woke: bool) {
        self.epoch += 1;
        self.drop_transfers();
        if woke {
            self.drop_connections();
        }
        self.control.clear();
        self.acks.clear();
        self.ready.clear();
        for stream in self.receiving.values_mut() {
            if stream.role == Role::Connection {
                // The same supervisor goes on with it, and what it sends again is known here. The end it may have forgotten.
                stream.keeps_end = stream.end.is_some();
                continue;
            }
            if keep_input {
                stream.kept = stream.received;
                stream.keeps_end = stream.end.is_some();
            }
            // What is not used up was not acknowledged, so the sender still has it; but for what counts as acknowledged.
            stream.drop_beyond_kept();
        }
        // What the supervisor has not been asked for yet is nothing that it could go on with.
        let unsaid: Vec<StreamId> = self.dials.iter().map(|(id, _)| *id).collect();
        let known = |id: &StreamId| !unsaid.contains(id);
        reply.sending = self.sending.iter().filter(|(id, _)| known(id)).map(|(id, s)| s.describe(*id)).collect();
        reply.receiving = self.receiving.iter().filter(|(id, _)| known(id)).map(|(id, r)| r.describe(*id)).collect();
        reply.max_stream = self.max_stream;
        self.greeting.clear();
        self.greeting.extend_from_slice(&PREAMBLE);
        match Frame::control(&FromGuest::HelloReply(reply)) {
            Ok(frame) => frame.encode(&mut self.greeting),
            Err(error) => log!("the answer to a Hello can't be written: {error}"),
        }
        self.mode = Mode::Greeting;
        self.writer.notify_one();
    }

    /// The supervisor says how far it has come.
    pub fn ready(&mut self, acks: Vec<StreamAt>) {
        let acks: BTreeMap<StreamId, Offset> = acks.into_iter().map(|a| (a.stream, a.offset)).collect();
        let ids: Vec<StreamId> = self.sending.keys().copied().collect();
        for id in ids {
            let Some(stream) = self.sending.get_mut(&id) else { continue };
            let from = acks.get(&id).copied().unwrap_or(stream.window.acked());
            stream.queued = false;
            if let Err(error) = stream.window.rewind(from) {
                log!("stream {}: {error}", id.0);
                let kept = stream.window.acked();
                // The supervisor's offset can't be; it gets everything that is still here.
                let _ = stream.window.rewind(kept);
            }
            stream.room.notify_waiters();
            self.queue_if_outgoing(id);
        }
        for (seq, event) in &self.events {
            if let Ok(frame) = Frame::control(&FromGuest::Event { seq: *seq, event: event.clone() }) {
                self.control.push_back(frame);
            }
        }
        self.mode = Mode::Open;
        self.writer.notify_one();
    }

    /// Says `Quiesced` after the replies that are due, then nothing.
    pub fn quiesce(&mut self) {
        self.drop_transfers();
        if self.mode == Mode::Open {
            self.mode = Mode::Quiescing;
        }
        self.writer.notify_one();
    }

    /// The channel can't be written: wait for the next Hello.
    pub fn broken(&mut self) {
        self.mode = Mode::Silent;
    }

    /// Ends every transfer; those who wait on one find it gone.
    pub fn drop_transfers(&mut self) {
        self.drop_streams(&Role::Transfer);
    }

    fn drop_streams(&mut self, role: &Role) {
        self.sending.retain(|_, s| {
            let keep = s.role != *role;
            if !keep {
                s.room.notify_waiters();
            }
            keep
        });
        self.receiving.retain(|_, r| {
            let keep = r.role != *role;
            if !keep {
                r.news.notify_one();
            }
            keep
        });
    }

    /// Appends what is to be said now to `out`: whole frames, [`BATCH`] bytes or a little more.
    pub fn fill(&mut self, out: &mut BytesMut) {
        match self.mode {
            Mode::Silent => return,
            Mode::Greeting => {
                out.unsplit(std::mem::take(&mut self.greeting));
                return;
            }
            Mode::Open | Mode::Quiescing => {}
        }
        // Replies asked for in a quiescing connection are all still owed.
        while out.len() < BATCH || self.mode == Mode::Quiescing {
            let Some(frame) = self.control.pop_front() else { break };
            frame.encode(out);
        }
        self.fill_dials(out);
        for (stream, offset) in std::mem::take(&mut self.acks) {
            Frame::Ack { stream, offset }.encode(out);
        }
        if self.mode == Mode::Quiescing {
            if let Ok(frame) = Frame::control(&FromGuest::Quiesced) {
                frame.encode(out);
            }
            self.mode = Mode::Silent;
            return;
        }
        while out.len() < BATCH {
            let Some(id) = self.ready.pop_front() else { break };
            let Some(stream) = self.sending.get_mut(&id) else { continue };
            stream.queued = false;
            match stream.window.next_outgoing() {
                Some(Outgoing::Data { offset, bytes }) => Frame::Data { stream: id, offset, bytes }.encode(out),
                Some(Outgoing::End { offset }) => Frame::End { stream: id, offset }.encode(out),
                None => {}
            }
            if stream.window.is_done() {
                self.sending.remove(&id);
            } else {
                self.queue_if_outgoing(id);
            }
        }
    }

    fn queue_if_outgoing(&mut self, id: StreamId) {
        if let Some(stream) = self.sending.get_mut(&id)
            && !stream.queued
            && stream.window.has_outgoing()
        {
            stream.queued = true;
            self.ready.push_back(id);
        }
    }

    /// Between the answer to a Hello and its Ready, too: what happens then has not been told by the answer.
    fn says(&self) -> bool {
        self.mode != Mode::Silent
    }

    fn say(&mut self, frame: Frame) {
        if self.says() {
            self.control.push_back(frame);
            self.writer.notify_one();
        }
    }

    /// Whether somebody listens.
    pub fn is_open(&self) -> bool {
        self.mode == Mode::Open
    }

    /// Answers a request of `epoch`; in a later one nobody waits for it.
    pub fn reply(&mut self, epoch: u64, id: u64, result: Result<Reply, WireError>) {
        if epoch != self.epoch {
            return;
        }
        match Frame::control(&FromGuest::Reply { id, result }) {
            Ok(frame) => self.say(frame),
            Err(error) => {
                let result = Err(WireError::new(wire::Code::Internal, format!("the answer is too large: {error}")));
                if let Ok(frame) = Frame::control(&FromGuest::Reply { id, result }) {
                    self.say(frame);
                }
            }
        }
    }

    /// Tells the supervisor something, again at each reconnection until it has recorded it.
    pub fn event(&mut self, event: GuestEvent) {
        let seq = self.next_event;
        self.next_event += 1;
        if self.mode == Mode::Open
            && let Ok(frame) = Frame::control(&FromGuest::Event { seq, event: event.clone() })
        {
            self.say(frame);
        }
        self.events.push_back((seq, event));
    }

    /// How many events of a kind the supervisor has not recorded yet.
    pub fn unacknowledged(&self, kind: impl Fn(&GuestEvent) -> bool) -> usize {
        self.events.iter().filter(|(_, event)| kind(event)).count()
    }

    /// Events up to `seq` are recorded.
    pub fn ack_events(&mut self, seq: u64) {
        self.events.retain(|(at, _)| *at > seq);
    }

    // ---- sending ----

    /// Opens a stream from the guest. A number that is in use gives `false`.
    #[must_use]
    pub fn open_sending(&mut self, id: StreamId, role: Role) -> bool {
        if self.sending.contains_key(&id) {
            return false;
        }
        self.note_number(id);
        let window = SendWindow::starting_at(Offset::ZERO);
        self.sending.insert(id, Sending { window, role, queued: false, room: Rc::new(Notify::new()) });
        true
    }

    /// Opens a stream for a service under a number of the guest's own.
    pub fn open_service_stream(&mut self, role: Role, from: Offset) -> StreamId {
        let id = StreamId(self.next_service);
        self.next_service += 1;
        let window = SendWindow::starting_at(from);
        self.sending.insert(id, Sending { window, role, queued: false, room: Rc::new(Notify::new()) });
        id
    }

    /// How many bytes may be taken in, and what rings when it changes. `None`: the stream is gone.
    pub fn room(&self, id: StreamId) -> Option<(usize, Rc<Notify>)> {
        self.sending.get(&id).map(|s| (s.window.room(), s.room.clone()))
    }

    /// Takes bytes in for sending; not more than [`Self::room`] said.
    pub fn take_in(&mut self, id: StreamId, bytes: &[u8]) {
        if let Some(stream) = self.sending.get_mut(&id) {
            stream.window.take_in(bytes);
            self.queue_if_outgoing(id);
            self.writer.notify_one();
        }
    }

    /// No more bytes will come on the stream.
    pub fn finish(&mut self, id: StreamId) {
        if let Some(stream) = self.sending.get_mut(&id) {
            stream.window.finish();
            self.queue_if_outgoing(id);
            self.writer.notify_one();
        }
    }

    /// Offset after the last byte taken in.
    pub fn end_of(&self, id: StreamId) -> Option<Offset> {
        self.sending.get(&id).map(|s| s.window.end())
    }

    /// Drops a stream in either direction and tells the supervisor why.
    pub fn reset(&mut self, id: StreamId, reason: &str) {
        let sent = self.sending.remove(&id);
        let received = self.receiving.remove(&id);
        if let Some(stream) = &sent {
            stream.room.notify_waiters();
        }
        if let Some(stream) = &received {
            stream.news.notify_one();
        }
        if self.undial(id) {
            return;
        }
        if sent.is_some() || received.is_some() {
            let mut reason = reason.to_owned();
            reason.truncate(reason.floor_char_boundary(1024));
            self.say(Frame::Reset { stream: id, reason });
        }
    }

    /// Forgets a stream that was opened for a program that could not be started.
    pub fn forget(&mut self, id: StreamId) {
        self.sending.remove(&id);
        if let Some(stream) = self.receiving.remove(&id) {
            stream.news.notify_one();
        }
    }

    // ---- frames that come in ----

    pub fn on_ack(&mut self, id: StreamId, offset: Offset) {
        let Some(stream) = self.sending.get_mut(&id) else { return };
        if offset < stream.window.acked() {
            // Said before a greeting that knew more.
            return;
        }
        if let Err(error) = stream.window.ack(offset) {
            log!("stream {}: {error}", id.0);
            return;
        }
        stream.room.notify_waiters();
        if stream.window.is_done() {
            self.sending.remove(&id);
        }
    }

    pub fn on_reset(&mut self, id: StreamId) {
        self.undial(id);
        if let Some(stream) = self.sending.remove(&id) {
            stream.room.notify_waiters();
        }
        if let Some(stream) = self.receiving.remove(&id) {
            stream.news.notify_one();
        }
    }

    pub fn on_data(&mut self, id: StreamId, offset: Offset, bytes: Bytes) {
        let Some(stream) = self.receiving.get_mut(&id) else {
            // Whoever sends it doesn't know yet that it leads nowhere.
            self.say(Frame::Reset { stream: id, reason: "nobody reads it any more".into() });
            return;
        };
        match arrive(stream.received, offset, bytes) {
            Ok(Arrival::Append(bytes)) => {
                let held = stream.received.since(stream.taken.max(stream.kept)) as usize + bytes.len();
                if held > WINDOW + MAX_DATA || stream.end.is_some() {
                    self.reset(id, "more bytes than the window has room for");
                    return;
                }
                stream.received = stream.received.plus(bytes.len());
                stream.queue.push_back(bytes);
                stream.news.notify_one();
            }
            Ok(Arrival::Duplicate) => {
                if stream.role == Role::Connection {
                    // Its sender may have missed what was said of it.
                    let taken = stream.taken;
                    self.acks.insert(id, taken);
                    self.writer.notify_one();
                }
            }
            Err(hole) => self.reset(id, &hole.to_string()),
        }
    }

    pub fn on_end(&mut self, id: StreamId, offset: Offset) {
        let Some(stream) = self.receiving.get_mut(&id) else { return };
        if offset != stream.received {
            let reason = format!("the end at {offset} doesn't follow {}", stream.received);
            self.reset(id, &reason);
            return;
        }
        stream.end = Some(offset);
        stream.news.notify_one();
    }

    // ---- receiving ----

    /// Opens a stream to the guest. A number that is in use gives `false`.
    #[must_use]
    pub fn open_receiving(&mut self, id: StreamId, role: Role) -> bool {
        if self.receiving.contains_key(&id) {
            return false;
        }
        self.note_number(id);
        self.receiving.insert(id, Receiving::new(role));
        true
    }

    /// What rings when [`Self::next`] may say something else.
    pub fn news(&self, id: StreamId) -> Option<Rc<Notify>> {
        self.receiving.get(&id).map(|r| r.news.clone())
    }

    /// The next piece of a received stream. [`Self::consumed`] follows when it is used up.
    pub fn next(&mut self, id: StreamId) -> Next {
        let Some(stream) = self.receiving.get_mut(&id) else { return Next::Gone };
        if let Some(bytes) = stream.queue.pop_front() {
            stream.in_flight += bytes.len();
            return Next::Bytes(bytes);
        }
        if stream.end.is_some() { Next::End } else { Next::Nothing }
    }

    /// `count` bytes are where they belong: the sender may forget them.
    pub fn consumed(&mut self, id: StreamId, count: usize) {
        let Some(stream) = self.receiving.get_mut(&id) else { return };
        stream.in_flight = stream.in_flight.saturating_sub(count);
        stream.taken = stream.taken.plus(count);
        let taken = stream.taken;
        if taken >= stream.kept && self.says() {
            self.acks.insert(id, taken);
            self.writer.notify_one();
        }
    }

    /// The stream's end has been used, too.
    pub fn close_receiving(&mut self, id: StreamId) {
        let Some(stream) = self.receiving.remove(&id) else { return };
        if stream.role == Role::Connection && self.says() {
            // Else a sender that has nothing else acknowledged would keep its side for ever.
            self.acks.insert(id, stream.received);
            self.writer.notify_one();
        }
    }

    fn note_number(&mut self, id: StreamId) {
        if id.0 < SERVICE_STREAMS {
            self.max_stream = self.max_stream.max(id.0);
        }
    }
}

impl Receiving {
    fn new(role: Role) -> Receiving {
        Receiving {
            role,
            queue: VecDeque::new(),
            received: Offset::ZERO,
            taken: Offset::ZERO,
            in_flight: 0,
            kept: Offset::ZERO,
            keeps_end: false,
            end: None,
            news: Rc::new(Notify::new()),
        }
    }

    fn describe(&self, stream: StreamId) -> ReceivingStream {
        // A connection's bytes count once they are used, as in every acknowledgement.
        let received = if self.role == Role::Connection { self.taken } else { self.received };
        ReceivingStream { stream, role: self.role.clone(), received, ended: self.keeps_end }
    }

    /// Drops what waits for its consumer and will be sent again.
    fn drop_beyond_kept(&mut self) {
        let used = self.taken.plus(self.in_flight);
        let mut keep = self.kept.since(used) as usize;
        for bytes in &mut self.queue {
            bytes.truncate(keep);
            keep -= bytes.len();
        }
        self.queue.retain(|bytes| !bytes.is_empty());
        self.received = used.max(self.kept);
        self.end = self.end.filter(|_| self.keeps_end);
    }
}

impl Sending {
    fn describe(&self, stream: StreamId) -> SendingStream {
        SendingStream {
            stream,
            role: self.role.clone(),
            from: self.window.acked(),
            to: self.window.end(),
            ended: self.window.is_finished(),
        }
    }
}

#[cfg(test)]
mod tests;
