//! Taking connections, over TCP and over Unix sockets, and letting go of them at the end.
//!
//! A Unix socket tells who is on the other side (`SO_PEERCRED`, unix(7)): root and the server's own user need no token
//! there.

use axum::{
    Router,
    extract::connect_info::Connected,
    serve::{IncomingStream, Listener},
};
use std::{io, net::SocketAddr, time::Duration};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;

/// Who is on the other side of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    Tcp(SocketAddr),
    /// A process of this machine; `None` where the kernel didn't say whose it is.
    Unix {
        uid: Option<u32>,
    },
    /// The listener itself, and tests that have no connection.
    Nobody,
}

/// How long the server waits before it accepts again after a failure such as too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

struct Tcp(TcpListener);
struct Unix(UnixListener);

impl Listener for Tcp {
    type Io = TcpStream;
    type Addr = Peer;

    async fn accept(&mut self) -> (TcpStream, Peer) {
        loop {
            match self.0.accept().await {
                Ok((stream, address)) => {
                    // Without it a small answer waits for the acknowledgement of the one before.
                    if let Err(error) = stream.set_nodelay(true) {
                        tracing::debug!(%error, "a connection keeps its delay");
                    }
                    return (stream, Peer::Tcp(address));
                }
                Err(error) => pause_after(&error).await,
            }
        }
    }

    fn local_addr(&self) -> io::Result<Peer> {
        self.0.local_addr().map(Peer::Tcp)
    }
}

impl Listener for Unix {
    type Io = UnixStream;
    type Addr = Peer;

    async fn accept(&mut self) -> (UnixStream, Peer) {
        loop {
            match self.0.accept().await {
                Ok((stream, _)) => {
                    let uid = stream.peer_cred().ok().map(|credentials| credentials.uid());
                    return (stream, Peer::Unix { uid });
                }
                Err(error) => pause_after(&error).await,
            }
        }
    }

    fn local_addr(&self) -> io::Result<Peer> {
        Ok(Peer::Nobody)
    }
}

/// A connection that broke before it was taken is nothing; anything else would fail again at once.
async fn pause_after(error: &io::Error) {
    use io::ErrorKind as K;
    if matches!(error.kind(), K::ConnectionAborted | K::ConnectionReset | K::ConnectionRefused | K::Interrupted) {
        return;
    }
    tracing::error!(%error, "no connection can be taken");
    tokio::time::sleep(ACCEPT_PAUSE).await;
}

impl Connected<IncomingStream<'_, Tcp>> for Peer {
    fn connect_info(stream: IncomingStream<'_, Tcp>) -> Peer {
        *stream.remote_addr()
    }
}

impl Connected<IncomingStream<'_, Unix>> for Peer {
    fn connect_info(stream: IncomingStream<'_, Unix>) -> Peer {
        *stream.remote_addr()
    }
}

/// Where a server listens.
#[derive(Debug, Default)]
pub struct Listeners {
    pub tcp: Vec<TcpListener>,
    pub unix: Vec<UnixListener>,
}

/// How long requests that are under way may take after the end was asked for. What they have begun, the engine waits for
/// after that; both together stay below the 10 s within which a server ends.
pub const GRACE: Duration = Duration::from_secs(5);

/// Answers requests on all listeners until `stop`: then takes no more connections, lets what is under way finish for
/// [`GRACE`], and returns. Streams that would never end by themselves watch the same token.
pub async fn serve(router: Router, listeners: Listeners, stop: CancellationToken) {
    let mut servers = tokio::task::JoinSet::new();
    for listener in listeners.tcp {
        servers.spawn(serve_one(router.clone(), Tcp(listener), stop.clone()));
    }
    for listener in listeners.unix {
        servers.spawn(serve_one(router.clone(), Unix(listener), stop.clone()));
    }
    stop.cancelled().await;
    let finished = tokio::time::timeout(GRACE, async { while servers.join_next().await.is_some() {} }).await;
    if finished.is_err() {
        tracing::warn!("requests were still under way after {} s and are cut off", GRACE.as_secs());
        servers.shutdown().await;
    }
}

async fn serve_one<L>(router: Router, listener: L, stop: CancellationToken)
where
    L: Listener<Addr = Peer>,
    Peer: for<'a> Connected<IncomingStream<'a, L>>,
{
    let service = router.into_make_service_with_connect_info::<Peer>();
    let result = axum::serve(listener, service).with_graceful_shutdown(stop.cancelled_owned()).await;
    if let Err(error) = result {
        tracing::error!(%error, "a listener ended");
    }
}
