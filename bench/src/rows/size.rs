//! How much room things take.

use crate::{
    measure::{Samples, resident_mib},
    report::{Row, figure},
};
use anyhow::{Context, Result, ensure};
use dormouse_tests::{Server, eventually, leftovers, server, terminal::Viewer};
use model::SessionId;
use serde_json::json;
use std::{
    collections::HashMap,
    fs::{self, File},
    os::unix::fs::MetadataExt,
    path::Path,
    process::Command,
    time::Instant,
};
use store::{SessionChange, Sessions};
use store_sqlite::SqliteStore;
use wire::terminal::ServerFrame;

const MIB: f64 = 1048576.0;

/// A supervisor after a boot, an exec, and a terminal that was opened, watched and closed.
pub fn supervisor() -> Result<Vec<Row>> {
    let server = Server::start();
    let session = server.session();
    session.out("seq 1 1000");
    let body = json!({ "argv": ["/bin/sh"], "cols": 80, "rows": 24 });
    let terminal = session.client.post(&session.path("/terminals"), &body).expect(201).json();
    let terminal = terminal["id"].as_str().expect("a terminal has an id").to_owned();
    let query = "client=00000000-0000-4000-8000-000000000001&cols=80&rows=24&from=screen";
    let mut viewer = Viewer::attach(&session, &terminal, query).expect("the terminal is there");
    viewer.until("the screen", |frame| matches!(frame, ServerFrame::Screen { .. }));
    viewer.cut();
    session.client.delete(&session.path(&format!("/terminals/{terminal}"))).expect(204);
    let stats = session.client.get(&session.path("/stats")).expect(200).json();
    let mib = |name: &str| stats[name].as_f64().map_or(f64::NAN, |bytes| bytes / MIB);
    server.delete_all_and_check();
    let beside = format!("memory of its sandbox: {}", figure(mib("cgroup_memory_bytes"), "MiB"));
    let ours = mib("supervisor_rss_bytes");
    Ok(vec![Row::at_most("supervisor-rss", "resident memory of a supervisor", ours, "MiB", 10.0).beside(beside)])
}

const SESSIONS: usize = 1000;

/// A server with 1,000 hibernated sessions.
///
/// One is made and put to sleep; the others are copies of its row and (by hard links) of its directory, put in while
/// the server is down. Making each for real would take ten minutes and show the same: what a server holds of a sleeping
/// session comes from these.
pub fn server() -> Result<Vec<Row>> {
    let mut server = Server::start();
    let session = server.session();
    session.out("echo done");
    session.hibernate();
    eventually("the confirmation ends", || leftovers::processes(server.data()).is_empty().then_some(()));
    let one = resident_mib(server.pid());
    server.terminate();
    copy(server.data(), session.id.parse().context("an id")?, SESSIONS)?;
    server.start_again();

    let (mut ls, mut http) = (Samples::default(), Samples::default());
    let mut rows = 0;
    for _ in 0..15 {
        let output = ls.time(|| server.cli(&["ls"]).output())?;
        ensure!(output.status.success(), "dormouse ls: {}", String::from_utf8_lossy(&output.stderr));
        rows = String::from_utf8_lossy(&output.stdout).lines().filter(|line| line.contains("hibernated")).count();
        let list = http.time(|| server.client.get("/v1/sessions?limit=1000")).expect(200).json();
        let count = list["items"].as_array().map_or(0, Vec::len);
        ensure!(count == SESSIONS, "the server lists {count} sessions");
    }
    let rss = resident_mib(server.pid());
    let memory = Row::at_most("server-1000-rss", "a server with 1,000 hibernated sessions", rss, "MiB", 80.0);
    let list = Row::at_most("server-1000-ls", format!("`dormouse ls` there ({rows} rows shown), p50"), ls.median(), "ms", 50.0);
    Ok(vec![
        memory.beside(format!("with one: {}", figure(one, "MiB"))),
        list.beside(format!("`GET /v1/sessions?limit=1000`: {}", figure(http.median(), "ms"))),
    ])
}

/// Fills a server that is down up to `count` sessions with copies of one.
pub fn copy(data: &Path, of: SessionId, count: usize) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let store = SqliteStore::open(data).await?;
        let row = store.session(of).await?.context("the session is stored")?;
        let copies: Vec<_> = (1..count)
            .map(|_| SessionChange::new(store::SessionRow { id: SessionId::new(), revision: Default::default(), ..row.clone() }))
            .collect();
        for copy in &copies {
            let (from, to) =
                (data.join("sessions").join(of.to_string()), data.join("sessions").join(copy.session.id.to_string()));
            let status = Command::new("cp").arg("-al").arg(from).arg(to).status()?;
            ensure!(status.success(), "cp -al: {status}");
        }
        store.commit_all(copies).await?;
        store.close().await;
        Ok(())
    })
}

/// The template `host`, made from nothing.
pub fn template_host() -> Result<Vec<Row>> {
    let shared = server::templates();
    // Beside the shared folder: links work there if they work at all.
    let beside = shared.parent().filter(|dir| dir.is_dir()).unwrap_or(Path::new("/tmp"));
    let dir = tempfile::Builder::new().prefix("dormouse-bench-templates-").tempdir_in(beside)?;
    let free = || -> Result<f64> {
        let stat = rustix::fs::statvfs(dir.path())?;
        Ok(stat.f_bfree as f64 * stat.f_frsize as f64)
    };
    let before = free()?;
    let start = Instant::now();
    let output = Command::new(server::binary()).args(["template", "make", "host", "--templates"]).arg(dir.path()).output()?;
    let seconds = start.elapsed().as_secs_f64();
    ensure!(output.status.success(), "dormouse template make host: {}", String::from_utf8_lossy(&output.stderr));
    rustix::fs::syncfs(File::open(dir.path())?)?;
    let used = (before - free()?) / MIB;
    let tree = tree_size(dir.path())?;
    // Free space is shared with all others; a tree of hard links can be counted exactly.
    let (extra, how) = match reflinks(dir.path())? {
        true => (used, "by free space"),
        false => (tree.own / MIB, "files without a link elsewhere"),
    };
    let size = format!("the tree: {}", figure(tree.all / MIB, "MiB"));
    let disk = format!("extra disk of template `host` ({how})");
    Ok(vec![
        Row::at_most("template-host-time", "template `host` made", seconds, "s", 30.0).beside(&size),
        Row::at_most("template-host-disk", disk, extra, "MiB", 100.0).beside(size),
    ])
}

/// Allocated bytes of a tree.
struct TreeSize {
    all: f64,
    /// Of files that have all their links in the tree, so would be freed with it.
    own: f64,
}

fn tree_size(dir: &Path) -> Result<TreeSize> {
    // Inode → links found, links there are, bytes.
    let mut seen: HashMap<u64, (u64, u64, u64)> = HashMap::new();
    let mut waiting = vec![dir.to_owned()];
    while let Some(dir) = waiting.pop() {
        for entry in fs::read_dir(&dir).with_context(|| dir.display().to_string())? {
            let entry = entry?;
            let meta = entry.metadata()?;
            // A directory has one name; its link count counts its children.
            let links = if meta.is_dir() { 1 } else { meta.nlink() };
            seen.entry(meta.ino()).or_insert((0, links, meta.blocks() * 512)).0 += 1;
            if meta.is_dir() {
                waiting.push(entry.path());
            }
        }
    }
    let sum =
        |own_only: bool| seen.values().filter(|(found, links, _)| !own_only || found >= links).map(|(_, _, b)| *b as f64).sum();
    Ok(TreeSize { all: sum(false), own: sum(true) })
}

fn reflinks(dir: &Path) -> Result<bool> {
    let (from, to) = (dir.join(".from"), dir.join(".to"));
    fs::write(&from, [1; 4096])?;
    let works = rustix::fs::ioctl_ficlone(File::create(&to)?, File::open(&from)?).is_ok();
    fs::remove_file(from)?;
    fs::remove_file(to)?;
    Ok(works)
}
