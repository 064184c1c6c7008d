//! Beginning what must not be begun twice: execs and terminals.
//!
//! ```text
//!  write down ─► ask ─┬─ answered
//!      ▲              ├─ certainly not begun: again, of whatever sandbox the session then has
//!      │              └─ unknown: write down, then wait until somebody knows
//!      └── where it has a key, or is part of a request that may be repeated; else only once nobody knows
//! ```
//! What is written down is answered with its record, whatever becomes of it: from then on no error is told. A record that
//! says `running` is ended with its sandbox, like all others, by whoever tells that sandbox's end. It is never asked for
//! again of a sandbox that may have had it and lost it: the store says then that it is lost.

use crate::{
    Caller, Error, facts,
    inner::Inner,
    operation::deleted,
    session::{Live, Session},
    supervisor_client::CallError,
};
use model::{EndReason, Generation, State, Timestamp};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use store::{RequestMark, SessionChange, SessionRow};
use tokio::time::{Instant, timeout, timeout_at};
use wire::{
    Code,
    control::{Answer, Request},
};

/// How long it is tried to ask a sandbox that is just changing.
pub(crate) const PATIENCE: Duration = Duration::from_secs(15);
/// Between two tries, where nothing is told of the session.
pub(crate) const AGAIN: Duration = Duration::from_millis(50);
/// How long the server may take to be told what became of a sandbox. Most ends are told within milliseconds.
pub(crate) const TOLD_WITHIN: Duration = Duration::from_secs(15);
/// How often a supervisor that gave no answer is asked whether it knows.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Something that is begun once.
pub(crate) trait Work {
    type Record: Clone + Send + Sync + 'static;

    /// Begins it. A supervisor that has it already answers how it stands.
    fn start(&self) -> Request;

    /// Asks whether it is there.
    fn look(&self) -> Request;

    /// How long the answer to the first may take; `None`: as long as it takes.
    fn limit(&self) -> Option<Duration>;

    /// The record in an answer.
    fn answered(answer: Answer) -> Option<Self::Record>;

    /// As it is written down before anybody has begun it.
    fn asked_for(&self, generation: Generation, now: Timestamp) -> Self::Record;

    fn is_running(record: &Self::Record) -> bool;

    /// Its id, as a request that made it is marked with.
    fn made(&self) -> String;

    /// What the store has of it.
    async fn stored(&self, inner: &Inner, session: &Session) -> Result<Option<Self::Record>, Error>;

    /// Adds a record to a change.
    fn put(change: &mut SessionChange, record: &Self::Record);

    /// Adds its end to a change: nobody knows how it would have ended. Returns the record of that.
    fn lose(session: &Session, change: &mut SessionChange, record: Self::Record, reason: &str, now: Timestamp) -> Self::Record;
}

/// A beginning under way.
pub(crate) struct Begin<'a, W> {
    pub inner: &'a Arc<Inner>,
    pub session: &'a Arc<Session>,
    pub caller: &'a Caller,
    pub work: W,
    /// Boot the session where it is stopped.
    pub start: bool,
    /// It is written down before it is asked for.
    pub first: bool,
    /// Another request, perhaps to an earlier server, has written it down.
    pub known: bool,
}

/// What a try came to.
enum Tried<R> {
    Begun(R),
    /// Certainly not begun.
    Again,
}

use Tried::{Again, Begun};

impl<W: Work> Begin<'_, W> {
    /// Begins it, and answers how it stands.
    ///
    /// # Errors
    /// It was not begun and is not written down: why the session can't be used, or what the guest refuses.
    /// [`Error::ExecKeyConflict`] where its key is another's.
    pub(crate) async fn run(&self) -> Result<W::Record, Error> {
        let until = Instant::now() + PATIENCE;
        let mut noted = self.known;
        loop {
            let mut changes = self.session.changes();
            let error = match self.attempt(&mut noted).await {
                Ok(Begun(record)) => return Ok(record),
                Ok(Again) if Instant::now() < until => {
                    let _ = timeout(AGAIN, changes.changed()).await;
                    continue;
                }
                Ok(Again) => self.session.held(),
                Err(error) => error,
            };
            return match error {
                // The next server goes on with it.
                Error::ShuttingDown => Err(error),
                error if noted => self.give_up(&error).await,
                error => Err(error),
            };
        }
    }

    async fn attempt(&self, noted: &mut bool) -> Result<Tried<W::Record>, Error> {
        // Before a stopped session is booted for it: what has a record there has had its only chance.
        if *noted && let Some(ended) = self.ended().await? {
            return Ok(Begun(ended));
        }
        let live = self.inner.usable(self.session, &self.caller.actor, self.start).await?;
        if *noted && let Some(ended) = self.ended().await? {
            return Ok(Begun(ended));
        }
        if !*noted && self.first {
            *noted = self.write_down(live.generation()).await?;
            if !*noted {
                return Ok(Again);
            }
        }
        if self.known
            && let Ok(answer) = live.supervisor.call_soon(&self.work.look()).await
            && let Some(record) = W::answered(answer)
        {
            return Ok(Begun(record));
        }
        let answer = match self.work.limit() {
            Some(limit) => live.supervisor.call_within(&self.work.start(), limit).await,
            None => live.supervisor.call(&self.work.start()).await,
        };
        match answer {
            Ok(answer) => match W::answered(answer) {
                Some(record) => Ok(Begun(record)),
                None => Err(Error::internal("the supervisor answered with something else")),
            },
            // It is just going to sleep, or has just gone.
            Err(CallError::Unreachable(_)) => Ok(Again),
            Err(CallError::Refused(error)) if error.code == Code::Busy => Ok(Again),
            Err(error) if !is_unknown(&error) => Err(self.session.call_error(error)),
            Err(error) => self.find_out(&live, error, noted).await,
        }
    }

    /// It was asked for, and no answer came: finds out what became of it.
    async fn find_out(&self, live: &Live, error: CallError, noted: &mut bool) -> Result<Tried<W::Record>, Error> {
        let (asked, asked_at) = (live.generation(), self.inner.now());
        if !*noted {
            match self.write_down_late(asked).await {
                Ok(written) => *noted = written,
                Err(error) => tracing::warn!(session = %self.session.id, %error, "what nobody has answered is not written down"),
            }
        }
        let gone = matches!(&error, CallError::Refused(error) if error.code == Code::SandboxGone);
        let until = Instant::now() + TOLD_WITHIN;
        let mut changes = self.session.changes();
        loop {
            changes.borrow_and_update();
            if let Some(found) = self.look(asked, asked_at, gone).await? {
                return Ok(found);
            }
            if Instant::now() >= until {
                break;
            }
            let _ = timeout_at(until.min(Instant::now() + LOOK_AGAIN), changes.changed()).await;
        }
        // It will be told; until then it stands as it was asked for.
        match self.work.stored(self.inner, self.session).await? {
            Some(record) => Ok(Begun(record)),
            None => Err(Error::Lost { session: self.session.id, detail: error.to_string() }),
        }
    }

    /// What is known by now of something that the sandbox of generation `asked` was asked for. `gone`: that sandbox has
    /// ended, so its supervisor's not knowing it says nothing.
    async fn look(&self, asked: Generation, asked_at: Timestamp, gone: bool) -> Result<Option<Tried<W::Record>>, Error> {
        let row = self.session.view().row;
        if row.state == State::Deleted {
            return Err(deleted(&row, self.inner.now()));
        }
        let told = !row.state.has_sandbox() || row.generation != asked;
        let mut missing = !row.state.has_sandbox();
        if let Some(live) = self.inner.awake(self.session).filter(|_| told || !gone) {
            match live.supervisor.call_soon(&self.work.look()).await {
                Ok(answer) => {
                    if let Some(record) = W::answered(answer) {
                        return Ok(Some(Begun(record)));
                    }
                }
                Err(CallError::Refused(error)) if error.code == Code::NotFound && told => missing = true,
                // One whose guest answers has had it all the time, and would know.
                Err(CallError::Refused(error)) if error.code == Code::NotFound => {
                    let well = live.supervisor.call_soon(&Request::Probe).await.is_ok();
                    if let Some(ended) = self.ended().await? {
                        return Ok(Some(Begun(ended)));
                    }
                    return Ok(well.then_some(Again));
                }
                Err(_) => {}
            }
        }
        if !told || !missing {
            return Ok(None);
        }
        if let Some(ended) = self.ended().await? {
            return Ok(Some(Begun(ended)));
        }
        if row.state == State::Hibernated
            && let Some(asleep) = self.work.stored(self.inner, self.session).await?
        {
            return Ok(Some(Begun(asleep)));
        }
        let ended_since = row.ended_at.is_some_and(|at| at >= asked_at);
        let reason = row.ended_reason.clone().filter(|_| ended_since || !row.state.has_sandbox());
        let reason = reason.unwrap_or_else(|| EndReason::SupervisorLost.to_string());
        self.lose(asked, &reason).await.map(|record| Some(Begun(record)))
    }

    /// Its record, where the store has it as ended.
    async fn ended(&self) -> Result<Option<W::Record>, Error> {
        facts::drain(self.inner, self.session).await?;
        let stored = self.work.stored(self.inner, self.session).await?;
        Ok(stored.filter(|record| !W::is_running(record)))
    }

    /// Writes down that it is asked for. False: the session has another sandbox meanwhile, or none.
    async fn write_down(&self, generation: Generation) -> Result<bool, Error> {
        self.write(generation, |row| row.state == State::Running).await
    }

    /// The same of what was asked for already. What is written down of it by others stands.
    async fn write_down_late(&self, generation: Generation) -> Result<bool, Error> {
        facts::drain(self.inner, self.session).await?;
        // So that no fact of it comes in between.
        let _facts = self.session.reading_facts.acquire().await.map_err(|_| Error::ShuttingDown)?;
        if self.work.stored(self.inner, self.session).await?.is_some() {
            return Ok(true);
        }
        self.write(generation, |row| row.state.has_sandbox()).await
    }

    async fn write(&self, generation: Generation, may: fn(&SessionRow) -> bool) -> Result<bool, Error> {
        let record = self.work.asked_for(generation, self.inner.now());
        let request = self.caller.request.clone().map(|id| RequestMark { id, made: self.work.made() });
        let written = Arc::new(AtomicBool::new(false));
        let written_ = written.clone();
        let change = move |row: &SessionRow| {
            let fits = may(row) && row.generation == generation;
            written_.store(fits, Ordering::Relaxed);
            fits.then(|| {
                let mut change = SessionChange::new(row.clone());
                W::put(&mut change, &record);
                change.request.clone_from(&request);
                change
            })
        };
        self.inner.change(self.session, Box::new(change)).await?;
        Ok(written.load(Ordering::Relaxed))
    }

    /// It is written down and can't be begun: says so in its record, unless somebody knows better.
    async fn give_up(&self, error: &Error) -> Result<W::Record, Error> {
        tracing::warn!(session = %self.session.id, %error, "what was written down is not begun");
        if let Some(ended) = self.ended().await? {
            return Ok(ended);
        }
        self.lose(self.session.view().row.generation, error.code()).await
    }

    /// Writes down that nobody knows how it would have ended.
    async fn lose(&self, generation: Generation, reason: &str) -> Result<W::Record, Error> {
        let _facts = self.session.reading_facts.acquire().await.map_err(|_| Error::ShuttingDown)?;
        let now = self.inner.now();
        let record = match self.work.stored(self.inner, self.session).await? {
            Some(record) if !W::is_running(&record) => return Ok(record),
            Some(record) => record,
            None => self.work.asked_for(generation, now),
        };
        let row = (*self.session.view().row).clone();
        let mut lost = SessionChange::new(row);
        let record = W::lose(self.session, &mut lost, record, reason, now);
        let change = move |row: &SessionRow| Some(SessionChange { session: row.clone(), ..lost.clone() });
        self.inner.change(self.session, Box::new(change)).await?;
        Ok(record)
    }
}

/// True where what was asked may have been done.
pub(crate) fn is_unknown(error: &CallError) -> bool {
    match error {
        CallError::Unreachable(_) => false,
        CallError::Broken(_) | CallError::TimedOut(_) => true,
        CallError::Refused(error) => matches!(error.code, Code::SandboxGone | Code::Unresponsive),
    }
}
