//! What the tests of layers have in common: disks, and full copies of what they show.

use crate::{
    Hash,
    disk::{DiskLayout, Unmounted, unmount},
    layer::{Capture, Layer, LayerStore},
    overlay,
};
use model::{LayerId, SessionId, Timestamp};
use std::{
    collections::{BTreeMap, HashMap},
    ffi::CStr,
    fs, io,
    os::unix::{
        ffi::{OsStrExt, OsStringExt},
        fs::{MetadataExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Shorter than in use, so that tests needn't wait for long. A tick of the kernel is 10 ms at the most.
pub(super) const SETTLE: Duration = Duration::from_millis(15);
pub(super) const LINKS_MAX: u64 = 60_000;

/// Whether the long forms of tests are asked for.
pub(super) fn is_long() -> bool {
    std::env::var_os("DORMOUSE_LONG").is_some()
}

/// A template, a guest layer, layers, sessions.
pub(super) struct World {
    pub(super) dir: tempfile::TempDir,
    pub(super) store: LayerStore,
    pub(super) bottom: Vec<PathBuf>,
}

impl World {
    /// `None` (said on the way) where this process may not mount.
    pub(super) fn new() -> Option<World> {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: needs root");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let store = LayerStore::open(dir.path().join("layers")).unwrap();
        let bottom = vec![dir.path().join("guest"), dir.path().join("template")];
        bottom.iter().for_each(|dir| fs::create_dir(dir).unwrap());
        Some(World { dir, store, bottom })
    }

    /// A file of the template.
    pub(super) fn template(&self, path: &str, content: &str) {
        put(&self.bottom[1].join(path), content);
    }

    pub(super) fn lower(&self, layers: &[LayerId]) -> Vec<PathBuf> {
        layers.iter().map(|id| self.store.path(*id)).chain(self.bottom.iter().cloned()).collect()
    }

    /// A session with a fresh upper directory above these layers, mounted.
    pub(super) fn session(&self, layers: &[LayerId]) -> Session {
        let own = self.dir.path().join(format!("session-{}", SessionId::new()));
        let disk = DiskLayout::new(own.join("disk"));
        disk.create().unwrap();
        if let Some(top) = layers.first() {
            self.store.dress_root(*top, &disk.upper()).unwrap();
        }
        let session = Session { disk, at: own.join("m"), layers: layers.to_vec() };
        session.mount(self);
        session
    }

    /// What a fork of these layers sees.
    pub(super) fn seen(&self, layers: &[LayerId]) -> Listing {
        let fork = self.session(layers);
        let seen = listing(&fork.at);
        fork.end();
        seen
    }

    pub(super) fn capture(&self, session: &Session, previous: Option<LayerId>) -> Capture {
        let begun = Capture::begin(&self.store, LayerId::new(), &session.disk.upper(), previous);
        begun.unwrap().with_bounds(SETTLE, LINKS_MAX)
    }

    /// A layer of a session at rest, as far as this test is concerned.
    pub(super) fn layer(&self, session: &Session, previous: Option<LayerId>) -> Layer {
        let mut capture = self.capture(session, previous);
        capture.freeze().unwrap();
        finish(capture)
    }

    pub(super) fn tree(&self, layer: &Layer) -> PathBuf {
        self.store.path(layer.id)
    }
}

pub(super) fn finish(capture: Capture) -> Layer {
    capture.finish(SessionId::new(), Timestamp(1_700_000_000_000)).unwrap()
}

/// A session's disk and where it is mounted.
pub(super) struct Session {
    pub(super) disk: DiskLayout,
    pub(super) at: PathBuf,
    pub(super) layers: Vec<LayerId>,
}

impl Session {
    pub(super) fn mount(&self, world: &World) {
        self.disk.mount(&world.lower(&self.layers), &self.at).unwrap();
    }

    pub(super) fn unmount(&self) {
        assert_eq!(unmount(&self.at).unwrap(), Unmounted::Clean, "{}", self.at.display());
    }

    /// Unmounts it and removes all that is its own.
    pub(super) fn end(self) {
        self.unmount();
        fs::remove_dir_all(self.at.parent().unwrap()).unwrap();
    }

    pub(super) fn path(&self, path: &str) -> PathBuf {
        self.at.join(path)
    }

    pub(super) fn upper(&self, path: &str) -> PathBuf {
        self.disk.upper().join(path)
    }

    /// The layers of a fork that goes on above `top`.
    pub(super) fn above(&self, top: &Layer) -> Vec<LayerId> {
        [&[top.id], &self.layers[..]].concat()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // After a failed assertion, so that the directory can be removed.
        let _ = unmount(&self.at);
    }
}

pub(super) fn put(path: &Path, content: impl AsRef<[u8]>) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

pub(super) fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap()
}

pub(super) fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Waits until a file's last change can be told from a later one.
pub(super) fn wait_until_calm(path: &Path) {
    wait(path, SETTLE);
}

pub(super) fn wait(path: &Path, settle: Duration) {
    let meta = path.symlink_metadata().unwrap();
    let calm = UNIX_EPOCH + Duration::new(meta.ctime() as u64, meta.ctime_nsec() as u32) + settle + Duration::from_millis(1);
    if let Ok(left) = calm.duration_since(SystemTime::now()) {
        std::thread::sleep(left);
    }
}

/// Everything that a program can see of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Item {
    mode: u32,
    owner: (u32, u32),
    modified: (i64, i64),
    device: u64,
    size: u64,
    /// A hash of the bytes; of a symlink, of its target.
    content: Option<Hash>,
    /// The first name of the same file.
    first: PathBuf,
    attributes: BTreeMap<Vec<u8>, Vec<u8>>,
}

pub(super) type Listing = BTreeMap<PathBuf, Item>;

/// A full account of a tree as a program sees it.
pub(super) fn listing(root: &Path) -> Listing {
    list(root, |name| name.starts_with(b"user.") || name == b"trusted.mine")
}

/// The same of a layer itself, with the overlay's attributes.
pub(super) fn raw(root: &Path) -> Listing {
    list(root, |_| true)
}

fn list(root: &Path, keeps: impl Fn(&[u8]) -> bool) -> Listing {
    let (mut found, mut first) = (Listing::new(), HashMap::new());
    for entry in walkdir::WalkDir::new(root).sort_by_file_name() {
        let entry = entry.unwrap();
        let meta = entry.path().symlink_metadata().unwrap_or_else(|e| panic!("{}: {e}", entry.path().display()));
        let path = entry.path().strip_prefix(root).unwrap().to_owned();
        let content = match meta.file_type() {
            kind if kind.is_file() => Some(Hash::of(&fs::read(entry.path()).unwrap())),
            kind if kind.is_symlink() => Some(Hash::of(fs::read_link(entry.path()).unwrap().as_os_str().as_bytes())),
            _ => None,
        };
        let first = first.entry((meta.dev(), meta.ino())).or_insert_with(|| path.clone()).clone();
        let is_file = content.is_some();
        let item = Item {
            mode: meta.mode(),
            owner: (meta.uid(), meta.gid()),
            modified: (meta.mtime(), meta.mtime_nsec()),
            device: if is_file || meta.is_dir() { 0 } else { meta.rdev() },
            size: if is_file { meta.size() } else { 0 },
            content,
            // All whiteouts are one file, as far as it goes.
            first: if is_file { first } else { PathBuf::new() },
            attributes: attributes(entry.path()).into_iter().filter(|(name, _)| keeps(name)).collect(),
        };
        found.insert(path, item);
    }
    found
}

pub(super) fn attributes(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut names = vec![0; 64 << 10];
    let length = rustix::fs::llistxattr(path, names.as_mut_slice()).unwrap();
    let names = names[..length].split_inclusive(|b| *b == 0).map(|name| CStr::from_bytes_with_nul(name).unwrap());
    let value = |name: &CStr| {
        let mut value = vec![0; 64 << 10];
        let length = rustix::fs::lgetxattr(path, name, value.as_mut_slice()).unwrap();
        value[..length].to_vec()
    };
    names.map(|name| (name.to_bytes().to_vec(), value(name))).collect()
}

pub(super) fn set_attribute(path: &Path, name: &str, value: impl AsRef<[u8]>) -> rustix::io::Result<()> {
    rustix::fs::lsetxattr(path, name, value.as_ref(), rustix::fs::XattrFlags::empty())
}

/// Says which names differ and how, since two whole listings are too much to look at.
pub(super) fn assert_same(found: &Listing, expected: &Listing, what: &str) {
    let mut wrong = Vec::new();
    for path in found.keys().chain(expected.keys()).collect::<std::collections::BTreeSet<_>>() {
        let (found, expected) = (found.get(path), expected.get(path));
        if found != expected {
            wrong.push(format!("'{}': found {found:?}\n  expected {expected:?}", path.display()));
        }
    }
    assert!(wrong.is_empty(), "{what}:\n{}", wrong.join("\n"));
}

/// What the kernel shows of some layers, top-most first, at a place of its own while `look` runs.
pub(super) fn merged<T>(world: &World, layers: &[PathBuf], look: impl FnOnce(&Path) -> T) -> T {
    let at = world.dir.path().join(format!("merged-{}", SessionId::new()));
    let empty = world.dir.path().join("empty");
    for dir in [&at, &empty] {
        fs::create_dir_all(dir).unwrap();
    }
    // An overlay needs two layers at least.
    let layers: Vec<&Path> = layers.iter().map(PathBuf::as_path).chain([empty.as_path()]).collect();
    let mount = overlay::make(&layers, None).unwrap();
    let flags = rustix::mount::MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    rustix::mount::move_mount(&mount, "", rustix::fs::CWD, &at, flags).unwrap();
    let seen = look(&at);
    drop(mount);
    assert_eq!(unmount(&at).unwrap(), Unmounted::Clean);
    seen
}

pub(super) fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

pub(super) fn meta(path: &Path) -> fs::Metadata {
    path.symlink_metadata().unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

pub(super) fn is_gone(path: &Path) -> bool {
    path.symlink_metadata().is_err_and(|e| e.kind() == io::ErrorKind::NotFound)
}

/// All names in a layer's directory, whoever made it.
pub(super) fn all_in(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir).unwrap().map(|e| PathBuf::from(std::ffi::OsString::from_vec(e.unwrap().file_name().into_vec()))).collect()
}
