//! How a refusal or a failure becomes an answer: every error leaves as one `application/problem+json`.

use api_types::{PROBLEM_JSON, Problem, ProblemCode};
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use store::StoreError;

/// Whoever stands before a token's limit needn't ask more often than this: sessions end by the second, not faster.
const LIMIT_RETRY_SECONDS: u64 = 5;

/// A problem on its way to the client.
#[derive(Debug, Clone)]
pub struct ApiError(pub Box<Problem>);

/// Left on an answer that certainly changed nothing, so that its idempotency key can be used again.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChangedNothing;

impl ApiError {
    /// A problem with what its code says of it.
    pub fn new(code: ProblemCode, detail: impl Into<String>) -> ApiError {
        ApiError(Box::new(Problem::new(code, detail)))
    }

    pub(crate) fn bad_request(detail: impl Into<String>) -> ApiError {
        ApiError::new(ProblemCode::BadRequest, detail)
    }

    pub(crate) fn not_found(detail: impl Into<String>) -> ApiError {
        ApiError::new(ProblemCode::NotFound, detail)
    }

    pub(crate) fn forbidden(detail: impl Into<String>) -> ApiError {
        ApiError::new(ProblemCode::Forbidden, detail)
    }

    /// A field, value or address whose part isn't built yet.
    pub(crate) fn not_built(what: &str) -> ApiError {
        ApiError::new(ProblemCode::NotBuilt, format!("{what}: this part of Dormouse isn't built yet"))
    }

    /// A field that isn't known, in a body or a query.
    pub(crate) fn unknown_field(field: &str, detail: impl Into<String>) -> ApiError {
        ApiError(Box::new(Problem::new(ProblemCode::UnknownField, detail).of_field(field)))
    }

    /// A field with a value that can't be taken.
    pub(crate) fn bad_field(field: &str, detail: impl Into<String>) -> ApiError {
        ApiError(Box::new(Problem::new(ProblemCode::BadRequest, detail).of_field(field)))
    }
}

impl From<Problem> for ApiError {
    fn from(problem: Problem) -> ApiError {
        ApiError(Box::new(problem))
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> ApiError {
        let detail = error.to_string();
        let code = match &error {
            StoreError::NoSession(_) | StoreError::NoSnapshot(_) => ProblemCode::NotFound,
            StoreError::BadCursor => return ApiError::bad_field("cursor", detail),
            StoreError::Conflict { .. } | StoreError::SnapshotConflict { .. } | StoreError::Busy => ProblemCode::Held,
            StoreError::KeyTaken { .. } | StoreError::ExecKeyTaken { .. } => ProblemCode::KeyConflict,
            StoreError::ForeignOperation(_) | StoreError::SnapshotNameTaken { .. } => ProblemCode::Conflict,
            StoreError::NoSpace => ProblemCode::NoSpace,
            StoreError::Closed => ProblemCode::ShuttingDown,
            StoreError::Corrupt { .. } | StoreError::OutcomeUnknown(_) | StoreError::Database(_) => ProblemCode::Internal,
        };
        if code == ProblemCode::Internal {
            tracing::error!(%error, "the store failed");
        }
        let mut problem = Problem::new(code, detail);
        problem.no_side_effects = error.has_no_side_effects();
        ApiError::from(problem)
    }
}

impl From<engine::Error> for ApiError {
    fn from(error: engine::Error) -> ApiError {
        use engine::Error as E;
        let code = ProblemCode::ALL.iter().copied().find(|code| code.as_str() == error.code()).unwrap_or(ProblemCode::Internal);
        if code == ProblemCode::Internal {
            tracing::error!(%error, "the engine failed");
        }
        let mut problem = Problem::new(code, error.to_string());
        problem.status = error.status();
        problem.retryable = error.is_retryable();
        problem.no_side_effects = error.has_no_side_effects();
        problem.session_id = error.session();
        match error {
            E::Deleted { at, reason, .. } | E::Expired { at, reason, .. } => {
                problem.at = Some(at);
                problem.reason = Some(reason);
            }
            E::SnapshotDeleted { at, .. } => problem.at = Some(at),
            E::Failed { reason, .. } => problem.reason = Some(reason),
            E::Held { operation, .. } | E::OperationFailed { operation, .. } => problem.operation_id = Some(operation),
            E::LimitExceeded { .. } => problem.retry_after_seconds = Some(LIMIT_RETRY_SECONDS),
            E::Invalid { field, .. } | E::NotBuilt { field } => problem.field = Some(field),
            _ => {}
        }
        ApiError::from(problem)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut problem = self.0;
        if problem.retryable && problem.retry_after_seconds.is_none() && matches!(problem.status, 429 | 503 | 423) {
            problem.retry_after_seconds = Some(1);
        }
        let status = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = serde_json::to_vec(&problem).unwrap_or_default();
        let mut response = (status, [(header::CONTENT_TYPE, PROBLEM_JSON)], body).into_response();
        if let Some(seconds) = problem.retry_after_seconds {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if problem.no_side_effects {
            response.extensions_mut().insert(ChangedNothing);
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::Error as E;
    use model::{OperationId, OperationKind, SessionId, Timestamp};
    use wire::{Code, WireError};

    #[test]
    fn the_engines_errors_keep_their_meaning() {
        let session = SessionId::new();
        let operation = OperationId::new();
        let held = ApiError::from(E::Held { session, operation, kind: OperationKind::Hibernate }).0;
        assert_eq!((held.status, held.code, held.retryable), (423, ProblemCode::Held, true));
        assert_eq!((held.session_id, held.operation_id), (Some(session), Some(operation)));
        let deleted = ApiError::from(E::Deleted { session, at: Timestamp(5), reason: "asked".into() }).0;
        assert_eq!((deleted.status, deleted.at, deleted.reason.as_deref()), (410, Some(Timestamp(5)), Some("asked")));
        let lost = ApiError::from(E::Lost { session, detail: String::new() }).0;
        assert_eq!((lost.code, lost.no_side_effects), (ProblemCode::Lost, false));
        let limit = ApiError::from(E::LimitExceeded { detail: "3 of 3".into() }).0;
        assert_eq!((limit.status, limit.code.as_str(), limit.no_side_effects), (429, "limit_exceeded", true));
        assert_eq!((limit.retryable, limit.retry_after_seconds), (true, Some(LIMIT_RETRY_SECONDS)));
        let disk = ApiError::from(E::DiskLimit { detail: "9 of 9".into() }).0;
        assert_eq!((disk.status, disk.code, disk.no_side_effects), (507, ProblemCode::NoSpace, true));
        let field = ApiError::from(E::NotBuilt { field: "hooks".into() }).0;
        assert_eq!((field.code, field.field.as_deref()), (ProblemCode::NotBuilt, Some("hooks")));
    }

    #[test]
    fn every_code_of_the_engine_is_known_here() {
        for code in [Code::NotFound, Code::NotRegular, Code::Exists, Code::NoSpace, Code::Ended, Code::SandboxGone, Code::Busy] {
            let error = E::Inside(WireError::new(code, "x"));
            let problem = ApiError::from(error.clone()).0;
            assert_eq!((problem.code.as_str(), problem.status), (error.code(), error.status()), "{code:?}");
            assert_eq!(problem.code.status(), problem.status, "{code:?}: the code and the engine agree on the status");
        }
    }

    #[test]
    fn a_retry_is_told_when() {
        let response = ApiError::new(ProblemCode::NoCapacity, "full").into_response();
        assert_eq!(response.headers()[header::RETRY_AFTER], "1");
        assert_eq!(response.headers()[header::CONTENT_TYPE], PROBLEM_JSON);
        assert!(response.extensions().get::<ChangedNothing>().is_some());
        let uncertain = ApiError::new(ProblemCode::Lost, "gone").into_response();
        assert!(uncertain.extensions().get::<ChangedNothing>().is_none());
    }
}
