//! Builds the static guest that the program carries, and leaves it in `OUT_DIR` for `include_bytes!`.
//!
//! It is a cargo of its own, in a target directory of its own: the outer one holds the lock of the first. The guest has
//! other flags than the program (no shared libraries: it runs in a sandbox of any template).

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

/// A guest that was built elsewhere, to be taken as it is.
const GIVEN: &str = "DORMOUSE_GUEST_BIN";
const FLAGS: &str = "-C target-feature=+crt-static -C strip=symbols";
/// Variables of the outer build that would make the inner one differ or wait for it.
const OUTER: [&str; 17] = [
    "RUSTFLAGS",
    "RUSTDOCFLAGS",
    "RUSTC",
    "RUSTDOC",
    "RUSTC_WRAPPER",
    "RUSTC_WORKSPACE_WRAPPER",
    "RUSTC_LINKER",
    "TARGET",
    "HOST",
    "PROFILE",
    "OUT_DIR",
    "OPT_LEVEL",
    "DEBUG",
    "NUM_JOBS",
    "MAKEFLAGS",
    "MFLAGS",
    "CLIPPY_ARGS",
];
/// Variables named `CARGO_…` that say where packages come from, and stay.
const KEPT: [&str; 4] = ["CARGO_HOME", "CARGO_NET_", "CARGO_HTTP_", "CARGO_REGISTR"];

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("dormouse-guest");
    println!("cargo::rerun-if-env-changed={GIVEN}");
    let guest = match env::var_os(GIVEN).filter(|path| !path.is_empty()) {
        Some(path) => {
            println!("cargo::rerun-if-changed={}", Path::new(&path).display());
            PathBuf::from(path)
        }
        None => build(),
    };
    if let Err(error) = fs::copy(&guest, &out) {
        panic!("the guest can't be copied from {}: {error}", guest.display());
    }
}

fn build() -> PathBuf {
    let crates = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("..");
    for name in ["guest", "wire", "model"] {
        for part in ["src", "Cargo.toml"] {
            println!("cargo::rerun-if-changed={}", crates.join(name).join(part).display());
        }
    }
    println!("cargo::rerun-if-changed={}", crates.join("../Cargo.lock").display());
    let target = env::var("TARGET").expect("cargo sets TARGET");
    let target_dir = target_dir().join("guest");
    let mut cargo = Command::new(env::var_os("CARGO").expect("cargo sets CARGO"));
    cargo.args(["build", "--release", "-p", "dormouse-guest", "--target", &target]).current_dir(crates.join(".."));
    if let Ok(jobs) = env::var("NUM_JOBS") {
        cargo.args(["--jobs", &jobs]);
    }
    for (name, _) in env::vars_os() {
        let Some(name) = name.to_str() else { continue };
        let of_cargo = name.starts_with("CARGO") && !KEPT.iter().any(|kept| name.starts_with(kept));
        if of_cargo || OUTER.contains(&name) {
            cargo.env_remove(name);
        }
    }
    cargo.env("CARGO_TARGET_DIR", &target_dir).env("RUSTFLAGS", FLAGS);
    match cargo.status() {
        Ok(status) if status.success() => target_dir.join(target).join("release/dormouse-guest"),
        Ok(status) => panic!("building the guest failed: {status}"),
        Err(error) => panic!("cargo can't be started to build the guest: {error}"),
    }
}

/// The directory above `PROFILE/build/PACKAGE/out`.
fn target_dir() -> PathBuf {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    out.ancestors().nth(4).unwrap_or(&out).to_owned()
}
