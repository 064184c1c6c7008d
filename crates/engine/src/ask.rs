//! Asking a session's sandbox to do something once.
//!
//! What was certainly not asked is asked again. What may have been done and was not answered is told as [`Error::Lost`],
//! with the cause: never as a success, and never as a failure.

use crate::{
    Error,
    begin::{AGAIN, PATIENCE, TOLD_WITHIN, is_unknown},
    inner::Inner,
    session::{Live, Session},
    supervisor_client::{CallError, Conn},
};
use futures_util::{FutureExt, future::BoxFuture};
use model::{Actor, Generation};
use std::sync::Arc;
use tokio::time::{Instant, timeout, timeout_at};
use wire::{Code, WireError, control::Request};

/// What came of a request.
pub(crate) enum Asked {
    Done,
    Refused(WireError),
    /// It may have been done. What that is told as.
    Unknown(Error),
}

impl Inner {
    /// Asks the sandbox of a session, which is brought up for it.
    ///
    /// # Errors
    /// Nothing was asked: why the session can't be used.
    pub(crate) async fn ask(self: &Arc<Self>, session: &Arc<Session>, actor: &Actor, request: &Request) -> Result<Asked, Error> {
        let call = |live: Arc<Live>| {
            let request = request.clone();
            async move { live.supervisor.call_soon(&request).await }.boxed()
        };
        let (live, answer) = self.with_live(session, actor, false, call).await?;
        Ok(match answer {
            Ok(_) => Asked::Done,
            Err(CallError::Refused(error)) if !matches!(error.code, Code::SandboxGone | Code::Unresponsive) => {
                Asked::Refused(error)
            }
            Err(error) => Asked::Unknown(self.unknown(session, live.generation(), &error).await),
        })
    }

    /// A connection of the caller's own to the sandbox of a session, which is brought up for it.
    ///
    /// # Errors
    /// Why the session can't be used.
    pub(crate) async fn connected(self: &Arc<Self>, session: &Arc<Session>, actor: &Actor) -> Result<(Arc<Live>, Conn), Error> {
        let connect = |live: Arc<Live>| async move { live.supervisor.connect().await }.boxed();
        let (live, conn) = self.with_live(session, actor, false, connect).await?;
        Ok((live, conn.map_err(|error| session.call_error(error))?))
    }

    /// Asks the sandbox of a session, which is brought up for it; with `start` it is booted, too. Tries again while the
    /// sandbox is just changing: then nothing was asked.
    pub(crate) async fn with_live<T>(
        self: &Arc<Self>,
        session: &Arc<Session>,
        actor: &Actor,
        start: bool,
        ask: impl Fn(Arc<Live>) -> BoxFuture<'static, Result<T, CallError>>,
    ) -> Result<(Arc<Live>, Result<T, CallError>), Error> {
        let until = Instant::now() + PATIENCE;
        loop {
            let mut changes = session.changes();
            let live = self.usable(session, actor, start).await?;
            match ask(live.clone()).await {
                Err(CallError::Unreachable(_)) => {}
                Err(CallError::Refused(error)) if error.code == Code::Busy => {}
                answer => return Ok((live, answer)),
            }
            if Instant::now() >= until {
                return Err(session.held());
            }
            let _ = timeout(AGAIN, changes.changed()).await;
        }
    }

    /// What a caller is told whose request may have been done by the sandbox of that generation, with the cause.
    pub(crate) async fn unknown(&self, session: &Session, asked: Generation, error: &CallError) -> Error {
        if !is_unknown(error) {
            return session.held();
        }
        let slow = match error {
            CallError::TimedOut(_) => true,
            CallError::Refused(error) => error.code == Code::Unresponsive,
            CallError::Unreachable(_) | CallError::Broken(_) => false,
        };
        if !slow {
            told(session, asked).await;
        }
        let row = session.view().row;
        let cause = row.ended_reason.clone().filter(|_| !row.state.has_sandbox() && row.generation == asked);
        let detail = match (cause, &row.ended_detail) {
            (Some(reason), Some(detail)) => format!("{reason}: {detail}"),
            (Some(reason), None) => reason,
            (None, _) => error.to_string(),
        };
        Error::Lost { session: session.id, detail }
    }
}

/// Waits, for a while, until the server has been told what became of the sandbox of that generation.
async fn told(session: &Session, asked: Generation) {
    let until = Instant::now() + TOLD_WITHIN;
    let mut changes = session.changes();
    loop {
        changes.borrow_and_update();
        let row = session.view().row;
        if !row.state.has_sandbox() || row.generation != asked {
            return;
        }
        if timeout_at(until, changes.changed()).await.is_err() {
            return;
        }
    }
}
