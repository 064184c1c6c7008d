//! The edge at which streams from inside a sandbox meet the network: policy, proxy, credentials.
//!
//! Everything that comes from inside is hostile. A stream says where it wants to go (as a SOCKS5 or HTTP proxy's client, or
//! beside the stream); the policy judges the name, then each address that it has, and what was checked is what is connected
//! to. Where rules read requests, TLS ends here with a certificate of the session's own CA, each request is judged, and
//! headers with secrets are added, so that no secret is ever inside.
//!
//! ```text
//!  stream ─► proxy | socks | as asked ─► connect ─► pump                          bytes both ways
//!              │                         (policy)     └─► intercept ─► requests   TLS ends; each request is judged
//!              └─► requests ─► backend ──┘
//! ```
//!
//! It must not know sandboxes, frames, sessions or any store: it gets streams, a policy and credentials.

mod backend;
mod body;
mod ca;
mod connect;
mod connection;
mod credentials;
mod host;
mod intercept;
mod policy;
mod prefixed;
mod proxy;
mod pump;
mod refusal;
mod requests;
mod resolve;
mod socks;
mod tls;
mod traffic;

pub use ca::{CaKey, ca_certificate};
pub use credentials::Credentials;
pub use resolve::{Resolve, Resolving, SystemResolver};
pub use traffic::HostTraffic;

use connection::{Connection, Registration};
use host::Destination;
use policy::Judge;
use refusal::{Kind, Refusal};
use std::{
    collections::HashMap,
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicU64},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::{Semaphore, watch},
    time::timeout,
};

/// How long a connection waits for the policy or credentials to be told.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a client has for its request's head, its SOCKS greeting or its TLS hello.
const HEAD_WITHIN: Duration = Duration::from_secs(30);

/// What doesn't change while the edge lives.
#[derive(Debug, Clone)]
pub struct Settings {
    /// A PEM file with CAs that are trusted for upstream servers, beside those of the system.
    pub extra_roots: Option<PathBuf>,
    /// Connections at once; what is more is closed.
    pub max_connections: usize,
    /// How long resolving and connecting may take together, and a TLS handshake.
    pub connect_timeout: Duration,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { extra_roots: None, max_connections: 2048, connect_timeout: Duration::from_secs(20) }
    }
}

/// What programs inside may reach.
#[derive(Debug, Clone, Default)]
pub struct Grant {
    pub policy: model::network::Policy,
    /// The server's own listeners, which no rule opens. An unspecified address means every local one.
    pub closed: Vec<SocketAddr>,
}

/// A connection or request was denied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Denied {
    pub host: String,
    pub port: u16,
    pub reason: String,
    /// Denials of the same host and port that weren't told, because one was told less than a minute before.
    pub count: u64,
}

/// A request that has ended: no headers, no bodies, no query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestLine {
    pub method: String,
    pub host: String,
    pub path: String,
    /// 0: it was given up before there was an answer.
    pub status: u16,
    /// Of the body.
    pub sent_bytes: u64,
    /// Of the body.
    pub received_bytes: u64,
    pub duration_ms: u64,
}

/// Is told what happens. Calls come from many tasks and must return at once.
pub trait Observer: Send + Sync + 'static {
    /// Something was denied: once a minute for each host and port.
    fn denied(&self, denied: Denied);
    /// Bytes moved, or a connection was opened: about once a second for each connection.
    fn traffic(&self);
    /// A request has ended, if the policy has requests written down.
    fn request(&self, request: RequestLine);
}

/// What a stream from inside speaks, or where it goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ask {
    /// SOCKS5 or HTTP/1 as to a proxy, as its first byte tells.
    Proxy,
    /// Bytes for this name or address.
    To { host: String, port: u16 },
}

/// An open connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenConnection {
    /// `HOST:PORT`.
    pub to: String,
    pub age: Duration,
    pub sent_bytes: u64,
    pub received_bytes: u64,
    /// An answer is awaited, and the last bytes moved so long ago: a request is under way, or, where requests aren't read,
    /// the last bytes went outwards. After an hour nothing is expected any more.
    pub awaits_answer_for: Option<Duration>,
}

/// The edge of one sandbox. Clones are the same edge.
#[derive(Clone)]
pub struct Egress {
    inner: Arc<Inner>,
}

struct Inner {
    settings: Settings,
    observer: Arc<dyn Observer>,
    resolver: Arc<dyn Resolve>,
    grant: watch::Sender<Option<Arc<Grant>>>,
    credentials: watch::Sender<Option<Arc<credentials::Ready>>>,
    connections: Mutex<HashMap<u64, Arc<Connection>>>,
    next_id: AtomicU64,
    places: Semaphore,
    own: resolve::OwnAddresses,
    totals: traffic::Totals,
    denials: traffic::Denials,
    clients: tls::Clients,
}

impl Egress {
    /// An edge that lets nothing through until [`Egress::set_policy`] was called.
    pub fn new(settings: Settings, observer: Arc<dyn Observer>) -> Egress {
        Egress::with_resolver(settings, observer, Arc::new(SystemResolver))
    }

    /// The same, with another way to find addresses.
    pub fn with_resolver(settings: Settings, observer: Arc<dyn Observer>, resolver: Arc<dyn Resolve>) -> Egress {
        let places = Semaphore::new(settings.max_connections.min(Semaphore::MAX_PERMITS));
        let clients = tls::Clients::new(settings.extra_roots.clone());
        let inner = Inner {
            settings,
            observer,
            resolver,
            grant: watch::Sender::new(None),
            credentials: watch::Sender::new(None),
            connections: Mutex::default(),
            next_id: AtomicU64::new(0),
            places,
            own: resolve::OwnAddresses::default(),
            totals: traffic::Totals::default(),
            denials: traffic::Denials::default(),
            clients,
        };
        Egress { inner: Arc::new(inner) }
    }

    /// Sets what may be reached, and cuts open connections that are denied now, or whose requests are to be read now and
    /// can't be.
    pub fn set_policy(&self, grant: Grant) {
        let grant = Arc::new(grant);
        self.inner.grant.send_replace(Some(Arc::clone(&grant)));
        let own = self.inner.own.get();
        for connection in self.inner.all() {
            connection.judge_again(Judge { grant: &grant, own: &own });
        }
    }

    /// Sets the secrets and the CA. Requests that come from now on get them.
    pub fn set_credentials(&self, credentials: Credentials) {
        self.inner.credentials.send_replace(Some(Arc::new(credentials::Ready::new(credentials))));
    }

    /// Ends every open connection hard, on both sides.
    pub fn close_all(&self) {
        self.inner.all().iter().for_each(|connection| connection.cut());
    }

    /// Runs one stream from inside to its end. `named` is told `HOST:PORT` once that is known.
    ///
    /// A stream that is dropped without having been shut down was cut: the caller has it reset inside.
    pub async fn serve<S>(&self, inside: S, ask: Ask, named: impl FnOnce(&str) + Send + 'static)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let Ok(_place) = self.inner.places.try_acquire() else {
            let (host, port) = match ask {
                Ask::Proxy => (traffic::OTHER.to_owned(), 0),
                Ask::To { host, port } => (host, port),
            };
            let reason = format!("there are {} connections already", self.inner.settings.max_connections);
            self.inner.tell_denied(&host, port, &reason);
            return;
        };
        let registration = Registration::new(&self.inner, Box::new(named));
        let connection = &registration.0;
        connection.run(proxy::serve(Arc::clone(connection), inside, ask)).await;
    }

    /// The ports on which a name is to be listened for inside; `None` where the policy doesn't let it be reached, or isn't
    /// known. Nothing is resolved.
    pub fn lookup(&self, name: &str) -> Option<Vec<u16>> {
        let name = model::network::host_name(name).ok()?;
        let grant = self.inner.grant_now().ok()?;
        Judge { grant: &grant, own: &[] }.ports(&name)
    }

    /// The connections whose destination is known.
    pub fn open(&self) -> Vec<OpenConnection> {
        self.inner.all().iter().filter_map(|connection| connection.shown()).collect()
    }

    /// What each host's connections have moved since the last call. At most 256 hosts are told apart; the rest is "other".
    pub fn take_traffic(&self) -> Vec<HostTraffic> {
        self.inner.totals.take()
    }
}

impl std::fmt::Debug for Egress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Egress").field("open", &locked(&self.inner.connections).len()).finish_non_exhaustive()
    }
}

impl Inner {
    fn all(&self) -> Vec<Arc<Connection>> {
        locked(&self.connections).values().cloned().collect()
    }

    /// The policy, once there is one.
    async fn grant_soon(&self) -> Result<Arc<Grant>, Refusal> {
        soon(&self.grant).await.ok_or_else(|| Refusal::new(Kind::NotReady, "the session's network policy isn't known yet"))
    }

    /// The policy of this moment.
    fn grant_now(&self) -> Result<Arc<Grant>, Refusal> {
        self.grant.borrow().clone().ok_or_else(|| Refusal::new(Kind::NotReady, "the session's network policy isn't known yet"))
    }

    /// The credentials, once there are some.
    async fn credentials_soon(&self) -> Result<Arc<credentials::Ready>, Refusal> {
        soon(&self.credentials)
            .await
            .ok_or_else(|| Refusal::new(Kind::NotReady, "the credentials that its rule needs aren't known yet"))
    }

    /// Tells that something was denied, if that is what happened.
    fn tell_refused(&self, to: &Destination, refusal: &Refusal) {
        if refusal.kind == Kind::Denied {
            self.tell_denied(&to.host.to_string(), to.port, &refusal.reason);
        }
    }

    fn tell_denied(&self, host: &str, port: u16, reason: &str) {
        if let Some(denied) = self.denials.tell(host, port, reason, Instant::now()) {
            self.observer.denied(denied);
        }
    }
}

async fn soon<T: Clone>(sender: &watch::Sender<Option<T>>) -> Option<T> {
    let mut receiver = sender.subscribe();
    let known = timeout(PATIENCE, receiver.wait_for(Option::is_some)).await;
    known.ok()?.ok()?.clone()
}

/// Locks; a panic elsewhere leaves counters and lists that are still right.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
