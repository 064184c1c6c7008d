//! The conformance suite on a local folder.
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use blob::Location;

fn folder() -> (Location, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    (Location::Folder(dir.path().join("repository")), dir)
}

blob::conformance_tests!(folder);
