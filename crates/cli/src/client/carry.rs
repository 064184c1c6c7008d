//! `export` and `import`: a session in one file.

use super::{
    Context,
    failure::{Failure, Result},
    http::Call,
    select,
};
use api_types::Session;
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use serde_json::Value;
use std::path::Path;
use tokio::{
    fs::File,
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
};

/// Bytes that are sent at a time.
const PIECE: usize = 256 * 1024;

/// How a session is imported.
#[derive(Debug, Clone, Copy)]
pub struct How {
    pub new_id: bool,
    pub disk_only: bool,
    pub trust_runtime: bool,
}

/// `dormouse export`. A file is there when all of it is.
///
/// # Errors
/// What the server refuses; a file that is there already, or can't be written.
pub async fn export(ctx: &Context, word: &str, file: &Path) -> Result<()> {
    let session = select::session(&ctx.client, word).await?;
    if file != Path::new("-") && file.exists() {
        return Err(Failure::failed(format!("{} is there already", file.display())));
    }
    let answer = ctx.client.send(Call::get(format!("/v1/sessions/{}/export", session.id))).await?;
    let mut body = answer.into_body();
    let partial = file.with_added_extension("part");
    let mut to: Box<dyn AsyncWrite + Unpin + Send> = match file == Path::new("-") {
        true => Box::new(tokio::io::stdout()),
        false => Box::new(File::create(&partial).await.map_err(|e| cant("write", &partial, &e))?),
    };
    let written = async {
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|e| Failure::failed(format!("the export was cut off: {e}")))?;
            if let Ok(bytes) = frame.into_data() {
                to.write_all(&bytes).await.map_err(|e| cant("write", file, &e))?;
            }
        }
        to.flush().await.map_err(|e| cant("write", file, &e))
    };
    let written: Result<()> = written.await;
    if file == Path::new("-") {
        return written;
    }
    let done = written.and_then(|()| std::fs::rename(&partial, file).map_err(|e| cant("write", file, &e)));
    if done.is_err() {
        let _ = std::fs::remove_file(&partial);
    }
    done
}

/// `dormouse import`: prints the session's id.
///
/// # Errors
/// What the server refuses; a file that can't be read.
pub async fn import(ctx: &Context, file: &Path, how: How) -> Result<()> {
    let from: Box<dyn AsyncRead + Unpin + Send> = match file == Path::new("-") {
        true => Box::new(tokio::io::stdin()),
        false => Box::new(File::open(file).await.map_err(|e| cant("read", file, &e))?),
    };
    let pieces = stream::unfold(from, |mut from| async move {
        let mut piece = vec![0; PIECE];
        match from.read(&mut piece).await {
            Ok(0) => None,
            Ok(read) => {
                piece.truncate(read);
                Some((Ok(Frame::data(Bytes::from(piece))), from))
            }
            Err(error) => Some((Err(error), from)),
        }
    });
    let body = StreamBody::new(pieces.boxed()).boxed_unsync();
    let path =
        format!("/v1/sessions/import?new_id={}&disk_only={}&trust_runtime={}", how.new_id, how.disk_only, how.trust_runtime);
    let answer = ctx.client.send_stream(Call::put(path), body).await?;
    let bytes = answer.into_body().collect().await.map_err(|e| Failure::failed(format!("the answer was cut off: {e}")))?;
    let value: Value = serde_json::from_slice(&bytes.to_bytes()).map_err(|e| Failure::failed(format!("the answer: {e}")))?;
    let session: Session = Context::read(&value)?;
    ctx.note(&format!("session {} is {}", session.id, session.state));
    if ctx.json { ctx.print_json(&value) } else { ctx.print(&format!("{}\n", session.id)) }
}

fn cant(what: &str, file: &Path, error: &std::io::Error) -> Failure {
    Failure::failed(format!("can't {what} {}: {error}", file.display()))
}
