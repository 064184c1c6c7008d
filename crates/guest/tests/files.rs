//! File requests to the built guest on this machine.

#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod support;

use model::{FileMeta, FileType, Offset};
use std::{
    fs,
    io::Write,
    os::unix::fs::{PermissionsExt, symlink},
};
use support::{HostGuest, Scratch};
use wire::{
    Code, Frame,
    files::{FileReply, FileRequest as F, WatchEvent},
    guest::Request,
};

fn meta(reply: FileReply) -> FileMeta {
    match reply {
        FileReply::Meta { meta } => meta,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_file_goes_in_and_comes_back_and_a_cut_upload_leaves_the_old_one() {
    let (mut guest, dir) = (HostGuest::start(), Scratch::new("write"));
    let path = dir.path("deep/er/file");
    let bytes: Vec<u8> = (0..5_000_000u32).map(|n| (n ^ (n >> 9)) as u8).collect();
    let write = |mode, parents| F::Write { path: path.clone(), mode, parents };
    assert_eq!(guest.client.upload(write(None, false), b"x").unwrap_err().code, Code::NotFound);
    guest.client.upload(write(Some(0o750), true), &bytes).unwrap();
    let whole = F::Read { path: path.clone(), offset: Offset(0), length: None };
    assert!(guest.client.download(whole.clone()).unwrap() == bytes);
    let part = F::Read { path: path.clone(), offset: Offset(4_999_990), length: Some(5) };
    assert_eq!(guest.client.download(part).unwrap(), bytes[4_999_990..4_999_995]);
    // Half of it, then the client is gone.
    let stream = guest.client.stream();
    let id = guest.client.send_request(Request::File { stream: Some(stream), request: write(None, true) });
    guest.client.feed(stream, 0, b"half of", false);
    guest.client.send(&[Frame::Reset { stream, reason: "gone".into() }]);
    guest.client.until("a refusal", |c| c.replies.contains_key(&id));
    assert!(guest.client.replies.remove(&id).unwrap().is_err());
    assert!(guest.client.download(whole.clone()).unwrap() == bytes);
    // The same by a quiesce in the middle.
    let stream = guest.client.stream();
    guest.client.send_request(Request::File { stream: Some(stream), request: write(None, true) });
    guest.client.feed(stream, 0, b"half of", false);
    let left = |dir: &Scratch| fs::read_dir(dir.0.join("deep/er")).unwrap().count();
    guest.client.until("the upload to begin", |_| left(&dir) == 2);
    guest.client.quiesce();
    assert_eq!(left(&dir), 1, "a temporary file is left when the image is taken");
    guest.client.hello(None);
    guest.client.upload(write(None, false), b"").unwrap();
    assert_eq!(guest.client.download(whole).unwrap(), b"");
    let kept = meta(guest.client.file(F::Stat { path: path.clone(), follow: true }).unwrap());
    assert_eq!((kept.mode, kept.size_bytes, kept.kind), (0o750, 0, FileType::File));
}

#[test]
fn bad_paths_get_clear_answers_and_nothing_hangs() {
    let (mut guest, dir) = (HostGuest::start(), Scratch::new("bad"));
    fs::write(dir.path("file"), "x").unwrap();
    fs::create_dir(dir.path("dir")).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(dir.path("fifo")).status().unwrap().success());
    symlink("loop", dir.path("loop")).unwrap();
    let read = |path: String| F::Read { path, offset: Offset(0), length: None };
    let cases = [
        (read(String::new()), Code::Invalid),
        (read("a\0b".into()), Code::Invalid),
        (read(dir.path("none")), Code::NotFound),
        (read(dir.path("dir")), Code::IsADirectory),
        (read(dir.path("fifo")), Code::NotRegular),
        (read("/dev/zero".into()), Code::NotRegular),
        (read(dir.path("file/below")), Code::NotADirectory),
        (read(dir.path("loop")), Code::TooManyLinks),
        (read(dir.path(&"n".repeat(256))), Code::Invalid),
        (F::List { path: dir.path("file"), depth: 1 }, Code::NotADirectory),
        (F::Archive { path: dir.path("fifo") }, Code::NotRegular),
        (F::Watch { path: dir.path("none"), recursive: true }, Code::NotFound),
    ];
    for (request, code) in cases {
        let error = guest.client.download(request.clone()).unwrap_err();
        assert_eq!(error.code, code, "{request:?}: {error}");
    }
    let plain = [
        (F::Mkdir { path: dir.path("file"), parents: false }, Code::Exists),
        (F::Mkdir { path: dir.path("a/b"), parents: false }, Code::NotFound),
        (F::Remove { path: dir.path("none"), recursive: false }, Code::NotFound),
        (F::Move { from: dir.path("none"), to: dir.path("x") }, Code::NotFound),
    ];
    for (request, code) in plain {
        assert_eq!(guest.client.file(request.clone()).unwrap_err().code, code, "{request:?}");
    }
    for (path, code) in
        [(dir.path("fifo"), Code::NotRegular), (dir.path("dir"), Code::IsADirectory), (dir.path("x/"), Code::IsADirectory)]
    {
        let write = F::Write { path: path.clone(), mode: None, parents: false };
        assert_eq!(guest.client.upload(write, b"x").unwrap_err().code, code, "{path}");
    }
}

#[test]
fn directories_are_made_listed_moved_and_removed() {
    let (mut guest, dir) = (HostGuest::start(), Scratch::new("dirs"));
    guest.client.file(F::Mkdir { path: dir.path("a/b/c"), parents: true }).unwrap();
    let odd = format!("new\nline-{}", "n".repeat(246));
    fs::write(dir.0.join("a").join(&odd), "12345").unwrap();
    symlink("/etc", dir.path("a/link")).unwrap();
    let names = |guest: &mut HostGuest, depth| -> Vec<String> {
        let bytes = guest.client.download(F::List { path: dir.path("a"), depth }).unwrap();
        let lines = bytes.split(|b| *b == b'\n').filter(|l| !l.is_empty());
        lines.map(|l| serde_json::from_slice::<FileMeta>(l).unwrap().path.replace(dir.0.to_str().unwrap(), "")).collect()
    };
    assert_eq!(names(&mut guest, 1), ["/a/b".into(), "/a/link".into(), format!("/a/{odd}")]);
    assert_eq!(names(&mut guest, 5), ["/a/b".into(), "/a/link".into(), format!("/a/{odd}"), "/a/b/c".into()]);
    let link = meta(guest.client.file(F::Stat { path: dir.path("a/link"), follow: false }).unwrap());
    assert_eq!((link.kind, link.target.as_deref()), (FileType::Symlink, Some("/etc")));
    guest.client.file(F::Move { from: dir.path("a/b"), to: dir.path("moved") }).unwrap();
    let some = F::Remove { path: dir.path("moved"), recursive: false };
    assert_eq!(guest.client.file(some).unwrap_err().code, Code::NotEmpty);
    guest.client.file(F::Remove { path: dir.path("moved"), recursive: true }).unwrap();
    guest.client.file(F::Remove { path: dir.path("a/link"), recursive: true }).unwrap();
    assert!(fs::exists("/etc/passwd").unwrap(), "the link was followed");
}

#[test]
fn an_archive_goes_out_and_in() {
    let (mut guest, dir) = (HostGuest::start(), Scratch::new("archive"));
    fs::create_dir_all(dir.path("tree/sub")).unwrap();
    fs::write(dir.path("tree/one"), "1".repeat(100_000)).unwrap();
    fs::hard_link(dir.path("tree/one"), dir.path("tree/same")).unwrap();
    fs::write(dir.path("tree/sub/run"), "#!").unwrap();
    fs::set_permissions(dir.path("tree/sub/run"), fs::Permissions::from_mode(0o4755)).unwrap();
    symlink("../one", dir.path("tree/sub/link")).unwrap();
    let tar = guest.client.download(F::Archive { path: dir.path("tree") }).unwrap();
    guest.client.upload(F::Unpack { path: dir.path("copy") }, &tar).unwrap();
    let copy = dir.0.join("copy/tree");
    assert_eq!(fs::read(copy.join("one")).unwrap(), fs::read(copy.join("same")).unwrap());
    assert_eq!(fs::read_to_string(copy.join("sub/link")).unwrap().len(), 100_000);
    assert_eq!(fs::metadata(copy.join("sub/run")).unwrap().permissions().mode() & 0o7777, 0o755, "setuid is lost");
}

/// A tar with one entry whose name was not checked by anybody.
fn entry(tar: &mut tar::Builder<Vec<u8>>, name: &str, kind: tar::EntryType, link: &str, bytes: &[u8]) {
    let mut header = tar::Header::new_gnu();
    header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
    header.as_gnu_mut().unwrap().linkname[..link.len()].copy_from_slice(link.as_bytes());
    header.set_entry_type(kind);
    header.set_mode(0o644);
    header.set_size(bytes.len() as u64);
    header.set_cksum();
    tar.append(&header, bytes).unwrap();
}

#[test]
fn a_hostile_archive_stays_in_its_directory() {
    use tar::EntryType as E;
    let mut guest = HostGuest::start();
    type Entry = (&'static str, E, &'static str);
    let cases: [(&str, &[Entry]); 6] = [
        ("absolute", &[("/tmp/dormouse-hostile", E::Regular, "")]),
        ("parent", &[("../outside", E::Regular, "")]),
        ("link to the outside", &[("l", E::Symlink, ".."), ("l/outside", E::Regular, "")]),
        ("absolute link", &[("l", E::Symlink, "SCRATCH"), ("l/outside", E::Regular, "")]),
        ("link replaced by a file", &[("l", E::Symlink, "../outside"), ("l", E::Regular, "")]),
        ("hard link", &[("h", E::Link, "../victim"), ("h", E::Regular, "")]),
    ];
    for (what, entries) in cases {
        let dir = Scratch::new("hostile");
        fs::write(dir.path("victim"), "safe").unwrap();
        let mut tar = tar::Builder::new(Vec::new());
        for (name, kind, link) in entries {
            let link = link.replace("SCRATCH", dir.0.to_str().unwrap());
            entry(&mut tar, name, *kind, &link, if *kind == E::Regular { b"evil" } else { b"" });
        }
        let tar = tar.into_inner().unwrap();
        let _ = guest.client.upload(F::Unpack { path: dir.path("in") }, &tar);
        assert!(!fs::exists(dir.path("outside")).unwrap(), "{what}: written outside");
        assert!(!fs::exists("/tmp/dormouse-hostile").unwrap(), "{what}: written to an absolute path");
        assert_eq!(fs::read_to_string(dir.path("victim")).unwrap(), "safe", "{what}");
    }
    let noise = guest.client.upload(F::Unpack { path: Scratch::new("noise").path("in") }, &[7; 4096]).unwrap_err();
    assert_eq!(noise.code, Code::Invalid);
}

#[test]
fn changes_are_told_also_in_new_directories() {
    let (mut guest, dir) = (HostGuest::start(), Scratch::new("watch"));
    fs::create_dir(dir.path("sub")).unwrap();
    let stream = guest.client.stream();
    let request = F::Watch { path: dir.0.to_str().unwrap().into(), recursive: true };
    guest.client.request(Request::File { stream: Some(stream), request }).unwrap();
    let seen = |c: &support::Client, kind: &str, path: &str| {
        let events = c.bytes(stream).split(|b| *b == b'\n').filter_map(|l| serde_json::from_slice::<WatchEvent>(l).ok());
        events.into_iter().any(|e| e.kind == kind && e.path == path)
    };
    fs::write(dir.path("sub/x"), "1").unwrap();
    guest.client.until("a creation", |c| seen(c, "created", &dir.path("sub/x")));
    fs::write(dir.path("sub/x"), "12").unwrap();
    guest.client.until("a change", |c| seen(c, "modified", &dir.path("sub/x")));
    fs::create_dir(dir.path("later")).unwrap();
    guest.client.until("a directory", |c| seen(c, "created", &dir.path("later")));
    fs::File::create(dir.path("later/y")).unwrap().write_all(b"1").unwrap();
    guest.client.until("a file in it", |c| seen(c, "created", &dir.path("later/y")));
    fs::rename(dir.path("later/y"), dir.path("z")).unwrap();
    guest.client.until("another name", |c| seen(c, "moved_from", &dir.path("later/y")) && seen(c, "moved_to", &dir.path("z")));
    fs::remove_file(dir.path("z")).unwrap();
    guest.client.until("the end of it", |c| seen(c, "removed", &dir.path("z")));
    // What is watched goes and comes back.
    fs::remove_dir_all(&dir.0).unwrap();
    guest.client.until("the end of all", |c| seen(c, "removed", dir.0.to_str().unwrap()));
    fs::create_dir(&dir.0).unwrap();
    guest.client.until("its return", |c| seen(c, "created", dir.0.to_str().unwrap()));
    guest.client.quiesce();
}
