//! Names to addresses, and the addresses of the own host.

use std::{
    future::Future,
    io,
    net::IpAddr,
    pin::Pin,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

/// How long the list of the host's own addresses is used before it is read again.
const OWN_FOR: Duration = Duration::from_secs(10);

/// The answer of a resolver, once it comes.
pub type Resolving<'a> = Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send + 'a>>;

/// Finds the addresses of a name. Asked only for names that the policy allows, once for each connection.
pub trait Resolve: Send + Sync + 'static {
    fn resolve<'a>(&'a self, name: &'a str) -> Resolving<'a>;
}

/// Names that are asked for at once.
const MOST_QUESTIONS: usize = 16;

/// The resolver of the host.
pub struct SystemResolver;

impl Resolve for SystemResolver {
    fn resolve<'a>(&'a self, name: &'a str) -> Resolving<'a> {
        use std::net::ToSocketAddrs;
        // Held by the thread itself, which nobody can break off: a silent name server takes so many threads, and no more.
        static PLACES: std::sync::LazyLock<Arc<tokio::sync::Semaphore>> =
            std::sync::LazyLock::new(|| Arc::new(tokio::sync::Semaphore::new(MOST_QUESTIONS)));
        let name = name.to_owned();
        Box::pin(async move {
            let place = Arc::clone(&PLACES).acquire_owned().await.map_err(io::Error::other)?;
            let asked = tokio::task::spawn_blocking(move || {
                let _place = place;
                Ok((name.as_str(), 0).to_socket_addrs()?.map(|address| address.ip()).collect())
            });
            asked.await.map_err(io::Error::other)?
        })
    }
}

/// The addresses of the host's interfaces, read again when they are some seconds old.
#[derive(Default)]
pub(crate) struct OwnAddresses {
    known: Mutex<Option<(Instant, Arc<[IpAddr]>)>>,
}

impl OwnAddresses {
    pub fn get(&self) -> Arc<[IpAddr]> {
        let mut known = crate::locked(&self.known);
        if let Some((read, addresses)) = &*known
            && read.elapsed() < OWN_FOR
        {
            return Arc::clone(addresses);
        }
        let addresses: Arc<[IpAddr]> = match nix::ifaddrs::getifaddrs() {
            Ok(interfaces) => interfaces.filter_map(|interface| address_of(interface.address?)).collect(),
            Err(error) => {
                tracing::warn!(%error, "the host's own addresses can't be read");
                known.as_ref().map(|(_, addresses)| Arc::clone(addresses)).unwrap_or_default()
            }
        };
        *known = Some((Instant::now(), Arc::clone(&addresses)));
        addresses
    }
}

fn address_of(address: nix::sys::socket::SockaddrStorage) -> Option<IpAddr> {
    let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
    v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip()).to_canonical()))
}
