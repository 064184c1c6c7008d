use super::*;

fn store() -> (tempfile::TempDir, BinaryStore) {
    let dir = tempfile::tempdir().unwrap();
    let store = BinaryStore::open(dir.path().join("pinned")).unwrap();
    (dir, store)
}

#[test]
fn an_upgrade_of_the_original_leaves_the_copy() {
    let (dir, store) = store();
    let program = dir.path().join("runsc");
    fs::write(&program, "version 1").unwrap();
    let first = store.ensure(&program).unwrap();
    assert_eq!(first.hash, Hash::of(b"version 1"));
    assert_eq!(first.path.metadata().unwrap().mode() & 0o7777, 0o555);
    assert_eq!(store.ensure(&program).unwrap(), first);
    // In place, the worst way.
    fs::write(&program, "version 2").unwrap();
    let second = store.ensure(&program).unwrap();
    assert_eq!(second.hash, Hash::of(b"version 2"));
    assert_eq!(fs::read_to_string(&first.path).unwrap(), "version 1");
    assert_eq!(store.get(first.hash).unwrap(), first);
    assert!(matches!(store.get(Hash::of(b"other")), Err(PinError::NotFound(_))));
}

#[test]
fn an_unchanged_program_is_not_read_again() {
    let (dir, store) = store();
    let program = dir.path().join("p");
    fs::write(&program, "one").unwrap();
    let pinned = store.ensure(&program).unwrap();
    let cache = store.part("cache");
    let entry = fs::read_dir(&cache).unwrap().next().unwrap().unwrap().path();
    // A cache that names another program shows that the file itself isn't looked at.
    let other = store.ensure_bytes("q", b"two").unwrap();
    fs::write(&entry, other.hash.to_string()).unwrap();
    assert_eq!(store.ensure(&program).unwrap(), other);
    // One that can't be right, or says nothing, is not believed.
    let longer = store.ensure_bytes("q", b"longer").unwrap();
    for bad in [longer.hash.to_string(), Hash::of(b"unknown").to_string(), "rubbish".to_owned()] {
        fs::write(&entry, bad).unwrap();
        assert_eq!(store.ensure(&program).unwrap(), pinned);
    }
}

#[test]
fn many_at_once_share_one_copy() {
    let (dir, store) = store();
    let program = dir.path().join("p");
    fs::write(&program, vec![7u8; 3 << 20]).unwrap();
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..6).map(|_| scope.spawn(|| store.ensure(&program).unwrap())).collect();
        let pinned: Vec<_> = running.into_iter().map(|t| t.join().unwrap()).collect();
        assert!(pinned.windows(2).all(|two| two[0] == two[1]));
    });
    assert_eq!(fs::read_dir(store.part("tmp")).unwrap().count(), 0);
}

#[test]
fn what_is_no_program_is_refused() {
    let (dir, store) = store();
    assert!(matches!(store.ensure(&dir.path().join("pinned")), Err(PinError::NotAFile(_))));
    assert!(matches!(store.ensure(&dir.path().join("missing")), Err(PinError::Io { .. })));
    for name in ["", ".", "..", "a/b", "a\0"] {
        assert!(matches!(store.ensure_bytes(name, b"x"), Err(PinError::BadName(_))), "{name}");
    }
}

#[test]
fn only_what_nobody_needs_is_collected() {
    let (dir, store) = store();
    let program = dir.path().join("p");
    fs::write(&program, "one").unwrap();
    let (one, two) = (store.ensure(&program).unwrap(), store.ensure_bytes("two", b"two").unwrap());
    let layer = store.guest_layer(b"two").unwrap();
    assert_eq!(store.collect(&HashSet::from([one.hash, two.hash])).unwrap(), []);
    assert_eq!(store.collect(&HashSet::from([one.hash])).unwrap(), [two.hash]);
    assert!(one.path.exists() && !two.path.exists() && !layer.exists());
    store.collect(&HashSet::new()).unwrap();
    assert_eq!(fs::read_dir(store.part("cache")).unwrap().count(), 0);
    assert_eq!(fs::read_dir(store.part("tmp")).unwrap().count(), 0);
    assert_eq!(store.ensure(&program).unwrap(), one, "and it can be pinned again");
}

#[test]
fn the_guests_layer_has_the_guest_under_all_its_names() {
    let (_dir, store) = store();
    let layer = store.guest_layer(b"guest").unwrap();
    assert_eq!(store.guest_layer(b"guest").unwrap(), layer);
    assert_eq!(store.layer_of(Hash::of(b"guest")).unwrap(), layer);
    assert!(matches!(store.layer_of(Hash::of(b"other")), Err(PinError::NotFound(_))));
    let guest = layer.join(&GUEST_PATH[1..]);
    assert_eq!((fs::read(&guest).unwrap(), guest.metadata().unwrap().mode() & 0o7777), (b"guest".to_vec(), 0o755));
    for name in ["dormouse-guest", "dormouse-ctl", "sudo", "su", "systemctl"] {
        assert_eq!(fs::read_link(layer.join("usr/bin").join(name)).unwrap(), Path::new(GUEST_PATH), "{name}");
    }
}

#[test]
fn half_made_copies_of_a_dead_server_are_removed() {
    let (dir, store) = store();
    fs::create_dir_all(store.part("tmp").join("dead/program")).unwrap();
    BinaryStore::open(dir.path().join("pinned")).unwrap();
    assert_eq!(fs::read_dir(store.part("tmp")).unwrap().count(), 0);
}
