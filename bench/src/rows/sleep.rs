//! Hibernate and wake, beside raw checkpoints and restores of the same programs.

use crate::{
    measure::Samples,
    raw::Raw,
    report::{Row, figure},
};
use anyhow::Result;
use dormouse_tests::{Server, Session, eventually, leftovers};
use serde_json::json;

/// A shell that echoes, with a Python process beside it.
fn script(python: &str) -> String {
    format!("python3 -c '{python}' & while read line; do echo $line; done")
}

const IDLE: &str = r#"import time; data = list(range(100000)); print("ready", flush=True); time.sleep(1e9)"#;
const RANDOM: &str = r#"import os, time; data = os.urandom(256 << 20); print("ready", flush=True); time.sleep(1e9)"#;

/// A shell with a Python process.
pub fn python() -> Result<Vec<Row>> {
    let (hibernate, wake) = sleep(IDLE, 9)?;
    Ok(vec![
        hibernate.row("hibernate-python", "hibernate a shell with a Python process", 1.3),
        wake.row("wake-python", "wake it, to first exec answered", 1.25),
    ])
}

/// The same with 256 MiB of random memory.
pub fn random() -> Result<Vec<Row>> {
    let (hibernate, wake) = sleep(RANDOM, 7)?;
    Ok(vec![
        hibernate.row("hibernate-random", "hibernate with 256 MiB of random memory", 1.3),
        wake.row("wake-random", "wake it, to first exec answered", 1.25),
    ])
}

/// Ours and the raw tool's.
struct Pair {
    ours: Samples,
    raw: Samples,
    tool: &'static str,
}

impl Pair {
    fn row(&self, id: &'static str, what: &str, factor: f64) -> Row {
        let raw = self.raw.median();
        let what = format!("{what}, p50 of {}", self.ours.count());
        Row::at_most(id, what, self.ours.median(), "ms", 0.0).times_raw(raw, factor).beside(format!(
            "{}: {}",
            self.tool,
            figure(raw, "ms")
        ))
    }
}

/// A session in which the script runs.
fn session_with(server: &Server, python: &str) -> Session {
    let session = server.session();
    let body = json!({ "shell": script(python), "stdin": true });
    let exec = session.client.post(&session.path("/execs"), &body).expect(201).json();
    let exec = exec["id"].as_str().expect("an exec has an id").to_owned();
    eventually("Python runs", || (session.output(&exec, "stdout") == b"ready\n").then_some(()));
    session
}

fn raw_with(python: &str) -> Result<Raw> {
    let mut raw = Raw::new(&script(python))?;
    raw.run()?;
    assert_eq!(raw.line()?, "ready");
    Ok(raw)
}

fn first_exec(session: &Session) {
    assert_eq!(session.exec_with(&json!({ "argv": ["/bin/echo", "ready"] })).stdout, "ready\n");
}

/// Waits until the confirmation has ended and everything of the sleeping session is gone.
fn asleep(server: &Server) {
    eventually("the confirmation ends", || leftovers::processes(server.data()).is_empty().then_some(()));
}

/// Cycles of sleep, one of ours and one of the raw tool in turn; the first warms up and isn't counted.
fn sleep(python: &str, cycles: usize) -> Result<(Pair, Pair)> {
    let pair = |tool| Pair { ours: Samples::default(), raw: Samples::default(), tool };
    let mut hibernate = pair("checkpoint + fsync");
    let mut wake = pair("`runsc restore` to first output");
    let server = Server::start();
    let session = session_with(&server, python);
    let mut raw = raw_with(python)?;
    for cycle in 0..=cycles {
        let (mut asleep_ours, mut asleep_raw) = (Samples::default(), Samples::default());
        let (mut awake_ours, mut awake_raw) = (Samples::default(), Samples::default());
        asleep_ours.time(|| session.hibernate());
        asleep(&server);
        asleep_raw.time(|| raw.checkpoint())?;
        raw.kill()?;
        raw.forget_images()?;
        awake_raw.time(|| raw.restore().and_then(|()| raw.echo("awake")))?;
        awake_ours.time(|| {
            session.wake();
            first_exec(&session);
        });
        if cycle > 0 {
            hibernate.ours.push(asleep_ours.median());
            hibernate.raw.push(asleep_raw.median());
            wake.ours.push(awake_ours.median());
            wake.raw.push(awake_raw.median());
        }
    }
    server.delete_all_and_check();
    Ok((hibernate, wake))
}

/// A wake that comes before the confirmation has ended.
pub fn in_grace() -> Result<Vec<Row>> {
    let server = Server::start();
    let session = session_with(&server, IDLE);
    let mut raw = raw_with(IDLE)?;
    let (mut wake, mut exec, mut resume) = (Samples::default(), Samples::default(), Samples::default());
    for _ in 0..11 {
        session.hibernate();
        let mut both = Samples::default();
        both.time(|| {
            wake.time(|| session.wake());
            first_exec(&session);
        });
        exec.push(both.median());
        let done = session.event("wake.done");
        assert_eq!(done["data"]["thawed"], true, "the original was still there: {done}");
        raw.pause()?;
        resume.time(|| raw.resume().and_then(|()| raw.echo("awake")))?;
    }
    server.delete_all_and_check();
    let beside = format!(
        "to first exec answered: {}; `runsc resume` to first output: {}",
        figure(exec.median(), "ms"),
        figure(resume.median(), "ms")
    );
    Ok(vec![Row::at_most("wake-in-grace", "wake within the grace period, p50", wake.median(), "ms", 60.0).beside(beside)])
}
