//! Benchmarks of the real `dormouse`, each beside the raw tool in the same run, as one table.
//!
//! ```text
//! dormouse-bench [--check] [ROW…]
//! ```
//! Ours and the raw tool's are measured in turn, so that a busy moment of the machine hits both. `DORMOUSE_BIN` names the
//! binary, `DORMOUSE_TEMPLATES` the template folder. With `--check` it fails where a figure is over twice its target.

mod measure;
mod raw;
mod report;
mod rows;

use report::Row;
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    process::ExitCode,
};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let check = args.iter().any(|arg| arg == "--check");
    let wanted: Vec<&str> = args.iter().map(String::as_str).filter(|arg| *arg != "--check").collect();
    let known: Vec<&str> = rows::GROUPS.iter().flat_map(|group| group.ids).copied().collect();
    if let Some(unknown) = wanted.iter().find(|id| !known.contains(id)) {
        eprintln!("unknown row '{unknown}'; there are: {}", known.join(", "));
        return ExitCode::from(2);
    }
    let is_wanted = |id: &str| wanted.is_empty() || wanted.contains(&id);

    let start = report::Machine::now();
    let mut table: Vec<Row> = Vec::new();
    for group in rows::GROUPS.iter().filter(|group| group.ids.iter().any(|id| is_wanted(id))) {
        eprintln!("measuring {}", group.ids.join(", "));
        // The harness panics where something doesn't work at all; the other rows are measured all the same.
        match catch_unwind(AssertUnwindSafe(group.run)) {
            Ok(Ok(measured)) => table.extend(measured),
            Ok(Err(error)) => table.extend(group.ids.iter().map(|id| Row::broken(id, &format!("{error:#}")))),
            Err(_) => table.extend(group.ids.iter().map(|id| Row::broken(id, "it panicked; see above"))),
        }
    }
    table.retain(|row| is_wanted(row.id));
    report::print(&start, &table);

    let bad: Vec<&str> = table.iter().filter(|row| row.is_over_twice()).map(|row| row.id).collect();
    if check && !bad.is_empty() {
        eprintln!("over twice the target: {}", bad.join(", "));
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
