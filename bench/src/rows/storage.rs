//! Packing: how fast it is beside the plain steps and beside backup programs, how much room it takes, and what of a sleeping
//! session stays beside the object store.

use crate::{
    measure::{Samples, rate},
    report::{Row, figure},
};
use anyhow::{Context, Result, ensure};
use blob::{Chunking, Location, Options, Repository, StreamRef};
use dormouse_tests::{
    Choices, Server, Session, eventually,
    place::{bytes_below, files_below},
    server,
};
use serde_json::json;
use snapshot::parcel::{TreeRef, pack_tree, unpack_tree};
use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{Cursor, Read},
    os::unix::fs::FileExt,
    path::Path,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use zstd::bulk::{Compressor, Decompressor};

const MIB: usize = 1 << 20;

/// The plain steps compress pieces of this size, each by itself.
const PIECE: usize = MIB;
/// How much is packed.
const BYTES: usize = 256 * MIB;
const ROUNDS: usize = 5;

/// A stream through the repository, beside BLAKE3 and zstd by hand on the same bytes with all processors; the first round
/// warms up and isn't counted.
pub fn streams() -> Result<Vec<Row>> {
    let scratch = scratch()?;
    let runtime = runtime()?;
    let data: Arc<[u8]> = mixed(BYTES).into();
    let (mut pack, mut raw_pack) = (Samples::default(), Samples::default());
    let (mut unpack, mut raw_unpack) = (Samples::default(), Samples::default());
    for round in 0..=ROUNDS {
        let dir = tempfile::tempdir_in(scratch.path())?;
        let place = Location::Folder(dir.path().join("repository"));
        let repository = runtime.block_on(Repository::create(&place, &options()))?;

        settle(dir.path())?;
        let start = Instant::now();
        let plain = Plain::pack(&data, dir.path())?;
        let by_hand = rate(BYTES, start.elapsed());

        settle(dir.path())?;
        let source = Cursor::new(data.clone());
        let start = Instant::now();
        let stream = runtime.block_on(pack_stream(&repository, source, Chunking::Content))?;
        let ours = rate(BYTES, start.elapsed());

        settle(dir.path())?;
        let start = Instant::now();
        plain.unpack(dir.path())?;
        let back_by_hand = rate(BYTES, start.elapsed());

        // Opened again, so that nothing is left in its cache.
        drop(repository);
        let repository = runtime.block_on(Repository::open(&place, &options()))?;
        settle(dir.path())?;
        let file = tempfile::tempfile_in(dir.path())?;
        let start = Instant::now();
        runtime.block_on(repository.read_to_file(&stream, file.try_clone()?))?;
        let back = rate(BYTES, start.elapsed());

        if round == 0 {
            expect_same(&file, &data)?;
            continue;
        }
        pack.push(ours);
        raw_pack.push(by_hand);
        unpack.push(back);
        raw_unpack.push(back_by_hand);
    }
    let row = |id, what: &str, ours: &Samples, raw: &Samples, tool: &str| {
        let raw = raw.median();
        Row::at_least(id, format!("{what} (256 MiB), p50 of {ROUNDS}"), ours.median(), "MB/s", 0.0)
            .times_raw(raw, 0.8)
            .beside(format!("{tool}: {}", figure(raw, "MB/s")))
    };
    Ok(vec![
        row("pack", "pack mixed data into a folder", &pack, &raw_pack, "BLAKE3 + zstd 1 on all cores, into a synced file"),
        row("unpack", "read it back into a file", &unpack, &raw_unpack, "zstd + BLAKE3 on all cores, into a file"),
    ])
}

async fn pack_stream(repository: &Repository, source: impl Read + Send + 'static, chunking: Chunking) -> Result<StreamRef> {
    let writer = repository.writer()?;
    let stream = writer.write_file(source, chunking).await?;
    writer.finish().await?;
    Ok(stream)
}

/// A figure for bytes that are wrong would say nothing.
fn expect_same(file: &File, data: &[u8]) -> Result<()> {
    let mut back = vec![0; data.len()];
    file.read_exact_at(&mut back, 0)?;
    ensure!(back == data, "other bytes came back than were packed");
    Ok(())
}

/// The plain steps: a file of pieces, in the order in which they were done.
struct Plain {
    file: File,
    pieces: Vec<Piece>,
}

struct Piece {
    at: u64,
    packed: usize,
    hash: blake3::Hash,
}

impl Plain {
    fn pack(data: &[u8], dir: &Path) -> Result<Plain> {
        let file = tempfile::tempfile_in(dir)?;
        let end = AtomicU64::new(0);
        let compress = |compressor: &mut Compressor<'_>, n: usize| {
            let piece = &data[n * PIECE..data.len().min((n + 1) * PIECE)];
            let hash = blake3::hash(piece);
            let packed = compressor.compress(piece)?;
            let at = end.fetch_add(packed.len() as u64, Ordering::Relaxed);
            file.write_all_at(&packed, at)?;
            Ok(Piece { at, packed: packed.len(), hash })
        };
        let pieces = on_all(data.len().div_ceil(PIECE), || Ok(Compressor::new(1)?), compress)?;
        file.sync_all()?;
        Ok(Plain { file, pieces })
    }

    fn unpack(&self, dir: &Path) -> Result<()> {
        let file = tempfile::tempfile_in(dir)?;
        let decompress = |decompressor: &mut Decompressor<'_>, n: usize| {
            let piece = &self.pieces[n];
            let mut packed = vec![0; piece.packed];
            self.file.read_exact_at(&mut packed, piece.at)?;
            let plain = decompressor.decompress(&packed, PIECE)?;
            ensure!(blake3::hash(&plain) == piece.hash, "piece {n} came back as another");
            Ok(file.write_all_at(&plain, (n * PIECE) as u64)?)
        };
        on_all(self.pieces.len(), || Ok(Decompressor::new()?), decompress).map(drop)
    }
}

/// Does `work` for every number below `count` on all processors, with a tool for each of them; the results are in order.
fn on_all<C, T: Send>(
    count: usize,
    tool: impl Fn() -> Result<C> + Sync,
    work: impl Fn(&mut C, usize) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let next = AtomicUsize::new(0);
    let share = || -> Result<Vec<(usize, T)>> {
        let (mut tool, mut own) = (tool()?, Vec::new());
        loop {
            let n = next.fetch_add(1, Ordering::Relaxed);
            if n >= count {
                return Ok(own);
            }
            own.push((n, work(&mut tool, n)?));
        }
    };
    let threads = thread::available_parallelism()?.get();
    let shares: Vec<Result<Vec<(usize, T)>>> = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(share)).collect();
        workers.into_iter().map(|worker| worker.join().expect("a worker fails by its result")).collect()
    });
    let mut done: Vec<(usize, T)> = shares.into_iter().collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
    done.sort_by_key(|(n, _)| *n);
    Ok(done.into_iter().map(|(_, result)| result).collect())
}

const IMAGE: usize = 300 * MIB;
const PAGE: usize = 4096;
const FORKS: usize = 20;

/// Twenty images of memory that each differ from the same one in a page of a hundred, in one store.
pub fn twenty_forks() -> Result<Vec<Row>> {
    let scratch = scratch()?;
    let runtime = runtime()?;
    let folder = scratch.path().join("repository");
    let repository = runtime.block_on(Repository::create(&Location::Folder(folder.clone()), &options()))?;
    let image = mixed(IMAGE);
    let pages = IMAGE / PAGE;
    let mut choices = Choices(FORKS as u64);
    let mut stored_one = f64::NAN;
    for fork in 0..FORKS {
        let mut changed = BTreeSet::new();
        while changed.len() < pages / 100 {
            changed.insert(choices.below(pages as u64) as usize);
        }
        let mut memory = image.clone();
        let mut noise = blake3::Hasher::new().update(b"fork").update(&fork.to_le_bytes()).finalize_xof();
        for page in changed {
            noise.fill(&mut memory[page * PAGE..(page + 1) * PAGE]);
        }
        runtime.block_on(pack_stream(&repository, Cursor::new(memory), Chunking::MEMORY))?;
        if fork == 0 {
            stored_one = bytes_below(&folder) as f64;
        }
    }
    let usage = runtime.block_on(repository.usage())?;
    let mib = |bytes: f64| bytes / MIB as f64;
    let stored = bytes_below(&folder) as f64;
    let beside = format!(
        "one image: {}; compressed, the store takes {}, {:.2} × that of one image",
        figure(mib(IMAGE as f64), "MiB"),
        figure(mib(stored), "MiB"),
        stored / stored_one
    );
    let what = format!("store of {FORKS} images of memory, each with 1 % of other pages, before compression");
    let row = Row::at_most("store-20-forks", what, mib(usage.plain_bytes as f64), "MiB", 0.0);
    Ok(vec![row.times_raw(mib(IMAGE as f64), 1.4).beside(beside)])
}

pub fn restic() -> Result<Vec<Row>> {
    // Older ones don't know their fastest level by name; Debian's is such a one.
    let knows = Command::new("restic").args(["version", "--compression", "fastest"]).output().context(NOT_INSTALLED)?;
    let compression = if knows.status.success() { "fastest" } else { "auto" };
    let name = format!("{} (compression {compression}, encrypted)", version("restic", "version")?);
    trees(Packer::Restic { compression }, &name, ["pack-vs-restic", "restore-vs-restic", "size-vs-restic"])
}

pub fn borg() -> Result<Vec<Row>> {
    let name = format!("{} (zstd 1)", version("borg", "--version")?);
    trees(Packer::Borg, &name, ["pack-vs-borg", "restore-vs-borg", "size-vs-borg"])
}

const NOT_INSTALLED: &str = "start the backup program; `cargo xtask bench` installs it";
const TREE_ROUNDS: usize = 3;

/// A tree packed and restored by us and by a backup program in turn; the first round warms up and isn't counted.
fn trees(packer: Packer, name: &str, [pack, restore, size]: [&'static str; 3]) -> Result<Vec<Row>> {
    let scratch = scratch()?;
    let tree = scratch.path().join("tree");
    make_tree(&tree)?;
    let (mut ours, mut theirs) = (Side::new(Packer::Ours(runtime()?)), Side::new(packer));
    for round in 0..=TREE_ROUNDS {
        ours.round(&tree, scratch.path(), round > 0)?;
        theirs.round(&tree, scratch.path(), round > 0)?;
    }
    let (mib, files) = (bytes_below(&tree) as f64 / MIB as f64, files_below(&tree).len());
    let row = |id, what: String, ours: &Samples, theirs: &Samples, unit| {
        let raw = theirs.median();
        let row = Row::at_most(id, what, ours.median(), unit, 0.0).times_raw(raw, 1.0);
        let beside = format!("{name}: {}", figure(raw, unit));
        Row { target_text: "≤ 1 × raw (a comparison)".to_owned(), ..row.beside(beside) }
    };
    let what = format!("pack a tree of {mib:.0} MiB in {files} files, p50 of {TREE_ROUNDS}");
    let into = format!("restore it, not synced, p50 of {TREE_ROUNDS}");
    Ok(vec![
        row(pack, what, &ours.pack, &theirs.pack, "ms"),
        row(restore, into, &ours.restore, &theirs.restore, "ms"),
        row(size, "size of its store".to_owned(), &ours.size, &theirs.size, "MiB"),
    ])
}

/// One who packs, and how long it took.
struct Side {
    packer: Packer,
    pack: Samples,
    restore: Samples,
    size: Samples,
}

impl Side {
    fn new(packer: Packer) -> Side {
        Side { packer, pack: Samples::default(), restore: Samples::default(), size: Samples::default() }
    }

    /// Packs into a fresh store and restores into a fresh directory.
    fn round(&mut self, tree: &Path, scratch: &Path, counts: bool) -> Result<()> {
        let dir = tempfile::tempdir_in(scratch)?;
        let (home, store, restored) = (dir.path().join("home"), dir.path().join("store"), dir.path().join("restored"));
        fs::create_dir(&home)?;
        self.packer.init(&home, &store)?;
        let (mut pack, mut restore) = (Samples::default(), Samples::default());
        settle(scratch)?;
        pack.time(|| self.packer.pack(&home, &store, tree))?;
        settle(scratch)?;
        restore.time(|| self.packer.restore(&home, &store, &restored))?;
        if counts {
            self.pack.push(pack.median());
            self.restore.push(restore.median());
            self.size.push(bytes_below(&store) as f64 / MIB as f64);
            return Ok(());
        }
        // What is fast because it leaves something out doesn't count.
        finish(Command::new("diff").args(["-r", "--no-dereference"]).arg(tree).arg(&restored))
    }
}

/// Who can pack a tree.
enum Packer {
    Ours(Runtime),
    Restic { compression: &'static str },
    Borg,
}

/// What the packed tree is called in its store.
const NAME: &str = "tree";

impl Packer {
    /// Makes a store. Not timed: restic takes its time on purpose, to derive a key.
    fn init(&self, home: &Path, store: &Path) -> Result<()> {
        match self {
            Packer::Ours(runtime) => {
                Ok(runtime.block_on(Repository::create(&Location::Folder(store.to_owned()), &options())).map(drop)?)
            }
            Packer::Restic { .. } => finish(tool("restic", home).arg("--quiet").arg("--repo").arg(store).arg("init")),
            Packer::Borg => finish(tool("borg", home).args(["init", "--encryption=none"]).arg(store)),
        }
    }

    fn pack(&self, home: &Path, store: &Path, tree: &Path) -> Result<()> {
        match self {
            Packer::Ours(runtime) => runtime.block_on(pack_ours(store, tree)),
            Packer::Restic { compression } => {
                let mut command = tool("restic", home);
                command.current_dir(tree).arg("--quiet").arg("--repo").arg(store);
                finish(command.args(["--compression", compression, "backup", "."]))
            }
            Packer::Borg => {
                let mut command = tool("borg", home);
                command.current_dir(tree).args(["create", "--compression", "zstd,1"]);
                finish(command.arg(format!("{}::{NAME}", store.display())).arg("."))
            }
        }
    }

    /// Into a directory that isn't there yet.
    fn restore(&self, home: &Path, store: &Path, into: &Path) -> Result<()> {
        match self {
            Packer::Ours(runtime) => runtime.block_on(restore_ours(store, into)),
            Packer::Restic { .. } => {
                let mut command = tool("restic", home);
                command.arg("--quiet").arg("--repo").arg(store);
                finish(command.args(["restore", "latest", "--target"]).arg(into))
            }
            Packer::Borg => {
                fs::create_dir(into)?;
                let archive = format!("{}::{NAME}", store.display());
                finish(tool("borg", home).current_dir(into).arg("extract").arg(archive))
            }
        }
    }
}

/// Opens the store, as the other programs do at every call.
async fn pack_ours(store: &Path, tree: &Path) -> Result<()> {
    let repository = Repository::open(&Location::Folder(store.to_owned()), &options()).await?;
    let writer = repository.writer()?;
    let packed = pack_tree(tree, &writer).await?;
    writer.commit(NAME, &serde_json::to_vec(&packed)?).await?;
    Ok(())
}

async fn restore_ours(store: &Path, into: &Path) -> Result<()> {
    let repository = Repository::open(&Location::Folder(store.to_owned()), &options()).await?;
    let manifest = repository.manifest(NAME).await?.context("the tree is in the store")?;
    let tree: TreeRef = serde_json::from_slice(&manifest)?;
    Ok(unpack_tree(&repository, &tree, into).await?)
}

/// A backup program that keeps everything in `home`, and that the developer's own settings don't reach.
fn tool(program: &str, home: &Path) -> Command {
    let mut command = Command::new(program);
    command.env_clear().envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
    command.env("HOME", home).env("TMPDIR", home).env("LC_ALL", "C.UTF-8");
    command.env("RESTIC_PASSWORD", "bench").env("RESTIC_CACHE_DIR", home.join("restic"));
    command.env("BORG_BASE_DIR", home.join("borg")).env("BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK", "yes");
    command.env("BORG_RELOCATED_REPO_ACCESS_IS_OK", "yes");
    command
}

fn finish(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("start {}", command.get_program().display()))?;
    let said = [output.stdout, output.stderr].concat();
    ensure!(output.status.success(), "{command:?}: {}: {}", output.status, String::from_utf8_lossy(&said).trim());
    Ok(())
}

/// Name and version, such as `borg 1.2.4`.
fn version(program: &str, how: &str) -> Result<String> {
    let output = Command::new(program).arg(how).output().context(NOT_INSTALLED)?;
    ensure!(output.status.success(), "{program} {how}: {}", String::from_utf8_lossy(&output.stderr).trim());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(text.split_whitespace().take(2).collect::<Vec<_>>().join(" "))
}

const SMALL_FILES: usize = 2000;
const LARGE_FILES: usize = 5;
/// A tree of real files of many sizes, where the machine has it.
const REAL: &str = "/usr/lib/python3.11";

/// About 300 MiB: small files, large ones, and real ones.
fn make_tree(tree: &Path) -> Result<()> {
    let mut choices = Choices(SMALL_FILES as u64);
    let mut sizes: Vec<usize> = (0..SMALL_FILES).map(|_| 1 + choices.below(48 << 10) as usize).collect();
    sizes.extend([40 * MIB; LARGE_FILES]);
    let data = mixed(sizes.iter().sum());
    let mut rest = &data[..];
    for (n, size) in sizes.into_iter().enumerate() {
        let (file, after) = rest.split_at(size);
        let dir = tree.join((n / 50).to_string());
        fs::create_dir_all(&dir)?;
        fs::write(dir.join(n.to_string()), file)?;
        rest = after;
    }
    if Path::new(REAL).is_dir() {
        finish(Command::new("cp").arg("-a").arg(REAL).arg(tree))?;
    }
    Ok(())
}

const SLEEPERS: usize = 10;
const MEMORY: &str = r#"import os, time; data = os.urandom(8 << 20); print("ready", flush=True); time.sleep(1e9)"#;
const DISK: usize = 4 * MIB;
/// A session is noted as given up before its files are removed.
const MOMENT: Duration = Duration::from_secs(10);

/// What of sessions that have long slept lies outside of the object store.
pub fn cache() -> Result<Vec<Row>> {
    let args = ["--pack-after", "1s", "--cache-size", "0"].map(str::to_owned).to_vec();
    let server = Server::with(server::Options { args, ..server::Options::default() });
    let sessions: Vec<Session> = (0..SLEEPERS).map(|_| server.session()).collect();
    for session in &sessions {
        session.out(&format!("head -c {DISK} /dev/urandom > /root/data; sync"));
        let exec = session.start_sh(&format!("exec python3 -c '{MEMORY}'"));
        eventually("Python runs", || (session.output(&exec, "stdout") == b"ready\n").then_some(()));
    }
    let awake = unpacked(server.data())?;
    ensure!(awake >= (SLEEPERS * DISK) as u64, "running sessions have {awake} bytes where they are looked for");
    for session in &sessions {
        session.hibernate();
    }
    // One more each time, so that the patience is for one.
    for count in 1..=SLEEPERS {
        eventually(&format!("{count} sessions are packed and given up"), || (away(&server) >= count).then_some(()));
    }
    let since = Instant::now();
    let mut left = unpacked(server.data())?;
    while left > 0 && since.elapsed() < MOMENT {
        thread::sleep(Duration::from_millis(20));
        left = unpacked(server.data())?;
    }
    let mib = |bytes: u64| figure(bytes as f64 / MIB as f64, "MiB");
    let store = bytes_below(&server.data().join("objects"));
    let beside = format!("disks while they ran: {}; object store: {}", mib(awake), mib(store));
    server.delete_all_and_check();
    let what = format!("disk that {SLEEPERS} packed sessions take beside the object store, without a cache");
    Ok(vec![Row::at_most("cache-after-a-day", what, left as f64, "bytes", 0.0).beside(beside)])
}

/// How many sessions the object store alone has.
fn away(server: &Server) -> usize {
    let list = server.client.get("/v1/sessions?limit=1000").expect(200).json();
    let is_away = |shown: &&serde_json::Value| shown["packed"] == json!(true) && shown["local"] == json!(false);
    list["items"].as_array().map_or(0, |items| items.iter().filter(is_away).count())
}

/// Bytes of disks and memory that lie in the data directory as they are.
fn unpacked(data: &Path) -> Result<u64> {
    let mut bytes = bytes_below(&data.join("snapshots")) + bytes_below(&data.join("layers"));
    for session in fs::read_dir(data.join("sessions"))? {
        let dir = session?.path();
        bytes += bytes_below(&dir.join("disk")) + bytes_below(&dir.join("image"));
    }
    Ok(bytes)
}

fn scratch() -> Result<TempDir> {
    Ok(tempfile::Builder::new().prefix("dormouse-bench-").tempdir()?)
}

fn runtime() -> Result<Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().enable_all().build()?)
}

fn options() -> Options {
    Options::new("bench")
}

/// Has everything written, so that nobody pays for what the one before has left.
fn settle(dir: &Path) -> Result<()> {
    Ok(rustix::fs::syncfs(File::open(dir)?)?)
}

/// About what disks and memory hold: a third programs and texts, a third that doesn't compress, a third half-empty pages. The
/// same as crates/blob/tests/speed.rs has.
fn mixed(bytes: usize) -> Vec<u8> {
    let mut noise = blake3::Hasher::new().update(b"mixed").finalize_xof();
    let mut out = vec![0; bytes];
    for (n, part) in out.chunks_mut(MIB).enumerate() {
        noise.fill(part);
        match n % 3 {
            0 => {
                // Words of a small vocabulary.
                for (at, byte) in part.iter_mut().enumerate() {
                    *byte = if at % 6 == 5 { b' ' } else { b'a' + *byte % 16 };
                }
            }
            1 => {}
            // The last page may be a short one.
            _ => part.chunks_mut(PAGE).for_each(|page| page.iter_mut().skip(1500).for_each(|byte| *byte = 0)),
        }
    }
    out
}
