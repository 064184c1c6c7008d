//! Stays with a supervisor: reads what it writes down, and notices its end.

use crate::{
    driver::{Message, tell},
    ending, facts,
    inner::Inner,
    network, recapture,
    session::{Live, SandboxEnd, Session},
    timers,
};
use lifecycle::Command;
use model::{Actor, EndReason};
use std::{sync::Arc, time::Duration};
use wire::{
    control::{Answer, Request},
    layout::JournalName,
};

/// Facts of one session are committed at most this often.
const PACE: Duration = Duration::from_millis(20);
/// How long after a broken connection the supervisor is tried again.
const AGAIN: Duration = Duration::from_millis(100);

/// Makes `live` the session's supervisor, and stays with it until its end.
pub(crate) fn attach(inner: &Arc<Inner>, session: &Arc<Session>, live: Arc<Live>) {
    session.set_live(Some(live.clone()));
    session.set_idle_look_after(&session.view().row, inner.now());
    timers::arm(inner, session);
    network::follow(inner, session, &live);
    let (inner_, session) = (inner.clone(), session.clone());
    inner.tasks.spawn(async move { watch(inner_, session, live).await });
}

enum Followed {
    /// Its sandbox has ended.
    Ended,
    /// The connection has.
    Broken,
    ShuttingDown,
}

async fn watch(inner: Arc<Inner>, session: Arc<Session>, live: Arc<Live>) {
    let mark = ending::mark(&session.layout);
    loop {
        match follow(&inner, &session, &live).await {
            Followed::Ended => break,
            Followed::ShuttingDown => return,
            Followed::Broken if !ending::is_held(&session.layout) => break,
            Followed::Broken => tokio::time::sleep(AGAIN).await,
        }
    }
    read(&inner, &session).await;
    let generation = live.generation();
    let end = session.end_of(generation);
    let orphaned = end.is_none() && ending::orphan(&session.layout, inner.programs.runsc_state()).is_some();
    let hibernated = !session.view().row.state.has_sandbox();
    if end.is_none() && !hibernated {
        let pid = mark.as_ref().map(|mark| mark.pid);
        recapture::note_loss(&inner, &session, pid).await;
        if !orphaned {
            clear_away(&inner, &session, pid).await;
        }
    }
    session.drop_live(&live);
    live.gone.cancel();
    let message = if orphaned {
        Message::SupervisorLost(live)
    } else {
        Message::SandboxEnded(end.unwrap_or_else(|| SandboxEnd {
            generation,
            reason: EndReason::SupervisorLost,
            detail: "its supervisor ended without a word, and its sandbox, too".to_owned(),
        }))
    };
    let _ = tell(&inner, &session, message).await;
}

/// Reads facts as they come.
async fn follow(inner: &Arc<Inner>, session: &Arc<Session>, live: &Live) -> Followed {
    let Ok(mut conn) = live.supervisor.connect().await else { return Followed::Broken };
    if conn.send(&Request::Watch { journal: JournalName::Facts }).await.is_err() {
        return Followed::Broken;
    }
    loop {
        let answer = tokio::select! {
            answer = conn.answer() => answer,
            () = inner.closing.cancelled() => return Followed::ShuttingDown,
        };
        match answer {
            Ok(Answer::Tail { ended: true, .. }) => return Followed::Ended,
            Ok(Answer::Tail { .. }) => {
                read(inner, session).await;
                tokio::time::sleep(PACE).await;
            }
            Ok(_) | Err(_) => return Followed::Broken,
        }
    }
}

async fn read(inner: &Arc<Inner>, session: &Arc<Session>) {
    match facts::drain(inner, session).await {
        Ok(told) => {
            if let Some(detail) = told.confirm_failed {
                tracing::error!(session = %session.id, detail, "a memory image does not restore; its session goes on");
                let (inner_, session) = (inner.clone(), session.clone());
                inner.tasks.spawn(async move {
                    let admitted = inner_.command(&session, Command::Wake, &Actor::system()).await;
                    let thawed = match admitted {
                        Ok(admitted) => admitted.wait().await,
                        Err(error) => Err(error),
                    };
                    if let Err(error) = thawed {
                        tracing::error!(session = %session.id, %error, "the original of a bad memory image can't go on");
                    }
                });
            }
        }
        Err(error) => tracing::warn!(session = %session.id, %error, "facts are not applied yet"),
    }
}

/// Supervisor and sandbox are gone without a word: what they left is cleared away.
async fn clear_away(inner: &Arc<Inner>, session: &Arc<Session>, pid: Option<u32>) {
    let Ok(_permit) = session.launching.acquire().await else { return };
    // A newer one has the directory by now.
    if pid.is_none() || ending::mark(&session.layout).map(|mark| mark.pid) != pid {
        return;
    }
    if let Err(error) = ending::clear_the_way(&session.layout, inner.programs.runsc_state()).await {
        tracing::error!(session = %session.id, %error, "what a lost supervisor left can't be cleared away");
    }
}
