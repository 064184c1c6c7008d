use super::*;
use crate::disk::{DiskLayout, mounts_below, unmount};
use std::{
    fs,
    io::Read,
    os::unix::{
        ffi::OsStrExt,
        fs::{PermissionsExt, symlink},
    },
};

/// A disk that a session has worked on, and whose layers are no longer mounted.
struct Disk {
    dir: tempfile::TempDir,
    lower: Vec<PathBuf>,
    layout: DiskLayout,
}

impl Disk {
    fn new(work: impl FnOnce(&Path)) -> Option<Disk> {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: needs root");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let (template, guest) = (dir.path().join("template"), dir.path().join("guest"));
        for (path, content) in [("etc/motd", "template"), ("etc/gone", "x"), ("old/a", "a"), ("usr/bin/sudo", "template")] {
            let path = template.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        fs::create_dir_all(guest.join("usr/bin")).unwrap();
        fs::write(guest.join("usr/bin/sudo"), "guest").unwrap();
        let (lower, layout, at) = (vec![guest, template], DiskLayout::new(dir.path().join("disk")), dir.path().join("m"));
        layout.mount(&lower, &at).unwrap();
        work(&at);
        unmount(&at).unwrap();
        Some(Disk { dir, lower, layout })
    }

    fn view(&self) -> DiskView {
        DiskView::open(&self.lower, &self.layout.upper()).unwrap()
    }
}

fn content(view: &DiskView, path: &str) -> String {
    let mut text = String::new();
    view.read(path).unwrap().0.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn a_sleeping_disk_reads_as_the_session_left_it() {
    let work = |at: &Path| {
        fs::write(at.join("etc/motd"), "changed").unwrap();
        fs::remove_file(at.join("etc/gone")).unwrap();
        fs::rename(at.join("old"), at.join("new")).unwrap();
        fs::create_dir(at.join("root")).unwrap();
        fs::write(at.join("root/long".to_owned() + &"x".repeat(250 - 4)), "255").unwrap();
        fs::write(at.join("root/a\nb"), "").unwrap();
        symlink("/etc/motd", at.join("root/link")).unwrap();
    };
    let Some(disk) = Disk::new(work) else { return };
    let view = disk.view();
    assert_eq!(content(&view, "/etc/motd"), "changed");
    assert_eq!(content(&view, "new/a"), "a");
    assert_eq!(content(&view, "/usr/bin/sudo"), "guest");
    assert_eq!(content(&view, "/root/link"), "changed", "an absolute link starts at the disk's root");
    assert!(matches!(view.read("/etc/gone"), Err(ViewError::NotFound(_))));
    let link = view.stat("/root/link").unwrap();
    assert_eq!((link.kind, link.target.as_deref()), (FileType::Symlink, Some("/etc/motd")));
    assert_eq!(view.stat("/").unwrap().kind, FileType::Dir);

    let paths = |list: Vec<FileMeta>| list.into_iter().map(|m| m.path).collect::<Vec<_>>();
    assert_eq!(paths(view.list("/", 1).unwrap()), ["/etc", "/new", "/root", "/usr"]);
    assert_eq!(paths(view.list("/root", 9).unwrap()).len(), 3);
    assert!(paths(view.list("/", 2).unwrap()).contains(&"/root/a\nb".to_owned()));
    assert!(paths(view.list("/", 0).unwrap()).is_empty());
    assert!(mounts_below(disk.dir.path()).unwrap().is_empty(), "nothing is attached anywhere");

    let (mut file, _) = view.read("/etc/motd").unwrap();
    drop(view);
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "changed", "an open file outlives the view");
}

#[test]
fn nothing_outside_of_the_disk_can_be_read() {
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("secret"), "secret").unwrap();
    let out = outside.path().to_owned();
    let work = move |at: &Path| {
        let ups = "../".repeat(40);
        symlink(out.join("secret"), at.join("absolute")).unwrap();
        symlink(format!("{ups}{}", out.join("secret").display()), at.join("relative")).unwrap();
        symlink(&out, at.join("dir")).unwrap();
        symlink("/proc/self/root/etc/passwd", at.join("magic")).unwrap();
        symlink("loop", at.join("loop")).unwrap();
    };
    let Some(disk) = Disk::new(work) else { return };
    let view = disk.view();
    let direct = format!("/{}{}", "../".repeat(40), outside.path().join("secret").display());
    for path in ["/absolute", "/relative", "/dir/secret", "/magic", direct.as_str()] {
        assert!(matches!(view.read(path), Err(ViewError::NotFound(_))), "{path}: {:?}", view.read(path));
    }
    assert!(matches!(view.list("/dir", 1), Err(ViewError::NotFound(_))));
    assert!(matches!(view.read("/loop"), Err(ViewError::TooManyLinks(_))));
    // A listing shows links, and never goes through them.
    assert_eq!(view.list("/", 9).unwrap().iter().filter(|m| m.path.contains("secret")).count(), 0);
}

#[test]
fn what_is_no_plain_file_has_its_own_answer_at_once() {
    use nix::sys::stat::{Mode, SFlag, makedev, mknod};
    let work = |at: &Path| {
        for (name, kind, number) in
            [("fifo", SFlag::S_IFIFO, 0), ("zero", SFlag::S_IFCHR, makedev(1, 5)), ("disk", SFlag::S_IFBLK, makedev(7, 0))]
        {
            mknod(&at.join(name), kind, Mode::S_IRUSR, number).unwrap();
        }
        symlink("fifo", at.join("to-fifo")).unwrap();
    };
    let Some(disk) = Disk::new(work) else { return };
    let view = disk.view();
    for (path, kind) in
        [("/fifo", FileType::Fifo), ("/to-fifo", FileType::Fifo), ("/zero", FileType::Char), ("/disk", FileType::Block)]
    {
        let result = view.read(path);
        assert!(matches!(&result, Err(ViewError::NotRegular { kind: k, .. }) if *k == kind), "{path}: {result:?}");
    }
    assert!(matches!(view.read("/etc"), Err(ViewError::IsADirectory(_))));
    assert!(matches!(view.read("/etc/motd/x"), Err(ViewError::NotADirectory(_))));
    assert!(matches!(view.list("/etc/motd", 1), Err(ViewError::NotADirectory(_))));
    for (path, _) in [("", 0), ("a\0b", 0), (&"x".repeat(300), 0), (&"x/".repeat(5000), 0)] {
        assert!(matches!(view.read(path), Err(ViewError::Invalid { .. })), "{path:.20}");
    }
    let missing = DiskView::open(&disk.lower, Path::new("/nowhere")).unwrap_err();
    assert!(matches!(&missing, ViewError::Layers(text) if text.contains("/nowhere")), "{missing}");
}

#[test]
fn a_view_cannot_change_the_disk() {
    let Some(disk) = Disk::new(|_| ()) else { return };
    let view = disk.view();
    let flags = rustix::fs::fstatvfs(&view.root).unwrap().f_flag;
    assert!(flags.contains(rustix::fs::StatVfsMountFlags::RDONLY | rustix::fs::StatVfsMountFlags::NOEXEC), "{flags:?}");
    let write = rustix::fs::openat(&view.root, "new", OFlags::CREATE | OFlags::WRONLY, rustix::fs::Mode::RWXU);
    assert_eq!(write.unwrap_err(), Errno::ROFS);
}

#[test]
fn an_archive_is_safe_to_unpack() {
    let work = |at: &Path| {
        let src = at.join("src");
        fs::create_dir_all(src.join("sub/empty")).unwrap();
        fs::write(src.join("su"), "su").unwrap();
        fs::set_permissions(src.join("su"), fs::Permissions::from_mode(0o4755)).unwrap();
        fs::hard_link(src.join("su"), src.join("sub/su2")).unwrap();
        fs::write(src.join("y".repeat(255)), "long").unwrap();
        fs::write(src.join(OsStr::from_bytes(b"bytes-\xff")), "").unwrap();
        symlink("../su", src.join("sub/in")).unwrap();
        symlink("../../etc/motd", src.join("sub/out")).unwrap();
        symlink("/etc/motd", src.join("abs")).unwrap();
        nix::unistd::mkfifo(&src.join("fifo"), nix::sys::stat::Mode::S_IRUSR).unwrap();
    };
    let Some(disk) = Disk::new(work) else { return };
    let mut bytes = Vec::new();
    let done = disk.view().archive("/src", &mut bytes).unwrap();
    assert_eq!(done, Archived { entries: 8, bytes: 6, outward_links: 2, special_files: 1 });
    let mut archive = tar::Archive::new(bytes.as_slice());
    for entry in archive.entries().unwrap() {
        let entry = entry.unwrap();
        assert!(inroot::normal_path(&entry.path_bytes()).is_some(), "{:?}", entry.path());
        assert_eq!(entry.header().mode().unwrap() & 0o7000, 0);
    }
    // And it unpacks to what was there.
    let into = tempfile::tempdir().unwrap();
    let options = crate::extract::ExtractOptions::source(1 << 20);
    crate::extract::extract_tar_into(&File::open(into.path()).unwrap(), Path::new("."), bytes.as_slice(), &options).unwrap();
    let to = into.path().join("src");
    assert_eq!(fs::read_to_string(to.join("sub/in")).unwrap(), "su");
    assert_eq!(fs::read_to_string(to.join("y".repeat(255))).unwrap(), "long");
    assert!(to.join(OsStr::from_bytes(b"bytes-\xff")).exists() && to.join("sub/empty").is_dir());

    let mut one = Vec::new();
    disk.view().archive("/src/su", &mut one).unwrap();
    let mut archive = tar::Archive::new(one.as_slice());
    let names: Vec<_> = archive.entries().unwrap().map(|e| e.unwrap().path().unwrap().into_owned()).collect();
    assert_eq!(names, [Path::new("su")]);
    assert!(matches!(disk.view().archive("/src/fifo", io::sink()), Err(ViewError::NotRegular { .. })));

    struct Full;
    impl io::Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    assert!(matches!(disk.view().archive("/src", Full), Err(ViewError::Output(_))));
}
