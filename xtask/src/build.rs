//! `cargo xtask build`: the binary with all it carries, and the first template.

use crate::{cargo, run, setup, target_dir};
use anyhow::Result;
use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

/// Builds `release/dormouse` and makes the `debian` template where it isn't made yet. Returns the
/// binary's path.
pub fn build() -> Result<PathBuf> {
    setup::for_running()?;
    let binary = binary()?;
    // Says itself what it does, and does nothing where the template is there.
    run(Command::new(&binary).args(["template", "make", "debian", "--templates"]).arg(templates_dir()))?;
    Ok(binary)
}

/// Builds only the binary.
pub fn binary() -> Result<PathBuf> {
    run(cargo().args(["build", "--release", "--package", "dormouse"]))?;
    Ok(target_dir().join("release/dormouse"))
}

/// The template folder that servers on this machine share.
pub fn templates_dir() -> PathBuf {
    if let Some(dir) = env::var_os("DORMOUSE_TEMPLATES") {
        return dir.into();
    }
    if let Some(data) = env::var_os("DORMOUSE_DATA") {
        return Path::new(&data).join("templates");
    }
    match env::var_os("HOME") {
        Some(home) if !is_root() => Path::new(&home).join(".local/share/dormouse/templates"),
        _ => "/var/lib/dormouse/templates".into(),
    }
}

fn is_root() -> bool {
    Path::new("/proc/self").metadata().is_ok_and(|meta| std::os::unix::fs::MetadataExt::uid(&meta) == 0)
}
