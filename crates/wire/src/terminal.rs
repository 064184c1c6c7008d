//! What a terminal's viewer and the terminal say to each other: one message, one binary WebSocket message.
//!
//! ```text
//! terminal → viewer                                  viewer → terminal
//!   S u64 offset, bytes   redraws a cleared screen     I u64 sequence, bytes   input
//!   O u64 offset, bytes   output                       R u16 cols, u16 rows    size wanted
//!   G u64 from, u64 to    output that is gone          T                       make me the writer
//!   A u64 sequence        input typed                  P                       ping
//!   N u64 sequence, text  input refused
//!   R u16 cols, u16 rows  size now
//!   W u8 (1 = you)        who writes
//!   X i32 status, text    ended
//!   P                     pong
//! ```
//! Integers are big-endian, text is UTF-8, and each message is read whole: what is left over is an error.
//! Unlike the JSON messages these don't grow fields; a newer kind of message has a letter of its own.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use model::Offset;

/// Most bytes of one input message: a large paste is sent in several.
pub const MAX_INPUT: usize = 64 * 1024;

/// Longest reason that is read; what is longer comes from something that isn't a terminal.
pub const MAX_REASON: usize = 4 * 1024;

/// Most columns or rows. A terminal emulator keeps a cell for each.
pub const MAX_SIDE: u16 = 2_000;

/// The number of an input message: from 1 for each terminal and client, without holes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InputSeq(pub u64);

impl InputSeq {
    /// The number of a client's first input.
    pub const FIRST: InputSeq = InputSeq(1);

    /// The number after this. Saturates: nobody types 2⁶⁴ times.
    pub fn next(self) -> InputSeq {
        InputSeq(self.0.saturating_add(1))
    }
}

/// How a terminal's program ended: an exit code, or a signal as its negative number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndStatus(pub i32);

impl EndStatus {
    /// The status that a shell would show: the exit code, or 128 + signal.
    pub fn shell_code(self) -> i32 {
        if self.0 < 0 { 128i32.saturating_add(self.0.saturating_neg()) } else { self.0 }
    }

    /// From what a record says of its end. Neither known: the program was lost with its sandbox, which a shell
    /// would see as a kill.
    pub fn of(exit_code: Option<i32>, signal: Option<i32>) -> EndStatus {
        match (exit_code, signal) {
            (Some(code), _) => EndStatus(code),
            (None, Some(signal)) => EndStatus(signal.saturating_neg()),
            (None, None) => EndStatus(-9),
        }
    }
}

/// Terminal → viewer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerFrame {
    /// Redraws everything on a cleared terminal; true for the output below `offset`.
    Screen {
        offset: Offset,
        bytes: Bytes,
    },
    Output {
        offset: Offset,
        bytes: Bytes,
    },
    Gap {
        from: Offset,
        to: Offset,
    },
    InputTyped {
        seq: InputSeq,
    },
    InputRefused {
        seq: InputSeq,
        reason: String,
    },
    Size {
        cols: u16,
        rows: u16,
    },
    Writer {
        you: bool,
    },
    Ended {
        status: EndStatus,
        reason: String,
    },
    Pong,
}

/// Viewer → terminal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientFrame {
    Input { seq: InputSeq, bytes: Bytes },
    Resize { cols: u16, rows: u16 },
    Take,
    Ping,
}

/// Why bytes are no message. The sender is broken or hostile: its connection ends.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TerminalFrameError {
    #[error("an empty terminal message")]
    Empty,
    #[error("unknown kind of terminal message 0x{0:02x}")]
    UnknownKind(u8),
    #[error("a terminal message of kind '{kind}' with {length} bytes has the wrong length")]
    Length { kind: char, length: usize },
    #[error("the reason in a terminal message of kind '{kind}' is not UTF-8")]
    BadText { kind: char },
    #[error("input messages are numbered from 1")]
    ZeroSequence,
    #[error("a terminal of {cols} by {rows} cells: both are from 1 to {MAX_SIDE}")]
    BadSize { cols: u16, rows: u16 },
}

impl ServerFrame {
    /// The message's bytes.
    pub fn encode(&self) -> Bytes {
        let mut out = BytesMut::with_capacity(24);
        match self {
            ServerFrame::Screen { offset, bytes } => put_at(&mut out, b'S', offset.0, bytes),
            ServerFrame::Output { offset, bytes } => put_at(&mut out, b'O', offset.0, bytes),
            ServerFrame::Gap { from, to } => {
                put_at(&mut out, b'G', from.0, &[]);
                out.put_u64(to.0);
            }
            ServerFrame::InputTyped { seq } => put_at(&mut out, b'A', seq.0, &[]),
            ServerFrame::InputRefused { seq, reason } => put_at(&mut out, b'N', seq.0, clip(reason).as_bytes()),
            ServerFrame::Size { cols, rows } => put_size(&mut out, *cols, *rows),
            ServerFrame::Writer { you } => out.put_slice(&[b'W', u8::from(*you)]),
            ServerFrame::Ended { status, reason } => {
                out.put_u8(b'X');
                out.put_i32(status.0);
                out.put_slice(clip(reason).as_bytes());
            }
            ServerFrame::Pong => out.put_u8(b'P'),
        }
        out.freeze()
    }

    /// Reads one message. Screen and output share `message`'s memory.
    ///
    /// # Errors
    /// Anything but exactly one well-formed message.
    pub fn decode(message: Bytes) -> Result<ServerFrame, TerminalFrameError> {
        let mut body = Body::new(message)?;
        let frame = match body.kind {
            b'S' => ServerFrame::Screen { offset: Offset(body.u64()?), bytes: body.rest() },
            b'O' => ServerFrame::Output { offset: Offset(body.u64()?), bytes: body.rest() },
            b'G' => ServerFrame::Gap { from: Offset(body.u64()?), to: Offset(body.u64()?) },
            b'A' => ServerFrame::InputTyped { seq: body.seq()? },
            b'N' => ServerFrame::InputRefused { seq: body.seq()?, reason: body.text()? },
            b'R' => {
                let (cols, rows) = body.size()?;
                ServerFrame::Size { cols, rows }
            }
            b'W' => ServerFrame::Writer { you: body.u8()? == 1 },
            b'X' => ServerFrame::Ended { status: EndStatus(body.i32()?), reason: body.text()? },
            b'P' => ServerFrame::Pong,
            other => return Err(TerminalFrameError::UnknownKind(other)),
        };
        body.end()?;
        Ok(frame)
    }
}

impl ClientFrame {
    /// The message's bytes. Input beyond [`MAX_INPUT`] must be split by the caller.
    pub fn encode(&self) -> Bytes {
        let mut out = BytesMut::with_capacity(16);
        match self {
            ClientFrame::Input { seq, bytes } => {
                debug_assert!(bytes.len() <= MAX_INPUT, "input is split before it is sent");
                put_at(&mut out, b'I', seq.0, bytes);
            }
            ClientFrame::Resize { cols, rows } => put_size(&mut out, *cols, *rows),
            ClientFrame::Take => out.put_u8(b'T'),
            ClientFrame::Ping => out.put_u8(b'P'),
        }
        out.freeze()
    }

    /// Reads one message.
    ///
    /// # Errors
    /// Anything but exactly one well-formed message; input that is longer than [`MAX_INPUT`] or numbered 0; a size
    /// with a side of 0 or above [`MAX_SIDE`].
    pub fn decode(message: Bytes) -> Result<ClientFrame, TerminalFrameError> {
        let mut body = Body::new(message)?;
        let frame = match body.kind {
            b'I' => {
                let seq = body.seq()?;
                if body.bytes.len() > MAX_INPUT {
                    return Err(body.wrong_length());
                }
                ClientFrame::Input { seq, bytes: body.rest() }
            }
            b'R' => {
                let (cols, rows) = body.size()?;
                ClientFrame::Resize { cols, rows }
            }
            b'T' => ClientFrame::Take,
            b'P' => ClientFrame::Ping,
            other => return Err(TerminalFrameError::UnknownKind(other)),
        };
        body.end()?;
        Ok(frame)
    }
}

fn put_at(out: &mut BytesMut, kind: u8, at: u64, bytes: &[u8]) {
    out.reserve(9 + bytes.len());
    out.put_u8(kind);
    out.put_u64(at);
    out.put_slice(bytes);
}

fn put_size(out: &mut BytesMut, cols: u16, rows: u16) {
    out.put_u8(b'R');
    out.put_u16(cols);
    out.put_u16(rows);
}

/// The beginning of `reason` that fits, cut at a character's border.
fn clip(reason: &str) -> &str {
    &reason[..reason.floor_char_boundary(MAX_REASON)]
}

/// A message being read: its kind, and what of it hasn't been read yet.
struct Body {
    kind: u8,
    length: usize,
    bytes: Bytes,
}

impl Body {
    fn new(mut message: Bytes) -> Result<Body, TerminalFrameError> {
        let length = message.len();
        let kind = message.try_get_u8().map_err(|_| TerminalFrameError::Empty)?;
        Ok(Body { kind, length, bytes: message })
    }

    fn wrong_length(&self) -> TerminalFrameError {
        TerminalFrameError::Length { kind: char::from(self.kind), length: self.length }
    }

    fn u8(&mut self) -> Result<u8, TerminalFrameError> {
        self.bytes.try_get_u8().map_err(|_| self.wrong_length())
    }

    fn u64(&mut self) -> Result<u64, TerminalFrameError> {
        self.bytes.try_get_u64().map_err(|_| self.wrong_length())
    }

    fn i32(&mut self) -> Result<i32, TerminalFrameError> {
        self.bytes.try_get_i32().map_err(|_| self.wrong_length())
    }

    fn seq(&mut self) -> Result<InputSeq, TerminalFrameError> {
        match self.u64()? {
            0 => Err(TerminalFrameError::ZeroSequence),
            number => Ok(InputSeq(number)),
        }
    }

    fn size(&mut self) -> Result<(u16, u16), TerminalFrameError> {
        let cols = self.bytes.try_get_u16().map_err(|_| self.wrong_length())?;
        let rows = self.bytes.try_get_u16().map_err(|_| self.wrong_length())?;
        if cols == 0 || rows == 0 || cols > MAX_SIDE || rows > MAX_SIDE {
            return Err(TerminalFrameError::BadSize { cols, rows });
        }
        Ok((cols, rows))
    }

    fn text(&mut self) -> Result<String, TerminalFrameError> {
        if self.bytes.len() > MAX_REASON {
            return Err(self.wrong_length());
        }
        let kind = char::from(self.kind);
        String::from_utf8(self.rest().into()).map_err(|_| TerminalFrameError::BadText { kind })
    }

    fn rest(&mut self) -> Bytes {
        std::mem::take(&mut self.bytes)
    }

    fn end(&self) -> Result<(), TerminalFrameError> {
        if self.bytes.is_empty() { Ok(()) } else { Err(self.wrong_length()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes() -> impl Strategy<Value = Bytes> {
        prop::collection::vec(any::<u8>(), 0..200).prop_map(Bytes::from)
    }

    fn side() -> impl Strategy<Value = u16> {
        1..=MAX_SIDE
    }

    fn server_frame() -> impl Strategy<Value = ServerFrame> {
        prop_oneof![
            (any::<u64>(), bytes()).prop_map(|(at, bytes)| ServerFrame::Screen { offset: Offset(at), bytes }),
            (any::<u64>(), bytes()).prop_map(|(at, bytes)| ServerFrame::Output { offset: Offset(at), bytes }),
            (any::<u64>(), any::<u64>()).prop_map(|(a, b)| ServerFrame::Gap { from: Offset(a), to: Offset(b) }),
            (1..=u64::MAX).prop_map(|n| ServerFrame::InputTyped { seq: InputSeq(n) }),
            (1..=u64::MAX, any::<String>()).prop_map(|(n, reason)| ServerFrame::InputRefused { seq: InputSeq(n), reason }),
            (side(), side()).prop_map(|(cols, rows)| ServerFrame::Size { cols, rows }),
            any::<bool>().prop_map(|you| ServerFrame::Writer { you }),
            (any::<i32>(), any::<String>()).prop_map(|(status, reason)| ServerFrame::Ended { status: EndStatus(status), reason }),
            Just(ServerFrame::Pong),
        ]
    }

    fn client_frame() -> impl Strategy<Value = ClientFrame> {
        prop_oneof![
            (1..=u64::MAX, bytes()).prop_map(|(n, bytes)| ClientFrame::Input { seq: InputSeq(n), bytes }),
            (side(), side()).prop_map(|(cols, rows)| ClientFrame::Resize { cols, rows }),
            Just(ClientFrame::Take),
            Just(ClientFrame::Ping),
        ]
    }

    proptest! {
        #[test]
        fn what_a_terminal_says_reads_back(frame in server_frame()) {
            prop_assert_eq!(ServerFrame::decode(frame.encode()), Ok(frame));
        }

        #[test]
        fn what_a_viewer_says_reads_back(frame in client_frame()) {
            prop_assert_eq!(ClientFrame::decode(frame.encode()), Ok(frame));
        }

        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes in bytes()) {
            if let Ok(frame) = ServerFrame::decode(bytes.clone())
                && !matches!(frame, ServerFrame::Writer { .. })
            {
                prop_assert_eq!(frame.encode(), bytes.clone());
            }
            if let Ok(frame) = ClientFrame::decode(bytes.clone()) {
                prop_assert_eq!(frame.encode(), bytes);
            }
        }
    }

    #[test]
    fn the_bytes_are_those_of_the_contract() {
        let cases: [(Bytes, &[u8]); 6] = [
            (ServerFrame::Output { offset: Offset(258), bytes: Bytes::from_static(b"hi") }.encode(), b"O\0\0\0\0\0\0\x01\x02hi"),
            (ServerFrame::Ended { status: EndStatus(-9), reason: "oom".into() }.encode(), b"X\xff\xff\xff\xf7oom"),
            (ServerFrame::Writer { you: true }.encode(), b"W\x01"),
            (ClientFrame::Input { seq: InputSeq::FIRST, bytes: Bytes::from_static(b"x") }.encode(), b"I\0\0\0\0\0\0\0\x01x"),
            (ClientFrame::Resize { cols: 80, rows: 24 }.encode(), b"R\0\x50\0\x18"),
            (ClientFrame::Take.encode(), b"T"),
        ];
        for (encoded, expected) in cases {
            assert_eq!(&encoded[..], expected);
        }
    }

    #[test]
    fn malformed_messages_are_refused() {
        for bad in [&b""[..], b"Z", b"I\0\0\0\0\0\0\0\0x", b"I\0", b"R\0\x50\0", b"R\0\x50\0\x18\0", b"R\0\0\0\x18", b"Tx"] {
            assert!(ClientFrame::decode(Bytes::copy_from_slice(bad)).is_err(), "{bad:?}");
        }
        let mut long = BytesMut::from(&b"I\0\0\0\0\0\0\0\x01"[..]);
        long.resize(9 + MAX_INPUT, b'x');
        assert!(ClientFrame::decode(long.clone().freeze()).is_ok());
        long.put_u8(b'x');
        assert!(ClientFrame::decode(long.freeze()).is_err());
        for bad in [&b"A\0\0\0\0\0\0\0\x01x"[..], b"X\0\0\0\0\xff", b"G\0\0\0\0\0\0\0\x01", b"W"] {
            assert!(ServerFrame::decode(Bytes::copy_from_slice(bad)).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_reason_that_is_too_long_is_cut_between_characters() {
        let frame = ServerFrame::Ended { status: EndStatus(1), reason: "é".repeat(MAX_REASON) };
        let ServerFrame::Ended { reason, .. } = ServerFrame::decode(frame.encode()).unwrap() else { panic!() };
        assert!(reason.len() <= MAX_REASON && reason.chars().all(|c| c == 'é'));
    }

    #[test]
    fn an_end_reads_like_a_shells() {
        assert_eq!(EndStatus::of(Some(3), None).shell_code(), 3);
        assert_eq!(EndStatus::of(None, Some(15)).shell_code(), 143);
        assert_eq!(EndStatus(i32::MIN).shell_code(), i32::MAX);
    }
}
