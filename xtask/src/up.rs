//! `cargo xtask up`: from a clone to a session, in one command.

use crate::build;
use anyhow::{Context, Result, bail};
use std::{
    env, fs,
    io::{BufRead, BufReader, IsTerminal, Read, Seek},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// The key of the session that is opened first.
const FIRST: &str = "first";
const ADDRESS: &str = "http://127.0.0.1:7420";

/// Builds, starts the server where none runs, opens the first session, attaches where there is a
/// terminal.
pub fn up() -> Result<()> {
    let binary = build::build(build::Scope::Binary)?;
    if server_answers(&binary) {
        println!("the server runs already");
    } else {
        start_server(&binary)?;
    }
    let output = Command::new(&binary).args(["new", FIRST]).stderr(Stdio::inherit()).output().context("open a session")?;
    if !output.status.success() {
        bail!("the first session could not be opened: {}", output.status);
    }
    let id = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let url = env::var("DORMOUSE_URL").unwrap_or_else(|_| ADDRESS.to_owned());
    println!("session {id} (key '{FIRST}') at {url}");
    println!("the command line is {}", binary.display());
    if !(std::io::stdin().is_terminal() && std::io::stdout().is_terminal()) {
        return Ok(());
    }
    println!("attaching; ctrl-\\ then d leaves it running");
    let error = Command::new(&binary).args(["attach", FIRST]).exec();
    Err(error).context("attach to the session")
}

fn server_answers(binary: &Path) -> bool {
    let asked = Command::new(binary).args(["ls", "--json"]).stdout(Stdio::null()).stderr(Stdio::null()).status();
    asked.is_ok_and(|status| status.success())
}

/// Starts the server in a process session of its own, so that it outlives this terminal.
fn start_server(binary: &Path) -> Result<()> {
    let log = log_path()?;
    let mut out =
        fs::File::options().create(true).append(true).read(true).open(&log).with_context(|| log.display().to_string())?;
    let from = out.metadata()?.len();
    let mut server = Command::new("setsid");
    server.arg(binary).arg("serve").arg("--templates").arg(build::templates_dir());
    server.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out.try_clone()?);
    let mut child = server.spawn().context("start the server")?;
    let deadline = Instant::now() + Duration::from_secs(60);
    // It says on standard output when it is ready.
    loop {
        out.seek(std::io::SeekFrom::Start(from))?;
        let said: Vec<String> = BufReader::new(out.by_ref()).lines().map_while(Result::ok).collect();
        if let Some(line) = said.iter().find(|line| line.starts_with("listening on ")) {
            println!("the server is {line}; its log is {}", log.display());
            return Ok(());
        }
        if let Some(status) = child.try_wait()? {
            bail!("the server ended at once ({status}):\n{}", said.join("\n"));
        }
        if Instant::now() > deadline {
            bail!("the server is not ready after 60 s; see {}", log.display());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn log_path() -> Result<PathBuf> {
    let dir = build::templates_dir().parent().map(Path::to_owned).unwrap_or_else(|| "/tmp".into());
    fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
    Ok(dir.join("server.log"))
}
