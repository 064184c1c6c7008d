//! Where a test's server packs: a folder, or a real S3 server.

use crate::{Options, Server, Session, eventually, s3::S3};
use serde_json::{Value, json};
use std::{fs, path::Path};

/// An object store.
pub struct Place {
    /// `None`: a folder of the data directory.
    pub s3: Option<S3>,
    /// More arguments of servers on it.
    pub args: Vec<String>,
}

impl Place {
    pub fn folder() -> Place {
        Place { s3: None, args: Vec::new() }
    }

    pub fn s3() -> Place {
        Place { s3: Some(S3::start()), args: Vec::new() }
    }

    /// A server that packs here; nothing that is packed stays unpacked beside the sessions, and nothing is packed before
    /// somebody asks for it.
    pub fn server(&self) -> Server {
        Server::with(self.options())
    }

    /// How such a server is started.
    pub fn options(&self) -> Options {
        let mut args: Vec<String> = ["--pack-after", "1h", "--cache-size", "0"].map(str::to_owned).to_vec();
        let mut env = Vec::new();
        if let Some(s3) = &self.s3 {
            args.extend(["--object-store".to_owned(), s3.url("objects")]);
            env.extend(s3.settings());
        }
        args.extend(self.args.iter().cloned());
        Options { args, env, ..Options::default() }
    }
}

/// Has a server pack what sleeps, at once.
#[track_caller]
pub fn pack(server: &Server) {
    server.client.post("/v1/storage/pack", &json!({})).expect(200);
}

/// Waits until the store alone has a session, and nothing of its disk and memory lies on the server any more.
#[track_caller]
pub fn put_away(server: &Server, session: &Session) {
    eventually("the session is packed and given up", || {
        // Not before the frozen original of a hibernate is gone.
        pack(server);
        let shown = session.show();
        (shown["packed"] == json!(true) && shown["local"] == json!(false)).then_some(())
    });
    let dir = server.data().join("sessions").join(&session.id);
    for gone in ["disk", "image"] {
        assert_eq!(bytes_below(&dir.join(gone)), 0, "nothing of the {gone} stays");
    }
}

/// The same of a snapshot.
#[track_caller]
pub fn put_snapshot_away(server: &Server, snapshot: &Value) {
    let id = snapshot["id"].as_str().expect("an id");
    eventually("the snapshot is packed and given up", || {
        pack(server);
        let shown = server.client.get(&format!("/v1/snapshots/{id}")).expect(200).json();
        (shown["packed"] == json!(true) && shown["local"] == json!(false)).then_some(())
    });
    assert_eq!(bytes_below(&server.data().join("snapshots").join(id)), 0);
}

/// Bytes of all files below a directory.
pub fn bytes_below(dir: &Path) -> u64 {
    files_below(dir).iter().filter_map(|path| fs::symlink_metadata(path).ok()).map(|meta| meta.len()).sum()
}

/// All files below a directory, links too.
pub fn files_below(dir: &Path) -> Vec<std::path::PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let below = entries.flatten().flat_map(|entry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => files_below(&entry.path()),
        _ => vec![entry.path()],
    });
    below.collect()
}
