//! The session's own certificate authority in the trust stores: of the system, and of Java. A fork's takes the place of
//! its parent's.

use super::settings::ensure_file;
use base64::{Engine as _, engine::general_purpose::STANDARD};
use sha1::{Digest, Sha1};
use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};
use wire::network::{BUNDLE, CERTIFICATE, JAVA_BUNDLE, JAVA_PASSWORD};

/// Where other systems keep their bundles: used where they are.
const OTHER_BUNDLES: &[&str] = &["/etc/ssl/cert.pem", "/etc/ssl/ca-bundle.pem", "/etc/pki/tls/certs/ca-bundle.crt"];

const BEGIN: &str = "# The session's own authority begins.\n";
const END: &str = "# The session's own authority ends.\n";

/// Puts an authority in, or takes the one that is there out. What fails is logged.
pub fn apply(ca: Option<&str>) {
    let steps = [("the system's certificates", bundles(ca)), (CERTIFICATE, certificate(ca)), (JAVA_BUNDLE, java(ca))];
    for (what, result) in steps {
        if let Err(error) = result {
            log!("{what}: {error}");
        }
    }
}

fn certificate(ca: Option<&str>) -> io::Result<()> {
    match ca {
        Some(ca) => ensure_file(Path::new(CERTIFICATE), ca.as_bytes()),
        None => absent(CERTIFICATE),
    }
}

fn absent(path: &str) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn bundles(ca: Option<&str>) -> io::Result<()> {
    let there = OTHER_BUNDLES.iter().filter_map(|path| fs::canonicalize(path).ok());
    let own = fs::canonicalize(BUNDLE).unwrap_or_else(|_| PathBuf::from(BUNDLE));
    let all: BTreeSet<PathBuf> = there.chain([own]).collect();
    // Each for itself: one that can't be read must not keep the others from it.
    all.iter().map(|path| bundle(path, ca)).fold(Ok(()), Result::and)
}

fn bundle(path: &Path, ca: Option<&str>) -> io::Result<()> {
    let old = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound && ca.is_none() => return Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(error),
    };
    ensure_file(path, bundle_with(&old, ca).as_bytes())
}

fn bundle_with(old: &str, ca: Option<&str>) -> String {
    let mut new = old.to_owned();
    while let Some(from) = new.find(BEGIN) {
        let to = new[from..].find(END).map_or(new.len(), |to| from + to + END.len());
        new.replace_range(from..to, "");
    }
    if let Some(ca) = ca {
        if !new.is_empty() && !new.ends_with('\n') {
            new.push('\n');
        }
        new.push_str(&format!("{BEGIN}{}\n{END}", ca.trim_end()));
    }
    new
}

/// A trust store in Java's own form with all of the bundle in it.
fn java(ca: Option<&str>) -> io::Result<()> {
    if ca.is_none() {
        return absent(JAVA_BUNDLE);
    }
    let store = key_store(&certificates(&fs::read_to_string(BUNDLE)?));
    ensure_file(Path::new(JAVA_BUNDLE), &store)
}

/// The certificates of a bundle in their binary form.
fn certificates(pem: &str) -> Vec<Vec<u8>> {
    let blocks = pem.split("-----BEGIN CERTIFICATE-----").skip(1);
    let bodies = blocks.filter_map(|block| block.split("-----END CERTIFICATE-----").next());
    let plain = |body: &str| body.chars().filter(|c| !c.is_whitespace()).collect::<String>();
    bodies.filter_map(|body| STANDARD.decode(plain(body)).ok()).collect()
}

/// A JKS file: magic, version 2, trusted certificates, a checksum over the password and all of it (the format is that of
/// `sun.security.provider.JavaKeyStore`).
fn key_store(certificates: &[Vec<u8>]) -> Vec<u8> {
    let mut store = Vec::new();
    let text = |store: &mut Vec<u8>, text: &str| {
        store.extend_from_slice(&u16::try_from(text.len()).unwrap_or(0).to_be_bytes());
        store.extend_from_slice(text.as_bytes());
    };
    store.extend_from_slice(&0xFEED_FEED_u32.to_be_bytes());
    store.extend_from_slice(&2u32.to_be_bytes());
    store.extend_from_slice(&u32::try_from(certificates.len()).unwrap_or(0).to_be_bytes());
    for (n, certificate) in certificates.iter().enumerate() {
        store.extend_from_slice(&2u32.to_be_bytes());
        text(&mut store, &format!("ca-{n}"));
        store.extend_from_slice(&0u64.to_be_bytes());
        text(&mut store, "X.509");
        store.extend_from_slice(&u32::try_from(certificate.len()).unwrap_or(0).to_be_bytes());
        store.extend_from_slice(certificate);
    }
    let mut sum = Sha1::new();
    for unit in JAVA_PASSWORD.encode_utf16() {
        sum.update(unit.to_be_bytes());
    }
    sum.update(b"Mighty Aphrodite");
    sum.update(&store);
    store.extend_from_slice(&sum.finalize());
    store
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_authority_takes_the_place_of_the_one_before_and_goes_without_a_trace() {
        let system = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        let parent = bundle_with(system, Some("-----BEGIN CERTIFICATE-----\nBBBB\n-----END CERTIFICATE-----\n"));
        assert_eq!(certificates(&parent).len(), 2);
        let fork = bundle_with(&parent, Some("-----BEGIN CERTIFICATE-----\nCCCC\n-----END CERTIFICATE-----"));
        assert!(!fork.contains("BBBB") && fork.contains("CCCC") && fork.starts_with(system));
        assert_eq!(bundle_with(&fork, None), system);
        assert_eq!(bundle_with("no end of line", Some("X")).lines().next(), Some("no end of line"));
    }

    #[test]
    fn a_key_store_has_the_form_that_java_reads() {
        let store = key_store(&[vec![1, 2, 3]]);
        assert_eq!(&store[..12], [0xFE, 0xED, 0xFE, 0xED, 0, 0, 0, 2, 0, 0, 0, 1]);
        assert_eq!(store.len(), 12 + 4 + 2 + 4 + 8 + 2 + 5 + 4 + 3 + 20);
    }
}
