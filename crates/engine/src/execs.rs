//! Execs: starting them, asking how they stand, and what they are told.

use crate::{
    ByteStream, Caller, Engine, Error, NewExec,
    facts::{self, exec_of, exec_row},
    operation::journal_tail,
    session::{Live, Session},
    supervisor_client::CallError,
};
use model::{ExecId, ExecState, Offset, SessionId};
use std::{sync::Arc, time::Duration};
use store::{Cursor, MAX_PAGE, Page, RequestMark, SessionChange, SessionRow, StoreError};
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
/// How often a start is tried that meets a session just going to sleep.
const TRIES: usize = 20;
const AGAIN: Duration = Duration::from_millis(50);

impl Engine {
    /// Runs a command. The session is woken for it. With `wait` it is answered when the command has ended.
    ///
    /// # Errors
    /// Why the session can't be used; [`Error::Inside`] for a command that can't be right. One that isn't there or can't
    /// be run is an exec that ended with 127 or 126.
    pub async fn start_exec(&self, caller: &Caller, id: SessionId, new: NewExec) -> Result<ExecRecord, Error> {
        check(&new)?;
        let session = self.inner.present(id).await?;
        let start = ExecStart {
            id: ExecId::new(),
            key: new.key.clone(),
            program: new.program.clone(),
            stdin: new.stdin.clone(),
            stdin_open: new.stdin_open,
            timeout_ms: new.timeout_seconds.map(|seconds| seconds.saturating_mul(1000)),
            actor: Some(caller.actor.to_string()),
            hook: None,
        };
        if let Some(key) = &new.key
            && let Some(row) = self.inner.store.exec_by_key(id, key.clone()).await?
        {
            return self.same(&session, exec_of(&row)?, &new).await;
        }
        let mut live = self.inner.usable(&session, &caller.actor, new.start).await?;
        if new.key.is_some() || caller.request.is_some() {
            // Written down first: however often it is asked for, it runs once.
            match self.write_down(caller, &session, &live, &start).await {
                Err(Noted::Key(holder)) => {
                    let record = self.exec(id, holder).await?;
                    return self.same(&session, record, &new).await;
                }
                Err(Noted::Failed(error)) => return Err(error),
                Ok(()) => {}
            }
        }
        let exec = start.id;
        let request = Request::StartExec { exec: start, wait: new.wait };
        for _ in 0..TRIES {
            match live.supervisor.call(&request).await {
                Ok(Answer::Exec { exec }) => return Ok(exec),
                Ok(_) => return Err(Error::internal("the supervisor answered with something else")),
                // It is just going to sleep, or has just gone: nothing was started.
                Err(CallError::Unreachable(_)) => tokio::time::sleep(AGAIN).await,
                Err(CallError::Refused(error)) if error.code == Code::Busy => tokio::time::sleep(AGAIN).await,
                Err(CallError::Broken(detail)) => return self.after_break(&session, exec, new.wait, detail).await,
                Err(error) => return Err(session.call_error(error)),
            }
            live = self.inner.usable(&session, &caller.actor, new.start).await?;
        }
        Err(session.held())
    }

    /// The connection ended after an exec was asked for: whether it runs, what was written down says.
    async fn after_break(&self, session: &Arc<Session>, exec: ExecId, wait: bool, detail: String) -> Result<ExecRecord, Error> {
        let found = if wait { self.await_exec(session.id, exec).await } else { self.exec(session.id, exec).await };
        found.map_err(|error| match error {
            Error::NotFound { .. } => Error::Lost { session: session.id, detail },
            other => other,
        })
    }

    /// The exec that a key was given to before.
    async fn same(&self, session: &Session, record: ExecRecord, new: &NewExec) -> Result<ExecRecord, Error> {
        if record.argv != new.program.argv {
            return Err(Error::ExecKeyConflict { session: session.id, exec: record.id });
        }
        if new.wait && record.state == ExecState::Running {
            return self.await_exec(session.id, record.id).await;
        }
        Ok(record)
    }

    async fn write_down(&self, caller: &Caller, session: &Arc<Session>, live: &Live, start: &ExecStart) -> Result<(), Noted> {
        let record = ExecRecord {
            id: start.id,
            key: start.key.clone(),
            generation: live.generation(),
            state: ExecState::Running,
            exit_code: None,
            signal: None,
            reason: None,
            argv: start.program.argv.clone(),
            cwd: start.program.cwd.clone(),
            user: start.program.user.clone(),
            started_at: self.inner.now(),
            ended_at: None,
            pid: None,
            stdout_bytes: Offset::ZERO,
            stderr_bytes: Offset::ZERO,
            hook: None,
        };
        let row = exec_row(session.id, &record);
        let request = caller.request.clone().map(|id| RequestMark { id, made: start.id.to_string() });
        let change = move |session: &SessionRow| {
            let mut change = SessionChange::new(session.clone());
            change.execs.push(row.clone());
            change.request.clone_from(&request);
            Some(change)
        };
        self.inner.change(session, Box::new(change)).await.map_err(|error| match error {
            Error::ExecKeyConflict { exec, .. } => Noted::Key(exec),
            other => Noted::Failed(other),
        })
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
            let live = self.inner.usable(&session, &caller.actor, false).await?;
            match live.supervisor.call_soon(&Request::SignalExec { id: exec, signal }).await {
                Ok(_) => {}
                Err(CallError::Refused(error)) if matches!(error.code, Code::Ended | Code::NotFound) => {}
                Err(error) => return Err(session.call_error(error)),
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
        let live = self.inner.usable(&session, &caller.actor, false).await?;
        let mut conn = live.supervisor.connect().await.map_err(|error| session.call_error(error))?;
        let request = Request::ExecStdin { id: exec, eof };
        conn.ask_with_bytes(&request, &mut bytes, false).await.map_err(|error| session.call_error(error))?;
        Ok(())
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

enum Noted {
    Key(ExecId),
    Failed(Error),
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
