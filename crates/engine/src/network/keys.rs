//! The server's own key, and what is derived from it: the seal of secrets, the authorities of sessions, signatures of links.

use crate::OpenError;
use blob::KeySource;
use chacha20poly1305::{
    KeyInit, XChaCha20Poly1305, XNonce,
    aead::{Aead, Payload},
};
use model::network::SecretName;
use rand::Rng;
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};
use store::{SecretRow, SessionRow};
use wire::control::CaSeed;

/// The key's file in the data directory, where no other key is given.
const FILE: &str = "secrets.key";
const NONCE: usize = 24;

/// What is done with the server's key.
pub(crate) struct Keyring {
    cipher: XChaCha20Poly1305,
    authorities: [u8; 32],
    links: [u8; 32],
    /// Where the key is from, for messages.
    from: String,
    /// It lies beside what it encrypts.
    beside: bool,
}

impl Keyring {
    /// Reads the key; without a source the one of the data directory, which is made where nothing needs it yet. Blocks.
    ///
    /// # Errors
    /// It can't be read; or it is gone, and secrets were sealed with it.
    pub(crate) fn open(source: Option<&KeySource>, data_dir: &Path, kept: &[SecretRow]) -> Result<Keyring, OpenError> {
        let path = data_dir.join(FILE);
        if source.is_none() && !path.exists() {
            if !kept.is_empty() {
                let count = kept.len();
                return Err(OpenError::Other(format!(
                    "{count} secrets are kept under a key that isn't here: put {} back or name the key with --key-file; or, where \
                     it is lost, give them up with --forget-secrets",
                    path.display()
                )));
            }
            make(&path).map_err(|source| OpenError::Io { what: "make the key", path: path.clone(), source })?;
        }
        let own = KeySource::File(path);
        let from = source.unwrap_or(&own);
        let key = from.read().map_err(|e| OpenError::Other(format!("the key of the secrets: {e}")))?;
        Ok(Keyring { from: format!("{from:?}"), beside: source.is_none(), ..Keyring::derive(&key) })
    }

    fn derive(key: &[u8]) -> Keyring {
        Keyring {
            cipher: XChaCha20Poly1305::new(&blake3::derive_key("dormouse server 2026 secrets", key).into()),
            authorities: blake3::derive_key("dormouse server 2026 authorities of sessions", key),
            links: blake3::derive_key("dormouse server 2026 links", key),
            from: String::new(),
            beside: false,
        }
    }

    /// True where whoever has the data directory has the key, too.
    pub(crate) fn lies_beside(&self) -> bool {
        self.beside
    }

    /// Signs links.
    pub(crate) fn links(&self) -> &[u8; 32] {
        &self.links
    }

    /// Encrypts a secret; what comes out opens under its own name only.
    pub(crate) fn seal(&self, name: &SecretName, value: &str) -> Vec<u8> {
        let mut nonce = [0u8; NONCE];
        rand::rng().fill_bytes(&mut nonce);
        let payload = Payload { msg: value.as_bytes(), aad: name.as_str().as_bytes() };
        let sealed = self.cipher.encrypt(&XNonce::from(nonce), payload);
        [&nonce[..], &sealed.expect("the cipher takes messages of up to 256 GiB")].concat()
    }

    /// `None`: it was sealed with another key, or is damaged.
    pub(crate) fn unseal(&self, row: &SecretRow) -> Option<String> {
        let (nonce, sealed) = row.sealed.split_first_chunk::<NONCE>()?;
        let payload = Payload { msg: sealed, aad: row.name.as_str().as_bytes() };
        let value = self.cipher.decrypt(&XNonce::from(*nonce), payload).ok()?;
        String::from_utf8(value).ok()
    }

    /// The secrets that this key doesn't open.
    ///
    /// # Errors
    /// It opens none of them: then it is another key.
    pub(crate) fn unreadable<'a>(&self, kept: &'a [SecretRow]) -> Result<Vec<&'a SecretRow>, OpenError> {
        let unreadable: Vec<_> = kept.iter().filter(|row| self.unseal(row).is_none()).collect();
        if !unreadable.is_empty() && unreadable.len() == kept.len() {
            return Err(OpenError::Other(format!(
                "the key from {} opens none of the {} secrets that are kept: start the server with the key that they were set \
                 under; or, where it is lost, give them up with --forget-secrets",
                self.from,
                kept.len()
            )));
        }
        Ok(unreadable)
    }

    /// What a session's own authority is made from: always the same, and of no use for another session's.
    pub(crate) fn ca_seed(&self, row: &SessionRow) -> CaSeed {
        let seed = blake3::keyed_hash(&self.authorities, row.id.to_string().as_bytes());
        CaSeed { seed: seed.to_hex().to_string(), label: row.id.to_string(), from: row.created_at }
    }
}

/// Makes a key that is on storage, whole, before anything is sealed with it.
fn make(path: &Path) -> io::Result<()> {
    let mut key = [0u8; 32];
    rand::rng().fill_bytes(&mut key);
    let text: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    let new = path.with_extension("key.new");
    let mut file = OpenOptions::new().create(true).write(true).truncate(true).mode(0o600).open(&new)?;
    writeln!(file, "{text}")?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    path.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::{Runtime, SessionId, Timestamp};
    use std::os::unix::fs::MetadataExt;

    fn row(name: &str, sealed: Vec<u8>) -> SecretRow {
        let at = Timestamp(1);
        SecretRow { name: name.parse().unwrap(), sealed, hosts: Vec::new(), created_at: at, updated_at: at }
    }

    #[test]
    fn a_secret_opens_with_its_key_under_its_name_and_never_otherwise() {
        let keys = Keyring::derive(&[1; 32]);
        let name: SecretName = "TOKEN".parse().unwrap();
        let sealed = keys.seal(&name, "s3cret");
        assert_eq!(keys.unseal(&row("TOKEN", sealed.clone())).as_deref(), Some("s3cret"));
        assert!(!sealed.windows(6).any(|window| window == b"s3cret"));
        assert_ne!(sealed, keys.seal(&name, "s3cret"), "each has a nonce of its own");
        assert_eq!(keys.unseal(&row("OTHER", sealed.clone())), None);
        assert_eq!(Keyring::derive(&[2; 32]).unseal(&row("TOKEN", sealed.clone())), None);
        for at in 0..sealed.len() {
            let mut bent = sealed.clone();
            bent[at] ^= 1;
            assert_eq!(keys.unseal(&row("TOKEN", bent)), None, "byte {at}");
        }
        assert_eq!(keys.unseal(&row("TOKEN", sealed[..20].to_vec())), None);
    }

    #[test]
    fn a_key_is_made_once_and_missed_when_it_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let first = Keyring::open(None, dir.path(), &[]).unwrap();
        assert!(first.lies_beside());
        assert_eq!(fs::metadata(dir.path().join(FILE)).unwrap().mode() & 0o777, 0o600);
        let kept = [row("A", first.seal(&"A".parse().unwrap(), "x"))];
        let again = Keyring::open(None, dir.path(), &kept).unwrap();
        assert!(again.unreadable(&kept).unwrap().is_empty());
        let other = Keyring::open(Some(&KeySource::Bytes(vec![9; 32])), dir.path(), &kept).unwrap();
        assert!(!other.lies_beside());
        assert!(other.unreadable(&kept).err().unwrap().to_string().contains("opens none of the 1 secrets"));
        let damaged = [kept[0].clone(), row("B", vec![1, 2])];
        assert_eq!(again.unreadable(&damaged).unwrap(), [&damaged[1]], "one that is damaged is no other key");
        fs::remove_file(dir.path().join(FILE)).unwrap();
        let error = Keyring::open(None, dir.path(), &kept).err().unwrap().to_string();
        assert!(error.contains("secrets.key back"), "{error}");
        assert!(!dir.path().join(FILE).exists(), "no key is made that would hide the loss");
    }

    #[test]
    fn authorities_differ_by_session_and_stay() {
        let keys = Keyring::derive(&[1; 32]);
        let session = |id| SessionRow::new(id, Runtime::Gvisor, "debian", Timestamp(5));
        let (a, b) = (session(SessionId::new()), session(SessionId::new()));
        assert_eq!(keys.ca_seed(&a).seed, keys.ca_seed(&a).seed);
        assert_ne!(keys.ca_seed(&a).seed, keys.ca_seed(&b).seed);
        assert_eq!((keys.ca_seed(&a).seed.len(), keys.ca_seed(&a).from), (64, Timestamp(5)));
    }
}
