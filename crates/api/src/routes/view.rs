//! The engine's records in the words of the interface.

use api_types::{
    Event, KeepsAwake, Operation, OperationRef, Parent, Service, Session, SessionActivity, Snapshot, SnapshotRequires, Template,
    Token, Usage,
};
use engine::{Caller, Scope, SessionView};
use model::{Offset, Timestamp};
use store::{EventRow, OperationRow, SnapshotRow, TokenRow};
use wire::records::Activity;

/// A session, as this caller sees it.
pub(crate) fn session(view: &SessionView, who: &crate::auth::Principal) -> Session {
    let row = &view.row;
    Session {
        id: row.id,
        key: row.key.as_ref().filter(|_| !row.key_freed).map(|key| key.as_str().to_owned()),
        name: row.name.clone(),
        task: row.task.clone(),
        state: row.state,
        reason: row.reason.clone(),
        sentence: view.sentence(),
        runtime: row.runtime,
        template: row.template.clone(),
        generation: row.generation,
        ephemeral: row.ephemeral,
        metadata: row.metadata.clone(),
        workdir: row.workdir.clone(),
        resources: row.resources,
        created_at: row.created_at,
        updated_at: row.updated_at,
        last_activity_at: row.last_activity_at,
        idle: row.idle,
        hibernate_after: view.hibernate_after,
        timeout_seconds: row.timeout_seconds,
        timeout_at: row.timeout_at,
        on_timeout: row.on_timeout,
        ttl_seconds: row.ttl_seconds,
        expires_at: row.expires_at,
        wake_at: row.wake_at,
        memory: row.memory,
        parent: row.parent_session.map(|session_id| Parent { session_id, snapshot_id: row.parent_snapshot }),
        latest_snapshot_id: row.latest_snapshot,
        packed: row.parcel.is_some(),
        local: row.parcel.as_ref().is_none_or(|parcel| !parcel.is_away),
        parent_task: row.parent_task.clone(),
        machine: None,
        services: row.services.iter().map(declared).collect(),
        volumes: Vec::new(),
        network: row.network.clone(),
        secrets_withheld: row.secrets_withheld,
        operation: view.operation.as_ref().map(|operation| OperationRef {
            id: operation.id,
            kind: operation.kind,
            started_at: operation.started_at,
        }),
        access: who.furthest().map(|scope| scope.as_str().to_owned()),
        usage: Usage::default(),
        activity: None,
        server_time: crate::now(),
    }
}

/// What goes on in a running session.
pub(crate) fn activity(activity: Activity) -> SessionActivity {
    let seconds = |ms: u64| ms as f64 / 1000.0;
    let (waiting_for, waiting_text) = activity.waiting.map(|waiting| (Some(waiting.for_), waiting.text)).unwrap_or_default();
    SessionActivity {
        quiet_seconds: seconds(activity.quiet_ms),
        keeps_awake: activity.keeps_awake.into_iter().map(|keeps| KeepsAwake { kind: keeps.kind, what: keeps.what }).collect(),
        last_seconds_ago: activity.last.as_ref().map(|last| seconds(last.ago_ms)),
        last_kind: activity.last.map(|last| last.kind),
        cpu_percent: (activity.cpu_percent * 10.0).round() / 10.0,
        execs: activity.execs,
        clients: activity.clients,
        output_waits: activity.output_waits,
        waiting_for,
        waiting_text,
    }
}

/// A service as it was declared; how it runs, only its sandbox knows.
fn declared(spec: &model::ServiceSpec) -> Service {
    Service {
        name: spec.name.as_str().to_owned(),
        state: None,
        argv: spec.argv.clone(),
        pid: None,
        restarts: 0,
        exit_code: None,
        signal: None,
        output_bytes: Offset::ZERO,
    }
}

pub(crate) fn operation(row: &OperationRow) -> Operation {
    let error = row.error.as_ref().map(|error| match error {
        serde_json::Value::String(text) => text.clone(),
        other => other.get("detail").and_then(|detail| detail.as_str()).map_or_else(|| other.to_string(), str::to_owned),
    });
    Operation {
        id: row.id,
        session_id: row.session_id,
        kind: row.kind,
        state: row.state,
        started_at: row.started_at,
        ended_at: row.ended_at,
        error,
    }
}

pub(crate) fn snapshot(row: SnapshotRow) -> Snapshot {
    Snapshot {
        id: row.id,
        session_id: row.session_id,
        name: row.name.map(String::from),
        labels: row.labels,
        state: row.state,
        reason: row.reason,
        generation: row.generation,
        memory: row.memory,
        size_bytes: row.size_bytes,
        unique_bytes: row.unique_bytes,
        memory_bytes: row.memory_bytes,
        parent_id: row.parent_id,
        created_at: row.created_at,
        keep_until: row.keep_until,
        taken_by: row.taken_by,
        requires: SnapshotRequires {
            runtime: row.runtime,
            runtime_version: row.runsc_version,
            runtime_hash: row.runsc_hash,
            template: row.template,
            template_hash: row.template_hash,
            guest_hash: row.guest_hash,
            cpu_features: row.cpu_features,
        },
        paused_ms: row.paused_ms,
        packed: row.parcel.is_some(),
        local: row.parcel.is_none_or(|parcel| !parcel.is_away),
        deleted_at: row.deleted_at,
    }
}

pub(crate) fn event(row: EventRow) -> Event {
    Event {
        seq: row.seq,
        at: row.at,
        session_id: row.session_id,
        kind: row.kind,
        actor: row.actor,
        operation_id: row.operation_id,
        data: row.data,
    }
}

pub(crate) fn token(row: TokenRow, secret: Option<String>) -> Token {
    Token {
        id: row.id,
        name: row.name,
        scopes: row.scopes.iter().filter_map(|scope| scope.parse().ok()).collect(),
        sessions: row.sessions,
        limits: (row.limits != model::TokenLimits::default()).then(|| row.limits.into()),
        created_at: row.created_at,
        expires_at: row.expires_at,
        last_used_at: row.last_used_at,
        revoked_at: row.revoked_at,
        token: secret,
    }
}

pub(crate) fn scope(scope: api_types::Scope) -> Scope {
    match scope {
        api_types::Scope::Read => Scope::Read,
        api_types::Scope::Write => Scope::Write,
        api_types::Scope::Host => Scope::Host,
        api_types::Scope::Admin => Scope::Admin,
    }
}

/// True where the caller may make and change things.
pub(crate) fn may_write(who: &Caller) -> bool {
    who.has(Scope::Write)
}

pub(crate) fn template(name: String, hash: String, details: Option<(u64, Timestamp)>, default: bool) -> Template {
    Template { name, hash, size_bytes: details.map(|(size, _)| size), created_at: details.map(|(_, at)| at), default }
}
