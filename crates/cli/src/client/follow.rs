//! Output by offset, through every loss of the connection: each byte once, and what is gone is said.

use super::{
    Context,
    backoff::Backoff,
    failure::{Failure, Result},
    http::Call,
    lines::Lines,
};
use api_types::OutputLine;
use bytes::Bytes;
use model::{Offset, SessionId};
use std::time::Duration;

/// Where output comes from.
#[derive(Debug, Clone)]
pub enum Source {
    Exec(model::ExecId),
    Terminal(model::TerminalId),
    Service(String),
}

/// A stream of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Standard output, or a terminal's only stream.
    Out,
    Err,
}

/// Takes output.
pub trait Sink {
    /// The next bytes of a stream.
    ///
    /// # Errors
    /// They can't be taken; the command fails.
    fn bytes(&mut self, stream: Stream, bytes: &[u8]) -> Result<()>;

    /// Bytes that are gone.
    fn gap(&mut self, of: &str, bytes: u64);

    /// The connection is lost and is being looked for.
    fn waiting(&mut self, _why: &Failure) {}
}

/// How a source ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct End {
    pub state: String,
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    pub reason: Option<String>,
}

/// How far each stream has been taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    pub out: Offset,
    pub err: Offset,
}

/// What a line changes.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Bytes(Stream, Vec<u8>),
    Gap(String, u64),
    End(End),
    Nothing,
}

impl Progress {
    /// Takes a line: bytes that were taken before are left out, a hole is a gap.
    fn take(&mut self, line: OutputLine) -> Result<Vec<Step>> {
        let (stream, offset, data) = match line {
            OutputLine::Stdout { offset, data_b64 } | OutputLine::Tty { offset, data_b64 } => (Stream::Out, offset, data_b64),
            OutputLine::Stderr { offset, data_b64 } => (Stream::Err, offset, data_b64),
            OutputLine::Gap { of, from, to } => {
                let place = if of == "stderr" { &mut self.err } else { &mut self.out };
                let lost = to.since((*place).max(from));
                *place = (*place).max(to);
                return Ok(vec![if lost > 0 { Step::Gap(of, lost) } else { Step::Nothing }]);
            }
            OutputLine::Exit { state, exit_code, signal, reason } => {
                return Ok(vec![Step::End(End { state, exit_code, signal, reason })]);
            }
        };
        let mut bytes = OutputLine::decode(&data).map_err(|e| Failure::failed(e.to_string()))?;
        let (place, name) = match stream {
            Stream::Out => (&mut self.out, "stdout"),
            Stream::Err => (&mut self.err, "stderr"),
        };
        let end = offset.plus(bytes.len());
        let mut steps = Vec::new();
        if offset > *place {
            steps.push(Step::Gap(name.to_owned(), offset.since(*place)));
        }
        let known = usize::try_from(place.since(offset)).unwrap_or(usize::MAX).min(bytes.len());
        bytes.drain(..known);
        *place = (*place).max(end);
        steps.push(if bytes.is_empty() { Step::Nothing } else { Step::Bytes(stream, bytes) });
        Ok(steps)
    }
}

/// Passes on the output of `source` from `progress`. With `follow` until its end, which is answered; else to where it is
/// now.
///
/// # Errors
/// What the server refuses for good; output that can't be passed on.
pub async fn follow(
    ctx: &Context,
    session: SessionId,
    source: &Source,
    mut progress: Progress,
    follow: bool,
    sink: &mut dyn Sink,
) -> Result<Option<End>> {
    let mut backoff = Backoff::default();
    loop {
        let path = output_path(session, source, progress, follow);
        let call = Call::get(path).header("accept", "application/x-ndjson").once();
        let failure = match ctx.client.send_stream(call, super::http::no_body()).await {
            Ok(response) => {
                match pass_on(Lines::new(response.into_body()), &mut progress, &mut backoff, sink).await {
                    Ok(Some(end)) => return Ok(Some(end)),
                    Ok(None) if !follow => return Ok(None),
                    // The server ends before the source does: it is being restarted.
                    Ok(None) => Failure::unreachable("the server closed the connection"),
                    Err(failure) => failure,
                }
            }
            Err(failure) => failure,
        };
        if !failure.is_passing() {
            return Err(failure);
        }
        let pause = backoff.next_pause();
        if pause > Duration::from_millis(500) {
            sink.waiting(&failure);
        }
        tokio::time::sleep(pause).await;
    }
}

fn output_path(session: SessionId, source: &Source, progress: Progress, follow: bool) -> String {
    let Progress { out, err } = progress;
    match source {
        Source::Exec(id) => {
            format!("/v1/sessions/{session}/execs/{id}/output?stdout_from={out}&stderr_from={err}&follow={follow}")
        }
        Source::Terminal(id) => format!("/v1/sessions/{session}/terminals/{id}/output?from={out}&follow={follow}"),
        Source::Service(name) => {
            let name = super::http::encode(name);
            format!("/v1/sessions/{session}/services/{name}/output?from={out}&follow={follow}")
        }
    }
}

async fn pass_on(mut lines: Lines, progress: &mut Progress, backoff: &mut Backoff, sink: &mut dyn Sink) -> Result<Option<End>> {
    while let Some(line) = lines.next().await? {
        backoff.reset();
        let Some(line) = parse(&line)? else { continue };
        for step in progress.take(line)? {
            match step {
                Step::Bytes(stream, bytes) => sink.bytes(stream, &bytes)?,
                Step::Gap(of, bytes) => sink.gap(&of, bytes),
                Step::End(end) => return Ok(Some(end)),
                Step::Nothing => {}
            }
        }
    }
    Ok(None)
}

/// A line of output; `None` for a blank one, which only says that the server is there.
fn parse(line: &Bytes) -> Result<Option<OutputLine>> {
    if line.iter().all(u8::is_ascii_whitespace) {
        return Ok(None);
    }
    serde_json::from_slice(line).map(Some).map_err(|e| Failure::failed(format!("can't read a line of output: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_is_taken_once() {
        let mut progress = Progress::default();
        let mut out = Vec::new();
        for (at, text) in [(0, "abc"), (1, "bcd"), (0, "ab"), (4, "e"), (3, "defg")] {
            for step in progress.take(OutputLine::stdout(Offset(at), text.as_bytes())).unwrap() {
                match step {
                    Step::Bytes(Stream::Out, bytes) => out.extend(bytes),
                    Step::Nothing => {}
                    other => panic!("{other:?}"),
                }
            }
        }
        assert_eq!(out, b"abcdefg");
        assert_eq!(progress, Progress { out: Offset(7), err: Offset(0) });
    }

    #[test]
    fn what_is_gone_is_said_once() {
        let mut progress = Progress { out: Offset(10), err: Offset(0) };
        let gap = |from, to| OutputLine::Gap { of: "stdout".into(), from: Offset(from), to: Offset(to) };
        assert_eq!(progress.take(gap(5, 30)).unwrap(), [Step::Gap("stdout".into(), 20)]);
        assert_eq!(progress.take(gap(5, 30)).unwrap(), [Step::Nothing]);
        let steps = progress.take(OutputLine::stdout(Offset(32), b"x")).unwrap();
        assert_eq!(steps, [Step::Gap("stdout".into(), 2), Step::Bytes(Stream::Out, b"x".to_vec())]);
        let steps = progress.take(OutputLine::stderr(Offset(0), b"y")).unwrap();
        assert_eq!(steps, [Step::Bytes(Stream::Err, b"y".to_vec())]);
    }
}
