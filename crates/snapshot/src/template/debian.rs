//! The built-in template `debian`: a small bookworm with the tools that an agent reaches for first.

use super::{
    TemplateError, TemplateKind, common, io_error,
    store::{Built, summarized},
};
use crate::fsutil;
use std::{
    collections::VecDeque,
    fs,
    io::{self, BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
};

/// A file of apt's sources and whether it is written in the deb822 style.
type AptFile = (String, bool);

const SUITE: &str = "bookworm";
const DEFAULT_MIRROR: &str = "http://deb.debian.org/debian";
const DEFAULT_SECURITY: &str = "http://deb.debian.org/debian-security";
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

const PACKAGES: &[&str] = &[
    "bash",
    "build-essential",
    "ca-certificates",
    "coreutils",
    "curl",
    "git",
    "hostname",
    "less",
    "openssh-client",
    "procps",
    "python3",
    "python3-pip",
    "python3-venv",
    "vim-tiny",
];

/// Documentation stays out, also of packages installed later inside; licences stay.
const DPKG_OPTIONS: &[&str] = &[
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-include=/usr/share/locale/locale.alias",
];

/// Directories whose content belongs to the machine or the moment of the build.
const LEFT_EMPTY: &[&str] =
    &["dev", "proc", "sys", "run", "tmp", "var/tmp", "var/cache/apt", "var/cache/debconf", "var/lib/apt/lists", "var/log"];
/// Files of the same kind.
const LEFT_OUT: &[&str] = &["etc/resolv.conf", "etc/.pwd.lock", "var/lib/dbus/machine-id", "var/cache/ldconfig/aux-cache"];

pub(super) fn build(root: &Path, progress: &mut dyn FnMut(&str)) -> Result<Built, TemplateError> {
    let sources = sources(&apt_files()?);
    progress(&format!("making the template 'debian' from {}", sources[0]));
    fs::remove_dir(root).map_err(io_error("prepare", root))?;
    run_mmdebstrap(root, &sources, progress)?;
    progress("tidying the tree");
    tidy(root)?;
    if sources.iter().any(|source| has_credentials(source)) {
        common::write(root, "etc/apt/sources.list", &(default_sources().join("\n") + "\n"))?;
    }
    progress("computing its content address");
    summarized(TemplateKind::Debian, root)
}

fn run_mmdebstrap(root: &Path, sources: &[String], progress: &mut dyn FnMut(&str)) -> Result<(), TemplateError> {
    let mut command = Command::new("mmdebstrap");
    command
        .args(["--mode=root", "--variant=minbase", "--format=directory"])
        .arg(format!("--include={}", PACKAGES.join(",")))
        .args(DPKG_OPTIONS.iter().map(|option| format!("--dpkgopt={option}")))
        .args([SUITE.as_ref(), root.as_os_str()])
        .args(sources)
        .env("LC_ALL", "C.UTF-8")
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => TemplateError::Missing { program: "mmdebstrap", package: "mmdebstrap" },
        _ => io_error("start", Path::new("mmdebstrap"))(e),
    })?;
    let mut last = VecDeque::new();
    if let Some(stderr) = child.stderr.take() {
        for line in BufReader::new(stderr).split(b'\n') {
            let line = line.map_err(io_error("read from", Path::new("mmdebstrap")))?;
            let line = String::from_utf8_lossy(&line).into_owned();
            if let Some(step) = line.strip_prefix("I: ") {
                progress(step);
            }
            if last.len() == 20 {
                last.pop_front();
            }
            last.push_back(line);
        }
    }
    let status = child.wait().map_err(io_error("wait for", Path::new("mmdebstrap")))?;
    if status.success() {
        return Ok(());
    }
    let reason = format!("mmdebstrap ended with {status}");
    Err(TemplateError::Build { reason, output: Vec::from(last).join("\n") })
}

/// Takes away what belongs to one machine or one moment.
fn tidy(root: &Path) -> Result<(), TemplateError> {
    for name in LEFT_EMPTY {
        let path = root.join(name);
        clear(&path).map_err(io_error("empty", &path))?;
    }
    for name in LEFT_OUT {
        let path = root.join(name);
        fsutil::remove_if_there(&path).map_err(io_error("remove", &path))?;
    }
    for entry in fs::read_dir(root.join("etc/ssh")).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with("ssh_host_") {
            fsutil::remove_if_there(&entry.path()).map_err(io_error("remove", &entry.path()))?;
        }
    }
    common::write_common(root)
}

/// Empties a directory; fine if it is missing.
fn clear(dir: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() { fs::remove_dir_all(entry.path())? } else { fs::remove_file(entry.path())? }
    }
    Ok(())
}

fn apt_files() -> Result<Vec<AptFile>, TemplateError> {
    let mut paths = vec![Path::new("/etc/apt/sources.list").to_owned()];
    let mut parts: Vec<_> = fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten().map(|e| e.path()).collect();
    parts.sort();
    paths.append(&mut parts);
    let mut files = Vec::new();
    for path in paths {
        let deb822 = path.extension().is_some_and(|e| e == "sources");
        match fs::read_to_string(&path) {
            Ok(text) => files.push((text, deb822)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(io_error("read", &path)(e)),
        }
    }
    Ok(files)
}

/// The source lines to build from: this machine's own mirror where it has one for bookworm, since that is the one it
/// can reach.
fn sources(files: &[AptFile]) -> Vec<String> {
    let entries: Vec<(String, String)> =
        files.iter().flat_map(|(text, deb822)| if *deb822 { read_deb822(text) } else { read_one_line(text) }).collect();
    let find = |suite: &str| entries.iter().find(|(_, s)| s == suite).map(|(uri, _)| uri.as_str());
    let Some(main) = find(SUITE) else { return default_sources() };
    let mut lines = vec![line(main, SUITE)];
    for suite in [format!("{SUITE}-updates"), format!("{SUITE}-security")] {
        lines.extend(find(&suite).map(|uri| line(uri, &suite)));
    }
    lines
}

fn default_sources() -> Vec<String> {
    vec![
        line(DEFAULT_MIRROR, SUITE),
        line(DEFAULT_MIRROR, &format!("{SUITE}-updates")),
        line(DEFAULT_SECURITY, &format!("{SUITE}-security")),
    ]
}

fn line(uri: &str, suite: &str) -> String {
    // Named, so that the build works on a machine whose own keys lie elsewhere.
    let signed = if Path::new(KEYRING).exists() { format!("[signed-by={KEYRING}] ") } else { String::new() };
    format!("deb {signed}{uri} {suite} main")
}

/// True where a source's address carries a user's name or password: that must not get into a template.
fn has_credentials(source: &str) -> bool {
    source.split_whitespace().any(|word| word.contains("://") && word.contains('@'))
}

/// (URI, suite) of each usable entry of a one-line-style file (sources.list(5)).
fn read_one_line(text: &str) -> Vec<(String, String)> {
    let one = |line: &str| {
        let rest = line.trim().strip_prefix("deb ")?.trim_start();
        let rest = if rest.starts_with('[') { rest.split_once(']')?.1 } else { rest };
        let mut words = rest.split_whitespace();
        let (uri, suite) = (words.next()?, words.next()?);
        (words.any(|c| c == "main") && usable(uri)).then(|| (uri.to_owned(), suite.to_owned()))
    };
    text.lines().filter_map(one).collect()
}

/// The same of a deb822-style file.
fn read_deb822(text: &str) -> Vec<(String, String)> {
    let text: String = text.lines().filter(|l| !l.starts_with('#')).flat_map(|l| [l.trim_end(), "\n"]).collect();
    let mut entries = Vec::new();
    for stanza in text.split("\n\n") {
        let field = |name: &str| {
            let of = |line: &str| line.split_once(':').filter(|(k, _)| k.eq_ignore_ascii_case(name)).map(|(_, v)| v.to_owned());
            stanza.lines().find_map(of).unwrap_or_default()
        };
        let has = |name: &str, word: &str| field(name).split_whitespace().any(|w| w == word);
        if !has("Types", "deb") || !has("Components", "main") || has("Enabled", "no") {
            continue;
        }
        for uri in field("URIs").split_whitespace().filter(|uri| usable(uri)) {
            entries.extend(field("Suites").split_whitespace().map(|suite| (uri.to_owned(), suite.to_owned())));
        }
    }
    entries
}

fn usable(uri: &str) -> bool {
    ["http://", "https://", "file:/"].iter().any(|scheme| uri.starts_with(scheme))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machines_own_mirror_is_used() {
        let deb822 = "# c\nTypes: deb\n# snapshot\nURIs: http://m.example/debian\nSuites: bookworm bookworm-updates\nComponents: main\n\n\
                      Types: deb\nURIs: http://m.example/sec\nSuites: bookworm-security\nComponents: main contrib\n";
        let one_line = "deb [arch=amd64 signed-by=/k.gpg] https://o.example/debian bookworm main\n# deb http://x bookworm main\n\
                        deb-src http://y bookworm main\n";
        let uris = |files: &[AptFile]| -> Vec<String> {
            let word = |l: &String| l.split_whitespace().find(|w| w.contains("://")).unwrap().to_owned();
            sources(files).iter().map(word).collect()
        };
        type Case<'a> = (&'a [AptFile], &'a [&'a str]);
        let cases: [Case; 4] = [
            (&[(deb822.into(), true)], &["http://m.example/debian", "http://m.example/debian", "http://m.example/sec"]),
            (&[(one_line.into(), false)], &["https://o.example/debian"]),
            (
                &[("Types: deb\nURIs: http://z\nSuites: trixie\nComponents: main\n".into(), true)],
                &[DEFAULT_MIRROR, DEFAULT_MIRROR, DEFAULT_SECURITY],
            ),
            (&[], &[DEFAULT_MIRROR, DEFAULT_MIRROR, DEFAULT_SECURITY]),
        ];
        for (files, expected) in cases {
            assert_eq!(uris(files), expected);
        }
    }

    #[test]
    fn a_password_in_a_mirrors_address_is_noticed() {
        assert!(has_credentials("deb https://me:secret@m.example/debian bookworm main"));
        assert!(!has_credentials("deb [signed-by=/a@b.gpg] https://m.example/debian bookworm main"));
    }
}
