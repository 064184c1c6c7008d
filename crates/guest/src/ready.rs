//! Which descriptors are ready, from an epoll instance of our own.
//!
//! The async runtime has one, too, and isn't used for what comes and goes: it gives the kernel the address of each
//! registration, to be handed back with its events. [M] After a restore gVisor 20240729 reports a hang-up for
//! registrations that were removed, correctly, before the capture; behind their addresses lies other memory by then, and
//! the guest, and with it the sandbox, died of it. Here each registration has a number that is never used again, and an
//! event of an unknown number is nobody's.

use rustix::event::epoll;
use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, Waker},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf, unix::AsyncFd};

/// Events taken from the kernel at once.
const BATCH: usize = 64;

/// What is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum For {
    Reading,
    Writing,
}

impl For {
    /// What of the kernel's events ends the wait: broken counts as ready, the call itself then says how.
    fn mask(self) -> epoll::EventFlags {
        let broken = epoll::EventFlags::HUP | epoll::EventFlags::ERR;
        broken
            | match self {
                For::Reading => epoll::EventFlags::IN | epoll::EventFlags::PRI | epoll::EventFlags::RDHUP,
                For::Writing => epoll::EventFlags::OUT,
            }
    }
}

/// What is known about one descriptor.
struct Entry {
    events: Cell<epoll::EventFlags>,
    wakers: RefCell<Vec<Waker>>,
}

struct Reactor {
    epoll: OwnedFd,
    entries: RefCell<HashMap<u64, Rc<Entry>>>,
    next: Cell<u64>,
}

thread_local! {
    static REACTOR: RefCell<Option<Rc<Reactor>>> = const { RefCell::new(None) };
}

impl Reactor {
    /// The thread's own; its task is started with it.
    fn ensure() -> io::Result<Rc<Reactor>> {
        REACTOR.with_borrow_mut(|slot| {
            if let Some(reactor) = slot {
                return Ok(reactor.clone());
            }
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            // The one registration with the runtime, never removed.
            let news = crate::sys::watch(epoll.try_clone()?)?;
            let reactor = Rc::new(Reactor { epoll, entries: RefCell::default(), next: Cell::new(1) });
            tokio::task::spawn_local(run(reactor.clone(), news));
            Ok(slot.insert(reactor).clone())
        })
    }

    /// Hands out what has happened; false when nothing more has.
    fn turn(&self) -> bool {
        let mut space = [MaybeUninit::<epoll::Event>::uninit(); BATCH];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok((events, _)) = epoll::wait(&self.epoll, &mut space, Some(&now)) else { return false };
        for event in events.iter() {
            let entry = self.entries.borrow().get(&event.data.u64()).cloned();
            let Some(entry) = entry else { continue };
            entry.events.set(entry.events.get() | event.flags);
            entry.wakers.take().into_iter().for_each(Waker::wake);
        }
        events.len() == BATCH
    }
}

async fn run(reactor: Rc<Reactor>, news: AsyncFd<OwnedFd>) {
    while let Ok(mut guard) = news.readable().await {
        if reactor.turn() {
            // The others have their turn before the next batch.
            guard.retain_ready();
            tokio::task::yield_now().await;
        } else {
            guard.clear_ready();
        }
    }
}

/// A descriptor whose readiness is watched.
pub struct Watched<T: AsFd = OwnedFd> {
    of: T,
    id: u64,
    entry: Rc<Entry>,
    reactor: Rc<Reactor>,
}

impl<T: AsFd> Watched<T> {
    /// Watches a descriptor that doesn't block.
    ///
    /// # Errors
    /// What the kernel says: regular files can't be watched.
    pub fn new(of: T) -> io::Result<Self> {
        let reactor = Reactor::ensure()?;
        let id = reactor.next.replace(reactor.next.get() + 1);
        let entry = Rc::new(Entry { events: Cell::new(epoll::EventFlags::empty()), wakers: RefCell::default() });
        reactor.entries.borrow_mut().insert(id, entry.clone());
        let watched = Self { of, id, entry, reactor };
        let flags = For::Reading.mask() | For::Writing.mask() | epoll::EventFlags::ET;
        epoll::add(&watched.reactor.epoll, &watched.of, epoll::EventData::new_u64(id), flags)?;
        Ok(watched)
    }

    pub fn get_ref(&self) -> &T {
        &self.of
    }

    fn poll_ready(&self, cx: &Context<'_>, what: For) -> Poll<()> {
        if self.entry.events.get().intersects(what.mask()) {
            return Poll::Ready(());
        }
        let mut wakers = self.entry.wakers.borrow_mut();
        if !wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
            wakers.push(cx.waker().clone());
        }
        Poll::Pending
    }

    /// Waits until a call may succeed. Ready stays ready until a call has found out otherwise.
    pub async fn ready(&self, what: For) {
        std::future::poll_fn(|cx| self.poll_ready(cx, what)).await;
    }

    /// Makes a call where it may succeed.
    ///
    /// # Errors
    /// Its own; `WouldBlock` where it is known to have to wait.
    pub fn try_io<R>(&self, what: For, call: impl FnOnce(&T) -> io::Result<R>) -> io::Result<R> {
        if !self.entry.events.get().intersects(what.mask()) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let result = call(&self.of);
        if result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
            // An event that comes from here on is handed out later: everything of ours is on one thread.
            self.entry.events.set(self.entry.events.get().difference(what.mask()));
        }
        result
    }

    fn poll_io<R>(&self, cx: &Context<'_>, what: For, mut call: impl FnMut(&T) -> io::Result<R>) -> Poll<io::Result<R>> {
        loop {
            std::task::ready!(self.poll_ready(cx, what));
            match self.try_io(what, &mut call) {
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                result => return Poll::Ready(result),
            }
        }
    }
}

impl<T: AsFd> Drop for Watched<T> {
    fn drop(&mut self) {
        let _ = epoll::delete(&self.reactor.epoll, &self.of);
        self.reactor.entries.borrow_mut().remove(&self.id);
    }
}

/// A connection that several hold, each reading or writing.
pub struct Shared<T: AsFd>(pub Rc<Watched<T>>);

impl<T: AsFd> AsyncRead for Shared<T> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let room = into.initialize_unfilled();
        let read = self.0.poll_io(cx, For::Reading, |of| Ok(rustix::io::read(of, &mut *room)?));
        read.map_ok(|count| into.advance(count))
    }
}

impl<T: AsFd> AsyncWrite for Shared<T> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.0.poll_io(cx, For::Writing, |of| Ok(rustix::io::write(of, bytes)?))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys;
    use std::{os::fd::AsRawFd, time::Duration};

    fn on_one_thread(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, test);
    }

    fn pipe() -> (Watched, OwnedFd) {
        let (read, write) = sys::pipe().unwrap();
        sys::set_nonblocking(read.as_raw_fd()).unwrap();
        (Watched::new(read).unwrap(), write)
    }

    fn read(from: &Watched) -> io::Result<usize> {
        from.try_io(For::Reading, |fd| sys::read(fd.as_raw_fd(), &mut [0; 8]))
    }

    #[test]
    fn a_pipe_is_ready_when_bytes_or_its_end_have_come() {
        on_one_thread(async {
            let (from, to) = pipe();
            assert_eq!(read(&from).unwrap_err().kind(), io::ErrorKind::WouldBlock);
            for _ in 0..3 {
                sys::write(to.as_raw_fd(), b"12345678").unwrap();
                from.ready(For::Reading).await;
                assert_eq!(read(&from).unwrap(), 8);
                assert_eq!(read(&from).unwrap_err().kind(), io::ErrorKind::WouldBlock);
                let early = tokio::time::timeout(Duration::from_millis(20), from.ready(For::Reading)).await;
                assert!(early.is_err(), "nothing more has come");
            }
            drop(to);
            from.ready(For::Reading).await;
            assert_eq!(read(&from).unwrap(), 0, "the end");
        });
    }

    #[test]
    fn many_are_told_apart_and_one_that_is_gone_is_nobodys() {
        on_one_thread(async {
            let mut all: Vec<_> = (0..3 * BATCH).map(|_| pipe()).collect();
            let (gone, its_writer) = all.remove(7);
            let id = gone.id;
            let reactor = gone.reactor.clone();
            // An event on its way when the registration goes, as after a restore.
            epoll::add(&reactor.epoll, &its_writer, epoll::EventData::new_u64(id), epoll::EventFlags::OUT).unwrap();
            drop(gone);
            for (_, to) in &all {
                sys::write(to.as_raw_fd(), b"12345678").unwrap();
            }
            for (from, _) in &all {
                from.ready(For::Reading).await;
                assert_eq!(read(from).unwrap(), 8);
            }
            assert!(!reactor.entries.borrow().contains_key(&id));
            epoll::delete(&reactor.epoll, &its_writer).unwrap();
        });
    }

    #[test]
    fn two_wait_for_one_descriptor() {
        on_one_thread(async {
            let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
            near.set_nonblocking(true).unwrap();
            let near = Rc::new(Watched::new(near).unwrap());
            // Fill it, so that writing waits, too.
            let mut room = true;
            while room {
                near.reactor.turn();
                room = near.try_io(For::Writing, |stream| Ok(rustix::io::write(stream, &[0; 65536])?)).is_ok();
            }
            let other = near.clone();
            let writer = tokio::task::spawn_local(async move { other.ready(For::Writing).await });
            let other = near.clone();
            let reader = tokio::task::spawn_local(async move { other.ready(For::Reading).await });
            tokio::task::yield_now().await;
            rustix::io::write(&far, b"x").unwrap();
            reader.await.unwrap();
            assert!(!writer.is_finished());
            far.set_nonblocking(true).unwrap();
            while rustix::io::read(&far, &mut [0; 65536]).is_ok() {}
            writer.await.unwrap();
        });
    }
}
