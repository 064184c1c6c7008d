//! The network as programs inside see it: there is none but the loopback, and on that the guest listens for those who
//! want to go out.
//!
//! ```text
//!   curl, git, pip … ─► 127.0.0.1:7429 (HTTP and SOCKS) ─────────┐
//!   psql, redis-cli … ─► name ─► 127.0.0.1:53 ─► 127.64.x.y ─► its listeners ─┤
//!   ssh ─► dormouse-guest connect ─► 127.0.0.1:7429 ─────────────┤
//!                                                                └─► a connection of the hub ═► the supervisor's egress
//!   a program that listens ◄─ connect ◄─ Dial ◄═ previews
//! ```
//! The guest understands nothing of what goes through: what is asked, whether it is allowed and where it leads is the
//! supervisor's to say, who can be upgraded, while this program lies in memory images.

mod connection;
mod names;
mod ports;
mod settings;
mod trust;

pub use settings::prepare;

use crate::{
    guest::Guest,
    ready::{For, Watched},
};
use model::Offset;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with, sockopt};
use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    io,
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream},
    rc::Rc,
    time::Duration,
};
use wire::{
    Code, StreamId, WireError,
    guest::{Dial, Network, PROXY_PORT, ResetConnections},
};

/// Most connections at once, in both directions.
const MOST_CONNECTIONS: usize = 4096;
/// Callers that wait to be accepted.
const BACKLOG: i32 = 1024;
/// How long a program inside may take to accept.
const ACCEPT_LIMIT: Duration = Duration::from_secs(10);

/// What the guest holds of the network.
pub struct Net {
    /// What the supervisor wants set up; `None`: it knows no network.
    settings: RefCell<Option<Network>>,
    /// Where each connection leads to, as far as that is known.
    open: RefCell<BTreeMap<StreamId, String>>,
    names: RefCell<names::Names>,
    ports: RefCell<ports::Known>,
    /// Where bytes lie between a socket and the hub; nobody holds it across a wait.
    buffer: RefCell<Vec<u8>>,
    told_full: Cell<bool>,
}

impl Net {
    pub fn new() -> Net {
        Net {
            settings: RefCell::new(None),
            open: RefCell::default(),
            names: RefCell::default(),
            ports: RefCell::default(),
            buffer: RefCell::new(vec![0; 64 * 1024]),
            told_full: Cell::new(false),
        }
    }

    /// Applies what the supervisor wants. What fails is logged: a session with a wrong trust store is better than none.
    pub fn set(&self, network: Option<Network>, is_init: bool) {
        if *self.settings.borrow() == network {
            return;
        }
        if is_init {
            trust::apply(network.as_ref().and_then(|network| network.ca.as_deref()));
        }
        *self.settings.borrow_mut() = network;
    }

    /// The connections that the generation before has left, which end now.
    pub fn reset(&self) -> ResetConnections {
        let open = std::mem::take(&mut *self.open.borrow_mut());
        let mut reset = ResetConnections { count: open.len() as u64, to: Vec::new() };
        for to in open.into_values() {
            if !to.is_empty() && reset.to.len() < ResetConnections::MOST && !reset.to.contains(&to) {
                reset.to.push(to);
            }
        }
        reset
    }

    /// The supervisor says where a connection leads.
    pub fn connected(&self, stream: StreamId, mut to: String) {
        to.truncate(to.floor_char_boundary(300));
        if let Some(known) = self.open.borrow_mut().get_mut(&stream) {
            *known = to;
        }
    }

    fn may_dial(&self) -> bool {
        let full = self.open.borrow().len() >= MOST_CONNECTIONS;
        if full && !self.told_full.replace(true) {
            log!("{MOST_CONNECTIONS} connections are open: no more until some have ended");
        }
        self.settings.borrow().is_some() && !full
    }
}

impl Guest {
    /// Sets the network up; the programs that are started from now on see it.
    pub fn set_network(&self, network: Option<Network>) {
        self.net.set(network, self.is_init);
    }

    /// Connects to a port inside for the supervisor; `stream` is open already.
    ///
    /// # Errors
    /// [`Code::NotFound`] where nobody listens, [`Code::Busy`] where too many connections are open.
    pub async fn dial_inside(self: &Rc<Self>, stream: StreamId, port: u16) -> Result<(), WireError> {
        let has_room = self.net.open.borrow().len() < MOST_CONNECTIONS;
        let connected = match port {
            // Whoever comes in by a preview must not go out again as the session.
            PROXY_PORT => Err(io::ErrorKind::ConnectionRefused.into()),
            _ if !has_room => Err(io::ErrorKind::QuotaExceeded.into()),
            _ => tokio::time::timeout(ACCEPT_LIMIT, connect(port)).await.unwrap_or(Err(io::ErrorKind::TimedOut.into())),
        };
        match connected {
            Ok(socket) => {
                self.start_connection(stream, socket, format!("port {port}"));
                Ok(())
            }
            Err(error) => {
                self.hub.borrow_mut().forget(stream);
                Err(match error.kind() {
                    io::ErrorKind::ConnectionRefused => {
                        WireError::new(Code::NotFound, format!("nothing in the session listens on port {port}"))
                    }
                    io::ErrorKind::QuotaExceeded => WireError::new(Code::Busy, "too many connections are open in the session"),
                    _ => WireError::new(Code::Internal, format!("port {port}: {}", crate::program::words(&error))),
                })
            }
        }
    }

    fn start_connection(self: &Rc<Self>, stream: StreamId, socket: Watched<TcpStream>, to: String) {
        self.net.open.borrow_mut().insert(stream, to);
        let guest = self.clone();
        tokio::task::spawn_local(async move {
            connection::run(&guest, stream, socket).await;
            guest.net.open.borrow_mut().remove(&stream);
            guest.net.told_full.set(false);
        });
    }

    /// A program inside has connected to one of the guest's own listeners.
    fn take_outward(self: &Rc<Self>, socket: Watched<TcpStream>, to: Dial) {
        if !self.net.may_dial() {
            return connection::refuse(&socket);
        }
        let label = match &to {
            Dial::To { host, port } => format!("{host}:{port}"),
            Dial::Proxy | Dial::Name { .. } => String::new(),
        };
        let stream = self.hub.borrow_mut().dial(to);
        self.start_connection(stream, socket, label);
    }
}

/// Serves programs inside for as long as the process lives.
pub async fn serve(guest: Rc<Guest>) {
    let names = tokio::task::spawn_local(names::serve(guest.clone()));
    let ports = tokio::task::spawn_local(ports::look_forever(guest.clone()));
    match listen_at(SocketAddrV4::new(Ipv4Addr::LOCALHOST, PROXY_PORT)) {
        Ok(listener) => accept_forever(guest, listener, |_| Dial::Proxy).await,
        Err(error) => log!("port {PROXY_PORT}: {error}"),
    }
    let _ = tokio::join!(names, ports);
}

/// Listens. A program that listens on all addresses of the same port, later or earlier, isn't hindered by it [M].
fn listen_at(address: SocketAddrV4) -> io::Result<Watched<TcpListener>> {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &SocketAddr::V4(address))?;
    listen(&socket, BACKLOG)?;
    Watched::new(socket.into())
}

async fn accept_forever(guest: Rc<Guest>, listener: Watched<TcpListener>, to: impl Fn(SocketAddr) -> Dial) {
    loop {
        listener.ready(For::Reading).await;
        let accepted = listener.try_io(For::Reading, |listener| {
            let (stream, _) = listener.accept()?;
            stream.set_nonblocking(true)?;
            Ok((stream.local_addr()?, stream))
        });
        match accepted.and_then(|(at, stream)| Ok((at, Watched::new(stream)?))) {
            Ok((at, stream)) => guest.take_outward(stream, to(at)),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            // One that has left already, or no room for more descriptors.
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
        tokio::task::coop::consume_budget().await;
    }
}

/// Connects to a listener inside: that of IPv4, else that of IPv6.
async fn connect(port: u16) -> io::Result<Watched<TcpStream>> {
    let mut last = io::Error::from(io::ErrorKind::ConnectionRefused);
    for address in [SocketAddr::from((Ipv4Addr::LOCALHOST, port)), SocketAddr::from((std::net::Ipv6Addr::LOCALHOST, port))] {
        match connect_to(address).await {
            Ok(stream) => return Ok(stream),
            Err(error) if last.kind() == io::ErrorKind::ConnectionRefused && address.is_ipv4() => last = error,
            Err(_) => {}
        }
    }
    Err(last)
}

async fn connect_to(address: SocketAddr) -> io::Result<Watched<TcpStream>> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => {}
        Err(error) => return Err(error.into()),
    }
    let stream = Watched::new(TcpStream::from(socket))?;
    stream.ready(For::Writing).await;
    match stream.get_ref().take_error()? {
        Some(error) => Err(error),
        None => Ok(stream),
    }
}

/// Reads a small answer of the supervisor to its end; `None` where there is none.
async fn read_answer(guest: &Guest, stream: StreamId) -> Option<Vec<u8>> {
    use crate::hub::Next;
    let mut answer = Vec::new();
    let news = guest.hub.borrow().news(stream)?;
    loop {
        let next = guest.hub.borrow_mut().next(stream);
        match next {
            Next::Bytes(bytes) if answer.len() + bytes.len() <= 64 * 1024 => {
                answer.extend_from_slice(&bytes);
                guest.hub.borrow_mut().consumed(stream, bytes.len());
            }
            Next::Bytes(_) | Next::Gone => {
                guest.hub.borrow_mut().reset(stream, "not understood");
                return None;
            }
            Next::End => {
                let mut hub = guest.hub.borrow_mut();
                hub.finish(stream);
                hub.close_receiving(stream);
                debug_assert!(hub.end_of(stream).is_none_or(|end| end == Offset::ZERO), "nothing was said on it");
                return Some(answer);
            }
            Next::Nothing => news.notified().await,
        }
    }
}
