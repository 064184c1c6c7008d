//! Frames: a length, a kind, a stream, a payload.
//!
//! ```text
//! u32 length of what follows │ u8 kind │ u32 stream │ payload          (integers big-endian)
//!   kind 0 Control  payload: JSON; stream 0
//!   kind 1 Data     payload: u64 offset, bytes
//!   kind 2 End      payload: u64 offset at which the sender's bytes end
//!   kind 3 Ack      payload: u64 offset below which the receiver has everything
//!   kind 4 Reset    payload: UTF-8 reason; neither side says more on this stream
//! ```
//!
//! Every connection begins, in both directions, with [`PREAMBLE`]; what comes before it is the
//! torn end of an older connection and is skipped.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use model::Offset;
use serde::{Deserialize, Serialize};

/// First bytes of a connection. Sixteen bytes that occur in no frame by accident: no frame has a
/// length that begins with 0xD0.
pub const PREAMBLE: [u8; 16] = *b"\xD0RMOUSE-WIRE-1\r\n";

/// Most bytes that one data frame carries: small, so that no stream holds up another for long.
pub const MAX_DATA: usize = 64 * 1024;

/// Longest control message. What can be longer (listings, output) travels as a stream.
pub const MAX_CONTROL: usize = 4 * 1024 * 1024;

const HEADER: usize = 4;
const KIND_AND_STREAM: usize = 5;

/// Names one byte stream on a connection. Even the largest session makes fewer than 2³².
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct StreamId(pub u32);

/// One frame, decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    Control(Bytes),
    Data { stream: StreamId, offset: Offset, bytes: Bytes },
    End { stream: StreamId, offset: Offset },
    Ack { stream: StreamId, offset: Offset },
    Reset { stream: StreamId, reason: String },
}

/// Why bytes are no frames. The other side is broken or hostile: the connection ends.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("a frame of {length} bytes is longer than its kind {kind} may be")]
    TooLong { kind: u8, length: usize },
    #[error("a frame of kind {kind} with {length} bytes is too short")]
    TooShort { kind: u8, length: usize },
    #[error("unknown frame kind {0}")]
    UnknownKind(u8),
    #[error("a reset reason is not UTF-8")]
    BadReason,
    #[error("a control message could not be read: {0}")]
    BadControl(String),
}

impl Frame {
    /// A control frame with `message` as JSON.
    ///
    /// # Errors
    /// [`FrameError::TooLong`] when the message exceeds [`MAX_CONTROL`].
    pub fn control<T: Serialize>(message: &T) -> Result<Frame, FrameError> {
        let json = serde_json::to_vec(message).map_err(|e| FrameError::BadControl(e.to_string()))?;
        if json.len() > MAX_CONTROL {
            return Err(FrameError::TooLong { kind: 0, length: json.len() });
        }
        Ok(Frame::Control(json.into()))
    }

    /// Appends the frame's bytes to `out`. Data beyond [`MAX_DATA`] must be split by the caller.
    pub fn encode(&self, out: &mut BytesMut) {
        let (kind, stream) = match self {
            Frame::Control(_) => (0, StreamId(0)),
            Frame::Data { stream, .. } => (1, *stream),
            Frame::End { stream, .. } => (2, *stream),
            Frame::Ack { stream, .. } => (3, *stream),
            Frame::Reset { stream, .. } => (4, *stream),
        };
        let payload = match self {
            Frame::Control(json) => json.len(),
            Frame::Data { bytes, .. } => 8 + bytes.len(),
            Frame::End { .. } | Frame::Ack { .. } => 8,
            Frame::Reset { reason, .. } => reason.len(),
        };
        debug_assert!(payload <= MAX_CONTROL.max(MAX_DATA + 8), "frames are bounded");
        out.reserve(HEADER + KIND_AND_STREAM + payload);
        out.put_u32((KIND_AND_STREAM + payload) as u32);
        out.put_u8(kind);
        out.put_u32(stream.0);
        match self {
            Frame::Control(json) => out.put_slice(json),
            Frame::Data { offset, bytes, .. } => {
                out.put_u64(offset.0);
                out.put_slice(bytes);
            }
            Frame::End { offset, .. } | Frame::Ack { offset, .. } => out.put_u64(offset.0),
            Frame::Reset { reason, .. } => out.put_slice(reason.as_bytes()),
        }
    }
}

/// Reads a control message from its JSON.
///
/// # Errors
/// [`FrameError::BadControl`] with the parser's words.
pub fn parse_control<'a, T: Deserialize<'a>>(json: &'a [u8]) -> Result<T, FrameError> {
    serde_json::from_slice(json).map_err(|e| FrameError::BadControl(e.to_string()))
}

/// Turns received bytes into frames. Holds at most one incomplete frame.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: BytesMut,
    /// How much of the preamble has been matched; frames follow once it is whole.
    synced: bool,
}

impl Decoder {
    /// A decoder at the start of a connection: skips everything up to the preamble.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The buffer to read into, for callers that save a copy.
    pub fn buffer_mut(&mut self) -> &mut BytesMut {
        &mut self.buffer
    }

    /// True once the preamble has been seen.
    pub fn is_synced(&self) -> bool {
        self.synced
    }

    /// Forgets everything received and waits for a preamble again.
    pub fn reset(&mut self) {
        self.buffer.clear();
        self.synced = false;
    }

    /// After a control message that ends this connection's frames (a quiesce): what follows must
    /// begin with a preamble. Bytes that are already here are kept.
    pub fn expect_preamble(&mut self) {
        self.synced = false;
    }

    /// The next whole frame, or `None` until more bytes come.
    ///
    /// # Errors
    /// [`FrameError`] when the bytes can't be frames; nothing after it can be trusted.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        if !self.synced && !self.find_preamble() {
            return Ok(None);
        }
        if self.buffer.len() < HEADER {
            return Ok(None);
        }
        let length = u32::from_be_bytes([self.buffer[0], self.buffer[1], self.buffer[2], self.buffer[3]]) as usize;
        if self.buffer.len() < HEADER + 1 {
            return Ok(None);
        }
        let kind = self.buffer[HEADER];
        check_length(kind, length)?;
        if self.buffer.len() < HEADER + length {
            // Grows once to what this frame needs, and no further.
            self.buffer.reserve(HEADER + length - self.buffer.len());
            return Ok(None);
        }
        let mut frame = self.buffer.split_to(HEADER + length).freeze();
        frame.advance(HEADER + 1);
        let stream = StreamId(frame.get_u32());
        Ok(Some(match kind {
            0 => Frame::Control(frame),
            1 => {
                let offset = Offset(frame.get_u64());
                Frame::Data { stream, offset, bytes: frame }
            }
            2 => Frame::End { stream, offset: Offset(frame.get_u64()) },
            3 => Frame::Ack { stream, offset: Offset(frame.get_u64()) },
            _ => Frame::Reset { stream, reason: String::from_utf8(frame.to_vec()).map_err(|_| FrameError::BadReason)? },
        }))
    }

    fn find_preamble(&mut self) -> bool {
        let found = self.buffer.windows(PREAMBLE.len()).position(|w| w == PREAMBLE);
        match found {
            Some(at) => {
                self.buffer.advance(at + PREAMBLE.len());
                self.synced = true;
            }
            None => {
                let keep = self.buffer.len().min(PREAMBLE.len() - 1);
                let drop = self.buffer.len() - keep;
                self.buffer.advance(drop);
            }
        }
        self.synced
    }
}

fn check_length(kind: u8, length: usize) -> Result<(), FrameError> {
    let payload = length.checked_sub(KIND_AND_STREAM).ok_or(FrameError::TooShort { kind, length })?;
    let (least, most) = match kind {
        0 => (0, MAX_CONTROL),
        1 => (8, 8 + MAX_DATA),
        2 | 3 => (8, 8),
        4 => (0, 4096),
        _ => return Err(FrameError::UnknownKind(kind)),
    };
    if payload < least {
        return Err(FrameError::TooShort { kind, length });
    }
    if payload > most {
        return Err(FrameError::TooLong { kind, length });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_frame() -> impl Strategy<Value = Frame> {
        let stream = any::<u32>().prop_map(StreamId);
        let bytes = proptest::collection::vec(any::<u8>(), 0..300);
        prop_oneof![
            bytes.clone().prop_map(|b| Frame::Control(b.into())),
            (stream.clone(), any::<u64>(), bytes).prop_map(|(stream, o, b)| Frame::Data {
                stream,
                offset: Offset(o),
                bytes: b.into()
            }),
            (stream.clone(), any::<u64>()).prop_map(|(stream, o)| Frame::End { stream, offset: Offset(o) }),
            (stream.clone(), any::<u64>()).prop_map(|(stream, o)| Frame::Ack { stream, offset: Offset(o) }),
            (stream, "[a-z ]{0,40}").prop_map(|(stream, reason)| Frame::Reset { stream, reason }),
        ]
    }

    proptest! {
        /// However the bytes are cut, and whatever torn frame comes before, the frames come out.
        #[test]
        fn frames_survive_any_cutting(
            torn in proptest::collection::vec(any::<u8>(), 0..40),
            frames in proptest::collection::vec(any_frame(), 0..8),
            cuts in proptest::collection::vec(1usize..50, 1..60),
        ) {
            let mut bytes = BytesMut::from(&torn[..]);
            bytes.put_slice(&PREAMBLE);
            for frame in &frames {
                frame.encode(&mut bytes);
            }
            let mut decoder = Decoder::new();
            let mut seen = Vec::new();
            let mut cuts = cuts.into_iter().cycle();
            while !bytes.is_empty() {
                let cut = cuts.next().unwrap().min(bytes.len());
                decoder.push(&bytes.split_to(cut));
                while let Some(frame) = decoder.next_frame().unwrap() {
                    seen.push(frame);
                }
            }
            prop_assert_eq!(seen, frames);
        }

        /// Hostile bytes give an error or nothing, never a panic, and never make the decoder hold
        /// more than one frame's worth.
        #[test]
        fn hostile_bytes_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let mut decoder = Decoder::new();
            decoder.push(&PREAMBLE);
            decoder.push(&bytes);
            while let Ok(Some(_)) = decoder.next_frame() {}
            prop_assert!(decoder.buffer.capacity() <= 2 * (HEADER + KIND_AND_STREAM + MAX_CONTROL) + bytes.len());
        }
    }

    #[test]
    fn lengths_out_of_bounds_are_refused_before_their_bytes_come() {
        for (kind, length) in [(0u8, MAX_CONTROL + 6), (1, MAX_DATA + 14), (2, 12), (3, 14), (4, 5000), (1, 12), (9, 20), (0, 4)]
        {
            let mut decoder = Decoder::new();
            decoder.push(&PREAMBLE);
            decoder.push(&(length as u32).to_be_bytes());
            decoder.push(&[kind]);
            assert!(decoder.next_frame().is_err(), "kind {kind} length {length}");
        }
    }
}
