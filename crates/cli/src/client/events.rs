//! `events`: what happened.

use super::{
    Context,
    backoff::Backoff,
    failure::{Failure, Result},
    http::{Call, no_body},
    lines::ServerEvents,
    select,
    text::{clip, local, safe},
};
use api_types::Event;
use serde_json::Value;

/// `dormouse events`. With `follow` what comes; of one session, what was before it, too.
///
/// # Errors
/// What the server refuses.
pub async fn command(ctx: &Context, session: Option<&str>, follow: bool) -> Result<()> {
    let path = match session {
        Some(word) => format!("/v1/sessions/{}/events", select::session(&ctx.client, word).await?.id),
        None => "/v1/events".to_owned(),
    };
    if !follow {
        let events: Vec<Value> = ctx.client.list(&format!("{path}?limit=1000")).await?;
        return events.iter().try_for_each(|event| show(ctx, event));
    }
    let mut last: Option<String> = None;
    let mut backoff = Backoff::default();
    loop {
        let mut call = Call::get(format!("{path}?follow=true")).header("accept", "text/event-stream");
        if let Some(id) = &last {
            call = call.header("last-event-id", id.clone());
        }
        let failure = match ctx.client.send_stream(call, no_body()).await {
            Ok(response) => {
                let ended = pass_on(ctx, ServerEvents::new(response.into_body()), &mut last, &mut backoff).await;
                ended.err().unwrap_or_else(|| Failure::unreachable("the server closed the connection"))
            }
            Err(failure) => failure,
        };
        if !failure.is_passing() {
            return Err(failure);
        }
        tokio::time::sleep(backoff.next_pause()).await;
    }
}

async fn pass_on(ctx: &Context, mut events: ServerEvents, last: &mut Option<String>, backoff: &mut Backoff) -> Result<()> {
    while let Some(event) = events.next().await? {
        backoff.reset();
        let value: Value = serde_json::from_str(&event.data).map_err(|e| Failure::failed(format!("can't read an event: {e}")))?;
        show(ctx, &value)?;
        if let Some(id) = event.id.filter(|id| !id.is_empty()) {
            *last = Some(id);
        }
    }
    Ok(())
}

fn show(ctx: &Context, value: &Value) -> Result<()> {
    if ctx.json {
        return ctx.print_json(value);
    }
    let event: Event = Context::read(value)?;
    let data = if event.data.is_null() { String::new() } else { clip(&safe(&event.data.to_string()), 120) };
    let line = format!(
        "{}  {}  {:>4}  {:<20}  {:<12}  {data}",
        local(event.at),
        event.session_id,
        event.seq.0,
        safe(&event.kind.0),
        safe(&event.actor.0)
    );
    ctx.print(&format!("{}\n", line.trim_end()))
}
