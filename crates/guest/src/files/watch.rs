//! Telling changes of files as they happen; inotify(7).

use super::absolute;
use crate::{
    guest::{Guest, path_error},
    ready::{For, Watched},
};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use std::{
    collections::HashMap,
    fs,
    mem::MaybeUninit,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    rc::Rc,
};
use wire::{StreamId, WireError, files::WatchEvent};

/// Most directories watched by one request; more would make a careless `/` expensive.
const MOST: usize = 8192;

/// A watch on a file, a directory, or a whole tree.
pub struct Watch {
    fd: Watched,
    paths: HashMap<i32, PathBuf>,
    recursive: bool,
}

impl Watch {
    /// # Errors
    /// What the kernel says about the path.
    pub fn start(path: &str, recursive: bool) -> Result<Self, WireError> {
        let path = absolute(path)?;
        let fd = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC);
        let fd = fd.map_err(std::io::Error::from).and_then(Watched::new).map_err(|e| path_error(&path, &e))?;
        let mut watch = Self { fd, paths: HashMap::new(), recursive };
        let top = PathBuf::from(&path);
        watch.add(&top).map_err(|e| path_error(&path, &e))?;
        if recursive {
            watch.add_below(top);
        }
        Ok(watch)
    }

    fn add(&mut self, path: &Path) -> std::io::Result<()> {
        use WatchFlags as W;
        let flags = W::CREATE | W::MODIFY | W::ATTRIB | W::DELETE | W::DELETE_SELF | W::MOVED_FROM | W::MOVED_TO;
        let id = inotify::add_watch(self.fd.get_ref(), path, flags)?;
        self.paths.insert(id, path.to_owned());
        Ok(())
    }

    fn add_below(&mut self, top: PathBuf) {
        let mut queue = vec![top];
        while let Some(dir) = queue.pop() {
            let Ok(entries) = fs::read_dir(&dir) else { continue };
            for entry in entries.flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir())) {
                if self.paths.len() >= MOST {
                    return;
                }
                if self.add(&entry.path()).is_ok() {
                    queue.push(entry.path());
                }
            }
        }
    }

    /// Sends events until the stream is gone.
    pub async fn run(mut self, guest: &Rc<Guest>, stream: StreamId) {
        let mut lost = false;
        loop {
            let Some((room, bell)) = guest.hub.borrow().room(stream) else { return };
            let mut lines = Vec::new();
            for event in self.read() {
                let mut line = serde_json::to_vec(&event).unwrap_or_default();
                line.push(b'\n');
                lines.extend(line);
            }
            if lost || lines.len() > room {
                // Watchers that don't read are told that they missed something.
                lines = br#"{"kind":"overflow","path":"","is_dir":false}"#.to_vec();
                lines.push(b'\n');
                lost = lines.len() > room;
            }
            if !lost && !lines.is_empty() {
                guest.hub.borrow_mut().take_in(stream, &lines);
                continue;
            }
            tokio::select! {
                () = bell.notified() => {}
                () = self.fd.ready(For::Reading) => {}
            }
        }
    }

    fn read(&mut self) -> Vec<WatchEvent> {
        let mut events = Vec::new();
        let mut new_dirs = Vec::new();
        let mut gone = Vec::new();
        let result = self.fd.try_io(For::Reading, |fd| {
            let mut space = [MaybeUninit::<u8>::uninit(); 16 * 1024];
            let mut reader = Reader::new(fd, &mut space);
            loop {
                let event = reader.next()?;
                let flags = event.events();
                if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
                    events.push(WatchEvent { kind: "overflow".into(), path: String::new(), is_dir: false });
                    continue;
                }
                let Some(dir) = self.paths.get(&event.wd()) else { continue };
                if flags.contains(ReadFlags::IGNORED) {
                    gone.push(event.wd());
                    continue;
                }
                let path = match event.file_name() {
                    Some(name) => dir.join(std::ffi::OsStr::from_bytes(name.to_bytes())),
                    None => dir.clone(),
                };
                let is_dir = flags.contains(ReadFlags::ISDIR);
                let Some(kind) = kind_of(flags) else { continue };
                if is_dir && self.recursive && (kind == "created" || kind == "moved_to") {
                    new_dirs.push(path.clone());
                }
                events.push(WatchEvent { kind: kind.into(), path: path.to_string_lossy().into_owned(), is_dir });
            }
            #[allow(unreachable_code, reason = "the loop ends by an error, which gives the closure its type")]
            Ok::<(), std::io::Error>(())
        });
        if let Err(error) = result
            && error.kind() != std::io::ErrorKind::WouldBlock
        {
            log!("watching files: {error}");
        }
        for wd in gone {
            self.paths.remove(&wd);
        }
        for dir in new_dirs {
            if self.paths.len() < MOST && self.add(&dir).is_ok() {
                // What was made in it before the watch was there.
                for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
                    let is_dir = entry.file_type().is_ok_and(|t| t.is_dir());
                    let path = entry.path().to_string_lossy().into_owned();
                    events.push(WatchEvent { kind: "created".into(), path, is_dir });
                }
                self.add_below(dir);
            }
        }
        events
    }
}

fn kind_of(flags: ReadFlags) -> Option<&'static str> {
    let table = [
        (ReadFlags::CREATE, "created"),
        (ReadFlags::MODIFY, "modified"),
        (ReadFlags::ATTRIB, "modified"),
        (ReadFlags::DELETE, "removed"),
        (ReadFlags::DELETE_SELF, "removed"),
        (ReadFlags::MOVED_FROM, "moved_from"),
        (ReadFlags::MOVED_TO, "moved_to"),
    ];
    table.iter().find(|(flag, _)| flags.contains(*flag)).map(|(_, kind)| *kind)
}
