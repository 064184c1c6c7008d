//! What concerns the server as a whole: its history, tokens, templates, its end.

use model::{Actor, ByteSize, EventSeq, EventType, OperationId, SessionId, Timestamp, TokenId};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// One entry of a session's history.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Counts from 1 in each session, without holes.
    #[schema(value_type = u64)]
    pub seq: EventSeq,
    #[schema(value_type = String, format = DateTime)]
    pub at: Timestamp,
    #[schema(value_type = String, format = "uuid")]
    pub session_id: SessionId,
    #[serde(rename = "type")]
    #[schema(value_type = String, example = "exec.started")]
    pub kind: EventType,
    /// `system`, `token:NAME`, `uid:N` or `inside`.
    #[schema(value_type = String)]
    pub actor: Actor,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = "uuid")]
    pub operation_id: Option<OperationId>,
    #[serde(default)]
    #[schema(value_type = Object)]
    pub data: Value,
}

/// How far a token reaches. `write` includes `read`, `admin` includes all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    Read,
    Write,
    /// Sessions of the host runtime: code as a user of the machine.
    Host,
    /// Tokens, templates, the server itself.
    Admin,
}

impl Scope {
    /// The word in the JSON and on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Scope::Read => "read",
            Scope::Write => "write",
            Scope::Host => "host",
            Scope::Admin => "admin",
        }
    }
}

impl std::str::FromStr for Scope {
    type Err = String;
    fn from_str(text: &str) -> Result<Scope, String> {
        [Scope::Read, Scope::Write, Scope::Host, Scope::Admin]
            .into_iter()
            .find(|scope| scope.as_str() == text)
            .ok_or_else(|| format!("'{text}' is not one of: read, write, host, admin"))
    }
}

/// What the sessions that a token makes may take together. A missing one: no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TokenLimits {
    /// Sessions that are there, asleep ones too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sessions: Option<u64>,
    /// Sessions that run or are paused, or are on their way there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running_sessions: Option<u64>,
    /// Cores of those that run. Its sessions have to state `resources.cpus`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<f64>,
    /// Memory of those that run. Its sessions have to state `resources.memory_bytes`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub memory_bytes: Option<ByteSize>,
    /// Disk of all of them: as stated in `resources.disk_bytes`, as measured where that is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub disk_bytes: Option<ByteSize>,
    /// What the snapshots of its sessions take that nothing else shares (their `unique_bytes`), also after their sessions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub snapshot_bytes: Option<ByteSize>,
}

impl From<TokenLimits> for model::TokenLimits {
    fn from(read: TokenLimits) -> model::TokenLimits {
        let TokenLimits { sessions, running_sessions, cpus, memory_bytes, disk_bytes, snapshot_bytes } = read;
        model::TokenLimits { sessions, running_sessions, cpus, memory_bytes, disk_bytes, snapshot_bytes }
    }
}

impl From<model::TokenLimits> for TokenLimits {
    fn from(kept: model::TokenLimits) -> TokenLimits {
        let model::TokenLimits { sessions, running_sessions, cpus, memory_bytes, disk_bytes, snapshot_bytes } = kept;
        TokenLimits { sessions, running_sessions, cpus, memory_bytes, disk_bytes, snapshot_bytes }
    }
}

/// `POST /v1/tokens`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateToken {
    /// For people: where the token is used.
    pub name: String,
    /// `read` and `write` where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scopes: Option<Vec<Scope>>,
    /// The only sessions it reaches; all where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<String>>)]
    pub sessions: Option<Vec<SessionId>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<TokenLimits>,
}

/// A token, without its secret.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Token {
    #[schema(value_type = String, format = "uuid")]
    pub id: TokenId,
    pub name: String,
    pub scopes: Vec<Scope>,
    /// `null`: all sessions.
    #[serde(default)]
    #[schema(value_type = Option<Vec<String>>)]
    pub sessions: Option<Vec<SessionId>>,
    /// `null`: none.
    #[serde(default)]
    pub limits: Option<TokenLimits>,
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Timestamp,
    #[serde(default)]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub expires_at: Option<Timestamp>,
    #[serde(default)]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub last_used_at: Option<Timestamp>,
    #[serde(default)]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub revoked_at: Option<Timestamp>,
    /// The secret: once, in the answer that made it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
}

/// Where a template's files come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TemplateKind {
    /// A directory that is a root file system.
    Dir,
    /// A tar archive of one, plain or gzipped.
    Tar,
    /// A directory in the OCI image layout.
    OciLayout,
}

/// `POST /v1/templates`, over the server's Unix socket or with an admin token: it reads a path of the server's machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateTemplate {
    pub name: String,
    pub kind: TemplateKind,
    /// Absolute, on the server's machine.
    pub path: String,
}

/// An immutable tree of files that sandboxes start from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Template {
    pub name: String,
    /// Names the contents.
    pub hash: String,
    #[serde(default)]
    pub size_bytes: Option<u64>,
    #[serde(default)]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub created_at: Option<Timestamp>,
    /// True for the one that sessions get when they name none.
    #[serde(default)]
    pub default: bool,
}

/// `GET /v1/server`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ServerInfo {
    pub version: String,
    pub pid: u32,
    #[schema(value_type = String, format = DateTime)]
    pub started_at: Timestamp,
}

/// `POST /v1/server/shutdown`, admin only. Running sessions go on without the server, unless `hibernate`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Shutdown {
    /// Hibernate every running session first.
    pub hibernate: bool,
}

/// The answer to a [`Shutdown`], given before the server goes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ShutdownAnswer {
    pub pid: u32,
    #[serde(default)]
    #[schema(value_type = Vec<String>)]
    pub hibernated: Vec<SessionId>,
    /// Sessions that could not be hibernated; they run on.
    #[serde(default)]
    pub failed: Vec<ShutdownFailure>,
}

/// A session that could not be hibernated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ShutdownFailure {
    #[schema(value_type = String, format = "uuid")]
    pub session_id: SessionId,
    pub detail: String,
}
