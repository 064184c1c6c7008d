//! The link to the guest: frames out and in, requests and their answers, windows of what is sent.
//!
//! ```text
//!   closed ──hello──► greeting ──ready──► open ──quiesce──► silent ──hello──► greeting …
//!                          any ── the pipe ends ──► gone
//! ```
//! Only an open link sends requests and bytes. What arrives is handed to the [`Incoming`] that the
//! link was made with, in order, one frame at a time.

use bytes::{Bytes, BytesMut};
use model::Offset;
use runtime::Channel;
use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    ops::{Bound, Range},
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Poll, Waker},
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::unix::pipe,
    sync::{Notify, oneshot, watch},
};
use wire::{
    Code, Decoder, Frame, FrameError, StreamId, WireError,
    frame::{PREAMBLE, parse_control},
    guest::{Dial, FromGuest, GuestEvent, Hello, HelloReply, Reply, Request, StreamAt, ToGuest},
    window::{Outgoing, SendWindow},
};

/// Most bytes that wait for the pipe at once.
const BATCH: usize = 256 * 1024;

/// Control messages that wait for the pipe before a guest counts as deaf.
const MOST_QUEUED: usize = 16 * 1024;

/// What the link hands on.
pub trait Incoming: Send + Sync + 'static {
    /// Bytes of a stream, starting at `offset`. An error ends the sandbox.
    fn data(&self, stream: StreamId, offset: Offset, bytes: Bytes) -> Result<(), FrameError>;
    /// A stream has ended at `offset`.
    fn end(&self, stream: StreamId, offset: Offset) -> Result<(), FrameError>;
    /// The guest takes no more of a stream that we send, or ends one that it sends.
    fn reset(&self, stream: StreamId, reason: &str);
    /// Something happened; acknowledged by [`Link::ack_events`].
    fn event(&self, seq: u64, event: GuestEvent);
    /// A program inside wants to go out. An error ends the sandbox.
    fn dial(&self, stream: StreamId, to: Dial) -> Result<(), FrameError>;
}

/// Why the link is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Gone {
    /// The other end of the pipe closed: the sandbox has ended.
    Closed,
    /// The guest broke the protocol.
    Violation(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Closed,
    Greeting,
    Open,
    Silent,
}

struct Sending {
    window: SendWindow,
    /// Told whenever room grows or the stream ends.
    changed: Arc<Notify>,
    /// Woken then, too.
    waker: Option<Waker>,
}

impl Sending {
    fn tell(&mut self) {
        self.changed.notify_waiters();
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

#[derive(Default)]
struct State {
    stage: Option<Stage>,
    decoder: Decoder,
    /// Written before everything else.
    first: BytesMut,
    control: VecDeque<Frame>,
    acks: BTreeMap<StreamId, Offset>,
    /// Events up to this number are recorded, which is to be said.
    events: Option<u64>,
    sending: BTreeMap<StreamId, Sending>,
    /// The stream that had its turn last.
    turn: StreamId0,
    requests: HashMap<u64, oneshot::Sender<Result<Reply, WireError>>>,
    next_request: u64,
    next_stream: u32,
    hello: Option<oneshot::Sender<HelloReply>>,
    quiesced: Option<oneshot::Sender<()>>,
}

/// A stream number that defaults to none.
#[derive(Default, Clone, Copy)]
struct StreamId0(Option<StreamId>);

/// A handle to the link; cheap to clone.
#[derive(Clone)]
pub struct Link {
    state: Arc<Mutex<State>>,
    wake: Arc<Notify>,
    gone: watch::Sender<Option<Gone>>,
}

/// A stream that we send has no room now or has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendState {
    Accepted(usize),
    Ended,
}

impl Link {
    /// A link that isn't connected yet.
    pub fn new() -> Link {
        Link { state: Arc::default(), wake: Arc::default(), gone: watch::channel(None).0 }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no code panics while it holds the link's state")
    }

    /// Begins to read from and write to `channel`, handing what comes to `incoming`.
    ///
    /// # Errors
    /// The descriptors are no pipes.
    pub fn connect(&self, channel: Channel, incoming: Arc<dyn Incoming>) -> std::io::Result<()> {
        let sender = pipe::Sender::from_owned_fd(channel.to_guest)?;
        let receiver = pipe::Receiver::from_owned_fd(channel.from_guest)?;
        self.lock().stage = Some(Stage::Closed);
        tokio::spawn(write_loop(self.clone(), sender));
        tokio::spawn(read_loop(self.clone(), receiver, incoming));
        Ok(())
    }

    /// Becomes `Some` when the link is gone for good.
    pub fn watch_gone(&self) -> watch::Receiver<Option<Gone>> {
        self.gone.subscribe()
    }

    fn lost(&self, why: Gone) {
        self.gone.send_if_modified(|gone| gone.is_none().then(|| *gone = Some(why)).is_some());
        let mut state = self.lock();
        state.stage = None;
        // Dropping the senders tells those who wait.
        state.requests.clear();
        state.hello = None;
        state.quiesced = None;
        for sending in state.sending.values_mut() {
            sending.tell();
        }
        drop(state);
        self.wake.notify_one();
    }

    /// Greets the guest and waits for its answer. Nothing else is sent until [`Self::ready`].
    ///
    /// # Errors
    /// The link is gone, or no answer came within `limit`.
    pub async fn hello(&self, hello: Hello, limit: Duration) -> Result<HelloReply, WireError> {
        let (tell, answer) = oneshot::channel();
        {
            let mut state = self.lock();
            if state.stage.is_none() {
                return Err(gone_error());
            }
            state.stage = Some(Stage::Greeting);
            state.decoder.expect_preamble();
            // What is acknowledged from here on is said once the link is open.
            state.acks.clear();
            state.hello = Some(tell);
            let frame = Frame::control(&ToGuest::Hello(hello)).map_err(protocol_error)?;
            state.first.extend_from_slice(&PREAMBLE);
            frame.encode(&mut state.first);
        }
        self.wake.notify_one();
        match tokio::time::timeout(limit, answer).await {
            Ok(Ok(reply)) => {
                let mut state = self.lock();
                state.next_stream = state.next_stream.max(reply.max_stream);
                Ok(reply)
            }
            Ok(Err(_)) => Err(gone_error()),
            Err(_) => Err(WireError::new(Code::Unresponsive, format!("the guest did not answer within {} s", limit.as_secs()))),
        }
    }

    /// Opens the link: the guest sends from `acks` on, we send again what it has not received.
    /// Streams that the guest no longer receives are ended.
    ///
    /// # Errors
    /// The guest claims to have received what was never sent.
    pub fn ready(&self, acks: Vec<StreamAt>, reply: &HelloReply) -> Result<(), WireError> {
        let mut state = self.lock();
        let received: HashMap<_, _> = reply.receiving.iter().map(|r| (r.stream, r.received)).collect();
        let mut ended = Vec::new();
        for (stream, sending) in &mut state.sending {
            match received.get(stream) {
                Some(offset) => {
                    sending.window.rewind(*offset).map_err(|e| WireError::new(Code::Protocol, e.to_string()))?;
                    // It has more room, and no acknowledgement may ever come.
                    sending.tell();
                }
                None => ended.push(*stream),
            }
        }
        for stream in ended {
            if let Some(mut sending) = state.sending.remove(&stream) {
                sending.tell();
            }
        }
        state.control.push_front(Frame::control(&ToGuest::Ready { acks }).map_err(protocol_error)?);
        state.stage = Some(Stage::Open);
        drop(state);
        self.wake.notify_one();
        Ok(())
    }

    /// Brings the link to silence at a frame border, in both directions. Requests that are under
    /// way are waited for; those that don't end within `limit` are given up as `Busy`.
    ///
    /// # Errors
    /// The link is gone or the guest doesn't answer.
    pub async fn quiesce(&self, limit: Duration) -> Result<(), WireError> {
        let (tell, answer) = oneshot::channel();
        {
            let mut state = self.lock();
            if state.stage.is_none() {
                return Err(gone_error());
            }
            state.stage = Some(Stage::Silent);
            state.quiesced = Some(tell);
            // What was asked before must be on its way before this.
            let last = Frame::control(&ToGuest::Quiesce).map_err(protocol_error)?;
            state.control.push_back(last);
            for (_, waiting) in state.requests.drain() {
                let _ = waiting.send(Err(WireError::new(Code::Busy, "the session is being hibernated; try again")));
            }
        }
        self.wake.notify_one();
        match tokio::time::timeout(limit, answer).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(gone_error()),
            Err(_) => {
                Err(WireError::new(Code::Unresponsive, format!("the guest did not fall silent within {} s", limit.as_secs())))
            }
        }
    }

    /// How many requests wait for their answers.
    pub fn requests_under_way(&self) -> usize {
        self.lock().requests.len()
    }

    /// How many bytes the guest has not acknowledged yet; those of network connections, which can flow without end, aside.
    pub fn bytes_under_way(&self) -> u64 {
        let state = self.lock();
        let streams = state.sending.values().filter(|s| !s.window.is_of_connection());
        streams.map(|s| s.window.end().since(s.window.acked())).sum()
    }

    /// Sends a request; the answer can be waited for elsewhere.
    ///
    /// # Errors
    /// The link isn't open.
    pub fn send_request(&self, request: Request) -> Result<oneshot::Receiver<Result<Reply, WireError>>, WireError> {
        let (tell, answer) = oneshot::channel();
        let mut state = self.lock();
        match state.stage {
            Some(Stage::Open) => {}
            None => return Err(gone_error()),
            Some(_) => return Err(WireError::new(Code::Busy, "the sandbox is between two states; try again")),
        }
        state.next_request += 1;
        let id = state.next_request;
        let frame = Frame::control(&ToGuest::Request { id, request }).map_err(protocol_error)?;
        state.control.push_back(frame);
        state.requests.insert(id, tell);
        drop(state);
        self.wake.notify_one();
        Ok(answer)
    }

    /// Sends a request and waits for its answer.
    ///
    /// # Errors
    /// The guest's refusal, or the link is not open or gone.
    pub async fn request(&self, request: Request) -> Result<Reply, WireError> {
        self.send_request(request)?.await.unwrap_or_else(|_| Err(gone_error()))
    }

    /// A number that no stream of this sandbox has had.
    pub fn new_stream(&self) -> StreamId {
        let mut state = self.lock();
        state.next_stream += 1;
        StreamId(state.next_stream)
    }

    /// Begins a stream to the guest.
    pub fn open_sending(&self, stream: StreamId, window: SendWindow) {
        self.lock().sending.insert(stream, Sending { window, changed: Arc::default(), waker: None });
        self.wake.notify_one();
    }

    /// Gives bytes to a stream to the guest, as many as there is room for.
    pub fn offer(&self, stream: StreamId, bytes: &[u8]) -> SendState {
        let mut state = self.lock();
        let Some(sending) = state.sending.get_mut(&stream).filter(|s| !s.window.is_finished()) else {
            return SendState::Ended;
        };
        let take = bytes.len().min(sending.window.room());
        sending.window.take_in(&bytes[..take]);
        drop(state);
        if take > 0 {
            self.wake.notify_one();
        }
        SendState::Accepted(take)
    }

    /// [`Self::offer`] for one that can wait; `None`: the stream has ended.
    pub fn poll_offer(&self, cx: &Context<'_>, stream: StreamId, bytes: &[u8]) -> Poll<Option<usize>> {
        {
            let mut state = self.lock();
            let sending = state.sending.get_mut(&stream).filter(|s| !s.window.is_finished());
            let Some(sending) = sending else { return Poll::Ready(None) };
            if sending.window.room() == 0 {
                sending.waker = Some(cx.waker().clone());
                return Poll::Pending;
            }
        }
        match self.offer(stream, bytes) {
            SendState::Accepted(count) => Poll::Ready(Some(count)),
            SendState::Ended => Poll::Ready(None),
        }
    }

    /// Whether a stream to the guest is open, or has not been acknowledged whole yet.
    pub fn is_sending(&self, stream: StreamId) -> bool {
        self.lock().sending.contains_key(&stream)
    }

    /// Tells the guest where a connection leads. One that can't be told doesn't need to know.
    pub fn connected(&self, stream: StreamId, to: &str) {
        let mut state = self.lock();
        if state.stage == Some(Stage::Open)
            && state.control.len() < MOST_QUEUED / 16
            && let Ok(frame) = Frame::control(&ToGuest::Connected { stream, to: to.to_owned() })
        {
            state.control.push_back(frame);
            drop(state);
            self.wake.notify_one();
        }
    }

    /// Gives all of `bytes` to a stream or none. `false`: there is no room now. Where there is, `note` is called before
    /// anything is sent, with the stretch that they will be and with how far the guest has acknowledged.
    ///
    /// # Errors
    /// The stream has ended, or the link is between two states: what was accepted now could be lost.
    pub fn offer_whole(
        &self,
        stream: StreamId,
        bytes: &[u8],
        note: impl FnOnce(Range<Offset>, Offset),
    ) -> Result<bool, WireError> {
        let mut state = self.lock();
        if state.stage != Some(Stage::Open) {
            return Err(WireError::new(Code::Busy, "the sandbox is between two states; try again"));
        }
        let sending = state.sending.get_mut(&stream).filter(|s| !s.window.is_finished());
        let Some(sending) = sending else { return Err(WireError::new(Code::Ended, "the program has ended")) };
        if sending.window.room() < bytes.len() {
            return Ok(false);
        }
        let from = sending.window.end();
        note(from..from.plus(bytes.len()), sending.window.acked());
        sending.window.take_in(bytes);
        drop(state);
        self.wake.notify_one();
        Ok(true)
    }

    /// Told when a stream to the guest has more room or ends. `None`: it has ended.
    pub fn room_changed(&self, stream: StreamId) -> Option<Arc<Notify>> {
        self.lock().sending.get(&stream).map(|s| s.changed.clone())
    }

    /// Gives all of `bytes` to a stream, waiting for room. `false`: the stream has ended.
    pub async fn send_all(&self, stream: StreamId, mut bytes: &[u8]) -> bool {
        loop {
            let Some(changed) = self.lock().sending.get(&stream).map(|s| s.changed.clone()) else { return false };
            let changed = changed.notified();
            match self.offer(stream, bytes) {
                SendState::Ended => return false,
                SendState::Accepted(taken) => bytes = &bytes[taken..],
            }
            if bytes.is_empty() {
                return true;
            }
            changed.await;
        }
    }

    /// No more bytes will be given to a stream.
    pub fn finish(&self, stream: StreamId) {
        if let Some(sending) = self.lock().sending.get_mut(&stream) {
            sending.window.finish();
        }
        self.wake.notify_one();
    }

    /// Gives a stream up, whoever sends it, and tells the guest.
    pub fn reset(&self, stream: StreamId, reason: &str) {
        let mut state = self.lock();
        if let Some(mut sending) = state.sending.remove(&stream) {
            sending.tell();
        }
        let mut deaf = false;
        if state.stage == Some(Stage::Open) {
            deaf = state.control.len() >= MOST_QUEUED;
            state.control.push_back(Frame::Reset { stream, reason: reason.to_owned() });
        }
        drop(state);
        if deaf {
            return self.lost(Gone::Violation("it asks without end and does not listen".to_owned()));
        }
        self.wake.notify_one();
    }

    /// How many network connections there is something to say on.
    pub fn connections(&self) -> usize {
        self.lock().sending.values().filter(|s| s.window.is_of_connection()).count()
    }

    /// Drops what is to be said on network connections: they have ended with their generation.
    pub fn end_connections(&self) {
        self.lock().sending.retain(|_, sending| {
            let ends = sending.window.is_of_connection();
            if ends {
                sending.tell();
            }
            !ends
        });
    }

    /// Drops a stream to the guest whose reader has ended.
    pub fn forget_sending(&self, stream: StreamId) {
        if let Some(mut sending) = self.lock().sending.remove(&stream) {
            sending.tell();
        }
    }

    /// Everything below `offset` of a stream from the guest is safe.
    pub fn ack(&self, stream: StreamId, offset: Offset) {
        let mut state = self.lock();
        let acked = state.acks.entry(stream).or_insert(offset);
        *acked = offset.max(*acked);
        drop(state);
        self.wake.notify_one();
    }

    /// Events up to `seq` are recorded.
    pub fn ack_events(&self, seq: u64) {
        self.lock().events = Some(seq);
        self.wake.notify_one();
    }

    /// What a stream to the guest still holds: first offset, bytes, whether it is finished.
    pub fn unacknowledged(&self, stream: StreamId) -> Option<(Offset, Vec<u8>, bool)> {
        let state = self.lock();
        let window = &state.sending.get(&stream)?.window;
        Some((window.acked(), window.kept().to_vec(), window.is_finished()))
    }
}

fn gone_error() -> WireError {
    WireError::new(Code::SandboxGone, "the sandbox has ended")
}

fn protocol_error(error: FrameError) -> WireError {
    WireError::new(Code::Protocol, error.to_string())
}

impl State {
    /// The next bytes to write, at most about [`BATCH`].
    fn next_batch(&mut self, out: &mut BytesMut) {
        out.extend_from_slice(&self.first.split());
        match self.stage {
            Some(Stage::Open) => {}
            // The last word before the silence, and what was said before it.
            Some(Stage::Silent) => {
                for frame in self.control.drain(..) {
                    frame.encode(out);
                }
                return;
            }
            _ => return,
        }
        for frame in self.control.drain(..) {
            frame.encode(out);
        }
        if let Some(Ok(frame)) = self.events.take().map(|seq| Frame::control(&ToGuest::AckEvents { seq })) {
            frame.encode(out);
        }
        for (stream, offset) in std::mem::take(&mut self.acks) {
            Frame::Ack { stream, offset }.encode(out);
        }
        while out.len() < BATCH {
            let Some((stream, outgoing)) = self.next_data() else { break };
            match outgoing {
                Outgoing::Data { offset, bytes } => Frame::Data { stream, offset, bytes }.encode(out),
                Outgoing::End { offset } => Frame::End { stream, offset }.encode(out),
            }
        }
    }

    /// The streams take turns, a frame each.
    fn next_data(&mut self) -> Option<(StreamId, Outgoing)> {
        let after = self.turn.0.map_or(Bound::Unbounded, Bound::Excluded);
        let next = self.sending.range((after, Bound::Unbounded)).find(|(_, s)| s.window.has_outgoing()).map(|(id, _)| *id);
        let next = next.or_else(|| self.sending.iter().find(|(_, s)| s.window.has_outgoing()).map(|(id, _)| *id))?;
        self.turn = StreamId0(Some(next));
        let outgoing = self.sending.get_mut(&next)?.window.next_outgoing()?;
        Some((next, outgoing))
    }

    fn acked(&mut self, stream: StreamId, offset: Offset) -> Result<(), FrameError> {
        // A stream that we have given up can still be acknowledged for a while.
        let Some(sending) = self.sending.get_mut(&stream) else { return Ok(()) };
        if offset < sending.window.acked() {
            // Said before a greeting that knew more.
            return Ok(());
        }
        sending.window.ack(offset).map_err(|e| FrameError::BadControl(format!("stream {}: {e}", stream.0)))?;
        sending.tell();
        if sending.window.is_done() {
            self.sending.remove(&stream);
        }
        Ok(())
    }
}

async fn write_loop(link: Link, mut pipe: pipe::Sender) {
    let mut batch = BytesMut::with_capacity(16 * 1024);
    let mut gone = link.watch_gone();
    loop {
        batch.clear();
        link.lock().next_batch(&mut batch);
        if batch.is_empty() {
            tokio::select! {
                () = link.wake.notified() => {}
                _ = gone.wait_for(Option::is_some) => return,
            }
            continue;
        }
        let written = tokio::select! {
            written = pipe.write_all(&batch) => written,
            _ = gone.wait_for(Option::is_some) => return,
        };
        if written.is_err() {
            return link.lost(Gone::Closed);
        }
        if batch.capacity() > 2 * BATCH {
            batch = BytesMut::with_capacity(16 * 1024);
        }
    }
}

async fn read_loop(link: Link, mut pipe: pipe::Receiver, incoming: Arc<dyn Incoming>) {
    let mut buffer = vec![0; 128 * 1024];
    let mut gone = link.watch_gone();
    loop {
        let read = tokio::select! {
            read = pipe.read(&mut buffer) => read,
            _ = gone.wait_for(Option::is_some) => return,
        };
        match read {
            Ok(0) | Err(_) => return link.lost(Gone::Closed),
            Ok(n) => link.lock().decoder.push(&buffer[..n]),
        }
        loop {
            let frame = match link.lock().decoder.next_frame() {
                Ok(Some(frame)) => frame,
                Ok(None) => break,
                Err(error) => return link.lost(Gone::Violation(error.to_string())),
            };
            if let Err(error) = link.take(frame, incoming.as_ref()) {
                return link.lost(Gone::Violation(error.to_string()));
            }
        }
        // Others on this thread want their turn, too.
        tokio::task::yield_now().await;
    }
}

impl Link {
    fn take(&self, frame: Frame, incoming: &dyn Incoming) -> Result<(), FrameError> {
        match frame {
            Frame::Data { stream, offset, bytes } => incoming.data(stream, offset, bytes),
            Frame::End { stream, offset } => incoming.end(stream, offset),
            Frame::Ack { stream, offset } => self.lock().acked(stream, offset),
            Frame::Reset { stream, reason } => {
                self.lock().acks.remove(&stream);
                if let Some(mut sending) = self.lock().sending.remove(&stream) {
                    sending.tell();
                }
                incoming.reset(stream, &reason);
                Ok(())
            }
            Frame::Control(json) => match parse_control(&json)? {
                FromGuest::HelloReply(reply) => {
                    if let Some(tell) = self.lock().hello.take() {
                        let _ = tell.send(reply);
                    }
                    Ok(())
                }
                FromGuest::Quiesced => {
                    let mut state = self.lock();
                    state.decoder.expect_preamble();
                    if let Some(tell) = state.quiesced.take() {
                        let _ = tell.send(());
                    }
                    Ok(())
                }
                FromGuest::Reply { id, result } => {
                    // An answer that nobody waits for any more is dropped.
                    if let Some(tell) = self.lock().requests.remove(&id) {
                        let _ = tell.send(result);
                    }
                    Ok(())
                }
                FromGuest::Event { seq, event } => {
                    incoming.event(seq, event);
                    Ok(())
                }
                FromGuest::Dial { stream, to } => incoming.dial(stream, to),
                FromGuest::Unknown => Ok(()),
            },
        }
    }
}
