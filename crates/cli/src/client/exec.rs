//! `exec`: one command, its output as it comes, its exit status.

use super::{
    Context,
    failure::{Failure, OURS, Result},
    follow::{self, Progress, Sink, Source, Stream},
    http::Call,
    select,
};
use crate::args::ExecArgs;
use api_types::{CreateExec, Exec, Signal, SignalExec, Stdin, signal_name};
use bytes::Bytes;
use model::{ExecId, ExecState, SessionId};
use std::{
    io::{Read, Write},
    process::ExitCode,
    time::{Duration, Instant},
};
use tokio::signal::unix::{SignalKind, signal};

/// Output that is kept for `--json`, of each stream.
const SHOWN: usize = 1 << 20;

/// This many ctrl-C in a row, each within this time of the one before, end the command whatever the exec does.
const INSIST: (u32, Duration) = (3, Duration::from_secs(2));

/// `dormouse exec`.
///
/// # Errors
/// Whatever keeps the command from being run or watched.
pub async fn command(ctx: &Context, args: ExecArgs) -> Result<ExitCode> {
    let session = select::session(&ctx.client, &args.session).await?;
    let request = CreateExec {
        argv: Some(args.argv),
        env: args.env.into_iter().collect(),
        cwd: args.cwd,
        user: args.user,
        stdin: args.stdin.then_some(Stdin::Open(true)),
        timeout_seconds: args.timeout.map(|limit| limit.as_secs().max(1)),
        key: args.key,
        start: args.start.then_some(true),
        ..CreateExec::default()
    };
    let started: serde_json::Value = ctx.client.json(Call::post(execs(session.id), &request)).await?;
    let exec: Exec = Context::read(&started)?;
    if args.detach {
        if ctx.json {
            ctx.print_json(&started)?
        } else {
            ctx.print(&format!("{}\n", exec.id))?
        }
        return Ok(ExitCode::SUCCESS);
    }
    let input = args.stdin.then(|| tokio::spawn(pump(ctx.clone(), session.id, exec.id)));
    let watched = watch(ctx, session.id, exec.id);
    let done = tokio::select! {
        done = watched => done,
        () = interrupts(ctx, session.id, exec.id) => {
            eprintln!("dormouse: no longer watching; the exec goes on as {}", exec.id);
            Ok(ExitCode::from(130))
        }
    };
    if let Some(input) = input {
        input.abort();
    }
    done
}

fn execs(session: SessionId) -> String {
    format!("/v1/sessions/{session}/execs")
}

async fn watch(ctx: &Context, session: SessionId, exec: ExecId) -> Result<ExitCode> {
    let source = Source::Exec(exec);
    let mut shown = Kept::default();
    let mut passed = PassOn { quiet: ctx.quiet, told: false };
    let sink: &mut dyn Sink = if ctx.json { &mut shown } else { &mut passed };
    follow::follow(ctx, session, &source, Progress::default(), true, sink).await?;
    let mut value: serde_json::Value = ctx.client.json(Call::get(format!("{}/{exec}", execs(session)))).await?;
    let ended: Exec = Context::read(&value)?;
    if ctx.json {
        shown.add_to(&mut value);
        ctx.print_json(&value)?;
    }
    Ok(ExitCode::from(finish(&ended)))
}

/// The status for a command's end; where the command doesn't speak for itself, a line on standard error does.
pub fn finish(exec: &Exec) -> u8 {
    let reason = exec.reason.as_deref();
    match exec.state {
        ExecState::Running => {
            eprintln!("dormouse: exec {} still runs", exec.id);
            OURS
        }
        ExecState::Lost => {
            let why = reason.unwrap_or("its sandbox ended before it did");
            eprintln!("dormouse: exec {} is lost ({why}): nobody knows how it would have ended", exec.id);
            OURS
        }
        ExecState::Exited => {
            if let Some(word @ ("not_found" | "not_executable" | "bad_working_directory")) = reason {
                eprintln!("dormouse: {}", not_started(word, exec));
            }
            status_of(exec)
        }
        ExecState::Killed | ExecState::TimedOut => {
            let signal = exec.signal.map(signal_name);
            let by = signal.as_deref().unwrap_or("a signal");
            match (exec.state, reason) {
                (ExecState::TimedOut, _) => eprintln!("dormouse: exec {} ran out of time and was ended", exec.id),
                (_, Some("oom")) => eprintln!("dormouse: exec {} was ended by {by}: the session's memory ran out", exec.id),
                (_, Some(reason)) => eprintln!("dormouse: exec {} was ended by {by} ({reason})", exec.id),
                _ => {}
            }
            status_of(exec)
        }
    }
}

fn not_started(word: &str, exec: &Exec) -> String {
    let program = exec.argv.first().map(String::as_str).unwrap_or_default();
    let program = super::text::safe(program);
    match word {
        "not_found" => format!("there is no command '{program}' in the session"),
        "not_executable" => format!("'{program}' can't be run in the session"),
        _ => format!("the working directory '{}' isn't there", super::text::safe(exec.cwd.as_deref().unwrap_or_default())),
    }
}

fn status_of(exec: &Exec) -> u8 {
    let by_word = match exec.reason.as_deref() {
        Some("not_found") => 127,
        Some("not_executable") => 126,
        Some("bad_working_directory") => i32::from(OURS),
        _ => 128 + exec.signal.unwrap_or(9),
    };
    u8::try_from(exec.exit_code.unwrap_or(by_word) & 0xFF).unwrap_or(OURS)
}

/// Passes ctrl-C on. Ends when the user insists.
async fn interrupts(ctx: &Context, session: SessionId, exec: ExecId) {
    let Ok(mut pressed) = signal(SignalKind::interrupt()) else { return std::future::pending().await };
    let (mut times, mut last) = (0, Instant::now());
    while pressed.recv().await.is_some() {
        times = if last.elapsed() < INSIST.1 { times + 1 } else { 1 };
        last = Instant::now();
        if times >= INSIST.0 {
            return;
        }
        let call = Call::post(format!("{}/{exec}/signal", execs(session)), &SignalExec { signal: Signal::INT });
        let client = ctx.client.clone();
        // Not waited for: the next ctrl-C must count at once. An exec that has just ended needs no signal.
        tokio::spawn(async move { client.send(call).await.is_ok() });
    }
}

/// Passes standard input on, piece by piece, each sent again under its own key until the exec has it.
async fn pump(ctx: Context, session: SessionId, exec: ExecId) {
    let (sender, mut pieces) = tokio::sync::mpsc::channel::<Bytes>(2);
    // Ends with the process: reading standard input can't be cancelled.
    std::thread::spawn(move || {
        let mut buffer = vec![0; 64 * 1024];
        loop {
            match std::io::stdin().lock().read(&mut buffer) {
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Ok(n) if n > 0 => {
                    if sender.blocking_send(Bytes::copy_from_slice(&buffer[..n])).is_err() {
                        return;
                    }
                }
                _ => return,
            }
        }
    });
    let path = format!("{}/{exec}/stdin", execs(session));
    loop {
        let piece = pieces.recv().await;
        let call = match &piece {
            Some(bytes) => Call::post_bytes(&path, bytes.clone()),
            None => Call::post_bytes(format!("{path}?eof=true"), Bytes::new()),
        };
        let sent = ctx.client.send(call.header("content-type", "application/octet-stream")).await;
        match sent {
            // An exec that has ended, or has closed its input, takes no more: no failure of this command.
            Err(failure) if failure.problem.as_ref().is_some_and(|p| p.status == 422 || p.status == 409) => return,
            Err(failure) => {
                eprintln!("dormouse: standard input isn't passed on any more: {failure}");
                return;
            }
            Ok(_) if piece.is_none() => return,
            Ok(_) => {}
        }
    }
}

/// Output as it comes, to where it belongs.
pub struct PassOn {
    pub quiet: bool,
    /// True once the user has been told of a lost connection, until output comes again.
    pub told: bool,
}

impl Sink for PassOn {
    fn bytes(&mut self, stream: Stream, bytes: &[u8]) -> Result<()> {
        self.told = false;
        let written = match stream {
            Stream::Out => {
                let mut out = std::io::stdout().lock();
                out.write_all(bytes).and_then(|()| out.flush())
            }
            Stream::Err => std::io::stderr().lock().write_all(bytes),
        };
        written.map_err(|e| match e.kind() {
            std::io::ErrorKind::BrokenPipe => Failure::failed("whoever read the output has gone; the exec goes on"),
            _ => Failure::failed(format!("can't write the output: {e}")),
        })
    }

    fn gap(&mut self, of: &str, bytes: u64) {
        eprintln!("dormouse: {bytes} bytes of {of} are no longer kept");
    }

    fn waiting(&mut self, why: &Failure) {
        if !self.quiet && !std::mem::replace(&mut self.told, true) {
            eprintln!("dormouse: {why}; reconnecting");
        }
    }
}

/// The beginning of the output, for `--json`.
#[derive(Default)]
struct Kept {
    out: Vec<u8>,
    err: Vec<u8>,
    cut: [bool; 2],
}

impl Kept {
    fn add_to(&self, exec: &mut serde_json::Value) {
        let Some(fields) = exec.as_object_mut() else { return };
        for (name, bytes, cut) in [("stdout", &self.out, self.cut[0]), ("stderr", &self.err, self.cut[1])] {
            fields.insert(name.to_owned(), String::from_utf8_lossy(bytes).into());
            fields.insert(format!("{name}_truncated"), cut.into());
        }
    }
}

impl Sink for Kept {
    fn bytes(&mut self, stream: Stream, bytes: &[u8]) -> Result<()> {
        let (kept, cut) = match stream {
            Stream::Out => (&mut self.out, &mut self.cut[0]),
            Stream::Err => (&mut self.err, &mut self.cut[1]),
        };
        let room = SHOWN - kept.len();
        *cut |= bytes.len() > room;
        kept.extend_from_slice(&bytes[..bytes.len().min(room)]);
        Ok(())
    }

    fn gap(&mut self, of: &str, _bytes: u64) {
        self.cut[usize::from(of == "stderr")] = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::{Generation, Offset, Timestamp};

    fn exec(state: ExecState, exit_code: Option<i32>, signal: Option<i32>, reason: Option<&str>) -> Exec {
        Exec {
            id: ExecId::new(),
            key: None,
            generation: Generation::FIRST,
            state,
            exit_code,
            signal,
            reason: reason.map(str::to_owned),
            argv: vec!["x".into()],
            cwd: None,
            user: None,
            started_at: Timestamp(0),
            ended_at: None,
            duration_ms: None,
            pid: None,
            stdout_bytes: Offset::ZERO,
            stderr_bytes: Offset::ZERO,
            stdout: None,
            stderr: None,
            stdout_truncated: None,
            stderr_truncated: None,
        }
    }

    #[test]
    fn statuses_are_dockers() {
        for (state, code, signal, reason, status) in [
            (ExecState::Exited, Some(0), None, None, 0),
            (ExecState::Exited, Some(7), None, None, 7),
            (ExecState::Exited, None, None, Some("not_found"), 127),
            (ExecState::Exited, Some(126), None, Some("not_executable"), 126),
            (ExecState::Killed, None, Some(15), None, 143),
            (ExecState::Killed, None, Some(9), Some("oom"), 137),
            (ExecState::TimedOut, None, Some(9), Some("timeout"), 137),
            (ExecState::TimedOut, None, None, None, 137),
            (ExecState::Lost, None, None, None, 125),
        ] {
            assert_eq!(finish(&exec(state, code, signal, reason)), status, "{state} {reason:?}");
        }
    }

    #[test]
    fn only_the_beginning_is_kept() {
        let mut kept = Kept::default();
        kept.bytes(Stream::Out, &vec![b'x'; SHOWN - 1]).unwrap();
        kept.bytes(Stream::Out, b"yz").unwrap();
        kept.bytes(Stream::Err, b"e").unwrap();
        let mut value = serde_json::json!({});
        kept.add_to(&mut value);
        assert_eq!(value["stdout"].as_str().map(str::len), Some(SHOWN));
        assert_eq!((&value["stdout_truncated"], &value["stderr_truncated"]), (&true.into(), &false.into()));
    }
}
