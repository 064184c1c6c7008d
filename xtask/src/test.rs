//! `cargo xtask test` and `cargo xtask bench`: everything they need, then everything they run.

use crate::{build, cargo, check, run, setup};
use anyhow::{Result, bail};

/// Runs all tests. `--long` adds the long forms.
pub fn test(args: &[&str]) -> Result<()> {
    let long = match args {
        [] => false,
        ["--long"] => true,
        other => bail!("unknown arguments: {}; only --long is known", other.join(" ")),
    };
    check::quick()?;
    setup::for_tests()?;
    let binary = build::build(build::Scope::Everything)?;
    let mut tests = cargo();
    tests.args(["test", "--release", "--workspace", "--no-fail-fast"]);
    tests.env("DORMOUSE_BIN", &binary).env("DORMOUSE_TEMPLATES", build::templates_dir());
    tests.env("DORMOUSE_TEST_TREE", build::template_tree("debian")?);
    tests.env("DORMOUSE_WEED", setup::weed()?);
    if long {
        tests.env("DORMOUSE_LONG", "1");
    }
    run(&mut tests)
}

/// Runs the benchmarks and prints their table.
pub fn bench(args: &[&str]) -> Result<()> {
    setup::for_bench()?;
    let binary = build::build(build::Scope::Everything)?;
    let mut bench = cargo();
    bench.args(["run", "--release", "--package", "dormouse-bench", "--"]).args(args);
    bench.env("DORMOUSE_BIN", &binary).env("DORMOUSE_TEMPLATES", build::templates_dir());
    run(&mut bench)
}
