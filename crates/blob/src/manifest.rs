//! Manifests: small objects with names, which tell what belongs together. They are what callers begin to read from, and
//! what keeps chunks from being collected. A manifest never changes.
//!
//! In an encrypted repository the contents are encrypted with the name bound in, and the object is called by a keyed hash
//! of the name, so that the store tells neither. Contents are compressed.

use crate::{
    crypto::Cipher,
    envelope::{self, Kind},
    error::Error,
    repository::{Inner, Repository},
    store::Created,
};
use futures_util::{StreamExt, TryStreamExt, stream};

/// Longest manifest, plain. What is longer belongs into a stream that the manifest refers to.
pub const MAX_MANIFEST: usize = 16 << 20;
const MAX_STORED: u64 = (MAX_MANIFEST + (64 << 10)) as u64;
const AT_ONCE: usize = 16;

/// A manifest's name: 1 to 200 letters, digits, `-`, `_` or `.`, no `.` in front.
pub(crate) fn check_name(name: &str) -> Result<(), Error> {
    let plain = name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
    if plain && (1..=200).contains(&name.len()) && !name.starts_with('.') {
        return Ok(());
    }
    Err(Error::ManifestName { name: name.chars().take(80).collect() })
}

fn path(cipher: &Cipher, name: &str) -> String {
    format!("manifests/{}", cipher.manifest_object(name))
}

fn bound(object: &str) -> Vec<u8> {
    [b"manifest ", object.as_bytes()].concat()
}

/// Name and contents as they are stored: the length of the name, the name, the contents; compressed as one.
fn encode(cipher: &Cipher, path: &str, name: &str, contents: &[u8]) -> Result<Vec<u8>, Error> {
    let mut plain = vec![u8::try_from(name.len()).unwrap_or(u8::MAX)];
    plain.extend_from_slice(name.as_bytes());
    plain.extend_from_slice(contents);
    let packed = zstd::bulk::compress(&plain, 3).map_err(|e| Error::io("can't compress a manifest", e))?;
    Ok(envelope::wrap(Kind::MANIFEST, &cipher.seal(&bound(path), packed)))
}

pub(crate) fn decode(cipher: &Cipher, at: &str, object: &[u8]) -> Result<(String, Vec<u8>), Error> {
    let damaged = |what: &str| Error::damaged(at, what);
    let sealed = envelope::unwrap(at, Kind::MANIFEST, object)?;
    let packed = cipher.open(&bound(at), sealed).map_err(|_| damaged("it is not what was encrypted"))?;
    let plain = zstd::bulk::decompress(&packed, MAX_MANIFEST + 256).map_err(|_| damaged("it can't be unpacked"))?;
    let (length, rest) = plain.split_first().ok_or_else(|| damaged("it is empty"))?;
    let (name, contents) = rest.split_at_checked(usize::from(*length)).ok_or_else(|| damaged("its name is cut off"))?;
    let name = std::str::from_utf8(name).map_err(|_| damaged("its name is no text"))?;
    if path(cipher, name) != at {
        return Err(damaged(&format!("it is the manifest '{name}' under another name")));
    }
    Ok((name.to_owned(), contents.to_vec()))
}

impl Inner {
    pub(crate) async fn manifest_objects(&self) -> Result<Vec<String>, Error> {
        Ok(self.store.list("manifests").await?.into_iter().map(|listed| listed.path).collect())
    }

    pub(crate) async fn read_manifest(&self, path: &str) -> Result<(String, Vec<u8>), Error> {
        decode(&self.cipher, path, &self.store.get(path, MAX_STORED).await?)
    }
}

impl Repository {
    /// Stores a manifest for good. Everything that it refers to has to be there: see [`crate::Writer::commit`]. The same
    /// contents under the same name once more are no error.
    ///
    /// # Errors
    /// [`Error::ManifestExists`] with other contents, [`Error::ManifestName`], [`Error::TooLarge`], [`Error::InUse`] where
    /// another server has taken the repository over.
    pub async fn put_manifest(&self, name: &str, contents: &[u8]) -> Result<(), Error> {
        check_name(name)?;
        if contents.len() > MAX_MANIFEST {
            let (bytes, limit) = (contents.len() as u64, MAX_MANIFEST as u64);
            return Err(Error::TooLarge { what: format!("the manifest '{name}'"), bytes, limit });
        }
        let inner = &self.inner;
        inner.must_own().await?;
        let path = path(&inner.cipher, name);
        let object = encode(&inner.cipher, &path, name, contents)?;
        faults::point("blob.manifest.put");
        if inner.store.create(&path, object.into()).await? == Created::WasThere {
            let (_, there) = inner.read_manifest(&path).await?;
            if there != contents {
                return Err(Error::ManifestExists { name: name.to_owned() });
            }
        }
        faults::point("blob.manifest.stored");
        Ok(())
    }

    /// A manifest's contents; `None` where there is none of that name.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Newer`], and what the store says.
    pub async fn manifest(&self, name: &str) -> Result<Option<Vec<u8>>, Error> {
        check_name(name)?;
        let path = path(&self.inner.cipher, name);
        let Some(object) = self.inner.store.find(&path, MAX_STORED).await? else { return Ok(None) };
        decode(&self.inner.cipher, &path, &object).map(|(_, contents)| Some(contents))
    }

    /// The names of all manifests, sorted. An encrypted repository has to read them all for that.
    ///
    /// # Errors
    /// [`Error::Damaged`] where one can't be read, and what the store says.
    pub async fn manifests(&self) -> Result<Vec<String>, Error> {
        let paths = self.inner.manifest_objects().await?;
        let mut names: Vec<String> = if self.is_encrypted() {
            let read = stream::iter(paths).map(|path| async move {
                match self.inner.read_manifest(&path).await {
                    Ok((name, _)) => Ok(Some(name)),
                    // Deleted since it was listed.
                    Err(Error::Missing { .. }) => Ok(None),
                    Err(error) => Err(error),
                }
            });
            let read: Vec<Option<String>> = read.buffer_unordered(AT_ONCE).try_collect().await?;
            read.into_iter().flatten().collect()
        } else {
            paths.iter().filter_map(|path| path.strip_prefix("manifests/").map(str::to_owned)).collect()
        };
        names.sort();
        Ok(names)
    }

    /// Removes a manifest; fine where there is none. What it referred to stays until the next collection.
    ///
    /// # Errors
    /// [`Error::InUse`] where another server has taken the repository over, and what the store says.
    pub async fn delete_manifest(&self, name: &str) -> Result<(), Error> {
        check_name(name)?;
        self.inner.must_own().await?;
        faults::point("blob.manifest.delete");
        self.inner.store.delete(&path(&self.inner.cipher, name)).await
    }
}
