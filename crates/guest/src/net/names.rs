//! Names for programs that know no proxy: each that the session may reach gets an address of its own in 127.64.0.0/10, on
//! which the guest listens. Nothing is resolved: that happens outside, when a connection is made and allowed.

use super::{accept_forever, listen_at, read_answer};
use crate::{
    guest::Guest,
    ready::{For, Watched},
};
use simple_dns::{CLASS, PacketFlag, QCLASS, QTYPE, RCODE, ResourceRecord, TYPE, rdata::RData};
use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    io,
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket},
    rc::Rc,
    time::Duration,
};
use tokio::task::AbortHandle;
use wire::guest::{Dial, NameAnswer};

/// First of the addresses.
const FIRST: u32 = u32::from_be_bytes([127, 64, 0, 1]);
/// How many names have an address at once. The one that was asked for longest ago loses its own.
const MOST_NAMES: usize = 1024;
/// How many listeners there are for all of them.
const MOST_LISTENERS: usize = 2048;
/// Seconds for which a program may keep an answer.
const KEEP: u32 = 10;
/// How long the supervisor may take to say whether a name is allowed.
const ANSWER_LIMIT: Duration = Duration::from_secs(4);
/// Questions that are answered at once.
const MOST_QUESTIONS: usize = 256;

/// The names that have an address.
#[derive(Default)]
pub struct Names {
    by_name: HashMap<String, Named>,
    /// By when they were asked for last.
    order: VecDeque<String>,
    used: u32,
}

struct Named {
    address: Ipv4Addr,
    /// By port; an ended task is one whose port could not be listened on.
    listeners: BTreeMap<u16, AbortHandle>,
}

impl Drop for Named {
    fn drop(&mut self) {
        self.listeners.values().for_each(AbortHandle::abort);
    }
}

impl Names {
    /// The address of a name, its own for as long as it is asked for.
    fn ensure(&mut self, name: &str) -> Ipv4Addr {
        self.order.retain(|known| known != name);
        self.order.push_back(name.to_owned());
        if let Some(named) = self.by_name.get(name) {
            return named.address;
        }
        if self.by_name.len() >= MOST_NAMES
            && let Some(oldest) = self.order.pop_front()
        {
            self.by_name.remove(&oldest);
        }
        // An address is somebody else's only after all others have been.
        let address = Ipv4Addr::from(FIRST + self.used % 0x003F_FFFE);
        self.used = self.used.wrapping_add(1);
        self.by_name.insert(name.to_owned(), Named { address, listeners: BTreeMap::new() });
        address
    }
}

impl Names {
    /// Gives up the names that were asked for longest ago, but for this one, while there are too many listeners.
    fn bound(&mut self, keep: &str) {
        let count = |names: &Names| names.by_name.values().map(|named| named.listeners.len()).sum::<usize>();
        while count(self) > MOST_LISTENERS {
            let Some(oldest) = self.order.pop_front().filter(|name| name != keep) else { return };
            self.by_name.remove(&oldest);
        }
    }
}

/// Answers questions for as long as the process lives.
pub async fn serve(guest: Rc<Guest>) {
    let socket =
        match UdpSocket::bind((Ipv4Addr::LOCALHOST, 53)).and_then(|s| s.set_nonblocking(true).map(|()| s)).and_then(Watched::new)
        {
            Ok(socket) => Rc::new(socket),
            Err(error) => return log!("port 53: {error}"),
        };
    let places = std::sync::Arc::new(tokio::sync::Semaphore::new(MOST_QUESTIONS));
    let mut buffer = [0; 1500];
    loop {
        socket.ready(For::Reading).await;
        match socket.try_io(For::Reading, |socket| socket.recv_from(&mut buffer)) {
            Ok((count, from)) => {
                let Ok(place) = places.clone().try_acquire_owned() else { continue };
                let (guest, socket, question) = (guest.clone(), socket.clone(), buffer[..count].to_vec());
                tokio::task::spawn_local(async move {
                    let _place = place;
                    if let Some(answer) = answer(&guest, &question).await {
                        // One that doesn't wait any more asks again.
                        let _ = socket.get_ref().send_to(&answer, from);
                    }
                });
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
}

/// Answers one packet; `None`: what can't be understood, or is no question.
async fn answer(guest: &Rc<Guest>, question: &[u8]) -> Option<Vec<u8>> {
    let packet = simple_dns::Packet::parse(question).ok()?;
    if packet.has_flags(PacketFlag::RESPONSE) {
        return None;
    }
    let mut reply = simple_dns::Packet::new_reply(packet.id());
    reply.set_flags(PacketFlag::RECURSION_AVAILABLE | PacketFlag::RECURSION_DESIRED);
    let first = packet.questions.first()?;
    reply.questions.push(first.clone());
    let name = first.qname.to_string().trim_end_matches('.').to_ascii_lowercase();
    match ask(guest, &name).await {
        None => *reply.rcode_mut() = RCODE::ServerFailure,
        Some(NameAnswer { allowed: false, .. }) => *reply.rcode_mut() = RCODE::NameError,
        Some(NameAnswer { ports, .. }) => {
            let class = matches!(first.qclass, QCLASS::CLASS(CLASS::IN) | QCLASS::ANY);
            if class && matches!(first.qtype, QTYPE::TYPE(TYPE::A) | QTYPE::ANY) {
                let address = listen_for(guest, &name, &ports);
                reply.answers.push(ResourceRecord::new(first.qname.clone(), CLASS::IN, KEEP, RData::A(address.into())));
            }
        }
    }
    reply.build_bytes_vec_compressed().ok()
}

/// Asks the supervisor about a name; `None`: nobody can tell.
async fn ask(guest: &Rc<Guest>, name: &str) -> Option<NameAnswer> {
    if !guest.net.may_dial() {
        return None;
    }
    let stream = guest.hub.borrow_mut().dial(Dial::Name { name: name.to_owned() });
    match tokio::time::timeout(ANSWER_LIMIT, read_answer(guest, stream)).await {
        Ok(answer) => serde_json::from_slice(&answer?).ok(),
        Err(_) => {
            guest.hub.borrow_mut().reset(stream, "no answer in time");
            None
        }
    }
}

/// Listens on the ports of a name, those that it doesn't listen on yet.
fn listen_for(guest: &Rc<Guest>, name: &str, ports: &[u16]) -> Ipv4Addr {
    let mut names = guest.net.names.borrow_mut();
    let address = names.ensure(name);
    names.bound(name);
    let Some(named) = names.by_name.get_mut(name) else { return address };
    for port in ports {
        if named.listeners.get(port).is_some_and(|listener| !listener.is_finished()) {
            continue;
        }
        match listen_at(SocketAddrV4::new(address, *port)) {
            Ok(listener) => {
                let host = name.to_owned();
                let to = move |at: SocketAddr| Dial::To { host: host.clone(), port: at.port() };
                let task = tokio::task::spawn_local(accept_forever(guest.clone(), listener, to));
                named.listeners.insert(*port, task.abort_handle());
            }
            // A program inside that listens on all addresses, and does not share, was earlier: the port is its own.
            Err(error) => log!("{name} ({address}), port {port}: {error}"),
        }
    }
    address
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_name_has_an_address_of_its_own_until_it_is_forgotten() {
        let mut names = Names::default();
        let first = names.ensure("a.example");
        assert_eq!(first, Ipv4Addr::new(127, 64, 0, 1));
        assert_eq!(names.ensure("b.example"), Ipv4Addr::new(127, 64, 0, 2));
        for n in 0..MOST_NAMES - 2 {
            names.ensure(&format!("{n}.example"));
        }
        assert_eq!(names.ensure("a.example"), first);
        names.ensure("one.more");
        assert!(names.by_name.contains_key("a.example") && !names.by_name.contains_key("b.example"));
        assert_eq!((names.by_name.len(), names.order.len()), (MOST_NAMES, MOST_NAMES));
        let last = FIRST + 0x003F_FFFD;
        assert_eq!(Ipv4Addr::from(last), Ipv4Addr::new(127, 127, 255, 254));
    }

    #[test]
    fn hostile_packets_are_left_unanswered() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, async {
            let guest = Rc::new(Guest::new().unwrap());
            for packet in [&b""[..], b"\0", &[0xff; 12], &[0; 512], b"\0\x01\x01\0\0\x01\0\0\0\0\0\0\xc0\x0c\0\x01\0\x01"] {
                let _ = answer(&guest, packet).await;
            }
            let mut question = simple_dns::Packet::new_query(7);
            let name = simple_dns::Name::new_unchecked("db.example");
            question.questions.push(simple_dns::Question::new(name, TYPE::A.into(), CLASS::IN.into(), false));
            let bytes = answer(&guest, &question.build_bytes_vec().unwrap()).await.unwrap();
            let reply = simple_dns::Packet::parse(&bytes).unwrap();
            assert_eq!((reply.id(), reply.rcode()), (7, RCODE::ServerFailure), "no supervisor has spoken yet");
        });
    }
}
