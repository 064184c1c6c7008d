use super::*;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};

/// A folder for one test; `None` (said on the way) where this process may not mount.
pub(crate) fn mountable() -> Option<tempfile::TempDir> {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root");
        return None;
    }
    Some(tempfile::tempdir().unwrap())
}

fn layer(dir: &Path, files: &[(&str, &str)]) -> PathBuf {
    for (name, content) in files {
        let path = dir.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    dir.to_owned()
}

#[test]
fn a_disk_shows_its_layers_and_keeps_its_changes() {
    let Some(dir) = mountable() else { return };
    let template = layer(&dir.path().join("template"), &[("etc/motd", "template"), ("usr/bin/tool", "template"), ("old/a", "a")]);
    // A name that the option's syntax would read otherwise.
    let guest = layer(&dir.path().join("guest:,\\x"), &[("usr/bin/tool", "guest")]);
    let (disk, at) = (DiskLayout::new(dir.path().join("disk")), dir.path().join("m"));
    let lower = [guest, template.clone()];

    disk.mount(&lower, &at).unwrap();
    assert!(is_mounted(&at).unwrap());
    assert_eq!(fs::read_to_string(at.join("usr/bin/tool")).unwrap(), "guest", "the first layer is the top-most");
    fs::write(at.join("etc/motd"), "changed").unwrap();
    fs::remove_file(at.join("usr/bin/tool")).unwrap();
    fs::rename(at.join("old"), at.join("new")).expect("a directory of the template can be renamed");
    sync(&disk.upper()).unwrap();
    assert_eq!(mounts_below(dir.path()).unwrap(), [at.canonicalize().unwrap()]);
    assert_eq!(unmount(&at).unwrap(), Unmounted::Clean);
    assert_eq!(unmount(&at).unwrap(), Unmounted::NotMounted);
    assert!(mounts_below(dir.path()).unwrap().is_empty());

    disk.mount(&lower, &at).unwrap();
    assert_eq!(fs::read_to_string(at.join("etc/motd")).unwrap(), "changed");
    assert_eq!(fs::read_to_string(at.join("new/a")).unwrap(), "a");
    assert!(!at.join("old").exists() && !at.join("usr/bin/tool").exists());
    assert_eq!(fs::read_to_string(template.join("etc/motd")).unwrap(), "template", "the template is untouched");
    unmount(&at).unwrap();
}

#[test]
fn a_disk_is_mounted_once() {
    let Some(dir) = mountable() else { return };
    let lower = [layer(&dir.path().join("t"), &[("a", "a")])];
    let (disk, at) = (DiskLayout::new(dir.path().join("disk")), dir.path().join("m"));
    let results: Vec<_> = std::thread::scope(|scope| {
        let mount = || disk.mount(&lower, &at);
        let running: Vec<_> = (0..4).map(|_| scope.spawn(mount)).collect();
        running.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(results.iter().filter(|r| r.is_ok()).count(), 1, "{results:?}");
    let elsewhere = disk.mount(&lower, &dir.path().join("n"));
    assert!(matches!(&elsewhere, Err(DiskError::AlreadyMounted { at: there, .. }) if there.ends_with("m")), "{elsewhere:?}");
    let other = DiskLayout::new(dir.path().join("other")).mount(&lower, &at);
    assert!(matches!(other, Err(DiskError::AlreadyMounted { .. })), "{other:?}");
    unmount(&at).unwrap();
}

#[test]
fn a_busy_disk_is_taken_out_of_sight() {
    let Some(dir) = mountable() else { return };
    let lower = [layer(&dir.path().join("t"), &[("a", "a")])];
    let (disk, at) = (DiskLayout::new(dir.path().join("disk")), dir.path().join("m"));
    disk.mount(&lower, &at).unwrap();
    let open = File::open(at.join("a")).unwrap();
    assert_eq!(unmount(&at).unwrap(), Unmounted::Lazy);
    assert!(!is_mounted(&at).unwrap());
    drop(open);
}

#[test]
fn setuid_and_devices_have_no_effect_on_a_disk() {
    let Some(dir) = mountable() else { return };
    let lower = [layer(&dir.path().join("t"), &[("a", "a")])];
    let (disk, at) = (DiskLayout::new(dir.path().join("disk")), dir.path().join("m"));
    disk.mount(&lower, &at).unwrap();
    let null = at.join("null");
    let made = nix::sys::stat::mknod(
        &null,
        nix::sys::stat::SFlag::S_IFCHR,
        nix::sys::stat::Mode::S_IRUSR,
        nix::sys::stat::makedev(1, 3),
    );
    made.unwrap();
    assert!(null.symlink_metadata().unwrap().file_type().is_char_device());
    assert_eq!(File::open(&null).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    let flags = rustix::fs::statvfs(&at).unwrap().f_flag;
    assert!(flags.contains(rustix::fs::StatVfsMountFlags::NOSUID | rustix::fs::StatVfsMountFlags::NODEV), "{flags:?}");
    unmount(&at).unwrap();
}

#[test]
fn what_cannot_be_mounted_says_why() {
    let Some(dir) = mountable() else { return };
    let (disk, at) = (DiskLayout::new(dir.path().join("disk")), dir.path().join("m"));
    assert!(matches!(disk.mount(&[], &at), Err(DiskError::NoLower)));
    let error = disk.mount(&[dir.path().join("missing")], &at).unwrap_err();
    assert!(matches!(&error, DiskError::Refused { .. }) && error.to_string().contains("missing"), "{error}");
    assert!(!is_mounted(&at).unwrap());
}

#[test]
fn the_fingerprint_tells_any_change_and_a_mount_is_none() {
    let Some(dir) = mountable() else { return };
    let lower = [layer(&dir.path().join("t"), &[("d/a", "a")])];
    let (disk, at) = (DiskLayout::new(dir.path().join("disk")), dir.path().join("m"));
    disk.mount(&lower, &at).unwrap();
    fs::write(at.join("d/b"), "1").unwrap();
    fs::rename(at.join("d"), at.join("e")).unwrap();
    unmount(&at).unwrap();
    let before = fingerprint(&disk.upper()).unwrap();
    disk.mount(&lower, &at).unwrap();
    assert_eq!(fs::read_dir(at.join("e")).unwrap().count(), 2);
    unmount(&at).unwrap();
    assert_eq!(fingerprint(&disk.upper()).unwrap(), before, "looking is no change");

    let b = disk.upper().join("e/b");
    let changes: [&dyn Fn(); 4] = [
        &|| fs::write(&b, "2").unwrap(),
        &|| fs::set_permissions(&b, fs::Permissions::from_mode(0o600)).unwrap(),
        &|| fs::rename(&b, disk.upper().join("e/c")).unwrap(),
        &|| fs::remove_file(disk.upper().join("e/c")).unwrap(),
    ];
    let mut seen = HashSet::from([before]);
    for (n, change) in changes.iter().enumerate() {
        change();
        assert!(seen.insert(fingerprint(&disk.upper()).unwrap()), "change {n}");
    }
}

#[test]
fn usage_counts_hard_links_once() {
    let dir = tempfile::tempdir().unwrap();
    let disk = DiskLayout::new(dir.path());
    disk.create().unwrap();
    assert_eq!(disk.upper().metadata().unwrap().mode() & 0o7777, 0o755, "it is the mode of / inside");
    let empty = disk.usage_bytes().unwrap();
    fs::write(disk.upper().join("a"), vec![1u8; 1 << 20]).unwrap();
    File::open(disk.upper().join("a")).unwrap().sync_all().unwrap();
    let one = disk.usage_bytes().unwrap();
    assert!(one >= empty + (1 << 20), "{empty} {one}");
    fs::hard_link(disk.upper().join("a"), disk.upper().join("b")).unwrap();
    assert_eq!(disk.usage_bytes().unwrap(), one);
}

#[test]
fn mountinfo_is_read_with_its_escapes() {
    let text = b"36 35 98:0 / /mnt/a\\040b rw,nosuid shared:1 - overlay dormouse rw,lowerdir=/l,upperdir=/x\\134y,workdir=/w\nshort line\n";
    let expected = Mount { at: "/mnt/a b".into(), super_options: b"rw,lowerdir=/l,upperdir=/x\\y,workdir=/w".to_vec() };
    assert_eq!(parse_mounts(text), std::slice::from_ref(&expected));
    assert_eq!(expected.upper_dir(), Some("/x\\y".into()));
    for (raw, plain) in [("", ""), ("a\\", "a\\"), ("\\04", "\\04"), ("\\089", "\\089"), ("\\011\\012", "\t\n")] {
        assert_eq!(unescape(raw.as_bytes()), plain.as_bytes(), "{raw}");
    }
}
