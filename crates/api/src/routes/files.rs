//! Files of a session, running or asleep: raw bytes both ways, and what is known about them.

use super::execs::bytes_of;
use crate::{
    AppState,
    auth::Principal,
    error::ApiError,
    extract::{self, Json, Query, SessionPath},
    stream::{self, Format, Gone},
};
use api_types::{FileMeta, Mkdir, Move, Page, Problem, ProblemCode, WatchEvent};
use axum::{body::Body, extract::State as Shared, response::Response};
use bytes::BytesMut;
use engine::{ByteStream, FileAnswer};
use futures_util::StreamExt;
use http::{HeaderValue, StatusCode, header};
use model::{Offset, SessionId};
use serde::de::DeserializeOwned;
use wire::files::{FileReply, FileRequest};

/// The longest line that a list or a watch may have: two long paths with every character escaped.
const MAX_LINE: usize = 128 * 1024;
/// Most entries of one list.
const MAX_ENTRIES: usize = 1_000_000;

/// Which file.
#[derive(Debug, Default, serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct PathQuery {
    /// Absolute, or relative to `/`.
    pub path: String,
    /// Start a stopped session for it.
    pub start: Option<bool>,
}

/// Which bytes of which file.
#[derive(Debug, Default, serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ReadQuery {
    pub path: String,
    /// The first byte; 0 where missing.
    pub offset: Option<u64>,
    /// How many bytes; to the end where missing.
    pub length: Option<u64>,
    pub start: Option<bool>,
}

/// What to write.
#[derive(Debug, Default, serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct WriteQuery {
    pub path: String,
    /// Permission bits in octal, such as `755`; those of the old file, else `644`, where missing.
    pub mode: Option<String>,
    /// Make missing parents.
    pub parents: Option<bool>,
    pub start: Option<bool>,
}

/// What to delete.
#[derive(Debug, Default, serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct RemoveQuery {
    pub path: String,
    /// A directory with all that is in it.
    pub recursive: Option<bool>,
    pub start: Option<bool>,
}

/// What to look at.
#[derive(Debug, Default, serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct StatQuery {
    pub path: String,
    /// `true`: what a link leads to. Where missing the link itself.
    pub follow: Option<bool>,
    pub start: Option<bool>,
}

/// What to list.
#[derive(Debug, Default, serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    pub path: String,
    /// 1, the directory's own entries, where missing.
    pub depth: Option<u32>,
    pub start: Option<bool>,
}

/// What to watch.
#[derive(Debug, Default, serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct WatchQuery {
    pub path: String,
    /// Directories below, too.
    pub recursive: Option<bool>,
    pub start: Option<bool>,
}

/// A path that can name a file at all; what it leads to, only the session knows.
fn checked(path: String) -> Result<String, ApiError> {
    if path.is_empty() {
        return Err(ApiError::bad_field("path", "a path can't be empty"));
    }
    if path.contains('\0') {
        return Err(ApiError::bad_field("path", "a path can't contain a NUL"));
    }
    if path.len() >= 4096 {
        return Err(ApiError::bad_field("path", "a path has fewer than 4096 bytes"));
    }
    if path.split('/').any(|part| part == "..") {
        return Err(ApiError::bad_field("path", "a path can't contain '..'"));
    }
    Ok(path)
}

async fn ask(
    app: &AppState,
    who: &Principal,
    id: SessionId,
    request: FileRequest,
    body: Option<ByteStream>,
    start: Option<bool>,
) -> Result<FileAnswer, ApiError> {
    Ok(app.engine().file(who, id, request, body, start.unwrap_or(false)).await?)
}

fn stream_of(answer: FileAnswer) -> Result<ByteStream, ApiError> {
    answer.bytes.ok_or_else(|| ApiError::new(ProblemCode::Internal, "the session answered without the bytes that were asked for"))
}

fn last_name(path: &str) -> &str {
    path.trim_end_matches('/').rsplit('/').next().unwrap_or(path)
}

/// Read a file's bytes.
#[utoipa::path(get, path = "/v1/sessions/{id}/files", tag = "files", params(("id" = String, Path,), ReadQuery),
    responses((status = 200, body = Vec<u8>, content_type = "application/octet-stream"), (status = "default", body = Problem)))]
pub(crate) async fn read(
    Shared(app): Shared<AppState>,
    who: Principal,
    SessionPath(id): SessionPath,
    Query(query): Query<ReadQuery>,
) -> Result<Response, ApiError> {
    let path = checked(query.path)?;
    let request = FileRequest::Read { path: path.clone(), offset: Offset(query.offset.unwrap_or(0)), length: query.length };
    let answer = ask(&app, &who, id, request, None, query.start).await?;
    Ok(stream::named(stream::raw(stream_of(answer)?), last_name(&path)))
}

/// Write a file: replaced as a whole once every byte has come and is on the disk. A body that is cut off leaves the old file.
#[utoipa::path(put, path = "/v1/sessions/{id}/files", tag = "files", params(("id" = String, Path,), WriteQuery),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 204), (status = "default", body = Problem)))]
pub(crate) async fn write(
    Shared(app): Shared<AppState>,
    who: Principal,
    SessionPath(id): SessionPath,
    Query(query): Query<WriteQuery>,
    body: Body,
) -> Result<StatusCode, ApiError> {
    let mode = query.mode.as_deref().map(octal).transpose()?;
    let request = FileRequest::Write { path: checked(query.path)?, mode, parents: query.parents.unwrap_or(false) };
    ask(&app, &who, id, request, Some(bytes_of(body)), query.start).await?;
    Ok(super::done())
}

fn octal(text: &str) -> Result<u32, ApiError> {
    match u32::from_str_radix(text.strip_prefix("0o").unwrap_or(text), 8) {
        Ok(mode) if mode <= 0o7777 => Ok(mode),
        _ => Err(ApiError::bad_field("mode", "a mode is octal, such as 644 or 0755")),
    }
}

/// Delete a file, or with `recursive` a directory.
#[utoipa::path(delete, path = "/v1/sessions/{id}/files", tag = "files", params(("id" = String, Path,), RemoveQuery),
    responses((status = 204), (status = "default", body = Problem)))]
pub(crate) async fn remove(
    Shared(app): Shared<AppState>,
    who: Principal,
    SessionPath(id): SessionPath,
    Query(query): Query<RemoveQuery>,
) -> Result<StatusCode, ApiError> {
    let request = FileRequest::Remove { path: checked(query.path)?, recursive: query.recursive.unwrap_or(false) };
    ask(&app, &who, id, request, None, query.start).await?;
    Ok(super::done())
}

/// What is known about a file.
#[utoipa::path(get, path = "/v1/sessions/{id}/files/stat", tag = "files", params(("id" = String, Path,), StatQuery),
    responses((status = 200, body = serde_json::Value, description = "`{path, type, size_bytes, mode, uid, gid, modified_at, target}`"),
        (status = "default", body = Problem)))]
pub(crate) async fn stat(
    Shared(app): Shared<AppState>,
    who: Principal,
    SessionPath(id): SessionPath,
    Query(query): Query<StatQuery>,
) -> Result<Response, ApiError> {
    let request = FileRequest::Stat { path: checked(query.path)?, follow: query.follow.unwrap_or(false) };
    match ask(&app, &who, id, request, None, query.start).await?.reply {
        FileReply::Meta { meta } => Ok(extract::ok(&meta)),
        FileReply::Done | FileReply::Streaming => {
            Err(ApiError::new(ProblemCode::Internal, "the session told nothing about the file"))
        }
    }
}

/// List a directory. All entries are on one page.
#[utoipa::path(get, path = "/v1/sessions/{id}/files/list", tag = "files", params(("id" = String, Path,), ListQuery),
    responses((status = 200, body = serde_json::Value, description = "`{\"items\": […], \"next_cursor\": null}`, items as of `stat`"),
        (status = "default", body = Problem)))]
pub(crate) async fn list(
    Shared(app): Shared<AppState>,
    who: Principal,
    SessionPath(id): SessionPath,
    Query(query): Query<ListQuery>,
) -> Result<Response, ApiError> {
    let depth = query.depth.unwrap_or(1);
    if depth == 0 {
        return Err(ApiError::bad_field("depth", "a depth is at least 1"));
    }
    let request = FileRequest::List { path: checked(query.path)?, depth };
    let answer = ask(&app, &who, id, request, None, query.start).await?;
    let mut lines = JsonLines::new(stream_of(answer)?);
    let mut items: Vec<FileMeta> = Vec::new();
    while let Some(meta) = lines.next().await? {
        if items.len() == MAX_ENTRIES {
            return Err(ApiError::new(
                ProblemCode::TooLarge,
                format!("more than {MAX_ENTRIES} entries: list a part of it, or less deep"),
            ));
        }
        items.push(meta);
    }
    Ok(extract::ok(&Page::whole(items)))
}

/// JSON values from a stream that a session fills: a line that is too long or isn't JSON ends it with an error.
struct JsonLines {
    bytes: ByteStream,
    rest: BytesMut,
}

impl JsonLines {
    fn new(bytes: ByteStream) -> JsonLines {
        JsonLines { bytes, rest: BytesMut::new() }
    }

    async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, ApiError> {
        loop {
            while let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line = self.rest.split_to(end + 1);
                if !line.trim_ascii().is_empty() {
                    return serde_json::from_slice(&line).map(Some).map_err(|_| broken("a line that isn't what was asked for"));
                }
            }
            if self.rest.len() > MAX_LINE {
                return Err(broken("a line without an end"));
            }
            match self.bytes.next().await {
                Some(Ok(chunk)) => self.rest.extend_from_slice(&chunk),
                Some(Err(error)) => return Err(broken(&error.to_string())),
                None if self.rest.is_empty() => return Ok(None),
                None => return Err(broken("half a line")),
            }
        }
    }
}

fn broken(what: &str) -> ApiError {
    ApiError::new(ProblemCode::Lost, format!("the session's answer broke off: {what}"))
}

/// Make a directory.
#[utoipa::path(post, path = "/v1/sessions/{id}/files/mkdir", tag = "files", params(("id" = String, Path,), super::terminals::StartQuery),
    request_body = Mkdir, responses((status = 204), (status = "default", body = Problem)))]
pub(crate) async fn mkdir(
    Shared(app): Shared<AppState>,
    who: Principal,
    SessionPath(id): SessionPath,
    Query(query): Query<super::terminals::StartQuery>,
    Json(body): Json<Mkdir>,
) -> Result<StatusCode, ApiError> {
    let request = FileRequest::Mkdir { path: checked(body.path)?, parents: body.parents };
    ask(&app, &who, id, request, None, query.start).await?;
    Ok(super::done())
}

/// Move a file or directory.
#[utoipa::path(post, path = "/v1/sessions/{id}/files/move", tag = "files", params(("id" = String, Path,), super::terminals::StartQuery),
    request_body = Move, responses((status = 204), (status = "default", body = Problem)))]
pub(crate) async fn rename(
    Shared(app): Shared<AppState>,
    who: Principal,
    SessionPath(id): SessionPath,
    Query(query): Query<super::terminals::StartQuery>,
    Json(body): Json<Move>,
) -> Result<StatusCode, ApiError> {
    let request = FileRequest::Move { from: checked(body.from)?, to: checked(body.to)? };
    ask(&app, &who, id, request, None, query.start).await?;
    Ok(super::done())
}

/// Changes of a file or directory as server-sent events, until the client closes or the sandbox ends, as by a hibernate.
///
/// Files are looked at several times a second, more seldom where there are many: what happens and is undone in between isn't
/// told, and the events of one look have no order in time. A link is not followed. What is watched may go and come back.
/// `overflow` says that more happened than can be told, or that there are more than 100,000 files, of which the rest isn't
/// watched.
#[utoipa::path(get, path = "/v1/sessions/{id}/files/watch", tag = "files", params(("id" = String, Path,), WatchQuery),
    responses((status = 200, body = serde_json::Value, content_type = "text/event-stream", description = "`{kind, path, is_dir}`; kinds: `created`, `modified`, `removed`, `moved_from` and `moved_to` (one after the other), `overflow`"),
        (status = "default", body = Problem)))]
pub(crate) async fn watch(
    Shared(app): Shared<AppState>,
    who: Principal,
    SessionPath(id): SessionPath,
    Query(query): Query<WatchQuery>,
) -> Result<Response, ApiError> {
    let request = FileRequest::Watch { path: checked(query.path)?, recursive: query.recursive.unwrap_or(false) };
    let answer = ask(&app, &who, id, request, None, query.start).await?;
    let mut lines = JsonLines::new(stream_of(answer)?);
    let stop = app.stop().clone();
    Ok(stream::items(Format::Events, move |items| async move {
        loop {
            let event: Option<WatchEvent> = tokio::select! {
                event = lines.next() => event.map_err(|_| Gone)?,
                () = stop.cancelled() => None,
            };
            let Some(event) = event else { return Ok(()) };
            let kind = event.kind.clone();
            items.send("", Some(&kind), &event).await?;
        }
    }))
}

/// A file or directory as a tar.
#[utoipa::path(get, path = "/v1/sessions/{id}/archive", tag = "files", params(("id" = String, Path,), PathQuery),
    responses((status = 200, body = Vec<u8>, content_type = "application/x-tar"), (status = "default", body = Problem)))]
pub(crate) async fn pack(
    Shared(app): Shared<AppState>,
    who: Principal,
    SessionPath(id): SessionPath,
    Query(query): Query<PathQuery>,
) -> Result<Response, ApiError> {
    let path = checked(query.path)?;
    let answer = ask(&app, &who, id, FileRequest::Archive { path: path.clone() }, None, query.start).await?;
    let mut response = stream::named(stream::raw(stream_of(answer)?), &format!("{}.tar", last_name(&path)));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-tar"));
    Ok(response)
}

/// Unpack a tar into a directory, which is made where it is missing.
#[utoipa::path(put, path = "/v1/sessions/{id}/archive", tag = "files", params(("id" = String, Path,), PathQuery),
    request_body(content = Vec<u8>, content_type = "application/x-tar"), responses((status = 204), (status = "default", body = Problem)))]
pub(crate) async fn unpack(
    Shared(app): Shared<AppState>,
    who: Principal,
    SessionPath(id): SessionPath,
    Query(query): Query<PathQuery>,
    body: Body,
) -> Result<StatusCode, ApiError> {
    let request = FileRequest::Unpack { path: checked(query.path)? };
    ask(&app, &who, id, request, Some(bytes_of(body)), query.start).await?;
    Ok(super::done())
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    #[test]
    fn paths_that_name_no_file_are_refused() {
        for good in ["/etc/motd", "a b", "/new\nline", "/...", &"x".repeat(255)] {
            assert!(checked(good.to_owned()).is_ok(), "{good:?}");
        }
        for bad in ["", "/a/../b", "..", "a\0b", &"x/".repeat(3000)] {
            assert!(checked(bad.to_owned()).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn modes_are_octal() {
        assert_eq!(octal("755").unwrap(), 0o755);
        assert_eq!(octal("0644").unwrap(), 0o644);
        for bad in ["8", "rwx", "", "77777"] {
            assert!(octal(bad).is_err(), "{bad}");
        }
    }

    async fn lines(chunks: &[&'static str]) -> Result<Vec<u64>, ApiError> {
        let chunks: Vec<std::io::Result<Bytes>> = chunks.iter().map(|chunk| Ok(Bytes::from_static(chunk.as_bytes()))).collect();
        let mut reader = JsonLines::new(Box::pin(futures_util::stream::iter(chunks)));
        let mut all = Vec::new();
        while let Some(value) = reader.next().await? {
            all.push(value);
        }
        Ok(all)
    }

    #[tokio::test]
    async fn lines_come_in_any_pieces_and_whole() {
        assert_eq!(lines(&["1\n2", "3\n", "\n4\n"]).await.unwrap(), [1, 23, 4]);
        assert!(lines(&["1\n2"]).await.is_err(), "half a line is no value");
        assert!(lines(&["1\nx\n"]).await.is_err());
    }
}
