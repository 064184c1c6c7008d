//! A real server: started, killed, started again.

use crate::{http::Client, leftovers, session::Session};
use serde_json::{Value, json};
use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

/// How a test's server differs from the usual one.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Another build instead of the one under test.
    pub binary: Option<PathBuf>,
    /// Sandboxes kept ready.
    pub pool: u32,
    /// More arguments of `serve`.
    pub args: Vec<String>,
    /// More environment variables of the server.
    pub env: Vec<(String, String)>,
    /// A template folder of its own instead of the shared one.
    pub templates: Option<PathBuf>,
    /// Where the data directory is made, instead of the folder for temporary files.
    pub dir: Option<PathBuf>,
}

/// One data directory and the server on it.
pub struct Server {
    dir: tempfile::TempDir,
    options: Options,
    child: Option<Child>,
    /// Stays the same when the server is started again.
    address: String,
    pub client: Client,
}

/// The binary under test.
pub fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os("DORMOUSE_BIN") {
        return path.into();
    }
    // target/release/deps/TEST → target/release/dormouse
    let here = std::env::current_exe().expect("a test knows its own path");
    here.ancestors().nth(2).expect("tests lie in target/PROFILE/deps").join("dormouse")
}

/// The template folder that test servers share.
pub fn templates() -> PathBuf {
    std::env::var_os("DORMOUSE_TEMPLATES").map_or_else(|| "/var/lib/dormouse/templates".into(), PathBuf::from)
}

impl Server {
    /// A usual server, without a pool.
    pub fn start() -> Server {
        Server::with(Options::default())
    }

    pub fn with(options: Options) -> Server {
        Server::prepared(options, |_| {})
    }

    /// One whose data directory is filled by `prepare` before the first start.
    pub fn prepared(options: Options, prepare: impl FnOnce(&Path)) -> Server {
        let parent = options.dir.clone().unwrap_or_else(std::env::temp_dir);
        let dir = tempfile::Builder::new().prefix("dormouse-test-").tempdir_in(parent).expect("a directory for data");
        let client = Client::new("", "");
        let mut server = Server { dir, options, child: None, address: "127.0.0.1:0".to_owned(), client };
        prepare(server.data());
        server.start_again();
        server
    }

    /// The data directory.
    pub fn data(&self) -> &Path {
        self.dir.path()
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("the server runs").id()
    }

    /// A command of the binary under test, set to this server.
    pub fn cli(&self, args: &[&str]) -> Command {
        let mut command = Command::new(binary());
        command.args(args).env("DORMOUSE_URL", &self.client.base).env("DORMOUSE_TOKEN", &self.client.token);
        command.env("DORMOUSE_BIN", binary()).stdin(Stdio::null());
        command
    }

    fn command(&self) -> Command {
        let mut command = Command::new(self.options.binary.clone().unwrap_or_else(binary));
        command.arg("serve").arg("--listen").arg(&self.address).arg("--data").arg(self.data());
        command.arg("--templates").arg(self.options.templates.clone().unwrap_or_else(templates));
        command.arg("--pool").arg(self.options.pool.to_string()).args(&self.options.args);
        // A hand-made environment: the developer's own must change nothing.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("DORMOUSE_") {
                command.env_remove(name);
            }
        }
        command.envs(self.options.env.iter().cloned());
        command
    }

    /// Starts the server on the same data directory, address and port.
    pub fn start_again(&mut self) {
        assert!(self.child.is_none(), "the server runs already");
        let log = std::fs::File::options().create(true).append(true).open(self.data().join("server.log")).expect("a log");
        let mut command = self.command();
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        let mut child = command.spawn().unwrap_or_else(|e| panic!("start {}: {e}", binary().display()));
        let mut lines = BufReader::new(child.stdout.take().expect("its output is a pipe")).lines();
        let ready = lines.by_ref().map_while(Result::ok).find_map(|line| line.strip_prefix("listening on ").map(str::to_owned));
        let Some(base) = ready else {
            let status = child.wait();
            panic!("the server did not start ({status:?}): {}", self.log());
        };
        // Its output must not fill the pipe.
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(drop));
        self.address = base.trim_start_matches("http://").to_owned();
        let token = std::fs::read_to_string(self.data().join("admin.token")).expect("the server made its token");
        self.client = Client::new(&base, token.trim());
        self.child = Some(child);
    }

    /// Installs another build for the next start; `None`: the one under test.
    pub fn install(&mut self, binary: Option<PathBuf>) {
        self.options.binary = binary;
    }

    /// Other arguments of `serve` for the next start.
    pub fn set_args(&mut self, args: &[&str]) {
        self.options.args = args.iter().map(|arg| (*arg).to_owned()).collect();
    }

    /// What the server wrote to standard error.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.data().join("server.log")).unwrap_or_default()
    }

    /// SIGKILL, as a crash.
    pub fn kill(&mut self) {
        let mut child = self.child.take().expect("the server runs");
        child.kill().expect("it can be killed");
        child.wait().expect("it ends");
    }

    /// SIGTERM, as a service manager does; returns its exit code.
    pub fn terminate(&mut self) -> Option<i32> {
        let mut child = self.child.take().expect("the server runs");
        // SAFETY: kill takes two integers; the child is ours and not waited for yet.
        unsafe { libc::kill(child.id().cast_signed(), libc::SIGTERM) };
        child.wait().expect("it ends").code()
    }

    /// Kill and start.
    pub fn crash(&mut self) {
        self.kill();
        self.start_again();
    }

    /// A new session with `body`'s fields.
    #[track_caller]
    pub fn session_with(&self, body: &Value) -> Session {
        let made = self.client.post("/v1/sessions", body).expect(201).json();
        Session::new(self.client.clone(), &made)
    }

    /// A new session with the defaults.
    #[track_caller]
    pub fn session(&self) -> Session {
        self.session_with(&json!({}))
    }

    /// Deletes every session and checks that nothing of them is left: processes, mounts, control groups, directories.
    #[track_caller]
    pub fn delete_all_and_check(&self) {
        let list = self.client.get("/v1/sessions?limit=1000").expect(200).json();
        for session in list["items"].as_array().expect("a list") {
            self.client.delete(&format!("/v1/sessions/{}", session["id"].as_str().expect("an id"))).expect(204);
        }
        leftovers::expect_none(self.data());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- the server's log\n{}", tail(&self.log(), 4000));
        }
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        leftovers::end_everything(self.data());
    }
}

fn tail(text: &str, bytes: usize) -> &str {
    let mut from = text.len().saturating_sub(bytes);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    &text[from..]
}
