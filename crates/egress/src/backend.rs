//! The upstream side of requests: one connection at a time, opened when needed, judged each time.

use crate::{
    body::Passing,
    connect::{Use, reach},
    connection::{Connection, Outside},
    host::{Destination, Host},
    locked,
    refusal::{Kind, Refusal},
    tls::H2,
};
use http::{Method, Request, Response, header::UPGRADE};
use hyper::{
    body::{Body, Incoming},
    client::conn::{http1, http2},
    rt::Executor,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::{ClientConfig, pki_types::ServerName};
use std::{
    future::Future,
    io,
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::timeout,
};
use tokio_rustls::TlsConnector;

/// Bytes of a response that are read ahead of the client inside, by HTTP version.
const H1_BUFFER: usize = 64 * 1024;
const H2_WINDOW: u32 = 1024 * 1024;
/// Longest head of a response over HTTP/2.
const H2_HEAD: u32 = 64 * 1024;
/// How long a connection that was used may take until it is ready for the next request; else a new one is opened.
const READY_WITHIN: Duration = Duration::from_secs(1);
/// How often a request that an old connection didn't take is given to a new one.
const TRIES: usize = 3;

/// Where requests go.
pub(crate) struct Backend {
    pub to: Destination,
    tls: Option<Arc<ClientConfig>>,
    /// A stream that was connected before the first request came.
    first: Mutex<Option<Outside>>,
    live: tokio::sync::Mutex<Option<Sender>>,
    /// Whether the other side chose HTTP/2. It's fixed, because the inside has been told so.
    h2: OnceLock<bool>,
}

enum Sender {
    One(http1::SendRequest<Passing>),
    Two(http2::SendRequest<Passing>),
}

impl Backend {
    /// Plain HTTP/1, not connected yet.
    pub fn plain(to: Destination) -> Backend {
        Backend { to, tls: None, first: Mutex::default(), live: tokio::sync::Mutex::default(), h2: OnceLock::from(false) }
    }

    /// Over a stream that is connected already, and with TLS where there is a configuration.
    pub fn over(to: Destination, outside: Outside, tls: Option<Arc<ClientConfig>>) -> Backend {
        let h2 = if tls.is_none() { OnceLock::from(false) } else { OnceLock::new() };
        Backend { to, tls, first: Mutex::new(Some(outside)), live: tokio::sync::Mutex::default(), h2 }
    }

    /// Makes the connection ready before any request. Says the protocol that the other side chose, if it chose one.
    pub async fn prepare(&self, connection: &Arc<Connection>) -> Result<Option<Vec<u8>>, Refusal> {
        let (sender, protocol) = self.open(connection).await?;
        *self.live.lock().await = Some(sender);
        Ok(protocol)
    }

    /// Whether requests go out as HTTP/2.
    pub fn is_h2(&self) -> bool {
        self.h2.get().copied().unwrap_or_default()
    }

    /// Whether TLS is spoken to the other side.
    pub fn is_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// Sends a request. `judge` is asked once the address is known.
    pub async fn send(
        &self,
        connection: &Arc<Connection>,
        mut request: Request<Passing>,
        judge: impl Fn() -> Result<(), Refusal>,
    ) -> Result<Response<Incoming>, Refusal> {
        for last in (0..TRIES).rev() {
            let (sender, used) = self.sender(connection).await?;
            judge()?;
            let mut again = if used && last > 0 { repeatable(&request) } else { None };
            let result = match sender {
                Sender::One(mut one) => {
                    let result = one.try_send_request(request).await;
                    if result.is_ok() {
                        *self.live.lock().await = Some(Sender::One(one));
                    }
                    result
                }
                Sender::Two(mut two) => two.try_send_request(request).await,
            };
            match result {
                Ok(response) => return Ok(response),
                // The connection had ended before: nothing of the request was sent, or it does no harm to send it again.
                Err(mut error) => match error.take_message() {
                    Some(unsent) if last > 0 => request = unsent,
                    _ => match again.take().filter(|_| error.error().is_incomplete_message() || error.error().is_closed()) {
                        Some(copy) => request = copy,
                        None => return Err(broken(error.error())),
                    },
                },
            }
        }
        Err(Refusal::new(Kind::Broken, "the other side takes no request"))
    }

    /// A connection that takes a request: the one that is there, or a new one. Says whether it had requests before.
    async fn sender(&self, connection: &Arc<Connection>) -> Result<(Sender, bool), Refusal> {
        let mut live = self.live.lock().await;
        match live.take() {
            Some(Sender::One(mut one)) => {
                if let Ok(Ok(())) = timeout(READY_WITHIN, one.ready()).await {
                    return Ok((Sender::One(one), true));
                }
            }
            Some(Sender::Two(two)) if !two.is_closed() => {
                *live = Some(Sender::Two(two.clone()));
                return Ok((Sender::Two(two), true));
            }
            _ => {}
        }
        let (sender, _) = self.open(connection).await?;
        if let Sender::Two(two) = &sender {
            *live = Some(Sender::Two(two.clone()));
        }
        Ok((sender, false))
    }

    async fn open(&self, connection: &Arc<Connection>) -> Result<(Sender, Option<Vec<u8>>), Refusal> {
        let first = locked(&self.first).take();
        let outside = match first {
            Some(outside) => outside,
            None => reach(connection, &self.to, Use::Requests).await?.outside,
        };
        let Some(config) = &self.tls else { return Ok((one(connection, outside).await?, None)) };
        let limit = connection.egress.settings.connect_timeout;
        let handshake = TlsConnector::from(Arc::clone(config)).connect(server_name(&self.to.host)?, outside);
        let stream = timeout(limit, handshake)
            .await
            .map_err(|_| Refusal::new(Kind::TimedOut, format!("its TLS handshake took more than {} s", limit.as_secs())))?
            .map_err(|error: io::Error| Refusal::new(Kind::Broken, format!("its TLS handshake failed: {error}")))?;
        let protocol = stream.get_ref().1.alpn_protocol().map(<[u8]>::to_vec);
        let h2 = protocol.as_deref() == Some(H2);
        if *self.h2.get_or_init(|| h2) != h2 {
            return Err(Refusal::new(Kind::Broken, "the other side speaks another version of HTTP than before"));
        }
        let sender = if h2 { two(connection, stream).await? } else { one(connection, stream).await? };
        Ok((sender, protocol))
    }
}

async fn one<T: AsyncRead + AsyncWrite + Send + Unpin + 'static>(
    connection: &Arc<Connection>,
    stream: T,
) -> Result<Sender, Refusal> {
    let (sender, task) = http1::Builder::new()
        .preserve_header_case(true)
        .max_buf_size(H1_BUFFER)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(|error| broken(&error))?;
    connection.help(task.with_upgrades());
    Ok(Sender::One(sender))
}

async fn two<T: AsyncRead + AsyncWrite + Send + Unpin + 'static>(
    connection: &Arc<Connection>,
    stream: T,
) -> Result<Sender, Refusal> {
    let (sender, task) = http2::Builder::new(Helpers(Arc::clone(connection)))
        .timer(TokioTimer::new())
        .initial_stream_window_size(H2_WINDOW)
        .initial_connection_window_size(H2_WINDOW)
        .max_header_list_size(H2_HEAD)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(|error| broken(&error))?;
    connection.help(task);
    Ok(Sender::Two(sender))
}

fn server_name(host: &Host) -> Result<ServerName<'static>, Refusal> {
    match host {
        Host::Address(address) => Ok(ServerName::IpAddress((*address).into())),
        Host::Name(name) => {
            ServerName::try_from(name.clone()).map_err(|_| Refusal::new(Kind::Malformed, "no certificate can be for this name"))
        }
    }
}

/// A copy of a request that may be sent twice, for a connection that may have ended meanwhile.
fn repeatable(request: &Request<Passing>) -> Option<Request<Passing>> {
    let harmless = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    let upgrades = request.headers().contains_key(UPGRADE);
    if !harmless || upgrades || !request.body().is_end_stream() {
        return None;
    }
    let mut copy = Request::new(Passing::text(""));
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.version_mut() = request.version();
    *copy.headers_mut() = request.headers().clone();
    Some(copy)
}

fn broken(error: &impl std::fmt::Display) -> Refusal {
    Refusal::new(Kind::Broken, format!("the other side didn't answer as HTTP asks: {error}"))
}

/// Runs the tasks of HTTP/2, which end with their connection.
#[derive(Clone)]
pub(crate) struct Helpers(pub Arc<Connection>);

impl<F> Executor<F> for Helpers
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, future: F) {
        self.0.help(future);
    }
}
