//! Sessions by the dozen, the hundred and the ten thousand: wakes that are shared, restarts, and what idling costs.

use crate::{
    measure::{Samples, millis, resident_mib},
    report::{Row, figure},
    rows::size,
};
use anyhow::{Context, Result, ensure};
use dormouse_tests::{Server, Session, eventually, leftovers};
use serde_json::{Value, json};
use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

const CALLERS: usize = 100;
const ROUNDS: usize = 3;

/// A hundred execs at once on one session that sleeps, beside one wake and the spawns alone.
pub fn shared_wake() -> Result<Vec<Row>> {
    let server = Server::start();
    let session = server.session();
    let (mut shared, mut wake, mut spawns) = (Samples::default(), Samples::default(), Samples::default());
    for _ in 0..ROUNDS {
        sleep_for_real(&server, &session);
        shared.time(|| all_at_once(&session));
        // The same hundred while it is awake, and the wake alone.
        spawns.time(|| all_at_once(&session));
        sleep_for_real(&server, &session);
        wake.time(|| session.wake());
    }
    let alone = wake.median() + 1.5 * spawns.median();
    let what = format!("{CALLERS} execs at once on a hibernated session, until all are answered, p50");
    let beside = format!("one wake {}, the spawns {}", figure(wake.median(), "ms"), figure(spawns.median(), "ms"));
    let row = Row::at_most("exec-100-hibernated", what, shared.median(), "ms", alone);
    server.delete_all_and_check();
    Ok(vec![Row { target_text: "≤ wake + 1.5 × spawns".to_owned(), ..row.beside(beside) }])
}

/// Hibernates and waits until the sandbox is gone, so that the next wake restores.
fn sleep_for_real(server: &Server, session: &Session) {
    session.hibernate();
    eventually("the confirmation ends", || leftovers::processes(server.data()).is_empty().then_some(()));
}

fn all_at_once(session: &Session) {
    thread::scope(|scope| {
        let run = |n: usize| {
            let session = session.clone();
            move || assert_eq!(session.out(&format!("echo {n}")), n.to_string())
        };
        let threads: Vec<_> = (0..CALLERS).map(|n| scope.spawn(run(n))).collect();
        for thread in threads {
            thread.join().expect("every exec is answered");
        }
    });
}

const MANY: usize = 10_000;

/// A server with 10,000 hibernated sessions: its start, its memory, a list by metadata, its idle CPU.
pub fn ten_thousand() -> Result<Vec<Row>> {
    let mut server = Server::start();
    let session = server.session_with(&json!({ "metadata": { "team": "a" }, "ttl_seconds": 86400 }));
    session.hibernate();
    eventually("the confirmation ends", || leftovers::processes(server.data()).is_empty().then_some(()));
    server.terminate();
    size::copy(server.data(), session.id.parse().context("an id")?, MANY)?;
    let start = Instant::now();
    server.start_again();
    let start = millis(start.elapsed());
    let mut list = Samples::default();
    for _ in 0..15 {
        let page: Value = list.time(|| server.client.get("/v1/sessions?metadata.team=a&limit=100")).expect(200).json();
        ensure!(page["items"].as_array().map_or(0, Vec::len) == 100, "a page of 100");
    }
    let rss = resident_mib(server.pid());
    let cpu = cpu_share(&[server.pid()], Duration::from_secs(20))?;
    let of = format!("a server with {MANY} hibernated sessions");
    Ok(vec![
        Row::at_most("server-10k-start", format!("start of {of}"), start, "ms", 2000.0),
        Row::at_most("server-10k-rss", format!("resident memory of {of}"), rss, "MiB", 150.0),
        Row::at_most("server-10k-list", format!("100 by metadata, p50, of {of}"), list.median(), "ms", 20.0),
        Row::at_most("server-10k-idle", format!("idle CPU of {of}, of a core"), cpu, "%", 0.2),
    ])
}

const RUNNING: usize = 50;

/// Fifty running sessions in which nothing happens: what server and supervisors use, and a restart of the server.
pub fn fifty_running() -> Result<Vec<Row>> {
    let mut server = Server::start();
    let sessions: Vec<Session> =
        (0..RUNNING).map(|_| server.session_with(&json!({ "idle": { "after_seconds": 3600, "action": "hibernate" } }))).collect();
    // What was begun at the start has settled.
    thread::sleep(Duration::from_secs(5));
    let mut pids = vec![server.pid()];
    pids.extend(sessions.iter().filter_map(|session| supervisor_pid(server.data(), session)));
    ensure!(pids.len() == RUNNING + 1, "every session has a supervisor");
    let cpu = cpu_share(&pids, Duration::from_secs(30))?;
    let mut last = 0.0f64;
    server.kill();
    let start = Instant::now();
    server.start_again();
    thread::scope(|scope| {
        let threads: Vec<_> = sessions
            .iter()
            .map(|session| {
                let session = session.on(&server.client);
                scope.spawn(move || {
                    assert_eq!(session.out("echo here"), "here");
                    millis(start.elapsed())
                })
            })
            .collect();
        for thread in threads {
            last = last.max(thread.join().expect("every session answers"));
        }
    });
    server.delete_all_and_check();
    Ok(vec![
        Row::at_most("idle-50", format!("CPU of server and supervisors with {RUNNING} idle sessions, of a core"), cpu, "%", 1.0),
        Row::at_most(
            "restart-50",
            format!("a killed server's restart until each of {RUNNING} running sessions has answered an exec"),
            last,
            "ms",
            3000.0,
        ),
    ])
}

fn supervisor_pid(data: &Path, session: &Session) -> Option<u32> {
    let mark = fs::read(data.join("sessions").join(&session.id).join("run/supervisor.json")).ok()?;
    let mark: Value = serde_json::from_slice(&mark).ok()?;
    u32::try_from(mark["pid"].as_u64()?).ok()
}

/// How much of a core these processes use together over a while, in percent.
fn cpu_share(pids: &[u32], over: Duration) -> Result<f64> {
    let before = cpu_seconds(pids)?;
    thread::sleep(over);
    Ok((cpu_seconds(pids)? - before) / over.as_secs_f64() * 100.0)
}

/// CPU time so far, to the nanosecond (`/proc/PID/schedstat` of every thread).
fn cpu_seconds(pids: &[u32]) -> Result<f64> {
    let mut nanoseconds = 0.0;
    for pid in pids {
        for task in fs::read_dir(format!("/proc/{pid}/task")).with_context(|| format!("process {pid} is gone"))? {
            let text = fs::read_to_string(task?.path().join("schedstat")).unwrap_or_default();
            nanoseconds += text.split(' ').next().and_then(|first| first.parse::<f64>().ok()).unwrap_or(0.0);
        }
    }
    Ok(nanoseconds / 1e9)
}
