//! Stop: the sandbox goes, its memory is given up, the disk stays.

use crate::{
    ending, facts, idle,
    moments::{self, Moment},
    operation::{Context, Failure, lose_works},
    wake,
};
use model::{EndReason, State};
use std::time::Duration;
use store::SessionChange;

/// What programs are given between TERM and KILL.
const GRACE: Duration = Duration::from_secs(10);
/// How long what a supervisor wrote at its end may take to be read.
const READ_LIMIT: Duration = Duration::from_secs(10);

/// Stops a session.
pub(crate) async fn run(context: &Context) -> Result<(), Failure> {
    let (inner, session) = (&context.inner, &context.session);
    let (live, cause) = (session.live(), context.cause());
    if let Some(awake) = inner.awake(session).filter(|_| session.view().row.state == State::Running) {
        if cause == EndReason::Idle {
            idle::confirm(context, &awake).await?;
        }
        moments::announce(inner, session, &awake, Moment::BeforeStop).await;
    }
    let given_up = session.view().row.image_generation;
    let grace = if session.view().row.state.has_sandbox() { GRACE } else { Duration::ZERO };
    ending::end_sandbox(&session.layout, inner.programs.runsc_state(), cause, grace).await?;
    if let Some(live) = live {
        // It reads the last facts.
        let _ = tokio::time::timeout(READ_LIMIT, live.gone.cancelled()).await;
    }
    facts::drain(inner, session).await?;
    let mut lost = SessionChange::new((*session.view().row).clone());
    lose_works(inner, session, cause.as_str(), &mut lost).await?;
    let now = inner.now();
    let change = move |change: &mut SessionChange| {
        change.events.extend(lost.events.iter().cloned());
        change.execs.extend(lost.execs.iter().cloned());
        change.terminals.extend(lost.terminals.iter().cloned());
        let row = &mut change.session;
        row.reason = Some(cause.to_string());
        row.ended_reason = Some(cause.to_string());
        if cause != EndReason::Idle {
            row.ended_detail = None;
        }
        row.ended_at = Some(now);
        row.image_generation = None;
    };
    context.finish(Box::new(change)).await?;
    if let Some(spent) = given_up {
        wake::drop_image(session, spent);
    }
    Ok(())
}
