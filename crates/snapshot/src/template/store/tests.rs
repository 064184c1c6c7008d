use super::*;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in files {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    dir
}

fn store() -> (tempfile::TempDir, TemplateStore) {
    let dir = tempfile::tempdir().unwrap();
    let store = TemplateStore::open(dir.path()).unwrap();
    (dir, store)
}

#[test]
fn the_address_covers_all_that_a_sandbox_sees_and_nothing_else() {
    let (_dir, store) = store();
    let source = tree(&[("a", "1"), ("d/b", "2")]);
    let at = |name: &str| source.path().join(name);
    symlink("a", at("l")).unwrap();
    let first = store.add_dir("one", source.path()).unwrap();
    assert_eq!(fs::read_to_string(first.root_path.join("d/b")).unwrap(), "2");
    fs::File::open(at("a")).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
    assert_eq!(store.add_dir("two", source.path()).unwrap().hash, first.hash, "times don't count");

    let changes: [&dyn Fn(); 7] = [
        &|| fs::write(at("a"), "3").unwrap(),
        &|| fs::set_permissions(at("a"), fs::Permissions::from_mode(0o640)).unwrap(),
        &|| fs::rename(at("a"), at("c")).unwrap(),
        &|| {
            fs::remove_file(at("l")).unwrap();
            symlink("b", at("l")).unwrap();
        },
        &|| fs::write(at("e"), "3").unwrap(),
        &|| {
            fs::remove_file(at("e")).unwrap();
            fs::hard_link(at("c"), at("e")).unwrap();
            fs::set_permissions(at("e"), fs::Permissions::from_mode(0o600)).unwrap();
        },
        &|| rustix::fs::setxattr(at("c"), "user.x", b"1", rustix::fs::XattrFlags::empty()).unwrap(),
    ];
    let mut seen = HashSet::from([first.hash]);
    for (n, change) in changes.iter().enumerate() {
        change();
        assert!(seen.insert(store.add_dir("one", source.path()).unwrap().hash), "change {n}");
    }
    let last = store.resolve("one").unwrap();
    let (c, e) = (last.root_path.join("c").metadata().unwrap(), last.root_path.join("e").metadata().unwrap());
    assert_eq!(c.ino(), e.ino(), "hard links stay linked");
    assert!(store.descriptor(last.hash).unwrap().size_bytes == 2, "and count once");
}

#[test]
fn a_name_moves_on_and_an_address_stays() {
    let (_dir, store) = store();
    let old = store.add_dir("app", tree(&[("v", "1")]).path()).unwrap();
    let new = store.add_dir("app", tree(&[("v", "2")]).path()).unwrap();
    assert_eq!(store.resolve("app").unwrap(), new);
    let by_hash = store.resolve(&old.hash.to_string()).unwrap();
    assert_eq!((by_hash.name.as_str(), by_hash.hash), ("app", old.hash));
    let listed = store.list().unwrap();
    assert_eq!(listed.iter().map(|l| (l.name.as_str(), l.descriptor.hash)).collect::<Vec<_>>(), [("app", new.hash)]);
    for unknown in ["other", "", "..", "a/b", "../names/app", &"0".repeat(64)] {
        assert!(matches!(store.resolve(unknown), Err(TemplateError::NotFound(_))), "{unknown}");
    }
}

#[test]
fn a_bad_name_is_refused_before_anything_is_built() {
    let (dir, store) = store();
    let source = tree(&[("a", "1")]);
    for name in ["", ".", "..", "a/b", "A", "-x", ".lock-x", "x\n", &"a".repeat(65), &"0".repeat(64)] {
        assert!(matches!(store.add_dir(name, source.path()), Err(TemplateError::BadName(_))), "{name}");
    }
    assert!(names_in(&dir.path().join("trees")).unwrap().is_empty());
}

#[test]
fn a_tree_stays_while_it_is_pinned() {
    let (_dir, store) = store();
    let app = store.add_dir("app", tree(&[("v", "1")]).path()).unwrap();
    store.pin(app.hash, "session-1").unwrap();
    store.pin(app.hash, "session-1").unwrap();
    store.pin(app.hash, "session-2").unwrap();
    assert_eq!(store.list().unwrap()[0].pins, 2);
    store.remove("app").unwrap();
    assert!(matches!(store.remove("app"), Err(TemplateError::NotFound(_))));
    assert!(store.resolve("app").is_err());
    assert!(store.resolve(&app.hash.to_string()).is_ok());
    store.unpin(app.hash, "session-1").unwrap();
    store.unpin(app.hash, "session-1").unwrap();
    assert_eq!(store.collect().unwrap().trees, []);
    store.unpin(app.hash, "session-2").unwrap();
    assert_eq!(store.collect().unwrap().trees, [app.hash]);
    assert!(!app.root_path.exists() && !app.root_path.with_extension("json").exists());
    assert!(matches!(store.pin(app.hash, "late"), Err(TemplateError::NotFound(_))));
    for who in ["", "..", "a/b", ".x"] {
        assert!(matches!(store.pin(app.hash, who), Err(TemplateError::BadPin(_))), "{who}");
    }
}

#[test]
fn two_that_add_the_same_at_once_share_one_tree() {
    let (dir, store) = store();
    let source = tree(&[("a", "1"), ("b/c", "2")]);
    let hashes: HashSet<Hash> = std::thread::scope(|scope| {
        let (store, source) = (&store, source.path());
        let add = |n: usize| scope.spawn(move || store.add_dir(&format!("n{n}"), source).unwrap().hash);
        let running: Vec<_> = (0..6).map(add).collect();
        running.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(hashes.len(), 1);
    assert_eq!(store.list().unwrap().len(), 6);
    assert_eq!(fs::read_dir(dir.path().join("trees")).unwrap().count(), 2, "one tree, one descriptor");
    assert_eq!(fs::read_dir(dir.path().join("tmp")).unwrap().count(), 0);
}

#[test]
fn of_many_that_need_a_template_one_builds_it() {
    static BUILT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    fn build(root: &Path, progress: &mut dyn FnMut(&str)) -> Result<Built, TemplateError> {
        BUILT.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        progress("building");
        fs::write(root.join("a"), "1").unwrap();
        summarized(TemplateKind::Debian, root)
    }
    let (_dir, store) = store();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| store.ensure("debian", &mut |_| (), build).unwrap());
        }
    });
    assert_eq!(BUILT.load(std::sync::atomic::Ordering::SeqCst), 1);
}

#[test]
fn what_a_dead_builder_left_is_removed_and_a_living_one_is_left_alone() {
    let (dir, store) = store();
    let tmp = dir.path().join("tmp");
    let alive = store.workspace().unwrap();
    fs::create_dir(alive.path("root")).unwrap();
    // A dead one: its lock is held by nobody.
    fs::create_dir_all(tmp.join("dead/root/d")).unwrap();
    fs::write(tmp.join("dead.lock"), "").unwrap();
    TemplateStore::open(dir.path()).unwrap();
    assert!(!tmp.join("dead").exists() && !tmp.join("dead.lock").exists());
    assert!(alive.path("root").exists());
    drop(alive);
    assert_eq!(fs::read_dir(&tmp).unwrap().count(), 0);
}

#[test]
fn a_build_that_died_before_its_last_step_is_built_again() {
    let (dir, store) = store();
    let source = tree(&[("a", "1")]);
    let app = store.add_dir("app", source.path()).unwrap();
    // As if it had died between the descriptor and the tree's name.
    fs::rename(&app.root_path, dir.path().join("elsewhere")).unwrap();
    assert!(matches!(store.resolve("app"), Err(TemplateError::NotFound(_))));
    assert_eq!(store.add_dir("app", source.path()).unwrap(), app);
    assert!(store.resolve("app").is_ok());
}

#[test]
fn a_failed_build_leaves_nothing() {
    let (dir, store) = store();
    assert!(matches!(store.add_tar("x", &b"no archive"[..]), Err(TemplateError::Extract(_))));
    let special = tree(&[]);
    let _listener = std::os::unix::net::UnixListener::bind(special.path().join("s")).unwrap();
    assert!(matches!(store.add_dir("x", special.path()), Err(TemplateError::Tree(tree::TreeError::Special(_)))));
    assert!(store.add_dir("x", Path::new("/nowhere")).is_err());
    for part in ["tmp", "trees", "names"] {
        assert_eq!(fs::read_dir(dir.path().join(part)).unwrap().count(), 0, "{part}");
    }
}

#[test]
fn devices_are_left_out_of_dev_and_refused_elsewhere() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root");
        return;
    }
    use nix::sys::stat::{Mode, SFlag, makedev, mknod};
    let (_dir, store) = store();
    let source = tree(&[("dev/x", ""), ("etc/x", "")]);
    let device = |name: &str| mknod(&source.path().join(name), SFlag::S_IFCHR, Mode::S_IRUSR, makedev(1, 3)).unwrap();
    device("dev/null");
    let template = store.add_dir("x", source.path()).unwrap();
    assert!(template.root_path.join("dev/x").exists() && !template.root_path.join("dev/null").exists());
    device("etc/null");
    assert!(matches!(store.add_dir("x", source.path()), Err(TemplateError::Tree(tree::TreeError::Special(_)))));
}

#[test]
fn the_template_folder_is_never_copied_into_itself() {
    let (dir, store) = store();
    assert!(matches!(store.add_dir("x", dir.path()), Err(TemplateError::Io { .. })));
    assert!(matches!(store.add_dir("x", dir.path().parent().unwrap()), Err(TemplateError::Io { .. })));
}

#[test]
fn a_newer_or_damaged_descriptor_is_said_so() {
    let (_dir, store) = store();
    let app = store.add_dir("app", tree(&[("a", "1")]).path()).unwrap();
    let path = app.root_path.with_extension("json");
    let good = fs::read_to_string(&path).unwrap();
    fs::write(&path, r#"{"format_version": 7, "hash": 5}"#).unwrap();
    assert!(matches!(store.resolve("app"), Err(TemplateError::Newer { version: 7, .. })));
    let other = good.replace(&app.hash.to_string(), &"0".repeat(64));
    for bad in ["", "{}", &good[..good.len() / 2], &other] {
        fs::write(&path, bad).unwrap();
        assert!(matches!(store.resolve("app"), Err(TemplateError::Damaged { .. })), "{bad}");
    }
}

#[test]
fn trees_are_out_of_reach_of_other_users() {
    let (dir, _store) = store();
    for private in ["trees", "tmp"] {
        assert_eq!(dir.path().join(private).metadata().unwrap().mode() & 0o777, 0o700, "{private}");
    }
}
