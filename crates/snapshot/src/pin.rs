//! Private copies of the programs that sandboxes run on: the runtime and the guest.
//!
//! ```text
//! DIR/HASH/NAME            a program; never changed, never linked to the original
//! DIR/layers/HASH/         the guest with this hash as a layer of a disk
//! DIR/cache/KEY            which program a file of the machine was, when we last looked
//! DIR/tmp/                 copies being made
//! ```
//! A memory image contains processes of exactly one runtime and one guest. An upgrade of the machine replaces the
//! original; the copy stays for as long as a session sleeps on it.

use crate::{
    Hash, fsutil,
    tree::{self, TreeError},
};
use std::{
    collections::HashSet,
    fs::{self, File, Metadata},
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::{Path, PathBuf},
};

/// Where the guest lies inside every sandbox.
pub const GUEST_PATH: &str = "/usr/lib/dormouse/dormouse-guest";

/// The directories of a guest's layer.
const LAYER_DIRS: &[&str] = &["", "usr", "usr/bin", "usr/lib", "usr/lib/dormouse"];

/// Further names of the guest inside; it tells by `argv[0]` which it is to be. Names may be added, never taken away: layers
/// that were made with them come back from the blob store.
const GUEST_NAMES: &[&str] =
    &["usr/bin/dormouse-guest", "usr/bin/dormouse-ctl", "usr/bin/sudo", "usr/bin/su", "usr/bin/systemctl"];

/// Why a program couldn't be pinned or found.
#[derive(Debug, thiserror::Error)]
pub enum PinError {
    #[error("there is no pinned program with the address {0}")]
    NotFound(Hash),
    #[error("{} is not a program file", .0.display())]
    NotAFile(PathBuf),
    #[error("'{0}' can't name a program")]
    BadName(String),
    #[error("what should be the program with the address {expected} has the address {found}")]
    Other { expected: Hash, found: Hash },
    #[error("what should be the layer of the guest {guest} isn't: {what}")]
    NoLayer { guest: Hash, what: String },
    #[error(transparent)]
    Tree(#[from] TreeError),
    #[error("{} is being replaced just now: try again", .0.display())]
    Changing(PathBuf),
    #[error("can't {what} {}: {source}", path.display())]
    Io { what: &'static str, path: PathBuf, source: io::Error },
}

fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> PinError {
    let path = path.to_owned();
    move |source| PinError::Io { what, path, source }
}

/// A program that stays as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PinnedBinary {
    pub hash: Hash,
    pub path: PathBuf,
}

/// The folder of pinned programs of one server.
#[derive(Debug, Clone)]
pub struct BinaryStore {
    dir: PathBuf,
}

impl BinaryStore {
    /// Opens the folder, made where it is missing; half-made copies of a dead server are removed.
    ///
    /// # Errors
    /// [`PinError::Io`].
    pub fn open(dir: impl Into<PathBuf>) -> Result<BinaryStore, PinError> {
        let store = BinaryStore { dir: dir.into() };
        fsutil::ensure_dir(&store.dir, 0o700).map_err(io_error("create", &store.dir))?;
        let lock = store.lock_file()?;
        // Whoever makes a copy holds the lock: when it is free, everything in `tmp` is dead.
        if lock.try_lock().is_ok() {
            let tmp = store.part("tmp");
            fsutil::remove_tree_if_there(&tmp).map_err(io_error("clean", &tmp))?;
        }
        for part in ["tmp", "cache", "layers"] {
            let path = store.part(part);
            fsutil::ensure_dir(&path, 0o700).map_err(io_error("create", &path))?;
        }
        Ok(store)
    }

    /// The private copy of the program at `path`. The file is read only when it is another than at the last call, told
    /// by its path, device, inode, size and times.
    ///
    /// # Errors
    /// [`PinError::NotAFile`], [`PinError::Changing`], [`PinError::Io`].
    pub fn ensure(&self, path: &Path) -> Result<PinnedBinary, PinError> {
        let path = fs::canonicalize(path).map_err(io_error("find", path))?;
        let name = path.file_name().and_then(|n| n.to_str()).ok_or_else(|| PinError::NotAFile(path.clone()))?.to_owned();
        check_name(&name)?;
        let mut source = File::open(&path).map_err(io_error("open", &path))?;
        let before = source.metadata().map_err(io_error("read", &path))?;
        if !before.is_file() {
            return Err(PinError::NotAFile(path));
        }
        let lock = self.lock_file()?;
        lock.lock_shared().map_err(io_error("lock", &self.dir))?;
        let cached = self.part("cache").join(cache_key(&path, &before).to_string());
        let known = fs::read_to_string(&cached).ok().and_then(|text| text.trim().parse().ok());
        if let Some(hash) = known
            && let Some(found) = self.find(hash)?
            && fs::metadata(&found.path).is_ok_and(|m| m.len() == before.len())
        {
            return Ok(found);
        }
        let pinned = self.keep(&name, &mut source, None)?;
        let after = source.metadata().map_err(io_error("read", &path))?;
        // Not by the change time: a hard link made meanwhile moves it, and the bytes are the same.
        if facts(&before)[..5] != facts(&after)[..5] {
            return Err(PinError::Changing(path));
        }
        fsutil::write_atomic(&cached, pinned.hash.to_string().as_bytes(), 0o600).map_err(io_error("write", &cached))?;
        Ok(pinned)
    }

    /// The private copy of a program that this program carries in itself.
    ///
    /// # Errors
    /// [`PinError::BadName`], [`PinError::Io`].
    pub fn ensure_bytes(&self, name: &str, bytes: &[u8]) -> Result<PinnedBinary, PinError> {
        check_name(name)?;
        let lock = self.lock_file()?;
        lock.lock_shared().map_err(io_error("lock", &self.dir))?;
        match self.find(Hash::of(bytes))? {
            Some(found) => Ok(found),
            None => self.keep(name, &mut &bytes[..], None),
        }
    }

    /// A private copy of a program from elsewhere, which has to be the one with this address.
    ///
    /// # Errors
    /// [`PinError::Other`], [`PinError::BadName`], [`PinError::Io`].
    pub fn adopt(&self, hash: Hash, name: &str, file: &Path) -> Result<PinnedBinary, PinError> {
        check_name(name)?;
        let lock = self.lock_file()?;
        lock.lock_shared().map_err(io_error("lock", &self.dir))?;
        if let Some(found) = self.find(hash)? {
            return Ok(found);
        }
        let mut source = File::open(file).map_err(io_error("open", file))?;
        self.keep(name, &mut source, Some(hash))
    }

    /// Puts a guest's layer in its place that was made elsewhere: at `unpacked`, where nobody else changes it, and where it
    /// is gone afterwards, but for an error. It has to be exactly what [`BinaryStore::guest_layer`] makes, since all
    /// sessions with this guest will have it. One that is here already stays as it is.
    ///
    /// # Errors
    /// [`PinError::NoLayer`], [`PinError::Tree`], [`PinError::Io`].
    pub fn adopt_layer(&self, guest: Hash, unpacked: &Path) -> Result<PathBuf, PinError> {
        check_layer(unpacked, guest)?;
        let layer = self.layer_path(guest);
        let lock = self.lock_file()?;
        lock.lock_shared().map_err(io_error("lock", &self.dir))?;
        let building = self.temporary_dir()?;
        let root = building.path().join("layer");
        tree::relocate(unpacked, &root)?;
        let synced = File::open(&root).and_then(|root| Ok(rustix::fs::syncfs(&root)?));
        synced.map_err(io_error("sync", &root))?;
        self.publish(&root, &layer)?;
        Ok(layer)
    }

    /// The program with this address.
    ///
    /// # Errors
    /// [`PinError::NotFound`], [`PinError::Io`].
    pub fn get(&self, hash: Hash) -> Result<PinnedBinary, PinError> {
        self.find(hash)?.ok_or(PinError::NotFound(hash))
    }

    /// A layer with the guest `bytes` in its place, for the top of a disk's lower layers.
    ///
    /// # Errors
    /// [`PinError::Io`].
    pub fn guest_layer(&self, bytes: &[u8]) -> Result<PathBuf, PinError> {
        let layer = self.layer_path(Hash::of(bytes));
        if layer.is_dir() {
            return Ok(layer);
        }
        let lock = self.lock_file()?;
        lock.lock_shared().map_err(io_error("lock", &self.dir))?;
        let building = self.temporary_dir()?;
        let root = building.path().join("layer");
        write_layer(&root, bytes).map_err(io_error("write", &root))?;
        self.publish(&root, &layer)?;
        Ok(layer)
    }

    /// The layer with the guest of this address, as [`BinaryStore::guest_layer`] made it.
    ///
    /// # Errors
    /// [`PinError::NotFound`].
    pub fn layer_of(&self, guest: Hash) -> Result<PathBuf, PinError> {
        Some(self.layer_path(guest)).filter(|layer| layer.is_dir()).ok_or(PinError::NotFound(guest))
    }

    /// Removes every program and layer whose address isn't in `keep`, and says which. `keep` has to name what images
    /// need, what running sandboxes run on, and what this server starts sandboxes with.
    ///
    /// # Errors
    /// [`PinError::Io`].
    pub fn collect(&self, keep: &HashSet<Hash>) -> Result<Vec<Hash>, PinError> {
        let lock = self.lock_file()?;
        lock.lock().map_err(io_error("lock", &self.dir))?;
        let trash = self.temporary_dir()?;
        let mut removed = Vec::new();
        for (place, dir) in [("program", self.dir.clone()), ("layer", self.part("layers"))] {
            for entry in fs::read_dir(&dir).map_err(io_error("read", &dir))? {
                let entry = entry.map_err(io_error("read", &dir))?;
                let Some(hash) = entry.file_name().to_str().and_then(|name| name.parse::<Hash>().ok()) else { continue };
                if keep.contains(&hash) {
                    continue;
                }
                // Gone in one step: never a folder with a part of what belongs in it.
                let path = entry.path();
                fs::rename(&path, trash.path().join(format!("{place}-{hash}"))).map_err(io_error("remove", &path))?;
                removed.push(hash);
            }
        }
        self.forget(&removed)?;
        removed.sort();
        removed.dedup();
        Ok(removed)
    }

    fn forget(&self, removed: &[Hash]) -> Result<(), PinError> {
        let dir = self.part("cache");
        for entry in fs::read_dir(&dir).map_err(io_error("read", &dir))? {
            let path = entry.map_err(io_error("read", &dir))?.path();
            let hash = fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok());
            if hash.is_none_or(|hash| removed.contains(&hash)) {
                fsutil::remove_if_there(&path).map_err(io_error("remove", &path))?;
            }
        }
        Ok(())
    }

    fn find(&self, hash: Hash) -> Result<Option<PinnedBinary>, PinError> {
        let dir = self.part(&hash.to_string());
        match fs::read_dir(&dir) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(io_error("read", &dir)(e)),
            Ok(mut entries) => match entries.next() {
                None => Ok(None),
                Some(entry) => Ok(Some(PinnedBinary { hash, path: entry.map_err(io_error("read", &dir))?.path() })),
            },
        }
    }

    /// Copies the bytes and publishes the copy under its address. Never a link: that would change with the original.
    fn keep(&self, name: &str, source: &mut dyn Read, expected: Option<Hash>) -> Result<PinnedBinary, PinError> {
        let building = self.temporary_dir()?;
        let dir = building.path().join("program");
        let path = dir.join(name);
        let hash = copy_hashed(source, &dir, &path).map_err(io_error("write", &path))?;
        if let Some(expected) = expected.filter(|expected| *expected != hash) {
            return Err(PinError::Other { expected, found: hash });
        }
        let target = self.part(&hash.to_string());
        self.publish(&dir, &target)?;
        self.find(hash)?.ok_or(PinError::NotFound(hash))
    }

    fn publish(&self, built: &Path, target: &Path) -> Result<(), PinError> {
        match fs::rename(built, target) {
            Ok(()) => fsutil::sync_dir(target.parent().unwrap_or(&self.dir)).map_err(io_error("sync", target)),
            // Another was faster, with the same content.
            Err(e) if [io::ErrorKind::DirectoryNotEmpty, io::ErrorKind::AlreadyExists].contains(&e.kind()) => Ok(()),
            Err(e) => Err(io_error("publish", target)(e)),
        }
    }

    fn temporary_dir(&self) -> Result<tempfile::TempDir, PinError> {
        let tmp = self.part("tmp");
        tempfile::tempdir_in(&tmp).map_err(io_error("create a folder in", &tmp))
    }

    fn lock_file(&self) -> Result<File, PinError> {
        let path = self.part(".lock");
        fsutil::open_lock_file(&path).map_err(io_error("open", &path))
    }

    fn layer_path(&self, guest: Hash) -> PathBuf {
        self.part("layers").join(guest.to_string())
    }

    fn part(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }
}

fn check_name(name: &str) -> Result<(), PinError> {
    let fine = (1..=100).contains(&name.len()) && !name.starts_with('.') && !name.contains(['/', '\0']);
    if fine { Ok(()) } else { Err(PinError::BadName(name.chars().take(100).collect())) }
}

/// What changes when a file is replaced or written to. With the change time: an upgrade may keep size and times.
fn facts(meta: &Metadata) -> [u64; 7] {
    let times = [meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec()].map(i64::cast_unsigned);
    [meta.dev(), meta.ino(), meta.size(), times[0], times[1], times[2], times[3]]
}

fn cache_key(path: &Path, meta: &Metadata) -> Hash {
    let mut hasher = blake3::Hasher::new_derive_key("dormouse pinned program cache 1");
    for fact in facts(meta) {
        hasher.update(&fact.to_le_bytes());
    }
    hasher.update(std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str()));
    hasher.finalize().into()
}

fn copy_hashed(source: &mut dyn Read, dir: &Path, path: &Path) -> io::Result<Hash> {
    fs::create_dir(dir)?;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700))?;
    let mut file = File::create_new(path)?;
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0u8; 1 << 20];
    loop {
        match source.read(&mut buffer)? {
            0 => break,
            n => {
                hasher.update(&buffer[..n]);
                file.write_all(&buffer[..n])?;
            }
        }
    }
    file.set_permissions(fs::Permissions::from_mode(0o555))?;
    file.sync_all()?;
    fsutil::sync_dir(dir)?;
    Ok(hasher.finalize().into())
}

/// Refuses what [`write_layer`] can't have made.
fn check_layer(root: &Path, guest: Hash) -> Result<(), PinError> {
    let wrong = |path: &Path, what: &str| {
        let path = path.strip_prefix(root).unwrap_or(path).display().to_string();
        PinError::NoLayer { guest, what: format!("'{path}' {what}") }
    };
    if let Some(path) = tree::first_trusted(root)? {
        return Err(wrong(&path, "has attributes of an overlay"));
    }
    let mut has_guest = false;
    for entry in tree::walk(root) {
        let (path, meta) = entry?;
        let below = path.strip_prefix(root).unwrap_or(&path);
        let is_right = if meta.is_dir() {
            LAYER_DIRS.iter().any(|dir| below == Path::new(dir))
        } else if meta.is_symlink() {
            let leads = fs::read_link(&path).is_ok_and(|target| target == Path::new(GUEST_PATH));
            leads && GUEST_NAMES.iter().any(|name| below == Path::new(name))
        } else {
            has_guest = meta.is_file() && below == Path::new(&GUEST_PATH[1..]);
            has_guest
        };
        let is_plain = meta.is_symlink() || meta.mode() & 0o7777 == 0o755;
        let is_own = meta.uid() == rustix::process::geteuid().as_raw();
        if !is_right || !is_plain || !is_own || !tree::xattrs(&path).map_err(io_error("read", &path))?.is_empty() {
            return Err(wrong(&path, "is nothing that such a layer has"));
        }
    }
    let path = root.join(&GUEST_PATH[1..]);
    if !has_guest || tree::hash_file(&path).map_err(io_error("read", &path))? != guest {
        return Err(wrong(&path, "is another program"));
    }
    Ok(())
}

fn write_layer(root: &Path, guest: &[u8]) -> io::Result<()> {
    for dir in LAYER_DIRS {
        let path = root.join(dir);
        fs::create_dir(&path)?;
        // Whatever the umask: these are the modes of `/usr/bin` inside.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    }
    let path = root.join(&GUEST_PATH[1..]);
    let mut file = File::create_new(&path)?;
    file.write_all(guest)?;
    file.set_permissions(fs::Permissions::from_mode(0o755))?;
    file.sync_all()?;
    GUEST_NAMES.iter().try_for_each(|name| symlink(GUEST_PATH, root.join(name)))?;
    ["usr/bin", "usr/lib/dormouse", "usr/lib", "usr", ""].iter().try_for_each(|dir| fsutil::sync_dir(&root.join(dir)))
}

#[cfg(test)]
mod tests;
