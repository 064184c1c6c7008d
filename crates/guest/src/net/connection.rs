//! One connection between a socket inside and the hub.

use crate::{
    guest::Guest,
    hub::Next,
    ready::{For, Watched},
};
use rustix::net::sockopt;
use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpStream},
    time::Duration,
};
use wire::StreamId;

/// Moves bytes both ways until both have ended or one breaks. The end of one is told to the other and nothing more; what
/// breaks is reset on the other side, so that nobody takes a part for the whole.
pub async fn run(guest: &Guest, stream: StreamId, socket: Watched<TcpStream>) {
    let (up, down) = (upward(guest, stream, &socket), downward(guest, stream, &socket));
    tokio::pin!(up, down);
    let whole = tokio::select! {
        whole = &mut up => whole && down.await,
        whole = &mut down => whole && up.await,
    };
    if !whole {
        guest.hub.borrow_mut().reset(stream, "the connection was reset");
        refuse(&socket);
    }
}

/// Lets the program see a reset when the socket is closed.
pub fn refuse(socket: &Watched<TcpStream>) {
    // Where that can't be set the program sees an end, which is the next best.
    let _ = sockopt::set_socket_linger(socket.get_ref(), Some(Duration::ZERO));
}

/// From the program to the supervisor. False: broken off.
async fn upward(guest: &Guest, stream: StreamId, socket: &Watched<TcpStream>) -> bool {
    loop {
        let Some((room, bell)) = guest.hub.borrow().room(stream) else { return false };
        if room == 0 {
            bell.notified().await;
            continue;
        }
        let read = {
            let mut buffer = guest.net.buffer.borrow_mut();
            let room = room.min(buffer.len());
            let read = socket.try_io(For::Reading, |mut socket| socket.read(&mut buffer[..room]));
            if let Ok(count @ 1..) = read {
                guest.hub.borrow_mut().take_in(stream, &buffer[..count]);
            }
            read
        };
        match read {
            Ok(0) => {
                guest.hub.borrow_mut().finish(stream);
                return true;
            }
            Ok(_) => tokio::task::coop::consume_budget().await,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                // The bell rings when the stream is gone, too.
                tokio::select! {
                    () = socket.ready(For::Reading) => {}
                    () = bell.notified() => {}
                }
            }
            Err(_) => return false,
        }
    }
}

/// From the supervisor to the program. False: broken off.
async fn downward(guest: &Guest, stream: StreamId, socket: &Watched<TcpStream>) -> bool {
    let Some(news) = guest.hub.borrow().news(stream) else { return false };
    loop {
        let next = guest.hub.borrow_mut().next(stream);
        match next {
            Next::Bytes(bytes) => {
                let mut rest = &bytes[..];
                while !rest.is_empty() {
                    match socket.try_io(For::Writing, |mut socket| socket.write(rest)) {
                        Ok(count) => rest = &rest[count..],
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                            tokio::select! {
                                () = socket.ready(For::Writing) => {}
                                () = news.notified() => if is_gone(guest, stream) {
                                    return false;
                                },
                            }
                        }
                        Err(_) => return false,
                    }
                }
                guest.hub.borrow_mut().consumed(stream, bytes.len());
                tokio::task::coop::consume_budget().await;
            }
            Next::End => {
                guest.hub.borrow_mut().close_receiving(stream);
                // One that has left already is noticed on the way up.
                let _ = socket.get_ref().shutdown(Shutdown::Write);
                return true;
            }
            Next::Gone => return false,
            Next::Nothing => news.notified().await,
        }
    }
}

fn is_gone(guest: &Guest, stream: StreamId) -> bool {
    guest.hub.borrow().news(stream).is_none()
}
