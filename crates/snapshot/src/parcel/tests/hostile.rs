//! Streams that somebody made up.

use super::world::*;
use crate::parcel::{ParcelError, TreeRef, format};
use proptest::{prelude::*, test_runner::TestRunner};
use std::{fs, os::unix::fs::MetadataExt, path::Path};

/// A stream, piece by piece.
#[derive(Clone)]
struct Made(Vec<u8>);

impl Made {
    fn new() -> Made {
        let mut out = Vec::new();
        format::head(&mut out);
        Made(out)
    }

    fn bytes(mut self, bytes: impl AsRef<[u8]>) -> Made {
        self.0.extend_from_slice(bytes.as_ref());
        self
    }

    fn number(self, number: u64) -> Made {
        self.bytes(number.to_le_bytes())
    }

    fn entry(self, kind: u8, name: &[u8]) -> Made {
        self.bytes([kind, u8::try_from(name.len()).unwrap()]).bytes(name)
    }

    /// Mode, owner, group, time, and how many attributes follow.
    fn plain(self, mode: u32, nanoseconds: u32, attributes: u16) -> Made {
        let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let mut made = self;
        for number in [mode, user, group] {
            made = made.bytes(number.to_le_bytes());
        }
        made.number(1_000_000_000).bytes(nanoseconds.to_le_bytes()).bytes(attributes.to_le_bytes())
    }

    fn attribute(self, name: &[u8], length: u32, value: &[u8]) -> Made {
        self.bytes([u8::try_from(name.len()).unwrap()]).bytes(name).bytes(length.to_le_bytes()).bytes(value)
    }

    fn file(self, name: &[u8], content: &[u8]) -> Made {
        let length = content.len() as u64;
        let made = self.entry(format::FILE, name).number(length);
        let made = if length == 0 { made } else { made.number(0).number(length).bytes(content) };
        made.plain(0o644, 0, 0)
    }

    fn symlink(self, name: &[u8], target: &[u8]) -> Made {
        let length = u16::try_from(target.len()).unwrap();
        self.entry(format::SYMLINK, name).bytes(length.to_le_bytes()).bytes(target).plain(0o777, 0, 0)
    }

    fn link(self, name: &[u8], back: u64) -> Made {
        self.entry(format::LINK, name).number(back)
    }

    fn directory(self, name: &[u8]) -> Made {
        self.entry(format::DIRECTORY, name)
    }

    fn end(self) -> Made {
        self.bytes([format::END]).plain(0o755, 0, 0)
    }
}

async fn try_one(world: &World, made: Made, entries: u64, plain_bytes: u64) -> Result<(), ParcelError> {
    let tree = world.claim(&made.0, entries, plain_bytes).await;
    let unpacked = world.unpack(&tree, "back").await;
    assert_eq!(unpacked.is_ok(), world.path("back").exists());
    unpacked.map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_no_packer_writes_is_refused() {
    let world = World::new().await;
    put(&world.path("outside/secret"), "secret");
    let new = Made::new;
    let good = new().file(b"f", b"bytes").directory(b"d").link(b"l", 1).end().end();
    try_one(&world, good.clone(), 3, 5).await.unwrap();
    assert_eq!(fs::metadata(world.path("back/d/l")).unwrap().nlink(), 2);
    fs::remove_dir_all(world.path("back")).unwrap();

    let long = [b'u'; 4096];
    let sized = |size: u64, hole: u64, data: u64| new().entry(format::FILE, b"f").number(size).number(hole).number(data);
    let attributed = |made: Made| new().entry(format::FILE, b"f").number(0).bytes(made.0).end();
    let none = || Made(Vec::new());
    let cases = [
        ("begin as one", Made(b"something else altogether".to_vec())),
        ("format 0", Made([&format::MAGIC[..], &[0; 40]].concat())),
        ("ends too early", Made(good.0[..good.0.len() - 1].to_vec())),
        ("after its end", good.clone().bytes("x")),
        ("more entries", good.clone().file_in_front()),
        ("less than", new().file(b"f", b"bytes").end()),
        ("unknown kind", new().entry(99, b"f").end()),
        ("name that is none", new().file(b"", b"").end()),
        ("name that is none", new().file(b".", b"").end()),
        ("name that is none", new().file(b"..", b"").end()),
        ("name that is none", new().file(b"/etc/passwd", b"").end()),
        ("name that is none", new().file(b"d/f", b"").end()),
        ("name that is none", new().file(b"../outside/f", b"").end()),
        ("name that is none", new().directory(b"..").file(b"f", b"").end().end()),
        ("NUL", new().file(b"f\0g", b"").end()),
        ("two entries of one name", new().file(b"f", b"").file(b"f", b"").end()),
        ("two entries of one name", new().directory(b"d").end().directory(b"d").end().end()),
        // Through a symlink it would lead out.
        ("two entries of one name", new().symlink(b"d", b"../outside").directory(b"d").file(b"secret", b"x").end().end()),
        ("didn't come before", new().link(b"l", 1).file(b"f", b"").end()),
        ("didn't come before", new().file(b"f", b"").link(b"l", 2).end()),
        ("didn't come before", new().file(b"f", b"").link(b"l", 0).end()),
        ("didn't come before", new().file(b"f", b"").link(b"l", u64::MAX).end()),
        ("didn't come before", new().directory(b"d").end().link(b"l", 1).end()),
        ("other bytes than its size", sized(10, 11, 0)),
        ("other bytes than its size", sized(10, 0, 11)),
        ("other bytes than its size", sized(10, 6, 5)),
        ("other bytes than its size", sized(10, u64::MAX, 11)),
        ("other bytes than its size", sized(10, 0, 0)),
        ("other bytes than its size", sized(10, 5, 0)),
        ("more bytes than it should", sized(u64::MAX, 0, u64::MAX)),
        ("more bytes than it should", sized(1 << 40, 0, 1 << 40)),
        ("impossible length", new().symlink(b"s", b"").end()),
        ("impossible length", new().symlink(b"s", &long).end()),
        ("NUL", new().symlink(b"s", b"a\0b").end()),
        ("impossible mode", attributed(none().plain(0o10_000, 0, 0))),
        ("impossible mode", attributed(none().plain(u32::MAX, 0, 0))),
        ("impossible mode", attributed(none().plain(0o644, 1_000_000_000, 0))),
        ("impossible mode", attributed(none().bytes(0o644_u32.to_le_bytes()).bytes([0xff; 18]).bytes([0; 2]))),
        ("too many attributes", attributed(none().plain(0o644, 0, u16::MAX))),
        ("too long", attributed(none().plain(0o644, 0, 1).attribute(b"user.a", u32::MAX, b""))),
        ("too long", attributed(none().plain(0o644, 0, 1).attribute(b"user.a", 65_537, b""))),
        ("copies don't keep", attributed(none().plain(0o644, 0, 1).attribute(b"security.selinux", 1, b"x"))),
        ("copies don't keep", attributed(none().plain(0o644, 0, 1).attribute(b"trusted.overlay.origin", 1, b"x"))),
        ("copies don't keep", attributed(none().plain(0o644, 0, 1).attribute(b"anything", 1, b"x"))),
        ("NUL", attributed(none().plain(0o644, 0, 1).attribute(b"user.a\0b", 1, b"x"))),
    ];
    for (number, (expected, made)) in cases.into_iter().enumerate() {
        let refused = try_one(&world, made, 3, 5).await.unwrap_err();
        let ParcelError::Malformed { what, .. } = &refused else { panic!("{number} ({expected}): {refused}") };
        assert!(what.contains(expected), "{number}: '{what}' instead of '{expected}'");
        assert!(refused.is_loss());
    }
    assert_eq!(fs::read_dir(world.path("outside")).unwrap().count(), 1);
    assert_eq!(contents(&world.path("outside/secret")), b"secret");

    let mut newer = good;
    newer.0[16] = 2;
    let refused = try_one(&world, newer, 3, 5).await.unwrap_err();
    assert!(matches!(&refused, ParcelError::Newer { found: 2, newest: 1, .. }), "{refused}");
    assert!(!refused.is_loss());
}

impl Made {
    /// The same with one file more.
    fn file_in_front(self) -> Made {
        let rest = self.0[Made::new().0.len()..].to_vec();
        Made::new().file(b"one more", b"").bytes(rest)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_promise_costs_nothing() {
    let world = World::new().await;
    // Limits that fit: what is promised has to come, and nothing is put aside for it before.
    let huge = Made::new().entry(format::FILE, b"f").number(1 << 40).number(0).number(1 << 40).bytes("little");
    let refused = try_one(&world, huge, 1, 1 << 40).await.unwrap_err();
    assert!(
        matches!(&refused, ParcelError::Malformed { what: "it ends too early", path, .. } if path == Path::new("f")),
        "{refused}"
    );
    let size = i64::MAX.cast_unsigned();
    let hole = Made::new().entry(format::FILE, b"f").number(size).number(size).number(0).plain(0o644, 0, 0).end();
    let refused = try_one(&world, hole, 1, 0).await.unwrap_err();
    assert!(matches!(&refused, ParcelError::Io { what: "set the size of", .. }), "{refused}");
}

/// However a good stream is mutilated: a tree or an error, and nothing anywhere else.
#[test]
fn no_stream_does_harm() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    let (world, good) = runtime.block_on(async {
        let world = World::new().await;
        let root = world.empty("tree");
        for n in 0..3 {
            put(&root.join(format!("d{n}/sub/f")), random(200, n));
            std::os::unix::fs::symlink("../../..", root.join(format!("d{n}/up"))).unwrap();
            fs::hard_link(root.join(format!("d{n}/sub/f")), root.join(format!("l{n}"))).unwrap();
        }
        sparse(&root.join("holes"), 100_000, &[(50_000, b"middle")]);
        set_attribute(&root.join("d1"), "user.a", "value");
        put(&world.path("outside/secret"), "secret");
        let (tree, _) = world.pack(&root).await;
        let bytes = world.bytes(&tree.stream).await;
        (world, (tree, bytes))
    });
    let outside = listing(&world.path("outside"));
    let cases = if std::env::var_os("DORMOUSE_LONG").is_some() { 3000 } else { 150 };
    let change = (any::<prop::sample::Index>(), prop::collection::vec(any::<u8>(), 0..9), 0..9_usize);
    let mut runner = TestRunner::new(ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() });
    let checked = runner.run(&prop::collection::vec(change, 1..4), |changes| {
        let (tree, mut bytes) = good.clone();
        for (at, put_in, left_out) in changes {
            let at = at.index(bytes.len());
            let till = bytes.len().min(at + left_out);
            bytes.splice(at..till, put_in);
        }
        runtime.block_on(async {
            let mutilated = world.claim(&bytes, tree.entries, tree.plain_bytes).await;
            let unpacked = world.unpack(&mutilated, "back").await;
            if let Err(error) = &unpacked {
                prop_assert!(!world.path("back").exists(), "{}", error);
                prop_assert!(error.path_is_within(), "{}", error);
            } else {
                crate::parcel::remove(&world.path("back")).unwrap();
            }
            Ok(())
        })?;
        prop_assert!(listing(&world.path("outside")) == outside);
        Ok(())
    });
    checked.unwrap_or_else(|error| panic!("{error}"));
}

impl ParcelError {
    /// What is named lies in the tree.
    fn path_is_within(&self) -> bool {
        match self {
            ParcelError::Malformed { path, .. } | ParcelError::File { path, .. } | ParcelError::After { path, .. } => {
                path.is_relative() && !path.components().any(|part| part.as_os_str() == "..")
            }
            _ => true,
        }
    }
}

#[test]
fn a_reference_that_isnt_one_is_no_reference() {
    for text in
        ["{}", r#"{"stream":{"len":1,"entries":[]},"entries":1}"#, r#"{"stream":null,"entries":1,"plain_bytes":1,"digest":"x"}"#]
    {
        assert!(serde_json::from_str::<TreeRef>(text).is_err(), "{text}");
    }
}
