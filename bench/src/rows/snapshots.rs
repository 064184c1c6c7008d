//! Live snapshots and forks, beside the raw tool's checkpoints and restores.

use crate::{
    measure::Samples,
    raw::Raw,
    report::{Row, figure},
};
use anyhow::{Context, Result};
use dormouse_tests::{Server, Session, eventually, server::Options};
use serde_json::{Value, json};

const RANDOM: &str = r#"import os, time; data = os.urandom(256 << 20); print("ready", flush=True); time.sleep(1e9)"#;
/// 1 GiB of disk in 10,240 files of 100 KiB.
const FILES: &str = "mkdir /root/d; cd /root/d; head -c 104857600 /dev/urandom > /tmp/r; for i in $(seq 10); do mkdir $i; split -b 102400 -a 4 -d /tmp/r $i/; done; rm /tmp/r; sync";
/// 50 MiB of it in 100 files are others.
const CHANGE: &str = "cd /root/d; for f in $(ls 1 | head -100); do head -c 524288 /dev/urandom > 1/$f; done";
/// Snapshots that are timed.
const ROUNDS: usize = 5;
const FORKS: usize = 10;

fn script(python: &str) -> String {
    format!("python3 -c '{python}' & while read line; do echo $line; done")
}

fn with_memory(session: &Session) {
    let exec = session.start_sh(&format!("exec python3 -c '{RANDOM}'"));
    eventually("Python runs", || (session.output(&exec, "stdout") == b"ready\n").then_some(()));
}

fn snapshot(session: &Session) -> Value {
    session.client.post(&session.path("/snapshots"), &json!({})).expect(201).json()
}

/// How long a snapshot held the session still, in milliseconds.
fn paused(session: &Session, taken: &Value) -> Result<f64> {
    let events = session.events();
    let event =
        events.iter().rev().find(|event| event["type"] == "snapshot.taken" && event["data"]["snapshot_id"] == taken["id"]);
    event.context("a snapshot is an event")?["data"]["paused_ms"].as_f64().context("it says how long it took")
}

/// 256 MiB of memory and 1 GiB of disk of which 50 MiB changed; then one file of 1 GiB that changed.
pub fn live() -> Result<Vec<Row>> {
    let server = Server::start();
    let session = server.session();
    with_memory(&session);
    session.out(FILES);
    snapshot(&session);
    let mut raw = Raw::new(&script(RANDOM))?;
    raw.run()?;
    anyhow::ensure!(raw.line()? == "ready", "the raw sandbox is ready");
    let (mut ours, mut of_raw) = (Samples::default(), Samples::default());
    for _ in 0..ROUNDS {
        session.out(CHANGE);
        let taken = snapshot(&session);
        ours.push(paused(&session, &taken)?);
        of_raw.time(|| raw.checkpoint_unsynced())?;
    }
    session.out("head -c 1073741824 /dev/zero | tr '\\0' x > /root/large; sync");
    snapshot(&session);
    session.out("dd if=/dev/urandom of=/root/large bs=1M count=1 seek=500 conv=notrunc 2>/dev/null");
    let taken = snapshot(&session);
    let large = paused(&session, &taken)?;
    server.delete_all_and_check();
    let (pause, raw_ms) = (ours.median(), of_raw.median());
    let row = |id, what: &str, ours: f64| {
        let mut row = Row::at_most(id, what, ours, "ms", 1.2 * raw_ms + 100.0)
            .beside(format!("raw checkpoint, not synced: {}", figure(raw_ms, "ms")));
        (row.raw, row.target_text) = (Some(raw_ms), "≤ 1.2 × raw + 100 ms".to_owned());
        row
    };
    let what = format!("live snapshot, 256 MiB of memory, 50 MiB of 1 GiB changed: paused, p50 of {ROUNDS}");
    Ok(vec![row("snapshot-paused", &what, pause), row("snapshot-paused-1g", "the same where one file of 1 GiB changed", large)])
}

/// Ten forks of a small session, until all have answered an exec.
pub fn forks() -> Result<Vec<Row>> {
    let server = Server::with(Options::default());
    let session = server.session();
    session.out("echo x > /root/x");
    let taken = snapshot(&session);
    let path = format!("/v1/snapshots/{}/fork", taken["id"].as_str().context("an id")?);
    let mut raw = Raw::new("while read line; do echo $line; done")?;
    raw.run()?;
    raw.echo("ready")?;
    raw.checkpoint()?;
    raw.kill()?;
    let (mut ours, mut of_raw) = (Samples::default(), Samples::default());
    for round in 0..4 {
        let (mut all, mut one) = (Samples::default(), Samples::default());
        let forks: Vec<Session> = all.time(|| {
            let forked = session.client.post(&path, &json!({ "count": FORKS })).expect(201).json();
            let forks: Vec<Session> =
                forked["items"].as_array().into_iter().flatten().map(|item| Session::new(session.client.clone(), item)).collect();
            assert_eq!(forks.len(), FORKS, "{forked}");
            std::thread::scope(|scope| {
                for fork in &forks {
                    scope.spawn(|| assert_eq!(fork.exec_with(&json!({ "argv": ["/bin/cat", "/root/x"] })).stdout, "x\n"));
                }
            });
            forks
        });
        one.time(|| raw.restore().and_then(|()| raw.echo("awake")))?;
        raw.checkpoint()?;
        raw.kill()?;
        if round > 0 {
            ours.push(all.median());
            of_raw.push(one.median());
        }
        forks.iter().for_each(Session::delete);
    }
    let share = fork_disk(&server)?;
    server.delete_all_and_check();
    let cores = std::thread::available_parallelism()?.get() as f64;
    let (together, one) = (ours.median(), of_raw.median());
    let mut row = Row::at_most("fork-10", "fork ×10 of a small session, all have answered an exec", together, "ms", 0.0)
        .times_raw(FORKS as f64 * one / cores, 1.5)
        .beside(format!("one `runsc restore` to first output: {}", figure(one, "ms")));
    row.target_text = "≤ 1.5 × (10 × one raw restore / cores)".to_owned();
    let what = "disk that ten untouched forks take, of one snapshot of a warm Python (64 MiB)";
    Ok(vec![row, Row::at_most("fork-10-disk", what, share, "%", 5.0)])
}

/// What ten forks of a session that holds something take, in percent of its snapshot. A fork's own directories, journals and
/// facts take the same of a session that holds nothing.
fn fork_disk(server: &Server) -> Result<f64> {
    let session = server.session();
    session
        .start_sh("exec python3 -c 'import os, time; held = os.urandom(64 << 20); open(\"/root/warm\", \"w\"); time.sleep(1e6)'");
    dormouse_tests::eventually("it is warm", || (session.sh("test -e /root/warm").code == Some(0)).then_some(()));
    let taken = snapshot(&session);
    let path = format!("/v1/snapshots/{}/fork", taken["id"].as_str().context("an id")?);
    let before = disk(server);
    let forked = session.client.post(&path, &json!({ "count": FORKS })).expect(201).json();
    assert_eq!(forked["errors"], json!([]), "{forked}");
    let used = disk(server).saturating_sub(before);
    Ok(100.0 * used as f64 / taken["size_bytes"].as_f64().context("a size")?)
}

/// What the data directory takes of the disk: shared files once.
fn disk(server: &Server) -> u64 {
    let output = std::process::Command::new("du").args(["-skx", "--exclude=run"]).arg(server.data()).output().map(|o| o.stdout);
    let text = String::from_utf8(output.unwrap_or_default()).unwrap_or_default();
    text.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or_default() * 1024
}
