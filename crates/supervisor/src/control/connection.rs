//! One connection on the socket: frames in and out.

use bytes::{Bytes, BytesMut};
use model::Offset;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
};
use wire::{
    Code, Decoder, Frame, StreamId, WireError,
    control::{Answer, MAX_TERMINAL_MESSAGE, MORE_FOLLOWS, Request},
    frame::{MAX_DATA, PREAMBLE, parse_control},
};

/// Stream number on this hop: there is only one stream at a time.
const STREAM: StreamId = StreamId(0);

pub struct Connection {
    from: FromServer,
    to: ToServer,
}

/// The receiving half.
pub struct FromServer {
    half: OwnedReadHalf,
    decoder: Decoder,
}

/// The sending half.
pub struct ToServer {
    half: OwnedWriteHalf,
    greeted: bool,
    sent: Offset,
}

fn closed() -> WireError {
    WireError::new(Code::Ended, "the connection has closed")
}

impl Connection {
    pub fn new(stream: UnixStream) -> Connection {
        let (from, to) = stream.into_split();
        Connection {
            from: FromServer { half: from, decoder: Decoder::new() },
            to: ToServer { half: to, greeted: false, sent: Offset::ZERO },
        }
    }

    pub fn split(self) -> (FromServer, ToServer) {
        (self.from, self.to)
    }

    /// The next request; `None` when the server has closed the connection.
    ///
    /// # Errors
    /// What came is no request, or one that a newer server makes.
    pub async fn request(&mut self) -> Result<Option<Request>, WireError> {
        match self.from.frame().await? {
            None => Ok(None),
            Some(Frame::Control(json)) => match parse_control(&json) {
                Ok(request) => Ok(Some(request)),
                Err(error) => {
                    Err(WireError::new(Code::Unsupported, format!("this supervisor doesn't know the request: {error}")))
                }
            },
            Some(_) => Err(WireError::new(Code::Protocol, "a request was expected")),
        }
    }

    pub async fn frame(&mut self) -> Result<Option<Frame>, WireError> {
        self.from.frame().await
    }

    /// Waits until the server closes the connection. What it sends meanwhile is kept.
    pub async fn closed(&mut self) {
        let mut buffer = [0; 4096];
        loop {
            match self.from.half.read(&mut buffer).await {
                Ok(n) if n > 0 => self.from.decoder.push(&buffer[..n]),
                _ => return,
            }
        }
    }

    pub async fn send(&mut self, answer: &Answer) -> Result<(), WireError> {
        let frame = Frame::control(answer).or_else(|error| {
            let error = WireError::new(Code::Internal, format!("the answer is too long: {error}"));
            Frame::control(&Answer::Error { error })
        });
        let frame = frame.map_err(|e| WireError::new(Code::Internal, e.to_string()))?;
        self.to.sent = Offset::ZERO;
        self.to.write(&[frame]).await
    }

    pub async fn send_data(&mut self, bytes: Bytes) -> Result<(), WireError> {
        self.to.send_data(bytes).await
    }

    pub async fn send_end(&mut self) -> Result<(), WireError> {
        self.to.send_end().await
    }

    pub async fn send_reset(&mut self, reason: &str) -> Result<(), WireError> {
        self.to.send_reset(reason).await
    }
}

impl FromServer {
    /// The next frame; `None` when the server has closed the connection.
    ///
    /// # Errors
    /// What came is no frame.
    pub async fn frame(&mut self) -> Result<Option<Frame>, WireError> {
        loop {
            match self.decoder.next_frame() {
                Ok(Some(frame)) => return Ok(Some(frame)),
                Ok(None) => {}
                Err(error) => return Err(WireError::new(Code::Protocol, error.to_string())),
            }
            self.decoder.buffer_mut().reserve(8 * 1024);
            match self.half.read_buf(self.decoder.buffer_mut()).await {
                Ok(0) | Err(_) => return Ok(None),
                Ok(_) => {}
            }
        }
    }
}

impl FromServer {
    /// The next terminal message, put together from its pieces; `None` when the server has closed the
    /// connection.
    ///
    /// # Errors
    /// What came is no message.
    pub async fn message(&mut self) -> Result<Option<Bytes>, WireError> {
        let mut pieces = BytesMut::new();
        loop {
            match self.frame().await? {
                None => return Ok(None),
                Some(Frame::Data { stream, bytes, .. }) => {
                    if stream != MORE_FOLLOWS && pieces.is_empty() {
                        return Ok(Some(bytes));
                    }
                    pieces.extend_from_slice(&bytes);
                    if stream != MORE_FOLLOWS {
                        return Ok(Some(pieces.freeze()));
                    }
                    if pieces.len() > MAX_TERMINAL_MESSAGE {
                        return Err(WireError::new(Code::Protocol, "a terminal message is too long"));
                    }
                }
                Some(_) => return Err(WireError::new(Code::Protocol, "a terminal message was expected")),
            }
        }
    }
}

impl ToServer {
    async fn write(&mut self, frames: &[Frame]) -> Result<(), WireError> {
        let mut out = BytesMut::new();
        if !std::mem::replace(&mut self.greeted, true) {
            out.extend_from_slice(&PREAMBLE);
        }
        for frame in frames {
            frame.encode(&mut out);
        }
        self.half.write_all(&out).await.map_err(|_| closed())
    }

    /// Sends bytes; what exceeds a frame goes in several.
    pub async fn send_data(&mut self, mut bytes: Bytes) -> Result<(), WireError> {
        let mut frames = Vec::new();
        while !bytes.is_empty() {
            let piece = bytes.split_to(bytes.len().min(MAX_DATA));
            let offset = self.sent;
            self.sent = self.sent.plus(piece.len());
            frames.push(Frame::Data { stream: STREAM, offset, bytes: piece });
        }
        self.write(&frames).await
    }

    pub async fn send_end(&mut self) -> Result<(), WireError> {
        self.write(&[Frame::End { stream: STREAM, offset: self.sent }]).await
    }

    pub async fn send_reset(&mut self, reason: &str) -> Result<(), WireError> {
        let reason = reason.chars().take(1000).collect();
        self.write(&[Frame::Reset { stream: STREAM, reason }]).await
    }

    /// Sends one terminal message, in pieces where it is longer than a frame.
    pub async fn send_message(&mut self, mut message: Bytes) -> Result<(), WireError> {
        let mut frames = Vec::new();
        while message.len() > MAX_DATA {
            frames.push(Frame::Data { stream: MORE_FOLLOWS, offset: Offset::ZERO, bytes: message.split_to(MAX_DATA) });
        }
        frames.push(Frame::Data { stream: STREAM, offset: Offset::ZERO, bytes: message });
        self.write(&frames).await
    }
}
