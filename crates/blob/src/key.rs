//! The key of an encrypted repository: where it comes from, and how it wraps the master key.
//!
//! A repository's master key is random and never changes. It lies in `keys/ID`, encrypted under a key that is derived from
//! the one that the owner keeps; ID is derived from that, too, so the right wrap is found without trying. To rotate is to
//! write a second wrap and then to remove the first: whoever dies in between leaves a repository that opens with either.

use crate::{
    crypto::Keys,
    envelope::{self, Kind},
    error::{Error, key_file},
    store::{Created, Store},
};
use std::{fmt, fs, io::Read, path::PathBuf, process::Stdio};

/// Shortest key. It must be random bytes: nothing slows down who guesses it.
const SHORTEST: usize = 32;
/// Longest key.
const LONGEST: usize = 64 << 10;
/// Longest wrapped key in the store.
const MAX_WRAP: u64 = 4096;

/// Where the key of an encrypted repository comes from. One newline at its end doesn't count.
#[derive(Clone, PartialEq, Eq)]
pub enum KeySource {
    File(PathBuf),
    /// What this command, run by `/bin/sh -c`, writes to its standard output.
    Command(String),
    /// The key itself.
    Bytes(Vec<u8>),
}

impl fmt::Debug for KeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeySource::File(path) => write!(f, "the file {}", path.display()),
            KeySource::Command(command) => write!(f, "the command '{command}'"),
            KeySource::Bytes(_) => write!(f, "memory"),
        }
    }
}

impl KeySource {
    /// Reads the key. Blocks: a command may take its time.
    ///
    /// # Errors
    /// It can't be read, or is too short or too long.
    pub fn read(&self) -> Result<Vec<u8>, Error> {
        let wrong = |what: String| Error::KeySource { from: format!("{self:?}"), what };
        let mut key = Vec::new();
        match self {
            KeySource::File(path) => {
                let file = fs::File::open(path).map_err(|e| key_file(path, &e))?;
                file.take(LONGEST as u64 + 1).read_to_end(&mut key).map_err(|e| key_file(path, &e))?;
            }
            KeySource::Command(command) => {
                let mut child = std::process::Command::new("/bin/sh");
                let output = child.args(["-c", command]).stdin(Stdio::null()).output().map_err(|e| wrong(e.to_string()))?;
                if !output.status.success() {
                    let says = String::from_utf8_lossy(&output.stderr).trim().chars().take(200).collect::<String>();
                    return Err(wrong(format!("it ended with {}: {says}", output.status)));
                }
                key = output.stdout;
            }
            KeySource::Bytes(bytes) => key.clone_from(bytes),
        }
        if key.last() == Some(&b'\n') {
            key.pop();
        }
        match key.len() {
            0..SHORTEST => Err(wrong(format!("it has {} bytes, at least {SHORTEST} are needed", key.len()))),
            SHORTEST..=LONGEST => Ok(key),
            _ => Err(wrong(format!("it has more than {LONGEST} bytes"))),
        }
    }

    pub(crate) async fn wrapper(&self, repository: [u8; 16]) -> Result<Wrapper, Error> {
        let source = self.clone();
        let key = tokio::task::spawn_blocking(move || source.read()).await.map_err(|e| Error::Aborted(e.to_string()))??;
        Ok(Wrapper::new(&key, repository))
    }
}

/// The owner's key in use.
pub(crate) struct Wrapper {
    id: String,
    keys: Keys,
    bound: Vec<u8>,
}

impl Wrapper {
    fn new(key: &[u8], repository: [u8; 16]) -> Wrapper {
        // Of key and repository: two repositories that are made in one place at once don't share a wrap.
        let id = blake3::derive_key("dormouse blob 2026 key id", &[&repository[..], key].concat());
        let id = blake3::Hash::from_bytes(id).to_hex()[..32].to_owned();
        let keys = Keys::derive(&blake3::derive_key("dormouse blob 2026 key wrap", key));
        let bound = [b"master key", &repository[..], id.as_bytes()].concat();
        Wrapper { id, keys, bound }
    }

    fn path(&self) -> String {
        format!("keys/{}", self.id)
    }

    /// Puts the wrapped master key into the store, and looks whether it opens.
    pub(crate) async fn store(&self, store: &Store, master: &[u8; 32]) -> Result<(), Error> {
        let object = envelope::wrap(Kind::KEY, &self.keys.seal(&self.bound, master));
        if store.create(&self.path(), object.clone().into()).await? == Created::WasThere {
            // Of the same key, so it can only be the same or damaged.
            store.replace(&self.path(), object.into()).await?;
        }
        match self.load(store).await? {
            Some(back) if back == *master => Ok(()),
            _ => Err(Error::damaged(self.path(), "it doesn't read back as it was written")),
        }
    }

    /// The master key, where one is wrapped under this key.
    pub(crate) async fn load(&self, store: &Store) -> Result<Option<[u8; 32]>, Error> {
        let path = self.path();
        let Some(object) = store.find(&path, MAX_WRAP).await? else { return Ok(None) };
        let sealed = envelope::unwrap(&path, Kind::KEY, &object)?;
        let master = self.keys.open(&self.bound, sealed).ok().and_then(|bytes| bytes.try_into().ok());
        master.map(Some).ok_or_else(|| Error::damaged(path, "the master key in it is not what was wrapped"))
    }

    /// The same where it has to be there.
    pub(crate) async fn unwrap(&self, store: &Store) -> Result<[u8; 32], Error> {
        match self.load(store).await? {
            Some(master) => Ok(master),
            None => Err(Error::WrongKey { store: store.name(), found: store.list("keys").await?.len() }),
        }
    }

    /// Removes all wraps but this one.
    pub(crate) async fn retire_others(&self, store: &Store) -> Result<(), Error> {
        let own = self.path();
        for other in store.list("keys").await?.into_iter().filter(|listed| listed.path != own) {
            faults::point("blob.key.retire");
            store.delete(&other.path).await?;
        }
        Ok(())
    }
}

/// Checks one wrapped key as far as that goes without the key that opens it.
pub(crate) fn check(path: &str, object: &[u8]) -> Result<(), Error> {
    let body = envelope::unwrap(path, Kind::KEY, object)?;
    if body.len() != 32 + crate::crypto::OVERHEAD {
        return Err(Error::damaged(path, format!("a wrapped key of {} bytes", body.len())));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_and_too_short_ones_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("key");
        let key = "0123456789abcdef0123456789abcdef";
        fs::write(&file, format!("{key}\n")).unwrap();
        assert_eq!(KeySource::File(file.clone()).read().unwrap(), key.as_bytes());
        assert_eq!(KeySource::Command(format!("echo {key}")).read().unwrap(), key.as_bytes());
        for (source, says) in [
            (KeySource::Bytes(vec![1; 31]), "31 bytes"),
            (KeySource::Bytes(vec![1; LONGEST + 1]), "more than"),
            (KeySource::Command("echo no >&2; exit 3".to_owned()), "exit status: 3: no"),
            (KeySource::File(dir.path().join("none")), "No such file"),
        ] {
            let error = source.read().unwrap_err();
            assert!(matches!(error, Error::KeySource { .. }) && error.to_string().contains(says), "{error}");
        }
    }

    #[test]
    fn a_key_is_not_shown() {
        assert_eq!(format!("{:?}", KeySource::Bytes(vec![65; 40])), "memory");
    }
}
