use super::*;
use sha2::Digest;
use std::{
    fs,
    os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink},
};

/// A tar archive made entry by entry, with names that a well-meant tool would refuse to write.
struct Maker(tar::Builder<Vec<u8>>);

impl Maker {
    fn new() -> Self {
        Maker(tar::Builder::new(Vec::new()))
    }

    fn add(mut self, kind: tar::EntryType, name: &str, mode: u32, link: &str, content: &[u8]) -> Self {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
        header.as_mut_bytes()[157..157 + link.len()].copy_from_slice(link.as_bytes());
        header.set_mode(mode);
        header.set_uid(12);
        header.set_gid(34);
        header.set_mtime(1_000_000);
        header.set_size(content.len() as u64);
        header.set_cksum();
        self.0.append(&header, content).unwrap();
        self
    }

    fn file(self, name: &str, content: &str) -> Self {
        self.add(tar::EntryType::Regular, name, 0o644, "", content.as_bytes())
    }

    fn dir(self, name: &str) -> Self {
        self.add(tar::EntryType::Directory, name, 0o755, "", b"")
    }

    fn symlink(self, name: &str, to: &str) -> Self {
        self.add(tar::EntryType::Symlink, name, 0o777, to, b"")
    }

    fn bytes(self) -> Vec<u8> {
        self.0.into_inner().unwrap()
    }
}

fn extract(root: &Path, archive: &[u8]) -> Result<Extracted, ExtractError> {
    extract_with(root, archive, &ExtractOptions::template())
}

fn extract_with(root: &Path, archive: &[u8], options: &ExtractOptions) -> Result<Extracted, ExtractError> {
    extract_tar_into(&File::open(root).unwrap(), Path::new("."), archive, options)
}

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("skipped: needs root");
    }
    root
}

#[test]
fn everything_of_an_entry_is_kept() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut maker = Maker::new();
    maker
        .0
        .append_pax_extensions([("SCHILY.xattr.user.x", &b"1"[..]), ("SCHILY.xattr.trusted.overlay.redirect", b"/etc")])
        .unwrap();
    let archive = maker
        .add(tar::EntryType::Regular, "bin/su", 0o4755, "", b"su")
        .add(tar::EntryType::Link, "bin/su2", 0o4755, "bin/su", b"")
        .add(tar::EntryType::Directory, "tmp", 0o1777, "", b"")
        .symlink("lib", "/usr/lib")
        .add(tar::EntryType::Fifo, "fifo", 0o620, "", b"")
        .add(tar::EntryType::Char, "dev/null", 0o666, "", b"")
        .bytes();
    assert_eq!(extract(dir.path(), &archive).unwrap(), Extracted { entries: 6, bytes: 2 });
    let at = |name: &str| dir.path().join(name);
    let meta = at("bin/su").metadata().unwrap();
    assert_eq!((meta.mode() & 0o7777, meta.uid(), meta.gid(), meta.mtime()), (0o4755, 12, 34, 1_000_000));
    assert_eq!(at("bin/su2").metadata().unwrap().ino(), meta.ino());
    assert_eq!(tree::xattrs(&at("bin/su")).unwrap(), [(b"user.x".to_vec(), b"1".to_vec())]);
    let mut names = [0u8; 1000];
    let length = rustix::fs::listxattr(at("bin/su"), &mut names).unwrap();
    assert!(!names[..length].windows(7).any(|w| w == b"overlay"), "an overlay's attributes never get into a tree");
    let tmp = at("tmp").metadata().unwrap();
    assert_eq!((tmp.mode() & 0o7777, tmp.mtime()), (0o1777, 1_000_000));
    assert_eq!(fs::read_link(at("lib")).unwrap(), Path::new("/usr/lib"));
    assert!(at("fifo").symlink_metadata().unwrap().file_type().is_fifo());
    assert!(!at("dev/null").exists());
}

#[test]
fn files_put_into_a_session_belong_to_root_and_have_no_set_uid_bit() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let archive = Maker::new().add(tar::EntryType::Regular, "su", 0o6755, "", b"su").bytes();
    extract_with(dir.path(), &archive, &ExtractOptions::source(100)).unwrap();
    let meta = dir.path().join("su").metadata().unwrap();
    assert_eq!((meta.mode() & 0o7777, meta.uid(), meta.gid()), (0o755, 0, 0));
}

#[test]
fn nothing_lands_outside() {
    let outer = tempfile::tempdir().unwrap();
    let (root, victim) = (outer.path().join("root"), outer.path().join("victim"));
    let fresh = || {
        let _ = fs::remove_dir_all(&root);
        fs::create_dir(&root).unwrap();
        fs::write(&victim, "safe").unwrap();
    };
    let out = outer.path().to_str().unwrap();
    let refused: [(&str, Vec<u8>); 8] = [
        ("..", Maker::new().file("../victim", "x").bytes()),
        (".. inside", Maker::new().file("a/../../victim", "x").bytes()),
        ("absolute", Maker::new().file("/victim", "x").bytes()),
        ("hard link to ..", Maker::new().add(tar::EntryType::Link, "l", 0o644, "../victim", b"").bytes()),
        ("hard link to /", Maker::new().add(tar::EntryType::Link, "l", 0o644, "/victim", b"").bytes()),
        (
            "hard link through a symlink",
            Maker::new().symlink("d", out).add(tar::EntryType::Link, "l", 0o644, "d/victim", b"").bytes(),
        ),
        ("device", Maker::new().add(tar::EntryType::Block, "etc/disk", 0o644, "", b"").bytes()),
        ("file below a dangling symlink", Maker::new().symlink("d", "/nowhere").file("d/victim", "x").bytes()),
    ];
    for (what, archive) in refused {
        fresh();
        let result = extract(&root, &archive);
        assert!(result.is_err(), "{what}: {result:?}");
        assert_eq!(fs::read_to_string(&victim).unwrap(), "safe", "{what}");
        assert_eq!(fs::read_dir(outer.path()).unwrap().count(), 2, "{what}");
    }
    // Fine, but inside.
    let contained: [(&str, Vec<u8>); 3] = [
        ("through a symlink up", Maker::new().dir("d").symlink("d/up", "../../..").file("d/up/victim", "x").bytes()),
        ("through an absolute symlink", Maker::new().dir("t").symlink("l", "/t").file("l/victim", "x").bytes()),
        ("over a symlink", Maker::new().symlink("victim", "../victim").file("victim", "x").bytes()),
    ];
    for (what, archive) in contained {
        fresh();
        extract(&root, &archive).unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "safe", "{what}");
        let inside = ["victim", "t/victim"].iter().any(|p| fs::read_to_string(root.join(p)).is_ok_and(|t| t == "x"));
        assert!(inside, "{what}");
        assert!(!root.join("victim").is_symlink(), "{what}");
    }
}

#[test]
fn compression_is_told_by_the_first_bytes() {
    let plain = Maker::new().file("a", "content").bytes();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    io::Write::write_all(&mut gzip, &plain).unwrap();
    let gzip = gzip.finish().unwrap();
    let zstd = zstd::encode_all(plain.as_slice(), 0).unwrap();
    for archive in [&plain, &gzip, &zstd] {
        let dir = tempfile::tempdir().unwrap();
        extract_with(dir.path(), archive, &owned()).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("a")).unwrap(), "content");
    }
    let dir = tempfile::tempdir().unwrap();
    let bad: [&[u8]; 6] = [b"", b"BZh91AY", b"\xfd7zXZ\0...", &gzip[..gzip.len() - 5], &zstd[..zstd.len() - 2], &plain[..700]];
    for (n, archive) in bad.iter().enumerate() {
        assert!(matches!(extract_with(dir.path(), archive, &owned()), Err(ExtractError::Archive(_))), "case {n}");
    }
}

/// So that these tests need no root: everything belongs to whoever runs them.
fn owned() -> ExtractOptions {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    ExtractOptions { owner: Some((uid, gid)), ..ExtractOptions::template() }
}

#[test]
fn there_is_a_limit_to_everything() {
    let dir = tempfile::tempdir().unwrap();
    let archive = Maker::new().file("a", "12345").file("b", "67890").bytes();
    let with = |max_bytes, max_entries| extract_with(dir.path(), &archive, &ExtractOptions { max_bytes, max_entries, ..owned() });
    assert!(with(10, 2).is_ok());
    assert!(matches!(with(9, 2), Err(ExtractError::TooBig(9))));
    assert!(matches!(with(10, 1), Err(ExtractError::TooMany(1))));
}

/// An image layout with the given layers; each is written under `name_of(bytes)`.
fn layout(dir: &Path, layers: &[Vec<u8>]) {
    let digest = |bytes: &[u8]| -> String { sha2::Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect() };
    let blobs = dir.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    let put = |bytes: &[u8]| -> serde_json::Value {
        fs::write(blobs.join(digest(bytes)), bytes).unwrap();
        serde_json::json!({"mediaType": "x", "digest": format!("sha256:{}", digest(bytes)), "size": bytes.len()})
    };
    let layers: Vec<_> = layers.iter().map(|l| put(l)).collect();
    let mut manifest = put(&serde_json::to_vec(&serde_json::json!({"schemaVersion": 2, "layers": layers})).unwrap());
    manifest["annotations"] = serde_json::json!({"org.opencontainers.image.ref.name": "v1"});
    let other = serde_json::json!({"mediaType": "x", "digest": format!("sha256:{}", "0".repeat(64)), "size": 1,
        "platform": {"os": "plan9", "architecture": "amd64"}});
    fs::write(dir.join("index.json"), serde_json::to_vec(&serde_json::json!({"manifests": [other, manifest]})).unwrap()).unwrap();
    fs::write(dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
}

fn image(layers: &[Vec<u8>], reference: Option<&str>) -> (tempfile::TempDir, Result<Extracted, ExtractError>) {
    let dir = tempfile::tempdir().unwrap();
    layout(&dir.path().join("l"), layers);
    fs::create_dir(dir.path().join("root")).unwrap();
    let result = oci::extract_image(&File::open(dir.path().join("root")).unwrap(), &dir.path().join("l"), reference);
    (dir, result)
}

#[test]
fn whiteouts_hide_what_is_below_and_nothing_else() {
    if !is_root() {
        return;
    }
    let lower = Maker::new()
        .file("keep", "1")
        .file("gone", "1")
        .file("dir/old", "1")
        .file("dir/sub/old", "1")
        .file("tree/a/b", "1")
        .symlink("bin", "usr/bin")
        .file("usr/bin/x", "1")
        .file("swap", "1")
        .bytes();
    let upper = Maker::new()
        .file(".wh.gone", "")
        .file("dir/sub/new", "2")
        .file("dir/new", "2")
        // After what it must leave alone.
        .file("dir/.wh..wh..opq", "")
        .file(".wh.tree", "")
        .file("bin/y", "2")
        .file("bin/.wh.x", "")
        .dir("swap")
        .file("swap/in", "2")
        .file(".wh.never-was", "")
        .file("nowhere/.wh.x", "")
        .bytes();
    let (dir, result) = image(&[lower, upper], Some("v1"));
    result.unwrap();
    let root = dir.path().join("root");
    let mut found: Vec<String> = tree::walk(&root)
        .map(|e| e.unwrap())
        .filter(|(_, m)| !m.is_dir())
        .map(|(p, _)| p.strip_prefix(&root).unwrap().to_str().unwrap().to_owned())
        .collect();
    found.sort();
    assert_eq!(found, ["bin", "dir/new", "dir/sub/new", "keep", "swap/in", "usr/bin/y"]);
}

#[test]
fn a_layer_cannot_lead_a_later_one_out() {
    if !is_root() {
        return;
    }
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("victim"), "safe").unwrap();
    fs::create_dir(outside.path().join("d")).unwrap();
    let out = outside.path().to_str().unwrap();
    for attack in ["esc/victim", "esc/.wh.victim", "esc/.wh..wh..opq", "esc/d/new"] {
        let lower = Maker::new().symlink("esc", out).bytes();
        let (_dir, _) = image(&[lower, Maker::new().file(attack, "x").bytes()], None);
        assert_eq!(fs::read_to_string(outside.path().join("victim")).unwrap(), "safe", "{attack}");
        assert_eq!(fs::read_dir(outside.path().join("d")).unwrap().count(), 0, "{attack}");
    }
    for name in [".wh.", ".wh..", ".wh..."] {
        let (dir, result) =
            image(&[Maker::new().file("d/a", "x").bytes(), Maker::new().file(&format!("d/{name}"), "").bytes()], None);
        assert!(matches!(result, Err(ExtractError::UnsafePath(_))), "{name}: {result:?}");
        assert!(dir.path().join("root/d/a").exists());
    }
}

#[test]
fn an_image_that_is_not_what_it_promises_is_refused() {
    if !is_root() {
        return;
    }
    let good = Maker::new().file("a", "1").bytes();
    let run = |spoil: &dyn Fn(&Path), reference: Option<&str>| {
        let dir = tempfile::tempdir().unwrap();
        let l = dir.path().join("l");
        layout(&l, std::slice::from_ref(&good));
        spoil(&l);
        fs::create_dir(dir.path().join("root")).unwrap();
        oci::extract_image(&File::open(dir.path().join("root")).unwrap(), &l, reference).unwrap_err()
    };
    let layer_path = |l: &Path| {
        let hex: String = sha2::Sha256::digest(&good).iter().map(|b| format!("{b:02x}")).collect();
        l.join("blobs/sha256").join(hex)
    };
    let mut changed = good.clone();
    changed[512] = b'2';
    let error = run(&|l| fs::write(layer_path(l), &changed).unwrap(), None);
    assert!(matches!(error, ExtractError::Digest { .. }), "{error}");
    let error = run(&|l| fs::write(layer_path(l), &good[..512]).unwrap(), None);
    assert!(matches!(error, ExtractError::Digest { .. }), "{error}");
    for (spoil, reference, part) in [
        (&(|l: &Path| fs::remove_file(layer_path(l)).unwrap()) as &dyn Fn(&Path), None, "blob"),
        (&|_: &Path| (), Some("v2"), "it has: v1"),
        (&|l: &Path| fs::remove_file(l.join("oci-layout")).unwrap(), None, "oci-layout"),
        (&|l: &Path| fs::write(l.join("index.json"), "{").unwrap(), None, "index.json"),
        (
            &|l: &Path| fs::write(l.join("index.json"), r#"{"manifests":[{"digest":"sha256:../../x","size":1}]}"#).unwrap(),
            None,
            "not a sha256 digest",
        ),
    ] {
        let error = run(spoil, reference);
        assert!(matches!(&error, ExtractError::Layout(text) if text.contains(part)), "{part}: {error}");
    }
}

#[test]
fn the_destination_cannot_be_outside() {
    let outer = tempfile::tempdir().unwrap();
    let root = outer.path().join("root");
    fs::create_dir(&root).unwrap();
    symlink(outer.path(), root.join("out")).unwrap();
    let fd = File::open(&root).unwrap();
    let archive = Maker::new().file("a", "1").bytes();
    for dest in ["../x", "a/../../x", "out/x"] {
        let _ = extract_tar_into(&fd, Path::new(dest), archive.as_slice(), &owned());
        assert_eq!(fs::read_dir(outer.path()).unwrap().count(), 1, "{dest}");
    }
    extract_tar_into(&fd, Path::new("/work/new"), archive.as_slice(), &owned()).unwrap();
    assert!(root.join("work/new/a").metadata().unwrap().permissions().mode() & 0o7777 == 0o644);
}
