//! Moving bytes between programs and streams, each pipe by a task of its own.
//!
//! Output is read only while its stream's window has room: a supervisor that is slow, asleep or gone blocks the
//! writing program, and no byte is dropped. Input is acknowledged when it is in the program's pipe.

use crate::{
    guest::Guest,
    hub::Next,
    ready::{For, Watched},
    sys,
};
use std::{cell::Cell, io, os::fd::AsRawFd, rc::Rc, time::Duration};
use tokio::sync::Notify;
use wire::{StreamId, guest::StreamAt};

/// How long a terminal's last output may take from its slave to its master side (Linux moves it in the background).
const TERMINAL_REST: Duration = Duration::from_millis(20);

/// Tells the pumps of one program that its process has ended.
#[derive(Debug, Default)]
pub struct Drain {
    asked: Cell<bool>,
    bell: Notify,
}

impl Drain {
    pub fn ask(&self) {
        self.asked.set(true);
        self.bell.notify_waiters();
    }

    pub fn is_asked(&self) -> bool {
        self.asked.get()
    }
}

/// What an output pump works on.
pub struct Output {
    pub fd: Rc<Watched>,
    pub stream: StreamId,
    pub run: u64,
    pub drain: Rc<Drain>,
    pub is_terminal: bool,
    /// False for services, whose stream goes on with their next start.
    pub finish: bool,
}

/// Reads a program's output into its stream until end of file; reports to the works once what was there when the
/// process ended has been taken in.
pub async fn output(guest: Rc<Guest>, out: Output) {
    let mut buffer = vec![0u8; 64 * 1024];
    let mut reported = false;
    loop {
        let room = guest.hub.borrow().room(out.stream);
        let room = match room {
            Some((0, bell)) => {
                bell.notified().await;
                continue;
            }
            Some((room, _)) => room.min(buffer.len()),
            // Nobody wants it any more: read on, so that the program isn't blocked.
            None => buffer.len(),
        };
        let draining = out.drain.is_asked() && !reported;
        let result = if draining {
            // Not by readiness: what the process wrote last may not have been announced yet.
            sys::read(out.fd.get_ref().as_raw_fd(), &mut buffer[..room])
        } else {
            out.fd.try_io(For::Reading, |fd| sys::read(fd.as_raw_fd(), &mut buffer[..room]))
        };
        match result {
            Ok(0) => break,
            Ok(count) => guest.hub.borrow_mut().take_in(out.stream, &buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if draining && out.is_terminal {
                    clear_stale(&out.fd);
                    if tokio::time::timeout(TERMINAL_REST, readable(&out.fd)).await.is_err() {
                        break;
                    }
                } else if draining {
                    reported = true;
                    report(&guest, &out);
                } else if reported {
                    readable(&out.fd).await;
                } else {
                    tokio::select! {
                        () = readable(&out.fd) => {}
                        () = out.drain.bell.notified() => {}
                    }
                }
            }
            // A terminal whose other side is closed says EIO.
            Err(_) => break,
        }
        // A program that never stops writing must not keep the others from their turn.
        tokio::task::coop::consume_budget().await;
    }
    // The end is noted first: a finished stream may be forgotten at any time.
    if !reported {
        report(&guest, &out);
    }
    if out.finish {
        guest.hub.borrow_mut().finish(out.stream);
    }
}

fn report(guest: &Rc<Guest>, out: &Output) {
    let end = guest.hub.borrow().end_of(out.stream);
    guest.drained(out.run, end.map(|offset| StreamAt { stream: out.stream, offset }));
}

/// Forgets a readiness that no longer holds.
fn clear_stale(fd: &Watched) {
    let mut nothing = [0u8; 0];
    let _ = fd.try_io(For::Reading, |fd| match sys::poll_now(fd.as_raw_fd(), libc::POLLIN) {
        true => sys::read(fd.as_raw_fd(), &mut nothing),
        false => Err(io::ErrorKind::WouldBlock.into()),
    });
}

async fn readable(fd: &Watched) {
    fd.ready(For::Reading).await;
}

async fn writable(fd: &Watched) {
    fd.ready(For::Writing).await;
}

/// Writes a received stream to a program's pipe or terminal.
pub async fn input(guest: Rc<Guest>, fd: Rc<Watched>, stream: StreamId, drain: Rc<Drain>) {
    let Some(news) = guest.hub.borrow().news(stream) else { return };
    loop {
        let next = guest.hub.borrow_mut().next(stream);
        match next {
            Next::Bytes(bytes) => {
                if !write_all(&fd, &bytes, &drain).await {
                    guest.hub.borrow_mut().reset(stream, "the program no longer reads its input");
                    return;
                }
                guest.hub.borrow_mut().consumed(stream, bytes.len());
            }
            Next::End => {
                guest.hub.borrow_mut().close_receiving(stream);
                return;
            }
            Next::Gone => return,
            Next::Nothing if drain.is_asked() => {
                guest.hub.borrow_mut().reset(stream, "the program has ended");
                return;
            }
            Next::Nothing => tokio::select! {
                () = news.notified() => {}
                () = drain.bell.notified() => {}
            },
        }
    }
}

async fn write_all(fd: &Watched, mut bytes: &[u8], drain: &Drain) -> bool {
    while !bytes.is_empty() {
        if drain.is_asked() {
            return false;
        }
        match fd.try_io(For::Writing, |fd| sys::write(fd.as_raw_fd(), bytes)) {
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => tokio::select! {
                () = writable(fd) => {}
                () = drain.bell.notified() => {}
            },
            Err(_) => return false,
        }
    }
    true
}
