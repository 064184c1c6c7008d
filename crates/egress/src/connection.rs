//! The open connections: where each goes, what it moves, and how it is cut.
//!
//! ```text
//!  new ──aim──► aimed (judged by name) ──reached──► open (judged by address; its requests, if rules read them)
//!   └───────────────┴────────cut: denied now, or all are closed────┴──► cancelled, both sides reset
//! ```
//!
//! A change of policy looks at every connection under its lock, and a connection registers each step under the same lock
//! with the policy of that moment: so either the step sees the new policy, or the change sees the step.

use crate::{
    Inner, OpenConnection, RequestLine,
    host::{Destination, Host},
    locked,
    policy::{Allowed, Asked, Judge, Judgement},
    refusal::Refusal,
    traffic::Counters,
};
use std::{
    collections::HashMap,
    future::Future,
    io,
    net::IpAddr,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// How long an answer is waited for, as far as [`OpenConnection::awaits_answer_for`] tells.
const LONGEST_WAIT: Duration = Duration::from_secs(60 * 60);
/// How often, in milliseconds, one connection tells that it moves bytes.
const TELL_EVERY: u64 = 1000;

type Named = Box<dyn FnOnce(&str) + Send>;

/// One stream from inside, and whatever it has become.
pub(crate) struct Connection {
    pub egress: Arc<Inner>,
    id: u64,
    born: Instant,
    state: Mutex<State>,
    /// Ends every task of the connection.
    token: CancellationToken,
    /// Tasks that carry the connection on after its protocol was agreed.
    carriers: TaskTracker,
    /// The other side is to be reset, not closed.
    reset: AtomicBool,
    sent: AtomicU64,
    received: AtomicU64,
    /// Milliseconds after `born`, plus one, since which an answer is awaited; 0: none is.
    awaits: AtomicU64,
    /// Milliseconds after `born`, plus one, at which traffic was told last.
    told: AtomicU64,
}

#[derive(Default)]
struct State {
    named: Option<Named>,
    to: Option<Destination>,
    address: Option<IpAddr>,
    /// Requests are read and judged one by one.
    reads: bool,
    requests: HashMap<u64, (Destination, Asked)>,
    next_request: u64,
}

/// Registers a connection, and takes it off the list when its future is dropped.
pub(crate) struct Registration(pub Arc<Connection>);

impl Registration {
    pub fn new(egress: &Arc<Inner>, named: Named) -> Registration {
        let id = egress.next_id.fetch_add(1, Relaxed);
        let connection = Arc::new(Connection {
            egress: Arc::clone(egress),
            id,
            born: Instant::now(),
            state: Mutex::new(State { named: Some(named), ..State::default() }),
            token: CancellationToken::new(),
            carriers: TaskTracker::new(),
            reset: AtomicBool::new(false),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            awaits: AtomicU64::new(0),
            told: AtomicU64::new(0),
        });
        locked(&egress.connections).insert(id, Arc::clone(&connection));
        Registration(connection)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.0.token.cancel();
        locked(&self.0.egress.connections).remove(&self.0.id);
    }
}

impl Connection {
    /// Runs the connection's future, then what it has started, until the end or until it is cut.
    pub async fn run(&self, future: impl Future<Output = ()> + Send) {
        let all = async {
            // In a box of its own: what it took is free again while others carry on what it began.
            Box::pin(future).await;
            self.carriers.close();
            self.carriers.wait().await;
        };
        tokio::select! {
            biased;
            () = self.token.cancelled() => {}
            () = all => {}
        }
    }

    /// Starts a task that carries the connection on.
    pub fn carry_on(&self, future: impl Future<Output = ()> + Send + 'static) {
        let token = self.token.clone();
        self.carriers.spawn(async move {
            token.run_until_cancelled_owned(future).await;
        });
    }

    /// Starts a task that ends with the connection at the latest.
    pub fn help<T: Send + 'static>(&self, future: impl Future<Output = T> + Send + 'static) {
        tokio::spawn(self.token.clone().run_until_cancelled_owned(future));
    }

    /// Ends the connection hard, on both sides.
    pub fn cut(&self) {
        self.reset.store(true, Relaxed);
        self.token.cancel();
    }

    /// From now on the other side is reset, not closed, when it is dropped.
    pub fn reset_outside(&self) {
        self.reset.store(true, Relaxed);
    }

    /// The destination is known.
    pub fn aim(&self, to: &Destination, reads: bool) {
        let named = {
            let mut state = locked(&self.state);
            (state.to, state.address, state.reads) = (Some(to.clone()), None, reads);
            state.named.take()
        };
        if let Some(named) = named {
            named(&to.to_string());
        }
    }

    /// The other side is connected. Says whether requests are read.
    pub fn reached(&self, address: IpAddr) -> Result<bool, Refusal> {
        let own = self.egress.own.get();
        let mut state = locked(&self.state);
        let Some(to) = state.to.clone() else { return Err(Refusal::denied("it has no destination")) };
        let grant = self.egress.grant_now()?;
        let reads = match (Judge { grant: &grant, own: &own }).address(&to, address) {
            Judgement::Allow => false,
            Judgement::ByRequest => true,
            Judgement::Deny(reason) => return Err(Refusal::denied(reason)),
        };
        state.address = Some(address);
        state.reads |= reads;
        Ok(state.reads)
    }

    /// Judges a request and registers it while it lasts.
    pub fn begin(self: &Arc<Self>, to: &Destination, asked: Asked) -> Request {
        let mut state = locked(&self.state);
        let id = state.next_request;
        state.next_request += 1;
        state.requests.insert(id, (to.clone(), asked.clone()));
        drop(state);
        Request {
            connection: Arc::clone(self),
            id,
            asked,
            to: to.clone(),
            began: Instant::now(),
            status: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
        }
    }

    /// Looks at the connection with a new policy, and cuts it where it is denied now.
    pub fn judge_again(&self, judge: Judge<'_>) {
        let state = locked(&self.state);
        let Some(to) = &state.to else { return };
        let stays = match state.address {
            Some(address) => match judge.address(to, address) {
                Judgement::Allow => true,
                Judgement::ByRequest => state.reads,
                Judgement::Deny(_) => false,
            },
            None => to.host.name().is_none_or(|name| !matches!(judge.name(name, to.port), Judgement::Deny(_))),
        };
        let requests = || state.requests.values().all(|(to, asked)| judge.request(to, state.address, asked).is_ok());
        if !(stays && (!state.reads || requests())) {
            self.cut();
        }
    }

    /// The connection as it is shown, once it has a destination.
    pub fn shown(&self) -> Option<OpenConnection> {
        let state = locked(&self.state);
        let to = state.to.as_ref()?.to_string();
        let age = self.born.elapsed();
        // Where requests are known they are waited for to their end, and nothing else is: what HTTP/2 says to keep a
        // connection going needs no answer. Elsewhere the direction of the last bytes tells.
        let since = match (state.requests.is_empty(), state.reads) {
            (false, _) => self.told.load(Relaxed).max(1),
            (true, true) => 0,
            (true, false) => self.awaits.load(Relaxed),
        };
        let awaits_answer_for = (since > 0).then(|| age.saturating_sub(Duration::from_millis(since - 1)));
        Some(OpenConnection {
            to,
            age,
            sent_bytes: self.sent.load(Relaxed),
            received_bytes: self.received.load(Relaxed),
            awaits_answer_for: awaits_answer_for.filter(|waited| *waited < LONGEST_WAIT),
        })
    }

    fn now(&self) -> u64 {
        u64::try_from(self.born.elapsed().as_millis()).unwrap_or(u64::MAX - 1) + 1
    }

    fn tell_traffic(&self, now: u64) {
        let told = self.told.load(Relaxed);
        if told == 0 || now - told.min(now) >= TELL_EVERY {
            self.told.store(now, Relaxed);
            self.egress.observer.traffic();
        }
    }
}

/// A request under way.
pub(crate) struct Request {
    connection: Arc<Connection>,
    id: u64,
    pub asked: Asked,
    /// Where it goes, whatever the connection was aimed at since.
    to: Destination,
    began: Instant,
    pub status: AtomicU64,
    pub sent: AtomicU64,
    pub received: AtomicU64,
}

impl Request {
    /// What the policy of this moment says of the request. `read` gets what is allowed.
    pub fn judge<T>(&self, read: impl FnOnce(Allowed<'_>) -> T) -> Result<T, Refusal> {
        let own = self.connection.egress.own.get();
        let state = locked(&self.connection.state);
        let grant = self.connection.egress.grant_now()?;
        if state.to.as_ref() != Some(&self.to) {
            // A rule of one host must never speak for another.
            return Err(Refusal::denied("its connection leads elsewhere by now"));
        }
        let judge = Judge { grant: &grant, own: &own };
        judge.request(&self.to, state.address, &self.asked).map(read).map_err(Refusal::denied)
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        locked(&self.connection.state).requests.remove(&self.id);
        let egress = &self.connection.egress;
        if egress.grant_now().is_ok_and(|grant| grant.policy.log_requests) {
            egress.observer.request(RequestLine {
                method: std::mem::take(&mut self.asked.method),
                host: self.to.host.to_string(),
                path: std::mem::take(&mut self.asked.path),
                status: u16::try_from(self.status.load(Relaxed)).unwrap_or_default(),
                sent_bytes: self.sent.load(Relaxed),
                received_bytes: self.received.load(Relaxed),
                duration_ms: u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX),
            });
        }
    }
}

/// The stream to the other side, counted.
pub(crate) struct Outside {
    stream: TcpStream,
    connection: Arc<Connection>,
    counters: Arc<Counters>,
}

impl Outside {
    pub fn new(stream: TcpStream, connection: &Arc<Connection>, host: &Host) -> Outside {
        let counters = connection.egress.totals.of(&host.to_string());
        counters.connections.fetch_add(1, Relaxed);
        connection.tell_traffic(connection.now());
        Outside { stream, connection: Arc::clone(connection), counters }
    }

    fn moved(&self, sent: usize, received: usize) {
        let (sent, received) = (sent as u64, received as u64);
        self.counters.sent.fetch_add(sent, Relaxed);
        self.counters.received.fetch_add(received, Relaxed);
        self.connection.sent.fetch_add(sent, Relaxed);
        self.connection.received.fetch_add(received, Relaxed);
        if sent + received > 0 {
            let now = self.connection.now();
            self.connection.awaits.store(if sent > 0 { now } else { 0 }, Relaxed);
            self.connection.tell_traffic(now);
        }
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        if self.connection.reset.load(Relaxed) {
            // Not an orderly end: the other side must not take what it has got for all.
            let _ = self.stream.set_zero_linger();
        }
    }
}

impl AsyncRead for Outside {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let result = Pin::new(&mut self.stream).poll_read(cx, buffer);
        self.moved(0, buffer.filled().len() - before);
        result
    }
}

impl AsyncWrite for Outside {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(cx, bytes);
        if let Poll::Ready(Ok(written)) = result {
            self.moved(written, 0);
        }
        result
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        if let Poll::Ready(Ok(written)) = result {
            self.moved(written, 0);
        }
        result
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
