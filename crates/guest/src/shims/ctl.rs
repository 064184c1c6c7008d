//! `dormouse-ctl`, which is `dormouse-guest ctl`: the socket inside ([`crate::dialogue`]) for the command line.

use super::{ask, fail, print};
use crate::dialogue::SOCKET;
use serde_json::{Value, json};
use std::{
    io::{self, BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    process::ExitCode,
};

const NAME: &str = "dormouse-ctl";
const USAGE: &str = "usage: dormouse-ctl COMMAND
  status                          the session, its generation, and what programs have said
  wait-wake [--since GENERATION]  waits for the next wake, or for the first after that generation
  watch                           prints a line for each moment: wake, before_hibernate, before_stop, timeout_near
  note TEXT                       a note in the session's history
  keep-awake SECONDS              the session isn't idle for so long; 0: no longer
  waiting [--for WORD] [TEXT]     says that you wait for a person (or another WORD), and with what question
  waiting --over                  no longer
  ping                            whether the guest answers";

/// What a command line comes to.
#[derive(Debug, PartialEq)]
enum Wish {
    Help,
    Ping,
    /// One line, and one line of answer, which is printed where it tells something.
    Ask {
        line: Value,
        prints: bool,
    },
    /// Lines until the session ends.
    Watch,
}

fn parse(args: &[String]) -> Option<Wish> {
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let quiet = |line| Some(Wish::Ask { line, prints: false });
    let telling = |line| Some(Wish::Ask { line, prints: true });
    match words.as_slice() {
        ["help" | "-h" | "--help"] => Some(Wish::Help),
        ["ping"] => Some(Wish::Ping),
        ["status"] => telling(json!({ "op": "status" })),
        ["watch"] => Some(Wish::Watch),
        ["wait-wake"] => telling(json!({ "op": "wait_wake" })),
        ["wait-wake", "--since", generation] => {
            telling(json!({ "op": "wait_wake", "generation": generation.parse::<u64>().ok()? }))
        }
        ["note", text @ ..] if !text.is_empty() => quiet(json!({ "op": "note", "text": text.join(" ") })),
        ["keep-awake", seconds] => quiet(json!({ "op": "keep_awake", "seconds": seconds.parse::<u64>().ok()? })),
        ["waiting", "--over"] => quiet(json!({ "op": "waiting", "for": null })),
        ["waiting", rest @ ..] => {
            let (word, text) = match rest {
                ["--for", word, text @ ..] => (*word, text),
                text => ("person", text),
            };
            // An option that isn't known is no question.
            if text.first().is_some_and(|first| first.starts_with("--")) {
                return None;
            }
            let text = (!text.is_empty()).then(|| text.join(" "));
            quiet(json!({ "op": "waiting", "for": word, "text": text }))
        }
        _ => None,
    }
}

/// Called as `dormouse-ctl`, or with `ctl` as first argument. Exit status: 0 done, 1 refused or nobody to ask, 2 usage.
pub fn run(args: &[String]) -> ExitCode {
    let done = match parse(args) {
        None => return fail(NAME, USAGE, 2),
        Some(Wish::Help) => {
            print(USAGE);
            Ok(())
        }
        Some(Wish::Ping) => ask::question(&ask::Question::Ping).map(|_| print("pong")),
        Some(Wish::Ask { line, prints }) => one_answer(&line, prints),
        Some(Wish::Watch) => watch(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(NAME, &error.to_string(), 1),
    }
}

fn connect(line: &Value) -> io::Result<BufReader<UnixStream>> {
    let unreachable = |e: io::Error| io::Error::new(e.kind(), format!("the session can't be asked at {SOCKET}: {e}"));
    let mut stream = UnixStream::connect(SOCKET).map_err(unreachable)?;
    stream.write_all(format!("{line}\n").as_bytes())?;
    Ok(BufReader::new(stream))
}

/// The next line, where it is no refusal.
fn next(reader: &mut BufReader<UnixStream>) -> io::Result<String> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the guest hung up"));
    }
    let answer: Value = serde_json::from_str(&line)?;
    if answer["ok"] == false {
        return Err(io::Error::other(answer["error"].as_str().unwrap_or("refused").to_owned()));
    }
    Ok(line.trim_end().to_owned())
}

fn one_answer(line: &Value, prints: bool) -> io::Result<()> {
    let answer = next(&mut connect(line)?)?;
    if prints {
        print(&answer);
    }
    Ok(())
}

fn watch() -> io::Result<()> {
    let mut reader = connect(&json!({ "op": "watch" }))?;
    next(&mut reader)?;
    loop {
        let line = next(&mut reader)?;
        // Whoever read them may have gone.
        writeln!(io::stdout(), "{line}")?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Option<Wish> {
        parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn command_lines_become_requests() {
        let cases = [
            ("status", json!({ "op": "status" }), true),
            ("wait-wake", json!({ "op": "wait_wake" }), true),
            ("wait-wake --since 4", json!({ "op": "wait_wake", "generation": 4 }), true),
            ("note all tests pass", json!({ "op": "note", "text": "all tests pass" }), false),
            ("keep-awake 600", json!({ "op": "keep_awake", "seconds": 600 }), false),
            ("waiting", json!({ "op": "waiting", "for": "person", "text": null }), false),
            ("waiting may I push?", json!({ "op": "waiting", "for": "person", "text": "may I push?" }), false),
            ("waiting --for ci the build", json!({ "op": "waiting", "for": "ci", "text": "the build" }), false),
            ("waiting --over", json!({ "op": "waiting", "for": null }), false),
        ];
        for (line, expected, prints) in cases {
            assert_eq!(parsed(line), Some(Wish::Ask { line: expected, prints }), "{line}");
        }
        assert_eq!((parsed("watch"), parsed("ping")), (Some(Wish::Watch), Some(Wish::Ping)));
    }

    #[test]
    fn what_is_no_command_gets_the_usage() {
        for line in ["", "dance", "note", "keep-awake", "keep-awake soon", "wait-wake 4", "waiting --ovr", "status now"] {
            assert_eq!(parsed(line), None, "{line}");
        }
    }
}
