//! Addresses of the contract whose parts aren't built yet. They say so, so that nobody takes them for misspelt.

use super::Table;
use crate::error::ApiError;
use http::Uri;

/// Method and address.
pub(crate) const ADDRESSES: &[(&str, &str)] = &[
    ("POST", "/v1/sessions/{id}/feed"),
    ("GET", "/v1/sessions/{id}/recovery"),
    ("POST", "/v1/sessions/{id}/notes"),
    ("POST", "/v1/sessions/{id}/checkpoints"),
    ("GET", "/v1/recovery"),
    ("GET", "/v1/machines"),
    ("POST", "/v1/machines"),
    ("GET", "/v1/volumes"),
    ("POST", "/v1/volumes"),
];

/// Adds them to the table.
pub(crate) fn add(table: Table) -> Table {
    ADDRESSES.iter().fold(table, |table, (method, path)| table.add(method, path, not_built))
}

async fn not_built(uri: Uri) -> ApiError {
    let words: Vec<&str> = uri.path().split('/').filter(|word| !word.is_empty()).collect();
    let part = match words.as_slice() {
        ["v1", "sessions", _, part, ..] | ["v1", part, ..] => part,
        _ => uri.path(),
    };
    ApiError::not_built(part)
}
