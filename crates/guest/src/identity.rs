//! Who this session is: names, machine id and randomness, applied when a supervisor brings them.

use std::{fs, io, io::Read};
use wire::guest::Identity;

/// 32 hexadecimal digits that nobody else has.
///
/// # Errors
/// Where `/dev/urandom` can't be read.
pub fn random_id() -> io::Result<String> {
    let mut bytes = [0u8; 16];
    fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

/// Applies what differs from session to session. On a host only the working directory is made. A step that fails is
/// logged: a session with a wrong host name is better than none.
pub fn apply(identity: &Identity, is_init: bool) {
    if let Some(workdir) = &identity.workdir
        && let Err(error) = fs::create_dir_all(workdir)
    {
        log!("working directory {workdir}: {error}");
    }
    if !is_init {
        return;
    }
    let steps: [(&str, io::Result<()>); 5] = [
        ("randomness", mix_seed(&identity.seed)),
        ("host name", rustix::system::sethostname(identity.hostname.as_bytes()).map_err(io::Error::from)),
        ("/etc/hostname", ensure_file("/etc/hostname", &format!("{}\n", identity.hostname))),
        ("/etc/hosts", name_in_hosts(&identity.hostname)),
        ("/etc/machine-id", ensure_file("/etc/machine-id", &format!("{}\n", identity.machine_id))),
    ];
    for (what, result) in steps {
        if let Err(error) = result {
            log!("{what}: {error}");
        }
    }
}

/// Leaves a file alone that says it already: a wake changes nothing on the disk, times included.
fn ensure_file(path: &str, text: &str) -> io::Result<()> {
    if fs::read_to_string(path).is_ok_and(|old| old == text) { Ok(()) } else { fs::write(path, text) }
}

fn mix_seed(seed: &str) -> io::Result<()> {
    if seed.is_empty() { Ok(()) } else { fs::write("/dev/urandom", seed) }
}

fn name_in_hosts(hostname: &str) -> io::Result<()> {
    let old = match fs::read_to_string("/etc/hosts") {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(error),
    };
    let new = hosts_with(&old, hostname);
    if new == old { Ok(()) } else { fs::write("/etc/hosts", new) }
}

fn hosts_with(old: &str, hostname: &str) -> String {
    let mut lines: Vec<&str> = old.lines().filter(|l| l.split_whitespace().next() != Some("127.0.1.1")).collect();
    let has_localhost = lines.iter().any(|l| l.split_whitespace().skip(1).any(|name| name == "localhost"));
    if !has_localhost {
        lines.insert(0, "127.0.0.1\tlocalhost");
    }
    let own = format!("127.0.1.1\t{hostname}");
    lines.push(&own);
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_file_has_the_name_once() {
        let first = hosts_with("", "one");
        assert_eq!(first, "127.0.0.1\tlocalhost\n127.0.1.1\tone\n");
        assert_eq!(hosts_with(&first, "two"), "127.0.0.1\tlocalhost\n127.0.1.1\ttwo\n");
        assert_eq!(hosts_with("::1 localhost\n10.0.0.1 db\n", "x"), "::1 localhost\n10.0.0.1 db\n127.0.1.1\tx\n");
    }
}
