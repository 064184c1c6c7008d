//! A plain HTTP client for the tests: every status is an answer, never an error.

use serde_json::Value;
use std::time::Duration;

/// An answer.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub content_type: String,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Reply {
    /// The body as JSON; panics where it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("no JSON ({e}) in {}: {}", self.status, self.text()))
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// Panics unless the status is `status`.
    #[track_caller]
    pub fn expect(self, status: u16) -> Reply {
        assert_eq!(self.status, status, "{}", self.text());
        self
    }

    /// The problem's code; panics where the answer is no problem.
    #[track_caller]
    pub fn problem(&self) -> String {
        assert_eq!(self.content_type, "application/problem+json", "{}", self.text());
        self.json()["code"].as_str().expect("a problem has a code").to_owned()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }
}

/// Talks to one server with one token.
#[derive(Clone)]
pub struct Client {
    agent: ureq::Agent,
    pub base: String,
    pub token: String,
}

impl Client {
    pub fn new(base: &str, token: &str) -> Client {
        let config = ureq::Agent::config_builder().http_status_as_error(false).timeout_connect(Some(Duration::from_secs(5)));
        Client { agent: config.build().into(), base: base.to_owned(), token: token.to_owned() }
    }

    /// The same server with another token.
    pub fn with_token(&self, token: &str) -> Client {
        Client { token: token.to_owned(), ..self.clone() }
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    fn bearer(&self) -> String {
        format!("Bearer {}", self.token)
    }

    /// Sends a request; an error is one of the transport.
    pub fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: Option<&[u8]>) -> Result<Reply, ureq::Error> {
        let mut request = ureq::http::Request::builder().method(method).uri(self.url(path));
        if !self.token.is_empty() {
            request = request.header("authorization", self.bearer());
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let answer = match body {
            Some(body) => self.agent.run(request.body(body)?)?,
            None => self.agent.run(request.body(())?)?,
        };
        let (head, mut body) = answer.into_parts();
        let text = |value: &ureq::http::HeaderValue| value.to_str().unwrap_or_default().to_owned();
        Ok(Reply {
            status: head.status.as_u16(),
            content_type: head.headers.get("content-type").map(text).unwrap_or_default(),
            headers: head.headers.iter().map(|(name, value)| (name.to_string(), text(value))).collect(),
            body: body.with_config().limit(u64::MAX).read_to_vec()?,
        })
    }

    #[track_caller]
    fn must(&self, method: &str, path: &str, body: Option<&[u8]>) -> Reply {
        let json = [("content-type", "application/json")];
        let headers = if body.is_some() { &json[..] } else { &[] };
        self.send(method, path, headers, body).unwrap_or_else(|e| panic!("{method} {path}: {e}"))
    }

    #[track_caller]
    pub fn get(&self, path: &str) -> Reply {
        self.must("GET", path, None)
    }

    #[track_caller]
    pub fn delete(&self, path: &str) -> Reply {
        self.must("DELETE", path, None)
    }

    #[track_caller]
    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.must("POST", path, Some(body.to_string().as_bytes()))
    }

    #[track_caller]
    pub fn patch(&self, path: &str, body: &Value) -> Reply {
        self.must("PATCH", path, Some(body.to_string().as_bytes()))
    }

    #[track_caller]
    pub fn put(&self, path: &str, body: &[u8]) -> Reply {
        self.must("PUT", path, Some(body))
    }

    /// A reader of an answer's body as it comes.
    pub fn stream(&self, path: &str, accept: &str) -> Result<impl std::io::Read + Send + use<>, ureq::Error> {
        let request = ureq::http::Request::builder().method("GET").uri(self.url(path));
        let request = request.header("authorization", self.bearer()).header("accept", accept);
        Ok(self.agent.run(request.body(())?)?.into_body().into_reader())
    }
}

/// A path or name as it stands in a query.
pub fn query(text: &str) -> String {
    text.bytes()
        .map(|b| if b.is_ascii_alphanumeric() || b"-_./".contains(&b) { (b as char).to_string() } else { format!("%{b:02X}") })
        .collect()
}
