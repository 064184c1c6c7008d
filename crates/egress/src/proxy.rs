//! The front: what a stream from inside asks for. SOCKS5 and raw streams go their own way; HTTP is served here.

use crate::{
    Ask, HEAD_WITHIN,
    backend::Backend,
    body::Passing,
    connect::{Use, reach},
    connection::Connection,
    host::Destination,
    intercept::carry,
    prefixed::Prefixed,
    refusal::{Kind, Refusal},
    requests::{forward, refused},
    socks,
};
use http::{Method, Request, Response, uri::Scheme};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite},
    time::timeout,
};

/// Longest head of a request.
pub(crate) const LONGEST_HEAD: usize = 64 * 1024;

/// The first byte of SOCKS5.
const SOCKS5: u8 = 5;

/// Serves one stream from inside.
pub(crate) async fn serve<S>(connection: Arc<Connection>, mut inside: S, ask: Ask)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    match ask {
        Ask::To { host, port } => {
            let Ok(to) = Destination::new(&host, port) else { return };
            if let Ok(reached) = reach(&connection, &to, Use::Stream).await {
                carry(connection, inside, to, reached).await;
            }
        }
        Ask::Proxy => {
            let mut first = [0];
            let Ok(Ok(1)) = timeout(HEAD_WITHIN, inside.read(&mut first)).await else { return };
            let inside = Prefixed::new(first.to_vec(), inside);
            if first[0] == SOCKS5 {
                Box::pin(socks::serve(connection, inside)).await;
            } else {
                Box::pin(serve_http(connection, inside)).await;
            }
        }
    }
}

/// How long a client may take for a request's head; the same runs while it keeps a connection for its next request, and
/// clients that keep some expect more than seconds.
const IDLE_FOR: Duration = Duration::from_secs(300);

/// An HTTP/1 server for streams from inside, for this front and where TLS ends.
pub(crate) fn http1_server() -> http1::Builder {
    let mut server = http1::Builder::new();
    server
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE_FOR)
        .max_buf_size(LONGEST_HEAD)
        .preserve_header_case(true)
        .auto_date_header(false);
    server
}

async fn serve_http<S>(connection: Arc<Connection>, inside: S)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    // Requests come one after the other, and mostly for the same host.
    let last: Arc<Mutex<Option<Arc<Backend>>>> = Arc::default();
    let service = service_fn(move |request| {
        let (connection, last) = (Arc::clone(&connection), Arc::clone(&last));
        async move { Ok::<_, Infallible>(answer(connection, &last, request).await) }
    });
    // What ends it is the client's business, and it has been told.
    let _ = http1_server().serve_connection(TokioIo::new(inside), service).with_upgrades().await;
}

async fn answer(
    connection: Arc<Connection>,
    last: &Mutex<Option<Arc<Backend>>>,
    request: Request<Incoming>,
) -> Response<Passing> {
    let asked = request.uri().authority().map(ToString::to_string).unwrap_or_default();
    let malformed = |why: String| refused(&Refusal::new(Kind::Malformed, why), if asked.is_empty() { "?" } else { &asked });
    if request.method() == Method::CONNECT {
        // Aims the connection at something else, whether or not it gets there.
        *crate::locked(last) = None;
        return match Destination::parse(&asked, None) {
            Ok(to) => tunnel(connection, to, request).await,
            Err(why) => malformed(why),
        };
    }
    if request.uri().scheme() != Some(&Scheme::HTTP) {
        return malformed("this is a proxy: it takes CONNECT, and requests for http:// with the whole address".into());
    }
    let to = match Destination::parse(&asked, Some(80)) {
        Ok(to) => to,
        Err(why) => return malformed(why),
    };
    let backend = {
        let mut last = crate::locked(last);
        match &*last {
            Some(backend) if backend.to == to => Arc::clone(backend),
            _ => {
                connection.aim(&to, true);
                Arc::clone(last.insert(Arc::new(Backend::plain(to))))
            }
        }
    };
    forward(&connection, &backend, with_own_host(request)).await
}

/// The Host of a request with a whole address is the one of that address (RFC 9112, 3.2.2).
fn with_own_host(mut request: Request<Incoming>) -> Request<Incoming> {
    request.headers_mut().remove(http::header::HOST);
    request
}

/// Connects, then says that it did, then carries what comes.
async fn tunnel(connection: Arc<Connection>, to: Destination, request: Request<Incoming>) -> Response<Passing> {
    match reach(&connection, &to, Use::Stream).await {
        Ok(reached) => {
            let carrying = Arc::clone(&connection);
            connection.carry_on(async move {
                if let Ok(inside) = hyper::upgrade::on(request).await {
                    carry(carrying, TokioIo::new(inside), to, reached).await;
                }
            });
            Response::new(Passing::text(""))
        }
        Err(refusal) => refused(&refusal, &to.to_string()),
    }
}
