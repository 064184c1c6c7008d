//! Random disks: written to through mounted overlays, captured, forked, flattened, removed, and compared with full copies.

use super::world::*;
use crate::layer::{Capture, Layer, flatten::flatten_within};
use model::LayerId;
use proptest::{
    prelude::*,
    sample::{Index, select},
    test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner},
};
use rustix::fs::{CWD, RenameFlags, XattrFlags, renameat_with};
use std::{
    collections::HashMap,
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{FileExt, MetadataExt, lchown, symlink},
    path::Path,
    time::Duration,
};

/// What a program does. Names are few, so that they meet; what can't be done isn't.
#[derive(Debug, Clone)]
enum Op {
    Write {
        at: String,
        byte: u8,
        length: usize,
    },
    Overwrite {
        at: String,
        byte: u8,
        offset: usize,
    },
    Append {
        at: String,
        byte: u8,
    },
    Map {
        at: String,
        byte: u8,
        offset: usize,
    },
    Truncate {
        at: String,
        length: u64,
    },
    Hole {
        at: String,
        offset: u64,
    },
    Rename {
        from: String,
        to: String,
    },
    Exchange {
        from: String,
        to: String,
    },
    Link {
        from: String,
        to: String,
    },
    Remove {
        at: String,
    },
    MakeDir {
        at: String,
    },
    /// Removes a directory with all in it and makes it anew.
    Remake {
        at: String,
    },
    Symlink {
        at: String,
        to: String,
    },
    Mode {
        at: String,
        mode: u32,
    },
    Owner {
        at: String,
        id: u32,
    },
    Times {
        at: String,
        seconds: i64,
    },
    SetAttribute {
        at: String,
        name: &'static str,
        length: usize,
    },
    RemoveAttribute {
        at: String,
        name: &'static str,
    },
}

#[derive(Debug, Clone)]
enum Step {
    /// One of the sessions works.
    Work(Index, Vec<Op>),
    Snapshot {
        session: Index,
        passes: Vec<Vec<Op>>,
        is_calm: bool,
        after: Vec<Op>,
        links_max: u64,
    },
    /// A new session goes on above a snapshot.
    Fork(Index),
    /// The session goes on above a snapshot with a fresh upper directory.
    Rollback(Index, Index),
    /// A session's own layers become one.
    Flatten {
        session: Index,
        links_max: u64,
    },
    /// As after a stop and start.
    Remount(Index),
    /// A snapshot is given up; its layer goes if nobody else needs it.
    Forget(Index),
}

fn path() -> impl Strategy<Value = String> {
    let name = || select(vec!["a", "b", "c"]);
    prop_oneof![
        3 => name().prop_map(str::to_owned),
        4 => (name(), name()).prop_map(|(a, b)| format!("{a}/{b}")),
        3 => (name(), name(), name()).prop_map(|(a, b, c)| format!("{a}/{b}/{c}")),
        1 => (name(), name(), name(), name()).prop_map(|(a, b, c, d)| format!("{a}/{b}/{c}/{d}")),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let attribute = || select(vec!["user.one", "user.two", "trusted.mine"]);
    prop_oneof![
        6 => (path(), any::<u8>(), 0usize..9000).prop_map(|(at, byte, length)| Op::Write { at, byte, length }),
        4 => (path(), any::<u8>(), 0usize..100).prop_map(|(at, byte, offset)| Op::Overwrite { at, byte, offset }),
        2 => (path(), any::<u8>()).prop_map(|(at, byte)| Op::Append { at, byte }),
        3 => (path(), any::<u8>(), 0usize..100).prop_map(|(at, byte, offset)| Op::Map { at, byte, offset }),
        1 => (path(), 0u64..20_000).prop_map(|(at, length)| Op::Truncate { at, length }),
        1 => (path(), 0u64..3_000_000).prop_map(|(at, offset)| Op::Hole { at, offset }),
        6 => (path(), path()).prop_map(|(from, to)| Op::Rename { from, to }),
        2 => (path(), path()).prop_map(|(from, to)| Op::Exchange { from, to }),
        4 => (path(), path()).prop_map(|(from, to)| Op::Link { from, to }),
        4 => path().prop_map(|at| Op::Remove { at }),
        5 => path().prop_map(|at| Op::MakeDir { at }),
        2 => path().prop_map(|at| Op::Remake { at }),
        1 => (path(), path()).prop_map(|(at, to)| Op::Symlink { at, to }),
        2 => (path(), 0u32..0o10000).prop_map(|(at, mode)| Op::Mode { at, mode }),
        1 => (path(), 0u32..5).prop_map(|(at, id)| Op::Owner { at, id }),
        1 => (path(), -1000i64..2_000_000_000).prop_map(|(at, seconds)| Op::Times { at, seconds }),
        2 => (path(), attribute(), 0usize..400).prop_map(|(at, name, length)| Op::SetAttribute { at, name, length }),
        1 => (path(), attribute()).prop_map(|(at, name)| Op::RemoveAttribute { at, name }),
    ]
}

fn ops(most: usize) -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(op(), 0..most)
}

fn links_max() -> impl Strategy<Value = u64> {
    select(vec![LINKS_MAX, LINKS_MAX, 4, 1])
}

fn step() -> impl Strategy<Value = Step> {
    let index = any::<Index>;
    let passes = || prop::collection::vec(ops(12), 0..3);
    let snapshot = (index(), passes(), any::<bool>(), ops(6), links_max())
        .prop_map(|(session, passes, is_calm, after, links_max)| Step::Snapshot { session, passes, is_calm, after, links_max });
    prop_oneof![
        5 => (index(), ops(25)).prop_map(|(session, ops)| Step::Work(session, ops)),
        6 => snapshot,
        2 => index().prop_map(Step::Fork),
        1 => (index(), index()).prop_map(|(session, snapshot)| Step::Rollback(session, snapshot)),
        2 => (index(), links_max()).prop_map(|(session, links_max)| Step::Flatten { session, links_max }),
        1 => index().prop_map(Step::Remount),
        1 => index().prop_map(Step::Forget),
    ]
}

/// Does it, where it can be done.
fn carry_out(root: &Path, op: &Op) -> io::Result<()> {
    let place = |path: &str| root.join(path);
    // Symlinks aren't followed, so that what is done is done where it seems to be.
    let is_file = |path: &str| place(path).symlink_metadata().is_ok_and(|meta| meta.is_file());
    let open = |path: &str| match is_file(path) {
        true => OpenOptions::new().read(true).write(true).open(place(path)),
        false => Err(io::ErrorKind::InvalidInput.into()),
    };
    match op {
        Op::Write { at, byte, length } => {
            if place(at).symlink_metadata().is_ok() && !is_file(at) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            fs::write(place(at), vec![*byte; *length])
        }
        Op::Overwrite { at, byte, offset } => open(at)?.write_all_at(&[*byte; 3], *offset as u64),
        Op::Append { at, byte } => {
            let file = open(at)?;
            file.write_all_at(&[*byte; 10], file.metadata()?.len())
        }
        Op::Map { at, byte, offset } => store_through_mapping(&open(at)?, *offset, *byte),
        Op::Truncate { at, length } => open(at)?.set_len(*length),
        Op::Hole { at, offset } => open(at)?.write_all_at(b"after a hole", *offset),
        Op::Rename { from, to } => fs::rename(place(from), place(to)),
        Op::Exchange { from, to } => Ok(renameat_with(CWD, place(from), CWD, place(to), RenameFlags::EXCHANGE)?),
        Op::Link { from, to } => fs::hard_link(place(from), place(to)),
        Op::Remove { at } => remove(&place(at)),
        Op::MakeDir { at } => fs::create_dir(place(at)),
        Op::Remake { at } => {
            fs::remove_dir_all(place(at))?;
            fs::create_dir(place(at))?;
            fs::write(place(at).join("a"), "anew")
        }
        Op::Symlink { at, to } => symlink(to, place(at)),
        Op::Mode { at, mode } => {
            if place(at).is_symlink() {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            fs::set_permissions(place(at), std::os::unix::fs::PermissionsExt::from_mode(*mode))
        }
        Op::Owner { at, id } => lchown(place(at), Some(*id), Some(id + 1)),
        Op::Times { at, seconds } => {
            let time = rustix::fs::Timespec { tv_sec: *seconds, tv_nsec: 987_654_321 };
            let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
            Ok(rustix::fs::utimensat(CWD, place(at), &times, rustix::fs::AtFlags::SYMLINK_NOFOLLOW)?)
        }
        Op::SetAttribute { at, name, length } => {
            Ok(rustix::fs::lsetxattr(place(at), *name, &vec![b'x'; *length], XattrFlags::empty())?)
        }
        Op::RemoveAttribute { at, name } => Ok(rustix::fs::lremovexattr(place(at), *name)?),
    }
}

fn remove(path: &Path) -> io::Result<()> {
    if path.symlink_metadata()?.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}

/// As a database does: no system call says that the file changes.
fn store_through_mapping(file: &File, offset: usize, byte: u8) -> io::Result<()> {
    let length = file.metadata()?.len() as usize;
    if offset >= length {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    let fd = std::os::fd::AsRawFd::as_raw_fd(file);
    // SAFETY: a new mapping of the whole file, which nothing else refers to, and a store within it.
    unsafe {
        let at = libc::mmap(std::ptr::null_mut(), length, protection, flags, fd, 0);
        assert_ne!(at, libc::MAP_FAILED);
        at.cast::<u8>().add(offset).write_volatile(byte);
        libc::munmap(at, length);
    }
    Ok(())
}

/// A session, the last layer that was made of its upper directory, and what its disk shows.
struct Live {
    session: Session,
    previous: Option<LayerId>,
    shown: Listing,
}

struct Snapshot {
    layers: Vec<LayerId>,
    shown: Listing,
}

struct Run {
    world: World,
    sessions: Vec<Live>,
    snapshots: Vec<Snapshot>,
    /// What each layer was when it was made.
    layers: HashMap<LayerId, Listing>,
}

/// So that a run can't go on without end.
const SESSIONS_MAX: usize = 4;

impl Run {
    fn new(template: &[Op], guest: &[Op]) -> Run {
        let world = World::new().expect("whoever calls this has made one already");
        for (ops, dir) in [(guest, &world.bottom[0]), (template, &world.bottom[1])] {
            ops.iter().for_each(|op| drop(carry_out(dir, op)));
        }
        let mut run = Run { world, sessions: Vec::new(), snapshots: Vec::new(), layers: HashMap::new() };
        run.open(&[]);
        run
    }

    fn open(&mut self, layers: &[LayerId]) {
        let session = self.world.session(layers);
        let shown = listing(&session.at);
        self.sessions.push(Live { session, previous: None, shown });
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Work(session, ops) => {
                let live = session.get_mut(&mut self.sessions);
                ops.iter().for_each(|op| drop(carry_out(&live.session.at, op)));
                live.shown = listing(&live.session.at);
            }
            Step::Snapshot { session, passes, is_calm, after, links_max } => {
                let number = session.index(self.sessions.len());
                self.snapshot(number, passes, *is_calm, after, *links_max);
            }
            Step::Fork(snapshot) if !self.snapshots.is_empty() && self.sessions.len() < SESSIONS_MAX => {
                let number = snapshot.index(self.snapshots.len());
                let layers = self.snapshots[number].layers.clone();
                self.open(&layers);
                let fork = self.sessions.last().unwrap();
                assert_same(&fork.shown, &self.snapshots[number].shown, "a fork");
            }
            Step::Rollback(session, snapshot) if !self.snapshots.is_empty() => {
                let (live, to) = (session.get_mut(&mut self.sessions), snapshot.get(&self.snapshots));
                live.session.unmount();
                fs::remove_dir_all(live.session.disk.upper()).unwrap();
                live.session.disk.create().unwrap();
                self.world.store.dress_root(to.layers[0], &live.session.disk.upper()).unwrap();
                (live.session.layers, live.previous) = (to.layers.clone(), None);
                live.session.mount(&self.world);
                live.shown = listing(&live.session.at);
                assert_same(&live.shown, &to.shown, "a session that was rolled back");
            }
            Step::Flatten { session, links_max } => self.flatten(session.index(self.sessions.len()), *links_max),
            Step::Remount(session) => {
                let live = session.get(&self.sessions);
                live.session.unmount();
                live.session.mount(&self.world);
            }
            Step::Forget(snapshot) if !self.snapshots.is_empty() => {
                self.snapshots.swap_remove(snapshot.index(self.snapshots.len()));
                self.collect();
            }
            Step::Fork(_) | Step::Rollback(..) | Step::Forget(_) => {}
        }
        for live in &self.sessions {
            assert_same(&listing(&live.session.at), &live.shown, "a session sees nothing of what others do");
        }
    }

    fn snapshot(&mut self, number: usize, passes: &[Vec<Op>], is_calm: bool, after: &[Op], links_max: u64) {
        let live = &mut self.sessions[number];
        let at = live.session.at.clone();
        let begun = Capture::begin(&self.world.store, LayerId::new(), &live.session.disk.upper(), live.previous);
        let mut capture = begun.unwrap().with_bounds(SETTLE, links_max);
        if is_calm {
            std::thread::sleep(SETTLE + Duration::from_millis(1));
        }
        for ops in passes {
            capture.precopy().unwrap();
            ops.iter().for_each(|op| drop(carry_out(&at, op)));
        }
        capture.freeze().unwrap();
        let shown = listing(&at);
        after.iter().for_each(|op| drop(carry_out(&at, op)));
        let layer = finish(capture);
        live.shown = listing(&at);
        live.previous = Some(layer.id);
        let (layers, upper) = (live.session.above(&layer), live.session.disk.upper());
        self.check(&layer, &upper);
        assert_same(&self.world.seen(&layers), &shown, "a new snapshot");
        self.snapshots.push(Snapshot { layers, shown });
    }

    /// What a session goes on above becomes one layer.
    fn flatten(&mut self, number: usize, links_max: u64) {
        let live = &mut self.sessions[number];
        if live.session.layers.is_empty() {
            return;
        }
        let flat = flatten_within(&self.world.store, &live.session.layers, LayerId::new(), links_max).unwrap();
        live.session.unmount();
        live.session.layers = vec![flat.id];
        live.session.mount(&self.world);
        self.layers.insert(flat.id, raw(&self.world.tree(&flat)));
        self.collect();
    }

    /// Removes the layers that nobody needs.
    fn collect(&mut self) {
        let sessions = self.sessions.iter().flat_map(|live| &live.session.layers);
        let needed: Vec<LayerId> = self.snapshots.iter().flat_map(|s| &s.layers).chain(sessions).copied().collect();
        for id in self.world.store.list().unwrap().into_iter().filter(|id| !needed.contains(id)) {
            self.world.store.remove(id).unwrap();
            self.layers.remove(&id);
        }
    }

    /// A layer has no file of the disk that it was made of, and it is what its descriptor says.
    fn check(&mut self, layer: &Layer, upper: &Path) {
        let tree = self.world.tree(layer);
        let inodes = |root: &Path| {
            let all = walkdir::WalkDir::new(root).into_iter().map(|e| e.unwrap().metadata().unwrap());
            all.filter(|meta| !meta.is_dir()).map(|meta| meta.ino()).collect::<std::collections::HashSet<_>>()
        };
        assert!(inodes(&tree).is_disjoint(&inodes(upper)), "layer and disk share a file");
        assert_eq!(layer.descriptor.entries, walkdir::WalkDir::new(&tree).min_depth(1).into_iter().count() as u64);
        assert_eq!(self.world.store.read(layer.id).unwrap(), *layer);
        self.layers.insert(layer.id, raw(&tree));
    }

    /// Whatever has happened since: a snapshot shows what it showed, and no byte of a layer has changed.
    fn end(self) {
        for snapshot in &self.snapshots {
            assert_same(&self.world.seen(&snapshot.layers), &snapshot.shown, "an old snapshot");
        }
        let mut found = self.world.store.list().unwrap();
        found.retain(|id| !self.layers.contains_key(id));
        assert!(found.is_empty(), "{found:?}");
        for (id, before) in &self.layers {
            assert_same(&raw(&self.world.store.path(*id)), before, "a layer");
        }
        self.sessions.into_iter().for_each(|live| live.session.end());
    }
}

#[test]
fn random_disks_are_what_their_full_copies_are() {
    if World::new().is_none() {
        return;
    }
    let asked = std::env::var("DORMOUSE_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed: u64 = asked.unwrap_or_else(|| LayerId::new().0.as_u128() as u64);
    println!("DORMOUSE_SEED={seed}");
    let cases = if is_long() { 500 } else { 25 };
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 200, ..Config::default() };
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let strategy = (ops(30), ops(10), prop::collection::vec(step(), 1..14));
    let result = runner.run(&strategy, |(template, guest, steps)| {
        let mut run = Run::new(&template, &guest);
        steps.iter().for_each(|step| run.step(step));
        run.end();
        Ok::<_, TestCaseError>(())
    });
    match result {
        Ok(()) => {}
        Err(TestError::Fail(why, (template, guest, steps))) => {
            panic!("{why}\ntemplate: {template:?}\nguest: {guest:?}\nsteps: {steps:#?}")
        }
        Err(other) => panic!("{other}"),
    }
}
