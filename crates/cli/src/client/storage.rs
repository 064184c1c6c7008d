//! `storage`: what uses space in the object store, whether it is intact, and freeing what nothing needs.

use super::{
    Context,
    failure::{Failure, Result},
    http::{Call, encode},
    lifecycle::Nothing,
    text::{safe, size},
};
use crate::args::StorageCommand;
use api_types::{Backup, BackupRequest, RotateKey, Storage, StorageChecked, StorageCollected};
use serde_json::{Value, json};
use std::{path::Path, process::ExitCode};

/// `dormouse storage`. A check that finds damage ends with 1.
///
/// # Errors
/// What the server refuses.
pub async fn command(ctx: &Context, command: Option<StorageCommand>) -> Result<ExitCode> {
    let call = match command.clone() {
        None => Call::get("/v1/storage".to_owned()),
        Some(StorageCommand::Check) => Call::post("/v1/storage/check".to_owned(), &Nothing {}),
        Some(StorageCommand::Collect) => Call::post("/v1/storage/collect".to_owned(), &Nothing {}),
        Some(StorageCommand::Pack) => Call::post("/v1/storage/pack".to_owned(), &Nothing {}),
        Some(StorageCommand::RotateKey { key_file }) => return rotate_key(ctx, &key_file).await,
    };
    let value: Value = ctx.client.json(call).await?;
    let mut status = ExitCode::SUCCESS;
    let text = match command {
        None | Some(StorageCommand::Pack | StorageCommand::RotateKey { .. }) => report(&Context::read(&value)?),
        Some(StorageCommand::Collect) => collected(&Context::read(&value)?),
        Some(StorageCommand::Check) => {
            let checked: StorageChecked = Context::read(&value)?;
            if !checked.intact {
                status = ExitCode::FAILURE;
            }
            found(&checked)
        }
    };
    if ctx.json {
        ctx.print_json(&value)?
    } else {
        ctx.print(&text)?
    }
    Ok(status)
}

async fn rotate_key(ctx: &Context, key_file: &Path) -> Result<ExitCode> {
    let key_file = std::path::absolute(key_file).map_err(|e| Failure::usage(format!("{}: {e}", key_file.display())))?;
    let request = RotateKey { key_file: key_file.to_string_lossy().into_owned() };
    ctx.client.send(Call::post("/v1/storage/rotate-key".to_owned(), &request)).await?;
    ctx.note("start the server with --object-store-key-file and the new key from now on");
    Ok(ExitCode::SUCCESS)
}

/// `dormouse backup`: prints the backup's name; what could not be kept is told, and gives the status 1.
///
/// # Errors
/// What the server refuses.
pub async fn backup(ctx: &Context, to: Option<String>) -> Result<ExitCode> {
    let value: Value = ctx.client.json(Call::post("/v1/storage/backup".to_owned(), &BackupRequest { to })).await?;
    let made: Backup = Context::read(&value)?;
    if ctx.json {
        ctx.print_json(&value)?
    } else {
        ctx.print(&format!("{}\n", made.name))?
    }
    ctx.note(&format!("{} sessions and {} snapshots are kept at {}", made.sessions, made.snapshots, safe(&made.place)));
    for failed in &made.failed {
        ctx.note(&format!("not kept: {}", safe(failed)));
    }
    Ok(if made.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// `dormouse backup --list`.
///
/// # Errors
/// What the server refuses.
pub async fn backups(ctx: &Context) -> Result<()> {
    let names: Vec<String> = ctx.client.list("/v1/storage/backups").await?;
    if ctx.json {
        return ctx.print_json(&json!({ "items": names }));
    }
    ctx.print(&names.iter().map(|name| format!("{}\n", safe(name))).collect::<String>())
}

/// `dormouse backup --rm`.
///
/// # Errors
/// What the server refuses.
pub async fn backup_remove(ctx: &Context, name: &str) -> Result<()> {
    ctx.client.send(Call::delete(format!("/v1/storage/backups/{}", encode(name)))).await?;
    Ok(())
}

fn report(storage: &Storage) -> String {
    let encrypted = if storage.encrypted { ", encrypted" } else { "" };
    let mut lines = vec![
        format!("object store   {}{encrypted}", safe(&storage.object_store)),
        format!("packed         {} sessions and snapshots, {} of them there alone", storage.packed, storage.away),
        format!("stored         {} in {} packs and {} manifests", size(storage.stored_bytes), storage.packs, storage.manifests),
        format!(
            "shared         {} if each had its own copy, {} with each chunk once ({} chunks)",
            size(storage.whole_bytes),
            size(storage.shared_once_bytes),
            storage.chunks
        ),
        format!("collectable    {}", size(storage.collectable_bytes)),
        format!("local cache    {} of {}", size(storage.cache_used_bytes), size(storage.cache_limit_bytes)),
    ];
    if let Some(trouble) = &storage.trouble {
        lines.push(format!("trouble        {}", safe(trouble)));
    }
    lines.join("\n") + "\n"
}

fn collected(done: &StorageCollected) -> String {
    let mut text = format!(
        "freed {}: {} manifests, {} chunks; {} packs removed, {} rewritten\n",
        size(done.bytes_freed),
        done.manifests_removed,
        done.chunks_removed,
        done.packs_removed,
        done.packs_rewritten
    );
    if done.unknown_manifests > 0 {
        text.push_str(&format!("{} manifests stay that this server doesn't know\n", done.unknown_manifests));
    }
    text
}

fn found(checked: &StorageChecked) -> String {
    if checked.intact {
        return format!("{} chunks, {}: all as they were written\n", checked.chunks, size(checked.plain_bytes));
    }
    let damages = checked.damages.iter().map(|damage| format!("damaged   {}\n", safe(damage)));
    let affected = checked.affected.iter().map(|what| format!("affected  {}\n", safe(what)));
    damages.chain(affected).collect()
}
