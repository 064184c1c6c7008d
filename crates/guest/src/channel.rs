//! The channel to the supervisor: one thread that reads, one task that writes.
//!
//! The channel's descriptors are pipes of the host, and a restore binds them to new ones. A read
//! that blocks is begun again by the sandbox's kernel after a restore; a registration with epoll
//! isn't. So reading has a thread of its own. Writing is tried at once on the main thread (that
//! saves two thread switches for each small answer) and only the rest waits, on a helper thread.

use crate::{guest::Guest, sys};
use bytes::{Buf, BytesMut};
use std::{rc::Rc, time::Duration};
use tokio::sync::mpsc;
use wire::{Decoder, Frame, frame::PREAMBLE, frame::parse_control, guest::ToGuest};

const IN: i32 = 0;
const OUT: i32 = 1;

/// What the reader hands on.
#[derive(Debug)]
pub enum Incoming {
    Message(Box<ToGuest>),
    /// A request that this build can't read.
    UnknownRequest {
        id: u64,
        why: String,
    },
    Frame(Frame),
}

/// Starts the thread that reads the channel, for as long as the process lives.
pub fn start_reader() -> std::io::Result<mpsc::Receiver<Vec<Incoming>>> {
    let (to, from) = mpsc::channel(8);
    std::thread::Builder::new().name("channel".into()).stack_size(256 * 1024).spawn(move || read_forever(&to))?;
    Ok(from)
}

fn read_forever(to: &mpsc::Sender<Vec<Incoming>>) {
    let mut decoder = Decoder::new();
    let mut buffer = vec![0u8; 128 * 1024];
    let mut pause = Duration::from_millis(20);
    loop {
        let count = match sys::read(IN, &mut buffer) {
            Ok(count) if count > 0 => count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                // Somebody made the shared descriptor non-blocking.
                sys::wait_readable(IN);
                continue;
            }
            // The end, or an error: a restore or a new supervisor may bind the channel anew.
            _ => {
                decoder.reset();
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(200));
                continue;
            }
        };
        pause = Duration::from_millis(20);
        let bytes = &buffer[..count];
        if begins_connection(bytes) {
            // The image was taken in the middle of a frame whose rest will never come.
            decoder.reset();
        }
        decoder.push(bytes);
        let batch = decode(&mut decoder);
        if !batch.is_empty() && to.blocking_send(batch).is_err() {
            return;
        }
    }
}

/// True where the bytes can only be the first of a new connection: preamble and Hello.
fn begins_connection(bytes: &[u8]) -> bool {
    const HELLO: &[u8] = br#"{"t":"hello""#;
    let frame = PREAMBLE.len();
    let json = frame + 9;
    bytes.len() >= json + HELLO.len() && bytes.starts_with(&PREAMBLE) && bytes[frame + 4] == 0 && bytes[json..].starts_with(HELLO)
}

fn decode(decoder: &mut Decoder) -> Vec<Incoming> {
    let mut batch = Vec::new();
    loop {
        match decoder.next_frame() {
            Ok(Some(Frame::Control(json))) => match parse_control::<ToGuest>(&json) {
                Ok(message) => {
                    if message == ToGuest::Quiesce {
                        decoder.expect_preamble();
                    }
                    batch.push(Incoming::Message(Box::new(message)));
                }
                Err(error) => match request_id(&json) {
                    Some(id) => batch.push(Incoming::UnknownRequest { id, why: error.to_string() }),
                    None => log!("a message that this guest doesn't know: {error}"),
                },
            },
            Ok(Some(frame)) => batch.push(Incoming::Frame(frame)),
            Ok(None) => return batch,
            Err(error) => {
                // What has come since may already be the next connection's beginning.
                log!("the channel is out of step: {error}");
                decoder.expect_preamble();
            }
        }
    }
}

fn request_id(json: &[u8]) -> Option<u64> {
    let value: serde_json::Value = serde_json::from_slice(json).ok()?;
    (value["t"] == "request").then(|| value["id"].as_u64()).flatten()
}

/// Writes what the hub has to say, for as long as the process lives.
pub async fn write_forever(guest: Rc<Guest>) {
    let bell = guest.hub.borrow().writer_bell();
    if let Err(error) = sys::set_nonblocking(OUT) {
        log!("the channel stays blocking: {error}");
    }
    let mut out = BytesMut::with_capacity(512 * 1024);
    loop {
        let epoch = guest.hub.borrow().epoch();
        // A Hello that has come meanwhile is of the next connection, which this one's end says nothing about.
        let broken = || {
            let mut hub = guest.hub.borrow_mut();
            if hub.epoch() == epoch {
                hub.broken();
            }
        };
        guest.hub.borrow_mut().fill(&mut out);
        if out.is_empty() {
            bell.notified().await;
            continue;
        }
        while !out.is_empty() {
            match sys::write(OUT, &out) {
                Ok(count) => out.advance(count),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    let rest = std::mem::take(&mut out);
                    match tokio::task::spawn_blocking(move || write_all(rest)).await {
                        Ok(Ok(empty)) => out = empty,
                        _ => broken(),
                    }
                }
                Err(_) => {
                    out.clear();
                    broken();
                }
            }
        }
    }
}

/// Writes all of it, waiting as long as it takes, and gives the empty buffer back.
fn write_all(mut rest: BytesMut) -> std::io::Result<BytesMut> {
    while !rest.is_empty() {
        match sys::write(OUT, &rest) {
            Ok(count) => rest.advance(count),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => sys::wait_writable(OUT),
            Err(error) => return Err(error),
        }
    }
    Ok(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_request_is_told_apart_from_noise() {
        let mut decoder = Decoder::new();
        let mut bytes = BytesMut::from(&PREAMBLE[..]);
        let json = |text: &str| Frame::Control(text.to_owned().into());
        json(r#"{"t":"request","id":9,"request":{"op":"levitate"}}"#).encode(&mut bytes);
        json(r#"{"t":"sing"}"#).encode(&mut bytes);
        json(r#"{"t":"request","id":10,"request":{"op":"ping"}}"#).encode(&mut bytes);
        decoder.push(&bytes);
        let batch = decode(&mut decoder);
        assert!(matches!(&batch[..], [Incoming::UnknownRequest { id: 9, .. }, Incoming::Message(_)]), "{batch:?}");
    }

    #[test]
    fn only_a_preamble_with_a_hello_begins_a_connection() {
        let mut bytes = BytesMut::from(&PREAMBLE[..]);
        assert!(!begins_connection(&bytes));
        Frame::Control(r#"{"t":"hello","protocol":1}"#.to_owned().into()).encode(&mut bytes);
        assert!(begins_connection(&bytes));
    }
}
