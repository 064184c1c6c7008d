//! `Idempotency-Key`: a POST that is sent again is answered again, not carried out again.
//!
//! The request runs in a task of its own, so that it comes to its end and its answer is kept even when the client that
//! sent it has gone. Answers that changed nothing (a refusal, no room) are forgotten: the key can be tried again.

use crate::{
    AppState,
    auth::Principal,
    error::{ApiError, ChangedNothing},
    extract,
};
use api_types::{Problem, ProblemCode};
use axum::{
    body::{Body, HttpBody},
    extract::{Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use bytes::{Bytes, BytesMut};
use engine::Caller;
use futures_util::{StreamExt, stream};
use http::{HeaderValue, Method, StatusCode, header};
use model::SessionId;
use std::{
    collections::HashMap,
    convert::Infallible,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use store::{Answer, Begun, RequestId};
use tokio::sync::{mpsc, watch};

/// The name of the header, in lower case.
const HEADER: &str = "idempotency-key";
/// Longest key, in bytes.
const MAX_KEY: usize = 255;
/// Largest answer that is kept: both streams of an exec at their limit, escaped, fit in.
const MAX_ANSWER: usize = 16 * 1024 * 1024;
/// How long a second request waits for the first one's answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// The requests that this server carries out now.
#[derive(Default)]
pub(crate) struct InFlight(Mutex<HashMap<RequestId, watch::Receiver<()>>>);

impl InFlight {
    fn enter(self: &Arc<Self>, id: RequestId) -> Guard {
        let (done, receiver) = watch::channel(());
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(id.clone(), receiver);
        Guard { all: self.clone(), id, _done: done }
    }

    fn find(&self, id: &RequestId) -> Option<watch::Receiver<()>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(id).cloned()
    }
}

/// A request whose server ended before it could answer.
pub(crate) struct Interrupted<'a> {
    /// The id of what it made; of a fork, the ids of all sessions, with blanks between them.
    pub made: &'a str,
    pub uri: &'a http::Uri,
    pub body: &'a [u8],
}

/// A request being carried out. Dropping it wakes those who wait for it.
struct Guard {
    all: Arc<InFlight>,
    id: RequestId,
    _done: watch::Sender<()>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.all.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}

/// Honours the header where a POST has it.
pub(crate) async fn once(State(app): State<AppState>, request: Request, next: Next) -> Result<Response, ApiError> {
    let Some(key) = request.headers().get(HEADER) else { return Ok(next.run(request).await) };
    if request.method() != Method::POST {
        return Ok(next.run(request).await);
    }
    let key = key.to_str().ok().filter(|key| !key.is_empty() && key.len() <= MAX_KEY);
    let key =
        key.ok_or_else(|| ApiError::bad_request(format!("an idempotency key has 1 to {MAX_KEY} printable ASCII characters")))?;
    let principal = request.extensions().get::<Principal>().cloned();
    let principal = principal.ok_or_else(|| ApiError::new(ProblemCode::Unauthorized, "a token is needed"))?;
    let route = format!("POST {}", request.uri().path());
    let id = RequestId { owner: principal.owner(), key: key.to_owned(), route };
    let (mut parts, body) = request.into_parts();
    let body = extract::read_body(body, extract::MAX_JSON).await?;
    let hash = body_hash(parts.uri.query(), &body);

    loop {
        match begin(&app, &id, &hash).await? {
            Begun::Fresh => break,
            Begun::Done { body_hash, answer } => {
                return if body_hash == hash { Ok(again(answer)) } else { Err(contradiction()) };
            }
            Begun::InProgress { body_hash } | Begun::Interrupted { body_hash, .. } if body_hash != hash => {
                return Err(contradiction());
            }
            Begun::InProgress { .. } => wait(&app, &id).await?,
            Begun::Interrupted { made, .. } => {
                let cut = Interrupted { made: &made, uri: &parts.uri, body: &body };
                return after_crash(&app, &principal, &id, cut).await;
            }
        }
    }
    let guard = app.in_flight().enter(id.clone());
    let caller = Caller { request: Some(id.clone()), ..Caller::clone(&principal) };
    parts.extensions.insert(Principal(Arc::new(caller)));
    Ok(carry_out(app, id, guard, Request::from_parts(parts, Body::from(body)), next).await)
}

async fn begin(app: &AppState, id: &RequestId, hash: &str) -> Result<Begun, ApiError> {
    let begun = app.store().begin_request(id.clone(), hash.to_owned(), app.instance().to_owned(), crate::now()).await?;
    Ok(begun)
}

/// What makes two requests the same: the body, and the query without a token.
fn body_hash(query: Option<&str>, body: &[u8]) -> String {
    let mut hasher = blake3::Hasher::new();
    for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.starts_with("access_token=")) {
        hasher.update(pair.as_bytes()).update(b"&");
    }
    hasher.update(b"\n").update(body);
    hasher.finalize().to_hex().to_string()
}

fn contradiction() -> ApiError {
    ApiError::new(ProblemCode::IdempotencyConflict, "this idempotency key was used for another body; use a new key")
}

/// Waits until the request that came first has its answer.
async fn wait(app: &AppState, id: &RequestId) -> Result<(), ApiError> {
    let Some(mut first) = app.in_flight().find(id) else {
        // It has just begun or just ended.
        tokio::time::sleep(Duration::from_millis(20)).await;
        return Ok(());
    };
    // The sender says nothing: it is dropped at the end.
    if tokio::time::timeout(PATIENCE, first.changed()).await.is_ok() {
        return Ok(());
    }
    let detail = "the first request with this idempotency key is still under way; ask again";
    let mut problem = Problem::new(ProblemCode::IdempotencyConflict, detail);
    problem.retryable = true;
    problem.retry_after_seconds = Some(5);
    Err(problem.into())
}

/// Runs the request to its end and keeps its answer, while the client, if it is still there, gets it piece by piece.
async fn carry_out(app: AppState, id: RequestId, guard: Guard, request: Request, next: Next) -> Response {
    let (head_sender, head) = tokio::sync::oneshot::channel();
    let mut head_sender = Some(head_sender);
    tokio::spawn(async move {
        let _guard = guard;
        let response = next.run(request).await;
        let changed_nothing = response.extensions().get::<ChangedNothing>().is_some();
        let (parts, body) = response.into_parts();
        let status = parts.status.as_u16();
        let (sender, receiver) = mpsc::channel::<Bytes>(16);
        // Kept first, told then: what a client has seen whole is answered again. An answer that is padded goes out at
        // once, and only its end waits until it is kept.
        let told_at_once = body.size_hint().exact().is_none();
        let mut head = Some((parts, receiver));
        if told_at_once {
            head = head.and_then(|head| head_sender.take()?.send(head).err());
        }
        let kept = collect(body, told_at_once.then_some(&sender)).await;
        keep(&app, &id, changed_nothing, status, kept.clone()).await;
        if let (Some(head), Some(head_sender)) = (head, head_sender.take()) {
            let _ = head_sender.send(head);
            let _ = sender.send(kept.unwrap_or_default()).await;
        }
    });
    match head.await {
        Ok((parts, receiver)) => {
            let chunks = stream::unfold(receiver, |mut receiver| async move {
                receiver.recv().await.map(|chunk| (Ok::<_, Infallible>(chunk), receiver))
            });
            Response::from_parts(parts, Body::from_stream(chunks))
        }
        Err(_) => ApiError::new(ProblemCode::Internal, "the request ended without an answer").into_response(),
    }
}

/// The whole body, passed on as it comes. `None` where it broke off or is too large to be kept.
async fn collect(body: Body, pass_on: Option<&mpsc::Sender<Bytes>>) -> Option<Bytes> {
    let mut kept = BytesMut::new();
    let mut chunks = body.into_data_stream();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.ok().filter(|chunk| kept.len() + chunk.len() <= MAX_ANSWER)?;
        kept.extend_from_slice(&chunk);
        if let Some(sender) = pass_on {
            // Nobody listens any more: go on for the answer's sake.
            let _ = sender.send(chunk).await;
        }
    }
    Some(kept.freeze())
}

async fn keep(app: &AppState, id: &RequestId, changed_nothing: bool, status: u16, body: Option<Bytes>) {
    let body = body.map(|body| Answer { status, body: trim_padding(&body).to_vec() });
    let result = async {
        if changed_nothing || body.is_none() {
            app.store().abandon_request(id.clone()).await?;
        }
        // One that has made something is not forgotten, whatever its answer says.
        match body {
            Some(answer) => app.store().finish_request(id.clone(), answer).await,
            None => Ok(()),
        }
    };
    if let Err(error) = result.await {
        tracing::error!(%error, "the answer of an idempotent request could not be kept");
    }
}

/// The blanks of an answer that waited need not be waited for again.
fn trim_padding(body: &[u8]) -> &[u8] {
    body.trim_ascii_start()
}

fn again(answer: Answer) -> Response {
    let status = StatusCode::from_u16(answer.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let problem = status.is_client_error() || status.is_server_error();
    let media = if problem { api_types::PROBLEM_JSON } else { "application/json" };
    let mut response = (status, answer.body).into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(media));
    response.headers_mut().insert("idempotent-replayed", HeaderValue::from_static("true"));
    response
}

/// The server ended before it could answer, and what the request made is there: the answer is made from that.
async fn after_crash(app: &AppState, who: &Principal, id: &RequestId, cut: Interrupted<'_>) -> Result<Response, ApiError> {
    let response = crate::routes::answer_from(app, who, cut).await?;
    let status = response.status();
    let body = extract::read_body(response.into_body(), MAX_ANSWER).await?;
    keep(app, id, false, status.as_u16(), Some(body.clone())).await;
    Ok(again(Answer { status: status.as_u16(), body: body.to_vec() }))
}

/// The session in an address of version 1.
pub(crate) fn session_of(path: &str) -> Option<SessionId> {
    path.strip_prefix("/v1/sessions/")?.split('/').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_requests_are_the_same_by_body_and_query() {
        let base = body_hash(Some("wait=true"), b"{}");
        assert_eq!(base, body_hash(Some("access_token=x&wait=true"), b"{}"));
        assert_ne!(base, body_hash(None, b"{}"));
        assert_ne!(base, body_hash(Some("wait=true"), b"{ }"));
        assert_ne!(body_hash(Some("a"), b"b"), body_hash(None, b"a&b"));
    }

    #[test]
    fn an_address_names_its_session() {
        let id = SessionId::new();
        assert_eq!(session_of(&format!("/v1/sessions/{id}/execs")), Some(id));
        assert_eq!(session_of(&format!("/v1/sessions/{id}")), Some(id));
        assert_eq!(session_of("/v1/sessions"), None);
        assert_eq!(session_of("/v1/sessions/x/execs"), None);
    }
}
