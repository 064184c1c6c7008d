//! Wires a server together, runs it until it is told to end, and takes it apart in order.

use super::{Settings, data, sockets};
use anyhow::{Context, bail};
use api::{AppState, Listeners, Previews};
use engine::Engine;
use std::{
    fs,
    io::{self, IsTerminal, Write},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};
use store_sqlite::SqliteStore;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

/// The program that is PID 1 in every sandbox.
static GUEST: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/dormouse-guest"));

/// The template of sessions that name none.
const DEFAULT_TEMPLATE: &str = "debian";
/// Booted sandboxes that are kept ready where memory allows.
const POOL: usize = 2;
/// Below this much available memory none are kept.
const POOL_NEEDS_KIB: u64 = 1024 * 1024;

/// Runs a server with these settings.
///
/// # Errors
/// Whatever keeps it from starting.
pub fn run(settings: Settings) -> anyhow::Result<ExitCode> {
    if settings.take_over {
        bail!(
            "--take-over isn't built yet: end the running server with 'dormouse down', then start this one; sessions run on meanwhile"
        );
    }
    data::keep_private();
    start_logs(&settings.log_level)?;
    raise_file_limit();
    let lock = data::open(&settings.data)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("can't start")?;
    let done = runtime.block_on(serve(settings));
    // Blocking calls that are stuck must not keep the process.
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    drop(lock);
    done.map(|()| ExitCode::SUCCESS)
}

async fn serve(settings: Settings) -> anyhow::Result<()> {
    // Before anything is started, so that a signal in between is not lost.
    let mut signals = Signals::new()?;
    let store = SqliteStore::open(&settings.data).await.context("can't open the store")?;
    let store = Arc::new(store);
    // No session may reach it, so it has to be known before any runs.
    let tcp = sockets::take(&settings)?;
    let address = tcp.local_addr().context("the listener has no address")?;
    let config = config(&settings, vec![address])?;
    let engine = Engine::open(config, store.clone()).await.context("can't open the data directory")?;
    let (tcp, unix) = sockets::open(&settings, tcp).await?;

    let stop = CancellationToken::new();
    let previews = Previews { domain: settings.preview_domain.clone(), port: Some(address.port()) };
    let (state, background) = AppState::new(engine.clone(), previews, stop.clone());
    let listeners = Listeners { tcp: vec![tcp], unix: vec![unix] };
    let serving = tokio::spawn(api::serve(api::router(state), listeners, stop.clone()));
    tracing::info!(%address, data = %settings.data.display(), socket = %settings.socket.display(), "ready");
    announce(&format!("listening on http://{address}"));

    tokio::select! {
        name = signals.next() => tracing::info!(signal = name, "ending; sessions run on"),
        () = stop.cancelled() => {}
    }
    stop.cancel();
    let orderly = async {
        if serving.await.is_err() {
            tracing::error!("the listeners ended badly");
        }
        let _ = fs::remove_file(&settings.socket);
        for (session, error) in engine.shutdown(false).await {
            tracing::warn!(%session, %error, "a session was left in the middle of something");
        }
        background.finish().await;
        store.close().await;
    };
    tokio::select! {
        () = orderly => tracing::info!("ended"),
        name = signals.next() => bail!("ended at once by a second {name}"),
    }
    Ok(())
}

/// The signals that end a server.
struct Signals {
    term: Signal,
    int: Signal,
}

impl Signals {
    fn new() -> anyhow::Result<Signals> {
        let listen = |kind| signal(kind).context("can't listen for signals");
        Ok(Signals { term: listen(SignalKind::terminate())?, int: listen(SignalKind::interrupt())? })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.term.recv() => "SIGTERM",
            _ = self.int.recv() => "SIGINT",
        }
    }
}

/// `closed`: the server's own listeners.
fn config(settings: &Settings, closed: Vec<SocketAddr>) -> anyhow::Result<engine::Config> {
    let supervisor = std::env::current_exe().context("can't tell where this program is")?;
    Ok(engine::Config {
        data_dir: settings.data.clone(),
        templates_dir: settings.templates.clone(),
        runsc: find_runsc(settings.runsc.as_deref())?,
        platform: settings.platform.clone(),
        supervisor,
        guest: guest(settings.guest.as_deref())?,
        pool_size: settings.pool.map_or_else(default_pool, |count| usize::try_from(count).unwrap_or(usize::MAX)),
        default_template: DEFAULT_TEMPLATE.to_owned(),
        confirm: settings.confirm,
        keep_output: settings.keep_output,
        webhooks: settings.webhooks.clone(),
        object_store: settings.object_store.clone(),
        pack_after: settings.pack_after,
        cache_bytes: settings.cache_bytes,
        closed,
        egress_roots: settings.egress_ca.clone(),
        secrets_key: settings.secrets_key.clone(),
        forget_secrets: settings.forget_secrets,
    })
}

/// Kept for as long as the server runs, as the one it carries is.
fn guest(given: Option<&Path>) -> anyhow::Result<&'static [u8]> {
    let Some(path) = given else { return Ok(GUEST) };
    let program = fs::read(path).with_context(|| format!("can't read the guest {}", path.display()))?;
    Ok(Vec::leak(program))
}

fn find_runsc(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    if let Some(path) = given {
        if !path.is_file() {
            bail!("there is no runsc at {}", path.display());
        }
        return Ok(path.to_owned());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/local/bin", "/usr/bin", "/usr/local/sbin", "/usr/sbin"].map(PathBuf::from);
    let mut places = std::env::split_paths(&path).chain(usual).map(|dir| dir.join("runsc"));
    // Without it everything works but making sandboxes, and the engine says why.
    Ok(places.find(|path| path.is_file()).unwrap_or_else(|| "/usr/bin/runsc".into()))
}

fn default_pool() -> usize {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    pool_for(&text)
}

fn pool_for(meminfo: &str) -> usize {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let available: Option<u64> = line.and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse().ok());
    if available.is_some_and(|kib| kib >= POOL_NEEDS_KIB) { POOL } else { 0 }
}

/// Standard output tells scripts that the server is ready. Where nobody reads it, it serves all the same.
fn announce(line: &str) {
    let mut out = io::stdout().lock();
    if writeln!(out, "{line}").and_then(|()| out.flush()).is_err() {
        tracing::debug!("standard output is closed");
    }
}

/// For people on a terminal, as JSON lines otherwise; always on standard error.
fn start_logs(level: &str) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(level).with_context(|| format!("'{level}' is not a log level or filter"))?;
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    if io::stderr().is_terminal() {
        logs.init()
    } else {
        logs.json().init()
    }
    Ok(())
}

/// Every session costs a few descriptors, every viewer two.
fn raise_file_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "the limit of open files can't be raised");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_is_for_machines_with_memory() {
        assert_eq!(pool_for("MemTotal: 9 kB\nMemAvailable:    4194304 kB\n"), POOL);
        assert_eq!(pool_for("MemAvailable:     524288 kB\n"), 0);
        assert_eq!(pool_for(""), 0);
    }

    #[test]
    fn a_runsc_that_is_named_must_be_there() {
        assert!(find_runsc(Some(Path::new("/nonexistent/runsc"))).is_err());
        assert_eq!(find_runsc(Some(Path::new("/bin/sh"))).unwrap(), Path::new("/bin/sh"));
    }
}
