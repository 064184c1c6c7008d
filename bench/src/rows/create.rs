//! From a request to the first exec's answer.

use crate::{
    measure::Samples,
    raw::Raw,
    report::{Row, figure},
};
use anyhow::Result;
use dormouse_tests::{Options, Server, Session, eventually};
use serde_json::json;

/// Each round empties the pool, which is filled again only when the creates have calmed down.
const POOL: u32 = 8;
const ROUNDS: usize = 10;

/// Creates from the pool, creates without one, and raw boots, in turn.
pub fn create() -> Result<Vec<Row>> {
    let pooling = Server::with(Options { pool: POOL, ..Options::default() });
    let unpooled = Server::start();
    let (mut ours_pooled, mut ours_unpooled, mut raw) = (Samples::default(), Samples::default(), Samples::default());
    first_exec(&unpooled).delete();
    for round in 0..ROUNDS {
        eventually("the pool is full", || (pooled(&pooling) == POOL).then_some(()));
        let made: Vec<Session> = (0..POOL).map(|_| ours_pooled.time(|| first_exec(&pooling))).collect();
        made.iter().for_each(Session::delete);
        // The pool must not be filled while others are timed.
        eventually("the pool is full", || (pooled(&pooling) == POOL).then_some(()));
        for turn in 0..2 {
            if (round + turn) % 2 == 0 {
                ours_unpooled.time(|| first_exec(&unpooled)).delete();
            } else {
                let mut sandbox = Raw::new("echo ready; read line")?;
                raw.time(|| sandbox.run().and_then(|()| sandbox.line()))?;
            }
        }
    }
    let (ours, raw) = (ours_unpooled.median(), raw.median());
    let beside = format!("`runsc run` to first output: {}", figure(raw, "ms"));
    let count = ours_pooled.count();
    let (p50, p99) = (ours_pooled.median(), ours_pooled.percentile(99.0));
    Ok(vec![
        Row::at_most("create-pooled", format!("create from the pool to first exec answered, p50 of {count}"), p50, "ms", 40.0)
            .beside(&beside),
        Row::at_most("create-pooled-p99", "the same, p99", p99, "ms", 120.0),
        Row::at_most("create-unpooled", "create without a pool to first exec answered, p50", ours, "ms", 0.0)
            .times_raw(raw, 1.3)
            .beside(beside),
    ])
}

fn first_exec(server: &Server) -> Session {
    let session = server.session();
    let exec = session.exec_with(&json!({ "argv": ["/bin/echo", "ready"] }));
    assert_eq!(exec.stdout, "ready\n");
    session
}

fn pooled(server: &Server) -> u32 {
    let text = server.client.get("/metrics").expect(200).text();
    let count = text.lines().find_map(|line| line.strip_prefix("dormouse_pooled_sandboxes ")?.trim().parse().ok());
    count.expect("the server counts its pool")
}
