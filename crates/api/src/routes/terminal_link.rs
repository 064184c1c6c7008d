//! The WebSocket of a terminal: binary messages pass between the viewer and the terminal, checked on their way in.
//!
//! The end of the link says how to go on: 1000 the terminal has ended, 1012 attach again (the session went to sleep, the
//! server ends), 1002 and 1003 the client sent what isn't part of the protocol.

use super::view::may_write;
use crate::{
    AppState,
    auth::Principal,
    error::ApiError,
    extract::{Query, TerminalPath},
};
use api_types::{
    Problem,
    terminal::{ClientFrame, ServerFrame},
};
use axum::{
    extract::{
        State as Shared,
        ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, rejection::WebSocketUpgradeRejection},
    },
    response::Response,
};
use bytes::Bytes;
use engine::{Attachment, Scope};
use futures_util::{
    SinkExt, StreamExt,
    stream::{SplitSink, SplitStream},
};
use model::Offset;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;
use wire::{
    control::Attach,
    terminal::{InputSeq, MAX_INPUT, MAX_SIDE},
};

/// How often a silent viewer is asked whether it is there.
const PING_EVERY: Duration = Duration::from_secs(20);
/// After this long without a word it is taken for gone, so that it doesn't hold the writer's role.
const GONE_AFTER: Duration = Duration::from_secs(60);
/// Answers of this link itself that may wait to be sent.
const OWN_ANSWERS: usize = 16;

const NORMAL: u16 = 1000;
const PROTOCOL: u16 = 1002;
const UNSUPPORTED: u16 = 1003;
const AGAIN: u16 = 1012;

/// How to join a terminal.
#[derive(Debug, Default, serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct AttachQuery {
    /// The viewer's own UUID, kept over reconnects: input is numbered per terminal and client.
    pub client: Option<String>,
    pub cols: Option<u16>,
    pub rows: Option<u16>,
    /// `screen` (where missing), or the offset to go on from.
    pub from: Option<String>,
    /// `write` (where missing), `observe` or `take`.
    pub mode: Option<String>,
    /// `false`: never wake a hibernated session for it, answer 422 `not_running` instead. A viewer that comes back by
    /// itself asks so; otherwise no session with a viewer could sleep.
    pub wake: Option<bool>,
    /// Start a stopped session for it.
    pub start: Option<bool>,
}

/// Join a terminal over a WebSocket.
///
/// Binary messages of one type byte and big-endian fields. From the server: `S` screen (u64 offset, bytes), `O` output
/// (u64 offset, bytes), `G` gap (u64, u64), `A` input acknowledged (u64 sequence), `N` input refused (u64 sequence,
/// reason), `R` size (u16 cols, u16 rows), `W` writer (u8), `X` ended (i32, reason), `P` pong. From the client: `I` input
/// (u64 sequence, bytes), `R` resize, `T` take the writer's role, `P` ping.
#[utoipa::path(get, path = "/v1/sessions/{id}/terminals/{terminal}/attach", tag = "terminals",
    params(("id" = String, Path,), ("terminal" = String, Path,), AttachQuery),
    responses((status = 101), (status = "default", body = Problem)))]
pub(crate) async fn attach(
    Shared(app): Shared<AppState>,
    who: Principal,
    TerminalPath(id, terminal): TerminalPath,
    Query(query): Query<AttachQuery>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ApiError> {
    let upgrade = upgrade.map_err(|error| ApiError::bad_request(format!("this address takes WebSockets only: {error}")))?;
    let wanted = wanted(&query, terminal, &who.actor.0)?;
    if wanted.mode != "observe" {
        who.require(Scope::Write)?;
    }
    let link = app.engine().attach(&who, id, wanted, query.wake.unwrap_or(true), query.start.unwrap_or(false)).await?;
    let (writes, stop) = (may_write(&who), app.stop().clone());
    // One input message and its head; a viewer has nothing longer to say.
    let upgrade = upgrade.max_message_size(MAX_INPUT + 64).max_frame_size(MAX_INPUT + 64).write_buffer_size(64 * 1024);
    Ok(upgrade.on_upgrade(move |socket| carry(socket, link, writes, stop)))
}

fn wanted(query: &AttachQuery, id: model::TerminalId, actor: &str) -> Result<Attach, ApiError> {
    let client = match &query.client {
        Some(text) => {
            text.parse::<Uuid>().map_err(|_| ApiError::bad_field("client", "'client' is a UUID that the viewer makes up"))?
        }
        None => Uuid::new_v4(),
    };
    for (field, side) in [("cols", query.cols), ("rows", query.rows)] {
        if side.is_some_and(|side| side == 0 || side > MAX_SIDE) {
            return Err(ApiError::bad_field(field, format!("{field} is from 1 to {MAX_SIDE}")));
        }
    }
    if query.cols.is_some() != query.rows.is_some() {
        return Err(ApiError::bad_field("rows", "a size has both 'cols' and 'rows'"));
    }
    let from = match query.from.as_deref() {
        None | Some("screen") => None,
        Some(text) => Some(Offset(text.parse().map_err(|_| ApiError::bad_field("from", "'from' is 'screen' or an offset"))?)),
    };
    let mode = query.mode.as_deref().unwrap_or("write");
    if !matches!(mode, "write" | "observe" | "take") {
        return Err(ApiError::bad_field("mode", "'mode' is one of: write, observe, take"));
    }
    Ok(Attach {
        id,
        client: client.to_string(),
        cols: query.cols,
        rows: query.rows,
        from,
        mode: mode.to_owned(),
        actor: Some(actor.to_owned()),
    })
}

/// Why a link ends.
struct Close {
    code: u16,
    reason: &'static str,
}

async fn carry(socket: WebSocket, link: Attachment, may_write: bool, stop: CancellationToken) {
    let (sink, source) = socket.split();
    let (own, own_answers) = mpsc::channel(OWN_ANSWERS);
    let Attachment { input, output } = link;
    let mut outward = Outward { sink, output, own_answers };
    let close = tokio::select! {
        close = inward(source, input, own, may_write) => close,
        close = outward.run() => close,
        () = stop.cancelled() => Some(Close { code: AGAIN, reason: "the server ends; attach again" }),
    };
    if let Some(Close { code, reason }) = close {
        let frame = CloseFrame { code, reason: reason.into() };
        // A viewer that doesn't read any more must not keep the link.
        let _ = tokio::time::timeout(Duration::from_secs(2), outward.sink.send(Message::Close(Some(frame)))).await;
    }
}

/// Viewer to terminal. `None`: the viewer has closed or is gone.
async fn inward(
    mut source: SplitStream<WebSocket>,
    input: mpsc::Sender<Bytes>,
    own: mpsc::Sender<Message>,
    may_write: bool,
) -> Option<Close> {
    let mut heard = Instant::now();
    loop {
        let message = match tokio::time::timeout(PING_EVERY, source.next()).await {
            Ok(message) => message?.ok()?,
            Err(_) if heard.elapsed() >= GONE_AFTER => return None,
            Err(_) => {
                own.send(Message::Ping(Bytes::new())).await.ok()?;
                continue;
            }
        };
        heard = Instant::now();
        let bytes = match message {
            Message::Binary(bytes) => bytes,
            Message::Text(_) => return Some(Close { code: UNSUPPORTED, reason: "a terminal's messages are binary" }),
            Message::Close(_) => return None,
            Message::Ping(_) | Message::Pong(_) => continue,
        };
        match ClientFrame::decode(bytes.clone()) {
            Err(_) => return Some(Close { code: PROTOCOL, reason: "not a message of the terminal protocol" }),
            Ok(ClientFrame::Ping) => own.send(Message::Binary(ServerFrame::Pong.encode())).await.ok()?,
            Ok(frame) if !may_write => {
                if let ClientFrame::Input { seq, .. } = frame {
                    own.send(refused(seq)).await.ok()?;
                }
            }
            Ok(_) => {
                if input.send(bytes).await.is_err() {
                    return Some(Close { code: AGAIN, reason: "the terminal's link has ended; attach again" });
                }
            }
        }
    }
}

fn refused(seq: InputSeq) -> Message {
    let reason = "the token may only read".to_owned();
    Message::Binary(ServerFrame::InputRefused { seq, reason }.encode())
}

/// Terminal to viewer.
struct Outward {
    sink: SplitSink<WebSocket, Message>,
    output: mpsc::Receiver<Bytes>,
    own_answers: mpsc::Receiver<Message>,
}

impl Outward {
    async fn run(&mut self) -> Option<Close> {
        let mut ended = false;
        loop {
            let message = tokio::select! {
                // A viewer that drowns in output still gets its pongs.
                biased;
                Some(own) = self.own_answers.recv() => own,
                bytes = self.output.recv() => match bytes {
                    Some(bytes) => {
                        ended = bytes.first() == Some(&b'X');
                        Message::Binary(bytes)
                    }
                    None if ended => return Some(Close { code: NORMAL, reason: "the terminal has ended" }),
                    None => return Some(Close { code: AGAIN, reason: "the terminal's link has ended; attach again" }),
                },
            };
            self.sink.feed(message).await.ok()?;
            // What is there already goes out in one write.
            while let Ok(bytes) = self.output.try_recv() {
                ended = bytes.first() == Some(&b'X');
                self.sink.feed(Message::Binary(bytes)).await.ok()?;
            }
            self.sink.flush().await.ok()?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::TerminalId;

    fn query(text: &str) -> Result<Attach, ApiError> {
        let uri = format!("/x?{text}").parse().unwrap();
        wanted(&crate::extract::parse_query(&uri)?, TerminalId::new(), "token:t")
    }

    #[test]
    fn a_viewer_says_who_it_is_and_where_it_was() {
        let attach = query("client=0198f0c2-a7b0-7cc3-8d6e-5f4a3b2c1d00&cols=80&rows=24&from=17&mode=take").unwrap();
        assert_eq!((attach.cols, attach.rows, attach.from, attach.mode.as_str()), (Some(80), Some(24), Some(Offset(17)), "take"));
        let plain = query("").unwrap();
        assert_eq!((plain.from, plain.mode.as_str()), (None, "write"));
        assert_eq!(query("from=screen").unwrap().from, None);
        for bad in ["client=me", "cols=0&rows=1", "cols=80", "from=-1", "mode=own", "cols=9999&rows=1", "size=3"] {
            assert_eq!(query(bad).err().unwrap().0.status, 400, "{bad}");
        }
    }
}
