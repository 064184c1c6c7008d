//! The ports on which programs inside listen: looked for again and again, since nobody tells.

use crate::guest::Guest;
use std::{
    collections::{BTreeMap, HashMap},
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    rc::Rc,
    time::Duration,
};
use wire::guest::{GuestEvent, ListeningPort, PROXY_PORT};

/// How often.
const LOOK: Duration = Duration::from_secs(2);
/// Ports that are told of at once; whoever opens more has the rest told later.
const MOST_UNTAKEN: usize = 64;

/// What was seen last.
#[derive(Default)]
pub struct Known(BTreeMap<u16, ListeningPort>);

/// Tells of ports that open and close for as long as the process lives.
pub async fn look_forever(guest: Rc<Guest>) {
    loop {
        tokio::time::sleep(LOOK).await;
        // A capture must not fall into a look: it holds directories of processes open.
        if !guest.hub.borrow().is_open() {
            continue;
        }
        // Without programs nobody listens.
        if guest.works.borrow().running().is_empty() && guest.net.ports.borrow().0.is_empty() {
            continue;
        }
        guest.look_for_ports();
    }
}

impl Guest {
    /// The ports on which programs listen now.
    pub fn listening_ports(&self) -> Vec<ListeningPort> {
        self.look_for_ports();
        self.net.ports.borrow().0.values().cloned().collect()
    }

    fn look_for_ports(&self) {
        let now = listening();
        let mut known = self.net.ports.borrow_mut();
        let mut hub = self.hub.borrow_mut();
        let is_of_ports = |event: &GuestEvent| matches!(event, GuestEvent::PortOpened { .. } | GuestEvent::PortClosed { .. });
        let mut room = MOST_UNTAKEN.saturating_sub(hub.unacknowledged(is_of_ports));
        let gone: Vec<u16> = known.0.keys().filter(|port| !now.contains_key(port)).copied().collect();
        for port in gone {
            if room > 0 {
                room -= 1;
                known.0.remove(&port);
                hub.event(GuestEvent::PortClosed { port });
            }
        }
        let fresh: Vec<(u16, Listening)> = now.into_iter().filter(|(port, _)| !known.0.contains_key(port)).take(room).collect();
        if fresh.is_empty() {
            return;
        }
        let owners = owners();
        for (number, found) in fresh {
            let owner = owners.get(&found.inode);
            let program = owner.and_then(|pid| fs::read_to_string(format!("/proc/{pid}/comm")).ok());
            let port = ListeningPort {
                port: number,
                address: found.address.to_string(),
                pid: owner.copied(),
                program: program.map(|name| name.trim().to_owned()),
            };
            hub.event(GuestEvent::PortOpened { port: port.clone() });
            known.0.insert(number, port);
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Listening {
    address: IpAddr,
    inode: u64,
}

fn listening() -> BTreeMap<u16, Listening> {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    parse(&read("/proc/net/tcp"), &read("/proc/net/tcp6"))
}

/// Reads the kernel's tables (`proc_net_tcp` of its documentation). The guest's own listeners are left out.
fn parse(tcp: &str, tcp6: &str) -> BTreeMap<u16, Listening> {
    let mut found: BTreeMap<u16, Listening> = BTreeMap::new();
    for line in tcp.lines().chain(tcp6.lines()) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, local, _, "0A", ..] = fields[..] else { continue };
        let Some((address, port)) = local.split_once(':') else { continue };
        let (Some(address), Ok(port)) = (address_of(address), u16::from_str_radix(port, 16)) else { continue };
        let inode = fields.get(9).and_then(|inode| inode.parse().ok()).unwrap_or(0);
        if is_own(address, port) || port == 0 {
            continue;
        }
        let entry = found.entry(port).or_insert(Listening { address, inode });
        if address.is_unspecified() && !entry.address.is_unspecified() {
            *entry = Listening { address, inode };
        }
    }
    found
}

fn is_own(address: IpAddr, port: u16) -> bool {
    match address {
        IpAddr::V4(v4) => {
            let [a, b, ..] = v4.octets();
            a == 127 && b & 0xC0 == 64 || v4 == Ipv4Addr::LOCALHOST && (port == PROXY_PORT || port == 53)
        }
        IpAddr::V6(_) => false,
    }
}

/// Words of 32 bits in the machine's order, in hexadecimal.
fn address_of(text: &str) -> Option<IpAddr> {
    let word = |n: usize| u32::from_str_radix(text.get(8 * n..8 * n + 8)?, 16).ok().map(u32::to_ne_bytes);
    match text.len() {
        8 => Some(IpAddr::V4(Ipv4Addr::from(word(0)?))),
        32 => {
            let mut bytes = [0; 16];
            for n in 0..4 {
                bytes[4 * n..4 * n + 4].copy_from_slice(&word(n)?);
            }
            Some(IpAddr::V6(Ipv6Addr::from(bytes)).to_canonical())
        }
        _ => None,
    }
}

/// Which process holds which socket.
fn owners() -> HashMap<u64, u32> {
    let mut owners = HashMap::new();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    for pid in processes.filter_map(|entry| entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok())) {
        for fd in fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
            let inode = fs::read_link(fd.path())
                .ok()
                .and_then(|link| link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok());
            if let Some(inode) = inode {
                owners.entry(inode).or_insert(pid);
            }
        }
    }
    owners
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_are_read_from_the_tables_and_the_guests_own_are_left_out() {
        // As a sandbox printed them; the columns are those of Linux.
        let tcp = "  sl  local_address rem_address   st\n\
            0: 0500407F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0        1 1 0 0 0 0 0 -1\n\
            1: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0        2 1 0 0 0 0 0 -1\n\
            2: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0        3 1 0 0 0 0 0 -1\n\
            3: 0100007F:1D05 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0        4 1 0 0 0 0 0 -1\n\
            4: 0100007F:7686 0100007F:1F90 01 00000000:00000000 00:00000000 00000000     0        0        5 1 0 0 0 0 0 -1\n";
        let tcp6 = "  sl  local_address remote_address st\n\
            0: 00000000000000000000000001000000:0BB8 00000000000000000000000000000000:0000 0A 0:0 00:0 0 0 0 6 1\n\
            1: 00000000000000000000000000000000:0050 00000000000000000000000000000000:0000 07 0:0 00:0 0 0 0 7 1\n";
        let found = parse(tcp, tcp6);
        let expected = [
            (3000, Listening { address: "::1".parse().unwrap(), inode: 6 }),
            (8080, Listening { address: "0.0.0.0".parse().unwrap(), inode: 3 }),
        ];
        assert_eq!(found, expected.into());
        assert!(parse("garbage\n0: x:y z 0A\n", "").is_empty());
    }
}
