//! Answers that come piece by piece: lines of JSON, and server-sent events.

use super::failure::{Failure, Result};
use bytes::{Buf, Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use std::time::Duration;

/// Longest line that is kept. Output lines carry at most some hundred KiB.
const MAX_LINE: usize = 16 << 20;

/// The server says at least a blank line every 10 s; after this silence the connection is dead.
const SILENCE: Duration = Duration::from_secs(35);

/// Cuts bytes into lines, however they arrive.
#[derive(Debug, Default)]
pub struct LineCutter {
    buffer: BytesMut,
    /// How much of the buffer is known to have no line end.
    searched: usize,
}

impl LineCutter {
    /// More bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole line without its end (LF or CRLF).
    pub fn next_line(&mut self) -> Option<Bytes> {
        let Some(at) = self.buffer[self.searched..].iter().position(|byte| *byte == b'\n') else {
            self.searched = self.buffer.len();
            return None;
        };
        let mut line = self.buffer.split_to(self.searched + at).freeze();
        self.buffer.advance(1);
        self.searched = 0;
        if line.last() == Some(&b'\r') {
            line.truncate(line.len() - 1);
        }
        Some(line)
    }

    fn is_too_long(&self) -> bool {
        self.buffer.len() > MAX_LINE
    }
}

/// The lines of an answer that is still coming.
pub struct Lines {
    body: Incoming,
    cutter: LineCutter,
}

impl Lines {
    /// The lines of `body`.
    pub fn new(body: Incoming) -> Lines {
        Lines { body, cutter: LineCutter::default() }
    }

    /// The next line; `None` at the answer's end. A line without an end is torn and not given. Safe to drop while it
    /// waits.
    ///
    /// # Errors
    /// An unreachable failure where the connection breaks or is silent for too long.
    pub async fn next(&mut self) -> Result<Option<Bytes>> {
        loop {
            if let Some(line) = self.cutter.next_line() {
                return Ok(Some(line));
            }
            if self.cutter.is_too_long() {
                return Err(Failure::failed("the server sent a line that never ends"));
            }
            let Ok(frame) = tokio::time::timeout(SILENCE, self.body.frame()).await else {
                return Err(Failure::unreachable("the server has been silent for too long"));
            };
            match frame {
                None => return Ok(None),
                Some(Err(error)) => return Err(Failure::unreachable(format!("the connection broke: {error}"))),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.cutter.push(&data);
                    }
                }
            }
        }
    }
}

/// One server-sent event.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServerEvent {
    pub id: Option<String>,
    pub event: Option<String>,
    pub data: String,
}

/// Puts lines together to events (the HTML standard, section 9.2.6). Comments are skipped.
#[derive(Debug, Default)]
pub struct EventBuilder {
    event: ServerEvent,
    has_data: bool,
}

impl EventBuilder {
    /// One more line; the event that it completes.
    pub fn line(&mut self, line: &str) -> Option<ServerEvent> {
        if line.is_empty() {
            let event = std::mem::take(&mut self.event);
            return std::mem::take(&mut self.has_data).then_some(event);
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "id" => self.event.id = Some(value.to_owned()),
            "event" => self.event.event = Some(value.to_owned()),
            "data" => {
                if self.has_data {
                    self.event.data.push('\n');
                }
                self.event.data.push_str(value);
                self.has_data = true;
            }
            _ => {}
        }
        None
    }
}

/// The events of an answer that is still coming.
pub struct ServerEvents {
    lines: Lines,
    builder: EventBuilder,
}

impl ServerEvents {
    /// The events of `body`.
    pub fn new(body: Incoming) -> ServerEvents {
        ServerEvents { lines: Lines::new(body), builder: EventBuilder::default() }
    }

    /// The next event; `None` at the answer's end.
    ///
    /// # Errors
    /// As [`Lines::next`].
    pub async fn next(&mut self) -> Result<Option<ServerEvent>> {
        while let Some(line) = self.lines.next().await? {
            if let Some(event) = self.builder.line(&String::from_utf8_lossy(&line)) {
                return Ok(Some(event));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_the_same_however_the_bytes_are_cut() {
        let text = b"one\r\n\ntwo\nthree";
        for size in 1..=text.len() {
            let mut cutter = LineCutter::default();
            let mut lines = Vec::new();
            for piece in text.chunks(size) {
                cutter.push(piece);
                while let Some(line) = cutter.next_line() {
                    lines.push(String::from_utf8(line.to_vec()).unwrap());
                }
            }
            assert_eq!(lines, ["one", "", "two"], "pieces of {size}");
        }
    }

    #[test]
    fn events_are_put_together() {
        let mut builder = EventBuilder::default();
        let mut events = Vec::new();
        for line in [": hello", "", "id: 7", "event: x", "data: {\"a\":1}", "", "data:one", "data: two", "", "id: 9", ""] {
            events.extend(builder.line(line));
        }
        assert_eq!(
            events,
            [
                ServerEvent { id: Some("7".into()), event: Some("x".into()), data: "{\"a\":1}".into() },
                ServerEvent { id: None, event: None, data: "one\ntwo".into() },
            ]
        );
    }
}
