//! One WebSocket to a terminal, from its opening to its loss.

use crate::client::{
    failure::{Failure, Result},
    http::{Call, Client},
    websocket::{self, broken},
};
use api_types::{
    ProblemCode, Session,
    terminal::{ClientFrame, ServerFrame},
};
use futures_util::{SinkExt, StreamExt};
use model::{SessionId, State};
use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};
use tokio::sync::mpsc;
use tokio_tungstenite::tungstenite::Message;

/// How often the other side is asked whether it is there, and after how much silence it is taken to be gone.
const PING_EVERY: Duration = Duration::from_secs(5);
const SILENCE: Duration = Duration::from_secs(12);
const HANDSHAKE: Duration = Duration::from_secs(10);

/// What a link tells, with the number it was opened under: a late word of an older link means nothing.
#[derive(Debug)]
pub struct LinkEvent {
    pub number: u64,
    pub news: News,
}

/// What happened on a link.
#[derive(Debug)]
pub enum News {
    Up,
    Frame(ServerFrame),
    /// There is no link because the session rests: hibernated or paused.
    Resting(State),
    Down(Failure),
}

/// Opens a link at `path` and passes messages on until it is lost or `outgoing` closes. The last word is `Down`, unless
/// nobody listens any more.
pub async fn run(
    client: Client,
    session: SessionId,
    path: String,
    number: u64,
    mut outgoing: mpsc::UnboundedReceiver<ClientFrame>,
    events: mpsc::Sender<LinkEvent>,
) {
    let failure = match pass_on(&client, &path, number, &mut outgoing, &events).await {
        Ok(()) => return,
        Err(failure) => failure,
    };
    let news = match resting(&client, session, &failure).await {
        Some(state) => News::Resting(state),
        None => News::Down(failure),
    };
    // Nobody listens: then nobody misses it.
    let _ = events.send(LinkEvent { number, news }).await;
}

/// The state that keeps a session from being joined, where that is rest and not an end.
async fn resting(client: &Client, session: SessionId, failure: &Failure) -> Option<State> {
    match failure.problem.as_ref()?.code {
        ProblemCode::Paused => Some(State::Paused),
        ProblemCode::NotRunning => {
            let session: Session = client.json(Call::get(format!("/v1/sessions/{session}")).once()).await.ok()?;
            Some(session.state).filter(|state| *state == State::Hibernated)
        }
        _ => None,
    }
}

async fn pass_on(
    client: &Client,
    path: &str,
    number: u64,
    outgoing: &mut mpsc::UnboundedReceiver<ClientFrame>,
    events: &mpsc::Sender<LinkEvent>,
) -> Result<()> {
    let socket = websocket::open(client, path, HANDSHAKE).await?;
    let tell = |news| events.send(LinkEvent { number, news });
    if tell(News::Up).await.is_err() {
        return Ok(());
    }
    let (mut sink, mut stream) = socket.split();
    // When the other side was last heard, in milliseconds since the link was opened.
    let opened = Instant::now();
    let heard = AtomicU64::new(0);
    let hear = || heard.store(since(opened), Ordering::Relaxed);

    let reading = async {
        while let Some(message) = stream.next().await {
            hear();
            let frame = match message.map_err(broken)? {
                Message::Binary(bytes) => ServerFrame::decode(bytes)
                    .map_err(|e| Failure::failed(format!("the server said something that isn't a terminal's: {e}")))?,
                Message::Close(_) => break,
                _ => continue,
            };
            if tell(News::Frame(frame)).await.is_err() {
                return Ok(());
            }
            // Waiting for our own screen is no silence of the server's.
            hear();
        }
        Err(Failure::unreachable("the server closed the link"))
    };
    let writing = async {
        let mut ticks = tokio::time::interval(PING_EVERY);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let frame = tokio::select! {
                frame = outgoing.recv() => match frame {
                    Some(frame) => frame,
                    None => {
                        // A farewell that isn't heard is no loss.
                        let _ = tokio::time::timeout(Duration::from_secs(1), sink.close()).await;
                        return Ok(());
                    }
                },
                _ = ticks.tick() => {
                    if since(opened).saturating_sub(heard.load(Ordering::Relaxed)) > SILENCE.as_millis() as u64 {
                        return Err(Failure::unreachable("the server has been silent for too long"));
                    }
                    ClientFrame::Ping
                }
            };
            let sending = tokio::time::timeout(SILENCE, sink.send(Message::Binary(frame.encode())));
            sending.await.map_err(|_| Failure::unreachable("the server takes nothing any more"))?.map_err(broken)?;
        }
    };
    tokio::select! { done = reading => done, done = writing => done }
}

fn since(begun: Instant) -> u64 {
    u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX)
}
