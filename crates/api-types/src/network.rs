//! The network of sessions: what is open, secrets, and links to previews.

use model::{
    Timestamp,
    network::{Policy, SecretName},
};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt};
use utoipa::ToSchema;

/// A connection to the outside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OpenConnection {
    /// `HOST:PORT`.
    pub to: String,
    pub age_ms: u64,
    pub sent_bytes: u64,
    pub received_bytes: u64,
    /// How long no answer has come to what went out last.
    #[serde(default)]
    pub awaits_ms: Option<u64>,
}

/// What has gone to and come from one host; `other` stands for those beyond the first 256.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostTraffic {
    pub host: String,
    pub connections: u64,
    pub sent_bytes: u64,
    pub received_bytes: u64,
}

/// `GET …/network`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Network {
    #[schema(value_type = Object)]
    pub policy: Policy,
    #[serde(default)]
    pub secrets_withheld: bool,
    /// What is set inside so that programs find the way out.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// Connections that are open now, at most 1,000 of them.
    #[serde(default)]
    pub open: Vec<OpenConnection>,
    #[serde(default)]
    pub open_count: u64,
    /// Over all sandboxes that the session has had, the most bytes first.
    #[serde(default)]
    pub traffic: Vec<HostTraffic>,
}

/// A secret, without its value: that is never shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Secret {
    #[schema(value_type = String)]
    pub name: SecretName,
    /// The only hosts that it may be sent to. Empty: where rules that an administrator has set send it.
    #[serde(default)]
    pub hosts: Vec<String>,
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Timestamp,
    #[schema(value_type = String, format = DateTime)]
    pub updated_at: Timestamp,
}

/// `PUT /v1/secrets/{name}`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PutSecret {
    pub value: String,
    /// `HOST` or `*.HOST`; those that it has where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hosts: Option<Vec<String>>,
}

/// `POST /v1/secrets`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetSecret {
    #[schema(value_type = String)]
    pub name: SecretName,
    pub value: String,
    /// `HOST` or `*.HOST`; those that it has where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hosts: Option<Vec<String>>,
}

impl fmt::Debug for PutSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PutSecret").field("hosts", &self.hosts).finish_non_exhaustive()
    }
}

impl fmt::Debug for SetSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SetSecret").field("name", &self.name).field("hosts", &self.hosts).finish_non_exhaustive()
    }
}

/// `POST …/links/{port}`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LinkRequest {
    /// How long the link is good for, at most 30 days; an hour where missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds: Option<u64>,
}

/// A link to a port's preview: whoever has it gets in until its time is over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PreviewLink {
    pub url: String,
    #[schema(value_type = String, format = DateTime)]
    pub expires_at: Timestamp,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_never_shown() {
        let put: PutSecret = serde_json::from_str(r#"{"value":"s3cret","hosts":["a.b"]}"#).unwrap();
        let set: SetSecret = serde_json::from_str(r#"{"name":"A","value":"s3cret"}"#).unwrap();
        assert!(!format!("{put:?}{set:?}").contains("s3cret"));
    }
}
