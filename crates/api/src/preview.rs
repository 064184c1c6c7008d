//! Previews: pages of programs inside, each port of each session on a host of its own, `PORT-SESSION.DOMAIN`.
//!
//! ```text
//! public port ─┐
//! token        ├─► passed on as it is
//! link, cookie ┘      a link in the address becomes a cookie of that host, and goes out of the address
//! ```
//! They are told by their host before anything else is looked at, so no page of theirs is ever at the API's origin.

use crate::{
    AppState, Previews, auth,
    error::ApiError,
    listen::Peer,
    observe,
    proxy::{self, FORWARDED_PROTO, Passage},
};
use axum::{
    extract::{ConnectInfo, FromRequestParts, Request, State},
    middleware::Next,
    response::{Html, IntoResponse, Response},
};
use engine::{Caller, Scope};
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header, request::Parts};
use model::{Actor, SessionId, Timestamp};
use std::convert::Infallible;

/// The parameter and the cookie that hold a signed link.
pub(crate) const LINK: &str = "dormouse_link";

/// What a preview's host names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Preview {
    pub session: SessionId,
    pub port: u16,
}

/// The host of a port's preview.
pub(crate) fn host(session: SessionId, port: u16, domain: &str) -> String {
    format!("{port}-{session}.{domain}")
}

impl Preview {
    /// Reads a host, with or without a port of the server's. `None`: it is no preview's.
    fn read(host: &str, domain: &str) -> Option<Preview> {
        let host = host.split_once(':').map_or(host, |(name, _)| name).to_ascii_lowercase();
        let name = host.strip_suffix('.').unwrap_or(&host).strip_suffix(domain)?.strip_suffix('.')?;
        let (port, session) = name.split_once('-')?;
        let session: SessionId = session.parse().ok()?;
        let port: u16 = port.parse().ok().filter(|port| *port > 0)?;
        // One spelling, so that there is one origin.
        (format!("{port}-{session}") == name).then_some(Preview { session, port })
    }
}

/// Leads requests for previews away from the API. The outermost layer but for the one that watches.
pub(crate) async fn divert(State(app): State<AppState>, request: Request, next: Next) -> Response {
    let named = request.uri().authority().map(|authority| authority.as_str());
    let named = named.or_else(|| request.headers().get(header::HOST)?.to_str().ok());
    let Some(preview) = named.and_then(|host| Preview::read(host, &app.previews().domain)) else {
        return next.run(request).await;
    };
    let mut response = show(&app, preview, request).await.unwrap_or_else(IntoResponse::into_response);
    response.extensions_mut().insert(preview);
    response
}

impl Preview {
    /// The address of an access to it, for the list of accesses.
    pub(crate) fn audited(&self, path: &str) -> String {
        format!("/previews/{}/{}{path}", self.session, self.port)
    }
}

async fn show(app: &AppState, preview: Preview, request: Request) -> Result<Response, ApiError> {
    let token = auth::bearer_of(request.headers());
    let owner = match &token {
        Some(secret) => app.engine().authenticate(secret).await?,
        None => None,
    };
    let strips_token = owner.is_some();
    let owner = owner.filter(|caller| caller.has(Scope::Write) && caller.reaches(preview.session));
    let (target, link) = without_link(request.uri());
    let link = link.and_then(|link| Some((app.engine().check_link(preview.session, preview.port, &link)?, link)));
    if let Some((expires, link)) = &link
        && matches!(*request.method(), Method::GET | Method::HEAD)
        && !request.headers().contains_key(header::UPGRADE)
    {
        return Ok(remember(&target, link, *expires, is_secure(request.headers())));
    }
    let caller = if let Some(owner) = owner {
        owner
    } else if link.is_some() {
        guest("link")
    } else if cookie_opens(app, preview, request.headers()) {
        if !is_from_own_page(&request) {
            return Ok(refused());
        }
        guest("link")
    } else if is_public(app, preview).await {
        guest("public")
    } else {
        return Ok(refused());
    };
    let actor = caller.actor.clone();
    let passage = Passage::Host { strips_token };
    let answer = proxy::pass(app, &caller, preview.session, preview.port, request, &target, passage).await;
    Ok(observe::asked_as(answer.unwrap_or_else(IntoResponse::into_response), &actor))
}

/// Somebody of whom only the way in is known.
fn guest(way: &str) -> Caller {
    let actor = Actor(format!("preview:{way}"));
    Caller { actor, token: None, scopes: Vec::new(), sessions: None, local: false, request: None }
}

async fn is_public(app: &AppState, preview: Preview) -> bool {
    let view = app.engine().session(preview.session).await;
    view.is_ok_and(|view| view.row.network.public_ports.contains(&preview.port))
}

fn cookie_opens(app: &AppState, preview: Preview, headers: &HeaderMap) -> bool {
    // As bytes: cookies of the page itself may be no ASCII.
    let pairs = headers.get_all(header::COOKIE).iter().flat_map(|value| value.as_bytes().split(|byte| *byte == b';'));
    let links = pairs.filter_map(|pair| pair.trim_ascii().strip_prefix(LINK.as_bytes())?.strip_prefix(b"="));
    let mut links = links.filter_map(|link| std::str::from_utf8(link).ok());
    links.any(|link| app.engine().check_link(preview.session, preview.port, link).is_some())
}

/// What a cookie opens is changed, and talked to, by its own pages only: all previews are one site to a browser, so that it
/// sends the cookie along with what the page of another session asks for.
fn is_from_own_page(request: &Request) -> bool {
    let reads = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    if reads && !request.headers().contains_key(header::UPGRADE) {
        return true;
    }
    let Some(origin) = request.headers().get(header::ORIGIN) else { return true };
    let named = request.uri().authority().map(|authority| authority.as_str());
    let host = named.or_else(|| request.headers().get(header::HOST)?.to_str().ok());
    let of = origin.to_str().ok().and_then(|origin| origin.split_once("://")).map(|(_, host)| host);
    of.is_some() && of.map(str::to_ascii_lowercase) == host.map(str::to_ascii_lowercase)
}

/// Path and query without the link, and the link.
fn without_link(uri: &Uri) -> (String, Option<String>) {
    let (mut link, mut token) = (None, false);
    let mut kept = Vec::new();
    for pair in uri.query().unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
        match pair.strip_prefix(LINK).and_then(|rest| rest.strip_prefix('=')) {
            Some(found) => link = Some(found.to_owned()),
            None if proxy::is_our_token(pair) => token = true,
            None => kept.push(pair),
        }
    }
    let path = if uri.path().is_empty() { "/" } else { uri.path() };
    // As it came where nothing is taken out.
    let target = match (link.is_some() || token, kept.is_empty()) {
        (false, _) => uri.path_and_query().map_or_else(|| path.to_owned(), |whole| whole.as_str().to_owned()),
        (true, true) => path.to_owned(),
        (true, false) => format!("{path}?{}", kept.join("&")),
    };
    (target, link)
}

fn is_secure(headers: &HeaderMap) -> bool {
    headers.get(FORWARDED_PROTO).is_some_and(|proto| proto == "https")
}

/// Keeps the link as a cookie of this host alone, and leads to the page without it.
fn remember(target: &str, link: &str, expires: Timestamp, secure: bool) -> Response {
    let seconds = expires.since(crate::now()).as_secs();
    let secure = if secure { "; Secure" } else { "" };
    let cookie = format!("{LINK}={link}; Path=/; HttpOnly; SameSite=Lax; Max-Age={seconds}{secure}");
    // "//x" and "/\x" would lead to a host named x.
    let leads_away = target.as_bytes().get(1).is_some_and(|second| matches!(second, b'/' | b'\\'));
    let location = if leads_away { format!("/.{target}") } else { target.to_owned() };
    let mut response = StatusCode::SEE_OTHER.into_response();
    let headers = response.headers_mut();
    for (name, value) in [(header::SET_COOKIE, cookie), (header::LOCATION, location)] {
        if let Ok(value) = HeaderValue::from_str(&value) {
            headers.insert(name, value);
        }
    }
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// Says the same of every session that isn't open, whether it is there or not.
fn refused() -> Response {
    let page = "<!doctype html><meta charset=utf-8><title>Not open</title>\
        <p>This preview isn't public. Ask its owner for a link: <code>dormouse port SESSION PORT --link</code>";
    let mut response = (StatusCode::UNAUTHORIZED, Html(page)).into_response();
    let headers = response.headers_mut();
    headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static("default-src 'none'"));
    response
}

/// How the client reaches the server, as far as that can be told.
pub(crate) struct AskedFrom {
    pub scheme: &'static str,
    /// `Some(None)`: the usual one of the scheme.
    port: Option<Option<u16>>,
}

impl AskedFrom {
    /// What stands behind a host's name in an address.
    pub(crate) fn port_suffix(&self, previews: &Previews) -> String {
        match self.port.unwrap_or(previews.port) {
            Some(port) => format!(":{port}"),
            None => String::new(),
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for AskedFrom {
    type Rejection = Infallible;
    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let over_tcp = matches!(parts.extensions.get::<ConnectInfo<Peer>>(), Some(ConnectInfo(Peer::Tcp(_))));
        let named = parts.uri.authority().map(|authority| authority.as_str());
        let named = named.or_else(|| parts.headers.get(header::HOST)?.to_str().ok());
        let port = named.and_then(|host| host.rsplit_once(':')).and_then(|(_, port)| port.parse().ok());
        let scheme = if is_secure(&parts.headers) { "https" } else { "http" };
        Ok(AskedFrom { scheme, port: over_tcp.then_some(port) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "01890000-0000-7000-8000-00000000000a";

    #[test]
    fn a_host_names_one_port_of_one_session() {
        let expected = Some(Preview { session: ID.parse().unwrap(), port: 8080 });
        for host in ["localhost", "localhost:7420", "localhost.", "localhost.:80", "LOCALHOST"] {
            assert_eq!(Preview::read(&format!("8080-{ID}.{host}"), "localhost"), expected, "{host}");
            assert_eq!(Preview::read(&format!("8080-{}.{host}", ID.to_uppercase()), "localhost"), expected);
        }
        assert_eq!(Preview::read(&host(ID.parse().unwrap(), 8080, "p.example.com"), "p.example.com"), expected);
        for other in [
            "localhost".to_owned(),
            ".localhost".to_owned(),
            format!("8080-{ID}"),
            format!("8080-{ID}.localhost.evil.com"),
            format!("8080-{ID}.evillocalhost"),
            format!("x.8080-{ID}.localhost"),
            format!("08080-{ID}.localhost"),
            format!("+8080-{ID}.localhost"),
            format!("0-{ID}.localhost"),
            format!("65536-{ID}.localhost"),
            format!("8080-{}.localhost", ID.replace('-', "")),
            "8080-x.localhost".to_owned(),
            "127.0.0.1:7420".to_owned(),
            "[::1]:7420".to_owned(),
        ] {
            assert_eq!(Preview::read(&other, "localhost"), None, "{other}");
        }
    }

    #[test]
    fn a_link_is_taken_out_of_the_address() {
        let taken = |uri: &str| without_link(&uri.parse().unwrap());
        assert_eq!(taken("/a?x=1&dormouse_link=L&y"), ("/a?x=1&y".to_owned(), Some("L".to_owned())));
        assert_eq!(taken("/a?dormouse_link=L"), ("/a".to_owned(), Some("L".to_owned())));
        assert_eq!(taken("/a?x&&y"), ("/a?x&&y".to_owned(), None));
        assert_eq!(taken("http://h"), ("/".to_owned(), None));
        assert_eq!(taken("/a?access_token=dm_x&b=1"), ("/a?b=1".to_owned(), None), "nor is a token of ours");
        assert_eq!(taken("/a?dormouse_linked=1"), ("/a?dormouse_linked=1".to_owned(), None));
    }

    #[test]
    fn a_link_becomes_a_cookie_of_its_host_and_leads_nowhere_else() {
        let response = remember("//evil.example/x", "L", crate::now().plus(std::time::Duration::from_secs(60)), true);
        assert_eq!(response.status(), 303);
        assert_eq!(response.headers()[header::LOCATION], "/.//evil.example/x");
        let cookie = response.headers()[header::SET_COOKIE].to_str().unwrap();
        assert!(cookie.starts_with("dormouse_link=L; Path=/; HttpOnly; SameSite=Lax; Max-Age="), "{cookie}");
        assert!(cookie.ends_with("; Secure") && !cookie.to_ascii_lowercase().contains("domain"), "{cookie}");
        assert_eq!(remember("/\\x", "L", Timestamp(0), false).headers()[header::LOCATION], "/./\\x");
        assert_eq!(remember("/a", "L", Timestamp(0), false).headers()[header::LOCATION], "/a");
    }
}
