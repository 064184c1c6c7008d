//! `files`: looking at and changing files in a session.

use super::{
    Context,
    failure::{Failure, Result},
    http::{Call, encode, no_body},
    lines::ServerEvents,
    select,
    text::{Table, local, safe},
};
use crate::args::FilesCommand;
use api_types::{FileMeta, FileType, Mkdir, WatchEvent};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use model::SessionId;
use serde_json::{Value, json};
use std::io::Write;

/// `dormouse files`.
///
/// # Errors
/// What the server refuses.
pub async fn command(ctx: &Context, command: FilesCommand) -> Result<()> {
    match command {
        FilesCommand::Ls { session, path, depth } => ls(ctx, &session, &path, depth).await,
        FilesCommand::Cat { session, path } => {
            let session = select::session(&ctx.client, &session).await?.id;
            let body = read(ctx, session, &path).await?;
            to_stdout(body).await
        }
        FilesCommand::Rm { session, path } => {
            let session = select::session(&ctx.client, &session).await?.id;
            ctx.client.send(Call::delete(format!("{}&recursive=true", address(session, "files", &path)))).await?;
            Ok(())
        }
        FilesCommand::Mkdir { session, path, parents } => {
            let session = select::session(&ctx.client, &session).await?.id;
            ctx.client.send(Call::post(format!("/v1/sessions/{session}/files/mkdir"), &Mkdir { path, parents })).await?;
            Ok(())
        }
        FilesCommand::Watch { session, path, recursive } => watch(ctx, &session, &path, recursive).await,
    }
}

/// The address of what is done to `path`.
pub fn address(session: SessionId, what: &str, path: &str) -> String {
    format!("/v1/sessions/{session}/{what}?path={}", encode(path))
}

/// What stands at a path, through links; `None` where nothing does.
///
/// # Errors
/// Those of asking the server.
pub async fn stat(ctx: &Context, session: SessionId, path: &str) -> Result<Option<FileMeta>> {
    let call = Call::get(format!("{}&follow=true", address(session, "files/stat", path)));
    match ctx.client.json(call).await {
        Ok(meta) => Ok(Some(meta)),
        Err(failure)
            if failure.problem.as_ref().is_some_and(|p| p.status == 404 && p.code == api_types::ProblemCode::NotFound) =>
        {
            Ok(None)
        }
        Err(failure) => Err(failure),
    }
}

/// A file's bytes.
///
/// # Errors
/// Those of asking the server.
pub async fn read(ctx: &Context, session: SessionId, path: &str) -> Result<Incoming> {
    let response = ctx.client.send(Call::get(address(session, "files", path))).await?;
    Ok(response.into_body())
}

/// Writes an answer to standard output.
///
/// # Errors
/// The connection breaks; standard output can't be written.
pub async fn to_stdout(mut body: Incoming) -> Result<()> {
    while let Some(piece) = next_piece(&mut body).await? {
        let mut out = std::io::stdout().lock();
        match out.write_all(&piece).and_then(|()| out.flush()) {
            Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
            done => done.map_err(|e| Failure::failed(format!("can't write to standard output: {e}")))?,
        }
    }
    Ok(())
}

/// The next bytes of an answer; `None` at its end.
///
/// # Errors
/// The answer was cut off.
pub async fn next_piece(body: &mut Incoming) -> Result<Option<bytes::Bytes>> {
    while let Some(frame) = body.frame().await {
        let frame =
            frame.map_err(|e| Failure::failed(format!("the connection broke in the middle of a file: {e} — try again")))?;
        if let Ok(bytes) = frame.into_data() {
            return Ok(Some(bytes));
        }
    }
    Ok(None)
}

async fn ls(ctx: &Context, word: &str, path: &str, depth: u32) -> Result<()> {
    let session = select::session(&ctx.client, word).await?.id;
    let values: Vec<Value> = ctx.client.list(&format!("{}&depth={depth}", address(session, "files/list", path))).await?;
    if ctx.json {
        return ctx.print_json(&json!({ "items": values }));
    }
    let files: Vec<FileMeta> = values.iter().map(Context::read).collect::<Result<_>>()?;
    if ctx.quiet {
        return ctx.print(&files.iter().map(|file| format!("{}\n", safe(&file.path))).collect::<String>());
    }
    let mut table = Table::new(&["MODE", "OWNER", "SIZE", "MODIFIED", "PATH"]);
    for file in &files {
        let target = file.target.as_deref().map(|target| format!(" -> {target}")).unwrap_or_default();
        table.row([
            mode_text(file.kind, file.mode),
            format!("{}:{}", file.uid, file.gid),
            file.size_bytes.to_string(),
            local(file.modified_at),
            format!("{}{target}", file.path),
        ]);
    }
    ctx.print(&table.render())
}

/// Type and permissions as `ls -l` writes them.
fn mode_text(kind: FileType, mode: u32) -> String {
    let first = match kind {
        FileType::File => '-',
        FileType::Dir => 'd',
        FileType::Symlink => 'l',
        FileType::Fifo => 'p',
        FileType::Socket => 's',
        FileType::Char => 'c',
        FileType::Block => 'b',
    };
    let mut text = String::from(first);
    for (shift, special, set) in [(6, 0o4000, 's'), (3, 0o2000, 's'), (0, 0o1000, 't')] {
        let bits = mode >> shift;
        text.push(if bits & 4 != 0 { 'r' } else { '-' });
        text.push(if bits & 2 != 0 { 'w' } else { '-' });
        text.push(match (mode & special != 0, bits & 1 != 0) {
            (true, true) => set,
            (true, false) => set.to_ascii_uppercase(),
            (false, true) => 'x',
            (false, false) => '-',
        });
    }
    text
}

async fn watch(ctx: &Context, word: &str, path: &str, recursive: bool) -> Result<()> {
    let session = select::session(&ctx.client, word).await?.id;
    let call = Call::get(format!("{}&recursive={recursive}", address(session, "files/watch", path)));
    let response = ctx.client.send_stream(call.header("accept", "text/event-stream"), no_body()).await?;
    let mut events = ServerEvents::new(response.into_body());
    while let Some(event) = events.next().await? {
        let value: Value = serde_json::from_str(&event.data).map_err(|e| Failure::failed(format!("can't read a change: {e}")))?;
        if ctx.json {
            ctx.print_json(&value)?;
        } else {
            let change: WatchEvent = Context::read(&value)?;
            let slash = if change.is_dir { "/" } else { "" };
            ctx.print(&format!("{:<11} {}{slash}\n", safe(&change.kind), safe(&change.path)))?;
        }
    }
    // What changed while nobody watched can't be told afterwards: the user has to know.
    Err(Failure::failed("the watch has ended — changes from now on are not shown"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_read_like_those_of_ls() {
        for (kind, mode, text) in [
            (FileType::File, 0o644, "-rw-r--r--"),
            (FileType::Dir, 0o1777, "drwxrwxrwt"),
            (FileType::File, 0o4755, "-rwsr-xr-x"),
            (FileType::File, 0o2644, "-rw-r-Sr--"),
            (FileType::Symlink, 0o777, "lrwxrwxrwx"),
        ] {
            assert_eq!(mode_text(kind, mode), text);
        }
    }
}
