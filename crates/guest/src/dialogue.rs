//! The socket on which programs inside talk with their session: `/run/dormouse.sock`.
//!
//! One JSON object a line in both directions; everyone inside may use it. A connection stays open for as many requests
//! as its program likes, and is closed by it. An answer has `"ok": true`, or `"ok": false` with an `error` for people:
//! a line that can't be understood is answered so, and the connection goes on.
//!
//! ```text
//! {"op":"status"}                                ► {"ok":true,"session":ID,"generation":N,"keep_awake_seconds":0,"waiting":null}
//! {"op":"wait_wake"}                             ► at the next wake:
//!                                                  {"ok":true,"event":"wake","generation":N,"gap_seconds":S}
//! {"op":"wait_wake","generation":N}              ► the same, at once where the session has woken since generation N
//! {"op":"watch"}                                 ► {"ok":true}, then a line for each moment:
//!                                                  {"event":"wake","generation":N,"gap_seconds":S}
//!                                                  {"event":"before_hibernate"}   {"event":"before_stop"}
//!                                                  {"event":"timeout_near","seconds":30}
//!                                                  {"event":"missed","count":N}   to one that reads too slowly
//! {"op":"note","text":T}                         ► {"ok":true}; T is an event `note` of the session
//! {"op":"keep_awake","seconds":N}                ► {"ok":true}; it isn't idle for so long, awake time; 0: no longer
//! {"op":"waiting","for":"person","text":T}       ► {"ok":true}; says that the program waits for a person
//! {"op":"waiting","for":null}                    ► {"ok":true}; no longer
//! ```
//! `gap_seconds` is null where nobody knows how long the sleep was. The wake of a fork also says `"fork_of":ID`: the session
//! that it was made from, whose generations it doesn't share. Requests on a connection that watches or waits are
//! answered as ever. Everything here is bounded: connections, lines, texts, and what the supervisor has not taken yet.

use crate::{
    guest::Guest,
    listen,
    ready::{Shared, Watched},
};
use model::Generation;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use std::{
    cell::Cell,
    io,
    os::unix::net::UnixStream,
    rc::Rc,
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    sync::broadcast::{Receiver, error::RecvError},
};
use wire::guest::{GuestEvent, Waiting};

/// Where the guest listens.
pub const SOCKET: &str = "/run/dormouse.sock";

/// Connections at once.
const MOST_CALLERS: usize = 64;
/// Longest line: [`LONGEST_TEXT`] in which JSON has written each byte with six.
const LONGEST_LINE: usize = 64 * 1024;
/// Longest text of a note, in bytes.
const LONGEST_TEXT: usize = 8 * 1024;
/// Longest word for what is waited for.
const LONGEST_WORD: usize = 40;
/// Longest wish to be kept awake.
const LONGEST_AWAKE: Duration = Duration::from_secs(24 * 3600);
/// What programs may have said that the supervisor has not written down yet.
const MOST_UNTAKEN: usize = 1000;

/// What a program asks.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
enum Ask {
    Status,
    WaitWake {
        #[serde(default)]
        generation: Option<Generation>,
    },
    Watch,
    Note {
        text: String,
    },
    KeepAwake {
        seconds: u64,
    },
    Waiting {
        // Asked for with the null, too: a word left out by mistake must not end the waiting.
        #[serde(rename = "for", deserialize_with = "must_be_there")]
        for_: Option<String>,
        #[serde(default)]
        text: Option<String>,
    },
}

fn must_be_there<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    Option::deserialize(from)
}

impl Ask {
    /// Reads a line and checks its bounds.
    ///
    /// # Errors
    /// What is wrong with it, for people.
    fn read(line: &[u8]) -> Result<Ask, String> {
        let ask = serde_json::from_slice(line).map_err(|e| format!("not understood: {e}"))?;
        let text = match &ask {
            Ask::Note { text } if text.trim().is_empty() => return Err("the note is empty".into()),
            Ask::Note { text } => Some(text),
            Ask::KeepAwake { seconds } if *seconds > LONGEST_AWAKE.as_secs() => {
                return Err(format!("a session can be kept awake for {} seconds at most", LONGEST_AWAKE.as_secs()));
            }
            Ask::Waiting { for_: Some(word), text } => {
                let fine = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_' || c == '-';
                if word.is_empty() || word.len() > LONGEST_WORD || !word.chars().all(fine) {
                    return Err(format!("`for` is a word such as person: a-z, 0-9, _ and -, {LONGEST_WORD} at most"));
                }
                text.as_ref()
            }
            _ => None,
        };
        match text {
            Some(text) if text.len() > LONGEST_TEXT => {
                Err(format!("the text has {} bytes, {LONGEST_TEXT} are allowed", text.len()))
            }
            _ => Ok(ask),
        }
    }
}

/// Lines out of pieces as they come; one that is too long is left out to its end.
#[derive(Default)]
struct Lines {
    buffer: Vec<u8>,
    skipping: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum Line {
    Whole(Vec<u8>),
    TooLong,
}

impl Lines {
    fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    fn next(&mut self) -> Option<Line> {
        loop {
            let Some(end) = self.buffer.iter().position(|b| *b == b'\n') else {
                let too_long = self.buffer.len() > LONGEST_LINE;
                if self.skipping || too_long {
                    self.buffer.clear();
                }
                let first = too_long && !self.skipping;
                self.skipping |= too_long;
                return first.then_some(Line::TooLong);
            };
            let line: Vec<u8> = self.buffer.drain(..=end).collect();
            if std::mem::take(&mut self.skipping) {
                continue;
            }
            if end > LONGEST_LINE {
                return Some(Line::TooLong);
            }
            if !line.trim_ascii().is_empty() {
                return Some(Line::Whole(line));
            }
        }
    }
}

/// Listens for as long as the process lives.
pub async fn serve(guest: Rc<Guest>) {
    let callers = Rc::new(Cell::new(0));
    let answer_one = |stream| {
        let (guest, caller) = (guest.clone(), Caller::enter(&callers));
        async move {
            // One that hangs up early isn't worth a line.
            let _ = match caller {
                Some(_caller) => talk(&guest, stream).await,
                None => say(&mut Shared(Rc::new(stream)), &refused("too many connections are open; try again later")).await,
            };
        }
    };
    listen::serve(SOCKET, answer_one).await;
}

/// One of the connections that there may be.
struct Caller(Rc<Cell<usize>>);

impl Caller {
    fn enter(callers: &Rc<Cell<usize>>) -> Option<Caller> {
        if callers.get() >= MOST_CALLERS {
            return None;
        }
        callers.set(callers.get() + 1);
        Some(Caller(callers.clone()))
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

type Stream = Shared<UnixStream>;

async fn talk(guest: &Guest, stream: Watched<UnixStream>) -> io::Result<()> {
    let stream = Rc::new(stream);
    let (mut read, mut write): (Stream, Stream) = (Shared(stream.clone()), Shared(stream));
    let mut lines = Lines::default();
    let mut life = guest.moments.follow();
    let mut moments: Option<Receiver<Value>> = None;
    // The generation whose end is waited for, and the wakes that had been when that was asked: a fork counts anew.
    let mut wakes_after: Option<(Generation, u64)> = None;
    let mut piece = vec![0; 4096];
    loop {
        while let Some(line) = lines.next() {
            // Who asks without end has its turns, and no more.
            tokio::task::coop::consume_budget().await;
            let ask = match &line {
                Line::Whole(line) => Ask::read(line),
                Line::TooLong => Err(format!("the line is longer than {LONGEST_LINE} bytes")),
            };
            let answer = match ask {
                Ok(Ask::WaitWake { .. }) if wakes_after.is_some() => refused("this connection waits for a wake already"),
                Ok(Ask::WaitWake { generation }) => {
                    let life = life.borrow();
                    wakes_after = Some((generation.or(life.generation).unwrap_or(Generation(0)), life.wakes));
                    continue;
                }
                Ok(Ask::Watch) => {
                    moments.get_or_insert_with(|| guest.moments.listen());
                    json!({ "ok": true })
                }
                Ok(ask) => answer(guest, ask).unwrap_or_else(|error| refused(&error)),
                Err(error) => refused(&error),
            };
            say(&mut write, &answer).await?;
        }
        let now = life.borrow_and_update().clone();
        // A fork's generations begin anew: one that is asked with a higher one comes from its parent.
        let past =
            |generation| now.generation.is_some_and(|now_at| now_at > generation || now.fork_of.is_some() && now_at < generation);
        if wakes_after.is_some_and(|(generation, wakes)| past(generation) || now.wakes > wakes) {
            wakes_after = None;
            let mut wake = now.wake();
            wake["ok"] = true.into();
            say(&mut write, &wake).await?;
        }
        tokio::select! {
            count = read.read(&mut piece) => match count? {
                0 => return Ok(()),
                count => lines.push(&piece[..count]),
            },
            moment = next_moment(&mut moments) => say(&mut write, &moment).await?,
            Ok(()) = life.changed(), if wakes_after.is_some() => {}
        }
    }
}

/// The next moment; never, where none are listened to.
async fn next_moment(moments: &mut Option<Receiver<Value>>) -> Value {
    let Some(moments) = moments else { return std::future::pending().await };
    match moments.recv().await {
        Ok(moment) => moment,
        Err(RecvError::Lagged(count)) => json!({ "event": "missed", "count": count }),
        // The guest outlives its listeners.
        Err(RecvError::Closed) => std::future::pending().await,
    }
}

fn refused(error: &str) -> Value {
    json!({ "ok": false, "error": error })
}

async fn say(to: &mut Stream, line: &Value) -> io::Result<()> {
    let mut line = line.to_string();
    line.push('\n');
    to.write_all(line.as_bytes()).await
}

/// Answers what is answered at once.
fn answer(guest: &Guest, ask: Ask) -> Result<Value, String> {
    match ask {
        Ask::Note { text } => tell(guest, GuestEvent::Note { text })?,
        Ask::KeepAwake { seconds } => {
            tell(guest, GuestEvent::KeepAwake { seconds })?;
            guest.looks.borrow_mut().keep_awake(Instant::now(), Duration::from_secs(seconds));
        }
        Ask::Waiting { for_, text } => {
            let waiting = for_.map(|for_| Waiting { for_, text });
            if *guest.moments.waiting.borrow() == waiting {
                return Ok(json!({ "ok": true }));
            }
            let (for_, text) = waiting.clone().map_or((None, None), |waiting| (Some(waiting.for_), waiting.text));
            tell(guest, GuestEvent::Waiting { for_, text })?;
            *guest.moments.waiting.borrow_mut() = waiting;
        }
        // These two are the connection's own.
        Ask::Status | Ask::WaitWake { .. } | Ask::Watch => {
            let life = guest.moments.follow().borrow().clone();
            let kept_awake = guest.looks.borrow().kept_awake_for(Instant::now()).unwrap_or_default();
            return Ok(json!({
                "ok": true, "session": life.session, "generation": life.generation,
                "keep_awake_seconds": kept_awake.as_secs_f64().ceil() as u64,
                "waiting": *guest.moments.waiting.borrow(),
            }));
        }
    }
    Ok(json!({ "ok": true }))
}

/// Has the supervisor write something down.
fn tell(guest: &Guest, event: GuestEvent) -> Result<(), String> {
    let said =
        |event: &GuestEvent| matches!(event, GuestEvent::Note { .. } | GuestEvent::KeepAwake { .. } | GuestEvent::Waiting { .. });
    let mut hub = guest.hub.borrow_mut();
    if hub.unacknowledged(said) >= MOST_UNTAKEN {
        return Err("too much was said that has not been written down yet; try again later".into());
    }
    hub.event(event);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};

    #[test]
    fn requests_are_read() {
        let person = || Some("person".to_owned());
        let cases = [
            (r#"{"op":"status"}"#, Ask::Status),
            (r#"{"op":"status","later":[1]}"#, Ask::Status),
            (r#"{"op":"wait_wake"}"#, Ask::WaitWake { generation: None }),
            (r#"{"op":"wait_wake","generation":3}"#, Ask::WaitWake { generation: Some(Generation(3)) }),
            (r#" {"op":"watch"} "#, Ask::Watch),
            (r#"{"op":"note","text":"a\nb"}"#, Ask::Note { text: "a\nb".into() }),
            (r#"{"op":"keep_awake","seconds":86400}"#, Ask::KeepAwake { seconds: 86_400 }),
            (r#"{"op":"waiting","for":"person"}"#, Ask::Waiting { for_: person(), text: None }),
            (r#"{"op":"waiting","for":"person","text":"q"}"#, Ask::Waiting { for_: person(), text: Some("q".into()) }),
            (r#"{"op":"waiting","for":null}"#, Ask::Waiting { for_: None, text: None }),
        ];
        for (line, expected) in cases {
            assert_eq!(Ask::read(line.as_bytes()), Ok(expected), "{line}");
        }
    }

    #[test]
    fn what_is_malformed_or_beyond_a_bound_is_refused_with_a_reason() {
        let note = |length: usize| json!({ "op": "note", "text": "n".repeat(length) }).to_string();
        let text = |length: usize| json!({ "op": "waiting", "for": "person", "text": "n".repeat(length) }).to_string();
        assert!(Ask::read(note(LONGEST_TEXT).as_bytes()).is_ok() && Ask::read(text(LONGEST_TEXT).as_bytes()).is_ok());
        let (long_note, long_text) = (note(LONGEST_TEXT + 1), text(LONGEST_TEXT + 1));
        let long_word = json!({ "op": "waiting", "for": "w".repeat(LONGEST_WORD + 1) }).to_string();
        let cases: [(&str, &str); 14] = [
            ("", "not understood"),
            ("hello", "not understood"),
            ("[]", "not understood"),
            ("{\"op\":", "not understood"),
            (r#"{"op":"levitate"}"#, "levitate"),
            (r#"{"text":"x"}"#, "op"),
            (r#"{"op":"note"}"#, "text"),
            (r#"{"op":"note","text":" \n"}"#, "empty"),
            (r#"{"op":"keep_awake","seconds":-1}"#, "not understood"),
            (r#"{"op":"keep_awake","seconds":86401}"#, "86400"),
            (r#"{"op":"waiting"}"#, "for"),
            (r#"{"op":"waiting","for":"A person"}"#, "word"),
            (&long_word, "word"),
            (&long_note, "8192"),
        ];
        for (line, expected) in cases {
            let error = Ask::read(line.as_bytes()).unwrap_err();
            assert!(error.contains(expected), "{line:.60}: {error}");
        }
        assert!(Ask::read(long_text.as_bytes()).unwrap_err().contains("8192"));
        assert!(Ask::read(b"{\"op\":\"note\",\"text\":\"\xff\"}").is_err());
    }

    #[test]
    fn lines_are_put_together_and_one_that_is_too_long_is_left_out_once() {
        let mut lines = Lines::default();
        lines.push(b"one\n\ntw");
        assert_eq!((lines.next(), lines.next()), (Some(Line::Whole(b"one\n".to_vec())), None));
        lines.push(b"o\n");
        assert_eq!(lines.next(), Some(Line::Whole(b"two\n".to_vec())));
        let mut too_long = 0;
        for _ in 0..100 {
            lines.push(&[b'x'; 4096]);
            while let Some(line) = lines.next() {
                assert_eq!(line, Line::TooLong);
                too_long += 1;
            }
            assert!(lines.buffer.len() <= LONGEST_LINE + 4096);
        }
        assert_eq!(too_long, 1);
        lines.push(b"xx\nthree\n");
        assert_eq!((lines.next(), lines.next()), (Some(Line::Whole(b"three\n".to_vec())), None));
        lines.push(&[b"y".repeat(LONGEST_LINE + 1), b"\nfour\n".to_vec()].concat());
        assert_eq!((lines.next(), lines.next()), (Some(Line::TooLong), Some(Line::Whole(b"four\n".to_vec()))));
    }

    /// Runs a conversation: `program` has one end on a thread of its own, the guest the other.
    fn converse<T: Send + 'static>(program: impl FnOnce(UnixStream) -> T + Send + 'static, beside: impl FnOnce(&Guest)) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, async {
            let guest = Rc::new(Guest::new().unwrap());
            beside(&guest);
            let (theirs, ours) = UnixStream::pair().unwrap();
            ours.set_nonblocking(true).unwrap();
            let program = tokio::task::spawn_blocking(move || program(theirs));
            let talking = tokio::task::spawn_local(async move {
                let ours = Watched::new(ours).unwrap();
                talk(&guest, ours).await
            });
            let result = program.await.unwrap();
            // Its end is the connection's: the guest gives the place free.
            let _ = talking.await.unwrap();
            result
        })
    }

    fn ask(stream: &UnixStream, replies: &mut impl BufRead, line: &str) -> Value {
        let mut stream = stream;
        stream.write_all(format!("{line}\n").as_bytes()).unwrap();
        let mut reply = String::new();
        replies.read_line(&mut reply).unwrap();
        serde_json::from_str(&reply).unwrap()
    }

    #[test]
    fn a_conversation_goes_on_after_a_line_that_was_refused() {
        let program = |stream: UnixStream| {
            let mut replies = BufReader::new(stream.try_clone().unwrap());
            let mut said = |line: &str| ask(&stream, &mut replies, line);
            assert_eq!(said("what?")["ok"], false);
            assert_eq!(said(&"x".repeat(3 * LONGEST_LINE))["ok"], false);
            assert_eq!(said(r#"{"op":"keep_awake","seconds":90}"#), json!({ "ok": true }));
            assert_eq!(said(r#"{"op":"waiting","for":"person","text":"which one?"}"#), json!({ "ok": true }));
            let status = said(r#"{"op":"status"}"#);
            assert!(status["keep_awake_seconds"].as_u64().unwrap() > 0, "{status}");
            assert_eq!(status["waiting"], json!({ "for": "person", "text": "which one?" }));
            assert_eq!(said(r#"{"op":"keep_awake","seconds":0}"#), json!({ "ok": true }));
            assert_eq!(said(r#"{"op":"waiting","for":null}"#), json!({ "ok": true }));
            let status = said(r#"{"op":"status"}"#);
            assert_eq!((&status["keep_awake_seconds"], &status["waiting"]), (&json!(0), &Value::Null));
        };
        converse(program, |_| {});
    }

    #[test]
    fn what_nobody_writes_down_is_bounded() {
        let program = |stream: UnixStream| {
            let mut replies = BufReader::new(stream.try_clone().unwrap());
            let taken = (0..MOST_UNTAKEN + 5)
                .filter(|n| ask(&stream, &mut replies, &format!(r#"{{"op":"note","text":"{n}"}}"#))["ok"] == true);
            taken.count()
        };
        assert_eq!(converse(program, |_| {}), MOST_UNTAKEN);
    }

    #[test]
    fn a_wake_that_was_missed_is_told_at_once() {
        let hello =
            |generation: u64| serde_json::from_value(json!({ "protocol": 1, "generation": generation, "gap_ms": 2500 })).unwrap();
        let program = |stream: UnixStream| {
            let mut replies = BufReader::new(stream.try_clone().unwrap());
            ask(&stream, &mut replies, r#"{"op":"wait_wake","generation":1}"#)
        };
        let reply = converse(program, |guest| {
            for generation in [1, 2] {
                guest.moments.hello(&hello(generation), std::time::SystemTime::now());
            }
        });
        assert_eq!(reply, json!({ "ok": true, "event": "wake", "generation": 2, "gap_seconds": 2.5 }));
    }
}
