//! Terminals: opening, listing, looking at their screens, reading what they printed.

use super::exec_output;
use crate::{
    AppState,
    auth::Principal,
    error::ApiError,
    extract::{self, Json, NoQuery, Query, SessionPath, TerminalPath},
    stream::{self, Format, Gone, Items},
};
use api_types::{CreateTerminal, OutputLine, Page, Problem, Terminal};
use axum::{
    extract::State as Shared,
    response::{IntoResponse, Response},
};
use engine::{NewTerminal, OutputItem, OutputReader};
use http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use model::{Offset, SessionId, TerminalId};
use wire::{
    layout::JournalName,
    records::{Program, TerminalRecord},
    terminal::MAX_SIDE,
};

/// Whether to start a stopped session.
#[derive(Debug, Default, serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct StartQuery {
    /// Start a stopped session for it.
    pub start: Option<bool>,
}

/// Open a terminal.
#[utoipa::path(post, path = "/v1/sessions/{id}/terminals", tag = "terminals", params(("id" = String, Path,), StartQuery),
    request_body = CreateTerminal, responses((status = 201, body = Terminal), (status = "default", body = Problem)))]
pub(crate) async fn create(
    Shared(app): Shared<AppState>,
    who: Principal,
    SessionPath(id): SessionPath,
    Query(query): Query<StartQuery>,
    Json(body): Json<CreateTerminal>,
) -> Result<Response, ApiError> {
    let terminal = wanted(query, body)?;
    let engine = app.engine().clone();
    let record = stream::begun(async move { Ok(engine.open_terminal(&who, id, terminal).await?) }).await?;
    app.metrics().terminals_opened.inc();
    Ok(extract::json(StatusCode::CREATED, &Terminal::from(record)))
}

fn wanted(query: StartQuery, body: CreateTerminal) -> Result<NewTerminal, ApiError> {
    for (field, side) in [("cols", body.cols), ("rows", body.rows)] {
        if side == 0 || side > MAX_SIDE {
            return Err(ApiError::bad_field(field, format!("{field} is from 1 to {MAX_SIDE}, not {side}")));
        }
    }
    if body.argv.as_ref().is_some_and(|argv| argv.first().is_none_or(String::is_empty)) {
        return Err(ApiError::bad_field("argv", "argv names a program and its arguments; leave it out for a login shell"));
    }
    Ok(NewTerminal {
        name: body.name,
        program: Program { argv: body.argv.unwrap_or_default(), env: body.env, cwd: body.cwd, user: None },
        cols: body.cols,
        rows: body.rows,
        start: query.start.unwrap_or(false),
    })
}

/// What opening answers where the server ended before it could. One that nobody has opened yet is opened.
pub(crate) async fn opened_before(
    app: &AppState,
    who: &Principal,
    id: SessionId,
    terminal: TerminalId,
    uri: &Uri,
    body: &[u8],
) -> Result<Response, ApiError> {
    let new = wanted(extract::parse_query(uri)?, extract::parse_json(body)?)?;
    let record = app.engine().open_terminal_again(who, id, terminal, new).await?;
    Ok(extract::json(StatusCode::CREATED, &Terminal::from(record)))
}

/// List terminals, newest first.
#[utoipa::path(get, path = "/v1/sessions/{id}/terminals", tag = "terminals", params(("id" = String, Path,)),
    responses((status = 200, body = Page<Terminal>), (status = "default", body = Problem)))]
pub(crate) async fn list(
    Shared(app): Shared<AppState>,
    SessionPath(id): SessionPath,
    _: Query<NoQuery>,
) -> Result<Response, ApiError> {
    let items: Vec<Terminal> = app.engine().terminals(id).await?.into_iter().map(Terminal::from).collect();
    Ok(extract::ok(&Page::whole(items)))
}

/// Show a terminal.
#[utoipa::path(get, path = "/v1/sessions/{id}/terminals/{terminal}", tag = "terminals",
    params(("id" = String, Path,), ("terminal" = String, Path,)),
    responses((status = 200, body = Terminal), (status = "default", body = Problem)))]
pub(crate) async fn show(
    Shared(app): Shared<AppState>,
    TerminalPath(id, terminal): TerminalPath,
    _: Query<NoQuery>,
) -> Result<Response, ApiError> {
    Ok(extract::ok(&Terminal::from(app.engine().terminal(id, terminal).await?)))
}

/// Close a terminal: its program gets a hangup.
#[utoipa::path(delete, path = "/v1/sessions/{id}/terminals/{terminal}", tag = "terminals",
    params(("id" = String, Path,), ("terminal" = String, Path,)), responses((status = 204), (status = "default", body = Problem)))]
pub(crate) async fn close(
    Shared(app): Shared<AppState>,
    who: Principal,
    TerminalPath(id, terminal): TerminalPath,
    _: Query<NoQuery>,
) -> Result<StatusCode, ApiError> {
    app.engine().close_terminal(&who, id, terminal).await?;
    Ok(super::done())
}

/// In which form a screen is shown.
#[derive(Debug, Default, serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ScreenQuery {
    /// `text` (where missing), `ansi` or `json`.
    pub format: Option<String>,
}

/// What a terminal shows now: as text, as bytes that redraw it, or as JSON.
#[utoipa::path(get, path = "/v1/sessions/{id}/terminals/{terminal}/screen", tag = "terminals",
    params(("id" = String, Path,), ("terminal" = String, Path,), ScreenQuery),
    responses((status = 200, body = String, content_type = "text/plain"), (status = "default", body = Problem)))]
pub(crate) async fn screen(
    Shared(app): Shared<AppState>,
    TerminalPath(id, terminal): TerminalPath,
    Query(query): Query<ScreenQuery>,
) -> Result<Response, ApiError> {
    let format = query.format.as_deref().unwrap_or("text");
    if !matches!(format, "text" | "ansi" | "json") {
        let shown: String = format.chars().take(40).collect();
        return Err(ApiError::bad_field("format", format!("'{shown}' is not one of: text, ansi, json")));
    }
    let screen = app.engine().screen(id, terminal).await?;
    let mut response = match format {
        "json" => extract::ok(&screen.json),
        "ansi" => stream::raw(futures_util::stream::iter([Ok::<_, std::io::Error>(screen.ansi.into())])),
        _ => {
            let mut response = screen.text.into_response();
            response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
            response
        }
    };
    stream::harden(response.headers_mut());
    response.headers_mut().insert("dormouse-offset", HeaderValue::from(screen.offset.0));
    Ok(response)
}

/// Which part of a stream, and how.
#[derive(Debug, Default, serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct OutputQuery {
    pub from: Option<u64>,
    /// Go on until it has ended.
    pub follow: Option<bool>,
}

/// Output of a terminal, as for execs; the stream is `tty`.
#[utoipa::path(get, path = "/v1/sessions/{id}/terminals/{terminal}/output", tag = "terminals",
    params(("id" = String, Path,), ("terminal" = String, Path,), OutputQuery),
    responses((status = 200, body = OutputLine, content_type = "application/x-ndjson"), (status = "default", body = Problem)))]
pub(crate) async fn output(
    Shared(app): Shared<AppState>,
    TerminalPath(id, terminal): TerminalPath,
    Query(query): Query<OutputQuery>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let engine = app.engine().clone();
    let record = engine.terminal(id, terminal).await?;
    let follow = query.follow.unwrap_or(false);
    let from = from_offset(&query, &headers);
    let journal = JournalName::Terminal(terminal);
    if stream::accepts(&headers, "application/octet-stream") {
        return exec_output::raw(&app, id, journal, from, Some(record.output_bytes), follow).await;
    }
    let mut reader = engine.output(id, journal, from).await?;
    let stop = app.stop().clone();
    Ok(stream::items(Format::of(&headers), move |items| async move {
        tokio::select! {
            told = tell(&mut reader, &items, follow, "tty") => told?,
            () = stop.cancelled() => return Ok(()),
        }
        let record = if follow { engine.terminal(id, terminal).await.map_err(|_| Gone)? } else { record };
        tell_end(&items, &reader, record).await
    }))
}

/// Where to begin: what `Last-Event-ID` says goes before what the query says.
pub(crate) fn from_offset(query: &OutputQuery, headers: &HeaderMap) -> Offset {
    let last = headers.get("last-event-id").and_then(|value| value.to_str().ok()).and_then(|text| text.parse().ok());
    Offset(last.or(query.from).unwrap_or(0))
}

/// Tells one stream, up to what is there or, with `follow`, up to its end.
pub(crate) async fn tell(reader: &mut OutputReader, items: &Items, follow: bool, of: &str) -> Result<(), Gone> {
    loop {
        let (line, end) = match reader.next(follow).await.map_err(|_| Gone)? {
            OutputItem::Data { offset, bytes } => {
                let line = if of == "tty" { OutputLine::tty(offset, &bytes) } else { OutputLine::stdout(offset, &bytes) };
                (line, offset.plus(bytes.len()))
            }
            OutputItem::Gap { from, to } => (OutputLine::Gap { of: of.to_owned(), from, to }, to),
            OutputItem::End => return Ok(()),
        };
        items.send(&end.to_string(), None, &line).await?;
    }
}

async fn tell_end(items: &Items, reader: &OutputReader, record: TerminalRecord) -> Result<(), Gone> {
    if record.ended_at.is_none() {
        return Ok(());
    }
    let exit = OutputLine::Exit {
        state: record.state.as_str().to_owned(),
        exit_code: record.exit_code,
        signal: record.signal,
        reason: record.reason,
    };
    items.send(&reader.position().to_string(), None, &exit).await
}
