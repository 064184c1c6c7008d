//! The way into a session: its ports listed, passed on to over HTTP and as plain bytes, and links to previews.

use crate::{
    AppState,
    auth::Principal,
    error::ApiError,
    extract::{self, Json, NoQuery, Query, SessionPath, path_text},
    preview,
    proxy::{self, Passage},
    stream,
};
use api_types::{LinkRequest, Page, Port, PreviewLink, Problem};
use axum::{
    extract::{
        FromRequestParts, Request, State as Shared,
        ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, rejection::WebSocketUpgradeRejection},
    },
    response::Response,
};
use bytes::BytesMut;
use engine::{Connection, Scope};
use futures_util::{SinkExt, StreamExt};
use http::{StatusCode, header, request::Parts};
use model::SessionId;
use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_util::sync::CancellationToken;

/// How long a link is good for where nobody says.
const LINK_SECONDS: u64 = 3600;
/// Bytes of one message to the client.
const PIECE: usize = 64 * 1024;
/// Largest message of a client.
const MAX_MESSAGE: usize = 1 << 20;
/// What ends one direction while the other goes on.
const END: &str = "end";

/// A port of the path's session.
#[derive(Clone, Copy)]
pub(crate) struct PortPath(pub SessionId, pub u16);

impl<S: Send + Sync> FromRequestParts<S> for PortPath {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let SessionPath(id) = SessionPath::from_request_parts(parts, state).await?;
        let text = path_text(parts, state, "port").await?;
        let port = text.parse::<u16>().ok().filter(|port| *port > 0);
        let shown: String = text.chars().take(20).collect();
        let port = port.ok_or_else(|| ApiError::bad_field("port", format!("'{shown}' is no port: a number from 1 to 65535")))?;
        Ok(PortPath(id, port))
    }
}

/// List the ports that programs inside listen on. Never wakes: a session that sleeps has none.
#[utoipa::path(get, path = "/v1/sessions/{id}/ports", tag = "network", params(("id" = String, Path,)),
    responses((status = 200, body = Page<Port>), (status = "default", body = Problem)))]
pub(crate) async fn list(
    Shared(app): Shared<AppState>,
    SessionPath(id): SessionPath,
    _: Query<NoQuery>,
) -> Result<Response, ApiError> {
    let port = |port: wire::guest::ListeningPort| Port {
        port: port.port,
        address: Some(port.address),
        pid: port.pid,
        program: port.program,
    };
    Ok(extract::ok(&Page::whole(app.engine().ports(id).await?.into_iter().map(port).collect::<Vec<_>>())))
}

/// Pass a request on to a port of the session. It is woken for it.
///
/// Every method, bodies of any length in both directions, server-sent events and WebSockets. `Authorization` is ours and
/// isn't passed on, nor are cookies; `X-Forwarded-Prefix` says what stands before the path. The answer is never one of the
/// API's origin: it has `Content-Security-Policy: sandbox`, `nosniff` and `attachment`, and its cookies are dropped. For
/// browsers there are preview hosts. 502 `port_closed`: nothing listens.
#[utoipa::path(method(get, post, put, patch, delete), path = "/v1/sessions/{id}/ports/{port}/{path}", tag = "network",
    params(("id" = String, Path,), ("port" = u16, Path,), ("path" = String, Path,)),
    responses((status = 200, description = "Whatever the program inside answers"), (status = 502, body = Problem),
        (status = "default", body = Problem)))]
pub(crate) async fn pass(
    Shared(app): Shared<AppState>,
    who: Principal,
    PortPath(session, port): PortPath,
    request: Request,
) -> Result<Response, ApiError> {
    // It wakes, and what it does inside nobody knows.
    who.require(Scope::Write)?;
    // A token in the query is ours where nothing else was shown.
    let shown = request.headers().contains_key(header::AUTHORIZATION);
    let (prefix, target) = split(request.uri(), shown);
    proxy::pass(&app, &who, session, port, request, &target, Passage::Path { prefix }).await
}

/// What stands before the path inside, and that path with its query, both as they were written.
fn split(uri: &http::Uri, keeps_query_token: bool) -> (String, String) {
    let path = uri.path();
    // Behind "/v1/sessions/ID/ports/PORT".
    let end = path.match_indices('/').nth(5).map_or(path.len(), |(at, _)| at);
    let (prefix, inside) = path.split_at(end);
    let mut target = if inside.is_empty() { "/".to_owned() } else { inside.to_owned() };
    if let Some(query) = uri.query() {
        let is_kept =
            |pair: &&str| if keeps_query_token { !proxy::is_our_token(pair) } else { !pair.starts_with("access_token=") };
        let kept: Vec<&str> = query.split('&').filter(is_kept).collect();
        if !kept.is_empty() {
            target.push('?');
            target.push_str(&kept.join("&"));
        }
    }
    (prefix.to_owned(), target)
}

/// Make a link to a port's preview page: whoever has it gets in, until its time is over.
///
/// Previews are at `http://PORT-SESSION.DOMAIN` (`--preview-domain`), an origin of their own. A port in the policy's
/// `public_ports` needs no link; a token of ours opens every one.
#[utoipa::path(post, path = "/v1/sessions/{id}/links/{port}", tag = "network", request_body = LinkRequest,
    params(("id" = String, Path,), ("port" = u16, Path,)),
    responses((status = 201, body = PreviewLink), (status = "default", body = Problem)))]
pub(crate) async fn link(
    Shared(app): Shared<AppState>,
    who: Principal,
    PortPath(session, port): PortPath,
    _: Query<NoQuery>,
    asked: preview::AskedFrom,
    Json(body): Json<LinkRequest>,
) -> Result<Response, ApiError> {
    who.require(Scope::Write)?;
    let (text, expires_at) = app.engine().sign_link(session, port, body.seconds.unwrap_or(LINK_SECONDS)).await?;
    let host = preview::host(session, port, &app.previews().domain);
    let url = format!("{}://{host}{}/?{}={text}", asked.scheme, asked.port_suffix(app.previews()), preview::LINK);
    Ok(extract::json(StatusCode::CREATED, &PreviewLink { url, expires_at }))
}

/// How to connect.
#[derive(Debug, Default, serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct TcpQuery {
    /// Start a stopped session for it.
    pub start: Option<bool>,
}

/// Connect to a port of the session over a WebSocket. It is woken for it.
///
/// Binary messages are bytes, cut anywhere. The text message `end` says that nothing more comes from its side; the other
/// direction goes on. Once both have said it the link ends with 1000; 1011: the connection was cut off.
#[utoipa::path(get, path = "/v1/sessions/{id}/tcp/{port}", tag = "network",
    params(("id" = String, Path,), ("port" = u16, Path,), TcpQuery),
    responses((status = 101), (status = 502, body = Problem), (status = "default", body = Problem)))]
pub(crate) async fn tcp(
    Shared(app): Shared<AppState>,
    who: Principal,
    PortPath(session, port): PortPath,
    Query(query): Query<TcpQuery>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ApiError> {
    let upgrade = upgrade.map_err(|error| ApiError::bad_request(format!("this address takes WebSockets only: {error}")))?;
    who.require(Scope::Write)?;
    let (engine, caller, start) = (app.engine().clone(), who.clone(), query.start.unwrap_or(false));
    // A wake that was begun goes on, whether or not the client stays.
    let connection = stream::begun(async move { Ok(engine.dial(&caller, session, port, start).await?) }).await?;
    let stop = app.stop().clone();
    let upgrade = upgrade.max_message_size(MAX_MESSAGE).max_frame_size(MAX_MESSAGE).write_buffer_size(0);
    Ok(upgrade.on_upgrade(move |socket| carry(socket, connection, stop)))
}

/// How a link ends: both directions had ended, or it was cut off.
const NORMAL: u16 = 1000;
const CUT_OFF: u16 = 1011;

async fn carry(socket: WebSocket, connection: Connection, stop: CancellationToken) {
    let (mut sink, mut source) = socket.split();
    let (mut reader, mut writer) = tokio::io::split(connection);
    let code = {
        // Whether each side has said all that it has to say.
        let (said, whole) = (AtomicBool::new(false), AtomicBool::new(false));
        // Client to program, until nothing more can come.
        let inward = async {
            while let Some(Ok(message)) = source.next().await {
                let written = match message {
                    Message::Ping(_) | Message::Pong(_) => Ok(()),
                    Message::Close(_) => return,
                    // What else it says is not the program's; that it goes away still counts.
                    _ if said.load(Ordering::Relaxed) => Ok(()),
                    Message::Binary(bytes) => writer.write_all(&bytes).await.and(writer.flush().await),
                    Message::Text(text) if text.as_str() == END => {
                        said.store(true, Ordering::Relaxed);
                        writer.shutdown().await
                    }
                    Message::Text(_) => return,
                };
                if written.is_err() || said.load(Ordering::Relaxed) && whole.load(Ordering::Relaxed) {
                    return;
                }
            }
        };
        // Program to client. True: to its end.
        let outward = async {
            let mut buffer = BytesMut::with_capacity(PIECE);
            loop {
                buffer.reserve(PIECE);
                let message = match reader.read_buf(&mut buffer).await {
                    Ok(0) => Message::Text(END.into()),
                    Ok(_) => Message::Binary(buffer.split().freeze()),
                    Err(_) => return false,
                };
                let last = matches!(message, Message::Text(_));
                if sink.send(message).await.is_err() {
                    return false;
                }
                if last {
                    return true;
                }
            }
        };
        tokio::pin!(inward, outward);
        loop {
            let is_whole = whole.load(Ordering::Relaxed);
            tokio::select! {
                ended = &mut outward, if !is_whole => match ended {
                    true if said.load(Ordering::Relaxed) => break NORMAL,
                    // The program may still read what the client has to say.
                    true => whole.store(true, Ordering::Relaxed),
                    false => break CUT_OFF,
                },
                () = &mut inward => break if is_whole { NORMAL } else { CUT_OFF },
                () = stop.cancelled() => break CUT_OFF,
            }
        }
    };
    let frame = CloseFrame { code, reason: "".into() };
    // A client that doesn't read any more must not keep the link.
    let _ = tokio::time::timeout(Duration::from_secs(2), sink.send(Message::Close(Some(frame)))).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_inside_is_passed_on_as_it_was_written() {
        let id = "01890000-0000-7000-8000-000000000001";
        for (uri, inside) in [
            ("", "/"),
            ("/", "/"),
            ("/a%2Fb/c%20d?x=%26&y", "/a%2Fb/c%20d?x=%26&y"),
            ("//x", "//x"),
            ("/x?access_token=t&a=b", "/x?a=b"),
            ("/x?access_token=t", "/x"),
        ] {
            let uri: http::Uri = format!("/v1/sessions/{id}/ports/8080{uri}").parse().unwrap();
            let (prefix, target) = split(&uri, false);
            assert_eq!((prefix, target.as_str()), (format!("/v1/sessions/{id}/ports/8080"), inside));
        }
        let uri: http::Uri = "/v1/sessions/x/ports/1/y?access_token=of-the-program".parse().unwrap();
        assert_eq!(split(&uri, true).1, "/y?access_token=of-the-program");
    }
}
