//! Passing a request on to a program in a session, and its answer back: each over a connection of its own.
//!
//! Connections inside are never kept for a next request: they would have to survive generations.

use crate::{AppState, error::ApiError, listen::Peer, stream};
use api_types::ProblemCode;
use axum::{
    body::Body,
    extract::{ConnectInfo, Request},
    response::{IntoResponse, Response},
};
use engine::Caller;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use hyper_util::rt::TokioIo;
use model::SessionId;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
pub(crate) const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const FORWARDED_PREFIX: HeaderName = HeaderName::from_static("x-forwarded-prefix");

/// Headers that belong to one connection and are never passed on (RFC 9110, 7.6.1).
const HOP_BY_HOP: &[&str] = &[
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "expect",
    "http2-settings",
];

/// Cookies with such names are ours.
const OWN_COOKIES: &[u8] = b"dormouse_";

/// Headers that would act on the API's own origin, or have a browser act on it.
const OF_AN_ORIGIN: &[&str] = &[
    "set-cookie",
    "refresh",
    "clear-site-data",
    "alt-svc",
    "strict-transport-security",
    "public-key-pins",
    "nel",
    "report-to",
    "reporting-endpoints",
    "service-worker-allowed",
    "www-authenticate",
    "authentication-info",
    "content-location",
    "link",
    "sourcemap",
    "access-control-allow-origin",
    "access-control-allow-credentials",
    "access-control-allow-headers",
    "access-control-allow-methods",
    "access-control-expose-headers",
    "access-control-max-age",
];

/// Whether a pair of a query is a token of ours, which no program inside is to see.
pub(crate) fn is_our_token(pair: &str) -> bool {
    pair.strip_prefix("access_token=").is_some_and(|value| value.starts_with("dm_"))
}

/// By which way a request comes.
pub(crate) enum Passage {
    /// An address of the API, of which this stands before the path inside.
    Path { prefix: String },
    /// A host of its own. `strips_token`: the request's `Authorization` was for us.
    Host { strips_token: bool },
}

/// Passes a request on to a port, which the session is woken for. `target`: the path and query inside.
pub(crate) async fn pass(
    app: &AppState,
    caller: &Caller,
    session: SessionId,
    port: u16,
    request: Request,
    target: &str,
    passage: Passage,
) -> Result<Response, ApiError> {
    let (engine, caller) = (app.engine().clone(), caller.clone());
    // A wake that was begun goes on, whether or not the client stays.
    let connection = stream::begun(async move { Ok(engine.dial(&caller, session, port, false).await?) }).await?;
    exchange(connection, request, target, &passage, port, app.stop().clone()).await
}

/// Sends a request over a connection of its own, and gives the answer back as it comes.
async fn exchange<C>(
    connection: C,
    mut request: Request,
    target: &str,
    passage: &Passage,
    port: u16,
    stop: CancellationToken,
) -> Result<Response, ApiError>
where
    C: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let upgrade = wanted_upgrade(request.headers());
    let outer = upgrade.is_some().then(|| hyper::upgrade::on(&mut request));
    let (parts, body) = request.into_parts();
    let from = Hop {
        host: parts.uri.authority().map(|authority| authority.to_string()),
        peer: parts.extensions.get::<ConnectInfo<Peer>>().map(|info| info.0),
    };
    let outer_host = from.host.clone().or_else(|| Some(parts.headers.get(header::HOST)?.to_str().ok()?.to_owned()));
    let headers = inward(parts.headers, passage, &from, port, upgrade.as_ref())?;
    let mut inside = http::Request::builder().method(parts.method).uri(target).body(body);
    match &mut inside {
        Ok(inside) => *inside.headers_mut() = headers,
        Err(error) => return Err(ApiError::bad_request(format!("this can't be passed on: {error}"))),
    }
    let inside = inside.map_err(|error| ApiError::bad_request(error.to_string()))?;
    let no_answer = |error: hyper::Error| {
        let detail = format!("what listens on port {port} gave no answer in HTTP: {error}");
        ApiError::new(ProblemCode::BadGateway, detail)
    };
    let (mut sender, driving) =
        hyper::client::conn::http1::handshake::<_, Body>(TokioIo::new(connection)).await.map_err(no_answer)?;
    // It ends once the answer's body and the sender are dropped, or with the upgraded connection.
    tokio::spawn(driving.with_upgrades());
    let mut answer = sender.send_request(inside).await.map_err(no_answer)?;
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
        let Some(outer) = outer else {
            return Err(ApiError::new(ProblemCode::BadGateway, "the program inside upgrades what nobody asked it to"));
        };
        join(outer, hyper::upgrade::on(&mut answer), stop);
    }
    let upgraded = answer.status() == StatusCode::SWITCHING_PROTOCOLS;
    let mut answer = answer.map(Body::new).into_response();
    outward(answer.headers_mut(), passage, outer_host.as_deref(), port, upgraded);
    Ok(answer)
}

/// The protocol that the client wants to change to.
fn wanted_upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    let named = lists(headers, &header::CONNECTION).any(|token| token.eq_ignore_ascii_case("upgrade"));
    // To speak HTTP/2 on is our own connection's matter.
    headers.get(header::UPGRADE).filter(|to| named && *to != "h2c").cloned()
}

/// The words of a header that is a list.
fn lists<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    let values = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim).filter(|token| !token.is_empty())
}

/// Takes away what belongs to the connection that a message came by.
fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = lists(headers, &header::CONNECTION).filter_map(|token| token.parse().ok()).collect();
    for name in named {
        headers.remove(name);
    }
    for name in HOP_BY_HOP {
        headers.remove(*name);
    }
}

/// Whom a request came from.
struct Hop {
    /// As HTTP/2 names it.
    host: Option<String>,
    peer: Option<Peer>,
}

/// The headers of the request as the program inside gets them.
fn inward(
    mut headers: HeaderMap,
    passage: &Passage,
    from: &Hop,
    port: u16,
    upgrade: Option<&HeaderValue>,
) -> Result<HeaderMap, ApiError> {
    let value = |text: &str| HeaderValue::from_str(text).map_err(|_| ApiError::bad_request("a header can't be passed on"));
    // Before what `Connection` names is taken away: a client could name this.
    let host = match &from.host {
        Some(host) => Some(value(host)?),
        None => headers.get(header::HOST).cloned(),
    };
    strip_hop_by_hop(&mut headers);
    match passage {
        Passage::Path { prefix } => {
            headers.remove(header::AUTHORIZATION);
            headers.remove(header::COOKIE);
            headers.insert(header::HOST, value(&format!("localhost:{port}"))?);
            headers.insert(FORWARDED_PREFIX, value(prefix)?);
        }
        Passage::Host { strips_token } => {
            if *strips_token {
                headers.remove(header::AUTHORIZATION);
            }
            strip_own_cookies(&mut headers);
            if let Some(host) = &host {
                headers.insert(header::HOST, host.clone());
            }
        }
    }
    if let Some(host) = host {
        headers.insert(FORWARDED_HOST, host);
    }
    if let Some(Peer::Tcp(address)) = from.peer {
        let before = lists(&headers, &FORWARDED_FOR).collect::<Vec<_>>().join(", ");
        let all = if before.is_empty() { address.ip().to_string() } else { format!("{before}, {}", address.ip()) };
        headers.insert(FORWARDED_FOR, value(&all)?);
    }
    headers.entry(FORWARDED_PROTO).or_insert(HeaderValue::from_static("http"));
    if let Some(upgrade) = upgrade {
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, upgrade.clone());
    }
    Ok(headers)
}

/// Takes our own cookies away; the page's stay as they are.
fn strip_own_cookies(headers: &mut HeaderMap) {
    // As bytes: a page may set what is no ASCII.
    let pairs = headers.get_all(header::COOKIE).iter().flat_map(|value| value.as_bytes().split(|byte| *byte == b';'));
    let kept: Vec<&[u8]> = pairs.map(<[u8]>::trim_ascii).filter(|pair| !pair.is_empty() && !is_own_cookie(pair)).collect();
    let kept = kept.join(&b"; "[..]);
    headers.remove(header::COOKIE);
    if let Ok(value) = HeaderValue::from_bytes(&kept)
        && !value.is_empty()
    {
        headers.insert(header::COOKIE, value);
    }
}

fn is_own_cookie(pair: &[u8]) -> bool {
    pair.get(..OWN_COOKIES.len()).is_some_and(|name| name.eq_ignore_ascii_case(OWN_COOKIES))
}

/// Where an answer on the path leads, seen from outside; `None`: to where a client would go on with its token although it
/// isn't this port any more.
fn led(location: &str, prefix: &str, outer_host: Option<&str>, port: u16) -> Option<String> {
    let lower = location.to_ascii_lowercase();
    if location.contains('\\') || lower.contains("%2e") || lower.bytes().any(|byte| byte <= b' ') {
        return None;
    }
    let inside = [format!("http://localhost:{port}"), format!("http://127.0.0.1:{port}")];
    let own = inside.iter().find_map(|base| location.strip_prefix(base.as_str()));
    let path = match own.filter(|rest| rest.is_empty() || rest.starts_with(['/', '?', '#'])) {
        Some("") => "/",
        Some(rest) => rest,
        None => location,
    };
    let is_elsewhere = path.starts_with("//") || path.split(['/', '?', '#']).next().is_some_and(|first| first.contains(':'));
    if is_elsewhere {
        let name = |host: &str| host.rsplit_once(':').map_or(host, |(name, _)| name).trim_end_matches('.').to_ascii_lowercase();
        let uri: http::Uri = if path.starts_with("//") { format!("http:{path}").parse().ok()? } else { path.parse().ok()? };
        // To another host no client takes its token along.
        let goes_away = name(uri.authority()?.host()) != name(outer_host?);
        return goes_away.then(|| path.to_owned());
    }
    let before_query = path.split(['?', '#']).next().unwrap_or_default();
    if before_query.split('/').any(|part| part == "..") {
        return None;
    }
    Some(if path.starts_with('/') { format!("{prefix}{path}") } else { path.to_owned() })
}

/// The headers of the answer as the client gets them.
fn outward(headers: &mut HeaderMap, passage: &Passage, outer_host: Option<&str>, port: u16, upgraded: bool) {
    if headers.contains_key(header::TRANSFER_ENCODING) {
        // Which decides how long the body is (RFC 9112, 6.3).
        headers.remove(header::CONTENT_LENGTH);
    }
    let upgrade = headers.get(header::UPGRADE).filter(|_| upgraded).cloned();
    strip_hop_by_hop(headers);
    if let Some(upgrade) = upgrade {
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, upgrade);
    }
    match passage {
        // It stands at the API's own origin: nothing of it may be shown, run, or remembered there.
        Passage::Path { prefix } => {
            for name in OF_AN_ORIGIN {
                headers.remove(*name);
            }
            if let Some(location) = headers.remove(header::LOCATION) {
                let leads = location.to_str().ok().and_then(|to| led(to, prefix, outer_host, port));
                if let Some(leads) = leads.and_then(|to| HeaderValue::from_str(&to).ok()) {
                    headers.insert(header::LOCATION, leads);
                }
            }
            headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static("sandbox"));
            headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
            headers.insert(header::CONTENT_DISPOSITION, HeaderValue::from_static("attachment"));
        }
        Passage::Host { .. } => {
            let cookies: Vec<HeaderValue> = headers.get_all(header::SET_COOKIE).iter().filter_map(for_own_host).collect();
            headers.remove(header::SET_COOKIE);
            for cookie in cookies {
                headers.append(header::SET_COOKIE, cookie);
            }
        }
    }
}

/// A cookie of a page, for its own host: one for the domain above would reach other previews and the API. Ours can't be
/// set by a page.
fn for_own_host(cookie: &HeaderValue) -> Option<HeaderValue> {
    let bytes = cookie.as_bytes();
    if is_own_cookie(bytes.trim_ascii_start()) {
        return None;
    }
    let name = |part: &[u8]| part.split(|byte| *byte == b'=').next().unwrap_or_default().trim_ascii().to_ascii_lowercase();
    let mut parts = bytes.split(|byte| *byte == b';');
    let first = parts.next().into_iter();
    let kept: Vec<&[u8]> = first.chain(parts.filter(|part| name(part) != b"domain")).collect();
    HeaderValue::from_bytes(&kept.join(&b";"[..])).ok()
}

/// Lets both sides of an upgraded connection talk until both have ended, or the server ends.
fn join(outer: hyper::upgrade::OnUpgrade, inner: hyper::upgrade::OnUpgrade, stop: CancellationToken) {
    tokio::spawn(async move {
        let joined = async {
            let (outer, inner) = tokio::try_join!(outer, inner).map_err(std::io::Error::other)?;
            tokio::io::copy_bidirectional(&mut TokioIo::new(outer), &mut TokioIo::new(inner)).await
        };
        tokio::select! {
            done = joined => if let Err(error) = done {
                tracing::debug!(%error, "an upgraded connection to a session was cut off");
            },
            () = stop.cancelled() => {}
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(list: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in list {
            headers.append(*name, value.parse().unwrap());
        }
        headers
    }

    fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
        headers.get(name).map(|value| value.to_str().unwrap())
    }

    fn hop(host: Option<&str>) -> Hop {
        Hop { host: host.map(str::to_owned), peer: Some(Peer::Tcp("10.1.2.3:99".parse().unwrap())) }
    }

    use http_body_util::BodyExt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

    /// Passes a request on to a program that is the other end of what this returns.
    fn passed(request: Request) -> (DuplexStream, impl Future<Output = Result<Response, ApiError>>) {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        let passage = Passage::Host { strips_token: false };
        let stop = CancellationToken::new();
        (theirs, async move { exchange(ours, request, "/x?y=1", &passage, 80, stop).await })
    }

    async fn until(stream: &mut DuplexStream, end: &str) -> String {
        let mut seen = Vec::new();
        while !seen.ends_with(end.as_bytes()) {
            seen.push(stream.read_u8().await.unwrap());
        }
        String::from_utf8(seen).unwrap()
    }

    #[tokio::test]
    async fn an_answer_is_passed_on_piece_by_piece() {
        let request = Request::builder().method("POST").uri("/").header("content-length", "4").body(Body::from("body")).unwrap();
        let (mut program, answer) = passed(request);
        let answering = tokio::spawn(answer);
        let seen = until(&mut program, "\r\n\r\nbody").await;
        assert!(seen.starts_with("POST /x?y=1 HTTP/1.1\r\n") && seen.contains("content-length: 4"), "{seen}");
        program.write_all(b"HTTP/1.1 201 Created\r\ncontent-type: text/event-stream\r\n\r\ndata: 1\n\n").await.unwrap();
        let mut answer = answering.await.unwrap().unwrap();
        assert_eq!((answer.status(), text(answer.headers(), "content-type")), (StatusCode::CREATED, Some("text/event-stream")));
        // It is here before there is more.
        let first = answer.body_mut().frame().await.unwrap().unwrap().into_data().unwrap();
        assert_eq!(first, "data: 1\n\n");
        program.write_all(b"data: 2\n\n").await.unwrap();
        drop(program);
        assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "data: 2\n\n");
    }

    #[tokio::test]
    async fn a_program_that_speaks_no_http_is_named() {
        let (mut program, answer) = passed(Request::new(Body::empty()));
        let answering = tokio::spawn(answer);
        until(&mut program, "\r\n\r\n").await;
        program.write_all(b"SSH-2.0-OpenSSH\r\n").await.unwrap();
        let error = answering.await.unwrap().unwrap_err().0;
        assert_eq!((error.status, error.code), (502, ProblemCode::BadGateway));
        assert!(error.detail.contains("port 80"), "{}", error.detail);
    }

    #[tokio::test]
    async fn an_upgraded_connection_belongs_to_both_sides() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (hand_over, mut programs) = tokio::sync::mpsc::channel(1);
        let handler = move |request: Request| async move {
            let (program, answer) = passed(request);
            hand_over.send(program).await.unwrap();
            answer.await
        };
        let router = axum::Router::new().fallback(handler);
        tokio::spawn(async move { axum::serve(listener, router).await });
        let mut client = tokio::net::TcpStream::connect(address).await.unwrap();
        let hello = "GET / HTTP/1.1\r\nhost: h\r\nconnection: Upgrade\r\nupgrade: echo\r\n\r\n";
        client.write_all(hello.as_bytes()).await.unwrap();
        let mut program = programs.recv().await.unwrap();
        let seen = until(&mut program, "\r\n\r\n").await;
        assert!(seen.contains("connection: upgrade\r\n") && seen.contains("upgrade: echo\r\n"), "{seen}");
        let switch = "HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: echo\r\n\r\n~";
        program.write_all(switch.as_bytes()).await.unwrap();
        let mut seen = String::new();
        while !seen.ends_with('~') {
            seen.push(char::from(client.read_u8().await.unwrap()));
        }
        assert!(seen.starts_with("HTTP/1.1 101 ") && seen.contains("upgrade: echo"), "{seen}");
        client.write_all(b"ping").await.unwrap();
        assert_eq!(until(&mut program, "ping").await, "ping");
        client.shutdown().await.unwrap();
        assert_eq!(program.read(&mut [0; 1]).await.unwrap(), 0, "its end is passed on");
        program.write_all(b"bye").await.unwrap();
        drop(program);
        let mut rest = String::new();
        client.read_to_string(&mut rest).await.unwrap();
        assert_eq!(rest, "bye");
    }

    #[test]
    fn what_is_ours_stays_here() {
        let headers = map(&[
            ("host", "127.0.0.1:7420"),
            ("authorization", "Bearer dm_x"),
            ("cookie", "a=1"),
            ("connection", "keep-alive, x-secret"),
            ("x-secret", "1"),
            ("x-forwarded-for", "1.1.1.1"),
            ("accept", "text/html"),
        ]);
        let passage = Passage::Path { prefix: "/v1/sessions/x/ports/80".to_owned() };
        let inside = inward(headers, &passage, &hop(None), 80, None).unwrap();
        for gone in ["authorization", "cookie", "connection", "x-secret"] {
            assert_eq!(text(&inside, gone), None, "{gone}");
        }
        assert_eq!(text(&inside, "host"), Some("localhost:80"));
        assert_eq!(text(&inside, "x-forwarded-host"), Some("127.0.0.1:7420"));
        assert_eq!(text(&inside, "x-forwarded-for"), Some("1.1.1.1, 10.1.2.3"));
        assert_eq!(text(&inside, "x-forwarded-proto"), Some("http"));
        assert_eq!(text(&inside, "accept"), Some("text/html"));
    }

    #[test]
    fn a_preview_keeps_its_page_as_it_is() {
        let headers = map(&[
            ("authorization", "Basic of-the-page"),
            ("cookie", "a=1; dormouse_link=x"),
            ("cookie", "b=2; Dormouse_session=y"),
            ("upgrade", "websocket"),
            ("connection", "Upgrade"),
        ]);
        let upgrade = wanted_upgrade(&headers);
        assert!(upgrade.is_some() && wanted_upgrade(&map(&[("upgrade", "websocket")])).is_none());
        let h2c = map(&[("upgrade", "h2c"), ("connection", "Upgrade, HTTP2-Settings")]);
        assert!(wanted_upgrade(&h2c).is_none());
        let passage = Passage::Host { strips_token: false };
        let inside = inward(headers, &passage, &hop(Some("80-x.localhost:7420")), 80, upgrade.as_ref()).unwrap();
        assert_eq!(text(&inside, "host"), Some("80-x.localhost:7420"));
        assert_eq!(text(&inside, "cookie"), Some("a=1; b=2"));
        assert_eq!(text(&inside, "authorization"), Some("Basic of-the-page"));
        assert_eq!((text(&inside, "connection"), text(&inside, "upgrade")), (Some("upgrade"), Some("websocket")));
        let with_token = map(&[("authorization", "Bearer dm_x"), ("cookie", "dormouse_link=x")]);
        let inside = inward(with_token, &Passage::Host { strips_token: true }, &hop(None), 80, None).unwrap();
        assert_eq!((text(&inside, "authorization"), text(&inside, "cookie")), (None, None));
    }

    #[test]
    fn an_answer_at_the_apis_origin_is_harmless() {
        let mut headers = map(&[
            ("set-cookie", "a=1"),
            ("content-security-policy", "default-src *"),
            ("content-disposition", "inline"),
            ("transfer-encoding", "chunked"),
            ("content-type", "text/html"),
        ]);
        outward(&mut headers, &Passage::Path { prefix: String::new() }, None, 80, false);
        assert_eq!(text(&headers, "set-cookie"), None);
        assert_eq!(text(&headers, "transfer-encoding"), None);
        assert_eq!(text(&headers, "content-security-policy"), Some("sandbox"));
        assert_eq!(text(&headers, "content-disposition"), Some("attachment"));
        assert_eq!(text(&headers, "x-content-type-options"), Some("nosniff"));
        assert_eq!(text(&headers, "content-type"), Some("text/html"));
    }

    #[test]
    fn a_redirect_never_leads_a_client_with_its_token_to_the_api() {
        let prefix = "/v1/sessions/x/ports/80";
        let led = |to: &str| led(to, prefix, Some("127.0.0.1:7420"), 80);
        for (to, leads) in [
            ("/a?b", Some("/v1/sessions/x/ports/80/a?b")),
            ("/v1/sessions/y/stop", Some("/v1/sessions/x/ports/80/v1/sessions/y/stop")),
            ("http://localhost:80/a", Some("/v1/sessions/x/ports/80/a")),
            ("http://localhost:80", Some("/v1/sessions/x/ports/80/")),
            ("a/b", Some("a/b")),
            ("?page=../2", Some("?page=../2")),
            ("https://example.com/..", Some("https://example.com/..")),
            ("http://127.0.0.1:7420/v1/sessions", None),
            ("//127.0.0.1:7420/v1/sessions", None),
            ("/../../../../v1", None),
            ("..", None),
            ("/%2e%2e/%2E./v1", None),
            ("/\\127.0.0.1:7420/", None),
        ] {
            assert_eq!(led(to).as_deref(), leads, "{to}");
        }
    }

    #[test]
    fn a_cookie_that_is_no_ascii_takes_no_other_along() {
        let mut headers = HeaderMap::new();
        headers.insert("cookie", HeaderValue::from_bytes("n=\u{fc}; dormouse_link=x; a=1".as_bytes()).unwrap());
        strip_own_cookies(&mut headers);
        assert_eq!(headers["cookie"].as_bytes(), "n=\u{fc}; a=1".as_bytes());
    }

    #[test]
    fn cookies_of_a_preview_stay_with_its_host() {
        let mut headers = map(&[
            ("set-cookie", "a=1; Path=/; HttpOnly"),
            ("set-cookie", "b=2; Domain=example.com; Path=/"),
            ("set-cookie", "dormouse_link=forged"),
        ]);
        outward(&mut headers, &Passage::Host { strips_token: false }, None, 80, false);
        let cookies: Vec<_> = headers.get_all("set-cookie").iter().map(|value| value.to_str().unwrap()).collect();
        assert_eq!(cookies, ["a=1; Path=/; HttpOnly", "b=2; Path=/"]);
    }
}
