//! How fast output comes.

use crate::{
    measure::{Samples, rate},
    raw::Raw,
    report::{Row, figure},
};
use anyhow::{Result, ensure};
use dormouse_tests::{Server, Session};
use serde_json::json;
use std::{
    fs::File,
    io::Read,
    process::{Command, Stdio},
    time::Instant,
};

const BYTES: usize = 256 << 20;

/// The same generator, live through us and over a raw sandbox's standard output; then what was kept, read again, beside
/// `cat` of a file of that size.
pub fn output() -> Result<Vec<Row>> {
    let server = Server::start();
    let session = server.session();
    let mut sandbox = Raw::new("while read bytes; do head -c $bytes /dev/zero; done")?;
    sandbox.run()?;
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("output");
    File::create(&file)?.set_len(BYTES as u64)?;

    let (mut live, mut raw_live) = (Samples::default(), Samples::default());
    let (mut kept, mut cat) = (Samples::default(), Samples::default());
    for _ in 0..5 {
        let start = Instant::now();
        let body = json!({ "argv": ["head", "-c", BYTES.to_string(), "/dev/zero"] });
        let exec = session.client.post(&session.path("/execs"), &body).expect(201).json();
        let exec = exec["id"].as_str().expect("an exec has an id").to_owned();
        read_output(&session, &exec, true)?;
        live.push(rate(BYTES, start.elapsed()));

        let start = Instant::now();
        sandbox.send(&BYTES.to_string())?;
        sandbox.read(BYTES)?;
        raw_live.push(rate(BYTES, start.elapsed()));

        session.ended(&exec);
        let start = Instant::now();
        read_output(&session, &exec, false)?;
        kept.push(rate(BYTES, start.elapsed()));

        let start = Instant::now();
        let mut child = Command::new("cat").arg(&file).stdout(Stdio::piped()).spawn()?;
        drain(child.stdout.take().expect("its output is a pipe"))?;
        child.wait()?;
        cat.push(rate(BYTES, start.elapsed()));
    }
    server.delete_all_and_check();
    let raw = raw_live.median();
    Ok(vec![
        Row::at_least("output-raw", "raw bytes of a finished exec's output (256 MiB)", kept.median(), "MB/s", 200.0)
            .beside(format!("`cat` of a file: {}", figure(cat.median(), "MB/s"))),
        Row::at_least("output-live", "live output of an exec (256 MiB)", live.median(), "MB/s", 0.0)
            .times_raw(raw, 0.5)
            .beside(format!("standard output of a raw sandbox: {}", figure(raw, "MB/s"))),
    ])
}

fn read_output(session: &Session, exec: &str, follow: bool) -> Result<()> {
    let path = session.path(&format!("/execs/{exec}/output?stream=stdout&from=0&follow={follow}"));
    drain(session.client.stream(&path, "application/octet-stream")?)
}

fn drain(mut from: impl Read) -> Result<()> {
    let mut buffer = vec![0; 1 << 20];
    let mut total = 0;
    loop {
        match from.read(&mut buffer)? {
            0 => break,
            count => total += count,
        }
    }
    ensure!(total == BYTES, "{total} bytes instead of {BYTES}");
    Ok(())
}
