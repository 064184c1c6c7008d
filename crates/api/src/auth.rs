//! Who asks, and how far they reach.
//!
//! A token comes in `Authorization: Bearer …`. Browsers can't set that header on WebSockets and event streams, so those,
//! and nothing else, take `?access_token=` as well. On the server's Unix socket root and the server's own user need none.

use crate::{AppState, error::ApiError, listen::Peer};
use api_types::ProblemCode;
use axum::{
    extract::{ConnectInfo, FromRequestParts, Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use engine::{Caller, Scope};
use http::{Method, header, request::Parts};
use model::{Actor, SessionId};
use std::{ops::Deref, sync::Arc};

/// The caller of a request, once it is known.
#[derive(Debug, Clone)]
pub(crate) struct Principal(pub Arc<Caller>);

impl Deref for Principal {
    type Target = Caller;
    fn deref(&self) -> &Caller {
        &self.0
    }
}

impl Principal {
    pub(crate) fn require(&self, scope: Scope) -> Result<(), ApiError> {
        if self.has(scope) {
            return Ok(());
        }
        Err(ApiError::forbidden(format!("this needs a token with the scope '{}'", scope.as_str())))
    }

    pub(crate) fn require_session(&self, session: SessionId) -> Result<(), ApiError> {
        if self.reaches(session) {
            return Ok(());
        }
        Err(ApiError::forbidden(format!("the token doesn't reach session {session}")))
    }

    /// Refuses tokens that are limited to some sessions: what concerns all of them isn't theirs.
    pub(crate) fn require_all_sessions(&self) -> Result<(), ApiError> {
        if self.sessions.is_none() {
            return Ok(());
        }
        Err(ApiError::forbidden("the token is limited to some sessions"))
    }

    /// Whose idempotency keys these are.
    pub(crate) fn owner(&self) -> String {
        self.token.map_or_else(|| self.actor.0.clone(), |token| token.to_string())
    }

    /// The furthest that the caller reaches.
    pub(crate) fn furthest(&self) -> Option<Scope> {
        self.scopes.iter().copied().max()
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Principal {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        parts.extensions.get::<Principal>().cloned().ok_or_else(|| unauthorized("a token is needed"))
    }
}

fn unauthorized(detail: &str) -> ApiError {
    ApiError::new(ProblemCode::Unauthorized, detail)
}

/// Lets only known callers pass, with the scope that the method needs; puts the [`Principal`] onto the request.
pub(crate) async fn authenticate(State(app): State<AppState>, mut request: Request, next: Next) -> Result<Response, ApiError> {
    check_origin(&request)?;
    let principal = match credentials(&request)? {
        Credentials::Token(secret) => by_token(&app, &secret).await?,
        Credentials::Peer(peer) => by_peer(peer, app.server_uid()).ok_or_else(missing)?,
        Credentials::None => return Err(missing()),
    };
    let reads = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    if let Err(refused) = principal.require(if reads { Scope::Read } else { Scope::Write }) {
        // The list of accesses names who was refused.
        return Ok(crate::observe::asked_by(refused.into_response(), &principal));
    }
    request.extensions_mut().insert(principal);
    Ok(next.run(request).await)
}

/// What a request shows of itself.
enum Credentials {
    Token(String),
    Peer(Peer),
    None,
}

fn credentials(request: &Request) -> Result<Credentials, ApiError> {
    if let Some(value) = request.headers().get(header::AUTHORIZATION) {
        let secret = value.to_str().ok().and_then(bearer);
        let secret = secret.ok_or_else(|| unauthorized("Authorization must be: Bearer TOKEN"))?;
        return Ok(Credentials::Token(secret.to_owned()));
    }
    if let Some(secret) = query_token(request) {
        if !takes_query_token(request) {
            return Err(unauthorized("access_token is for WebSockets and event streams; send Authorization: Bearer TOKEN"));
        }
        return Ok(Credentials::Token(secret));
    }
    let peer = request.extensions().get::<ConnectInfo<Peer>>();
    Ok(peer.map_or(Credentials::None, |info| Credentials::Peer(info.0)))
}

fn missing() -> ApiError {
    unauthorized("send a token: Authorization: Bearer TOKEN")
}

async fn by_token(app: &AppState, secret: &str) -> Result<Principal, ApiError> {
    match app.engine().authenticate(secret).await? {
        Some(caller) => Ok(Principal(Arc::new(caller))),
        None => Err(unauthorized("the token isn't known here, has expired or was revoked")),
    }
}

/// Root and the server's own user, on the server's Unix socket.
fn by_peer(peer: Peer, server_uid: u32) -> Option<Principal> {
    let Peer::Unix { uid: Some(uid) } = peer else { return None };
    if uid != 0 && uid != server_uid {
        return None;
    }
    Some(Principal(Arc::new(Caller {
        actor: Actor(format!("uid:{uid}")),
        token: None,
        scopes: vec![Scope::Admin],
        sessions: None,
        local: true,
        request: None,
    })))
}

/// The token in a request's `Authorization`, where it has one of that form.
pub(crate) fn bearer_of(headers: &http::HeaderMap) -> Option<String> {
    headers.get(header::AUTHORIZATION)?.to_str().ok().and_then(bearer).map(str::to_owned)
}

fn bearer(value: &str) -> Option<&str> {
    let (scheme, secret) = value.split_once(' ')?;
    let secret = secret.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !secret.is_empty()).then_some(secret)
}

fn query_token(request: &Request) -> Option<String> {
    let query = request.uri().query()?;
    let value = query.split('&').find_map(|pair| pair.strip_prefix("access_token="))?;
    Some(value.to_owned())
}

fn takes_query_token(request: &Request) -> bool {
    let headers = request.headers();
    let upgrade = headers.get(header::UPGRADE).and_then(|value| value.to_str().ok());
    let websocket = upgrade.is_some_and(|value| value.eq_ignore_ascii_case("websocket"));
    let stream = request.method() == Method::GET && crate::stream::accepts(headers, "text/event-stream");
    websocket || stream && !leads_inside(request.uri().path())
}

/// True for an address behind which a program of a session answers: a page there must not be opened by a link that holds a
/// token.
fn leads_inside(path: &str) -> bool {
    let mut parts = path.split('/').skip(1);
    let [v1, sessions, _, ports, port] = std::array::from_fn(|_| parts.next());
    v1 == Some("v1") && sessions == Some("sessions") && ports == Some("ports") && port.is_some()
}

/// A page of another site must not change anything or open a terminal: a browser names the page's origin.
fn check_origin(request: &Request) -> Result<(), ApiError> {
    let headers = request.headers();
    let Some(origin) = headers.get(header::ORIGIN) else { return Ok(()) };
    let reads = matches!(*request.method(), Method::GET | Method::HEAD) && !headers.contains_key(header::UPGRADE);
    // HTTP/2 names the host in the address.
    let host = request.uri().authority().map(|authority| authority.as_str());
    let host = host.or_else(|| headers.get(header::HOST)?.to_str().ok()).unwrap_or_default();
    let same = origin.to_str().ok().and_then(|origin| origin.split_once("://")).is_some_and(|(_, name)| name == host);
    if reads || same {
        return Ok(());
    }
    Err(ApiError::forbidden("requests of pages from another origin are refused"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;

    fn request(uri: &str, headers: &[(&str, &str)], method: &str) -> Request {
        let mut builder = Request::builder().uri(uri).method(method);
        for (name, value) in headers {
            builder = builder.header(*name, *value);
        }
        builder.body(Body::empty()).unwrap()
    }

    #[test]
    fn a_bearer_token_is_read_in_either_case() {
        assert_eq!(bearer("Bearer abc"), Some("abc"));
        assert_eq!(bearer("bearer  abc"), Some("abc"));
        for bad in ["abc", "Basic abc", "Bearer ", "Bearer"] {
            assert_eq!(bearer(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_token_in_the_query_is_for_streams_only() {
        let events = [("accept", "text/event-stream")];
        assert!(takes_query_token(&request("/v1/events", &events, "GET")));
        assert!(takes_query_token(&request("/v1/x", &[("upgrade", "WebSocket")], "GET")));
        assert!(!takes_query_token(&request("/v1/x", &events, "POST")));
        assert!(!takes_query_token(&request("/v1/x", &[("accept", "application/json")], "GET")));
        assert!(!takes_query_token(&request("/v1/sessions/x/ports/80/y", &events, "GET")));
        assert!(takes_query_token(&request("/v1/sessions/x/ports/80/y", &[("upgrade", "websocket")], "GET")));
        assert_eq!(query_token(&request("/v1/x?a=b&access_token=s", &[], "GET")).as_deref(), Some("s"));
    }

    #[test]
    fn the_socket_knows_root_and_its_own_user() {
        let admin = |uid| by_peer(Peer::Unix { uid }, 1000).map(|principal| principal.actor.0.clone());
        assert_eq!(admin(Some(0)).as_deref(), Some("uid:0"));
        assert_eq!(admin(Some(1000)).as_deref(), Some("uid:1000"));
        assert_eq!(admin(Some(1001)), None);
        assert_eq!(admin(None), None);
        assert!(by_peer(Peer::Nobody, 0).is_none());
    }

    #[test]
    fn other_origins_change_nothing() {
        let other = [("origin", "http://evil.example"), ("host", "127.0.0.1:7420")];
        assert!(check_origin(&request("/v1/sessions", &other, "POST")).is_err());
        assert!(check_origin(&request("/v1/sessions", &other, "GET")).is_ok());
        let socket = [("origin", "http://evil.example"), ("host", "127.0.0.1:7420"), ("upgrade", "websocket")];
        assert!(check_origin(&request("/v1/x", &socket, "GET")).is_err());
        let same = [("origin", "http://127.0.0.1:7420"), ("host", "127.0.0.1:7420")];
        assert!(check_origin(&request("/v1/sessions", &same, "POST")).is_ok());
        assert!(check_origin(&request("/v1/sessions", &[("origin", "null"), ("host", "")], "POST")).is_err());
    }
}
