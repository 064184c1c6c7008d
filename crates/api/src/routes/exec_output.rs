//! Output by offset: as JSON lines, as events, or as the raw bytes. Reading it never wakes a session.

use crate::{
    AppState,
    error::ApiError,
    extract::{ExecPath, Query},
    stream::{self, Format, Gone, Items},
};
use api_types::{OutputLine, Problem};
use axum::{extract::State as Shared, response::Response};
use bytes::Bytes;
use engine::{Engine, OutputItem, OutputReader};
use http::{HeaderMap, HeaderValue};
use model::{ExecId, Offset, SessionId};
use std::time::Duration;
use wire::{layout::JournalName, records::ExecRecord};

/// Where the bytes of a raw answer begin: later than asked where what was asked for is gone.
const OFFSET: &str = "dormouse-offset";
/// Where the stream ended when the answer began, so where to ask next if nothing was missing.
const NEXT_OFFSET: &str = "dormouse-next-offset";
/// How long a follower waits before it asks again for the end of an exec whose sandbox didn't answer.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// Which part of an exec's output, and how.
#[derive(Debug, Default, serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ExecOutputQuery {
    pub stdout_from: Option<u64>,
    pub stderr_from: Option<u64>,
    /// Go on until the exec has ended.
    pub follow: Option<bool>,
    /// Only this stream, `stdout` or `stderr`; with `Accept: application/octet-stream` its raw bytes.
    pub stream: Option<String>,
    /// Where to begin in `stream`.
    pub from: Option<u64>,
}

/// Output of an exec.
///
/// JSON lines; server-sent events with `Accept: text/event-stream`; with `Accept: application/octet-stream` and `stream=`
/// the raw bytes from `from` on: they begin at the answer's `Dormouse-Offset` and end at a gap or at the end.
#[utoipa::path(get, path = "/v1/sessions/{id}/execs/{exec}/output", tag = "execs",
    params(("id" = String, Path,), ("exec" = String, Path,), ExecOutputQuery,
        ("Last-Event-ID" = Option<String>, Header, description = "Goes on after this event")),
    responses((status = 200, body = OutputLine, content_type = "application/x-ndjson"), (status = "default", body = Problem)))]
pub(crate) async fn exec_output(
    Shared(app): Shared<AppState>,
    ExecPath(id, exec): ExecPath,
    Query(query): Query<ExecOutputQuery>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let engine = app.engine().clone();
    let record = engine.exec(id, exec).await?;
    let follow = query.follow.unwrap_or(false);
    let only = match query.stream.as_deref() {
        None if query.from.is_some() => return Err(ApiError::bad_field("from", "'from' goes with 'stream'")),
        None => None,
        Some("stdout") => Some((JournalName::Stdout(exec), record.stdout_bytes)),
        Some("stderr") => Some((JournalName::Stderr(exec), record.stderr_bytes)),
        Some(other) => {
            let shown: String = other.chars().take(40).collect();
            return Err(ApiError::bad_field("stream", format!("'{shown}' is not one of: stdout, stderr")));
        }
    };
    let from = Offset(query.from.unwrap_or(0));
    if stream::accepts(&headers, "application/octet-stream") {
        let Some((journal, tail)) = only else {
            return Err(ApiError::bad_field("stream", "raw bytes are of one stream: add stream=stdout or stream=stderr"));
        };
        return raw(&app, id, journal, from, Some(tail), follow).await;
    }
    let format = Format::of(&headers);
    let (mut stdout_from, mut stderr_from) = (query.stdout_from.unwrap_or(0), query.stderr_from.unwrap_or(0));
    match query.stream.as_deref() {
        Some("stdout") => stdout_from = from.0,
        Some("stderr") => stderr_from = from.0,
        _ => {}
    }
    if let Some((stdout, stderr)) = last_event(&headers) {
        (stdout_from, stderr_from) = (stdout, stderr);
    }
    let wants = |name: &str| query.stream.as_deref().is_none_or(|only| only == name);
    let mut both = Both { stdout: None, stderr: None, ids: (stdout_from, stderr_from) };
    if wants("stdout") {
        both.stdout = Some(engine.output(id, JournalName::Stdout(exec), Offset(stdout_from)).await?);
    }
    if wants("stderr") {
        both.stderr = Some(engine.output(id, JournalName::Stderr(exec), Offset(stderr_from)).await?);
    }
    let stop = app.stop().clone();
    Ok(stream::items(format, move |items| async move {
        tokio::select! {
            result = tell_exec(&engine, id, record, &mut both, &items, follow) => result,
            () = stop.cancelled() => Ok(()),
        }
    }))
}

/// `STDOUT-STDERR`: the two offsets after the event.
fn last_event(headers: &HeaderMap) -> Option<(u64, u64)> {
    let (stdout, stderr) = headers.get("last-event-id")?.to_str().ok()?.split_once('-')?;
    Some((stdout.parse().ok()?, stderr.parse().ok()?))
}

/// The two streams of an exec.
struct Both {
    stdout: Option<OutputReader>,
    stderr: Option<OutputReader>,
    /// The offsets behind what was told.
    ids: (u64, u64),
}

#[derive(Clone, Copy)]
enum Which {
    Stdout,
    Stderr,
}

impl Both {
    async fn tell(&mut self, items: &Items, which: Which, item: OutputItem) -> Result<(), Gone> {
        let (line, end) = match (which, item) {
            (_, OutputItem::End) => return Ok(()),
            (Which::Stdout, OutputItem::Data { offset, bytes }) => (OutputLine::stdout(offset, &bytes), offset.plus(bytes.len())),
            (Which::Stderr, OutputItem::Data { offset, bytes }) => (OutputLine::stderr(offset, &bytes), offset.plus(bytes.len())),
            (which, OutputItem::Gap { from, to }) => {
                let of = if matches!(which, Which::Stdout) { "stdout" } else { "stderr" };
                (OutputLine::Gap { of: of.to_owned(), from, to }, to)
            }
        };
        match which {
            Which::Stdout => self.ids.0 = end.0,
            Which::Stderr => self.ids.1 = end.0,
        }
        items.send(&self.id(), None, &line).await
    }

    fn id(&self) -> String {
        format!("{}-{}", self.ids.0, self.ids.1)
    }

    /// Tells what is there now, at least up to the offsets of the record.
    async fn drain(&mut self, items: &Items) -> Result<(), Gone> {
        while let Some(item) = read(&mut self.stdout, false).await? {
            self.tell(items, Which::Stdout, item).await?;
        }
        while let Some(item) = read(&mut self.stderr, false).await? {
            self.tell(items, Which::Stderr, item).await?;
        }
        Ok(())
    }
}

/// The next item of a stream; `None` at its end. A stream that is followed and has ended stays silent.
async fn read(reader: &mut Option<OutputReader>, follow: bool) -> Result<Option<OutputItem>, Gone> {
    let Some(open) = reader else {
        return if follow { std::future::pending().await } else { Ok(None) };
    };
    match open.next(follow).await {
        Ok(OutputItem::End) => {
            if follow {
                *reader = None;
            }
            Ok(None)
        }
        Ok(item) => Ok(Some(item)),
        Err(error) => {
            tracing::debug!(%error, "output can't be read on");
            Err(Gone)
        }
    }
}

/// Tells both streams in the order in which they come, and the end of the exec, which is told last and only once it is
/// known.
async fn tell_exec(
    engine: &Engine,
    id: SessionId,
    record: ExecRecord,
    both: &mut Both,
    items: &Items,
    follow: bool,
) -> Result<(), Gone> {
    let mut record = record;
    if follow && record.ended_at.is_none() {
        let ended = wait_for_end(engine, id, record.id);
        tokio::pin!(ended);
        record = loop {
            let Both { stdout, stderr, .. } = both;
            let (which, item) = tokio::select! {
                record = &mut ended => break record?,
                item = read(stdout, true) => (Which::Stdout, item?),
                item = read(stderr, true) => (Which::Stderr, item?),
            };
            if let Some(item) = item {
                both.tell(items, which, item).await?;
            }
        };
    }
    both.drain(items).await?;
    if record.ended_at.is_none() {
        return Ok(());
    }
    let exit = OutputLine::Exit {
        state: record.state.as_str().to_owned(),
        exit_code: record.exit_code,
        signal: record.signal,
        reason: record.reason,
    };
    items.send(&both.id(), None, &exit).await
}

/// Waits for the end of an exec, also while its session sleeps or its sandbox doesn't answer.
async fn wait_for_end(engine: &Engine, id: SessionId, exec: ExecId) -> Result<ExecRecord, Gone> {
    loop {
        match engine.await_exec(id, exec).await {
            Ok(record) if record.ended_at.is_some() => return Ok(record),
            Err(engine::Error::NotFound { .. } | engine::Error::Deleted { .. } | engine::Error::Expired { .. }) => {
                return Err(Gone);
            }
            Ok(_) | Err(_) => tokio::time::sleep(ASK_AGAIN).await,
        }
    }
}

/// The raw bytes of one journal. They begin at or after `from`, and end at a gap, at the end of what there is or, with
/// `follow`, at the end of the stream.
pub(crate) async fn raw(
    app: &AppState,
    id: SessionId,
    journal: JournalName,
    from: Offset,
    tail: Option<Offset>,
    follow: bool,
) -> Result<Response, ApiError> {
    let mut reader = app.engine().output(id, journal, from).await?;
    let mut begin = from;
    let mut first = None;
    // What is gone at the very beginning is skipped, and the answer's header says so.
    loop {
        match reader.next(false).await? {
            OutputItem::Gap { to, .. } => begin = to,
            OutputItem::Data { bytes, .. } => {
                first = Some(bytes);
                break;
            }
            OutputItem::End => break,
        }
    }
    if first.is_none() && !follow {
        let mut response = stream::raw(futures_util::stream::empty::<Result<Bytes, std::io::Error>>());
        put_offsets(&mut response, begin, Some(begin));
        return Ok(response);
    }
    let counter = app.metrics().output_bytes.clone();
    let stop = app.stop().clone();
    let chunks = futures_util::stream::unfold(Some((first, reader)), move |state| {
        let (counter, stop) = (counter.clone(), stop.clone());
        async move {
            let (first, mut reader) = state?;
            let bytes = match first {
                Some(bytes) => bytes,
                None => {
                    let next = tokio::select! {
                        item = reader.next(follow) => item,
                        () = stop.cancelled(), if follow => return None,
                    };
                    match next {
                        Ok(OutputItem::Data { bytes, .. }) => bytes,
                        Ok(OutputItem::Gap { .. } | OutputItem::End) => return None,
                        Err(error) => return Some((Err(std::io::Error::other(error)), None)),
                    }
                }
            };
            counter.inc_by(bytes.len() as u64);
            Some((Ok(bytes), Some((None, reader))))
        }
    });
    let mut response = stream::raw(chunks);
    put_offsets(&mut response, begin, tail.filter(|_| !follow).map(|tail| tail.max(begin)));
    Ok(response)
}

fn put_offsets(response: &mut Response, begin: Offset, next: Option<Offset>) {
    response.headers_mut().insert(OFFSET, HeaderValue::from(begin.0));
    if let Some(next) = next {
        response.headers_mut().insert(NEXT_OFFSET, HeaderValue::from(next.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_events_id_names_both_offsets() {
        let mut headers = HeaderMap::new();
        assert_eq!(last_event(&headers), None);
        headers.insert("last-event-id", HeaderValue::from_static("17-4"));
        assert_eq!(last_event(&headers), Some((17, 4)));
        headers.insert("last-event-id", HeaderValue::from_static("17"));
        assert_eq!(last_event(&headers), None);
    }
}
