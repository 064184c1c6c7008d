//! The one task that owns a session's changes.
//!
//! ```text
//!  commands ─┐                            ┌─► operation (a task of its own: effects)
//!  changes ──┼─► mailbox ─► driver ─► store│        │ finish
//!  facts ────┘      ▲         └───────────┘        │
//!                   └─────────────────────────────-─┘
//! ```
//! Every commit of a session goes through its driver, one at a time. An operation's intent is committed before its task
//! starts; its result, the new state and their events are one commit. A command for what is under way joins it, one that
//! contradicts it waits in line, and a delete breaks it off.
//!
//! A driver is started by the first message and ends when it has had nothing to do for a while: a sleeping session has
//! none.

mod words;

pub(crate) use words::denied;
use words::{failed, of_client, of_operation, started, state_changed};

use crate::{
    Error, SessionView,
    inner::Inner,
    limits,
    operation::{self, Failure, Job},
    recapture, reserve,
    session::{Live, SandboxEnd, Session},
    timers,
};
use lifecycle::{Command, Decision, Outcome, Standing};
use model::{Actor, EndReason, EventType, Memory, OperationId, OperationKind, OperationState, State};
use serde_json::json;
use std::{
    collections::VecDeque,
    sync::{Arc, PoisonError},
    time::Duration,
};
use store::{NewEvent, OperationRow, SessionChange, SessionRow, StoreError};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinHandle,
};

/// Messages that wait for a driver.
const MAILBOX: usize = 64;
/// A driver without work ends after this time.
const IDLE: Duration = Duration::from_secs(5);
/// How often a commit that can succeed later is tried again, 100 ms apart.
const COMMIT_TRIES: u32 = 50;

/// Turns the present row into a change; `None` where there is nothing to change. Called again where the row turns out to
/// be another.
pub(crate) type ChangeFn = Box<dyn FnMut(&SessionRow) -> Option<SessionChange> + Send>;
/// Fills in what an operation's end changes beside state and memory.
pub(crate) type FinishFn = Box<dyn FnMut(&mut SessionChange) + Send>;

/// How an operation ended.
pub(crate) type End = Option<Result<(), Error>>;

/// What a driver is told.
pub(crate) enum Message {
    Command {
        command: Command,
        actor: Actor,
        /// Why it is asked for; stands as the session's reason afterwards.
        cause: EndReason,
        /// What it does, where the command alone doesn't say that.
        job: Option<Box<Job>>,
        reply: oneshot::Sender<Result<Admitted, Error>>,
    },
    Change {
        change: ChangeFn,
        reply: oneshot::Sender<Result<(), Error>>,
    },
    /// An operation that is in the store already: of a session just created, or found at the start.
    Run {
        operation: Box<OperationRow>,
        job: Box<Job>,
        actor: Actor,
        reply: oneshot::Sender<Admitted>,
    },
    /// An operation has had its effect.
    Finish {
        operation: OperationId,
        change: FinishFn,
        reply: oneshot::Sender<Result<(), Error>>,
    },
    /// A sandbox is gone without having been asked to.
    SandboxEnded(SandboxEnd),
    /// A supervisor is gone, and its sandbox lives.
    SupervisorLost(Arc<Live>),
}

/// An accepted command.
pub(crate) struct Admitted {
    /// The operation that carries it out; `None` where it was so already.
    pub operation: Option<OperationRow>,
    pub end: Option<watch::Receiver<End>>,
}

impl Admitted {
    fn already() -> Admitted {
        Admitted { operation: None, end: None }
    }

    /// Waits for the operation's end, on behalf of a client.
    pub(crate) async fn wait_for_client(self) -> Result<(), Error> {
        let operation = self.operation.clone();
        self.wait().await.map_err(|error| of_client(error, operation.as_ref()))
    }

    /// Waits for the operation's end.
    pub(crate) async fn wait(self) -> Result<(), Error> {
        let Some(mut end) = self.end else { return Ok(()) };
        match end.wait_for(Option::is_some).await {
            Ok(end) => end.clone().unwrap_or(Ok(())),
            Err(_) => Err(Error::ShuttingDown),
        }
    }
}

struct Running {
    row: OperationRow,
    actor: Actor,
    end: watch::Sender<End>,
    task: JoinHandle<Result<(), Failure>>,
}

struct Waiting {
    command: Command,
    actor: Actor,
    cause: EndReason,
    job: Option<Box<Job>>,
    reply: oneshot::Sender<Result<Admitted, Error>>,
}

struct Driver {
    inner: Arc<Inner>,
    session: Arc<Session>,
    row: SessionRow,
    running: Option<Running>,
    waiting: VecDeque<Waiting>,
    /// A sandbox that went while an operation was under way.
    ended: Option<SandboxEnd>,
    /// A supervisor that went and left its sandbox alive.
    lost: Option<Arc<Live>>,
}

/// Sends a message to the session's driver, which is started where there is none.
pub(crate) async fn tell(inner: &Arc<Inner>, session: &Arc<Session>, message: Message) -> Result<(), Error> {
    let mut message = message;
    loop {
        if inner.closing.is_cancelled() {
            return Err(Error::ShuttingDown);
        }
        let mailbox = ensure_driver(inner, session);
        match mailbox.send(message).await {
            Ok(()) => return Ok(()),
            // It was just ending: the next one takes it.
            Err(mpsc::error::SendError(back)) => message = back,
        }
    }
}

fn ensure_driver(inner: &Arc<Inner>, session: &Arc<Session>) -> mpsc::Sender<Message> {
    let mut slot = session.mailbox.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(mailbox) = slot.as_ref().filter(|mailbox| !mailbox.is_closed()) {
        return mailbox.clone();
    }
    let (mailbox, messages) = mpsc::channel(MAILBOX);
    *slot = Some(mailbox.clone());
    let view = session.view();
    let driver = Driver {
        inner: inner.clone(),
        session: session.clone(),
        row: (*view.row).clone(),
        running: None,
        waiting: VecDeque::new(),
        ended: None,
        lost: None,
    };
    inner.tasks.spawn(driver.run(messages));
    mailbox
}

impl Driver {
    async fn run(mut self, mut messages: mpsc::Receiver<Message>) {
        let closing = self.inner.closing.clone();
        loop {
            let task = self.running.as_mut().map(|running| &mut running.task);
            let idle = task.is_none() && self.waiting.is_empty();
            tokio::select! {
                message = messages.recv() => match message {
                    Some(message) => self.handle(message).await,
                    None => return,
                },
                ended = join(task) => self.task_ended(ended).await,
                () = tokio::time::sleep(IDLE), if idle => if self.retire(&mut messages).await { return },
                // What is under way is left as it is: the store has its intent, and the next server goes on with it.
                () = closing.cancelled() => return,
            }
        }
    }

    /// Closes the mailbox, unless something has come in meanwhile. False: go on.
    async fn retire(&self, messages: &mut mpsc::Receiver<Message>) -> bool {
        {
            let mut slot = self.session.mailbox.lock().unwrap_or_else(PoisonError::into_inner);
            if !messages.is_empty() {
                return false;
            }
            messages.close();
            slot.take();
        }
        // What was just being sent goes to the next driver: this one changes nothing any more.
        while let Some(message) = messages.recv().await {
            let (inner, session) = (self.inner.clone(), self.session.clone());
            self.inner.tasks.spawn(async move {
                let _ = tell(&inner, &session, message).await;
            });
        }
        true
    }

    async fn handle(&mut self, message: Message) {
        match message {
            Message::Command { command, actor, cause, job, reply } => {
                self.command(Waiting { command, actor, cause, job, reply }).await;
            }
            Message::Change { change, reply } => {
                let result = self.change(change).await;
                let _ = reply.send(result);
            }
            Message::Run { operation, job, actor, reply } => {
                let admitted = self.start(*operation, *job, actor);
                let _ = reply.send(admitted);
            }
            Message::Finish { operation, change, reply } => {
                let result = self.finish(operation, change).await;
                let _ = reply.send(result);
            }
            Message::SandboxEnded(end) => {
                self.ended = Some(end);
                self.settle_end().await;
            }
            Message::SupervisorLost(live) => {
                self.lost = Some(live);
                self.settle_end().await;
            }
        }
    }

    fn standing(&self) -> Standing {
        Standing {
            state: self.row.state,
            operation: self.running.as_ref().map(|running| running.row.kind),
            ephemeral: self.row.ephemeral,
            paused_by_idleness: self.row.state == State::Paused && self.row.try_again_at.is_some(),
        }
    }

    async fn command(&mut self, waiting: Waiting) {
        if !timers::still_holds(&self.row, waiting.cause, self.inner.now()) {
            let _ = waiting.reply.send(Ok(Admitted::already()));
            return;
        }
        // What idleness has begun is taken back where something happens; what somebody asks for is not.
        let by_idleness = |running: &Running| operation::cause_of(&running.row) == EndReason::Idle;
        let asked = waiting.cause == EndReason::Asked;
        let answer = match lifecycle::decide(self.standing(), waiting.command) {
            Decision::Join if asked && self.running.as_ref().is_some_and(by_idleness) => {
                self.waiting.push_back(waiting);
                return;
            }
            Decision::Already if asked && waiting.command == Command::Pause && self.standing().paused_by_idleness => {
                self.make_pause_a_users().await
            }
            Decision::Already => Ok(Admitted::already()),
            Decision::Deny(reason) => Err(denied(&self.row, reason)),
            Decision::Wait => {
                self.waiting.push_back(waiting);
                return;
            }
            Decision::Join => Ok(self.joined()),
            Decision::Accept(kind) => {
                if kind == OperationKind::Delete {
                    self.break_off().await;
                }
                let job = waiting.job.map_or_else(|| Job::of(kind), |job| *job);
                self.begin(kind, job, waiting.actor, waiting.cause).await
            }
        };
        let _ = waiting.reply.send(answer);
    }

    /// A user pauses what idleness has paused: now only a user unpauses it.
    async fn make_pause_a_users(&mut self) -> Result<Admitted, Error> {
        let mut change = SessionChange::new(self.row.clone());
        change.session.reason = Some(EndReason::Asked.to_string());
        (change.session.try_again_at, change.session.tries) = (None, 0);
        self.commit(change, None).await?;
        Ok(Admitted::already())
    }

    fn joined(&self) -> Admitted {
        let running = self.running.as_ref();
        Admitted { operation: running.map(|r| r.row.clone()), end: running.map(|r| r.end.subscribe()) }
    }

    /// Stores the intent, then starts the work.
    async fn begin(&mut self, kind: OperationKind, job: Job, actor: Actor, cause: EndReason) -> Result<Admitted, Error> {
        // Held until the intent is stored: from then on it counts.
        // The memory of a frozen original that the system thaws is held already.
        let is_held = self.session.live().is_some_and(|live| live.generation() == self.row.generation);
        let of_free = kind == OperationKind::Wake && is_held && actor == Actor::system();
        let kind_limited = if of_free { OperationKind::Unpause } else { kind };
        let _turn = match limits::admit(&self.inner, &self.row, kind_limited).await {
            Ok(turn) => turn,
            Err(error) => {
                let mut change = SessionChange::new(self.row.clone());
                change.events.extend(limits::untold(&self.inner, &self.row, kind, &actor, &error));
                if !change.events.is_empty()
                    && let Err(error) = self.commit(change, None).await
                {
                    tracing::warn!(session = %self.session.id, %error, "a refused wake is not written down");
                }
                return Err(error);
            }
        };
        let now = self.inner.now();
        let intent = json!({ "actor": actor, "generation": self.row.generation, "cause": cause });
        let operation = OperationRow::begun(self.session.id, kind, now, intent);
        for attempt in 1.. {
            let mut change = SessionChange::new(self.row.clone());
            change.session.updated_at = now;
            change.events.push(started(&operation, &actor));
            change.operations.push(operation.clone());
            match self.commit(change, Some(Arc::new(operation.clone()))).await {
                // Its key was given to another session, in one commit with that session. The row was read again.
                Err(Error::Conflict { .. }) if attempt < 3 => {}
                committed => {
                    committed?;
                    break;
                }
            }
        }
        Ok(self.start(operation, job, actor))
    }

    fn start(&mut self, operation: OperationRow, job: Job, actor: Actor) -> Admitted {
        let (end, ended) = watch::channel(None);
        let context = operation::Context {
            inner: self.inner.clone(),
            session: self.session.clone(),
            operation: operation.clone(),
            actor: actor.clone(),
        };
        let task = self.inner.tasks.spawn(operation::run(context, job));
        let view = SessionView::new(self.session.view().row, Some(Arc::new(operation.clone())));
        self.session.show(view);
        self.running = Some(Running { row: operation.clone(), actor, end, task });
        Admitted { operation: Some(operation), end: Some(ended) }
    }

    /// Ends what is under way, for a delete.
    async fn break_off(&mut self) {
        let Some(mut running) = self.running.take() else { return };
        running.task.abort();
        let _ = (&mut running.task).await;
        let error = operation::deleted(&self.row, self.inner.now());
        running.row.state = OperationState::Undone;
        running.row.ended_at = Some(self.inner.now());
        running.row.error = Some(json!({ "code": "deleted", "detail": "the session was deleted meanwhile" }));
        let mut change = SessionChange::new(self.row.clone());
        change.events.push(failed(&running.row, &running.actor, "deleted", "the session was deleted meanwhile"));
        change.operations.push(running.row.clone());
        if let Err(error) = self.commit(change, None).await {
            tracing::warn!(session = %self.session.id, %error, "an operation that was broken off is not written down");
        }
        let _ = running.end.send(Some(Err(error)));
    }

    async fn change(&mut self, mut change: ChangeFn) -> Result<(), Error> {
        for _ in 0..3 {
            let Some(wanted) = change(&self.row) else { return Ok(()) };
            let operation = self.session.view().operation;
            match self.commit(wanted, operation).await {
                // The row was read again.
                Err(Error::Conflict { .. }) => {}
                other => return other,
            }
        }
        Err(Error::internal("the session changes under its own driver"))
    }

    /// The present operation has had its effect: commits state, memory and the operation's end at once.
    async fn finish(&mut self, id: OperationId, mut more: FinishFn) -> Result<(), Error> {
        let Some(running) = self.running.as_ref().filter(|running| running.row.id == id) else {
            return Err(Error::Conflict { detail: "the operation was broken off".to_owned() });
        };
        let (mut operation, actor) = (running.row.clone(), running.actor.clone());
        let now = self.inner.now();
        operation.state = OperationState::Done;
        operation.ended_at = Some(now);
        for attempt in 1.. {
            let mut change = self.settled(&operation, Outcome::Done);
            more(&mut change);
            let from = self.row.state;
            if change.session.state != from {
                change.events.push(state_changed(&change.session, from, &operation, &actor));
            }
            change.events.push(NewEvent {
                at: now,
                kind: EventType::OPERATION_DONE,
                actor: actor.clone(),
                operation_id: Some(id),
                data: json!({ "kind": operation.kind }),
            });
            change.operations.push(operation.clone());
            match self.commit(change, None).await {
                Ok(()) => break,
                Err(error @ (Error::NoSpace { .. } | Error::Held { .. } | Error::Conflict { .. })) if attempt < COMMIT_TRIES => {
                    tracing::warn!(session = %self.session.id, %error, "the end of an operation is not written down yet");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                Err(error) => return Err(error),
            }
        }
        if let Some(running) = self.running.take() {
            let _ = running.end.send(Some(Ok(())));
        }
        self.next().await;
        Ok(())
    }

    fn settled(&self, operation: &OperationRow, outcome: Outcome) -> SessionChange {
        let mut change = SessionChange::new(self.row.clone());
        let settled = lifecycle::settle(operation.kind, self.row.state, self.row.memory, outcome);
        let row = &mut change.session;
        if row.state != settled.state {
            row.reason = None;
        }
        let now = self.inner.now();
        (row.state, row.memory, row.updated_at) = (settled.state, settled.memory, now);
        if outcome == Outcome::Done {
            let clocks = timers::clocks(row).after(operation.kind, settled.state, now);
            timers::put(row, &clocks);
            if settled.state != State::Paused {
                row.tries = 0;
            }
        }
        change
    }

    /// An operation's task has ended. One that has finished isn't the present one any more.
    async fn task_ended(&mut self, ended: Result<Result<(), Failure>, tokio::task::JoinError>) {
        let Some(running) = self.running.take() else { return };
        let failure = match ended {
            Ok(Err(failure)) => failure,
            Ok(Ok(())) => Failure::plain(Error::internal("the operation ended without a result")),
            Err(error) if error.is_cancelled() => Failure::plain(Error::ShuttingDown),
            Err(error) => Failure::plain(Error::internal(format!("the operation panicked: {error}"))),
        };
        let Running { mut row, actor, end, .. } = running;
        let failure = Failure { error: of_operation(failure.error, &row), ..failure };
        tracing::warn!(session = %self.session.id, kind = %row.kind, error = %failure.error, "an operation failed");
        row.state = OperationState::Failed;
        row.ended_at = Some(self.inner.now());
        let (code, detail) = (failure.error.code(), failure.error.to_string());
        row.error = Some(json!({ "code": code, "detail": detail }));
        let mut change = self.settled(&row, Outcome::Failed { memory_spent: failure.memory_spent });
        let from = self.row.state;
        if change.session.state != from {
            change.session.reason = Some(failure.reason.unwrap_or(detail.clone()));
            if change.session.memory != Memory::Saved {
                change.session.image_generation = None;
            }
            let clocks = timers::clocks(&change.session).without_sandbox();
            timers::put(&mut change.session, &clocks);
            change.events.push(state_changed(&change.session, from, &row, &actor));
        }
        change.events.push(failed(&row, &actor, code, &detail));
        change.operations.push(row);
        if let Err(error) = self.commit(change, None).await {
            tracing::error!(session = %self.session.id, %error, "a failed operation is not written down");
            self.session.show(SessionView::new(self.session.view().row, None));
        }
        let _ = end.send(Some(Err(failure.error)));
        self.next().await;
    }

    /// Goes on with what waited for the operation's end.
    async fn next(&mut self) {
        self.settle_end().await;
        // Those that must wait again go back in line, in their order.
        for waiting in std::mem::take(&mut self.waiting) {
            self.command(waiting).await;
        }
    }

    /// A sandbox that is gone makes the session stopped, unless an operation that is under way answers for that.
    async fn settle_end(&mut self) {
        if self.running.is_none()
            && let Some(live) = self.lost.take()
        {
            self.settle_loss(live).await;
        }
        if self.running.is_some() {
            return;
        }
        let Some(end) = self.ended.take() else { return };
        if !self.row.state.has_sandbox() || self.row.generation != end.generation {
            return;
        }
        let from = self.row.state;
        let mut change = SessionChange::new(self.row.clone());
        if let Err(error) = operation::lose_works(&self.inner, &self.session, end.reason.as_str(), &mut change).await {
            tracing::warn!(session = %self.session.id, %error, "the works of an ended sandbox can't be read");
        }
        let now = self.inner.now();
        let row = &mut change.session;
        (row.state, row.memory, row.updated_at) = (State::Stopped, Memory::Lost, now);
        row.reason = Some(end.reason.to_string());
        row.ended_reason = Some(end.reason.to_string());
        row.ended_detail = Some(end.detail.clone());
        row.ended_at = Some(now);
        let clocks = timers::clocks(row).without_sandbox();
        timers::put(row, &clocks);
        let event = NewEvent {
            at: now,
            kind: EventType::STATE_CHANGED,
            actor: Actor::system(),
            operation_id: None,
            data: json!({ "from": from, "to": State::Stopped, "reason": end.reason, "detail": end.detail }),
        };
        change.events.push(event);
        if let Err(error) = self.commit(change, None).await {
            tracing::error!(session = %self.session.id, %error, "the end of a sandbox is not written down yet");
            self.tell_again(Message::SandboxEnded(end));
        }
    }

    /// What could not be stored comes again, also to a driver after this one.
    fn tell_again(&self, message: Message) {
        let (inner, session) = (self.inner.clone(), self.session.clone());
        self.inner.tasks.spawn(async move {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let _ = tell(&inner, &session, message).await;
        });
    }

    /// A supervisor is gone, and its sandbox lives: another one takes it over. Of a session that is hibernated by now it is
    /// the frozen original.
    async fn settle_loss(&mut self, live: Arc<Live>) {
        if self.row.generation != live.generation() {
            return;
        }
        if !self.row.state.has_sandbox() {
            return recapture::clear_original(&self.inner, &self.session);
        }
        if let Err(error) = self.begin(OperationKind::Recapture, Job::Recapture, Actor::system(), EndReason::SupervisorLost).await
        {
            tracing::error!(session = %self.session.id, %error, "a sandbox without a supervisor can't be taken over yet");
            self.tell_again(Message::SupervisorLost(live));
        }
    }

    /// Sets the session's alarm by what is stored now.
    fn arm(&self) {
        // A policy that came while no sandbox was there to be looked at.
        if self.row.state == State::Running && self.session.idle_look_at().is_none() {
            self.session.set_idle_look_after(&self.row, self.inner.now());
        }
        timers::arm(&self.inner, &self.session);
    }

    /// Writes a change and shows it to readers.
    async fn commit(&mut self, change: SessionChange, operation: Option<Arc<OperationRow>>) -> Result<(), Error> {
        let mut row = change.session.clone();
        faults::point("commit.before");
        // What must be possible on a full disk: deletes, and saying how something has ended.
        let must =
            |operation: &OperationRow| operation.kind == OperationKind::Delete || operation.state != OperationState::Running;
        let must = change.operations.iter().any(must) || change.session.state != self.row.state;
        let again = must.then(|| change.clone());
        let mut committed = self.inner.store.commit(change).await;
        if let (Err(StoreError::NoSpace), Some(again)) = (&committed, again)
            && reserve::give_away(&self.inner.config.data_dir)
        {
            committed = self.inner.store.commit(again).await;
        }
        match committed {
            Ok(committed) => {
                faults::point("commit.after");
                if row.state != self.row.state && !row.state.has_sandbox() {
                    self.inner.expect_packing();
                }
                row.was_committed(&committed);
                self.row = row;
                self.session.show(SessionView::new(Arc::new(self.row.clone()), operation));
                self.arm();
                self.inner.announce(committed.events);
                Ok(())
            }
            Err(error @ (StoreError::Conflict { .. } | StoreError::OutcomeUnknown(_))) => {
                let before = self.row.revision;
                let stored = self.inner.store.session(self.session.id).await?;
                let Some(stored) = stored else { return Err(StoreError::NoSession(self.session.id).into()) };
                self.row = stored;
                self.session.show(SessionView::new(Arc::new(self.row.clone()), operation));
                self.arm();
                let kept = matches!(error, StoreError::OutcomeUnknown(_)) && self.row.revision > before;
                if kept { Ok(()) } else { Err(error.into()) }
            }
            Err(error) => Err(Error::of_store(self.session.id, error)),
        }
    }
}

/// The end of the present operation's task; never, where there is none.
async fn join<T>(task: Option<&mut JoinHandle<T>>) -> Result<T, tokio::task::JoinError> {
    match task {
        Some(task) => task.await,
        None => std::future::pending().await,
    }
}
