//! What the tests have in common: a repository, and a full account of a tree.

use crate::{
    Hash,
    parcel::{ParcelError, TreeRef, pack_tree, unpack_tree},
};
use blob::{Location, Options, Repository, StreamRef, Written};
use rustix::fs::{FileType, XattrFlags};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ffi::{CStr, CString, OsStr},
    fs::{self, File},
    io::Read,
    os::unix::{
        ffi::OsStrExt,
        fs::{FileExt, MetadataExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    time::Duration,
};

/// A repository in a directory of its own.
pub(super) struct World {
    pub(super) dir: tempfile::TempDir,
    pub(super) repository: Repository,
}

impl World {
    pub(super) async fn new() -> World {
        let dir = tempfile::tempdir().unwrap();
        let repository = Repository::create(&place(dir.path()), &options()).await.unwrap();
        World { dir, repository }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A new, empty directory.
    pub(super) fn empty(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir(&path).unwrap();
        path
    }

    /// Opens the repository once more, with nothing in its caches.
    pub(super) async fn reopened(&self) -> Result<Repository, blob::Error> {
        Repository::open(&place(self.dir.path()), &Options::reading().with_patience(Duration::from_secs(5))).await
    }

    /// The files that hold chunks.
    pub(super) fn packs(&self) -> Vec<PathBuf> {
        let entries = walkdir::WalkDir::new(self.dir.path().join("store/packs")).sort_by_file_name().into_iter();
        entries.map(|entry| entry.unwrap()).filter(|entry| entry.file_type().is_file()).map(|entry| entry.into_path()).collect()
    }

    pub(super) async fn pack(&self, dir: &Path) -> (TreeRef, Written) {
        let writer = self.repository.writer().unwrap();
        let tree = pack_tree(dir, &writer).await.unwrap();
        (tree, writer.finish().await.unwrap())
    }

    pub(super) async fn unpack(&self, tree: &TreeRef, into: &str) -> Result<PathBuf, ParcelError> {
        let into = self.path(into);
        unpack_tree(&self.repository, tree, &into).await.map(|()| into)
    }

    /// A stream of these bytes, which says that it is a tree with so much in it.
    pub(super) async fn claim(&self, bytes: &[u8], entries: u64, plain_bytes: u64) -> TreeRef {
        let writer = self.repository.writer().unwrap();
        let stream = writer.write_stream(bytes, blob::Chunking::Content).await.unwrap();
        writer.finish().await.unwrap();
        TreeRef { digest: TreeRef::digest_of(&stream), stream, entries, plain_bytes }
    }

    pub(super) async fn bytes(&self, stream: &StreamRef) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.repository.read_stream(stream, &mut bytes).await.unwrap();
        bytes
    }
}

fn place(dir: &Path) -> Location {
    Location::parse(dir.join("store").to_str().unwrap()).unwrap()
}

fn options() -> Options {
    Options::new("test").with_patience(Duration::from_secs(5))
}

/// False, said on the way, where this process may not make what disks have.
pub(super) fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("skipped: needs root");
    }
    is_root
}

/// Bytes that don't compress, the same for the same seed.
pub(super) fn random(length: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; length];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

/// Everything about a file that a copy keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Item {
    mode: u32,
    owner: (u32, u32),
    modified: (i64, i64),
    device: u64,
    size: u64,
    /// Where bytes are, and where holes.
    data: Vec<(u64, u64)>,
    content: Option<Hash>,
    target: Option<PathBuf>,
    /// The first name of the same file.
    first: PathBuf,
    attributes: BTreeMap<CString, Vec<u8>>,
}

pub(super) type Listing = BTreeMap<PathBuf, Item>;

/// A full account of a tree.
pub(super) fn listing(root: &Path) -> Listing {
    let (mut found, mut first) = (Listing::new(), HashMap::new());
    for entry in walkdir::WalkDir::new(root).sort_by_file_name() {
        let path = entry.unwrap().into_path();
        let below = path.strip_prefix(root).unwrap().to_owned();
        let meta = path.symlink_metadata().unwrap();
        let kind = FileType::from_raw_mode(meta.mode());
        if kind == FileType::CharacterDevice && meta.rdev() == 0 {
            // A whiteout is its name and nothing else.
            found.insert(below, whiteout());
            continue;
        }
        let is_file = kind == FileType::RegularFile;
        let first = first.entry((meta.dev(), meta.ino())).or_insert_with(|| below.clone()).clone();
        let item = Item {
            mode: meta.mode(),
            owner: (meta.uid(), meta.gid()),
            modified: (meta.mtime(), meta.mtime_nsec()),
            device: meta.rdev(),
            size: if is_file { meta.size() } else { 0 },
            data: if is_file { data(&path) } else { Vec::new() },
            content: is_file.then(|| Hash::of(&fs::read(&path).unwrap())),
            target: meta.is_symlink().then(|| fs::read_link(&path).unwrap()),
            first,
            attributes: attributes(&path),
        };
        found.insert(below, item);
    }
    found
}

pub(super) fn whiteout() -> Item {
    Item {
        mode: FileType::CharacterDevice.as_raw_mode(),
        owner: (0, 0),
        modified: (0, 0),
        device: 0,
        size: 0,
        data: Vec::new(),
        content: None,
        target: None,
        first: PathBuf::new(),
        attributes: BTreeMap::new(),
    }
}

/// Where a file has bytes, told by the kernel.
pub(super) fn data(path: &Path) -> Vec<(u64, u64)> {
    use rustix::fs::{SeekFrom, seek};
    let file = File::open(path).unwrap();
    let (mut found, mut at) = (Vec::new(), 0);
    while let Ok(from) = seek(&file, SeekFrom::Data(at)) {
        at = seek(&file, SeekFrom::Hole(from)).unwrap();
        found.push((from, at));
    }
    found
}

pub(super) fn attributes(path: &Path) -> BTreeMap<CString, Vec<u8>> {
    let mut names = vec![0; 64 << 10];
    let length = rustix::fs::llistxattr(path, names.as_mut_slice()).unwrap();
    let names = names[..length].split_inclusive(|b| *b == 0).map(|name| CStr::from_bytes_with_nul(name).unwrap());
    let value = |name: &CStr| {
        let mut value = vec![0; 64 << 10];
        let length = rustix::fs::lgetxattr(path, name, value.as_mut_slice()).unwrap();
        value[..length].to_vec()
    };
    names.map(|name| (name.to_owned(), value(name))).collect()
}

pub(super) fn set_attribute(path: &Path, name: &str, value: impl AsRef<[u8]>) {
    rustix::fs::lsetxattr(path, name, value.as_ref(), XattrFlags::empty()).unwrap();
}

/// Says which names differ and how.
pub(super) fn assert_same(found: &Listing, expected: &Listing, what: &str) {
    let mut wrong = Vec::new();
    for path in found.keys().chain(expected.keys()).collect::<BTreeSet<_>>() {
        let (found, expected) = (found.get(path), expected.get(path));
        if found != expected {
            wrong.push(format!("'{}': found {found:?}\n  expected {expected:?}", path.display()));
        }
    }
    assert!(wrong.is_empty(), "{what}:\n{}", wrong.join("\n"));
}

pub(super) fn put(path: &Path, content: impl AsRef<[u8]>) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

pub(super) fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

pub(super) fn modified(path: &Path, seconds: i64, nanoseconds: i64) {
    use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, utimensat};
    let time = Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
    utimensat(CWD, path, &Timestamps { last_access: time, last_modification: time }, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

pub(super) fn make(path: &Path, kind: FileType, device: u64) {
    let (mode, cwd) = (rustix::fs::Mode::RUSR, rustix::fs::CWD);
    rustix::fs::mknodat(cwd, path, kind, mode, device).unwrap();
}

/// Puts bytes at these places of a file of this size, and nothing between.
pub(super) fn sparse(path: &Path, size: u64, places: &[(u64, &[u8])]) {
    let file = File::create_new(path).unwrap();
    file.set_len(size).unwrap();
    for (at, bytes) in places {
        file.write_all_at(bytes, *at).unwrap();
    }
}

pub(super) fn name(bytes: &[u8]) -> &OsStr {
    OsStr::from_bytes(bytes)
}

/// Turns one bit of a file over; called again, back.
pub(super) fn flip(path: &Path, at: u64) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
}

pub(super) fn contents(path: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    File::open(path).unwrap().read_to_end(&mut bytes).unwrap();
    bytes
}
