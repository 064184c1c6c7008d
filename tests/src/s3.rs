//! A real S3 server for the tests: SeaweedFS, on loopback, with a directory, ports and credentials of its own.

use crate::eventually;
use std::{
    fs,
    net::TcpListener,
    path::PathBuf,
    process::{Child, Command, Stdio},
};

/// The bucket that is there.
pub const BUCKET: &str = "pail";
const ACCESS_KEY: &str = "dormouse-tests";
const SECRET_KEY: &str = "no-secret-at-all";

/// An S3 server. Ended, with all that it stored, when it is dropped.
pub struct S3 {
    dir: tempfile::TempDir,
    /// Master, volumes, files, S3; each with its port for the other protocol that they speak among themselves.
    ports: [u16; 8],
    child: Option<Child>,
}

fn program() -> PathBuf {
    let path = std::env::var_os("DORMOUSE_WEED");
    PathBuf::from(path.expect("DORMOUSE_WEED names the S3 server 'weed': run 'cargo xtask test', which installs it"))
}

/// Ports that are free now.
fn free_ports<const N: usize>() -> [u16; N] {
    let listeners = [(); N].map(|()| TcpListener::bind("127.0.0.1:0").expect("a free port"));
    listeners.map(|listener| listener.local_addr().expect("it is bound").port())
}

impl S3 {
    /// Starts a server with an empty bucket.
    pub fn start() -> S3 {
        let dir = tempfile::Builder::new().prefix("dormouse-s3-").tempdir().expect("a directory");
        let identity = format!(
            r#"{{"identities":[{{"name":"tests","credentials":[{{"accessKey":"{ACCESS_KEY}","secretKey":"{SECRET_KEY}"}}],
            "actions":["Admin","Read","Write","List","Tagging"]}}]}}"#
        );
        fs::write(dir.path().join("s3.json"), identity).expect("a file");
        fs::create_dir(dir.path().join("data")).expect("a directory");
        let mut server = S3 { dir, ports: free_ports(), child: None };
        server.start_again();
        // A bucket is a directory of the server's own file store.
        let made = ureq::post(&format!("http://127.0.0.1:{}/buckets/{BUCKET}/", server.ports[4])).send_empty();
        made.unwrap_or_else(|e| panic!("make the bucket: {e}; {}", server.log()));
        server
    }

    /// Starts it on the same ports and data, after [`S3::kill`], and waits until it answers.
    pub fn start_again(&mut self) {
        self.launch();
        let health = format!("http://127.0.0.1:{}/healthz", self.ports[6]);
        let files = format!("http://127.0.0.1:{}/", self.ports[4]);
        eventually("the S3 server answers", || ureq::get(&health).call().ok().and(ureq::get(&files).call().ok()));
    }

    /// Starts it without waiting for it.
    pub fn launch(&mut self) {
        assert!(self.child.is_none(), "the S3 server runs already");
        let dir = self.dir.path();
        let log = fs::File::options().create(true).append(true).open(dir.join("log")).expect("a log");
        let mut command = Command::new(program());
        command.arg("server").args(["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]);
        // It would tell its makers of itself otherwise.
        command.arg("-master.telemetry=false");
        command.args(["-master.volumeSizeLimitMB=256", "-volume.max=50", "-volume.preStopSeconds=0"]);
        let names = ["master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc"];
        for (name, port) in names.into_iter().chain(["s3.port", "s3.port.grpc"]).zip(self.ports) {
            command.arg(format!("-{name}={port}"));
        }
        command.args(["-s3.port.iceberg=0", "-s3.port.lance=0"]);
        for (name, file) in
            [("dir", "data"), ("s3.config", "s3.json"), ("s3.localSocket", "s3.sock"), ("filer.localSocket", "f.sock")]
        {
            command.arg(format!("-{name}={}", dir.join(file).display()));
        }
        command.env("TMPDIR", dir).current_dir(dir);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.child = Some(command.spawn().unwrap_or_else(|e| panic!("start {}: {e}", program().display())));
    }

    /// SIGKILL, as a crash.
    pub fn kill(&mut self) {
        let mut child = self.child.take().expect("the S3 server runs");
        child.kill().expect("it can be killed");
        child.wait().expect("it ends");
    }

    /// The settings that a client needs, as environment variables.
    pub fn settings(&self) -> Vec<(String, String)> {
        let endpoint = format!("http://127.0.0.1:{}", self.ports[6]);
        let settings = [
            ("AWS_ENDPOINT_URL", endpoint.as_str()),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ACCESS_KEY_ID", ACCESS_KEY),
            ("AWS_SECRET_ACCESS_KEY", SECRET_KEY),
        ];
        settings.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec()
    }

    /// The address of a place in the bucket.
    pub fn url(&self, prefix: &str) -> String {
        format!("s3://{BUCKET}/{prefix}")
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }
}

impl Drop for S3 {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        // It puts sockets there, named by its ports, whatever it is told.
        for (name, port) in [("master-grpc", 1), ("volume-grpc", 3), ("filer-grpc", 5), ("s3-grpc", 7)] {
            let _ = fs::remove_file(format!("/tmp/seaweedfs-{name}-{}.sock", self.ports[port]));
        }
    }
}
