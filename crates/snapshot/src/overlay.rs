//! Overlay file systems by the kernel's mount API, with the options that are part of the disk format.
//!
//! Sources: `Documentation/filesystems/overlayfs.rst` of Linux, fsopen(2), fsconfig(2), fsmount(2).

use rustix::{
    fs::{CWD, Mode, OFlags},
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen,
    },
};
use std::{
    io,
    os::{fd::AsRawFd, fd::OwnedFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
};

/// Options of every writable disk. A disk written under other options may not be readable under these, so a change here
/// is a change of the format.
///
/// - `redirect_dir=on`: a renamed directory of the template is one attribute in the upper layer. Without it a rename
///   fails with EXDEV, and programs that don't expect that lose the directory.
/// - `metacopy=off`: an upper layer with only metadata of a file would depend on the lower file's content by path, which
///   a hostile upper layer could point anywhere.
/// - `index=off`: the index ties an upper layer to file handles of one lower tree; our layers are copied and moved.
const WRITABLE: &[(&str, &str)] = &[("redirect_dir", "on"), ("metacopy", "off"), ("index", "off")];

/// The same for a disk that is only read: renamed directories are followed, nothing is written.
const READ_ONLY: &[(&str, &str)] = &[("redirect_dir", "follow"), ("metacopy", "off"), ("index", "off")];

/// What mountinfo shows as the source of our mounts, so that leftovers can be told from others' overlays.
pub(crate) const SOURCE: &str = "dormouse";

/// fsconfig(2) copies at most this many bytes of a string value, with its NUL.
const VALUE_MAX: usize = 256;

/// Why the kernel refused an overlay.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OverlayError {
    #[error("can't open the layer {path}: {source}", path = path.display())]
    Layer { path: PathBuf, source: io::Error },
    #[error("the kernel refused {step}: {source}{detail}")]
    Refused { step: &'static str, detail: String, source: io::Error },
}

/// The last step, at which old kernels say what they don't know.
const CREATING: &str = "creating the overlay";

/// The writable layer of an overlay.
pub(crate) struct Upper<'a> {
    pub(crate) upper: &'a Path,
    pub(crate) work: &'a Path,
}

/// Makes an overlay that is attached nowhere yet; it vanishes with the descriptor. `lower` has its top-most layer first.
/// Without `upper` it is read-only and nothing on it can be executed.
pub(crate) fn make(lower: &[&Path], upper: Option<Upper<'_>>) -> Result<OwnedFd, OverlayError> {
    // First the way of new kernels (one value for each layer); kernels before 6.8 don't know it. Those before 6.5 take any
    // word, and only say so at the end.
    match make_with(lower, upper.as_ref(), true) {
        Err(OverlayError::Refused { step: "lowerdir+" | CREATING, .. }) => make_with(lower, upper.as_ref(), false),
        other => other,
    }
}

fn make_with(lower: &[&Path], upper: Option<&Upper<'_>>, one_by_one: bool) -> Result<OwnedFd, OverlayError> {
    let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC).map_err(|e| refused("fsopen(overlay)", None, e))?;
    let set =
        |key: &'static str, value: &[u8]| fsconfig_set_string(&context, key, value).map_err(|e| refused(key, Some(&context), e));
    set("source", SOURCE.as_bytes())?;
    let mut kept_open = Vec::new();
    let layers = lower.iter().map(|path| layer_name(path, !one_by_one, &mut kept_open)).collect::<Result<Vec<_>, _>>()?;
    if one_by_one {
        layers.iter().try_for_each(|layer| set("lowerdir+", layer))?;
    } else {
        set("lowerdir", &layers.join(&b':'))?;
    }
    if let Some(Upper { upper, work }) = upper {
        set("upperdir", &layer_name(upper, false, &mut kept_open)?)?;
        set("workdir", &layer_name(work, false, &mut kept_open)?)?;
    }
    for (key, value) in if upper.is_some() { WRITABLE } else { READ_ONLY } {
        set(key, value.as_bytes())?;
    }
    let mut attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    if upper.is_none() {
        fsconfig_set_flag(&context, "ro").map_err(|e| refused("ro", Some(&context), e))?;
        attributes |= MountAttrFlags::MOUNT_ATTR_RDONLY | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    }
    fsconfig_create(&context).map_err(|e| refused(CREATING, Some(&context), e))?;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes).map_err(|e| refused("fsmount", Some(&context), e))
}

/// How a layer is named to the kernel: by its path where that is short and has nothing that the option's syntax would
/// read otherwise, else (and always with `short`) by a descriptor, which needs no escapes and fits into any limit.
fn layer_name(path: &Path, short: bool, kept_open: &mut Vec<OwnedFd>) -> Result<Vec<u8>, OverlayError> {
    let bytes = path.as_os_str().as_bytes();
    if !short && path.is_absolute() && bytes.len() < VALUE_MAX && !bytes.iter().any(|b| b"\\:,".contains(b)) {
        return Ok(bytes.to_vec());
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::openat(CWD, path, flags, Mode::empty())
        .map_err(|e| OverlayError::Layer { path: path.to_owned(), source: e.into() })?;
    // The shorter name where there is one: all names of a long chain must fit into one value of an older kernel.
    let dir = if Path::new("/dev/fd/").is_dir() { "/dev/fd" } else { "/proc/self/fd" };
    let name = format!("{dir}/{}", fd.as_raw_fd()).into_bytes();
    kept_open.push(fd);
    Ok(name)
}

/// Adds what the file system itself says about a refusal: the context can be read like a log (fsopen(2)).
fn refused(step: &'static str, context: Option<&OwnedFd>, error: rustix::io::Errno) -> OverlayError {
    let mut detail = String::new();
    let mut line = [0u8; 1024];
    while let Some(Ok(n)) = context.map(|fd| rustix::io::read(fd, &mut line)) {
        let text = String::from_utf8_lossy(&line[..n]);
        detail.push_str(if detail.is_empty() { " (" } else { "; " });
        detail.push_str(text.trim());
        if n == 0 || detail.len() > 4096 {
            break;
        }
    }
    if !detail.is_empty() {
        detail.push(')');
    }
    OverlayError::Refused { step, detail, source: error.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, io::Read};

    #[test]
    fn both_ways_of_naming_layers_give_the_same_overlay() {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: needs root");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        // As many as there can be: a disk's own, 16 of its snapshots, guest and template.
        let mut names = vec!["top:\\,".to_owned(), "x".repeat(250)];
        names.extend((2..19).map(|n| format!("layer-{n}")));
        let layers: Vec<PathBuf> = names.iter().map(|name| dir.path().join(name)).collect();
        for (n, layer) in layers.iter().enumerate() {
            fs::create_dir(layer).unwrap();
            fs::write(layer.join("same"), n.to_string()).unwrap();
            fs::write(layer.join(format!("own{n}")), "").unwrap();
        }
        let lower: Vec<&Path> = layers.iter().map(PathBuf::as_path).collect();
        for one_by_one in [true, false] {
            let mount = make_with(&lower, None, one_by_one).unwrap();
            let open = |name: &str| rustix::fs::openat(&mount, name, OFlags::RDONLY, Mode::empty()).map(fs::File::from);
            let mut text = String::new();
            open("same").unwrap().read_to_string(&mut text).unwrap();
            assert_eq!(text, "0", "the first layer is the top-most");
            assert!((0..19).all(|n| open(&format!("own{n}")).is_ok()), "one by one: {one_by_one}");
        }
    }
}
