//! The guest: everything it holds, and what each message from the supervisor does.

use crate::{
    activity::Looks,
    channel::Incoming,
    clock::AwakeClock,
    figures,
    files::Transfers,
    hub::Hub,
    identity,
    moments::Moments,
    net::Net,
    program::words,
    services::Services,
    works::{Start, Works},
};
use model::{Offset, ServiceName};
use std::{
    cell::RefCell,
    collections::BTreeMap,
    fs::File,
    io,
    rc::Rc,
    time::{Duration, Instant, SystemTime},
};
use tokio::sync::Notify;
use wire::{
    Code, Frame, WireError,
    guest::{GuestActivity, Hello, HelloReply, Identity, PROTOCOL, Reply, Request, ResetConnections, ToGuest, Work},
};

/// State of the guest; all of it belongs to the main thread.
pub struct Guest {
    pub hub: RefCell<Hub>,
    pub works: RefCell<Works>,
    pub services: RefCell<Services>,
    pub transfers: Transfers,
    pub identity: RefCell<Option<Identity>>,
    pub clock: AwakeClock,
    /// How busy programs are.
    pub looks: RefCell<Looks>,
    /// What programs are told of the session's life.
    pub moments: Moments,
    pub net: Net,
    /// Rings when a process has ended or a work has changed.
    pub changed: Notify,
    /// True in a sandbox; on a host the guest is one program among others.
    pub is_init: bool,
    /// `/dev/null`, for programs without input.
    pub null: File,
    boot_id: String,
}

impl Guest {
    /// A guest that nobody has spoken to yet.
    ///
    /// # Errors
    /// Where `/dev/null` or `/dev/urandom` can't be opened.
    pub fn new() -> io::Result<Self> {
        let is_init = std::process::id() == 1;
        Ok(Self {
            hub: RefCell::new(Hub::new()),
            works: RefCell::new(Works::new(is_init)),
            services: RefCell::new(Services::default()),
            transfers: Transfers::default(),
            identity: RefCell::new(None),
            clock: AwakeClock::new(),
            looks: RefCell::new(Looks::new(Instant::now(), figures::programs_cpu_ms())),
            moments: Moments::new(),
            net: Net::new(),
            changed: Notify::new(),
            is_init,
            null: File::options().read(true).write(true).open("/dev/null")?,
            boot_id: identity::random_id()?,
        })
    }

    /// Acts on what the channel brought.
    pub async fn handle(self: &Rc<Self>, incoming: Incoming) {
        match incoming {
            Incoming::Frame(frame) => self.frame(frame),
            Incoming::UnknownRequest { id, why } => {
                let text = format!("this guest ({}) doesn't know the request: {why}", env!("CARGO_PKG_VERSION"));
                let epoch = self.hub.borrow().epoch();
                self.hub.borrow_mut().reply(epoch, id, Err(WireError::new(Code::Unsupported, text)));
            }
            Incoming::Message(message) => match *message {
                ToGuest::Hello(hello) => self.hello(hello).await,
                ToGuest::Ready { acks } => self.hub.borrow_mut().ready(acks),
                ToGuest::Quiesce => {
                    // Transfers end first, so that no half-written file is left open in the image.
                    self.transfers.stop(self).await;
                    self.moments.quiesced(SystemTime::now());
                    self.hub.borrow_mut().quiesce();
                }
                ToGuest::AckEvents { seq } => self.hub.borrow_mut().ack_events(seq),
                ToGuest::Request { id, request } => self.request(id, request),
                ToGuest::Connected { stream, to } => self.net.connected(stream, to),
            },
        }
    }

    fn frame(&self, frame: Frame) {
        let mut hub = self.hub.borrow_mut();
        match frame {
            Frame::Data { stream, offset, bytes } => hub.on_data(stream, offset, bytes),
            Frame::End { stream, offset } => hub.on_end(stream, offset),
            Frame::Ack { stream, offset } => hub.on_ack(stream, offset),
            Frame::Reset { stream, .. } => hub.on_reset(stream),
            Frame::Control(_) => {}
        }
    }

    async fn hello(self: &Rc<Self>, hello: Hello) {
        self.transfers.stop(self).await;
        let woke = self.moments.hello(&hello, SystemTime::now());
        if woke {
            self.looks.borrow_mut().begin_anew(Instant::now(), figures::programs_cpu_ms());
        }
        let reset = if woke { self.net.reset() } else { ResetConnections::default() };
        if let Some(identity) = hello.identity {
            self.become_someone(identity, &hello.service_offsets);
        }
        let reply = HelloReply {
            protocol: PROTOCOL.min(hello.protocol),
            guest_version: env!("CARGO_PKG_VERSION").into(),
            boot_id: self.boot_id.clone(),
            sending: vec![],
            receiving: vec![],
            works: self.works.borrow().running(),
            max_stream: 0,
            reset,
        };
        self.hub.borrow_mut().hello(reply, hello.keep_input, woke);
    }

    fn become_someone(self: &Rc<Self>, identity: Identity, service_offsets: &BTreeMap<ServiceName, Offset>) {
        if self.identity.borrow().as_ref() == Some(&identity) {
            return;
        }
        identity::apply(&identity, self.is_init);
        self.works.borrow_mut().groups.set_limit(identity.pids);
        self.set_network(identity.network.clone());
        let services = identity.services.clone();
        *self.identity.borrow_mut() = Some(identity);
        self.set_services(services, service_offsets);
    }

    fn request(self: &Rc<Self>, id: u64, request: Request) {
        let epoch = self.hub.borrow().epoch();
        let request = match request {
            Request::Ping => return self.hub.borrow_mut().reply(epoch, id, Ok(Reply::Pong)),
            Request::File { stream, request } => return self.file_request(epoch, id, stream, request),
            other => other,
        };
        // Streams are opened before the next frame is read.
        let start = match request {
            Request::Spawn(spawn) => {
                let start = Start::from(spawn);
                if let Err(error) = self.open_streams(&start) {
                    return self.hub.borrow_mut().reply(epoch, id, Err(error));
                }
                Ok(start)
            }
            Request::Dial { stream, .. } if !self.hub.borrow_mut().open_connection(stream) => {
                let error = WireError::new(Code::Protocol, format!("the stream {} is in use", stream.0));
                return self.hub.borrow_mut().reply(epoch, id, Err(error));
            }
            other => Err(other),
        };
        let guest = self.clone();
        tokio::task::spawn_local(async move {
            let result = match start {
                Ok(start) => guest.start(start).await.map(|(_, pid)| Reply::Spawned { pid }),
                Err(request) => guest.answer(request).await,
            };
            guest.hub.borrow_mut().reply(epoch, id, result);
        });
    }

    async fn answer(self: &Rc<Self>, request: Request) -> Result<Reply, WireError> {
        match request {
            Request::Signal { work, signal, tree } => self.signal(&work, signal, tree).await.map(|()| Reply::Done),
            Request::Resize { terminal, size } => self.resize(&Work::Terminal(terminal), size).map(|()| Reply::Done),
            Request::SetServices { services, offsets } => {
                self.set_services(services, &offsets);
                Ok(Reply::Done)
            }
            Request::Service { name, action } => self.service_action(&name, &action).await.map(|()| Reply::Done),
            Request::Services => Ok(Reply::Services { items: self.service_records() }),
            Request::Stats => Ok(Reply::Stats { stats: figures::stats() }),
            Request::Processes => Ok(Reply::Processes { items: figures::processes(&self.works.borrow()) }),
            Request::Unsaveable => Ok(Reply::Unsaveable { items: blocking(figures::unsaveable).await? }),
            Request::Activity { window_ms } => Ok(Reply::Activity { activity: self.activity(Duration::from_millis(window_ms)) }),
            Request::Moment { moment, seconds } => {
                self.moments.about_to(&moment, seconds);
                Ok(Reply::Done)
            }
            Request::Dial { stream, port } => self.dial_inside(stream, port).await.map(|()| Reply::Done),
            Request::Ports => Ok(Reply::Ports { items: self.listening_ports() }),
            Request::SetNetwork { network } => {
                if let Some(identity) = &mut *self.identity.borrow_mut() {
                    identity.network = Some(network.clone());
                }
                self.set_network(Some(network));
                Ok(Reply::Done)
            }
            Request::Sync => {
                blocking(rustix::fs::sync).await?;
                Ok(Reply::Done)
            }
            Request::KillLargest { reason } => {
                let work = figures::largest(&self.works.borrow());
                if let Some(work) = &work {
                    self.end_work(work, &reason, false).await;
                }
                Ok(Reply::Killed { work })
            }
            Request::Shutdown { grace_ms } => {
                self.stop_services();
                self.shut_down(Duration::from_millis(grace_ms)).await;
                Ok(Reply::Done)
            }
            // Answered before, in the order of their frames.
            Request::Ping | Request::Spawn(_) | Request::File { .. } => {
                Err(WireError::new(Code::Internal, "this request is answered elsewhere"))
            }
        }
    }

    fn activity(&self, window: Duration) -> GuestActivity {
        let told = self.looks.borrow_mut().tell(Instant::now(), figures::programs_cpu_ms(), window);
        GuestActivity { waiting: self.moments.waiting.borrow().clone(), ..told }
    }
}

/// Runs something that may wait for the disk on a helper thread.
///
/// # Errors
/// [`Code::Internal`] when it panicked.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, WireError> {
    tokio::task::spawn_blocking(work).await.map_err(|e| WireError::new(Code::Internal, format!("a helper thread failed: {e}")))
}

/// An error on a path, in words.
pub fn path_error(path: &str, error: &io::Error) -> WireError {
    let code = match error.raw_os_error() {
        Some(libc::ELOOP) => Code::TooManyLinks,
        _ => Code::of_io(error),
    };
    WireError::new(code, format!("{path}: {}", words(error)))
}
