//! `port`: what listens in a session, and a way to it from this machine.

use super::{
    Context,
    backoff::Backoff,
    failure::{Failure, Result},
    http::{Call, Client},
    select,
    text::{Table, local, safe},
    websocket::{self, Socket},
};
use api_types::{LinkRequest, Port, PreviewLink};
use bytes::BytesMut;
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use std::{
    net::{Ipv4Addr, SocketAddr},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_tungstenite::tungstenite::Message;

/// How long a session may take to be woken for a connection.
const OPENING: Duration = Duration::from_secs(120);
/// How long a connection waits for a server that is being restarted.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of one message.
const PIECE: usize = 64 * 1024;
/// What ends one direction while the other goes on.
const END: &str = "end";

/// `dormouse port SESSION`: lists what listens.
///
/// # Errors
/// What the server refuses.
pub async fn list(ctx: &Context, word: &str) -> Result<()> {
    let session = select::session(&ctx.client, word).await?;
    let values: Vec<Value> = ctx.client.list(&format!("/v1/sessions/{}/ports", session.id)).await?;
    if ctx.json {
        return ctx.print_json(&json!({ "items": values }));
    }
    let mut table = Table::new(&["PORT", "ADDRESS", "PID", "PROGRAM"]);
    let dash = || "-".to_owned();
    for value in &values {
        let port: Port = Context::read(value)?;
        table.row([
            port.port.to_string(),
            port.address.map_or_else(dash, |address| safe(&address)),
            port.pid.map_or_else(dash, |pid| pid.to_string()),
            port.program.map_or_else(dash, |program| safe(&program)),
        ]);
    }
    ctx.print(&table.render())
}

/// `dormouse port SESSION PORT --link`: a signed link to its preview.
///
/// # Errors
/// What the server refuses.
pub async fn link(ctx: &Context, word: &str, port: u16, lasts: Option<Duration>) -> Result<()> {
    let session = select::session(&ctx.client, word).await?;
    let path = format!("/v1/sessions/{}/links/{port}", session.id);
    let request = LinkRequest { seconds: lasts.map(|lasts| lasts.as_secs()) };
    let value: Value = ctx.client.json(Call::post(path, &request)).await?;
    if ctx.json {
        return ctx.print_json(&value);
    }
    let link: PreviewLink = Context::read(&value)?;
    ctx.note(&format!("whoever has the link gets in, until {}", local(link.expires_at)));
    ctx.print(&format!("{}\n", link.url))
}

/// `dormouse port SESSION PORT [LOCAL]`: listens on this machine until it is interrupted. Each connection is one to the port
/// in the session, which is woken for it.
///
/// # Errors
/// A port here that can't be had; what the server refuses at once.
pub async fn forward(ctx: &Context, word: &str, port: u16, here: Option<u16>) -> Result<()> {
    let session = select::session(&ctx.client, word).await?;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, here.unwrap_or(port)));
    let listener = TcpListener::bind(address).await.map_err(|e| {
        let next = format!("'dormouse port {word} {port} 0' takes a free one");
        Failure::failed(format!("can't listen on {address}: {e} — {next}"))
    })?;
    let address = listener.local_addr().map_err(|e| Failure::failed(format!("the listener has no address: {e}")))?;
    if ctx.json {
        ctx.print_json(&json!({ "session_id": session.id, "port": port, "listens_on": address.to_string() }))?;
    } else {
        ctx.print(&format!("{address}\n"))?;
    }
    ctx.note(&format!("connections to {address} lead to port {port} of session {}; ctrl-c ends it", session.id));
    let path = format!("/v1/sessions/{}/tcp/{port}", session.id);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = tokio::signal::ctrl_c() => return Ok(()),
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                ctx.note(&format!("a connection can't be taken: {error}"));
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            }
        };
        let (ctx, path) = (ctx.clone(), path.clone());
        tokio::spawn(async move {
            if let Err(failure) = connect(&ctx.client, stream, &path).await {
                ctx.note(&failure.message);
            }
        });
    }
}

/// Carries one connection.
async fn connect(client: &Client, stream: TcpStream, path: &str) -> Result<()> {
    // Without it a small answer waits for the acknowledgement of the one before.
    let _ = stream.set_nodelay(true);
    let socket = match open(client, path).await {
        Ok(socket) => socket,
        Err(failure) => {
            cut_off(&stream);
            return Err(failure);
        }
    };
    carry(stream, socket).await
}

/// A server that is being restarted is waited for.
async fn open(client: &Client, path: &str) -> Result<Socket> {
    let begun = Instant::now();
    let mut backoff = Backoff::default();
    loop {
        match websocket::open(client, path, OPENING).await {
            Err(failure) if failure.is_passing() && begun.elapsed() < PATIENCE => {
                tokio::time::sleep(backoff.next_pause()).await;
            }
            done => return done,
        }
    }
}

async fn carry(stream: TcpStream, socket: Socket) -> Result<()> {
    let (mut sink, mut source) = socket.split();
    let (mut reader, mut writer) = stream.into_split();
    let done = {
        let outward = async {
            let mut buffer = BytesMut::with_capacity(PIECE);
            loop {
                buffer.reserve(PIECE);
                let message = match reader.read_buf(&mut buffer).await {
                    Ok(0) => Message::Text(END.into()),
                    Ok(_) => Message::Binary(buffer.split().freeze()),
                    // The client here has gone: that is no failure of the way.
                    Err(_) => return Ok(Gone),
                };
                let ends = message.is_text();
                sink.send(message).await.map_err(websocket::broken)?;
                if ends {
                    return Ok(Said);
                }
            }
        };
        let inward = async {
            while let Some(message) = source.next().await {
                match message.map_err(websocket::broken)? {
                    Message::Binary(bytes) => match writer.write_all(&bytes).await {
                        Ok(()) => {}
                        Err(_) => return Ok(Gone),
                    },
                    Message::Text(text) if text.as_str() == END => {
                        // It may be gone already.
                        let _ = writer.shutdown().await;
                        return Ok(Said);
                    }
                    Message::Close(_) => break,
                    _ => {}
                }
            }
            Err(Failure::unreachable("a connection was cut off by the session or the server"))
        };
        both(outward, inward).await
    };
    // A farewell that isn't heard is no loss.
    let _ = tokio::time::timeout(Duration::from_secs(1), sink.close()).await;
    if done.is_err()
        && let Ok(stream) = reader.reunite(writer)
    {
        cut_off(&stream);
    }
    done
}

/// How one direction ended well.
enum Ended {
    /// Everything was said.
    Said,
    /// The client here has gone, so that the other direction is of no use either.
    Gone,
}

use Ended::{Gone, Said};

/// Waits for both directions, or for the first that makes the other useless.
async fn both(outward: impl Future<Output = Result<Ended>>, inward: impl Future<Output = Result<Ended>>) -> Result<()> {
    tokio::pin!(outward, inward);
    tokio::select! {
        ended = &mut outward => match ended? {
            Said => inward.await.map(drop),
            Gone => Ok(()),
        },
        ended = &mut inward => match ended? {
            Said => outward.await.map(drop),
            Gone => Ok(()),
        },
    }
}

/// Ends a connection so that the other side doesn't take what it has for the whole: by a reset.
fn cut_off(stream: &TcpStream) {
    let _ = rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO));
}
