//! The CA of a session: its key comes from a seed, so that whoever holds the seed makes the same CA again.
//!
//! Signatures differ from one making to the next (ECDSA is randomised here), but subject, key, serial number and validity
//! don't: each of two certificates verifies what the other's key has signed.

use crate::host::Host;
use aws_lc_rs::{agreement, digest, rand::SecureRandom, signature};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, SerialNumber,
};
use rustls::{
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
    sign::CertifiedKey,
};
use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use zeroize::{Zeroize, Zeroizing};

const DAY: u64 = 24 * 60 * 60;
/// How long the CA is valid: longer than sessions live.
const CA_LIFE: u64 = 3650 * DAY;
/// The latest beginning of a CA that is believed: in the year 2200.
const LATEST: u64 = 7_258_118_400;
/// How long a host's certificate is valid, and after which time it is made anew.
const LEAF_LIFE: u64 = 30 * DAY;
const LEAF_RENEWAL: Duration = Duration::from_secs(DAY);
/// Most hosts' certificates that are kept.
const MOST_LEAVES: usize = 256;

/// What a session's CA is made from.
#[derive(Clone)]
pub struct CaKey {
    pub seed: [u8; 32],
    /// A part of the CA's name that people see: the session's id.
    pub label: String,
    /// Beginning of its validity, in seconds of the Unix clock.
    pub not_before: u64,
}

impl fmt::Debug for CaKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CaKey").field("label", &self.label).field("not_before", &self.not_before).finish_non_exhaustive()
    }
}

impl Drop for CaKey {
    fn drop(&mut self) {
        self.seed.zeroize();
    }
}

/// A certificate couldn't be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CaError {
    #[error("the library of keys refused: {0}")]
    Key(&'static str),
    #[error("the certificate can't be made: {0}")]
    Certificate(#[from] rcgen::Error),
    #[error("the key can't be used: {0}")]
    Tls(#[from] rustls::Error),
}

/// The certificate of a session's CA, as PEM. Empty if the library refuses to make it, which it has no reason to.
pub fn ca_certificate(key: &CaKey) -> String {
    let made = ca_key(&key.seed).and_then(|pair| Ok(ca_params(key)?.self_signed(&pair)?));
    made.map(|certificate| certificate.pem())
        .inspect_err(|error| tracing::error!(%error, "the session's CA can't be made"))
        .unwrap_or_default()
}

/// Makes certificates for hosts.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// One key for all hosts: they are all this process.
    key: KeyPair,
    leaves: Mutex<HashMap<String, (SystemTime, Arc<CertifiedKey>)>>,
}

impl Authority {
    pub fn new(key: &CaKey) -> Result<Authority, CaError> {
        Ok(Authority {
            issuer: Issuer::new(ca_params(key)?, ca_key(&key.seed)?),
            key: KeyPair::generate()?,
            leaves: Mutex::default(),
        })
    }

    /// A certificate for this host, with its key.
    pub fn leaf(&self, host: &Host) -> Result<Arc<CertifiedKey>, CaError> {
        let name = host.to_string();
        let now = SystemTime::now();
        let fresh = |made: &SystemTime| now.duration_since(*made).is_ok_and(|age| age < LEAF_RENEWAL);
        if let Some((made, leaf)) = crate::locked(&self.leaves).get(&name)
            && fresh(made)
        {
            return Ok(Arc::clone(leaf));
        }
        let leaf = Arc::new(self.make_leaf(&name, now)?);
        let mut leaves = crate::locked(&self.leaves);
        if leaves.len() >= MOST_LEAVES {
            leaves.clear();
        }
        leaves.insert(name, (now, Arc::clone(&leaf)));
        Ok(leaf)
    }

    fn make_leaf(&self, name: &str, now: SystemTime) -> Result<CertifiedKey, CaError> {
        let mut params = CertificateParams::new(vec![name.to_owned()])?;
        // Subject names are at most 64 characters (RFC 5280, A.1); what counts is the alternative name.
        params.distinguished_name.remove(DnType::CommonName);
        params.distinguished_name.push(DnType::CommonName, if name.len() <= 64 { name } else { "dormouse" });
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        // A clock that is behind inside must not make it a certificate of the future.
        valid(&mut params, now.saturating_sub(DAY), now + LEAF_LIFE);
        let mut serial = [0; 16];
        aws_lc_rs::rand::SystemRandom::new().fill(&mut serial).map_err(|_| CaError::Key("no random bytes"))?;
        serial[0] &= 0x7f;
        params.serial_number = Some(SerialNumber::from_slice(&serial));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        let certificate = params.signed_by(&self.key, &self.issuer)?;
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.key.serialize_der()));
        let key = rustls::crypto::aws_lc_rs::sign::any_ecdsa_type(&key)?;
        Ok(CertifiedKey::new(vec![certificate.der().clone()], key))
    }
}

fn ca_params(key: &CaKey) -> Result<CertificateParams, CaError> {
    let mut params = CertificateParams::new(Vec::new())?;
    let label: String = key.label.chars().filter(char::is_ascii_graphic).take(40).collect();
    params.distinguished_name.remove(DnType::CommonName);
    params.distinguished_name.push(DnType::OrganizationName, "Dormouse");
    params.distinguished_name.push(DnType::CommonName, format!("Dormouse session {label}"));
    // Bounded, because a date has a last one.
    let from = key.not_before.min(LATEST);
    valid(&mut params, from.saturating_sub(DAY), from + CA_LIFE);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let digest = digest::digest(&digest::SHA256, &[b"dormouse ca serial".as_slice(), &key.seed].concat());
    let mut serial = digest.as_ref()[..16].to_vec();
    serial[0] = serial[0] & 0x7f | 0x01;
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    Ok(params)
}

/// The key that belongs to a seed. Nearly every 32 bytes are a key of P-256; where some aren't, the next are tried.
fn ca_key(seed: &[u8; 32]) -> Result<KeyPair, CaError> {
    for round in 0..=u8::MAX {
        let text = Zeroizing::new([b"dormouse ca key".as_slice(), &[round], seed].concat());
        let scalar = digest::digest(&digest::SHA256, &text);
        let Ok(private) = agreement::PrivateKey::from_private_key(&agreement::ECDH_P256, scalar.as_ref()) else { continue };
        let public = private.compute_public_key().map_err(|_| CaError::Key("no public key"))?;
        let algorithm = &signature::ECDSA_P256_SHA256_ASN1_SIGNING;
        let pair = signature::EcdsaKeyPair::from_private_key_and_public_key(algorithm, scalar.as_ref(), public.as_ref())
            .map_err(|_| CaError::Key("the key doesn't fit its public key"))?;
        let document = pair.to_pkcs8v1().map_err(|_| CaError::Key("the key can't be written"))?;
        let der = PrivatePkcs8KeyDer::from(document.as_ref());
        return Ok(KeyPair::from_pkcs8_der_and_sign_algo(&der, &rcgen::PKCS_ECDSA_P256_SHA256)?);
    }
    Err(CaError::Key("no key in 256 rounds"))
}

/// Validity, in seconds of the Unix clock.
fn valid(params: &mut CertificateParams, from: u64, to: u64) {
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    params.not_before = epoch + Duration::from_secs(from);
    params.not_after = epoch + Duration::from_secs(to);
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::{
        RootCertStore,
        client::{WebPkiServerVerifier, danger::ServerCertVerifier},
        pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject},
    };

    fn key(seed: u8) -> CaKey {
        CaKey { seed: [seed; 32], label: "0198-session".into(), not_before: 1_700_000_000 }
    }

    fn verifies(ca: &str, leaf: &CertifiedKey, name: &str) -> bool {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(ca.as_bytes()).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build().unwrap();
        let name = ServerName::try_from(name.to_owned()).unwrap();
        verifier.verify_server_cert(&leaf.cert[0], &[], &name, &[], UnixTime::now()).is_ok()
    }

    #[test]
    fn certificates_of_one_seed_verify_each_others_leaves() {
        let (first, second) = (ca_certificate(&key(1)), ca_certificate(&key(1)));
        let authority = Authority::new(&key(1)).unwrap();
        for host in ["example.com", "with_underscore.test", "1.2.3.4", "2606:4700::1", &format!("{}.test", "a".repeat(63))] {
            let leaf = authority.leaf(&Host::parse(host).unwrap()).unwrap();
            assert!(host.contains('_') || verifies(&first, &leaf, host) && verifies(&second, &leaf, host), "{host}");
            assert!(!verifies(&first, &leaf, "other.test"));
            assert!(!verifies(&ca_certificate(&key(2)), &leaf, host));
        }
        let host = Host::parse("example.com").unwrap();
        assert!(Arc::ptr_eq(&authority.leaf(&host).unwrap(), &authority.leaf(&host).unwrap()), "leaves are kept");
    }

    #[test]
    fn any_beginning_of_validity_gives_a_certificate() {
        for not_before in [0, 1, u64::MAX] {
            let mut key = key(1);
            key.not_before = not_before;
            assert!(ca_certificate(&key).contains("BEGIN CERTIFICATE"));
        }
        let mut long = key(1);
        long.label = "x\0\u{e4}".repeat(500);
        assert!(ca_certificate(&long).contains("BEGIN CERTIFICATE"));
    }

    #[test]
    fn the_seed_is_not_in_debug_output() {
        let text = format!("{:?}", key(0xab));
        assert!(!text.contains("171") && !text.contains("seed"), "{text}");
    }
}
