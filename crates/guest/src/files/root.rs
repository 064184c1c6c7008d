//! Paths of an archive, resolved below the directory that it is unpacked into.
//!
//! `openat2` with `RESOLVE_IN_ROOT` would do it, but the sandbox's kernel hasn't got that call. So the path is walked
//! part by part, never following a link in the kernel: links are read here and walked in turn, an absolute one from
//! the root of the archive, and `..` stops there.

use rustix::{
    fs::{self, AtFlags, Mode, OFlags},
    io::Errno,
};
use std::{
    ffi::{OsStr, OsString},
    io,
    os::fd::OwnedFd,
    os::unix::ffi::OsStrExt,
    path::{Component, Path},
};

const MOST_LINKS: usize = 40;

/// A directory that nothing resolved here gets out of.
pub struct Root {
    dir: OwnedFd,
}

/// The last part of a path, in its open directory.
pub struct Place {
    pub dir: OwnedFd,
    pub name: OsString,
}

impl Root {
    /// # Errors
    /// What the kernel says to opening the directory.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { dir: fs::open(path, OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())? })
    }

    /// Finds the directory of `path`, making what is missing; the last part is not followed.
    ///
    /// # Errors
    /// `InvalidInput` for a path without a last part, one that begins with `/` or holds `..`; else what the kernel says.
    pub fn place(&self, path: &Path) -> io::Result<Place> {
        let mut parts = Vec::new();
        for part in path.components() {
            match part {
                Component::Normal(part) => parts.push(part.to_owned()),
                Component::CurDir => {}
                _ => {
                    return Err(io::Error::new(
                        io::ErrorKind::InvalidInput,
                        format!("{}: leads out of the archive", path.display()),
                    ));
                }
            }
        }
        let Some(name) = parts.pop() else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "an entry without a name"));
        };
        Ok(Place { dir: self.walk(parts)?, name })
    }

    fn walk(&self, parts: Vec<OsString>) -> io::Result<OwnedFd> {
        let mut todo: Vec<OsString> = parts.into_iter().rev().collect();
        let mut stack = vec![self.dir.try_clone()?];
        let mut links = 0;
        while let Some(part) = todo.pop() {
            if part.as_bytes() == b".." {
                if stack.len() > 1 {
                    stack.pop();
                }
                continue;
            }
            let Some(here) = stack.last() else { break };
            match open_dir(here, &part) {
                Ok(dir) => stack.push(dir),
                Err(Errno::NOENT) => {
                    match fs::mkdirat(here, &part, Mode::from_raw_mode(0o755)) {
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(error) => return Err(error.into()),
                    }
                    let dir = open_dir(here, &part)?;
                    stack.push(dir);
                }
                Err(error @ (Errno::LOOP | Errno::NOTDIR)) => {
                    let Ok(target) = fs::readlinkat(here, &part, Vec::new()) else { return Err(error.into()) };
                    links += 1;
                    if links > MOST_LINKS {
                        return Err(Errno::LOOP.into());
                    }
                    let target = Path::new(OsStr::from_bytes(target.as_bytes())).to_owned();
                    if target.is_absolute() {
                        stack.truncate(1);
                    }
                    let names = target.components().filter_map(|c| match c {
                        Component::Normal(name) => Some(name.to_owned()),
                        Component::ParentDir => Some("..".into()),
                        _ => None,
                    });
                    let names: Vec<OsString> = names.collect();
                    todo.extend(names.into_iter().rev());
                }
                Err(error) => return Err(error.into()),
            }
        }
        stack.pop().ok_or_else(|| Errno::NOENT.into())
    }
}

/// Only as a place: the sandbox's kernel follows a link in spite of `O_NOFOLLOW` where `O_DIRECTORY` is asked for without
/// `O_PATH`.
fn open_dir(dir: &OwnedFd, name: &OsStr) -> Result<OwnedFd, Errno> {
    fs::openat(dir, name, OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

impl Place {
    /// Removes what stands here, if it is no directory.
    ///
    /// # Errors
    /// What the kernel says; nothing there is no error.
    pub fn clear(&self) -> io::Result<()> {
        match fs::unlinkat(&self.dir, &self.name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_leads_out() {
        let top = std::env::temp_dir().join(format!("dormouse-root-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&top);
        let dir = top.join("in");
        std::fs::create_dir_all(dir.join("real")).unwrap();
        for (name, target) in [("up", "../.."), ("abs", "/"), ("ok", "real"), ("loop", "loop")] {
            std::os::unix::fs::symlink(target, dir.join(name)).unwrap();
        }
        let root = Root::open(&dir).unwrap();
        let real =
            |place: &Place| std::fs::read_link(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&place.dir))).unwrap();
        for (path, expected) in
            [("a", ""), ("ok/a", "real"), ("up/a", ""), ("abs/b/a", "b"), ("up/up/ok/a", "real"), ("./new/dir/a", "new/dir")]
        {
            let place = root.place(Path::new(path)).unwrap();
            assert_eq!(real(&place), dir.join(expected).components().collect::<std::path::PathBuf>(), "{path}");
        }
        for path in ["/etc/a", "../a", "b/../../a", "", "."] {
            assert!(root.place(Path::new(path)).is_err(), "{path}");
        }
        assert!(root.place(Path::new("loop/a")).is_err());
        std::fs::remove_dir_all(&top).unwrap();
    }
}
