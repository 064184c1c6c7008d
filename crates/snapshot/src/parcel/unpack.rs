//! From a stream to its tree. The stream may be anybody's: it can fail to be a tree, but it can't reach out of the directory
//! that it is unpacked into, nor have anything allocated that isn't there.

mod build;

use super::{ParcelError, TreeRef, blocking, feed, io_error, open_dir, pour::pour, remove};
use blob::Repository;
use build::{Builder, Fault, Spot};
use std::{
    fs::DirBuilder,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

/// Makes the directory `into`, which must not be there, with the stored tree in it. After an error there is none; where the
/// call itself is given up, a part of it stays, for [`remove`].
///
/// # Errors
/// [`ParcelError::File`] or [`ParcelError::After`] where a part is lost, [`ParcelError::Malformed`], [`ParcelError::Newer`],
/// [`ParcelError::Io`], and what else the store says.
pub async fn unpack_tree(repository: &Repository, tree: &TreeRef, into: &Path) -> Result<(), ParcelError> {
    if tree.digest != TreeRef::digest_of(&tree.stream) {
        return Err(ParcelError::Damaged("a tree's digest is that of another stream".to_owned()));
    }
    let (feed, source) = feed::channel();
    let (path, limits) = (into.to_owned(), build::Limits { entries: tree.entries, plain_bytes: tree.plain_bytes });
    let builder = blocking("unpacking a tree", move || {
        DirBuilder::new().mode(0o700).create(&path).map_err(io_error("create", &path))?;
        // Access control lists that the place hands down are no part of the tree.
        for list in [c"system.posix_acl_default", c"system.posix_acl_access"] {
            let _ = rustix::fs::lremovexattr(&path, list);
        }
        let root = open_dir(&path).map_err(|e| io_error("open", &path)(e.into()))?;
        let mut builder = Builder::new(root, source, limits);
        let built = builder.build();
        Ok(built.map_err(|fault| (fault, builder.spot())))
    });
    let (poured, built) = tokio::join!(pour(repository, &tree.stream, feed), builder);
    let error = match (poured, built?) {
        (Ok(()), Ok(())) => return Ok(()),
        // It ended where the bytes did.
        (Err(broken), Err((Fault::Ended, spot))) if broken.error.is_loss() => lost(spot, broken.error),
        (Err(broken), Ok(()) | Err((Fault::Ended, _))) => ParcelError::Store(broken.error),
        (_, Err((fault, spot))) => failed(into, fault, spot),
    };
    let made = into.to_owned();
    blocking("removing a tree", move || remove(&made)).await?;
    Err(error)
}

fn lost(spot: Spot, source: blob::Error) -> ParcelError {
    let path = shown(spot.path);
    if spot.is_named { ParcelError::File { path, offset: spot.offset, source } } else { ParcelError::After { path, source } }
}

fn failed(into: &Path, fault: Fault, spot: Spot) -> ParcelError {
    match fault {
        Fault::Ended => malformed("it ends too early", spot),
        Fault::Malformed(what) => malformed(what, spot),
        Fault::Newer(found) => ParcelError::Newer { what: "a stored tree", found, newest: super::format::FORMAT },
        Fault::Io(what, error) => ParcelError::Io { what, path: into.join(spot.path), source: error.into() },
    }
}

fn malformed(what: &'static str, spot: Spot) -> ParcelError {
    ParcelError::Malformed { path: shown(spot.path), offset: spot.stream_offset, what }
}

fn shown(path: PathBuf) -> PathBuf {
    if path.as_os_str().is_empty() { PathBuf::from(".") } else { path }
}
