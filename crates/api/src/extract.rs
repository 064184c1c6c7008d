//! Reading requests strictly: what isn't understood is refused by name, never ignored.

use crate::{auth::Principal, error::ApiError};
use api_types::ProblemCode;
use axum::{
    body::Body,
    extract::{FromRequest, FromRequestParts, RawPathParams, Request},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use http::{StatusCode, Uri, header, request::Parts};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use model::{ExecId, OperationId, SessionId, SnapshotId, TerminalId, TokenId};
use serde::{Serialize, de::DeserializeOwned};
use std::str::FromStr;

/// The largest JSON body that is read.
pub(crate) const MAX_JSON: usize = 1024 * 1024;

/// A JSON body. An empty one is `{}`; the content type isn't looked at.
pub(crate) struct Json<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Json<T> {
    type Rejection = ApiError;
    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        parse_json(&read_body(request.into_body(), MAX_JSON).await?).map(Json)
    }
}

/// A whole body of `limit` bytes at most.
pub(crate) async fn read_body(body: Body, limit: usize) -> Result<Bytes, ApiError> {
    match Limited::new(body, limit).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => {
            Err(ApiError::new(ProblemCode::TooLarge, format!("the body is larger than {limit} bytes")))
        }
        Err(_) => Err(ApiError::bad_request("the body ended before all of it had come")),
    }
}

/// Reads a request from JSON.
pub(crate) fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let bytes = if bytes.iter().all(u8::is_ascii_whitespace) { b"{}" } else { bytes };
    if bytes.trim_ascii_start().first() != Some(&b'{') {
        // A list would be taken for the fields in their order.
        let checked = serde_json::from_slice::<serde::de::IgnoredAny>(bytes);
        return Err(checked.err().map_or_else(|| ApiError::bad_request("the body is a JSON object"), |e| refuse_json(".", &e)));
    }
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let path = error.path().to_string();
        refuse_json(&path, error.inner())
    })?;
    reader.end().map_err(|error| refuse_json(".", &error))?;
    Ok(value)
}

fn refuse_json(path: &str, error: &serde_json::Error) -> ApiError {
    let text = error.to_string();
    if error.is_syntax() || error.is_eof() {
        return ApiError::bad_request(format!("the body is not valid JSON: {text}"));
    }
    if let Some(field) = unknown_field(&text) {
        return ApiError::unknown_field(&field, format!("the body has a field that isn't known here: {text}"));
    }
    if path == "." {
        return ApiError::bad_request(format!("the body can't be taken: {text}"));
    }
    ApiError::bad_field(path, format!("the field '{path}' can't be taken: {text}"))
}

/// The name in serde's refusal of an unknown field.
fn unknown_field(text: &str) -> Option<String> {
    let (_, rest) = text.split_once("unknown field `")?;
    let (field, _) = rest.split_once('`')?;
    Some(field.to_owned())
}

/// Query parameters; `access_token` is never among them.
pub(crate) struct Query<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Query<T> {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        parse_query(&parts.uri).map(Query)
    }
}

/// Reads query parameters. One that isn't known is refused by name.
pub(crate) fn parse_query<T: DeserializeOwned>(uri: &Uri) -> Result<T, ApiError> {
    let without_token;
    let uri = match uri.query() {
        Some(query) if query.contains("access_token") => {
            let kept: Vec<&str> = query.split('&').filter(|pair| !pair.starts_with("access_token=")).collect();
            without_token = format!("/?{}", kept.join("&"));
            &without_token.parse::<Uri>().map_err(|_| ApiError::bad_request("the query can't be read"))?
        }
        _ => uri,
    };
    axum::extract::Query::try_from_uri(uri).map(|query| query.0).map_err(|rejection| {
        let text = rejection.body_text();
        let text = text.strip_prefix("Failed to deserialize query string: ").unwrap_or(&text);
        match unknown_field(text) {
            Some(field) => ApiError::unknown_field(&field, format!("the query has a parameter that isn't known here: {text}")),
            None => ApiError::bad_request(format!("the query can't be taken: {text}")),
        }
    })
}

/// A call that takes no query parameters.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NoQuery {}

/// Where a page of a list begins, and how much it holds.
#[derive(Debug, Default, serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct PageQuery {
    /// 1 to 1,000; 100 where missing.
    pub limit: Option<usize>,
    /// The `next_cursor` of the page before.
    pub cursor: Option<String>,
}

impl PageQuery {
    pub(crate) fn limit(&self) -> Result<usize, ApiError> {
        page_limit(self.limit)
    }

    pub(crate) fn cursor(&self) -> Option<store::Cursor> {
        self.cursor.clone().map(store::Cursor)
    }
}

/// The number of items that a list shows.
pub(crate) fn page_limit(asked: Option<usize>) -> Result<usize, ApiError> {
    match asked.unwrap_or(100) {
        limit @ 1..=store::MAX_PAGE => Ok(limit),
        other => Err(ApiError::bad_field("limit", format!("a limit is from 1 to {}, not {other}", store::MAX_PAGE))),
    }
}

/// One part of the path; a text that isn't an id names nothing.
async fn path_id<S: Send + Sync, T: FromStr>(parts: &mut Parts, state: &S, name: &str, what: &str) -> Result<T, ApiError> {
    let text = path_text(parts, state, name).await?;
    let shown: String = text.chars().take(80).collect();
    text.parse().map_err(|_| ApiError::not_found(format!("there is no {what} '{shown}'")))
}

/// One part of the path as text, percent-decoded.
pub(crate) async fn path_text<S: Send + Sync>(parts: &mut Parts, state: &S, name: &str) -> Result<String, ApiError> {
    let params = RawPathParams::from_request_parts(parts, state)
        .await
        .map_err(|_| ApiError::not_found("the path is not valid UTF-8, so it names nothing"))?;
    let value = params.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_owned());
    value.ok_or_else(|| ApiError::not_found("there is no such address"))
}

/// The session of the path, which the caller's token reaches.
#[derive(Clone, Copy)]
pub(crate) struct SessionPath(pub SessionId);

impl<S: Send + Sync> FromRequestParts<S> for SessionPath {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let id: SessionId = path_id(parts, state, "id", "session").await?;
        match parts.extensions.get::<Principal>() {
            Some(principal) => principal.require_session(id)?,
            None => return Err(ApiError::new(ProblemCode::Unauthorized, "a token is needed")),
        }
        Ok(SessionPath(id))
    }
}

macro_rules! inner_paths {
    ($($(#[$doc:meta])* $name:ident($id:ty) = $param:literal),+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) struct $name(pub SessionId, pub $id);

        impl<S: Send + Sync> FromRequestParts<S> for $name {
            type Rejection = ApiError;
            async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
                let SessionPath(session) = SessionPath::from_request_parts(parts, state).await?;
                Ok($name(session, path_id(parts, state, $param, $param).await?))
            }
        }
    )+};
}
inner_paths! {
    /// An exec of the path's session.
    ExecPath(ExecId) = "exec",
    /// A terminal of the path's session.
    TerminalPath(TerminalId) = "terminal"
}

macro_rules! plain_paths {
    ($($(#[$doc:meta])* $name:ident($id:ty) = $param:literal),+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) struct $name(pub $id);

        impl<S: Send + Sync> FromRequestParts<S> for $name {
            type Rejection = ApiError;
            async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
                Ok($name(path_id(parts, state, $param, $param).await?))
            }
        }
    )+};
}
plain_paths! {
    /// An operation.
    OperationPath(OperationId) = "operation",
    /// A snapshot; whether the caller reaches it, its row tells.
    SnapshotPath(SnapshotId) = "snapshot",
    /// A token.
    TokenPath(TokenId) = "token"
}

/// A JSON answer.
pub(crate) fn json<T: Serialize>(status: StatusCode, value: &T) -> Response {
    match serde_json::to_vec(value) {
        Ok(body) => (status, [(header::CONTENT_TYPE, "application/json")], body).into_response(),
        Err(error) => {
            tracing::error!(%error, "an answer can't be written as JSON");
            ApiError::new(ProblemCode::Internal, "the answer can't be written as JSON").into_response()
        }
    }
}

/// A JSON answer with status 200.
pub(crate) fn ok<T: Serialize>(value: &T) -> Response {
    json(StatusCode::OK, value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use api_types::{CreateExec, CreateSession};

    fn refusal<T: DeserializeOwned>(text: &str) -> Box<api_types::Problem> {
        match parse_json::<T>(text.as_bytes()) {
            Err(error) => error.0,
            Ok(_) => panic!("{text} was taken"),
        }
    }

    #[test]
    fn an_empty_body_is_an_empty_object() {
        for empty in ["", "  \n", "{}"] {
            assert_eq!(parse_json::<CreateSession>(empty.as_bytes()).unwrap(), CreateSession::default(), "{empty:?}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let unknown = refusal::<CreateSession>(r#"{"kee":1}"#);
        assert_eq!((unknown.code, unknown.field.as_deref()), (ProblemCode::UnknownField, Some("kee")));
        let nested = refusal::<CreateSession>(r#"{"source":{"git":"x","branch":"y"}}"#);
        assert_eq!((nested.code, nested.field.as_deref()), (ProblemCode::UnknownField, Some("branch")));
        let value = refusal::<CreateExec>(r#"{"argv":["a",7]}"#);
        assert_eq!((value.code, value.field.as_deref()), (ProblemCode::BadRequest, Some("argv[1]")));
        let broken = refusal::<CreateExec>("{\"argv\":\n [}");
        assert_eq!(broken.code, ProblemCode::BadRequest);
        assert!(broken.detail.contains("line 2"), "{}", broken.detail);
        assert!(refusal::<CreateExec>("{} {}").detail.contains("trailing"), "two objects are one too many");
        assert_eq!(refusal::<CreateExec>("[]").code, ProblemCode::BadRequest);
        assert_eq!(refusal::<CreateExec>("\u{fffd}").status, 400);
    }

    #[test]
    fn queries_are_as_strict_as_bodies() {
        let uri = |text: &str| text.parse::<Uri>().unwrap();
        let page: PageQuery = parse_query(&uri("/x?limit=7&access_token=se%26cret")).unwrap();
        assert_eq!(page.limit, Some(7));
        let refused = parse_query::<PageQuery>(&uri("/x?limt=7")).err().unwrap();
        assert_eq!((refused.0.code, refused.0.field.as_deref()), (ProblemCode::UnknownField, Some("limt")));
        assert_eq!(parse_query::<PageQuery>(&uri("/x?limit=-1")).err().unwrap().0.status, 400);
        assert!(page_limit(Some(0)).is_err() && page_limit(Some(1001)).is_err() && page_limit(Some(1000)).is_ok());
    }
}
