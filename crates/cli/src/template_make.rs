//! `dormouse template make`: a built-in template, made in the template folder itself. Needs no server, so that a build can
//! make the first one.

use crate::{args::BuiltIn, client::default_data_dir};
use anyhow::Context;
use serde_json::json;
use snapshot::template::TemplateStore;
use std::{io::Write, path::PathBuf, process::ExitCode};

/// Makes the template where it is missing; says how it goes on standard error and prints its hash.
///
/// # Errors
/// What it needs is missing, or the folder can't be written.
pub fn run(which: BuiltIn, dir: Option<PathBuf>, json: bool, quiet: bool) -> anyhow::Result<ExitCode> {
    let dir = dir.unwrap_or_else(|| default_data_dir().join("templates"));
    let store = TemplateStore::open(&dir).with_context(|| format!("can't open the template folder {}", dir.display()))?;
    let mut tell = |line: &str| {
        if !quiet {
            eprintln!("dormouse: {line}");
        }
    };
    let made = match which {
        BuiltIn::Debian => store.ensure_debian(&mut tell),
        BuiltIn::Host => store.ensure_host(&mut tell),
    }
    .with_context(|| format!("can't make the template '{which}'"))?;
    let line = if json { json!({ "name": made.name, "hash": made.hash.to_string() }).to_string() } else { made.hash.to_string() };
    // A reader that has gone wants no more of it.
    let _ = writeln!(std::io::stdout(), "{line}");
    Ok(ExitCode::SUCCESS)
}
