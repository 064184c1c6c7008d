//! `cargo xtask check`: what no compiler checks. Layers, the test index, formatting, lints.

use crate::{cargo, root, run};
use anyhow::{Context, Result, bail};
use std::{collections::HashMap, fs, path::Path};

/// The layers, lowest first, as DESIGN lists them: a crate uses only crates of lines above its own,
/// or of its own line where they stand before it.
const LAYERS: &[&[&str]] = &[
    &["faults"],
    &["model"],
    &["lifecycle"],
    &["journal"],
    &["screen"],
    &["wire"],
    &["dormouse-guest"],
    &["store", "store-sqlite"],
    &["blob"],
    &["snapshot"],
    &["runtime", "runtime-gvisor"],
    &["egress"],
    &["supervisor"],
    &["engine"],
    &["api-types", "api"],
    &["dormouse"],
];

/// Runs every check.
pub fn check() -> Result<()> {
    quick()?;
    run(cargo().args(["clippy", "--release", "--workspace", "--all-targets", "--quiet", "--", "--deny", "warnings"]))
}

/// The checks that compile nothing: the tests run them, too.
pub fn quick() -> Result<()> {
    layers()?;
    index()?;
    run(cargo().args(["fmt", "--all", "--check"])).context("run 'cargo fmt --all'")
}

fn layers() -> Result<()> {
    let output = cargo().args(["metadata", "--no-deps", "--format-version", "1"]).current_dir(root()).output()?;
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).context("read cargo metadata")?;
    let place: HashMap<&str, usize> =
        LAYERS.iter().flat_map(|line| line.iter()).enumerate().map(|(n, name)| (*name, n)).collect();
    let mut wrong = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let name = package["name"].as_str().unwrap_or_default();
        if matches!(name, "xtask" | "dormouse-tests" | "dormouse-bench") {
            continue;
        }
        let Some(own) = place.get(name) else {
            wrong.push(format!("crate '{name}' has no layer: add it to the list in xtask/src/check.rs"));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let used = dependency["name"].as_str().unwrap_or_default();
            // Tests may use their own crate with another feature.
            if used != name && place.get(used).is_some_and(|other| other >= own) {
                wrong.push(format!("crate '{name}' uses '{used}', which is not below it"));
            }
        }
    }
    report("layers", wrong)
}

/// Every row of tests/INDEX.md names tests and bench rows that exist.
fn index() -> Result<()> {
    let path = root().join("tests/INDEX.md");
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let bench = read_all(&root().join("bench/src"))?;
    let mut files: HashMap<String, Option<String>> = HashMap::new();
    let (mut wrong, mut rows) = (Vec::new(), 0);
    for (number, line) in text.lines().enumerate() {
        let cells: Vec<&str> = line.trim().trim_matches('|').split('|').map(str::trim).collect();
        if !line.starts_with('|') || cells.len() != 3 || cells[0].starts_with("--") || cells[0] == "item" {
            continue;
        }
        rows += 1;
        let names: Vec<&str> = cells[2].split('`').skip(1).step_by(2).collect();
        if names.is_empty() {
            wrong.push(format!("INDEX.md:{}: '{}' names no test", number + 1, cells[0]));
        }
        for name in names {
            let exists = if let Some(row) = name.strip_prefix("bench:") {
                bench.contains(&format!("\"{row}\""))
            } else if let Some((file, function)) = name.split_once("::") {
                let text = files.entry(file.to_owned()).or_insert_with(|| fs::read_to_string(root().join(file)).ok());
                text.as_ref().is_some_and(|text| text.contains(&format!("fn {function}(")))
            } else {
                false
            };
            if !exists {
                wrong.push(format!("INDEX.md:{}: there is no '{name}'", number + 1));
            }
        }
    }
    if rows == 0 {
        bail!("tests/INDEX.md has no rows");
    }
    report("test index", wrong)
}

fn read_all(dir: &Path) -> Result<String> {
    let mut all = String::new();
    for entry in fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            all.push_str(&read_all(&path)?);
        } else if path.extension().is_some_and(|e| e == "rs") {
            all.push_str(&fs::read_to_string(&path)?);
        }
    }
    Ok(all)
}

fn report(what: &str, wrong: Vec<String>) -> Result<()> {
    if wrong.is_empty() {
        println!("{what}: good");
        return Ok(());
    }
    bail!("{what}:\n  {}", wrong.join("\n  "))
}
