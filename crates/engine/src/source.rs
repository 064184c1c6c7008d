//! A session's first files: fetched by the server, since there is no network inside yet, and put in through the guest.
//!
//! What is fetched was made by strangers. A repository is read by a library that takes no configuration but what stands
//! here, runs no hook and no filter; an archive is passed on as it is, to be unpacked inside.

use crate::{
    ByteStream, Caller, Error, Scope,
    launch::{ensure_private_dir, io_error},
    request::Source,
    session::Live,
    supervisor_client::CallError,
};
use flate2::read::MultiGzDecoder;
use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    num::NonZeroU32,
    path::Path,
    sync::atomic::AtomicBool,
    time::Duration,
};
use wire::{control::Request, files::FileRequest};

/// Longest address.
const MAX_URL: usize = 4096;
/// Most bytes of an archive, as it comes.
const MAX_ARCHIVE: u64 = 8 << 30;
/// How long an archive may take to come.
const FETCH_LIMIT: Duration = Duration::from_secs(30 * 60);

fn url_of(source: &Source) -> &str {
    match source {
        Source::Git { url, .. } | Source::Tar { url } => url,
    }
}

/// Whether the caller may have the server fetch this.
pub(crate) fn check(source: &Source, caller: &Caller) -> Result<(), Error> {
    let url = url_of(source);
    let field = match source {
        Source::Git { .. } => "source.git",
        Source::Tar { .. } => "source.tar",
    };
    if url.len() > MAX_URL || url.contains(|c: char| c.is_control() || c == ' ') {
        return Err(Error::invalid(field, "it isn't an address"));
    }
    if let Source::Git { depth: Some(0), .. } = source {
        return Err(Error::invalid("source.depth", "it must be at least 1"));
    }
    match url.split_once("://").map(|(scheme, _)| scheme) {
        Some("http" | "https") => Ok(()),
        // A file of the server's machine.
        Some("file") if caller.local && caller.has(Scope::Admin) => Ok(()),
        Some("file") => Err(Error::Forbidden { detail: "file:// is for administrators on the server's Unix socket".to_owned() }),
        _ => Err(Error::invalid(field, "it must begin with https:// or http://")),
    }
}

/// Where the files go in a session that names no workdir: a folder in root's home, called like what is fetched.
pub(crate) fn default_workdir(source: &Source) -> String {
    let url = url_of(source).split(['?', '#']).next().unwrap_or_default().trim_end_matches('/');
    let last = url.rsplit('/').next().unwrap_or_default();
    let name = [".git", ".tar.gz", ".tgz", ".tar"].iter().find_map(|end| last.strip_suffix(end)).unwrap_or(last);
    let fine = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let name: String = name.chars().filter(|c| fine(*c)).take(100).collect();
    if name.trim_start_matches('.').is_empty() { "/root/source".to_owned() } else { format!("/root/{name}") }
}

/// Fetches into a tar archive that has no name any more. Blocks.
pub(crate) fn fetch(source: &Source, scratch: &Path) -> Result<File, Error> {
    ensure_private_dir(scratch).map_err(|e| io_error(&e, "make a place for the source"))?;
    match source {
        Source::Git { url, reference, depth } => {
            let dir = tempfile::tempdir_in(scratch).map_err(|e| io_error(&e, "make a place for the source"))?;
            clone(url, reference.as_deref(), *depth, dir.path())?;
            pack(dir.path(), scratch).map_err(|e| io_error(&e, "pack the source"))
        }
        Source::Tar { url } => download(url, scratch),
    }
}

fn failed(url: &str, error: impl std::fmt::Display) -> Error {
    Error::Conflict { detail: format!("the source {url} can't be fetched: {error}") }
}

fn clone(url: &str, reference: Option<&str>, depth: Option<u32>, into: &Path) -> Result<(), Error> {
    let fail = |error: &dyn std::fmt::Display| failed(url, error);
    let parsed = gix::url::parse(gix::bstr::BStr::new(url)).map_err(|e| fail(&e))?;
    // Isolated: no configuration of the server's user or machine, none of its environment.
    let options = gix::open::Options::isolated();
    let kind = gix::create::Kind::WithWorktree;
    let mut prepared =
        gix::clone::PrepareFetch::new(parsed, into, kind, gix::create::Options::default(), options).map_err(|e| fail(&e))?;
    if let Some(depth) = depth.and_then(NonZeroU32::new) {
        prepared = prepared.with_shallow(gix::remote::fetch::Shallow::DepthAtRemote(depth));
    }
    if let Some(reference) = reference {
        prepared = if gix::ObjectId::from_hex(reference.as_bytes()).is_ok() {
            prepared.with_revision(Some(reference)).map_err(|e| fail(&e))?
        } else {
            prepared.with_ref_name(Some(reference)).map_err(|e| fail(&e))?
        };
    }
    let stop = AtomicBool::new(false);
    let (mut checkout, _) = prepared.fetch_then_checkout(gix::progress::Discard, &stop).map_err(|e| fail(&e))?;
    checkout.main_worktree(gix::progress::Discard, &stop).map_err(|e| fail(&e))?;
    Ok(())
}

/// A directory as a tar archive; links stay links.
fn pack(dir: &Path, scratch: &Path) -> io::Result<File> {
    let mut archive = tar::Builder::new(io::BufWriter::new(tempfile::tempfile_in(scratch)?));
    archive.follow_symlinks(false);
    archive.append_dir_all(".", dir)?;
    let mut file = archive.into_inner()?.into_inner().map_err(|e| e.into_error())?;
    file.seek(SeekFrom::Start(0))?;
    Ok(file)
}

fn download(url: &str, scratch: &Path) -> Result<File, Error> {
    let io = |e: io::Error| io_error(&e, "keep the source");
    let body: Box<dyn Read> = match url.strip_prefix("file://") {
        Some(path) => Box::new(File::open(path).map_err(|e| failed(url, e))?),
        None => {
            let client = reqwest::blocking::Client::builder().timeout(FETCH_LIMIT).build().map_err(|e| failed(url, e))?;
            let answer = client.get(url).send().and_then(|answer| answer.error_for_status());
            Box::new(answer.map_err(|e| failed(url, e))?)
        }
    };
    let mut raw = tempfile::tempfile_in(scratch).map_err(io)?;
    let copied = io::copy(&mut body.take(MAX_ARCHIVE + 1), &mut raw).map_err(io)?;
    if copied > MAX_ARCHIVE {
        return Err(failed(url, "it has more than 8 GiB"));
    }
    raw.seek(SeekFrom::Start(0)).map_err(io)?;
    let mut magic = [0u8; 2];
    let gzipped = raw.read_exact(&mut magic).is_ok() && magic == [0x1f, 0x8b];
    raw.seek(SeekFrom::Start(0)).map_err(io)?;
    if !gzipped {
        return Ok(raw);
    }
    let mut plain = tempfile::tempfile_in(scratch).map_err(io)?;
    let unpacked = io::copy(&mut MultiGzDecoder::new(raw).take(4 * MAX_ARCHIVE + 1), &mut plain).map_err(|e| failed(url, e))?;
    if unpacked > 4 * MAX_ARCHIVE {
        return Err(failed(url, "unpacked it has more than 32 GiB"));
    }
    plain.seek(SeekFrom::Start(0)).map_err(io)?;
    Ok(plain)
}

/// Unpacks the archive inside, into `workdir`.
pub(crate) async fn put_in(live: &Live, archive: File, workdir: String) -> Result<(), CallError> {
    let archive = tokio_util::io::ReaderStream::with_capacity(tokio::fs::File::from_std(archive), 256 * 1024);
    let mut bytes: ByteStream = Box::pin(archive);
    let request = Request::File { request: FileRequest::Unpack { path: workdir }, actor: Some("system".to_owned()) };
    let mut conn = live.supervisor.connect().await?;
    conn.ask_with_bytes(&request, &mut bytes, true).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn git(url: &str) -> Source {
        Source::Git { url: url.to_owned(), reference: None, depth: None }
    }

    #[test]
    fn the_folder_is_called_like_the_source() {
        let cases = [
            (git("https://example.com/a/project.git"), "/root/project"),
            (git("https://example.com/a/project/"), "/root/project"),
            (Source::Tar { url: "https://example.com/x-1.2.tar.gz?token=1".into() }, "/root/x-1.2"),
            (git("https://example.com/.."), "/root/source"),
            (git("https://example.com/a/%2e%2e"), "/root/2e2e"),
        ];
        for (source, expected) in cases {
            assert_eq!(default_workdir(&source), expected);
        }
    }

    #[test]
    fn files_of_the_server_are_for_administrators_on_its_socket() {
        let remote = Caller { local: false, ..Caller::system() };
        let user = Caller { scopes: vec![Scope::Write], ..Caller::system() };
        assert!(check(&git("file:///srv/repo"), &Caller::system()).is_ok());
        assert!(matches!(check(&git("file:///srv/repo"), &remote), Err(Error::Forbidden { .. })));
        assert!(matches!(check(&git("file:///srv/repo"), &user), Err(Error::Forbidden { .. })));
        assert!(check(&git("https://example.com/x"), &remote).is_ok());
        for bad in ["ssh://x/y", "ext::sh -c x", "/srv/repo", "-u", "https://x/ y"] {
            assert!(matches!(check(&git(bad), &Caller::system()), Err(Error::Invalid { .. })), "{bad}");
        }
    }

    #[test]
    fn an_archive_is_unzipped_and_passed_on_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.tar.gz");
        let mut zipped = flate2::write::GzEncoder::new(File::create(&path).unwrap(), flate2::Compression::fast());
        io::Write::write_all(&mut zipped, b"a tar, in spirit").unwrap();
        zipped.finish().unwrap();
        let source = Source::Tar { url: format!("file://{}", path.display()) };
        let mut text = String::new();
        fetch(&source, &dir.path().join("tmp")).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "a tar, in spirit");
        let gone = Source::Tar { url: "file:///nonexistent".into() };
        assert!(matches!(fetch(&gone, dir.path()), Err(Error::Conflict { .. })));
    }

    #[test]
    fn a_repository_comes_with_its_files_and_runs_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let repo = dir.path().join("repo");
        let run = |args: &[&str]| {
            let status = std::process::Command::new("git")
                .args(["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "init.defaultBranch=main"])
                .args(args)
                .current_dir(&repo)
                .output()
                .unwrap();
            assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stderr));
        };
        std::fs::create_dir(&repo).unwrap();
        run(&["init", "-q"]);
        std::fs::write(repo.join("hello"), "hi").unwrap();
        std::fs::write(repo.join(".gitattributes"), "hello filter=evil").unwrap();
        run(&["add", "."]);
        run(&["commit", "-qm", "one"]);
        let source = git(&format!("file://{}", repo.display()));
        let archive = fetch(&source, &dir.path().join("tmp")).unwrap();
        let names: Vec<String> = tar::Archive::new(archive)
            .entries()
            .unwrap()
            .map(|entry| entry.unwrap().path().unwrap().to_string_lossy().into_owned())
            .collect();
        assert!(names.iter().any(|name| name == "hello" || name == "./hello"), "{names:?}");
        assert!(names.iter().any(|name| name.contains(".git/HEAD")), "{names:?}");
    }
}
