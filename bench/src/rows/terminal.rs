//! How soon a late viewer sees the screen.

use crate::{
    measure::Samples,
    report::{Row, figure},
};
use anyhow::Result;
use dormouse_tests::{Server, eventually, terminal::Viewer};
use serde_json::json;
use wire::terminal::ServerFrame;

/// 10,000 coloured lines, and then silence.
const PROGRAM: &str =
    r#"seq -f "$(printf '\033[32m%%05g\033[0m the quick brown fox jumps over the lazy dog')" 1 10100; exec sleep 1000000"#;

/// Attach to a terminal with a full scrollback, from the first byte of the connection to the last of the redraw.
pub fn attach() -> Result<Vec<Row>> {
    let server = Server::start();
    let session = server.session();
    let body = json!({ "argv": ["/bin/sh", "-c", PROGRAM], "cols": 80, "rows": 24 });
    let terminal = session.client.post(&session.path("/terminals"), &body).expect(201).json();
    let terminal = terminal["id"].as_str().expect("a terminal has an id").to_owned();
    let text = session.path(&format!("/terminals/{terminal}/screen?format=text"));
    eventually("all lines are written", || session.client.get(&text).expect(200).text().contains("10100").then_some(()));

    let (mut ours, mut healthz, mut bytes, mut lines) = (Samples::default(), Samples::default(), 0, 0);
    for n in 0..30 {
        let query = format!("client=00000000-0000-4000-8000-{n:012}&cols=80&rows=24&from=screen&mode=observe");
        let (viewer, screen) = ours.time(|| {
            let mut viewer = Viewer::attach(&session, &terminal, &query).expect("the terminal is there");
            let frames = viewer.until("the screen", |frame| matches!(frame, ServerFrame::Screen { .. }));
            (viewer, frames.into_iter().next_back())
        });
        viewer.cut();
        if let Some(ServerFrame::Screen { bytes: redraw, .. }) = screen {
            (bytes, lines) = (redraw.len(), redraw.windows(9).filter(|word| word == b"brown fox").count());
        }
        healthz.time(|| server.client.get("/healthz"));
    }
    assert!(lines >= 10_000, "the redraw has {lines} of 10,000 lines");
    server.delete_all_and_check();
    let what = format!("attach to a terminal with {lines} lines ({}), p50", figure(bytes as f64 / 1e6, "MB"));
    let row = Row::at_most("attach-10k", what, ours.median(), "ms", 20.0);
    Ok(vec![row.beside(format!("an empty HTTP request: {}", figure(healthz.median(), "ms")))])
}
