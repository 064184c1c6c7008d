//! The built-in template `host`: this machine's own tools, taken once.
//!
//! Taken: `/usr`, `/opt`, dpkg's state, and of `/etc` a list of things without secrets; everything else is generated or
//! empty. What an ordinary user of the machine can't read isn't taken, nor is what is mounted inside `/usr` or `/opt`.
//!
//! Bytes are shared with the machine where that is possible: by reflink, else by hard link for files that only root may
//! write. Package managers replace such files by rename, which leaves the linked one as it was; whoever writes into one
//! in place changes the template, too. So each linked file stands in a manifest with its size, times, mode and owner, and
//! [`verify`] compares. (A write that then sets the old time again isn't noticed.)
//!
//! Reading gigabytes would take minutes, so in this template's content address a shared file counts by its size and
//! modification time: the address says "this machine at that moment", and no other machine finds the same.

use super::{TemplateError, TemplateKind, common, io_error, store::Built};
use crate::{
    Hash, fsutil,
    tree::{self, TreeError},
};
use std::{
    collections::HashSet,
    ffi::OsStr,
    fs::{self, Metadata},
    io::{self, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
};

/// The extension of the manifest's file beside the tree.
pub(super) const MANIFEST: &str = "manifest";
const MANIFEST_HEAD: &[u8] = b"dormouse host manifest 1\n";
const MANIFEST_MAX: u64 = 512 << 20;

/// Trees that are taken whole.
const WHOLE: &[&str] = &["/usr", "/opt"];
/// Links into `/usr` on a merged system, else directories that are taken whole.
const MERGED: &[&str] = &["/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"];
/// Parts of `/etc` that programs need and that tell nothing of this machine.
const ETC: &[&str] = &[
    "alternatives",
    "bash.bashrc",
    "bash_completion.d",
    "ca-certificates",
    "ca-certificates.conf",
    "debconf.conf",
    "debian_version",
    "deluser.conf",
    "adduser.conf",
    "dpkg",
    "emacs",
    "ethertypes",
    "fonts",
    "gai.conf",
    "gprofng.rc",
    "groff",
    "host.conf",
    "inputrc",
    "issue",
    "issue.net",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "locale.gen",
    "localtime",
    "login.defs",
    "magic",
    "magic.mime",
    "manpath.config",
    "mime.types",
    "mke2fs.conf",
    "netconfig",
    "networks",
    "os-release",
    "perl",
    "protocols",
    "python3",
    "python3.9",
    "python3.10",
    "python3.11",
    "python3.12",
    "python3.13",
    "rpc",
    "securetty",
    "services",
    "sgml",
    "shells",
    "skel",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
    "vim",
    "xattr.conf",
    "xml",
    "java-11-openjdk",
    "java-17-openjdk",
    "java-21-openjdk",
];
/// dpkg's own files: enough for `dpkg -i`, `dpkg -l` and apt inside.
const DPKG: &str = "/var/lib/dpkg";
const DPKG_LEFT_OUT: &[&str] = &["lock", "lock-frontend", "triggers/Lock", "updates"];

const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\ndaemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n\
    bin:x:2:2:bin:/bin:/usr/sbin/nologin\nsys:x:3:3:sys:/dev:/usr/sbin/nologin\nman:x:6:12:man:/var/cache/man:/usr/sbin/nologin\n\
    mail:x:8:8:mail:/var/mail:/usr/sbin/nologin\nwww-data:x:33:33:www-data:/var/www:/usr/sbin/nologin\n\
    _apt:x:42:65534::/nonexistent:/usr/sbin/nologin\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n";
const GROUP: &str = "root:x:0:\ndaemon:x:1:\nbin:x:2:\nsys:x:3:\nadm:x:4:\ntty:x:5:\ndisk:x:6:\nmail:x:8:\nman:x:12:\n\
    sudo:x:27:\nwww-data:x:33:\nshadow:x:42:\nutmp:x:43:\nstaff:x:50:\nusers:x:100:\nnogroup:x:65534:\n";
const NSSWITCH: &str = "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nnetworks: files\nprotocols: files\n\
    services: files\nethers: files\nrpc: files\n";
const PROFILE: &str = "if [ \"$(id -u)\" -eq 0 ]; then\n  PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\nelse\n  \
    PATH=/usr/local/bin:/usr/bin:/bin\nfi\nexport PATH\nif [ -n \"${BASH-}\" ] && [ -f /etc/bash.bashrc ]; then . /etc/bash.bashrc; fi\n\
    for part in /etc/profile.d/*.sh; do [ -r \"$part\" ] && . \"$part\"; done\nunset part\n";

/// What happened to a file that the template shares with the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Its size or modification time is another: somebody wrote into it in place.
    Content,
    /// Its mode or owner is another.
    Permissions,
    /// It is gone from the template's tree.
    Missing,
}

/// A file of a `host` template that is no longer what it was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changed {
    /// The path on the machine and in sessions.
    pub path: PathBuf,
    pub change: Change,
}

pub(super) fn build(root: &Path, progress: &mut dyn FnMut(&str)) -> Result<Built, TemplateError> {
    let store = root.ancestors().nth(3).map(Path::to_owned).unwrap_or_default();
    let mut taker =
        Taker { root, never: store, shared: Vec::new(), shared_inodes: HashSet::new(), left_out: 0, copied: 0, reflinks: None };
    common::write_common(root)?;
    for top in MERGED.iter().chain(WHOLE).map(Path::new) {
        progress(&format!("taking {}", top.display()));
        taker.take(top, &|_| true)?;
    }
    progress("taking what is needed of /etc and dpkg's state");
    ETC.iter().try_for_each(|name| taker.take(&Path::new("/etc").join(name), &|_| true))?;
    taker.take(Path::new(DPKG), &|below| {
        let old = below.as_os_str().as_bytes().ends_with(b"-old");
        !old && !DPKG_LEFT_OUT.iter().any(|name| below == Path::new(name))
    })?;
    generate(root)?;
    progress(&format!(
        "{} files shared with the machine, {} copied, {} left out (readable for few)",
        taker.shared.len(),
        taker.copied,
        taker.left_out
    ));
    let shared = &taker.shared_inodes;
    let summary = tree::summarize(root, &|meta: &Metadata| shared.contains(&meta.ino()))?;
    let linked = if taker.reflinks == Some(true) { &[][..] } else { &taker.shared };
    let manifest = write_manifest(root, linked).map_err(io_error("write the manifest of", root))?;
    Ok(Built { kind: TemplateKind::Host, summary, beside: vec![(MANIFEST, manifest)] })
}

/// What is the same on every machine, or must not be this one's.
fn generate(root: &Path) -> Result<(), TemplateError> {
    for dir in [
        "etc/profile.d",
        "etc/apt/apt.conf.d",
        "etc/apt/sources.list.d",
        "etc/apt/preferences.d",
        "etc/apt/trusted.gpg.d",
        "etc/dpkg/dpkg.cfg.d",
        "var/lib/dpkg/updates",
        "var/lib/dpkg/info",
    ] {
        let path = root.join(dir);
        fsutil::ensure_dir(&path, 0o755).map_err(io_error("create", &path))?;
    }
    for (link, target) in [("var/run", "/run"), ("var/lock", "/run/lock")] {
        let path = root.join(link);
        std::os::unix::fs::symlink(target, &path).map_err(io_error("create", &path))?;
    }
    let files = [
        ("etc/passwd", PASSWD),
        ("etc/group", GROUP),
        ("etc/nsswitch.conf", NSSWITCH),
        ("etc/profile", PROFILE),
        ("etc/fstab", ""),
    ];
    files.iter().try_for_each(|(name, content)| common::write(root, name, content))
}

/// Takes trees of the machine over into the template.
struct Taker<'a> {
    root: &'a Path,
    /// The template folder itself may lie in `/opt`.
    never: PathBuf,
    /// Paths, relative to the root, whose bytes are the machine's.
    shared: Vec<PathBuf>,
    shared_inodes: HashSet<u64>,
    copied: u64,
    left_out: u64,
    /// Whether the file system can reflink; known after the first try.
    reflinks: Option<bool>,
}

impl Taker<'_> {
    fn take(&mut self, top: &Path, wanted: &dyn Fn(&Path) -> bool) -> Result<(), TemplateError> {
        let mut directories = Vec::new();
        let mut walk = walkdir::WalkDir::new(top).follow_root_links(false).same_file_system(true).into_iter();
        while let Some(entry) = walk.next() {
            // What isn't there, or vanishes while a package is installed, isn't taken.
            let Some((path, meta)) = there(entry).map_err(io_error("read", top))? else { continue };
            let below = path.strip_prefix(top).unwrap_or(Path::new(""));
            let kind = meta.file_type();
            let readable = meta.mode() & 0o004 != 0 && (!kind.is_dir() || meta.mode() & 0o001 != 0);
            if !wanted(below) || path == self.never || !(kind.is_symlink() || readable) {
                self.left_out += u64::from(!readable);
                if kind.is_dir() {
                    walk.skip_current_dir();
                }
                continue;
            }
            let relative = path.strip_prefix("/").unwrap_or(&path);
            let target = self.root.join(relative);
            if kind.is_dir() {
                if !target.is_dir() {
                    if let Some(parent) = target.parent() {
                        fsutil::ensure_dir(parent, 0o755).map_err(io_error("create", parent))?;
                    }
                    copied(tree::copy_entry(&path, &meta, &target))?;
                }
                directories.push((target, meta));
            } else if kind.is_file() {
                self.file(&path, &meta, relative, &target)?;
            } else if kind.is_symlink() && target.symlink_metadata().is_err() {
                copied(tree::copy_entry(&path, &meta, &target))?;
            } else if kind.is_socket() || kind.is_fifo() {
                self.left_out += 1;
            }
        }
        directories.iter().rev().try_for_each(|(path, meta)| tree::set_times(path, meta).map_err(io_error("finish", path)))
    }

    fn file(&mut self, path: &Path, meta: &Metadata, relative: &Path, target: &Path) -> Result<(), TemplateError> {
        if let Some(parent) = target.parent().filter(|p| !p.is_dir()) {
            fsutil::ensure_dir(parent, 0o755).map_err(io_error("create", parent))?;
        }
        let shared = match self.reflinks {
            Some(true) => true,
            // Only root may write it, and not by hand as in /etc, so it is replaced by rename (or caught by `verify`).
            Some(false) => {
                !relative.starts_with("etc") && meta.uid() == 0 && meta.mode() & 0o022 == 0 && fs::hard_link(path, target).is_ok()
            }
            None => {
                let can = can_reflink(path, &self.root.join(".reflink"));
                self.reflinks = Some(can.map_err(io_error("try a reflink in", self.root))?);
                return self.file(path, meta, relative, target);
            }
        };
        if self.reflinks == Some(true) || !shared {
            copied(tree::copy_entry(path, meta, target))?;
        }
        if !shared {
            self.copied += 1;
            return Ok(());
        }
        match fs::symlink_metadata(target) {
            Ok(now) => {
                self.shared_inodes.insert(now.ino());
                self.shared.push(relative.to_owned());
                Ok(())
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(io_error("read", target)(e)),
        }
    }
}

fn there(entry: walkdir::Result<walkdir::DirEntry>) -> io::Result<Option<(PathBuf, Metadata)>> {
    match entry.and_then(|e| e.metadata().map(|m| (e.into_path(), m))).map_err(io::Error::from) {
        Ok(found) => Ok(Some(found)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Fine with a source that is gone by now.
fn copied(result: Result<(), TreeError>) -> Result<(), TemplateError> {
    match result {
        Err(TreeError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(()),
        other => Ok(other?),
    }
}

fn can_reflink(from: &Path, trial: &Path) -> io::Result<bool> {
    let source = fs::File::open(from)?;
    let target = fs::File::create(trial)?;
    let can = rustix::fs::ioctl_ficlone(&target, &source).is_ok();
    fs::remove_file(trial)?;
    Ok(can)
}

/// The facts about a shared file that change when somebody writes into it. Not its change time: another link to the
/// same file, as the next template makes one, changes that.
fn facts(meta: &Metadata) -> [i64; 6] {
    let owner = [i64::from(meta.mode()), i64::from(meta.uid()), i64::from(meta.gid())];
    [meta.size().cast_signed(), meta.mtime(), meta.mtime_nsec(), owner[0], owner[1], owner[2]]
}

/// zstd of: a head, then for each file `SIZE SECONDS NANOSECONDS MODE UID GID PATH\0`.
fn write_manifest(root: &Path, shared: &[PathBuf]) -> io::Result<Vec<u8>> {
    let mut out = zstd::Encoder::new(Vec::new(), 3)?;
    out.include_checksum(true)?;
    out.write_all(MANIFEST_HEAD)?;
    for path in shared {
        for fact in facts(&fs::symlink_metadata(root.join(path))?) {
            write!(out, "{fact} ")?;
        }
        out.write_all(path.as_os_str().as_bytes())?;
        out.write_all(&[0])?;
    }
    out.finish()
}

pub(super) fn verify(hash: Hash, root: &Path, manifest: &Path) -> Result<Vec<Changed>, TemplateError> {
    let damaged = |what: &str| TemplateError::Damaged { hash, what: format!("its manifest {what}") };
    let packed = fsutil::read_limited(manifest, MANIFEST_MAX).map_err(io_error("read", manifest))?;
    let text = zstd::decode_all(packed.as_slice()).map_err(|e| damaged(&format!("can't be unpacked: {e}")))?;
    let lines = text.strip_prefix(MANIFEST_HEAD).ok_or_else(|| damaged("is of a kind that isn't known"))?;
    let mut changed = Vec::new();
    for line in lines.split(|b| *b == 0).filter(|l| !l.is_empty()) {
        let (then, path) = read_line(line).ok_or_else(|| damaged("has a line that can't be read"))?;
        let change = match fs::symlink_metadata(root.join(path)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Some(Change::Missing),
            Err(e) => return Err(io_error("read", &root.join(path))(e)),
            Ok(meta) => {
                let now = facts(&meta);
                if now[..3] != then[..3] { Some(Change::Content) } else { (now != then).then_some(Change::Permissions) }
            }
        };
        changed.extend(change.map(|change| Changed { path: Path::new("/").join(path), change }));
    }
    Ok(changed)
}

fn read_line(line: &[u8]) -> Option<([i64; 6], &Path)> {
    let mut facts = [0; 6];
    let mut words = line.splitn(7, |b| *b == b' ');
    for fact in &mut facts {
        *fact = std::str::from_utf8(words.next()?).ok()?.parse().ok()?;
    }
    Some((facts, Path::new(OsStr::from_bytes(words.next()?))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_changed_in_place_is_found_and_a_replaced_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let (machine, root) = (dir.path().join("machine"), dir.path().join("root"));
        fs::create_dir(&machine).unwrap();
        fs::create_dir(&root).unwrap();
        let mut shared = Vec::new();
        for name in ["in place", "by\nrename", "mode", "untouched", "linked again"] {
            fs::write(machine.join(name), "one").unwrap();
            fs::hard_link(machine.join(name), root.join(name)).unwrap();
            shared.push(PathBuf::from(name));
        }
        let manifest = dir.path().join("m");
        fs::write(&manifest, write_manifest(&root, &shared).unwrap()).unwrap();
        assert_eq!(verify(Hash::of(b""), &root, &manifest).unwrap(), []);

        fs::write(machine.join("in place"), "three").unwrap();
        fs::write(machine.join("new"), "two").unwrap();
        fs::rename(machine.join("new"), machine.join("by\nrename")).unwrap();
        fs::set_permissions(machine.join("mode"), std::os::unix::fs::PermissionsExt::from_mode(0o640)).unwrap();
        fs::hard_link(machine.join("linked again"), machine.join("other")).unwrap();
        let changed = verify(Hash::of(b""), &root, &manifest).unwrap();
        let expected = [("/in place", Change::Content), ("/mode", Change::Permissions)];
        assert_eq!(changed, expected.map(|(path, change)| Changed { path: path.into(), change }));
    }

    #[test]
    fn a_damaged_manifest_is_said_so() {
        let dir = tempfile::tempdir().unwrap();
        let manifest = dir.path().join("m");
        let mut bytes = write_manifest(dir.path(), &[]).unwrap();
        bytes.pop();
        for bad in [b"x".to_vec(), bytes, zstd::encode_all(&b"dormouse host manifest 9\n"[..], 0).unwrap()] {
            fs::write(&manifest, bad).unwrap();
            let result = verify(Hash::of(b""), dir.path(), &manifest);
            assert!(matches!(result, Err(TemplateError::Damaged { .. })), "{result:?}");
        }
    }
}
