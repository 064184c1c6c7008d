//! A terminal's viewer over the WebSocket, with the frames of the contract.

use crate::session::Session;
use model::Offset;
use std::{
    net::TcpStream,
    time::{Duration, Instant},
};
use tungstenite::{Message, WebSocket, client::IntoClientRequest};
use wire::terminal::{ClientFrame, InputSeq, ServerFrame};

/// One attached viewer.
pub struct Viewer {
    socket: WebSocket<TcpStream>,
}

impl Viewer {
    /// Attaches with the query `query`, such as `client=…&cols=80&rows=24&from=screen`.
    pub fn attach(session: &Session, terminal: &str, query: &str) -> Result<Viewer, String> {
        let host = session.client.base.trim_start_matches("http://");
        let url = format!("ws://{host}{}?{query}", session.path(&format!("/terminals/{terminal}/attach")));
        let mut request = url.into_client_request().map_err(|e| e.to_string())?;
        let bearer = format!("Bearer {}", session.client.token).parse().expect("a token is a header value");
        request.headers_mut().insert("authorization", bearer);
        let stream = TcpStream::connect(host).map_err(|e| e.to_string())?;
        stream.set_read_timeout(Some(Duration::from_secs(60))).map_err(|e| e.to_string())?;
        stream.set_nodelay(true).map_err(|e| e.to_string())?;
        let (socket, _) = tungstenite::client(request, stream).map_err(|e| e.to_string())?;
        Ok(Viewer { socket })
    }

    /// The next frame; `None` when the link has ended.
    #[allow(clippy::should_implement_trait, reason = "it waits for what a link brings")]
    pub fn next(&mut self) -> Option<ServerFrame> {
        loop {
            match self.socket.read() {
                Ok(Message::Binary(bytes)) => return Some(ServerFrame::decode(bytes).expect("a frame of the contract")),
                Ok(Message::Close(_)) | Err(_) => return None,
                Ok(_) => {}
            }
        }
    }

    /// Frames until `done` is true for one, which is the last.
    #[track_caller]
    pub fn until(&mut self, what: &str, mut done: impl FnMut(&ServerFrame) -> bool) -> Vec<ServerFrame> {
        let (deadline, mut frames) = (Instant::now() + crate::PATIENCE, Vec::new());
        loop {
            let frame = self.next().unwrap_or_else(|| panic!("the link ended before {what}; frames: {frames:?}"));
            let found = done(&frame);
            frames.push(frame);
            if found {
                return frames;
            }
            assert!(Instant::now() < deadline, "waited in vain for {what}");
        }
    }

    pub fn send(&mut self, frame: ClientFrame) -> bool {
        self.socket.send(Message::Binary(frame.encode())).is_ok()
    }

    /// Types text as input number `seq`.
    pub fn type_text(&mut self, seq: u64, text: &str) -> bool {
        self.send(ClientFrame::Input { seq: InputSeq(seq), bytes: text.as_bytes().to_vec().into() })
    }

    /// Cuts the link without a goodbye.
    pub fn cut(self) {
        let _ = self.socket.get_ref().shutdown(std::net::Shutdown::Both);
    }
}

/// The output bytes of frames, which must follow each other from `from` without hole or repetition.
#[track_caller]
pub fn output_of(frames: &[ServerFrame], from: Offset) -> Vec<u8> {
    let mut all = Vec::new();
    for frame in frames {
        if let ServerFrame::Output { offset, bytes } = frame {
            assert_eq!(*offset, from.plus(all.len()), "output follows without hole or repetition");
            all.extend_from_slice(bytes);
        }
    }
    all
}
