//! Execs: starting them, asking how they stand, and what they are told.

use crate::{
    ByteStream, Caller, Engine, Error, NewExec,
    ask::Asked,
    begin::{Begin, Work, is_unknown},
    facts::{self, exec_of, exec_row},
    inner::Inner,
    operation::{journal_tail, lose_exec},
    session::Session,
    supervisor_client::{CallError, PROMPT},
};
use model::{ExecId, ExecState, Generation, Offset, SessionId, Timestamp};
use std::{sync::Arc, time::Duration};
use store::{Cursor, MAX_PAGE, Page, SessionChange, StoreError};
use wire::{
    Code,
    control::{Answer, ExecStart, Request},
    layout::JournalName,
    records::ExecRecord,
};

/// Most bytes of standard input given with the request.
const MAX_STDIN: usize = 1 << 20;
/// Longest key.
const MAX_KEY: usize = 200;

impl Engine {
    /// Runs a command. The session is woken for it. With `wait` it is answered when the command has ended.
    ///
    /// # Errors
    /// Why the session can't be used; [`Error::Inside`] for a command that can't be right. One that isn't there or can't
    /// be run is an exec that ended with 127 or 126.
    pub async fn start_exec(&self, caller: &Caller, id: SessionId, new: NewExec) -> Result<ExecRecord, Error> {
        check(&new)?;
        let session = self.inner.present(id).await?;
        if let Some(key) = &new.key
            && let Some(row) = self.inner.store.exec_by_key(id, key.clone()).await?
        {
            return self.same(caller, &session, exec_of(&row)?, new).await;
        }
        // Written down first: however often it is asked for, it runs once.
        let first = new.key.is_some() || caller.request.is_some();
        let begin = begin(self, &session, caller, ExecId::new(), &new);
        match (Begin { first, ..begin }).run().await {
            Err(Error::ExecKeyConflict { exec: holder, .. }) => {
                let record = self.exec(id, holder).await?;
                self.same(caller, &session, record, new).await
            }
            Ok(record) => self.to_its_end(record, id, new.wait).await,
            Err(error) => Err(error),
        }
    }

    /// An exec that was asked for before, perhaps of an earlier server: it is begun where nobody has begun it yet.
    ///
    /// # Errors
    /// As [`Self::start_exec`].
    pub async fn start_exec_again(
        &self,
        caller: &Caller,
        id: SessionId,
        exec: ExecId,
        new: NewExec,
    ) -> Result<ExecRecord, Error> {
        let session = self.inner.present(id).await?;
        let record = self.exec(id, exec).await?;
        self.same(caller, &session, record, new).await
    }

    /// The exec that was asked for before.
    async fn same(&self, caller: &Caller, session: &Arc<Session>, record: ExecRecord, new: NewExec) -> Result<ExecRecord, Error> {
        if record.argv != new.program.argv {
            return Err(Error::ExecKeyConflict { session: session.id, exec: record.id });
        }
        // One that sleeps with its session is woken only by whoever waits for its end.
        let is_asleep = self.inner.awake(session).is_none();
        if record.state != ExecState::Running || (is_asleep && !new.wait) {
            return Ok(record);
        }
        let begin = begin(self, session, caller, record.id, &new);
        let record = Begin { known: true, ..begin }.run().await?;
        self.to_its_end(record, session.id, new.wait).await
    }

    async fn to_its_end(&self, record: ExecRecord, id: SessionId, wait: bool) -> Result<ExecRecord, Error> {
        if wait && record.state == ExecState::Running {
            return self.await_exec(id, record.id).await;
        }
        Ok(record)
    }

    /// One exec, as it stands.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn exec(&self, id: SessionId, exec: ExecId) -> Result<ExecRecord, Error> {
        let session = self.inner.present(id).await?;
        if let Some(live) = self.inner.awake(&session) {
            match live.supervisor.call_soon(&Request::GetExec { id: exec }).await {
                Ok(Answer::Exec { exec }) => return Ok(exec),
                // It forgets what has ended; the store doesn't.
                Ok(_) | Err(_) => facts::drain(&self.inner, &session).await?,
            };
        }
        match self.inner.store.exec(id, exec).await? {
            Some(row) => Ok(measured(&session, exec_of(&row)?)),
            None => Err(Error::not_found(format!("exec {exec} in session {id}"))),
        }
    }

    /// A session's execs, newest first.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::Invalid`] for a cursor of another list.
    pub async fn execs(&self, id: SessionId, limit: usize, cursor: Option<Cursor>) -> Result<Page<ExecRecord>, Error> {
        let session = self.inner.present(id).await?;
        facts::drain(&self.inner, &session).await?;
        let page = self.inner.store.list_execs(id, limit.min(MAX_PAGE), cursor).await?;
        let mut items = page.items.iter().map(exec_of).collect::<Result<Vec<_>, _>>()?;
        if items.iter().any(|exec| exec.state == ExecState::Running)
            && let Some(live) = self.inner.awake(&session)
            && let Ok(Answer::Execs { items: present }) = live.supervisor.call_soon(&Request::ListExecs).await
        {
            for item in items.iter_mut().filter(|item| item.state == ExecState::Running) {
                if let Some(now) = present.iter().find(|now| now.id == item.id) {
                    *item = now.clone();
                }
            }
        } else {
            items = items.into_iter().map(|item| measured(&session, item)).collect();
        }
        Ok(Page { items, next_cursor: page.next_cursor })
    }

    /// Waits for an exec's end, through sleeps of its session and changes of supervisors.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Deleted`].
    pub async fn await_exec(&self, id: SessionId, exec: ExecId) -> Result<ExecRecord, Error> {
        let session = self.inner.present(id).await?;
        let mut changes = session.changes();
        loop {
            changes.borrow_and_update();
            let record = self.exec(id, exec).await?;
            if record.state != ExecState::Running {
                return Ok(record);
            }
            let told = async {
                match self.inner.awake(&session) {
                    Some(live) => live.supervisor.call(&Request::AwaitExec { id: exec }).await.is_ok(),
                    None => false,
                }
            };
            tokio::select! {
                told = told => if !told {
                    let _ = tokio::time::timeout(Duration::from_secs(1), changes.changed()).await;
                },
                () = self.inner.closing.cancelled() => return Err(Error::ShuttingDown),
            }
        }
    }

    /// Sends a signal to an exec's process tree. One that has ended gets none, which is no error.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Invalid`]; why the session can't be used.
    pub async fn signal_exec(&self, caller: &Caller, id: SessionId, exec: ExecId, signal: i32) -> Result<ExecRecord, Error> {
        if !(1..=64).contains(&signal) {
            return Err(Error::invalid("signal", "it must be from 1 to 64"));
        }
        let session = self.inner.present(id).await?;
        if self.exec(id, exec).await?.state == ExecState::Running {
            match self.inner.ask(&session, &caller.actor, &Request::SignalExec { id: exec, signal }).await? {
                Asked::Done => {}
                Asked::Refused(error) if matches!(error.code, Code::Ended | Code::NotFound) => {}
                Asked::Refused(error) => return Err(session.call_error(CallError::Refused(error))),
                // With its sandbox it has ended, too.
                Asked::Unknown(error) if self.exec(id, exec).await?.state == ExecState::Running => return Err(error),
                Asked::Unknown(_) => {}
            }
        }
        self.exec(id, exec).await
    }

    /// Gives bytes to an exec's standard input; with `eof` nothing follows them, ever. Answered when the guest has them.
    ///
    /// # Errors
    /// [`Error::Inside`] where it has ended or takes no input; why the session can't be used.
    pub async fn exec_stdin(
        &self,
        caller: &Caller,
        id: SessionId,
        exec: ExecId,
        mut bytes: ByteStream,
        eof: bool,
    ) -> Result<(), Error> {
        let session = self.inner.present(id).await?;
        if self.exec(id, exec).await?.state != ExecState::Running {
            return Err(Error::Inside(wire::WireError::new(Code::Ended, format!("exec {exec} has ended"))));
        }
        let (live, mut conn) = self.inner.connected(&session, &caller.actor).await?;
        let request = Request::ExecStdin { id: exec, eof };
        match conn.ask_with_bytes(&request, &mut bytes, false).await {
            Ok(_) => Ok(()),
            Err(error) if is_unknown(&error) => Err(self.inner.unknown(&session, live.generation(), &error).await),
            Err(error) => Err(session.call_error(error)),
        }
    }
}

/// How far the output of an exec has come whose sandbox can't be asked: its record tells that only at its end.
fn measured(session: &Session, mut exec: ExecRecord) -> ExecRecord {
    if exec.state == ExecState::Running {
        let tail = |name| journal_tail(session, name);
        exec.stdout_bytes = tail(JournalName::Stdout(exec.id)).unwrap_or(exec.stdout_bytes);
        exec.stderr_bytes = tail(JournalName::Stderr(exec.id)).unwrap_or(exec.stderr_bytes);
    }
    exec
}

/// The beginning of an exec under this id.
fn begin<'a>(
    engine: &'a Engine,
    session: &'a Arc<Session>,
    caller: &'a Caller,
    id: ExecId,
    new: &NewExec,
) -> Begin<'a, ExecWork> {
    let start = ExecStart {
        id,
        key: new.key.clone(),
        program: new.program.clone(),
        stdin: new.stdin.clone(),
        stdin_open: new.stdin_open,
        timeout_ms: new.timeout_seconds.map(|seconds| seconds.saturating_mul(1000)),
        actor: Some(caller.actor.to_string()),
        hook: None,
    };
    let work = ExecWork { start, wait: new.wait };
    Begin { inner: &engine.inner, session, caller, work, start: new.start, first: false, known: false }
}

/// An exec that is to be begun.
struct ExecWork {
    start: ExecStart,
    wait: bool,
}

impl Work for ExecWork {
    type Record = ExecRecord;

    fn start(&self) -> Request {
        Request::StartExec { exec: self.start.clone(), wait: self.wait }
    }

    fn look(&self) -> Request {
        Request::GetExec { id: self.start.id }
    }

    fn limit(&self) -> Option<Duration> {
        (!self.wait).then_some(PROMPT)
    }

    fn answered(answer: Answer) -> Option<ExecRecord> {
        match answer {
            Answer::Exec { exec } => Some(exec),
            _ => None,
        }
    }

    fn asked_for(&self, generation: Generation, now: Timestamp) -> ExecRecord {
        let ExecStart { id, key, program, .. } = self.start.clone();
        ExecRecord {
            id,
            key,
            generation,
            state: ExecState::Running,
            exit_code: None,
            signal: None,
            reason: None,
            argv: program.argv,
            cwd: program.cwd,
            user: program.user,
            started_at: now,
            ended_at: None,
            pid: None,
            stdout_bytes: Offset::ZERO,
            stderr_bytes: Offset::ZERO,
            hook: None,
        }
    }

    fn is_running(record: &ExecRecord) -> bool {
        record.state == ExecState::Running
    }

    fn made(&self) -> String {
        self.start.id.to_string()
    }

    async fn stored(&self, inner: &Inner, session: &Session) -> Result<Option<ExecRecord>, Error> {
        inner.store.exec(session.id, self.start.id).await?.map(|row| exec_of(&row)).transpose()
    }

    fn put(change: &mut SessionChange, record: &ExecRecord) {
        change.execs.push(exec_row(change.session.id, record));
    }

    fn lose(session: &Session, change: &mut SessionChange, record: ExecRecord, reason: &str, now: Timestamp) -> ExecRecord {
        lose_exec(session, change, record, reason, now)
    }
}

fn check(new: &NewExec) -> Result<(), Error> {
    let program = &new.program;
    if program.argv.first().is_none_or(String::is_empty) {
        return Err(Error::invalid("argv", "there is no command"));
    }
    if program.argv.iter().any(|word| word.contains('\0')) {
        return Err(Error::invalid("argv", "it can't contain a NUL"));
    }
    if program.env.iter().any(|(name, value)| name.is_empty() || name.contains(['=', '\0']) || value.contains('\0')) {
        return Err(Error::invalid("env", "a name can't be empty or contain '=', and nothing can contain a NUL"));
    }
    if new.stdin.as_ref().is_some_and(|stdin| stdin.len() > MAX_STDIN) {
        return Err(Error::invalid("stdin", "at most 1 MiB can be given at once; leave it open and send the rest"));
    }
    if new.timeout_seconds == Some(0) {
        return Err(Error::invalid("timeout_seconds", "it must be at least 1"));
    }
    match &new.key {
        Some(key) if key.is_empty() || key.len() > MAX_KEY || key.contains(char::is_control) => {
            Err(Error::invalid("key", "it has 1 to 200 characters, none of them a control character"))
        }
        _ => Ok(()),
    }
}

impl Error {
    /// A store's refusal of a row of this session.
    pub(crate) fn of_store(session: SessionId, error: StoreError) -> Error {
        match error {
            StoreError::ExecKeyTaken { holder } => Error::ExecKeyConflict { session, exec: holder },
            other => other.into(),
        }
    }
}
