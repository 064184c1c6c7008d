//! Looking a name up in a stack of directories, as the kernel does when it merges them.
//!
//! This follows `ovl_lookup`, `ovl_lookup_layer`, `ovl_lookup_single` and `ovl_check_redirect` (`fs/overlayfs/namei.c`) for
//! lower layers with `redirect_dir=follow` and `metacopy=off`, none of them the last: below the chain there is always
//! another one.

use super::{LayerTree, Source};
use crate::layer::{
    LayerError,
    content::{is_whiteout, kind, stat_at},
    dirs::{DirId, ROOT},
    xattr,
};
use rustix::{
    fs::{FileType, Mode, OFlags, Stat},
    io::Errno,
};
use std::{
    ffi::OsStr,
    ops::Range,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    sync::Arc,
};

/// What a name means in a stack.
pub(super) enum Found {
    Nothing,
    Whiteout,
    /// A file or symlink, in the directory with this number in the stack.
    File {
        source: usize,
        stat: Stat,
    },
    Directory {
        stack: Vec<Source>,
        below: Below,
    },
}

/// Where below the chain a directory is merged with another.
pub(super) enum Below {
    /// It hides what is there.
    Nothing,
    /// Under this name in its parent's stack, or, where it begins with a slash, at this path from the root.
    Elsewhere(Vec<u8>),
}

/// What a layer has.
enum Hit {
    File(Stat),
    Directory(DirId),
}

/// A lookup under way (`struct ovl_lookup_data`).
struct Search {
    /// The name in the parent's stack, or the absolute path, that is looked up in the next layer.
    name: Vec<u8>,
    /// Lower layers are not asked any more.
    is_over: bool,
    is_directory: bool,
}

/// Looks up `name` in the directories `parent`, top-most first.
pub(super) fn look_up(layers: &mut [LayerTree], parent: &[(Source, OwnedFd)], name: &OsStr) -> Result<Found, LayerError> {
    let mut search = Search { name: name.as_bytes().to_vec(), is_over: false, is_directory: false };
    let mut stack: Vec<Source> = Vec::new();
    // From an absolute redirect on: all layers from this one on, from their roots.
    let mut from_roots = None;
    for (number, (source, dir)) in parent.iter().enumerate() {
        if search.is_over || from_roots.is_some() {
            break;
        }
        let whole = 0..search.name.len();
        match search.single(&mut layers[source.layer], (source.dir, dir.as_fd()), whole)? {
            Some(Hit::File(stat)) => return Ok(Found::File { source: number, stat }),
            Some(Hit::Directory(dir)) => {
                stack.push(Source { layer: source.layer, dir });
                from_roots = search.name.starts_with(b"/").then_some(source.layer + 1);
            }
            None => {}
        }
    }
    for layer in from_roots.unwrap_or(layers.len())..layers.len() {
        if search.is_over {
            break;
        }
        if let Some(Hit::Directory(dir)) = search.in_layer(&mut layers[layer])? {
            stack.push(Source { layer, dir });
        }
    }
    Ok(match (stack.is_empty(), search.is_over) {
        (true, true) => Found::Whiteout,
        (true, false) => Found::Nothing,
        (false, true) => Found::Directory { stack, below: Below::Nothing },
        (false, false) => Found::Directory { stack, below: Below::Elsewhere(search.name) },
    })
}

impl Search {
    /// Looks up an absolute path in a layer. A redirect on the way changes what is before it, so places are counted from
    /// the end.
    fn in_layer(&mut self, tree: &mut LayerTree) -> Result<Option<Hit>, LayerError> {
        let root = rustix::io::fcntl_dupfd_cloexec(tree.opener.root(), 0);
        let mut dir = root.map_err(|e| tree.error("open", ROOT, OsStr::new(""), e))?;
        let mut id = ROOT;
        let mut left = self.name.len() - 1;
        loop {
            let start = self.name.len() - left;
            let length = self.name[start..].iter().position(|b| *b == b'/').unwrap_or(left);
            let component = self.name[start..start + length].to_vec();
            let hit = self.single(tree, (id, dir.as_fd()), start..start + length)?;
            if length == left {
                return Ok(hit);
            }
            let Some(Hit::Directory(next)) = hit else { return Ok(None) };
            let component = OsStr::from_bytes(&component);
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let opened = rustix::fs::openat(&dir, component, flags, Mode::empty());
            dir = opened.map_err(|e| tree.error("open", id, component, e))?;
            id = next;
            left -= length + 1;
        }
    }

    /// Looks up one component of the name, which is all of it where it is relative, in a directory of a layer.
    fn single(
        &mut self,
        tree: &mut LayerTree,
        (dir, fd): (DirId, BorrowedFd<'_>),
        component: Range<usize>,
    ) -> Result<Option<Hit>, LayerError> {
        let is_last = component.end == self.name.len();
        let bytes = self.name[component.clone()].to_vec();
        let name = OsStr::from_bytes(&bytes);
        let stat = match stat_at(fd, name) {
            Err(Errno::NOENT | Errno::NAMETOOLONG) => return Ok(None),
            other => other.map_err(|e| tree.error("look at", dir, name, e))?,
        };
        let attribute = |key| xattr::value(fd, name, key).map_err(|e| tree.error("read the attributes of", dir, name, e));
        if is_whiteout(&stat) || (is_empty_file(&stat) && attribute(xattr::WHITEOUT)?.is_some()) {
            self.is_over = true;
            return Ok(None);
        }
        if kind(&stat) != FileType::Directory {
            self.is_over = true;
            return Ok((is_last && !self.is_directory).then_some(Hit::File(stat)));
        }
        self.is_directory |= is_last;
        if attribute(xattr::OPAQUE)?.as_deref() == Some(b"y") {
            self.is_over = true;
        } else if let Some(target) = attribute(xattr::REDIRECT)?
            && !self.redirect(&target, component)
        {
            let what = format!("{} is redirected to no place", tree.dirs.path(dir, name).display());
            return Err(LayerError::Damaged { id: tree.id, what });
        }
        Ok(Some(Hit::Directory(tree.dirs.add(dir, Arc::from(name)))))
    }

    /// From here on something else is looked up. `false` for a target that the kernel wouldn't take.
    fn redirect(&mut self, target: &[u8], component: Range<usize>) -> bool {
        let is_plain = |name: &[u8]| !matches!(name, b"" | b"." | b"..") && !name.contains(&0);
        let after = self.name[component.end..].to_vec();
        match target.strip_prefix(b"/") {
            Some(path) if path.split(|b| *b == b'/').all(is_plain) => {
                // An opaque directory above has ended the lookup where it was; this is another place.
                self.is_over = false;
                self.name = [target, &after].concat();
                true
            }
            None if is_plain(target) && !target.contains(&b'/') => {
                self.name = [&self.name[..component.start], target, &after].concat();
                true
            }
            _ => false,
        }
    }
}

fn is_empty_file(stat: &Stat) -> bool {
    kind(stat) == FileType::RegularFile && stat.st_size == 0
}
