//! Create: a session's first sandbox, from the pool, booted, or restored from a snapshot, and its first files.

use crate::{
    CreateOutcome, Created, Error, NewSession,
    driver::{Admitted, Message, tell},
    ending, fork,
    inner::{Inner, blocking},
    launch::{self, identity},
    limits,
    moments::{self, Moment},
    network,
    operation::{Context, Failure, Job, deleted},
    parcels, policy,
    pool::Pooled,
    programs::{Base, is_default},
    request::{Caller, Source},
    reserve,
    session::{Live, Session},
    source, watch,
};
use model::{EndReason, EventType, Generation, OperationKind, Runtime, SessionId, SnapshotId, State};
use serde_json::json;
use snapshot::disk::DiskLayout;
use std::{sync::Arc, time::Duration};
use store::{NewEvent, OperationRow, RequestMark, SessionChange, SessionRow, SnapshotRow, StoreError};
use tokio::sync::{OwnedRwLockReadGuard, oneshot};
use wire::control::{Request, Start, SuperviseSpec};

/// How long a pooled sandbox may take to become a session's.
const CLAIM_LIMIT: Duration = Duration::from_secs(20);
/// How often a create that finds its key taken and free again by turns is tried.
const KEY_TRIES: usize = 10;
/// Longest environment variable, workdir or name.
const MAX_TEXT: usize = 128 * 1024;

/// What a create works with.
pub(crate) struct Plan {
    pub base: Base,
    pub pooled: Option<Pooled>,
    pub source: Option<Source>,
    pub origin: Option<Origin>,
}

/// The snapshot that a session is made from.
#[derive(Clone)]
pub(crate) struct Origin {
    pub snapshot: SnapshotRow,
    /// Its session as it was then.
    pub source: SessionRow,
    /// Its memory is left alone: the row says that it has none.
    pub disk_only: bool,
    /// Keeps it from being removed before everything needed of it is taken.
    _held: Arc<OwnedRwLockReadGuard<()>>,
}

/// A session that is in the store and waits for its sandbox.
pub(crate) struct Intended {
    session: Arc<Session>,
    operation: OperationRow,
    plan: Plan,
    actor: model::Actor,
    outcome: CreateOutcome,
}

impl Intended {
    /// Brings it to life.
    pub(crate) async fn carry_out(self, inner: &Arc<Inner>) -> Result<Created, Error> {
        let Intended { session, operation, plan, actor, outcome } = self;
        run_stored(inner, &session, operation, Job::Create(Box::new(plan)), actor).await?.wait_for_client().await?;
        Ok(Created { view: session.view(), outcome })
    }

    /// It isn't wanted after all.
    pub(crate) async fn give_up(self, inner: &Arc<Inner>) {
        let failure = Failure::plain(Error::Conflict { detail: "the forks beside it could not be made".to_owned() });
        let (session, actor) = (self.session, self.actor);
        let undone = run_stored(inner, &session, self.operation, Job::Undo(failure), actor.clone()).await;
        if let Ok(undone) = undone {
            let _ = undone.wait().await;
        }
        if let Err(error) = inner.command(&session, lifecycle::Command::Delete, &actor).await {
            tracing::warn!(session = %session.id, %error, "a fork that was given up stays");
        }
    }
}

/// Creates a session, or finds the one of its key.
pub(crate) async fn create(inner: &Arc<Inner>, caller: &Caller, new: NewSession) -> Result<Created, Error> {
    check(inner, caller, &new)?;
    let mut replaced: Option<SessionRow> = None;
    for _ in 0..KEY_TRIES {
        if let Some(key) = &new.key
            && replaced.is_none()
            && let Some(holder) = inner.store.session_by_key(key.to_string()).await?
        {
            match existing(inner, caller, &new, holder).await? {
                Found::It(created) => return Ok(*created),
                Found::Replace(row) => replaced = Some(*row),
            }
        }
        let intended = match new.snapshot_id {
            None => intend(inner, caller, &new, Intent { old: replaced.take(), ..Intent::default() }).await,
            Some(id) => {
                let origin = origin(inner, id, new.disk_only).await?;
                let wanted = fork::inherit(new.clone(), &origin.source);
                let intent = Intent { old: replaced.take(), origin: Some(origin), ..Intent::default() };
                intend(inner, caller, &wanted, intent).await
            }
        };
        match intended {
            // Somebody was faster: theirs is it.
            Err(Made::KeyTaken) => {}
            Err(Made::Failed(error)) => return Err(error),
            Ok(intended) => return intended.carry_out(inner).await,
        }
    }
    Err(Error::Conflict { detail: "the key changes hands faster than a session can be made; try again".to_owned() })
}

/// What isn't built is refused, never ignored; what can't be is named.
fn check(inner: &Inner, caller: &Caller, new: &NewSession) -> Result<(), Error> {
    let not_built = |field: &str| Err(Error::NotBuilt { field: field.to_owned() });
    if inner.draining.is_cancelled() {
        return Err(Error::ShuttingDown);
    }
    if new.runtime.is_some_and(|runtime| runtime != Runtime::Gvisor) {
        return not_built("runtime");
    }
    policy::seconds("timeout_seconds", new.timeout_seconds)?;
    policy::seconds("ttl_seconds", new.ttl_seconds)?;
    policy::idle(new.idle)?;
    policy::hooks(&new.hooks)?;
    if new.ephemeral {
        return not_built("ephemeral");
    }
    if caller.sessions.is_some() {
        return Err(Error::Forbidden { detail: "this token is for certain sessions and can't create others".to_owned() });
    }
    if let Some(workdir) = &new.workdir
        && (!workdir.starts_with('/') || workdir.contains('\0') || workdir.len() > 4096)
    {
        return Err(Error::invalid("workdir", "it must be an absolute path"));
    }
    for (name, value) in &new.env {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            return Err(Error::invalid("env", format!("'{}' can't be set", name.chars().take(80).collect::<String>())));
        }
        if name.len() + value.len() > MAX_TEXT {
            return Err(Error::invalid("env", format!("'{name}' is longer than {MAX_TEXT} bytes")));
        }
    }
    if let Some(resources) = &new.resources {
        if resources.cpus.is_some_and(|cpus| !(cpus.is_finite() && cpus > 0.0)) {
            return Err(Error::invalid("resources.cpus", "it must be above zero"));
        }
        let too_small = |size: Option<model::ByteSize>, least: u64| size.is_some_and(|size| size.0 < least);
        if too_small(resources.memory_bytes, 32 << 20) {
            return Err(Error::invalid("resources.memory_bytes", "a sandbox needs at least 32 MiB"));
        }
        if too_small(resources.disk_bytes, 1 << 20) {
            return Err(Error::invalid("resources.disk_bytes", "a disk needs at least 1 MiB"));
        }
        if resources.pids.is_some_and(|pids| pids < 8) {
            return Err(Error::invalid("resources.pids", "a sandbox needs at least 8"));
        }
    }
    let mut names = std::collections::BTreeSet::new();
    for service in &new.services {
        if service.argv.is_empty() {
            return Err(Error::invalid("services", format!("the service '{}' has no command", service.name)));
        }
        if !names.insert(&service.name) {
            return Err(Error::invalid("services", format!("there are two services '{}'", service.name)));
        }
    }
    if new.disk_only && new.snapshot_id.is_none() {
        return Err(Error::invalid("disk_only", "it says what to take of a snapshot; name one with snapshot_id"));
    }
    if new.snapshot_id.is_some() && (new.source.is_some() || new.template.is_some()) {
        return Err(Error::invalid("snapshot_id", "what a session is made from has a template and a source already"));
    }
    match &new.source {
        Some(source) => source::check(source, caller),
        None => Ok(()),
    }
}

enum Found {
    It(Box<Created>),
    Replace(Box<SessionRow>),
}

/// The session that the key leads to.
async fn existing(inner: &Arc<Inner>, caller: &Caller, new: &NewSession, row: SessionRow) -> Result<Found, Error> {
    let ended = matches!(row.state, State::Failed | State::Deleted);
    if ended && new.replace {
        return Ok(Found::Replace(Box::new(row)));
    }
    let reason = || row.reason.clone().unwrap_or_default();
    match row.state {
        State::Failed => return Err(Error::Failed { session: row.id, reason: reason() }),
        State::Deleted => return Err(deleted(&row, inner.now())),
        _ => {}
    }
    if !caller.reaches(row.id) {
        return Err(Error::Forbidden { detail: "the key belongs to a session that this token doesn't reach".to_owned() });
    }
    let conflicts = conflicts(inner, new, &row);
    if !conflicts.is_empty() {
        return Err(Error::KeyConflict { session: row.id, fields: conflicts });
    }
    let ignored = ignored(new, &row);
    let session = inner.adopt(row);
    settled(inner, &session).await?;
    if let Some(mark) = &caller.request {
        mark_request(inner, &session, mark.clone()).await?;
    }
    Ok(Found::It(Box::new(Created { view: session.view(), outcome: CreateOutcome::Existing { ignored } })))
}

/// Waits until a session that is being created is there.
async fn settled(inner: &Arc<Inner>, session: &Arc<Session>) -> Result<(), Error> {
    inner.created(session).await?;
    let row = session.view().row;
    match row.state {
        State::Failed => Err(Error::Failed { session: row.id, reason: row.reason.clone().unwrap_or_default() }),
        State::Deleted => Err(deleted(&row, inner.now())),
        _ => Ok(()),
    }
}

async fn mark_request(inner: &Arc<Inner>, session: &Arc<Session>, id: store::RequestId) -> Result<(), Error> {
    let made = session.id.to_string();
    let change = move |row: &SessionRow| {
        let mut change = SessionChange::new(row.clone());
        change.request = Some(RequestMark { id: id.clone(), made: made.clone() });
        Some(change)
    };
    inner.change(session, Box::new(change)).await
}

/// Fields in which the request contradicts the session.
fn conflicts(inner: &Inner, new: &NewSession, row: &SessionRow) -> Vec<String> {
    let template = new.template.as_deref().unwrap_or(&inner.config.default_template);
    let mut fields = Vec::new();
    let same_template = row.template == template || row.template_hash.as_deref() == Some(template);
    if new.template.is_some() && !same_template {
        fields.push("template".to_owned());
    }
    if new.runtime.is_some_and(|runtime| runtime != row.runtime) {
        fields.push("runtime".to_owned());
    }
    if new.snapshot_id.is_some() && new.snapshot_id != row.parent_snapshot {
        fields.push("snapshot_id".to_owned());
    }
    if let Some(source) = &new.source
        && row.source != serde_json::to_value(source).ok()
    {
        fields.push("source".to_owned());
    }
    fields
}

/// Fields of the request that differ from the session and are not applied.
fn ignored(new: &NewSession, row: &SessionRow) -> Vec<String> {
    let differs = [
        ("name", new.name.is_some() && new.name != row.name),
        ("task", new.task.is_some() && new.task != row.task),
        ("parent_task", new.parent_task.is_some() && new.parent_task != row.parent_task),
        ("env", !new.env.is_empty() && new.env != row.env),
        ("workdir", new.workdir.is_some() && new.workdir != row.workdir),
        ("metadata", !new.metadata.is_empty() && new.metadata != row.metadata),
        ("resources", new.resources.is_some_and(|resources| resources != row.resources)),
        ("idle", new.idle.is_some() && new.idle != row.idle),
        ("timeout_seconds", new.timeout_seconds.is_some() && new.timeout_seconds != row.timeout_seconds),
        ("on_timeout", new.on_timeout.is_some_and(|action| action != row.on_timeout)),
        ("ttl_seconds", new.ttl_seconds.is_some() && new.ttl_seconds != row.ttl_seconds),
        ("hooks", !new.hooks.is_empty() && serde_json::to_value(&new.hooks).ok().as_ref() != Some(&row.hooks)),
        ("services", !new.services.is_empty() && new.services != row.services),
        ("network", new.network.as_ref().is_some_and(|policy| *policy != row.network)),
    ];
    differs.into_iter().filter(|(_, differs)| *differs).map(|(name, _)| name.to_owned()).collect()
}

/// Why a session was not made.
pub(crate) enum Made {
    /// Somebody was faster.
    KeyTaken,
    Failed(Error),
}

impl From<Error> for Made {
    fn from(error: Error) -> Made {
        Made::Failed(error)
    }
}

/// A snapshot that sessions can be made from.
///
/// # Errors
/// [`Error::NotFound`], [`Error::SnapshotDeleted`].
pub(crate) async fn origin(inner: &Arc<Inner>, id: SnapshotId, disk_only: bool) -> Result<Origin, Error> {
    let held = inner.shelf.hold().await;
    let snapshot = inner.store.snapshot(id).await?.ok_or_else(|| Error::not_found(format!("snapshot {id}")))?;
    if let Some(at) = snapshot.deleted_at {
        return Err(Error::SnapshotDeleted { snapshot: id, at });
    }
    let mut snapshot = parcels::fetch::ensure_snapshot(inner, snapshot, !disk_only).await?;
    if disk_only {
        snapshot.memory = false;
    }
    let source = serde_json::from_value(snapshot.template_row.clone())
        .map_err(|e| Error::internal(format!("what snapshot {id} says of its session can't be read: {e}")))?;
    Ok(Origin { snapshot, source, disk_only, _held: Arc::new(held) })
}

/// What a new session is made of and instead of.
#[derive(Default)]
pub(crate) struct Intent {
    /// Its id, where it has one already.
    pub id: Option<SessionId>,
    pub origin: Option<Origin>,
    /// Gives its key away.
    pub old: Option<SessionRow>,
    /// All that the request makes; the session alone where missing.
    pub made: Option<String>,
}

/// Stores a new session and what is going to be done for it.
pub(crate) async fn intend(inner: &Arc<Inner>, caller: &Caller, new: &NewSession, intent: Intent) -> Result<Intended, Made> {
    let Intent { id, origin, old, made } = intent;
    if let Some(policy) = &new.network {
        network::authorize(inner, caller, policy, None).await?;
    } else if let Some(origin) = origin.as_ref().filter(|origin| new.secrets && !origin.source.secrets_withheld) {
        // A snapshot may be older than what its session may do now: only what that still has is given along unasked.
        let source = inner.present(origin.snapshot.session_id).await.ok().map(|session| session.view().row);
        let before = source.as_ref().filter(|row| !row.secrets_withheld).map(|row| &row.network);
        network::authorize(inner, caller, &origin.source.network, before).await?;
    }
    reserve::check_room(&inner.config.data_dir)?;
    inner.pool.created();
    let template = match &origin {
        Some(origin) => origin.snapshot.template.clone(),
        None => new.template.clone().unwrap_or_else(|| inner.config.default_template.clone()),
    };
    let base = base_of(inner, &template, origin.as_ref()).await?;
    let resources = new.resources.unwrap_or_default();
    let turn = match limits::admit_create(inner, caller, new).await {
        Ok(turn) => turn,
        Err(error) => return Err(refused(inner, new, old.as_ref(), error).await),
    };
    let pooled = if is_default(&resources) && origin.is_none() { inner.pool.take(&base) } else { None };
    let id = pooled.as_ref().map(|pooled| pooled.id).or(id).unwrap_or_else(SessionId::new);

    let now = inner.now();
    let mut row = SessionRow::new(id, Runtime::Gvisor, template, now);
    if let Some(origin) = &origin {
        row.parent_session = Some(origin.snapshot.session_id);
        row.parent_snapshot = Some(origin.snapshot.id);
        row.latest_snapshot = Some(origin.snapshot.id);
        row.layers.clone_from(&origin.snapshot.layers);
        row.source.clone_from(&origin.source.source);
        row.network.clone_from(&origin.source.network);
        let given = new.secrets && !origin.source.secrets_withheld;
        row.secrets_withheld = !given && !row.network.secrets().is_empty();
    }
    if let Some(policy) = &new.network {
        row.network.clone_from(policy);
        row.secrets_withheld = false;
    }
    row.key.clone_from(&new.key);
    row.name.clone_from(&new.name);
    row.task.clone_from(&new.task);
    row.parent_task.clone_from(&new.parent_task);
    row.metadata.clone_from(&new.metadata);
    row.env.clone_from(&new.env);
    row.workdir = new.workdir.clone().or_else(|| new.source.as_ref().map(source::default_workdir));
    row.idle = new.idle;
    row.timeout_seconds = new.timeout_seconds;
    row.on_timeout = new.on_timeout.unwrap_or(row.on_timeout);
    row.ttl_seconds = new.ttl_seconds;
    row.expires_at = new.ttl_seconds.map(|seconds| now.plus(Duration::from_secs(seconds)));
    row.hooks = serde_json::to_value(&new.hooks).map_err(Error::internal)?;
    row.resources = resources;
    row.services.clone_from(&new.services);
    row.source = new.source.as_ref().and_then(|source| serde_json::to_value(source).ok()).or(row.source);
    row.owner_token = caller.token.map(|token| token.to_string());
    row.template_hash = Some(base.pins.template.clone());
    row.guest_hash = Some(base.pins.guest.clone());
    row.runsc_hash = Some(base.pins.runsc.clone());

    let intent = json!({ "actor": caller.actor, "source": row.source });
    let operation = OperationRow::begun(id, OperationKind::Create, now, intent);
    let mut change = SessionChange::new(row.clone());
    let event = |kind, operation_id, data| NewEvent { at: now, kind, actor: caller.actor.clone(), operation_id, data };
    change.events.push(event(
        EventType::SESSION_CREATED,
        None,
        json!({ "key": row.key, "template": row.template, "snapshot_id": row.parent_snapshot }),
    ));
    change.events.push(event(EventType::OPERATION_STARTED, Some(operation.id), json!({ "kind": operation.kind })));
    change.operations.push(operation.clone());
    change.request = caller.request.clone().map(|id| RequestMark { id, made: made.unwrap_or_else(|| row.id.to_string()) });

    let outcome = match &old {
        Some(old) => CreateOutcome::Replaced { session: old.id, reason: old.reason.clone().unwrap_or_default() },
        None => CreateOutcome::New,
    };
    let committed = match old {
        None => inner.store.commit_all(vec![change]).await,
        Some(mut old) => {
            old.key_freed = true;
            inner.store.commit_all(vec![SessionChange::new(old), change]).await
        }
    };
    let mut committed = match committed {
        Ok(committed) => committed,
        Err(error) => {
            inner.pool.give_back(pooled);
            return Err(match error {
                StoreError::KeyTaken { .. } | StoreError::Conflict { .. } => Made::KeyTaken,
                other => Made::Failed(other.into()),
            });
        }
    };
    if let Some(last) = committed.pop() {
        row.was_committed(&last);
        inner.announce(last.events);
    }
    let session = inner.adopt(row);
    // From here on it is counted.
    drop(turn);
    let plan = Plan { base, pooled, source: new.source.clone(), origin };
    Ok(Intended { session, operation, plan, actor: caller.actor.clone(), outcome })
}

/// What the first sandbox is made of: for a memory exactly what that was made with.
async fn base_of(inner: &Arc<Inner>, template: &str, origin: Option<&Origin>) -> Result<Base, Error> {
    let inner = inner.clone();
    match origin.map(|origin| origin.snapshot.clone()) {
        None => {
            let template = template.to_owned();
            blocking(move || inner.programs.present(&template)).await.flatten()
        }
        Some(snapshot) => blocking(move || {
            let base = match snapshot.memory {
                true => inner.programs.made_of(&snapshot)?,
                false => inner.programs.present(snapshot.template_hash.as_deref().unwrap_or(&snapshot.template))?,
            };
            Ok(base.below(inner.shelf.lower(&snapshot.layers)))
        })
        .await
        .flatten(),
    }
}

/// There is no room for another session. Where somebody who was let in before has made the one of the key, none is needed.
async fn refused(inner: &Inner, new: &NewSession, old: Option<&SessionRow>, error: Error) -> Made {
    let Some(key) = &new.key else { return Made::Failed(error) };
    match inner.store.session_by_key(key.to_string()).await {
        Ok(Some(holder)) if old.is_none_or(|old| old.id != holder.id) => Made::KeyTaken,
        _ => Made::Failed(error),
    }
}

/// Has the driver carry out an operation that is in the store already.
pub(crate) async fn run_stored(
    inner: &Arc<Inner>,
    session: &Arc<Session>,
    operation: OperationRow,
    job: Job,
    actor: model::Actor,
) -> Result<Admitted, Error> {
    let (reply, answer) = oneshot::channel();
    let (operation, job) = (Box::new(operation), Box::new(job));
    tell(inner, session, Message::Run { operation, job, actor, reply }).await?;
    answer.await.map_err(|_| Error::ShuttingDown)
}

/// Brings the session's first sandbox to life.
pub(crate) async fn run(context: &Context, plan: Plan) -> Result<(), Failure> {
    match bring_up(context, plan).await {
        Ok(()) => {
            let change = |change: &mut SessionChange| change.session.generation = Generation::FIRST;
            context.finish(Box::new(change)).await?;
            Ok(())
        }
        Err(error) => {
            clean_up(&context.inner, &context.session).await;
            fork::lose_works(context).await;
            let reason = Some(format!("{}: {error}", EndReason::CreateFailed));
            Err(Failure { error, memory_spent: false, reason })
        }
    }
}

/// Removes everything of a session that never came to life.
pub(crate) async fn clean_up(inner: &Arc<Inner>, session: &Arc<Session>) {
    let layout = &session.layout;
    let ended = ending::end_sandbox(layout, inner.programs.runsc_state(), EndReason::CreateFailed, Duration::ZERO).await;
    let layout = layout.clone();
    let removed = match ended {
        Ok(()) => blocking(move || ending::remove_session(&layout).map_err(Error::internal)).await.flatten(),
        Err(error) => Err(error),
    };
    if let Err(error) = removed {
        tracing::error!(session = %session.id, %error, "the rest of a session that was not created stays");
    }
}

async fn bring_up(context: &Context, plan: Plan) -> Result<(), Error> {
    let (inner, session) = (&context.inner, &context.session);
    let fetched = plan.source.map(|source| {
        tokio::task::spawn_blocking({
            let scratch = inner.config.data_dir.join("tmp");
            move || source::fetch(&source, &scratch)
        })
    });
    let forked = plan.origin.is_some();
    let live = match (plan.origin, plan.pooled) {
        (Some(origin), _) => fork::bring_up(context, origin, plan.base).await?,
        (None, Some(pooled)) => match claim(context, pooled).await {
            Some(live) => live,
            None => boot(context, plan.base, Start::Boot, None).await?,
        },
        (None, None) => boot(context, plan.base, Start::Boot, None).await?,
    };
    watch::attach(inner, session, live.clone());
    if let Some(fetched) = fetched {
        let fetched = fetched.await.map_err(Error::internal)??;
        let workdir = session.view().row.workdir.clone().unwrap_or_else(|| "/root".to_owned());
        source::put_in(&live, fetched, workdir).await.map_err(|error| session.call_error(error))?;
    }
    if !forked {
        moments::announce(inner, session, &live, Moment::Created).await;
    }
    Ok(())
}

/// Makes a pooled sandbox the session's; `None` where it can't, and nothing of it is left then.
async fn claim(context: &Context, pooled: Pooled) -> Option<Arc<Live>> {
    let session = &context.session;
    let row = session.view().row;
    let identity = identity(&context.inner, &row);
    let network = Some(network::spec(&context.inner, &row.network));
    let request = Request::Claim { session: session.id, identity, network };
    let claimed = match pooled.live.supervisor.call_within(&request, CLAIM_LIMIT).await {
        Ok(_) => network::begin(&context.inner, session.id, &pooled.live, &row.network).await,
        Err(error) => Err(error.to_string()),
    };
    match claimed {
        Ok(()) => Some(pooled.live),
        Err(error) => {
            tracing::warn!(session = %session.id, %error, "a pooled sandbox can't be used; another is booted");
            clean_up(&context.inner, session).await;
            None
        }
    }
}

/// Starts the session's first supervisor.
pub(crate) async fn boot(context: &Context, base: Base, start: Start, gap_ms: Option<u64>) -> Result<Arc<Live>, Error> {
    let (inner, session) = (&context.inner, &context.session);
    let row = session.view().row;
    prepare_dir(session).await?;
    let spec = SuperviseSpec {
        dir: session.layout.dir().to_owned(),
        session: Some(session.id),
        generation: Generation::FIRST,
        start,
        gap_ms,
        lower: base.lower,
        runtime: base.runtime,
        resources: row.resources,
        keep_output_bytes: inner.config.keep_output,
        identity: Some(identity(inner, &row)),
        pins: base.pins,
        network: Some(network::spec(inner, &row.network)),
    };
    launch::launch(inner, &session.launching, spec).await
}

async fn prepare_dir(session: &Arc<Session>) -> Result<(), Error> {
    let layout = session.layout.clone();
    blocking(move || make_dir(&layout)).await?
}

/// Makes a session's directory with its empty disk. Blocks.
pub(crate) fn make_dir(layout: &wire::layout::SessionLayout) -> Result<(), Error> {
    launch::ensure_private_dir(layout.dir()).map_err(|e| launch::io_error(&e, "make the session's directory"))?;
    DiskLayout::new(layout.disk()).create().map_err(Error::internal)
}
