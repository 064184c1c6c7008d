//! Carries a connected stream: as bytes, or, where rules read requests, with TLS ended here.

use crate::{
    HEAD_WITHIN,
    backend::{Backend, Helpers},
    connect::Reached,
    connection::{Connection, Outside},
    host::{Destination, Host},
    prefixed::Prefixed,
    proxy::{LONGEST_HEAD, http1_server},
    pump::pump,
    refusal::{Kind, Refusal},
    requests::{forward, refused},
    tls::{self, H2, HTTP1},
};
use hyper::{server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::server::Acceptor;
use std::{convert::Infallible, sync::Arc};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite},
    time::timeout,
};
use tokio_rustls::{LazyConfigAcceptor, StartHandshake};

/// The first byte of a TLS handshake record (RFC 8446, 5.1).
const HANDSHAKE: u8 = 0x16;
/// Longest method of a request that is looked for.
const LONGEST_METHOD: usize = 32;
/// Requests at once in one HTTP/2 connection from inside.
const STREAMS: u32 = 64;
/// Bytes of request bodies that one HTTP/2 connection from inside may be ahead.
const WINDOW: u32 = 512 * 1024;
/// Bytes of an answer that wait for a client that doesn't read, for each stream.
const SEND_BUFFER: usize = 64 * 1024;

/// What a client's first bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Speaks {
    Tls,
    Http,
    Other,
    Nothing,
}

/// Carries a stream from inside to the one that was reached.
pub(crate) async fn carry<S>(connection: Arc<Connection>, mut inside: S, to: Destination, reached: Reached)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let Reached { mut outside, reads } = reached;
    if reads {
        // In a box, so that a stream of bytes doesn't take the place that TLS and HTTP would.
        return Box::pin(intercept(connection, inside, to, outside)).await;
    }
    if pump(&mut inside, &mut outside).await.is_err() {
        connection.reset_outside();
    }
}

async fn intercept<S>(connection: Arc<Connection>, mut inside: S, to: Destination, outside: Outside)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let Ok((speaks, first)) = timeout(HEAD_WITHIN, sniff(&mut inside)).await else { return };
    let inside = Prefixed::new(first, inside);
    match speaks {
        Speaks::Nothing => {}
        Speaks::Other => tell_no_http(&connection, &to),
        Speaks::Http => serve(connection, inside, Ok(Backend::over(to, outside, None)), false).await,
        Speaks::Tls => match end_tls(&connection, inside, &to, outside).await {
            Ok(()) => {}
            Err(refusal) => connection.egress.tell_refused(&to, &refusal),
        },
    }
}

fn tell_no_http(connection: &Connection, to: &Destination) {
    connection.egress.tell_refused(to, &Refusal::denied("this host's rules are about requests, and this is no HTTP"));
}

/// Reads until it is clear what comes.
async fn sniff<S: AsyncRead + Unpin>(inside: &mut S) -> (Speaks, Vec<u8>) {
    let (mut first, mut chunk) = (Vec::new(), [0; LONGEST_METHOD + 1]);
    loop {
        let Ok(count @ 1..) = inside.read(&mut chunk).await else { return (Speaks::Nothing, first) };
        first.extend_from_slice(&chunk[..count]);
        if first[0] == HANDSHAKE {
            return (Speaks::Tls, first);
        }
        let method = first.iter().take_while(|b| b.is_ascii_uppercase() || matches!(b, b'-' | b'_')).count();
        match first.get(method) {
            // The beginning of HTTP/2 without TLS looks like a request.
            Some(b' ') if method > 0 && !first.starts_with(b"PRI") => return (Speaks::Http, first),
            None if method <= LONGEST_METHOD => {}
            _ => return (Speaks::Other, first),
        }
    }
}

/// Ends TLS with a certificate of the session's CA, once the other side has said which HTTP it speaks.
async fn end_tls<S>(connection: &Arc<Connection>, inside: S, to: &Destination, outside: Outside) -> Result<(), Refusal>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let accepting = timeout(HEAD_WITHIN, LazyConfigAcceptor::new(Acceptor::default(), inside));
    let Ok(Ok(start)) = accepting.await else {
        return Err(Refusal::denied("this host's rules are about requests, and its TLS can't be read"));
    };
    let hello = Hello::read(&start);
    let Some(protocols) = hello.offers() else {
        return Err(Refusal::denied("this host's rules are about requests, and its TLS offers no HTTP"));
    };
    let credentials = connection.egress.credentials_soon().await?;
    let Some(authority) = &credentials.authority else {
        return Err(Refusal::denied("its rules read requests, and this session has no CA to end TLS with"));
    };

    let named = hello.name.as_deref().and_then(|name| Host::parse(name).ok());
    let opened = match &hello.name {
        Some(name) if named.as_ref() != Some(&to.host) => {
            let refusal = Refusal::denied(format!("its TLS is for {name}, and the connection is one to {}", to.host));
            connection.egress.tell_refused(to, &refusal);
            Err(refusal)
        }
        _ => open(connection, to, outside, protocols.clone()).await,
    };
    // A client that can't be served is told so, in the protocol that it likes best.
    let (backend, chosen) = match opened {
        Ok((backend, chosen)) => (Ok(backend), chosen),
        Err(refusal) => (Err(Box::new((refusal, to.to_string()))), protocols.into_iter().next()),
    };
    let chosen = chosen.filter(|_| !hello.protocols.is_empty());
    let leaf = authority.leaf(named.as_ref().unwrap_or(&to.host)).map_err(|error| error.to_string());
    let config = leaf.and_then(|leaf| tls::server(leaf, chosen.as_deref()).map_err(|error| error.to_string()));
    let config = config.map_err(|error| {
        tracing::error!(%error, "a host's certificate can't be made");
        Refusal::new(Kind::Broken, "no certificate can be made for it")
    })?;
    drop(credentials);
    // A client that doesn't trust the session's CA ends it here: that is its good right.
    if let Ok(Ok(inside)) = timeout(HEAD_WITHIN, start.into_stream(config)).await {
        serve(Arc::clone(connection), inside, backend, chosen.as_deref() == Some(H2)).await;
    }
    Ok(())
}

/// What of a TLS hello counts here.
struct Hello {
    name: Option<String>,
    protocols: Vec<Vec<u8>>,
}

impl Hello {
    fn read<S: AsyncRead + AsyncWrite + Unpin>(start: &StartHandshake<S>) -> Hello {
        let hello = start.client_hello();
        Hello {
            name: hello.server_name().map(str::to_owned),
            protocols: hello.alpn().into_iter().flatten().map(<[u8]>::to_vec).collect(),
        }
    }

    /// What is offered to the other side: those of the client's protocols that can be read; `None` where there are none.
    fn offers(&self) -> Option<Vec<Vec<u8>>> {
        if self.protocols.is_empty() {
            return Some(vec![HTTP1.to_vec()]);
        }
        let known: Vec<Vec<u8>> = self.protocols.iter().filter(|own| **own == H2 || **own == HTTP1).cloned().collect();
        (!known.is_empty()).then_some(known)
    }
}

/// Opens TLS to the other side. Says what it chose.
async fn open(
    connection: &Arc<Connection>,
    to: &Destination,
    outside: Outside,
    protocols: Vec<Vec<u8>>,
) -> Result<(Backend, Option<Vec<u8>>), Refusal> {
    let config = connection.egress.clients.offering(protocols).await;
    let config = config.map_err(|error| Refusal::new(Kind::Broken, format!("TLS can't be set up: {error}")))?;
    let backend = Backend::over(to.clone(), outside, Some(config));
    let chosen = backend.prepare(connection).await?;
    Ok((backend, chosen))
}

/// What answers requests: the other side, or always the same refusal.
type Answering = Result<Backend, Box<(Refusal, String)>>;

async fn serve<S>(connection: Arc<Connection>, inside: S, answering: Answering, h2: bool)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let helpers = Helpers(Arc::clone(&connection));
    let answering = Arc::new(answering);
    let (told, to) = (Arc::clone(&connection), answering.as_ref().as_ref().ok().map(|backend| backend.to.clone()));
    let service = service_fn(move |request| {
        let (connection, answering) = (Arc::clone(&connection), Arc::clone(&answering));
        async move {
            Ok::<_, Infallible>(match answering.as_ref() {
                Ok(backend) => forward(&connection, backend, request).await,
                Err(refused_because) => refused(&refused_because.0, &refused_because.1),
            })
        }
    });
    let inside = TokioIo::new(inside);
    let result = if h2 {
        let mut server = http2::Builder::new(helpers);
        server
            .timer(TokioTimer::new())
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOW)
            .max_concurrent_streams(STREAMS)
            .max_send_buf_size(SEND_BUFFER)
            .max_header_list_size(u32::try_from(LONGEST_HEAD).unwrap_or(u32::MAX))
            .auto_date_header(false);
        server.serve_connection(inside, service).await
    } else {
        http1_server().serve_connection(inside, service).with_upgrades().await
    };
    if let (Err(error), Some(to)) = (result, to)
        && error.is_parse()
    {
        tell_no_http(&told, &to);
    }
}
