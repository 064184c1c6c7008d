//! Moments of a session's life that its own programs are told of: through hooks and the socket inside.
//!
//! A hook is a command of the session that is run at such a moment, as an exec with its output kept. It has 30 seconds,
//! its failure is an event and never stands in the way.

use crate::{
    Engine, Error, facts,
    inner::Inner,
    session::{Live, Session},
};
use model::{Actor, EventType, ExecId, ExecState, Generation, HookName, Hooks, SessionId};
use serde_json::json;
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use store::{NewEvent, SessionChange, SessionRow};
use wire::{
    control::{ExecStart, Request},
    records::Program,
};

/// How long a hook may run.
const HOOK_LIMIT: Duration = Duration::from_secs(30);
/// How much longer its end may take to be told: its tree is given TERM before KILL.
const END_LIMIT: Duration = Duration::from_secs(5);

/// A moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Moment {
    /// The first sandbox is there, with the first files.
    Created,
    BeforeHibernate,
    BeforeStop,
    TimeoutNear {
        left: Duration,
    },
    Woken {
        gap: Duration,
        generation: Generation,
    },
    /// The same of a fork of that session, which slept in its snapshot.
    Forked {
        gap: Duration,
        of: SessionId,
    },
}

impl Moment {
    fn hook(self) -> HookName {
        match self {
            Moment::Created => HookName::OnCreate,
            Moment::BeforeHibernate => HookName::BeforeHibernate,
            Moment::BeforeStop => HookName::BeforeStop,
            Moment::TimeoutNear { .. } => HookName::OnTimeout,
            Moment::Woken { .. } | Moment::Forked { .. } => HookName::OnWake,
        }
    }

    /// What comes after is held back until the hook has ended: afterwards it couldn't run any more.
    fn is_waited_for(self) -> bool {
        matches!(self, Moment::BeforeHibernate | Moment::BeforeStop)
    }

    /// The word on the socket inside. A guest knows by itself that it was booted or woken.
    fn word(self) -> Option<&'static str> {
        match self {
            Moment::BeforeHibernate => Some("before_hibernate"),
            Moment::BeforeStop => Some("before_stop"),
            Moment::TimeoutNear { .. } => Some("timeout_near"),
            Moment::Created | Moment::Woken { .. } | Moment::Forked { .. } => None,
        }
    }

    fn environment(self) -> BTreeMap<String, String> {
        let mut env = BTreeMap::from([("DORMOUSE_HOOK".to_owned(), self.hook().to_string())]);
        match self {
            Moment::TimeoutNear { left } => {
                env.insert("DORMOUSE_SECONDS_LEFT".to_owned(), left.as_secs().to_string());
            }
            Moment::Woken { gap, generation } => {
                env.insert("DORMOUSE_GAP_SECONDS".to_owned(), format!("{:.3}", gap.as_secs_f64()));
                env.insert("DORMOUSE_GENERATION".to_owned(), generation.to_string());
            }
            Moment::Forked { gap, of } => {
                env.insert("DORMOUSE_GAP_SECONDS".to_owned(), format!("{:.3}", gap.as_secs_f64()));
                env.insert("DORMOUSE_GENERATION".to_owned(), Generation::FIRST.to_string());
                env.insert("DORMOUSE_FORK_OF".to_owned(), of.to_string());
            }
            Moment::Created | Moment::BeforeHibernate | Moment::BeforeStop => {}
        }
        env
    }
}

/// Tells programs inside of a moment, and runs the session's hook for it. What goes wrong is told, and stops nothing.
pub(crate) async fn announce(inner: &Arc<Inner>, session: &Arc<Session>, live: &Live, moment: Moment) {
    if let Some(word) = moment.word() {
        let seconds = match moment {
            Moment::TimeoutNear { left } => Some(left.as_secs()),
            _ => None,
        };
        let request = Request::Moment { moment: word.to_owned(), seconds };
        if let Err(error) = live.supervisor.call_within(&request, END_LIMIT).await {
            tracing::debug!(session = %session.id, %error, word, "programs inside are not told");
        }
    }
    let Some(argv) = hook_of(&session.view().row, moment.hook()) else { return };
    let exec = ExecStart {
        id: ExecId::new(),
        key: None,
        program: Program { argv, env: moment.environment(), cwd: None, user: None },
        stdin: None,
        stdin_open: false,
        timeout_ms: Some(u64::try_from(HOOK_LIMIT.as_millis()).unwrap_or(u64::MAX)),
        actor: Some(Actor::system().to_string()),
        hook: Some(moment.hook().to_string()),
    };
    let request = Request::StartExec { exec, wait: moment.is_waited_for() };
    if let Err(error) = live.supervisor.call_within(&request, HOOK_LIMIT + END_LIMIT).await {
        tracing::warn!(session = %session.id, hook = %moment.hook(), %error, "a hook did not run to its end");
        let (now, text) = (inner.now(), error.to_string());
        let failed = move |row: &SessionRow| {
            let mut change = SessionChange::new(row.clone());
            let data = json!({ "hook": moment.hook(), "exec_id": null, "error": text });
            let (kind, actor) = (EventType::HOOK_ENDED, Actor::system());
            change.events.push(NewEvent { at: now, kind, actor, operation_id: None, data });
            Some(change)
        };
        if let Err(error) = inner.change(session, Box::new(failed)).await {
            tracing::warn!(session = %session.id, %error, "the failure of a hook is not written down");
        }
    }
}

fn hook_of(row: &SessionRow, name: HookName) -> Option<Vec<String>> {
    // What was stored was checked when it was asked for.
    serde_json::from_value::<Hooks>(row.hooks.clone()).ok()?.remove(&name)
}

impl Engine {
    /// Waits until no hook of the session runs any more.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Deleted`].
    pub async fn hooks_ended(&self, id: SessionId) -> Result<(), Error> {
        let session = self.inner.present(id).await?;
        facts::drain(&self.inner, &session).await?;
        for row in self.inner.store.running_execs(id).await? {
            let exec = facts::exec_of(&row)?;
            if exec.hook.is_some() && exec.state == ExecState::Running {
                self.await_exec(id, exec.id).await?;
            }
        }
        Ok(())
    }
}
