//! The way in: connections to ports of sessions, and what is open.

use crate::{
    Caller, Engine, Error,
    session::Session,
    supervisor_client::{CallError, Conn},
};
use bytes::{Buf, Bytes, BytesMut};
use futures_util::FutureExt;
use model::{Offset, SessionId, network::Policy};
use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};
use store::Traffic;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::unix::{OwnedReadHalf, OwnedWriteHalf},
};
use wire::{
    Code, Decoder, Frame, StreamId, WireError,
    control::{Answer, OpenConnection, Request},
    frame::MAX_DATA,
    guest::ListeningPort,
};

/// How long a connection to a port may take: it is one within the machine.
const DIAL_LIMIT: Duration = Duration::from_secs(30);
/// Bytes read at once.
const READ: usize = 64 * 1024;

/// The network of a session as it stands.
#[derive(Debug, Clone, PartialEq)]
pub struct NetworkView {
    pub policy: Policy,
    /// Its secrets were not given along when it was forked.
    pub secrets_withheld: bool,
    /// Connections that are open; not all of them where there are many.
    pub open: Vec<OpenConnection>,
    pub open_count: u64,
    pub traffic: Traffic,
}

impl Engine {
    /// A connection to a port inside. The session is woken for it, and booted with `start`.
    ///
    /// # Errors
    /// [`Error::PortClosed`] where nobody listens; why the session can't be used.
    pub async fn dial(&self, caller: &Caller, id: SessionId, port: u16, start: bool) -> Result<Connection, Error> {
        if port == 0 {
            return Err(Error::invalid("port", "there is no port 0"));
        }
        let session = self.inner.present(id).await?;
        let call = |live: Arc<crate::session::Live>| {
            async move {
                let mut conn = live.supervisor.connect().await?;
                let asked = tokio::time::timeout(DIAL_LIMIT, conn.ask(&Request::Dial { port })).await;
                match asked.unwrap_or(Err(CallError::TimedOut(DIAL_LIMIT))) {
                    Ok(Answer::Streaming) => Ok(conn),
                    Ok(_) => Err(CallError::Broken("it answered with something else".to_owned())),
                    // Nothing has been said on the connection yet, so another one is as good.
                    Err(CallError::Broken(why)) => Err(CallError::Unreachable(io::Error::other(why))),
                    Err(CallError::Refused(error)) if error.code == Code::SandboxGone => {
                        Err(CallError::Unreachable(io::Error::other(error.message)))
                    }
                    Err(error) => Err(error),
                }
            }
            .boxed()
        };
        match self.inner.with_live(&session, &caller.actor, start, call).await?.1 {
            Ok(conn) => Ok(Connection::new(conn)),
            Err(CallError::Refused(error)) => Err(refused(&session, port, error)),
            Err(error) => Err(session.call_error(error)),
        }
    }

    /// The ports on which programs inside listen. Nothing is woken: of a session without a sandbox there are none.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Deleted`].
    pub async fn ports(&self, id: SessionId) -> Result<Vec<ListeningPort>, Error> {
        let session = self.inner.present(id).await?;
        let Some(live) = self.inner.awake(&session) else { return Ok(Vec::new()) };
        match live.supervisor.call_soon(&Request::Ports).await {
            Ok(Answer::Ports { items }) => Ok(items),
            Ok(_) => Err(Error::internal("the supervisor answered with something else")),
            Err(CallError::Unreachable(_)) => Ok(Vec::new()),
            Err(CallError::Refused(error)) if error.code == Code::Unsupported => Ok(Vec::new()),
            Err(error) => Err(session.call_error(error)),
        }
    }

    /// What a session may reach, what is open, and what has gone over its network. Nothing is woken.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Deleted`].
    pub async fn network(&self, id: SessionId) -> Result<NetworkView, Error> {
        let session = self.inner.present(id).await?;
        let (mut open, mut open_count) = (Vec::new(), 0);
        if let Some(live) = self.inner.awake(&session)
            && let Ok(Answer::Network { open: now, count }) = live.supervisor.call_soon(&Request::Network).await
        {
            (open, open_count) = (now, count);
        }
        crate::facts::drain(&self.inner, &session).await?;
        let row = session.view().row;
        Ok(NetworkView {
            policy: row.network.clone(),
            secrets_withheld: row.secrets_withheld,
            open,
            open_count,
            traffic: row.traffic.clone(),
        })
    }
}

fn refused(session: &Session, port: u16, error: WireError) -> Error {
    match error.code {
        Code::NotFound | Code::Ended => Error::PortClosed { session: session.id, port },
        Code::Unsupported => {
            let detail = "its supervisor is of an older version, which has no way in; hibernate and wake the session once";
            Error::Conflict { detail: detail.to_owned() }
        }
        _ => session.call_error(CallError::Refused(error)),
    }
}

/// A connection to a port of a session. Its end in one direction is told by `poll_shutdown`; dropping it cuts it off.
#[derive(Debug)]
pub struct Connection {
    reader: OwnedReadHalf,
    decoder: Decoder,
    /// What has come and wasn't read yet.
    arrived: Bytes,
    /// Nothing more comes.
    at_end: bool,
    writer: OwnedWriteHalf,
    /// Frames on their way out.
    leaving: BytesMut,
    sent: Offset,
    shut: bool,
}

impl Connection {
    fn new(conn: Conn) -> Connection {
        let ((reader, decoder), writer) = conn.into_halves();
        let (arrived, leaving, sent) = (Bytes::new(), BytesMut::new(), Offset::ZERO);
        Connection { reader, decoder, arrived, at_end: false, writer, leaving, sent, shut: false }
    }

    /// Sends the frames that wait.
    fn poll_leave(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.leaving.is_empty() {
            let count = ready!(Pin::new(&mut self.writer).poll_write(context, &self.leaving))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.leaving.advance(count);
        }
        Poll::Ready(Ok(()))
    }

    /// Takes the next frame in. False: more bytes are needed for one.
    fn take_frame(&mut self) -> io::Result<bool> {
        match self.decoder.next_frame().map_err(io::Error::other)? {
            None => return Ok(false),
            Some(Frame::Data { bytes, .. }) => self.arrived = bytes,
            Some(Frame::End { .. }) => self.at_end = true,
            Some(Frame::Reset { reason, .. }) => return Err(io::Error::new(io::ErrorKind::ConnectionReset, reason)),
            Some(_) => return Err(io::Error::other("the supervisor broke the protocol")),
        }
        Ok(true)
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            if !this.arrived.is_empty() {
                let count = this.arrived.len().min(into.remaining());
                into.put_slice(&this.arrived.split_to(count));
                return Poll::Ready(Ok(()));
            }
            if this.at_end {
                return Poll::Ready(Ok(()));
            }
            if this.take_frame()? {
                continue;
            }
            let buffer = this.decoder.buffer_mut();
            buffer.reserve(READ);
            let count = ready!(tokio_util::io::poll_read_buf(Pin::new(&mut this.reader), context, buffer))?;
            if count == 0 {
                // Without an end: the sandbox or its supervisor is gone.
                return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
            }
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.shut {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        // At most one frame waits, so that a slow reader inside holds its writer back.
        ready!(self.poll_leave(context))?;
        let count = bytes.len().min(MAX_DATA);
        if count > 0 {
            let this = &mut *self;
            let bytes = Bytes::copy_from_slice(&bytes[..count]);
            Frame::Data { stream: StreamId(0), offset: this.sent, bytes }.encode(&mut this.leaving);
            this.sent = this.sent.plus(count);
            if let Poll::Ready(Err(error)) = this.poll_leave(context) {
                return Poll::Ready(Err(error));
            }
        }
        Poll::Ready(Ok(count))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_leave(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.shut {
            let this = &mut *self;
            Frame::End { stream: StreamId(0), offset: this.sent }.encode(&mut this.leaving);
            this.shut = true;
        }
        // The socket itself stays open: closing it would cut off what still comes.
        self.poll_leave(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::UnixStream,
    };
    use wire::frame::PREAMBLE;

    fn pair() -> (Connection, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (reader, writer) = ours.into_split();
        let mut decoder = Decoder::new();
        decoder.push(&PREAMBLE);
        let (arrived, leaving) = (Bytes::new(), BytesMut::new());
        let sent = Offset::ZERO;
        (Connection { reader, decoder, arrived, at_end: false, writer, leaving, sent, shut: false }, theirs)
    }

    fn encoded(frames: &[Frame]) -> BytesMut {
        let mut out = BytesMut::new();
        frames.iter().for_each(|frame| frame.encode(&mut out));
        out
    }

    fn data(offset: u64, text: &'static str) -> Frame {
        Frame::Data { stream: StreamId(0), offset: Offset(offset), bytes: Bytes::from_static(text.as_bytes()) }
    }

    #[tokio::test]
    async fn both_directions_end_by_themselves() {
        let (mut conn, mut other) = pair();
        let end = |offset| Frame::End { stream: StreamId(0), offset: Offset(offset) };
        conn.write_all(b"hello").await.unwrap();
        conn.shutdown().await.unwrap();
        assert!(conn.write(b"x").await.is_err(), "what was ended is not written to");
        let expected = encoded(&[data(0, "hello"), end(5)]);
        let mut seen = vec![0; expected.len()];
        other.read_exact(&mut seen).await.unwrap();
        assert_eq!(seen, expected);
        // What still comes is read.
        other.write_all(&encoded(&[data(0, "a"), data(1, "bc"), end(3)])).await.unwrap();
        let mut text = String::new();
        conn.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "abc");
    }

    #[tokio::test]
    async fn a_large_write_goes_in_frames() {
        let (mut conn, mut other) = pair();
        let bytes: Vec<u8> = (0..300_000u32).map(|n| n as u8).collect();
        let sent = bytes.clone();
        let writing = tokio::spawn(async move {
            conn.write_all(&sent).await.unwrap();
            conn.shutdown().await.unwrap();
            conn
        });
        let mut decoder = Decoder::new();
        decoder.push(&PREAMBLE);
        let mut seen = Vec::new();
        loop {
            match decoder.next_frame().unwrap() {
                Some(Frame::Data { offset, bytes, .. }) => {
                    assert_eq!(offset.0, seen.len() as u64);
                    seen.extend_from_slice(&bytes);
                }
                Some(Frame::End { offset, .. }) => {
                    assert_eq!(offset.0, seen.len() as u64);
                    break;
                }
                Some(other) => panic!("{other:?}"),
                None => {
                    other.read_buf(decoder.buffer_mut()).await.unwrap();
                }
            }
        }
        assert!(seen == bytes);
        drop(writing.await.unwrap());
    }

    #[tokio::test]
    async fn what_is_cut_off_is_not_taken_for_the_whole() {
        let (mut conn, mut other) = pair();
        other.write_all(&encoded(&[data(0, "half")])).await.unwrap();
        drop(other);
        let mut text = String::new();
        assert!(conn.read_to_string(&mut text).await.is_err());
        let (mut conn, mut other) = pair();
        let reset = Frame::Reset { stream: StreamId(0), reason: "it crashed".into() };
        other.write_all(&encoded(&[reset])).await.unwrap();
        assert_eq!(conn.read(&mut [0; 9]).await.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    }
}
