//! Requests that are read: each is judged, gets its header, and is sent on; what comes back is passed as it comes.

use crate::{
    backend::Backend,
    body::Passing,
    connection::{Connection, Request as Record},
    host::Destination,
    policy::Asked,
    pump::pump,
    refusal::{Kind, Refusal},
};
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, Version,
    header::{CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HOST, TE, TRANSFER_ENCODING, UPGRADE},
    uri::{Authority, PathAndQuery, Scheme},
};
use hyper::{body::Incoming, upgrade::OnUpgrade};
use hyper_util::rt::TokioIo;
use std::sync::{Arc, atomic::Ordering::Relaxed};

/// Headers that are about one connection and not about the message (RFC 9110, 7.6.1), besides `TE`.
const HOP_BY_HOP: &[&str] = &[
    "connection",
    "keep-alive",
    "proxy-connection",
    "proxy-authenticate",
    "proxy-authorization",
    "transfer-encoding",
    "upgrade",
];

/// Sends a request on, if it is allowed, and gives its answer or ours.
pub(crate) async fn forward(connection: &Arc<Connection>, backend: &Backend, request: Request<Incoming>) -> Response<Passing> {
    let asked = Asked { method: request.method().to_string(), path: request.uri().path().to_owned() };
    let record = Arc::new(connection.begin(&backend.to, asked));
    let result = try_forward(connection, backend, request, &record).await;
    let response = result.unwrap_or_else(|refusal| {
        connection.egress.tell_refused(&backend.to, &refusal);
        refused(&refusal, &backend.to.to_string())
    });
    record.status.store(response.status().as_u16().into(), Relaxed);
    response
}

/// The answer in place of the one that was wanted.
pub(crate) fn refused(refusal: &Refusal, to: &str) -> Response<Passing> {
    let mut response = Response::new(Passing::text(refusal.sentence(to)));
    *response.status_mut() = refusal.status();
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    if refusal.kind == Kind::Denied
        && let Ok(reason) = HeaderValue::from_str(&refusal.header())
    {
        response.headers_mut().insert(HeaderName::from_static("x-dormouse-denied"), reason);
    }
    response
}

async fn try_forward(
    connection: &Arc<Connection>,
    backend: &Backend,
    mut request: Request<Incoming>,
    record: &Arc<Record>,
) -> Result<Response<Passing>, Refusal> {
    connection.egress.grant_soon().await?;
    if request.method() == Method::CONNECT {
        return Err(Refusal::new(Kind::Malformed, "a CONNECT has no place in a connection whose requests are read"));
    }
    let authority = authority(&request, &backend.to)?;
    let (inject, path, goes_plain) = record.judge(|allowed| (allowed.inject.cloned(), allowed.path, allowed.goes_plain))?;
    if inject.is_some() && !backend.is_tls() && !goes_plain {
        let why = "its rule adds a secret, and only TLS says who gets it: a rule that means plain HTTP names the port";
        return Err(Refusal::denied(why));
    }
    if inject.is_some() && request.method().as_str().eq_ignore_ascii_case("TRACE") {
        return Err(Refusal::denied("its rule adds a secret, and the answer to a TRACE would show it"));
    }
    let injected = match &inject {
        Some(inject) => Some((inject, connection.egress.credentials_soon().await?.value(inject)?)),
        None => None,
    };

    let upgrade = wanted_upgrade(&request);
    let from_inside = upgrade.is_some().then(|| hyper::upgrade::on(&mut request));
    let (mut parts, body) = request.into_parts();
    parts.uri = target(&parts.uri, path, &authority, backend)?;
    strip(&mut parts.headers);
    // The body is asked for at once, and so the client is told to go on at once.
    parts.headers.remove(EXPECT);
    if backend.is_h2() {
        parts.version = Version::HTTP_2;
        parts.headers.remove(HOST);
    } else {
        parts.version = Version::HTTP_11;
        let host = HeaderValue::from_str(authority.as_str());
        parts.headers.insert(HOST, host.map_err(|_| Refusal::new(Kind::Malformed, "its host can't stand in a header"))?);
    }
    if let Some(upgrade) = &upgrade {
        parts.headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        parts.headers.insert(UPGRADE, upgrade.clone());
    }
    if let Some((inject, value)) = injected {
        let name = HeaderName::from_bytes(inject.header.as_bytes());
        parts.headers.insert(name.map_err(|_| Refusal::new(Kind::Malformed, "its rule's header has no valid name"))?, value);
    }
    let request = Request::from_parts(parts, Passing::Sent(body, Arc::clone(record)));
    let mut response = backend.send(connection, request, || record.judge(|_| ())).await?;

    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        let Some(from_inside) = from_inside else {
            return Err(Refusal::new(Kind::Broken, "the other side changes a protocol that nobody wanted changed"));
        };
        let from_outside = hyper::upgrade::on(&mut response);
        connection.carry_on(carry_upgraded(Arc::clone(connection), Arc::clone(record), from_inside, from_outside));
        return Ok(response.map(|_| Passing::text("")));
    }
    strip(response.headers_mut());
    Ok(response.map(|body| Passing::Received(body, Arc::clone(record))))
}

/// Both sides speak another protocol now: bytes are copied.
async fn carry_upgraded(connection: Arc<Connection>, record: Arc<Record>, inside: OnUpgrade, outside: OnUpgrade) {
    if let (Ok(inside), Ok(outside)) = (inside.await, outside.await) {
        let (mut inside, mut outside) = (TokioIo::new(inside), TokioIo::new(outside));
        if pump(&mut inside, &mut outside).await.is_err() {
            connection.reset_outside();
        }
    }
    drop(record);
}

/// The host that the request names, which has to be the one of its connection.
fn authority(request: &Request<Incoming>, to: &Destination) -> Result<Authority, Refusal> {
    let malformed = |why: &str| Refusal::new(Kind::Malformed, why);
    let mut hosts = request.headers().get_all(HOST).iter();
    let header = match (hosts.next(), hosts.next()) {
        (_, Some(_)) => return Err(malformed("it has more than one Host")),
        (Some(host), None) if !host.is_empty() => {
            Some(Authority::try_from(host.as_bytes()).map_err(|_| malformed("its Host can't be read"))?)
        }
        _ => None,
    };
    for named in [request.uri().authority(), header.as_ref()].into_iter().flatten() {
        let named =
            Destination::parse(named.as_str(), Some(to.port)).map_err(|why| malformed(&format!("its Host is wrong: {why}")))?;
        if named.host != to.host {
            let reason = format!("it is a request for {}, and the connection is one to {}", named.host, to.host);
            return Err(Refusal::new(Kind::Misdirected, reason));
        }
    }
    let own = request.uri().authority().cloned().or(header);
    own.map_or_else(|| Authority::try_from(to.to_string()).map_err(|_| malformed("its host can't be read")), Ok)
}

/// The request's target in the form that goes out: with the path that was judged.
fn target(uri: &Uri, path: Option<String>, authority: &Authority, backend: &Backend) -> Result<Uri, Refusal> {
    let malformed = |_| Refusal::new(Kind::Malformed, "its path can't be read");
    let path_and_query = match (path, uri.path_and_query()) {
        (Some(path), old) => {
            let query = old.and_then(PathAndQuery::query).map(|query| format!("?{query}")).unwrap_or_default();
            PathAndQuery::try_from(format!("{path}{query}")).map_err(malformed)?
        }
        (None, Some(own)) => own.clone(),
        (None, None) => PathAndQuery::from_static("/"),
    };
    let mut parts = http::uri::Parts::default();
    parts.path_and_query = Some(path_and_query);
    if backend.is_h2() {
        parts.scheme = Some(if backend.is_tls() { Scheme::HTTPS } else { Scheme::HTTP });
        parts.authority = Some(authority.clone());
    }
    Uri::from_parts(parts).map_err(|_| Refusal::new(Kind::Malformed, "its target can't be read"))
}

/// The protocol that an HTTP/1.1 client wants to change to. Not another form of HTTP: its requests would be unread.
fn wanted_upgrade(request: &Request<Incoming>) -> Option<HeaderValue> {
    let asked = tokens(request.headers(), &CONNECTION).any(|token| token.eq_ignore_ascii_case("upgrade"));
    let value = request.headers().get(UPGRADE)?;
    let unread = value.to_str().ok()?.split(',').any(|protocol| {
        let name = protocol.trim().split('/').next().unwrap_or_default().to_ascii_lowercase();
        name.is_empty() || name.starts_with("h2") || name.starts_with("http") || name.starts_with("tls")
    });
    (asked && !unread && request.version() == Version::HTTP_11).then(|| value.clone())
}

/// Takes off what is about one connection only.
fn strip(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = tokens(headers, &CONNECTION).filter_map(|token| token.parse().ok()).collect();
    let trailers = tokens(headers, &TE).any(|token| token.eq_ignore_ascii_case("trailers"));
    if headers.contains_key(TRANSFER_ENCODING) {
        // It decides the length (RFC 9112, 6.3); the other header would be taken for true by someone.
        headers.remove(CONTENT_LENGTH);
    }
    for name in named {
        headers.remove(name);
    }
    for name in HOP_BY_HOP {
        headers.remove(*name);
    }
    headers.remove(TE);
    if trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
}

fn tokens<'h>(headers: &'h HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'h str> {
    headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok()).flat_map(|text| text.split(',')).map(str::trim)
}
