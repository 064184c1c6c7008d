//! Commands run in a session: starting them, waiting for them, signals and standard input.

use crate::{
    AppState,
    auth::Principal,
    error::ApiError,
    extract::{self, ExecPath, Json, NoQuery, PageQuery, Query, SessionPath},
    stream,
};
use api_types::{CreateExec, Exec, Page, Problem, SignalExec, Stdin, StdinAnswer};
use axum::{body::Body, extract::State as Shared, response::Response};
use bytes::Bytes;
use engine::{ByteStream, Engine, NewExec, OutputItem};
use futures_util::StreamExt;
use http::{StatusCode, Uri};
use model::{ExecId, Offset, SessionId};
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use wire::{
    layout::JournalName,
    records::{ExecRecord, Program},
};

/// How much of each stream a waited-for exec's answer holds.
const SHOWN: usize = 1024 * 1024;

/// How an exec is started.
#[derive(Debug, Default, serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct StartQuery {
    /// Answer when it has ended, with its output.
    pub wait: Option<bool>,
    /// Start a stopped session for it.
    pub start: Option<bool>,
}

/// Run a command.
///
/// 201 at once, or with `wait=true` when it has ended, with the first 1 MiB of each stream.
#[utoipa::path(post, path = "/v1/sessions/{id}/execs", tag = "execs", params(("id" = String, Path,), StartQuery),
    request_body = CreateExec, responses((status = 201, body = Exec), (status = "default", body = Problem)))]
pub(crate) async fn create(
    Shared(app): Shared<AppState>,
    who: Principal,
    SessionPath(id): SessionPath,
    Query(query): Query<StartQuery>,
    Json(body): Json<CreateExec>,
) -> Result<Response, ApiError> {
    let start = query.start.or(body.start).unwrap_or(false);
    let new = wanted(body, start, query.wait == Some(true))?;
    let engine = app.engine().clone();
    if !new.wait {
        let record = stream::begun(async move { Ok(engine.start_exec(&who, id, new).await?) }).await?;
        app.metrics().execs_started.inc();
        return Ok(extract::json(StatusCode::CREATED, &Exec::from(record)));
    }
    let waiting = async move {
        let record = engine.start_exec(&who, id, new).await?;
        app.metrics().execs_started.inc();
        Ok((StatusCode::CREATED, with_output(&engine, id, record).await?))
    };
    // An exec that was begun is answered with its state, whatever became of it. What fails late is that none was begun.
    stream::padded(StatusCode::CREATED, waiting, |error| async move { Err(error) }).await
}

fn wanted(body: CreateExec, start: bool, wait: bool) -> Result<NewExec, ApiError> {
    let argv = match (body.argv, body.shell) {
        (Some(argv), None) if argv.first().is_some_and(|program| !program.is_empty()) => argv,
        (Some(_), None) => return Err(ApiError::bad_field("argv", "argv names a program and its arguments; it can't be empty")),
        (None, Some(line)) => vec!["/bin/sh".to_owned(), "-c".to_owned(), line],
        _ => return Err(ApiError::bad_field("argv", "an exec has either 'argv' or 'shell'")),
    };
    if argv.iter().any(|part| part.contains('\0')) {
        return Err(ApiError::bad_field("argv", "an argument can't contain a NUL"));
    }
    let (stdin, stdin_open) = match body.stdin {
        None => (None, false),
        Some(Stdin::Open(open)) => (None, open),
        Some(Stdin::Text(text)) => (Some(text.into_bytes()), false),
    };
    Ok(NewExec {
        key: body.key,
        program: Program { argv, env: body.env, cwd: body.cwd, user: body.user },
        stdin,
        stdin_open,
        timeout_seconds: body.timeout_seconds,
        wait,
        start,
    })
}

/// An ended exec with what it printed.
async fn with_output(engine: &Engine, session: SessionId, record: ExecRecord) -> Result<Exec, ApiError> {
    let (stdout, cut_stdout) = shown(engine, session, JournalName::Stdout(record.id), record.stdout_bytes).await?;
    let (stderr, cut_stderr) = shown(engine, session, JournalName::Stderr(record.id), record.stderr_bytes).await?;
    let mut exec = Exec::from(record);
    exec.stdout = Some(stdout);
    exec.stderr = Some(stderr);
    exec.stdout_truncated = Some(cut_stdout);
    exec.stderr_truncated = Some(cut_stderr);
    Ok(exec)
}

/// The beginning of a stream as text, and whether there is more of it.
async fn shown(engine: &Engine, session: SessionId, journal: JournalName, length: Offset) -> Result<(String, bool), ApiError> {
    if length == Offset::ZERO {
        return Ok((String::new(), false));
    }
    let mut reader = engine.output(session, journal, Offset::ZERO).await?;
    let mut kept: Vec<u8> = Vec::new();
    while kept.len() < SHOWN {
        match reader.next(false).await? {
            OutputItem::Data { bytes, .. } => kept.extend_from_slice(&bytes[..bytes.len().min(SHOWN - kept.len())]),
            OutputItem::Gap { .. } | OutputItem::End => break,
        }
    }
    let cut = (kept.len() as u64) < length.0;
    Ok((text(&kept, cut), cut))
}

/// Bytes as text. A character that a cut has split is left out rather than shown as broken.
fn text(bytes: &[u8], cut: bool) -> String {
    let whole = match std::str::from_utf8(bytes) {
        Err(error) if cut && error.error_len().is_none() => &bytes[..error.valid_up_to()],
        _ => bytes,
    };
    String::from_utf8_lossy(whole).into_owned()
}

/// What a start answers where the server ended before it could. One that nobody has begun yet is begun.
pub(crate) async fn started_before(
    app: &AppState,
    who: &Principal,
    id: SessionId,
    exec: ExecId,
    uri: &Uri,
    body: &[u8],
) -> Result<Response, ApiError> {
    let (query, body): (StartQuery, CreateExec) = (extract::parse_query(uri)?, extract::parse_json(body)?);
    let start = query.start.or(body.start).unwrap_or(false);
    let new = wanted(body, start, query.wait == Some(true))?;
    let wait = new.wait;
    let record = app.engine().start_exec_again(who, id, exec, new).await?;
    if !wait {
        return Ok(extract::json(StatusCode::CREATED, &Exec::from(record)));
    }
    Ok(extract::json(StatusCode::CREATED, &with_output(app.engine(), id, record).await?))
}

/// List execs, newest first.
#[utoipa::path(get, path = "/v1/sessions/{id}/execs", tag = "execs", params(("id" = String, Path,), PageQuery),
    responses((status = 200, body = Page<Exec>), (status = "default", body = Problem)))]
pub(crate) async fn list(
    Shared(app): Shared<AppState>,
    SessionPath(id): SessionPath,
    Query(page): Query<PageQuery>,
) -> Result<Response, ApiError> {
    let found = app.engine().execs(id, page.limit()?, page.cursor()).await?;
    let items: Vec<Exec> = found.items.into_iter().map(Exec::from).collect();
    Ok(extract::ok(&Page { items, next_cursor: found.next_cursor.map(|cursor| cursor.0) }))
}

/// Show an exec.
#[utoipa::path(get, path = "/v1/sessions/{id}/execs/{exec}", tag = "execs", params(("id" = String, Path,), ("exec" = String, Path,)),
    responses((status = 200, body = Exec), (status = "default", body = Problem)))]
pub(crate) async fn show(
    Shared(app): Shared<AppState>,
    ExecPath(id, exec): ExecPath,
    _: Query<NoQuery>,
) -> Result<Response, ApiError> {
    Ok(extract::ok(&Exec::from(app.engine().exec(id, exec).await?)))
}

/// Send a signal to an exec and what it started.
#[utoipa::path(post, path = "/v1/sessions/{id}/execs/{exec}/signal", tag = "execs",
    params(("id" = String, Path,), ("exec" = String, Path,)), request_body = SignalExec,
    responses((status = 200, body = Exec), (status = 422, body = Problem), (status = "default", body = Problem)))]
pub(crate) async fn signal(
    Shared(app): Shared<AppState>,
    who: Principal,
    ExecPath(id, exec): ExecPath,
    _: Query<NoQuery>,
    Json(body): Json<SignalExec>,
) -> Result<Response, ApiError> {
    let record = app.engine().signal_exec(&who, id, exec, body.signal.number()).await?;
    Ok(extract::ok(&Exec::from(record)))
}

/// Whether the input ends.
#[derive(Debug, Default, serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct StdinQuery {
    /// End the input after this body.
    pub eof: Option<bool>,
}

/// Write the raw body to an exec's standard input.
#[utoipa::path(post, path = "/v1/sessions/{id}/execs/{exec}/stdin", tag = "execs",
    params(("id" = String, Path,), ("exec" = String, Path,), StdinQuery),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 200, body = StdinAnswer), (status = 422, body = Problem), (status = "default", body = Problem)))]
pub(crate) async fn stdin(
    Shared(app): Shared<AppState>,
    who: Principal,
    ExecPath(id, exec): ExecPath,
    Query(query): Query<StdinQuery>,
    body: Body,
) -> Result<Response, ApiError> {
    let written = Arc::new(AtomicU64::new(0));
    let bytes = counted(body, written.clone());
    app.engine().exec_stdin(&who, id, exec, bytes, query.eof.unwrap_or(false)).await?;
    Ok(extract::ok(&StdinAnswer { written_bytes: written.load(Ordering::Relaxed) }))
}

/// A body as a stream of bytes. One that is cut off ends in an error, never like one that is whole.
pub(crate) fn bytes_of(body: Body) -> ByteStream {
    Box::pin(body.into_data_stream().map(|chunk| chunk.map_err(io::Error::other)))
}

fn counted(body: Body, written: Arc<AtomicU64>) -> ByteStream {
    Box::pin(bytes_of(body).inspect(move |chunk: &io::Result<Bytes>| {
        if let Ok(bytes) = chunk {
            written.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exec(json: &str) -> Result<NewExec, ApiError> {
        wanted(serde_json::from_str(json).unwrap(), false, false)
    }

    #[test]
    fn an_exec_is_a_program_or_a_line() {
        assert_eq!(exec(r#"{"argv":["a","b"]}"#).unwrap().program.argv, ["a", "b"]);
        assert_eq!(exec(r#"{"shell":"echo $X"}"#).unwrap().program.argv, ["/bin/sh", "-c", "echo $X"]);
        for bad in ["{}", r#"{"argv":[]}"#, r#"{"argv":[""]}"#, r#"{"argv":["a"],"shell":"b"}"#, r#"{"argv":["a","b\u0000"]}"#] {
            assert!(exec(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn standard_input_is_given_left_open_or_ended() {
        let input = |json: &str| exec(json).map(|new| (new.stdin, new.stdin_open)).unwrap();
        assert_eq!(input(r#"{"argv":["cat"]}"#), (None, false));
        assert_eq!(input(r#"{"argv":["cat"],"stdin":true}"#), (None, true));
        assert_eq!(input(r#"{"argv":["cat"],"stdin":"hi"}"#), (Some(b"hi".to_vec()), false));
    }

    #[test]
    fn a_character_split_by_the_cut_is_left_out() {
        assert_eq!(text("aé".as_bytes(), false), "aé");
        assert_eq!(text(&"aé".as_bytes()[..2], true), "a");
        assert_eq!(text(&"aé".as_bytes()[..2], false), "a\u{fffd}");
        assert_eq!(text(b"\xffa", true), "\u{fffd}a");
    }
}
