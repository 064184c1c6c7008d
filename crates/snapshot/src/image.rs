//! The descriptor of a saved memory: what it is, what it needs, and whether it is whole.
//!
//! It is written last into an image's directory, as `image.json`: a directory without one is the rest of a capture that
//! was cut short. It carries a checksum of itself and the sizes of the other files; their contents are the runtime's to
//! check. A newer format is refused by its number, before anything else of it is read.

use crate::sealed::{Seal, SealError};
use model::{Generation, SessionId, Timestamp};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

/// The file's name in an image's directory.
pub const FILE: &str = "image.json";
/// Written into an image, synced, right before programs run on from it.
pub const STARTED: &str = "started";
/// Beside an image: the fingerprint of the disk that belongs to it ([`crate::disk::fingerprint`]).
pub const DISK: &str = "disk-fingerprint";
const FORMAT: u32 = 1;
const SEAL: Seal = Seal { magic: "dormouse-image", format: FORMAT, max_bytes: 1 << 20, faults: ["image.write", "image.rename"] };

/// What an image is and needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageDescriptor {
    pub session: SessionId,
    pub generation: Generation,
    pub created_at: Timestamp,
    pub runtime: String,
    pub runsc_hash: String,
    pub runsc_version: String,
    pub guest_hash: String,
    pub template_hash: String,
    /// Lower layers of the disk, top-most first, where they were when it was written.
    pub lower: Vec<PathBuf>,
    /// What the processor could do: programs may have looked once and rely on it.
    pub cpu_features: BTreeSet<String>,
    /// Every other file of the image.
    pub files: Vec<ImageFile>,
}

/// One file of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageFile {
    pub name: String,
    pub size_bytes: u64,
}

/// The programs and the tree that a memory depends on, by content hash.
#[derive(Debug, Clone, Copy)]
pub struct Needs<'a> {
    pub runsc_hash: &'a str,
    pub runsc_version: &'a str,
    pub guest_hash: &'a str,
    pub template_hash: &'a str,
}

/// Why an image can't be used.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error("there is no memory image at {0}")]
    Missing(PathBuf),
    #[error("the memory image at {path} is damaged: {what}")]
    Damaged { path: PathBuf, what: String },
    #[error("the memory image at {path} has format {found}, this version reads up to {FORMAT}: use a newer one")]
    Newer { path: PathBuf, found: u32 },
    #[error("the memory image needs what this processor lacks: {0}")]
    Processor(String),
    #[error("can't use the memory image at {path}: {source}")]
    Io { path: PathBuf, source: io::Error },
}

impl ImageDescriptor {
    /// Describes the image in `dir` as it stands.
    ///
    /// # Errors
    /// The directory can't be read.
    pub fn of(
        dir: &Path,
        session: SessionId,
        generation: Generation,
        created_at: Timestamp,
        needs: Needs<'_>,
        lower: Vec<PathBuf>,
    ) -> Result<ImageDescriptor, ImageError> {
        let io = |source| ImageError::Io { path: dir.to_owned(), source };
        let mut files = Vec::new();
        for entry in fs::read_dir(dir).map_err(io)? {
            let entry = entry.map_err(io)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name != FILE {
                files.push(ImageFile { name, size_bytes: entry.metadata().map_err(io)?.len() });
            }
        }
        files.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(ImageDescriptor {
            session,
            generation,
            created_at,
            runtime: "gvisor".to_owned(),
            runsc_hash: needs.runsc_hash.to_owned(),
            runsc_version: needs.runsc_version.to_owned(),
            guest_hash: needs.guest_hash.to_owned(),
            template_hash: needs.template_hash.to_owned(),
            lower,
            cpu_features: cpu_features(),
            files,
        })
    }

    /// Writes the descriptor into its image's directory, durably, after the other files.
    ///
    /// # Errors
    /// [`ImageError::Io`].
    pub fn write(&self, dir: &Path) -> Result<(), ImageError> {
        let io = |source: io::Error| ImageError::Io { path: dir.to_owned(), source };
        for file in &self.files {
            File::open(dir.join(&file.name)).and_then(|file| file.sync_all()).map_err(io)?;
        }
        SEAL.write(dir, FILE, self).map_err(io)
    }

    /// Reads an image's descriptor and checks it against its files.
    ///
    /// # Errors
    /// [`ImageError::Missing`], [`ImageError::Damaged`] with the part, [`ImageError::Newer`], [`ImageError::Io`].
    pub fn read(dir: &Path) -> Result<ImageDescriptor, ImageError> {
        let damaged = |what: String| ImageError::Damaged { path: dir.to_owned(), what };
        let descriptor: ImageDescriptor = SEAL.read(&dir.join(FILE)).map_err(|error| match error {
            SealError::Missing => ImageError::Missing(dir.to_owned()),
            SealError::Damaged(what) => damaged(what),
            SealError::Newer(found) => ImageError::Newer { path: dir.to_owned(), found },
            SealError::Io(source) => ImageError::Io { path: dir.to_owned(), source },
        })?;
        for file in &descriptor.files {
            match fs::symlink_metadata(dir.join(&file.name)) {
                Ok(meta) if meta.is_file() && meta.len() == file.size_bytes => {}
                Ok(meta) => {
                    return Err(damaged(format!("{} has {} bytes instead of {}", file.name, meta.len(), file.size_bytes)));
                }
                Err(_) => return Err(damaged(format!("{} is missing", file.name))),
            }
        }
        Ok(descriptor)
    }

    /// Whether this machine can load it now.
    ///
    /// # Errors
    /// [`ImageError::Processor`].
    pub fn check_loadable(&self) -> Result<(), ImageError> {
        let here = cpu_features();
        let missing: Vec<&str> = self.cpu_features.difference(&here).map(String::as_str).collect();
        if !missing.is_empty() {
            return Err(ImageError::Processor(missing.join(", ")));
        }
        Ok(())
    }

    /// All bytes of the image.
    pub fn size_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.size_bytes).sum()
    }
}

/// The processor's features as the kernel names them (proc(5), `cpuinfo`).
fn cpu_features() -> BTreeSet<String> {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = text.lines().find_map(|line| line.strip_prefix("flags")?.split_once(':').map(|(_, flags)| flags));
    flags.unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(dir: &Path) -> ImageDescriptor {
        fs::write(dir.join("pages.img"), vec![7; 5000]).unwrap();
        let needs = Needs { runsc_hash: "r", runsc_version: "20240729.0", guest_hash: "g", template_hash: "t" };
        let at = Timestamp(1_700_000_000_000);
        let descriptor = ImageDescriptor::of(dir, SessionId::new(), Generation(3), at, needs, vec![dir.to_owned()]).unwrap();
        descriptor.write(dir).unwrap();
        descriptor
    }

    #[test]
    fn it_reads_back_as_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let descriptor = made(dir.path());
        assert_eq!(ImageDescriptor::read(dir.path()).unwrap(), descriptor);
        descriptor.check_loadable().unwrap();
        assert_eq!(descriptor.size_bytes(), 5000);
    }

    #[test]
    fn every_flipped_byte_of_the_descriptor_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let descriptor = made(dir.path());
        let good = fs::read(dir.path().join(FILE)).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x01;
            fs::write(dir.path().join(FILE), &bad).unwrap();
            let read = ImageDescriptor::read(dir.path());
            assert!(read.is_err() || read.unwrap() == descriptor, "byte {at}");
        }
    }

    #[test]
    fn missing_cut_and_newer_ones_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(ImageDescriptor::read(dir.path()), Err(ImageError::Missing(_))));
        made(dir.path());
        fs::write(dir.path().join("pages.img"), vec![7; 4999]).unwrap();
        assert!(matches!(ImageDescriptor::read(dir.path()), Err(ImageError::Damaged { what, .. }) if what.contains("pages.img")));
        let text = fs::read_to_string(dir.path().join(FILE)).unwrap().replace("\"format\":1", "\"format\":2");
        fs::write(dir.path().join(FILE), text).unwrap();
        assert!(matches!(ImageDescriptor::read(dir.path()), Err(ImageError::Newer { found: 2, .. })));
    }

    #[test]
    fn a_processor_that_lacks_something_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let mut descriptor = made(dir.path());
        descriptor.cpu_features.insert("antigravity".to_owned());
        assert!(matches!(descriptor.check_loadable(), Err(ImageError::Processor(what)) if what == "antigravity"));
    }
}
