//! Single files, each a stream of its own: the few large ones of a memory image, programs, segments of journals.

use super::{
    ParcelError, blocking, io_error,
    pour::{Broken, first_lost},
    remove,
};
use crate::image::{DISK, ImageDescriptor, STARTED};
use blob::{Chunking, Repository, StreamRef, Writer};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, DirBuilder, File, OpenOptions, Permissions},
    io::{self, Read},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

/// Longest name of a file (`NAME_MAX`).
const NAME_MAX: usize = 255;

/// A memory image in a repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRef {
    pub files: Vec<(String, StreamRef)>,
}

/// Stores a regular file that nobody changes meanwhile.
///
/// # Errors
/// [`ParcelError::Io`], [`ParcelError::Changed`], and what the store says.
pub async fn pack_file(path: &Path, writer: &Writer) -> Result<StreamRef, ParcelError> {
    pack(path, writer, Chunking::Content).await
}

async fn pack(path: &Path, writer: &Writer, chunking: Chunking) -> Result<StreamRef, ParcelError> {
    let owned = path.to_owned();
    let (file, size) = blocking("opening a file", move || open(&owned).map_err(io_error("open", &owned))).await?;
    // No more than there was: the file of a program that writes all the time would have no end.
    let stream = writer.write_file(file.take(size), chunking).await.map_err(|error| match error {
        blob::Error::Io { source, .. } => io_error("read", path)(same(&source)),
        other => ParcelError::Store(other),
    })?;
    if stream.len == size { Ok(stream) } else { Err(ParcelError::Changed(path.to_owned())) }
}

fn open(path: &Path) -> io::Result<(File, u64)> {
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
    let meta = file.metadata()?;
    if meta.is_file() { Ok((file, meta.len())) } else { Err(io::Error::other("it is no regular file")) }
}

/// The error itself, out of what several may hold.
fn same(error: &io::Error) -> io::Error {
    error.raw_os_error().map_or_else(|| io::Error::new(error.kind(), error.to_string()), io::Error::from_raw_os_error)
}

/// Makes the file `path`, which must not be there, of a stored one. After an error there is none.
///
/// # Errors
/// [`ParcelError::File`] where a part is lost, [`ParcelError::Io`], and what else the store says.
pub async fn unpack_file(repository: &Repository, stream: &StreamRef, path: &Path, mode: u32) -> Result<(), ParcelError> {
    unpack(repository, stream, path, mode, path).await
}

/// `shown` is what it is called in errors about what is stored.
async fn unpack(repository: &Repository, stream: &StreamRef, path: &Path, mode: u32, shown: &Path) -> Result<(), ParcelError> {
    let owned = path.to_owned();
    let made = blocking("making a file", move || {
        let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&owned);
        let made = made.and_then(|file| Ok((file.try_clone()?, file)));
        made.map_err(io_error("create", &owned))
    });
    let (file, handle) = made.await?;
    let read = repository.read_to_file(stream, file).await;
    let read = match read {
        Err(error) if error.is_loss() => {
            let Broken { at, error } = first_lost(repository, stream, error).await;
            Err(match error.is_loss() {
                true => ParcelError::File { path: shown.to_owned(), offset: at, source: error },
                false => ParcelError::Store(error),
            })
        }
        Err(blob::Error::Io { source, .. }) => Err(io_error("write", path)(same(&source))),
        other => other.map_err(ParcelError::Store),
    };
    let owned = path.to_owned();
    blocking("finishing a file", move || {
        let done =
            read.and_then(|()| handle.set_permissions(Permissions::from_mode(mode)).map_err(io_error("set the mode of", &owned)));
        if done.is_err() {
            fs::remove_file(&owned).map_err(io_error("remove", &owned))?;
        }
        done
    })
    .await
}

/// Stores the regular files of a directory whose names are `wanted`, by name; what else is there is left out.
///
/// # Errors
/// As [`pack_file`]; [`ParcelError::Name`] for a name that is no text.
pub async fn pack_files(
    dir: &Path,
    wanted: impl Fn(&str) -> bool + Send + Sync,
    writer: &Writer,
) -> Result<Vec<(String, StreamRef)>, ParcelError> {
    pack_each(dir, |name| wanted(name).then_some(Chunking::Content), writer).await
}

async fn pack_each(
    dir: &Path,
    chunking: impl Fn(&str) -> Option<Chunking> + Send + Sync,
    writer: &Writer,
) -> Result<Vec<(String, StreamRef)>, ParcelError> {
    let owned = dir.to_owned();
    let names = blocking("listing files", move || regular_files(&owned)).await?;
    let mut files = Vec::new();
    for name in names {
        if let Some(chunking) = chunking(&name) {
            let stream = pack(&dir.join(&name), writer, chunking).await?;
            files.push((name, stream));
        }
    }
    Ok(files)
}

fn regular_files(dir: &Path) -> Result<Vec<String>, ParcelError> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(io_error("read", dir))? {
        let entry = entry.map_err(io_error("read", dir))?;
        if entry.file_type().map_err(io_error("look at", &entry.path()))?.is_file() {
            names.push(entry.file_name().into_string().map_err(|_| ParcelError::Name(entry.path()))?);
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// Makes the directory `into` (0700), which must not be there, with these files (0600) in it. After an error there is none.
///
/// # Errors
/// As [`unpack_file`]; [`ParcelError::Damaged`] for names that would lead elsewhere.
pub async fn unpack_files(repository: &Repository, files: &[(String, StreamRef)], into: &Path) -> Result<(), ParcelError> {
    let owned = into.to_owned();
    let make = move || DirBuilder::new().mode(0o700).create(&owned).map_err(io_error("create", &owned));
    blocking("making a directory", make).await?;
    let unpacked = unpack_each(repository, files, into).await;
    or_remove(into, unpacked).await
}

async fn unpack_each(repository: &Repository, files: &[(String, StreamRef)], into: &Path) -> Result<(), ParcelError> {
    for (name, stream) in files {
        if !is_plain(name) {
            return Err(ParcelError::Damaged(format!("a file's name is {:?}", name.chars().take(80).collect::<String>())));
        }
        unpack(repository, stream, &into.join(name), 0o600, Path::new(name)).await?;
    }
    Ok(())
}

/// A name of one component.
fn is_plain(name: &str) -> bool {
    (1..=NAME_MAX).contains(&name.len()) && !matches!(name, "." | "..") && !name.contains(['/', '\0'])
}

async fn or_remove(into: &Path, done: Result<(), ParcelError>) -> Result<(), ParcelError> {
    let Err(error) = done else { return Ok(()) };
    let into: PathBuf = into.to_owned();
    blocking("removing files", move || remove(&into)).await?;
    Err(error)
}

/// Stores the memory image in `dir`, which has to be whole: all its files but the mark that programs have run on from it,
/// and the fingerprint of the disk beside it, which is another after it was unpacked.
///
/// # Errors
/// [`ParcelError::Image`] where it isn't whole; else as [`pack_file`].
pub async fn pack_image(dir: &Path, writer: &Writer) -> Result<ImageRef, ParcelError> {
    check_image(dir).await?;
    let files = pack_each(dir, chunking_of, writer).await?;
    Ok(ImageRef { files })
}

/// Pages are looked for at the places where the runtime puts them. `None`: no part of the image.
fn chunking_of(name: &str) -> Option<Chunking> {
    match name {
        STARTED | DISK => None,
        // The rest of a descriptor that was being written.
        hidden if hidden.starts_with('.') => None,
        pages if pages.ends_with(".img") => Some(Chunking::MEMORY),
        _ => Some(Chunking::Content),
    }
}

/// Makes the directory `into` (0700), which must not be there, and the memory image in it. After an error there is none.
///
/// # Errors
/// [`ParcelError::File`] where a part is lost: the file, and the byte of it where the first lost page begins;
/// [`ParcelError::Image`] where the image isn't what its descriptor says; else as [`unpack_files`].
pub async fn unpack_image(repository: &Repository, image: &ImageRef, into: &Path) -> Result<(), ParcelError> {
    if let Some((name, _)) = image.files.iter().find(|(name, _)| chunking_of(name).is_none()) {
        return Err(ParcelError::Damaged(format!("'{}' is no part of an image", name.chars().take(80).collect::<String>())));
    }
    unpack_files(repository, &image.files, into).await?;
    or_remove(into, check_image(into).await).await
}

async fn check_image(dir: &Path) -> Result<(), ParcelError> {
    let dir = dir.to_owned();
    blocking("reading an image's descriptor", move || Ok(ImageDescriptor::read(&dir).map(drop)?)).await
}
