//! Servers of the outside world, started by the tests on loopback.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

/// `tests/net/upstream.py`, plain or TLS, with a folder of its own.
pub struct Upstream {
    child: Child,
    dir: tempfile::TempDir,
    pub port: u16,
}

/// A certificate authority, and a certificate of it for `host.dormouse.internal`, made with `openssl`.
pub struct Authority {
    dir: tempfile::TempDir,
}

impl Authority {
    pub fn new() -> Authority {
        let dir = tempfile::tempdir().expect("a folder");
        let openssl = |args: &[&str]| {
            let made = Command::new("openssl").args(args).current_dir(dir.path()).output().expect("openssl runs");
            assert!(made.status.success(), "{args:?}: {}", String::from_utf8_lossy(&made.stderr));
        };
        fs::write(
            dir.path().join("names"),
            "subjectAltName=DNS:host.dormouse.internal,DNS:localhost\nbasicConstraints=critical,CA:FALSE\n\
             keyUsage=digitalSignature\nextendedKeyUsage=serverAuth\n",
        )
        .expect("a file");
        let curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
        let own = ["req", "-x509", "-days", "30", "-subj", "/CN=Authority of the tests", "-keyout", "ca.key", "-out", "ca.pem"];
        openssl(&[&own[..], &curve[..]].concat());
        let asked = ["req", "-subj", "/CN=upstream", "-keyout", "key.pem", "-out", "asked.pem"];
        openssl(&[&asked[..], &curve[..]].concat());
        let signed = ["x509", "-req", "-in", "asked.pem", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "30"];
        openssl(&[&signed[..], &["-extfile", "names", "-out", "cert.pem"]].concat());
        Authority { dir }
    }

    /// Its own certificate.
    pub fn certificate(&self) -> PathBuf {
        self.dir.path().join("ca.pem")
    }
}

impl Default for Authority {
    fn default() -> Authority {
        Authority::new()
    }
}

impl Upstream {
    /// One that speaks HTTP.
    pub fn plain() -> Upstream {
        Upstream::start(None, "")
    }

    /// One that speaks HTTPS, and knows a key where that isn't empty.
    pub fn tls(authority: &Authority, key: &str) -> Upstream {
        Upstream::start(Some(authority), key)
    }

    fn start(authority: Option<&Authority>, key: &str) -> Upstream {
        let dir = tempfile::tempdir().expect("a folder");
        let mut command = Command::new("python3");
        command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/net/upstream.py")).arg(dir.path());
        if let Some(authority) = authority {
            command.arg(authority.dir.path().join("cert.pem")).arg(authority.dir.path().join("key.pem"));
        }
        let mut child =
            command.env("UPSTREAM_KEY", key).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("python3 runs");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("it is a pipe")).read_line(&mut line).expect("its port");
        let port = line.trim().parse().unwrap_or_else(|_| panic!("the upstream server did not start: {line:?}"));
        Upstream { child, dir, port }
    }

    /// Its folder.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// An address as programs inside a session know it.
    pub fn url(&self, path: &str) -> String {
        format!("http://host.dormouse.internal:{}{path}", self.port)
    }

    pub fn https(&self, path: &str) -> String {
        format!("https://host.dormouse.internal:{}{path}", self.port)
    }

    /// A rule that allows it.
    pub fn rule(&self) -> serde_json::Value {
        serde_json::json!({ "allow": "host.dormouse.internal", "ports": [self.port] })
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A port of loopback that is free now.
fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("it has an address").port()
}

/// Waits until somebody listens on a port; panics with `what` it should be.
fn wait_for(port: u16, what: &str) {
    crate::eventually(what, || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok().then_some(()));
}

fn must(command: &mut Command) {
    let done = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(
        done.status.success(),
        "{command:?}: {}{}",
        String::from_utf8_lossy(&done.stdout),
        String::from_utf8_lossy(&done.stderr)
    );
}

/// A process that is ended with its test.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        // Orderly first: PostgreSQL's own children end with it.
        // SAFETY: kill takes two integers; the child is ours and not waited for yet.
        unsafe { libc::kill(self.0.id().cast_signed(), libc::SIGTERM) };
        let _ = self.0.wait();
    }
}

/// A PostgreSQL server that asks for a password.
pub struct Postgres {
    _daemon: Daemon,
    _dir: tempfile::TempDir,
    pub port: u16,
    pub password: &'static str,
}

impl Postgres {
    pub fn start() -> Postgres {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().expect("a folder");
        // It refuses to run as root.
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("its mode");
        let (data, password) = (dir.path().join("data"), "pencil");
        fs::create_dir(&data).expect("a folder");
        fs::write(dir.path().join("password"), password).expect("a file");
        must(Command::new("chown").arg("-R").arg("postgres").arg(dir.path()));
        let bin = fs::read_dir("/usr/lib/postgresql")
            .expect("PostgreSQL is installed")
            .flatten()
            .last()
            .expect("a version")
            .path()
            .join("bin");
        let as_postgres = |program: &str| {
            let mut command = Command::new("setpriv");
            command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups"]).arg(bin.join(program)).current_dir("/");
            command
        };
        must(
            as_postgres("initdb")
                .args(["-A", "scram-sha-256", "-U", "postgres", "--no-sync", "--pwfile"])
                .arg(dir.path().join("password"))
                .arg(&data),
        );
        let port = free_port();
        let mut server = as_postgres("postgres");
        server.arg("-D").arg(&data).args([
            "-p",
            &port.to_string(),
            "-k",
            "",
            "-c",
            "listen_addresses=127.0.0.1",
            "-c",
            "fsync=off",
        ]);
        let daemon = Daemon(server.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("postgres runs"));
        wait_for(port, "PostgreSQL listens");
        Postgres { _daemon: daemon, _dir: dir, port, password }
    }
}

/// A Redis server.
pub struct Redis {
    _daemon: Daemon,
    pub port: u16,
}

impl Redis {
    pub fn start() -> Redis {
        let port = free_port();
        let mut server = Command::new("redis-server");
        server.args(["--bind", "127.0.0.1", "--save", "", "--port", &port.to_string()]).current_dir("/");
        let daemon = Daemon(server.stdout(Stdio::null()).spawn().expect("redis-server runs"));
        wait_for(port, "Redis listens");
        Redis { _daemon: daemon, port }
    }
}

/// An SSH server that lets root in by a key.
pub struct Sshd {
    _daemon: Daemon,
    dir: tempfile::TempDir,
    pub port: u16,
}

impl Sshd {
    pub fn start() -> Sshd {
        let dir = tempfile::tempdir().expect("a folder");
        for name in ["host", "user"] {
            must(Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(dir.path().join(name)));
        }
        fs::create_dir_all("/run/sshd").expect("sshd's own folder");
        let port = free_port();
        let mut server = Command::new("/usr/sbin/sshd");
        server.arg("-D").arg("-f").arg("/dev/null").arg("-h").arg(dir.path().join("host"));
        for option in [
            format!("Port {port}"),
            "ListenAddress 127.0.0.1".to_owned(),
            format!("AuthorizedKeysFile {}", dir.path().join("user.pub").display()),
            "StrictModes no".to_owned(),
            "PermitRootLogin prohibit-password".to_owned(),
            "PidFile none".to_owned(),
        ] {
            server.arg("-o").arg(option);
        }
        let daemon = Daemon(server.stderr(Stdio::null()).spawn().expect("sshd runs"));
        wait_for(port, "sshd listens");
        Sshd { _daemon: daemon, dir, port }
    }

    /// The key that gets in.
    pub fn key(&self) -> PathBuf {
        self.dir.path().join("user")
    }
}
