//! `cargo xtask build`: the binary with all it carries, and the first template.

use crate::{cargo, run, setup, target_dir};
use anyhow::{Context, Result};
use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

/// How much is compiled.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// The binary alone.
    Binary,
    /// Tests and benchmarks, too. In one go, because cargo compiles dependencies anew for each set of
    /// packages that asks for other features of them.
    Everything,
}

/// Builds `release/dormouse` and makes the `debian` template where it isn't made yet. Returns the
/// binary's path.
pub fn build(scope: Scope) -> Result<PathBuf> {
    setup::for_running()?;
    let what: &[&str] = match scope {
        Scope::Binary => &["--package", "dormouse"],
        Scope::Everything => &["--workspace", "--all-targets"],
    };
    run(cargo().args(["build", "--release"]).args(what))?;
    let binary = target_dir().join("release/dormouse");
    // Says itself what it does, and does nothing where the template is there.
    run(Command::new(&binary).args(["template", "make", "debian", "--templates"]).arg(templates_dir()))?;
    Ok(binary)
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

/// The root of a template's tree, for tests that start sandboxes by themselves.
pub fn template_tree(name: &str) -> Result<PathBuf> {
    let link = templates_dir().join("names").join(name);
    let hash = std::fs::read_to_string(&link).with_context(|| format!("read {}", link.display()))?;
    Ok(templates_dir().join("trees").join(hash.trim()))
}

fn is_root() -> bool {
    Path::new("/proc/self").metadata().is_ok_and(|meta| std::os::unix::fs::MetadataExt::uid(&meta) == 0)
}
