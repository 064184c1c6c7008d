//! Delete: everything of a session goes but a tombstone.

use crate::{
    ending, facts,
    inner::blocking,
    launch,
    operation::{Context, Failure, lose_works},
};
use model::{EndReason, EventType};
use serde_json::json;
use std::time::Duration;
use store::SessionChange;

/// Deletes a session, whatever it is doing.
pub(crate) async fn run(context: &Context) -> Result<(), Failure> {
    let (inner, session) = (&context.inner, &context.session);
    // A supervisor that is just being started is seen through, then ended.
    let _permit = session.launching.acquire().await.map_err(|_| crate::Error::ShuttingDown)?;
    ending::end_sandbox(&session.layout, inner.programs.runsc_state(), EndReason::Asked, Duration::ZERO).await?;
    // Its last facts are part of its history. Where they can't be read, it is deleted all the same.
    if let Err(error) = facts::drain(inner, session).await {
        tracing::warn!(session = %session.id, %error, "the last facts of a deleted session are not applied");
    }
    let mut lost = SessionChange::new((*session.view().row).clone());
    if let Err(error) = lose_works(inner, session, "deleted", &mut lost).await {
        tracing::warn!(session = %session.id, %error, "the works of a deleted session can't be read");
    }
    let dir = session.layout.dir().to_owned();
    blocking(move || ending::remove_tree(&dir)).await?.map_err(|e| launch::io_error(&e, "remove the session's files"))?;
    let now = inner.now();
    let event = context.event(EventType::SESSION_DELETED, json!({ "reason": EndReason::Asked }));
    let change = move |change: &mut SessionChange| {
        change.execs.extend(lost.execs.iter().cloned());
        change.terminals.extend(lost.terminals.iter().cloned());
        change.events.extend(lost.events.iter().cloned());
        let row = &mut change.session;
        row.key_freed = true;
        row.deleted_at = Some(now);
        row.reason = Some(EndReason::Asked.to_string());
        row.image_generation = None;
        change.events.push(event.clone());
    };
    context.finish(Box::new(change)).await?;
    Ok(())
}
