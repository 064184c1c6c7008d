//! Images in an OCI layout folder: index, manifest, layers, each checked against its digest.
//!
//! Source: <https://github.com/opencontainers/image-spec> `image-layout.md`, `image-index.md`, `manifest.md`, `layer.md`.

use super::{ExtractError, ExtractOptions, Extracted, Extractor, decompressed, layer::Seen};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read},
    os::fd::AsFd,
    path::Path,
};

/// The longest index or manifest that is read.
const DOCUMENT_MAX: u64 = 4 << 20;
/// An index may point to an index, but not without end.
const INDEX_DEPTH: usize = 3;
const REFERENCE: &str = "org.opencontainers.image.ref.name";

#[derive(Deserialize)]
struct Document {
    #[serde(default)]
    manifests: Vec<Pointer>,
    #[serde(default)]
    layers: Vec<Pointer>,
}

#[derive(Deserialize, Clone)]
#[serde(rename_all = "camelCase")]
struct Pointer {
    #[serde(default)]
    media_type: String,
    digest: String,
    size: u64,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
    platform: Option<Platform>,
}

#[derive(Deserialize, Clone)]
struct Platform {
    architecture: String,
    os: String,
}

/// Unpacks every layer of one image of the layout at `layout` into the directory `root`, lowest first.
pub(crate) fn extract_image(root: &impl AsFd, layout: &Path, reference: Option<&str>) -> Result<Extracted, ExtractError> {
    if !layout.join("oci-layout").is_file() {
        return Err(ExtractError::Layout(format!("{} has no file oci-layout", layout.display())));
    }
    let index = crate::fsutil::read_limited(&layout.join("index.json"), DOCUMENT_MAX)
        .map_err(|e| ExtractError::Layout(format!("index.json: {e}")))?;
    let mut document = parse(&index, "index.json")?;
    let mut reference = reference;
    for _ in 0..INDEX_DEPTH {
        if document.manifests.is_empty() {
            break;
        }
        let chosen = choose(&document.manifests, reference)?;
        document = parse(&read_document(layout, &chosen)?, &chosen.digest)?;
        // A name belongs to the outermost index only.
        reference = None;
    }
    if document.layers.is_empty() {
        return Err(ExtractError::Layout("the image has no layers".into()));
    }
    let options = ExtractOptions::template();
    let mut total = Extracted::default();
    for layer in &document.layers {
        let left = ExtractOptions {
            max_bytes: options.max_bytes - total.bytes,
            max_entries: options.max_entries - total.entries,
            ..options.clone()
        };
        let done = extract_layer(root, layout, layer, &left)?;
        total.bytes += done.bytes;
        total.entries += done.entries;
    }
    Ok(total)
}

fn parse(bytes: &[u8], what: &str) -> Result<Document, ExtractError> {
    serde_json::from_slice(bytes).map_err(|e| ExtractError::Layout(format!("{what}: {e}")))
}

fn choose(all: &[Pointer], reference: Option<&str>) -> Result<Pointer, ExtractError> {
    let named: Vec<&Pointer> =
        all.iter().filter(|p| reference.is_none_or(|r| p.annotations.get(REFERENCE).is_some_and(|n| n == r))).collect();
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let fits = |p: &&&Pointer| p.platform.as_ref().is_none_or(|p| p.os == "linux" && p.architecture == architecture);
    let names = || all.iter().filter_map(|p| p.annotations.get(REFERENCE).cloned()).collect::<Vec<_>>().join(", ");
    match (named.iter().filter(fits).collect::<Vec<_>>().as_slice(), reference) {
        ([one], _) => Ok((**one).clone()),
        ([], Some(r)) => Err(ExtractError::Layout(format!("no image '{r}' for linux/{architecture}; it has: {}", names()))),
        ([], None) => Err(ExtractError::Layout(format!("no image for linux/{architecture}"))),
        (_, _) => Err(ExtractError::Layout(format!("several images fit, name one of: {}", names()))),
    }
}

fn open_blob(layout: &Path, pointer: &Pointer) -> Result<File, ExtractError> {
    let hex = pointer.digest.strip_prefix("sha256:").unwrap_or_default();
    // The digest becomes a file's name: nothing but digits may get there.
    if hex.len() != 64 || !hex.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
        let shown: String = pointer.digest.chars().take(100).collect();
        return Err(ExtractError::Layout(format!("'{shown}' is not a sha256 digest")));
    }
    let path = layout.join("blobs/sha256").join(hex);
    File::open(path).map_err(|e| ExtractError::Layout(format!("blob {}: {e}", pointer.digest)))
}

fn read_document(layout: &Path, pointer: &Pointer) -> Result<Vec<u8>, ExtractError> {
    if pointer.size > DOCUMENT_MAX {
        return Err(ExtractError::Layout(format!("{} has {} bytes: too long for a manifest", pointer.digest, pointer.size)));
    }
    let mut reader = Checked::new(open_blob(layout, pointer)?.take(pointer.size + 1));
    let mut bytes = Vec::new();
    reader.read_to_end(&mut bytes).map_err(ExtractError::Archive)?;
    reader.verify("manifest", pointer)?;
    Ok(bytes)
}

fn extract_layer(root: &impl AsFd, layout: &Path, layer: &Pointer, options: &ExtractOptions) -> Result<Extracted, ExtractError> {
    if layer.media_type.contains("foreign") || layer.media_type.contains("nondistributable") {
        return Err(ExtractError::Layout(format!("the layer {} is not in the layout", layer.digest)));
    }
    let mut reader = Checked::new(open_blob(layout, layer)?);
    let mut extractor = Extractor::new(root.as_fd(), options, Some(Seen::default()));
    let unpacked = decompressed(&mut reader).map_err(ExtractError::Archive).and_then(|plain| extractor.run(plain));
    // Read to the end first: of a layer that is both damaged and unreadable, the digest is the better story.
    io::copy(&mut reader, &mut io::sink()).map_err(ExtractError::Archive)?;
    reader.verify("layer", layer)?;
    unpacked?;
    Ok(extractor.done)
}

/// A reader that knows the digest of what went through it.
struct Checked<R> {
    inner: R,
    hasher: Sha256,
    length: u64,
}

impl<R: Read> Checked<R> {
    fn new(inner: R) -> Self {
        Checked { inner, hasher: Sha256::new(), length: 0 }
    }

    fn verify(self, what: &str, pointer: &Pointer) -> Result<(), ExtractError> {
        let hex: String = self.hasher.finalize().iter().map(|b| format!("{b:02x}")).collect();
        let found = format!("sha256:{hex}");
        if found == pointer.digest && self.length == pointer.size {
            return Ok(());
        }
        let with_size = |digest: &str, size: u64| format!("{digest} ({size} bytes)");
        Err(ExtractError::Digest {
            what: what.into(),
            expected: with_size(&pointer.digest, pointer.size),
            found: with_size(&found, self.length),
        })
    }
}

impl<R: Read> Read for Checked<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.hasher.update(&buffer[..n]);
        self.length += n as u64;
        Ok(n)
    }
}
