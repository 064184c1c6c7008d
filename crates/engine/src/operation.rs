//! Lifecycle operations: what each does, and how it fails.
//!
//! An operation runs as a task of its own, beside the session's driver. It has its effects, then hands its result to the
//! driver, which commits it. It can be broken off at any await by a delete; what it began that must be seen through is a
//! task of its own again.

use crate::{
    Error, create, delete,
    driver::{FinishFn, Message, tell},
    facts, hibernate, idle,
    inner::Inner,
    recapture, rollback,
    session::{Live, Session},
    stop, take, wake,
};
use model::{Actor, EndReason, EventType, ExecState, OperationKind, SnapshotId, TerminalState, Timestamp};
use std::sync::Arc;
use store::{NewEvent, OperationRow, SessionChange, SessionRow};
use tokio::sync::oneshot;
use wire::{
    control::Request,
    layout::JournalName,
    records::{ExecRecord, TerminalRecord},
};

/// What an operation works with.
pub(crate) struct Context {
    pub inner: Arc<Inner>,
    pub session: Arc<Session>,
    pub operation: OperationRow,
    pub actor: Actor,
}

/// Why an operation failed, and what that means for the session.
#[derive(Debug)]
pub(crate) struct Failure {
    pub error: Error,
    /// Programs had run on from the saved memory: it can't be used again.
    pub memory_spent: bool,
    /// Stands as the session's reason where its state changes.
    pub reason: Option<String>,
}

impl Failure {
    /// A failure that leaves the session as it was.
    pub(crate) fn plain(error: Error) -> Failure {
        Failure { error, memory_spent: false, reason: None }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::plain(error)
    }
}

/// The work of an operation.
pub(crate) enum Job {
    Create(Box<create::Plan>),
    Hibernate,
    Wake,
    Stop,
    Start,
    Pause,
    Unpause,
    Delete,
    Snapshot(Box<take::Wanted>),
    /// Back to this snapshot; with `disk_only` not to its memory.
    Rollback {
        to: SnapshotId,
        disk_only: bool,
    },
    /// After a supervisor's death.
    Recapture,
    /// After a server's death: the sandbox that was being made is there.
    FinishBoot(Arc<Live>),
    /// After a server's death: the memory is on storage.
    FinishHibernate(Arc<Live>),
    /// After a server's death: it didn't come to life.
    Undo(Failure),
}

impl Job {
    /// What an operation does that needs not be told more. The others are given their job.
    pub(crate) fn of(kind: OperationKind) -> Job {
        match kind {
            OperationKind::Hibernate => Job::Hibernate,
            OperationKind::Wake => Job::Wake,
            OperationKind::Stop => Job::Stop,
            OperationKind::Start => Job::Start,
            OperationKind::Pause => Job::Pause,
            OperationKind::Unpause => Job::Unpause,
            OperationKind::Delete => Job::Delete,
            OperationKind::Recapture => Job::Recapture,
            OperationKind::Create | OperationKind::Snapshot | OperationKind::Rollback => {
                Job::Undo(Failure::plain(Error::internal(format!("a {kind} without a plan"))))
            }
        }
    }
}

/// Does the job.
pub(crate) async fn run(context: Context, job: Job) -> Result<(), Failure> {
    match job {
        Job::Create(plan) => create::run(&context, *plan).await,
        Job::Hibernate => hibernate::run(&context).await,
        Job::Wake => wake::run(&context).await,
        Job::Stop => stop::run(&context).await,
        Job::Start => wake::start(&context).await,
        Job::Pause => pause(&context).await,
        Job::Unpause => unpause(&context).await,
        Job::Delete => delete::run(&context).await,
        Job::Snapshot(wanted) => take::run(&context, *wanted).await,
        Job::Rollback { to, disk_only } => rollback::run(&context, to, disk_only).await,
        Job::Recapture => recapture::run(&context).await,
        Job::FinishBoot(live) => wake::finish_boot(&context, live).await,
        Job::FinishHibernate(live) => hibernate::commit(&context, live).await,
        Job::Undo(failure) => Err(failure),
    }
}

/// Freezes in place.
async fn pause(context: &Context) -> Result<(), Failure> {
    let live = context.live()?;
    let (cause, now) = (context.cause(), context.inner.now());
    if cause == EndReason::Idle {
        // What waited while the hibernate was tried may have begun.
        idle::check(context, &live).await?;
    }
    live.supervisor.call_soon(&Request::Pause).await.map_err(|error| context.session.call_error(error))?;
    let change = move |change: &mut SessionChange| paused(&mut change.session, cause, now);
    context.finish(Box::new(change)).await?;
    Ok(())
}

/// What a pause changes in a session beside its state. One that was asked for by idleness or the running time should have
/// been a hibernate, and is made one later.
pub(crate) fn paused(row: &mut SessionRow, cause: EndReason, now: Timestamp) {
    row.reason = Some(cause.to_string());
    if cause != EndReason::Asked {
        idle::put_off(row, now);
    }
    if cause == EndReason::Timeout {
        // Its time was over: when it is needed again it has all of it again, as after a wake.
        row.timeout_left_ms = None;
        row.timeout_told = false;
    }
}

async fn unpause(context: &Context) -> Result<(), Failure> {
    let live = context.live()?;
    live.supervisor.call_soon(&Request::Unpause).await.map_err(|error| context.session.call_error(error))?;
    context.session.set_idle_look_after(&context.session.view().row, context.inner.now());
    context.finish(Box::new(|change| change.session.reason = None)).await?;
    Ok(())
}

impl Context {
    /// The session's sandbox, which has to be there.
    pub(crate) fn live(&self) -> Result<Arc<Live>, Error> {
        let generation = self.session.view().row.generation;
        let live = self.session.live().filter(|live| live.generation() == generation);
        live.ok_or_else(|| Error::Lost { session: self.session.id, detail: "its supervisor isn't there".to_owned() })
    }

    /// The effect is there: commits state, memory and the operation's end, and whatever `more` adds. Afterwards other
    /// operations can run.
    pub(crate) async fn finish(&self, more: FinishFn) -> Result<(), Error> {
        let (reply, answer) = oneshot::channel();
        let message = Message::Finish { operation: self.operation.id, change: more, reply };
        tell(&self.inner, &self.session, message).await?;
        answer.await.unwrap_or(Err(Error::ShuttingDown))
    }

    /// Why it was asked for.
    pub(crate) fn cause(&self) -> EndReason {
        cause_of(&self.operation)
    }

    /// An event of this operation.
    pub(crate) fn event(&self, kind: EventType, data: serde_json::Value) -> NewEvent {
        NewEvent { at: self.inner.now(), kind, actor: self.actor.clone(), operation_id: Some(self.operation.id), data }
    }
}

/// Why an operation was asked for.
pub(crate) fn cause_of(operation: &OperationRow) -> EndReason {
    let cause = operation.intent.get("cause").and_then(|cause| cause.as_str());
    cause.and_then(|cause| cause.parse().ok()).unwrap_or(EndReason::Asked)
}

/// What a caller is told about a session that is deleted.
pub(crate) fn deleted(row: &SessionRow, now: Timestamp) -> Error {
    let session = row.id;
    let at = row.deleted_at.unwrap_or(now);
    let reason = row.reason.clone().unwrap_or_else(|| EndReason::Asked.to_string());
    if reason == EndReason::Expired.as_str() {
        Error::Expired { session, at, reason }
    } else {
        Error::Deleted { session, at, reason }
    }
}

/// Adds to `change` that every exec that ran is lost and every terminal has ended: their sandbox is gone. All facts have
/// been read before.
pub(crate) async fn lose_works(inner: &Inner, session: &Session, reason: &str, change: &mut SessionChange) -> Result<(), Error> {
    let now = inner.now();
    for row in inner.store.running_execs(session.id).await? {
        lose_exec(session, change, facts::exec_of(&row)?, reason, now);
    }
    for row in inner.store.running_terminals(session.id).await? {
        lose_terminal(session, change, facts::terminal_of(&row)?, reason, now);
    }
    Ok(())
}

/// Adds to `change` that nobody knows how an exec ended, and why. Returns its record.
pub(crate) fn lose_exec(
    session: &Session,
    change: &mut SessionChange,
    mut exec: ExecRecord,
    reason: &str,
    now: Timestamp,
) -> ExecRecord {
    exec.state = ExecState::Lost;
    exec.ended_at = Some(now);
    exec.reason = Some(reason.to_owned());
    exec.stdout_bytes = journal_tail(session, JournalName::Stdout(exec.id)).unwrap_or(exec.stdout_bytes);
    exec.stderr_bytes = journal_tail(session, JournalName::Stderr(exec.id)).unwrap_or(exec.stderr_bytes);
    change.events.push(of_system(now, EventType::EXEC_ENDED, facts::exec_end(&exec)));
    change.execs.push(facts::exec_row(session.id, &exec));
    exec
}

/// Adds to `change` that a terminal has ended with its sandbox, and why. Returns its record.
pub(crate) fn lose_terminal(
    session: &Session,
    change: &mut SessionChange,
    mut terminal: TerminalRecord,
    reason: &str,
    now: Timestamp,
) -> TerminalRecord {
    terminal.state = TerminalState::Ended;
    terminal.ended_at = Some(now);
    terminal.reason = Some(reason.to_owned());
    terminal.writer = None;
    terminal.output_bytes = journal_tail(session, JournalName::Terminal(terminal.id)).unwrap_or(terminal.output_bytes);
    change.events.push(of_system(now, EventType::TERMINAL_CLOSED, facts::terminal_end(&terminal)));
    change.terminals.push(facts::terminal_row(session.id, &terminal));
    terminal
}

/// How far a journal reaches; `None` where there is none.
pub(crate) fn journal_tail(session: &Session, name: JournalName) -> Option<model::Offset> {
    journal::Reader::open(session.layout.journal(&name)).range().ok().map(|range| range.tail)
}

fn of_system(at: Timestamp, kind: EventType, data: serde_json::Value) -> NewEvent {
    NewEvent { at, kind, actor: Actor::system(), operation_id: None, data }
}
