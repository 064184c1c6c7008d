//! From a destination to a connected stream: judged by name, resolved, judged by address, connected, judged again.

use crate::{
    connection::{Connection, Outside},
    host::{Destination, Host},
    policy::{Judge, Judgement},
    refusal::{Kind, Refusal},
};
use futures_util::{StreamExt, stream::FuturesUnordered};
use model::network::HOST_NAME;
use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
    time::Duration,
};
use tokio::{
    net::TcpStream,
    time::{sleep, timeout},
};

/// Most addresses of a name that are tried.
const MOST_ADDRESSES: usize = 16;
/// How long an address is tried alone before the next one is tried beside it (RFC 8305 has 250 ms).
const NEXT_AFTER: Duration = Duration::from_millis(250);
/// After this time without a byte the kernel asks whether the other side is still there.
const KEEPALIVE: Duration = Duration::from_secs(60);

/// What the stream is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    /// Bytes, unless rules read requests.
    Stream,
    /// Requests that are read and judged in any case.
    Requests,
}

/// A connected stream.
pub(crate) struct Reached {
    pub outside: Outside,
    /// Each request has to be judged.
    pub reads: bool,
}

/// Connects to a destination as far as the policy allows, and tells what it denies.
pub(crate) async fn reach(connection: &Arc<Connection>, to: &Destination, purpose: Use) -> Result<Reached, Refusal> {
    // In a box, so that an idle connection doesn't hold the place that connecting took.
    let result = Box::pin(try_reach(connection, to, purpose)).await;
    if let Err(refusal) = &result {
        connection.egress.tell_refused(to, refusal);
    }
    result
}

async fn try_reach(connection: &Arc<Connection>, to: &Destination, purpose: Use) -> Result<Reached, Refusal> {
    let egress = &connection.egress;
    egress.grant_soon().await?;
    connection.aim(to, purpose == Use::Requests);
    if let Some(name) = to.host.name() {
        let (grant, own) = (egress.grant_now()?, egress.own.get());
        if let Judgement::Deny(reason) = (Judge { grant: &grant, own: &own }).name(name, to.port) {
            return Err(Refusal::denied(reason));
        }
    }
    let limit = egress.settings.connect_timeout;
    let connecting = async {
        let addresses = allowed(connection, to, resolve(connection, to).await?)?;
        connect_any(&addresses, to.port).await.map_err(|error| Refusal::connect(&error))
    };
    let (stream, address) = timeout(limit, connecting)
        .await
        .map_err(|_| Refusal::new(Kind::TimedOut, format!("there was no answer within {} s", limit.as_secs())))??;
    let _ = stream.set_nodelay(true);
    // A connection whose other side has vanished must not stay for ever.
    let _ = rustix::net::sockopt::set_socket_keepalive(&stream, true);
    let _ = rustix::net::sockopt::set_tcp_keepidle(&stream, KEEPALIVE);
    let outside = Outside::new(stream, connection, &to.host);
    // The policy may have changed meanwhile.
    let reads = connection.reached(address)?;
    Ok(Reached { outside, reads })
}

/// The addresses of a destination, unjudged.
async fn resolve(connection: &Connection, to: &Destination) -> Result<Vec<IpAddr>, Refusal> {
    match &to.host {
        Host::Address(address) => Ok(vec![*address]),
        Host::Name(name) if name == HOST_NAME => Ok(vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]),
        Host::Name(name) => match connection.egress.resolver.resolve(name).await {
            Ok(addresses) if !addresses.is_empty() => Ok(addresses),
            Ok(_) => Err(Refusal::new(Kind::Unreachable, "the name has no address")),
            Err(error) => Err(Refusal::new(Kind::Unreachable, format!("the name can't be resolved: {error}"))),
        },
    }
}

/// Those addresses that may be connected to, in their order.
fn allowed(connection: &Connection, to: &Destination, addresses: Vec<IpAddr>) -> Result<Vec<IpAddr>, Refusal> {
    let (grant, own) = (connection.egress.grant_now()?, connection.egress.own.get());
    let judge = Judge { grant: &grant, own: &own };
    let (mut allowed, mut why) = (Vec::new(), None);
    for address in addresses.into_iter().map(|address| address.to_canonical()) {
        match judge.address(to, address) {
            Judgement::Deny(reason) => why = why.or(Some(reason)),
            _ if allowed.contains(&address) => {}
            _ => allowed.push(address),
        }
    }
    allowed.truncate(MOST_ADDRESSES);
    if allowed.is_empty() { Err(Refusal::denied(why.unwrap_or_default())) } else { Ok(allowed) }
}

/// Connects to exactly one of these addresses: the first that answers, each being given a little time alone.
async fn connect_any(addresses: &[IpAddr], port: u16) -> io::Result<(TcpStream, IpAddr)> {
    let mut left = addresses.iter().copied();
    let mut trying = FuturesUnordered::new();
    let mut failed = None;
    loop {
        if let Some(address) = left.next() {
            trying.push(async move { (TcpStream::connect((address, port)).await, address) });
        } else if trying.is_empty() {
            return Err(failed.unwrap_or_else(|| io::ErrorKind::AddrNotAvailable.into()));
        }
        let more = left.len() > 0;
        tokio::select! {
            Some((result, address)) = trying.next() => match result {
                Ok(stream) => return Ok((stream, address)),
                Err(error) => { failed.get_or_insert(error); }
            },
            () = sleep(NEXT_AFTER), if more => {}
        }
    }
}
