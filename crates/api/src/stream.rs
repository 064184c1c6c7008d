//! Answers that come in pieces: lines of JSON, server-sent events, raw bytes, and answers that wait.
//!
//! A producer writes into a bounded channel and the connection drains it, so a slow client holds back its own producer
//! and nothing else. Silence is filled every ten seconds, so that nothing on the way takes the connection for dead.

use crate::{error::ApiError, extract};
use api_types::ProblemCode;
use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use serde::Serialize;
use std::{convert::Infallible, future::Future, io, pin::Pin, time::Duration};
use tokio::sync::mpsc;

/// How long a stream may be silent.
pub(crate) const SILENCE: Duration = Duration::from_secs(10);

/// How items are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// One JSON object a line.
    Lines,
    /// `text/event-stream`, each item with an id to go on from.
    Events,
}

impl Format {
    /// What the client asked for.
    pub(crate) fn of(headers: &HeaderMap) -> Format {
        if accepts(headers, "text/event-stream") { Format::Events } else { Format::Lines }
    }

    fn filler(self) -> Bytes {
        match self {
            Format::Lines => Bytes::from_static(b"\n"),
            Format::Events => Bytes::from_static(b": \n\n"),
        }
    }

    fn content_type(self) -> &'static str {
        match self {
            Format::Lines => "application/x-ndjson",
            Format::Events => "text/event-stream",
        }
    }
}

/// True where `Accept` names this media type.
pub(crate) fn accepts(headers: &HeaderMap, media: &str) -> bool {
    let values = headers.get_all(header::ACCEPT);
    values.iter().filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(',')).any(|part| {
        let name = part.split(';').next().unwrap_or_default();
        name.trim().eq_ignore_ascii_case(media)
    })
}

/// The client is gone: the producer ends, too.
#[derive(Debug)]
pub(crate) struct Gone;

/// Where a producer writes its items.
pub(crate) struct Items {
    format: Format,
    sender: mpsc::Sender<Bytes>,
}

impl Items {
    /// One item with the id that `Last-Event-ID` will name, and the event's name.
    pub(crate) async fn send<T: Serialize>(&self, id: &str, name: Option<&str>, item: &T) -> Result<(), Gone> {
        let mut out = Vec::with_capacity(256);
        if self.format == Format::Events {
            for (field, value) in [("id", Some(id)), ("event", name)] {
                if let Some(value) = value.filter(|value| !value.is_empty()) {
                    out.extend_from_slice(field.as_bytes());
                    out.extend_from_slice(b": ");
                    // A line end would begin a field of its own.
                    out.extend(value.bytes().filter(|byte| !matches!(byte, b'\r' | b'\n' | 0)));
                    out.push(b'\n');
                }
            }
            out.extend_from_slice(b"data: ");
        }
        if let Err(error) = serde_json::to_writer(&mut out, item) {
            tracing::error!(%error, "an item can't be written as JSON");
            return Err(Gone);
        }
        out.extend_from_slice(if self.format == Format::Events { b"\n\n" } else { b"\n" });
        self.sender.send(out.into()).await.map_err(|_| Gone)
    }
}

/// An answer whose items a task of its own produces until it returns or the client has gone.
pub(crate) fn items<F, P>(format: Format, produce: P) -> Response
where
    P: FnOnce(Items) -> F,
    F: Future<Output = Result<(), Gone>> + Send + 'static,
{
    let (sender, receiver) = mpsc::channel(16);
    let producing = produce(Items { format, sender: sender.clone() });
    tokio::spawn(async move {
        tokio::select! {
            _ = producing => {}
            () = sender.closed() => {}
        }
    });
    let chunks = stream::unfold(receiver, move |mut receiver| async move {
        match tokio::time::timeout(SILENCE, receiver.recv()).await {
            Ok(Some(chunk)) => Some((Ok::<_, Infallible>(chunk), receiver)),
            Ok(None) => None,
            Err(_) => Some((Ok(format.filler()), receiver)),
        }
    });
    let mut response = Body::from_stream(chunks).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(format.content_type()));
    harden(headers);
    // Proxies such as nginx would hold lines back until a buffer is full.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// Raw bytes that came from a session: never shown or run by a browser.
pub(crate) fn raw<S, E>(chunks: S) -> Response
where
    S: futures_util::Stream<Item = Result<Bytes, E>> + Send + 'static,
    E: Into<axum::BoxError> + Send + 'static,
{
    let mut response = Body::from_stream(chunks).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(header::CONTENT_DISPOSITION, HeaderValue::from_static("attachment"));
    harden(headers);
    response
}

pub(crate) fn harden(headers: &mut HeaderMap) {
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static("sandbox"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
}

/// Adds a name to save the bytes under, of characters that are the same everywhere.
pub(crate) fn named(mut response: Response, name: &str) -> Response {
    let plain: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() || "._- +@".contains(c) { c } else { '_' }).take(255).collect();
    if let Ok(value) = HeaderValue::from_str(&format!("attachment; filename=\"{plain}\"")) {
        response.headers_mut().insert(header::CONTENT_DISPOSITION, value);
    }
    response
}

type Waiting<T> = Pin<Box<dyn Future<Output = Result<T, ApiError>> + Send>>;

/// Runs in a task of its own: what was begun goes on when the client goes away.
fn detached<T, W>(waiting: W) -> Waiting<T>
where
    T: Send + 'static,
    W: Future<Output = Result<T, ApiError>> + Send + 'static,
{
    let task = tokio::spawn(waiting);
    Box::pin(async move {
        task.await
            .unwrap_or_else(|_| Err(ApiError::new(ProblemCode::Internal, "the request failed in the server; its log says more")))
    })
}

/// Does something that must not be left half done when the client goes away.
pub(crate) async fn begun<T, W>(work: W) -> Result<T, ApiError>
where
    T: Send + 'static,
    W: Future<Output = Result<T, ApiError>> + Send + 'static,
{
    detached(work).await
}

/// A JSON answer that may take long: what isn't there after ten seconds is announced with `status` and padded with
/// blanks until it comes, so that no proxy cuts the wait. What fails late can't change the status any more: then
/// `instead` tells how things stand.
pub(crate) async fn padded<T, W, I, F>(status: StatusCode, waiting: W, instead: I) -> Result<Response, ApiError>
where
    T: Serialize + Send + 'static,
    W: Future<Output = Result<(StatusCode, T), ApiError>> + Send + 'static,
    I: FnOnce(ApiError) -> F + Send + 'static,
    F: Future<Output = Result<T, ApiError>> + Send + 'static,
{
    let mut waiting = detached(waiting);
    if let Ok(result) = tokio::time::timeout(SILENCE, &mut waiting).await {
        let (status, value) = result?;
        return Ok(extract::json(status, &value));
    }
    let last: Waiting<T> = Box::pin(async move {
        match waiting.await {
            Ok((_, value)) => Ok(value),
            Err(error) => instead(error).await,
        }
    });
    let chunks = stream::unfold(Some((last, true)), |state| async move {
        let (mut last, first) = state?;
        let blank = Bytes::from_static(b" ");
        if first {
            return Some((Ok::<_, io::Error>(blank), Some((last, false))));
        }
        match tokio::time::timeout(SILENCE, &mut last).await {
            Err(_) => Some((Ok(blank), Some((last, false)))),
            Ok(Ok(value)) => Some((serde_json::to_vec(&value).map(Bytes::from).map_err(io::Error::other), None)),
            Ok(Err(error)) => Some((serde_json::to_vec(&error.0).map(Bytes::from).map_err(io::Error::other), None)),
        }
    });
    let mut response = (status, Body::from_stream(chunks)).into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt;

    async fn text(response: Response) -> String {
        String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
    }

    #[test]
    fn the_accept_header_is_read_as_a_list() {
        let mut headers = HeaderMap::new();
        headers.insert(header::ACCEPT, HeaderValue::from_static("text/html, text/event-stream;q=0.9"));
        assert_eq!(Format::of(&headers), Format::Events);
        headers.insert(header::ACCEPT, HeaderValue::from_static("text/event-streams"));
        assert_eq!(Format::of(&headers), Format::Lines);
    }

    #[tokio::test]
    async fn items_come_as_lines_or_as_events() {
        let lines = items(Format::Lines, |items| async move { items.send("1", Some("x"), &[1]).await });
        assert_eq!(text(lines).await, "[1]\n");
        let events = items(Format::Events, |items| async move { items.send("4\nid: 9", Some("note"), &"a").await });
        assert_eq!(text(events).await, "id: 4id: 9\nevent: note\ndata: \"a\"\n\n");
    }

    #[tokio::test(start_paused = true)]
    async fn silence_is_filled_and_a_late_end_told() {
        let lines = items(Format::Lines, |items| async move {
            tokio::time::sleep(SILENCE * 2 + Duration::from_secs(5)).await;
            items.send("", None, &1).await
        });
        assert_eq!(text(lines).await, "\n\n1\n");
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_takes_long_is_padded() {
        let after = |seconds: u64| async move {
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            Ok((StatusCode::OK, 7))
        };
        let unused = |error: ApiError| async move { Err(error) };
        let quick = padded(StatusCode::CREATED, after(1), unused).await.unwrap();
        assert_eq!((quick.status(), text(quick).await.as_str()), (StatusCode::OK, "7"));
        let slow = padded(StatusCode::CREATED, after(35), unused).await.unwrap();
        assert_eq!((slow.status(), text(slow).await.as_str()), (StatusCode::CREATED, "   7"));
        let fails = async {
            tokio::time::sleep(Duration::from_secs(15)).await;
            Err(ApiError::bad_request("no"))
        };
        let late = padded(StatusCode::OK, fails, |_| async { Ok(8) }).await.unwrap();
        assert_eq!((late.status(), text(late).await.as_str()), (StatusCode::OK, " 8"));
    }
}
