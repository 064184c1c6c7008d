//! Where the server is, and the token it is shown.

use super::failure::{Failure, Result};
use std::path::{Path, PathBuf};

/// Where a server listens when nobody says otherwise.
pub const DEFAULT_URL: &str = "http://127.0.0.1:7420";

/// Where root's server has its socket, open to every user of the machine.
const MACHINE_SOCKET: &str = "/run/dormouse/server.sock";

/// A way to the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// `prefix` is what stands between the host and `/v1`, without a `/` at its end.
    Tcp {
        host: String,
        port: u16,
        prefix: String,
    },
    Unix(PathBuf),
}

impl Address {
    /// Reads `http://HOST[:PORT][/PREFIX]` or `unix:PATH`.
    ///
    /// # Errors
    /// A usage failure for anything else.
    pub fn parse(text: &str) -> Result<Address> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return match path {
                "" => Err(Failure::usage("'unix:' needs a path: --url unix:/run/dormouse/server.sock")),
                path => Ok(Address::Unix(path.into())),
            };
        }
        if text.starts_with("https://") {
            return Err(Failure::usage(format!(
                "can't speak TLS to {text} — reach the server through a tunnel, for example 'ssh -L 7420:127.0.0.1:7420 HOST'"
            )));
        }
        let bad = || Failure::usage(format!("'{text}' is not a server's address: write http://HOST:PORT or unix:PATH"));
        let rest = text.strip_prefix("http://").ok_or_else(bad)?;
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let authority: http::uri::Authority = authority.parse().map_err(|_| bad())?;
        // A port that is no port is left out by the parser, and would silently become 80.
        let bad_port = authority.port_u16().is_none() && authority.as_str().len() > authority.host().len();
        if authority.host().is_empty() || authority.as_str().contains('@') || bad_port {
            return Err(bad());
        }
        let prefix = path.trim_end_matches('/');
        Ok(Address::Tcp {
            host: authority.host().to_owned(),
            port: authority.port_u16().unwrap_or(80),
            prefix: if prefix.is_empty() { String::new() } else { format!("/{prefix}") },
        })
    }

    /// True where the server runs on this machine, so that its token file may be used.
    pub fn is_local(&self) -> bool {
        match self {
            Address::Unix(_) => true,
            Address::Tcp { host, .. } => {
                let host = host.trim_start_matches('[').trim_end_matches(']');
                host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
            }
        }
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Address::Tcp { host, port, prefix } => write!(f, "http://{host}:{port}{prefix}"),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// The data directory of a server that was started without `--data` by the same user.
pub fn default_data_dir() -> PathBuf {
    if let Some(dir) = std::env::var_os("DORMOUSE_DATA").filter(|dir| !dir.is_empty()) {
        return dir.into();
    }
    if rustix::process::geteuid().is_root() {
        return "/var/lib/dormouse".into();
    }
    let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_else(|| "/".into());
    home.join(".local/share/dormouse")
}

/// Finds the server and a token from what the command line and the environment say.
///
/// The local server's token file is read only for a server on this machine: another one must not get it. A user whose
/// own server has no token file is led to the machine's socket, which knows users by their uid.
///
/// # Errors
/// A usage failure where `url` is no address.
pub fn locate(url: Option<&str>, token: Option<&str>) -> Result<(Address, Option<String>)> {
    let address = Address::parse(url.unwrap_or(DEFAULT_URL))?;
    if let Some(token) = token {
        return Ok((address, Some(token.to_owned())));
    }
    // On a socket the server knows us by our uid; another server's token would only be refused.
    let local = matches!(address, Address::Tcp { .. }) && address.is_local();
    let file = local.then(|| read_token(&default_data_dir().join("admin.token"))).flatten();
    if file.is_none() && url.is_none() && Path::new(MACHINE_SOCKET).exists() {
        return Ok((Address::Unix(MACHINE_SOCKET.into()), None));
    }
    Ok((address, file))
}

fn read_token(path: &Path) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let token = text.trim();
    (!token.is_empty()).then(|| token.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(host: &str, port: u16, prefix: &str) -> Address {
        Address::Tcp { host: host.into(), port, prefix: prefix.into() }
    }

    #[test]
    fn addresses() {
        for (text, address) in [
            ("http://127.0.0.1:7420", tcp("127.0.0.1", 7420, "")),
            ("http://box.lan:80/", tcp("box.lan", 80, "")),
            ("http://box.lan/mouse/", tcp("box.lan", 80, "/mouse")),
            ("http://[::1]:7420", tcp("[::1]", 7420, "")),
            ("unix:/run/x.sock", Address::Unix("/run/x.sock".into())),
            ("unix:x.sock", Address::Unix("x.sock".into())),
        ] {
            assert_eq!(Address::parse(text).unwrap(), address, "{text}");
        }
        for bad in
            ["", "127.0.0.1:7420", "https://x", "unix:", "http://", "http://u:p@h", "http://u@h:1", "http://h:99999", "http://h:"]
        {
            assert_eq!(Address::parse(bad).unwrap_err().status, 2, "{bad}");
        }
    }

    #[test]
    fn only_this_machines_server_gets_its_token() {
        for local in ["http://localhost:1", "http://127.9.9.9:1", "http://[::1]:1", "unix:/x"] {
            assert!(Address::parse(local).unwrap().is_local(), "{local}");
        }
        for far in ["http://10.0.0.1:1", "http://localhost.example.com:1", "http://127.0.0.1.nip.io:1"] {
            assert!(!Address::parse(far).unwrap().is_local(), "{far}");
        }
    }
}
