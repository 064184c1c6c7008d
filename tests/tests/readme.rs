//! The README's first session is true: its block runs word for word, as one script, on a fresh server.

use dormouse_tests::{Server, server::binary};
use std::process::{Command, Stdio};

/// The first `sh` block under a heading of the README.
fn block(heading: &str) -> String {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md")).expect("a README");
    let (_, section) = text.split_once(&format!("\n{heading}\n")).expect("the heading");
    let (_, block) = section.split_once("```sh\n").expect("a block");
    block.split_once("\n```").expect("its end").0.to_owned()
}

#[test]
fn the_first_session_in_the_readme_does_what_it_says() {
    let server = Server::start();
    let script = block("## A first session in ten lines");
    let commands = script.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#')).count();
    assert!(commands <= 10, "ten lines are promised, not {commands}");
    // Each command's output is told apart, and the first that fails ends the script.
    let marked: String = script.lines().map(|line| format!("{line}\necho '--- done'\n")).collect();
    let output = Command::new("bash")
        .args(["-c", &format!("set -e\n{marked}")])
        .env("DORMOUSE_URL", &server.client.base)
        .env("DORMOUSE_TOKEN", &server.client.token)
        .env("DORMOUSE_BIN", binary())
        .stdin(Stdio::null())
        .output()
        .expect("bash runs");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    let said = |command: &str| {
        let at =
            script.lines().position(|line| line.starts_with(command)).unwrap_or_else(|| panic!("no '{command}' in {script}"));
        out.split("--- done\n").nth(at).unwrap_or_default().trim().to_owned()
    };
    assert!(said("dormouse new demo").parse::<uuid::Uuid>().is_ok(), "it prints the id: {out}");
    assert_eq!(said("dormouse exec demo -- sh -c 'echo hello").lines().count(), 1, "its host name: {out}");
    assert!(said("dormouse ps demo").lines().any(|line| line.starts_with("exec") && line.contains("running")), "{out}");
    assert!(said("dormouse ls").lines().any(|line| line.contains("demo") && line.contains("hibernated")), "{out}");
    assert_eq!(said("dormouse exec demo -- cat"), "hello");
    // The counter's lines: every number once from 1. How many, the machine's speed decides.
    let numbers: Vec<u64> = said("dormouse logs demo").lines().filter_map(|line| line.rsplit(' ').next()?.parse().ok()).collect();
    assert!(!numbers.is_empty(), "{out}");
    assert_eq!(numbers, (1..=numbers.len() as u64).collect::<Vec<_>>(), "{out}");
    let left = server.client.get("/v1/sessions").expect(200).json();
    assert_eq!(left["items"].as_array().map(Vec::len), Some(0), "the script cleans up: {left}");
    server.delete_all_and_check();
}
