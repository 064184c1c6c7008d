//! Requests to the server, over TCP or its Unix socket.
//!
//! A request that the server never answered is sent again with the same idempotency key, so that a server that restarts
//! in the middle of a command is a pause and not a failure. One whose first connection is refused fails at once: then
//! there most likely is no server.

use super::{
    address::Address,
    failure::{Failure, Result},
};
use api_types::{Page, Problem, ProblemCode};
use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde::{Serialize, de::DeserializeOwned};
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UnixStream},
};

/// A request's body.
pub type Body = UnsyncBoxBody<Bytes, io::Error>;

/// How long a command waits for a server that was there and is gone, or that says "not now".
const PATIENCE: Duration = Duration::from_secs(60);

/// Largest JSON answer that is read into memory.
const MAX_ANSWER: usize = 256 << 20;

/// A connection to the server of either kind.
pub trait Wire: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Wire for T {}

/// A client of one server.
#[derive(Debug, Clone)]
pub struct Client {
    address: Address,
    token: Option<String>,
    /// True once the server has answered: from then on its absence is a restart, and worth waiting for.
    seen: Arc<AtomicBool>,
}

/// What became of a request that got no answer.
enum SendError {
    /// There was no connection: nothing was sent.
    Connect(io::Error),
    /// The connection broke: the server may have carried it out.
    Broken(String),
    /// It can't be sent as it is.
    Bad(Failure),
}

impl Client {
    /// A client for the server at `address`.
    pub fn new(address: Address, token: Option<String>) -> Client {
        Client { address, token, seen: Arc::default() }
    }

    /// Where the server is, for messages.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Opens a connection.
    pub async fn connect(&self) -> io::Result<Box<dyn Wire>> {
        let connecting = async {
            Ok(match &self.address {
                Address::Tcp { host, port, .. } => {
                    let host = host.trim_start_matches('[').trim_end_matches(']');
                    let stream = TcpStream::connect((host, *port)).await?;
                    stream.set_nodelay(true)?;
                    Box::new(stream) as Box<dyn Wire>
                }
                Address::Unix(path) => Box::new(UnixStream::connect(path).await?) as Box<dyn Wire>,
            })
        };
        let late = |_| io::Error::new(io::ErrorKind::TimedOut, "no answer within 10 s");
        tokio::time::timeout(Duration::from_secs(10), connecting).await.map_err(late)?
    }

    /// The failure of a server that can't be connected to.
    pub fn unreachable(&self, error: &io::Error) -> Failure {
        let next = match (&self.address, error.kind()) {
            (_, io::ErrorKind::PermissionDenied) => "this user may not open its socket".to_owned(),
            (address, io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound) if address.is_local() => {
                "start it with 'dormouse serve'".to_owned()
            }
            _ => format!("check the address and the way there ({error})"),
        };
        Failure::unreachable(format!("can't reach the server at {} — {next}", self.address))
    }

    /// Host header and path of a request; `path` begins with `/`.
    pub fn target(&self, path: &str) -> (String, String) {
        match &self.address {
            Address::Tcp { host, port, prefix } => (format!("{host}:{port}"), format!("{prefix}{path}")),
            Address::Unix(_) => ("localhost".to_owned(), path.to_owned()),
        }
    }

    /// The `Authorization` header, where there is a token.
    pub fn authorization(&self) -> Result<Option<HeaderValue>> {
        let Some(token) = &self.token else { return Ok(None) };
        let mut value = HeaderValue::from_str(&format!("Bearer {token}"))
            .map_err(|_| Failure::usage("the token has characters that no token has"))?;
        value.set_sensitive(true);
        Ok(Some(value))
    }

    async fn send_once(&self, call: &Call, body: Body) -> std::result::Result<Response<Incoming>, SendError> {
        let (host, path) = self.target(&call.path);
        let mut request = Request::builder().method(call.method.clone()).uri(path).header(header::HOST, host);
        if let Some(value) = self.authorization().map_err(SendError::Bad)? {
            request = request.header(header::AUTHORIZATION, value);
        }
        if let Some(key) = &call.idempotency_key {
            request = request.header("idempotency-key", key);
        }
        for (name, value) in &call.headers {
            request = request.header(*name, value);
        }
        let request = request.body(body).map_err(|e| SendError::Bad(Failure::usage(format!("can't ask for that: {e}"))))?;
        let stream = self.connect().await.map_err(SendError::Connect)?;
        let broken = |e: hyper::Error| SendError::Broken(e.to_string());
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
        // Owned by the response: hyper ends it when the response's body and the sender are dropped.
        tokio::spawn(connection);
        let answer = sender.send_request(request).await;
        self.seen.store(true, Ordering::Relaxed);
        answer.map_err(broken)
    }

    /// Sends a request whose body can be sent only once, and checks the answer's status.
    ///
    /// # Errors
    /// An unreachable server, a connection that breaks, and what the server answers as an error.
    pub async fn send_stream(&self, call: Call, body: Body) -> Result<Response<Incoming>> {
        match self.send_once(&call, body).await {
            Ok(response) => checked(response).await,
            Err(SendError::Connect(error)) => Err(self.unreachable(&error)),
            Err(SendError::Broken(error)) => {
                Err(Failure::unreachable(format!("the connection to {} broke: {error}", self.address)))
            }
            Err(SendError::Bad(failure)) => Err(failure),
        }
    }

    /// Sends a request, again where the server went away or said "not now" before it had done anything.
    ///
    /// # Errors
    /// As [`Client::send_stream`], after a minute of trying.
    pub async fn send(&self, call: Call) -> Result<Response<Incoming>> {
        let begun = Instant::now();
        let mut pause = Duration::from_millis(100);
        loop {
            let body = Full::new(call.body.clone()).map_err(|never| match never {}).boxed_unsync();
            let (failure, at_least) = match self.send_once(&call, body).await {
                Ok(response) => match checked(response).await {
                    Err(failure) if worth_waiting_for(&failure) => {
                        let after = failure.problem.as_ref().and_then(|p| p.retry_after_seconds).unwrap_or(0);
                        (failure, Duration::from_secs(after))
                    }
                    done => return done,
                },
                Err(SendError::Connect(error)) if !self.seen.load(Ordering::Relaxed) => return Err(self.unreachable(&error)),
                Err(SendError::Connect(error)) => (self.unreachable(&error), Duration::ZERO),
                Err(SendError::Broken(error)) => {
                    let message = format!("the connection to {} broke: {error}", self.address);
                    (Failure::unreachable(message), Duration::ZERO)
                }
                Err(SendError::Bad(failure)) => return Err(failure),
            };
            let wait = pause.max(at_least);
            if !call.again || begun.elapsed() + wait > PATIENCE {
                return Err(failure);
            }
            tokio::time::sleep(wait).await;
            pause = (pause * 2).min(Duration::from_secs(2));
        }
    }

    /// Sends a request and reads its JSON answer.
    ///
    /// # Errors
    /// As [`Client::send`], and an answer that can't be read.
    pub async fn json<T: DeserializeOwned>(&self, call: Call) -> Result<T> {
        let what = format!("{} {}", call.method, call.path);
        let response = self.send(call).await?;
        let bytes = read_all(response.into_body()).await?;
        let unreadable = |e: serde_json::Error| {
            Failure::failed(format!(
                "can't read the server's answer to {what}: {e} — client and server may be of different versions ('dormouse version')"
            ))
        };
        let value: serde_json::Value = serde_json::from_slice(&bytes).map_err(unreadable)?;
        // What goes wrong after the answer has begun can't change its status any more.
        let kind = value.get("type").and_then(|kind| kind.as_str()).unwrap_or_default();
        if kind.starts_with("urn:dormouse:problem:")
            && let Ok(problem) = serde_json::from_value::<Problem>(value.clone())
        {
            return Err(Failure::of_problem(problem));
        }
        serde_json::from_value(value).map_err(unreadable)
    }

    /// All items of a list, page by page. `path` may carry a query.
    ///
    /// # Errors
    /// As [`Client::json`].
    pub async fn list<T: DeserializeOwned>(&self, path: &str) -> Result<Vec<T>> {
        let mut items = Vec::new();
        let mut cursor: Option<String> = None;
        let joint = if path.contains('?') { '&' } else { '?' };
        loop {
            let page = match &cursor {
                Some(cursor) => format!("{path}{joint}cursor={}", encode(cursor)),
                None => path.to_owned(),
            };
            let answer: Page<T> = self.json(Call::get(page)).await?;
            items.extend(answer.items);
            match answer.next_cursor {
                // A cursor that doesn't move would be asked for for ever.
                Some(next) if cursor.as_ref() != Some(&next) => cursor = Some(next),
                _ => return Ok(items),
            }
        }
    }
}

/// A body without bytes.
pub fn no_body() -> Body {
    http_body_util::Empty::new().map_err(|never| match never {}).boxed_unsync()
}

/// A request, before it is sent.
#[derive(Debug, Clone)]
pub struct Call {
    method: Method,
    path: String,
    body: Bytes,
    headers: Vec<(&'static str, String)>,
    idempotency_key: Option<String>,
    /// False for what must fail rather than be sent twice or late.
    again: bool,
}

impl Call {
    fn new(method: Method, path: impl Into<String>) -> Call {
        Call { method, path: path.into(), body: Bytes::new(), headers: Vec::new(), idempotency_key: None, again: true }
    }

    /// A GET.
    pub fn get(path: impl Into<String>) -> Call {
        Call::new(Method::GET, path)
    }

    /// A DELETE.
    pub fn delete(path: impl Into<String>) -> Call {
        Call::new(Method::DELETE, path)
    }

    /// A PUT, whose body is given when it is sent.
    pub fn put(path: impl Into<String>) -> Call {
        Call::new(Method::PUT, path)
    }

    /// A PUT of JSON. Again it is the same, so it needs no key.
    pub fn put_bytes(path: impl Into<String>, body: Bytes) -> Call {
        Call { body, ..Call::new(Method::PUT, path) }.header("content-type", "application/json")
    }

    /// A PATCH of `body` as JSON, which sets what it names: again it is the same.
    pub fn patch(path: impl Into<String>, body: &impl Serialize) -> Call {
        let json = serde_json::to_vec(body).expect("requests are maps with text as keys");
        Call { body: json.into(), ..Call::new(Method::PATCH, path) }.header("content-type", "application/json")
    }

    /// A POST of `body` as JSON, with an idempotency key of its own.
    pub fn post(path: impl Into<String>, body: &impl Serialize) -> Call {
        let json = serde_json::to_vec(body).expect("requests are maps with text as keys");
        let call = Call::post_bytes(path, json.into());
        call.header("content-type", "application/json")
    }

    /// A POST of raw bytes, with an idempotency key of its own.
    pub fn post_bytes(path: impl Into<String>, body: Bytes) -> Call {
        let key = uuid::Uuid::new_v4().as_hyphenated().to_string();
        Call { body, idempotency_key: Some(key), ..Call::new(Method::POST, path) }
    }

    /// The same with a header more.
    pub fn header(mut self, name: &'static str, value: impl Into<String>) -> Call {
        self.headers.push((name, value.into()));
        self
    }

    /// The same, sent only once.
    pub fn once(mut self) -> Call {
        self.again = false;
        self
    }
}

fn worth_waiting_for(failure: &Failure) -> bool {
    failure.problem.as_ref().is_some_and(|problem| {
        let passing = matches!(problem.code, ProblemCode::Held | ProblemCode::ShuttingDown | ProblemCode::TooManyRequests);
        passing && problem.retryable && problem.no_side_effects
    })
}

/// The answer, or the problem that it tells.
async fn checked(response: Response<Incoming>) -> Result<Response<Incoming>> {
    let status = response.status();
    if status.is_success() || status == StatusCode::SWITCHING_PROTOCOLS {
        return Ok(response);
    }
    let bytes = read_all(response.into_body()).await.unwrap_or_default();
    Err(Failure::of_problem(problem_of(status, &bytes)))
}

/// The problem in an answer's body; made up from the status where the body is none of ours.
pub fn problem_of(status: StatusCode, body: &[u8]) -> Problem {
    serde_json::from_slice::<Problem>(body).unwrap_or_else(|_| {
        let code = ProblemCode::ALL.iter().copied().find(|code| code.status() == status.as_u16());
        let text: String = String::from_utf8_lossy(body).chars().filter(|c| !c.is_control()).take(200).collect();
        let mut problem = Problem::new(code.unwrap_or(ProblemCode::Unknown), format!("the server answered {status}: {text}"));
        problem.status = status.as_u16();
        problem
    })
}

async fn read_all(mut body: Incoming) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| Failure::unreachable(format!("the connection broke in the middle of an answer: {e}")))?;
        if let Ok(data) = frame.into_data() {
            if bytes.len() + data.len() > MAX_ANSWER {
                return Err(Failure::failed("the server's answer is longer than any answer is"));
            }
            bytes.extend_from_slice(&data);
        }
    }
    Ok(bytes)
}

/// A text as a part of a path or a query.
pub fn encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => out.push(char::from(byte)),
            other => out.push_str(&format!("%{other:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_encoded_for_paths_and_queries() {
        assert_eq!(encode("a/b c?&=%é"), "a%2Fb%20c%3F%26%3D%25%C3%A9");
    }

    #[test]
    fn an_answer_that_is_no_problem_is_told_by_its_status() {
        let problem = problem_of(StatusCode::NOT_FOUND, b"<html>\x1b[31m");
        assert_eq!(problem.code, ProblemCode::NotFound);
        assert!(!problem.detail.contains('\x1b'));
        assert_eq!(problem_of(StatusCode::IM_A_TEAPOT, b"").status, 418);
    }
}
