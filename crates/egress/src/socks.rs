//! SOCKS5 (RFC 1928): CONNECT to names and addresses. A user and password (RFC 1929) are taken and not looked at.

use crate::{
    HEAD_WITHIN,
    connect::{Use, reach},
    connection::Connection,
    host::Destination,
    intercept::carry,
    refusal::{Kind, Refusal},
};
use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr},
    sync::Arc,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    time::timeout,
};

const VERSION: u8 = 5;
const NO_LOGIN: u8 = 0;
const PASSWORD: u8 = 2;
const NO_METHOD: u8 = 0xff;
const CONNECT: u8 = 1;
const BAD_COMMAND: u8 = 7;
const BAD_ADDRESS: u8 = 8;

/// What a client asked for, or the reply that it gets.
type Asked = Result<Destination, u8>;

/// Serves one client. Its version byte was seen, and is still in the stream.
pub(crate) async fn serve<S>(connection: Arc<Connection>, mut inside: S)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let Ok(Ok(asked)) = timeout(HEAD_WITHIN, negotiate(&mut inside)).await else { return };
    let to = match asked {
        Ok(to) => to,
        Err(code) => return end(&mut inside, code).await,
    };
    match reach(&connection, &to, Use::Stream).await {
        Ok(reached) => {
            if reply(&mut inside, 0).await.is_ok() {
                carry(connection, inside, to, reached).await;
            }
        }
        Err(refusal) => end(&mut inside, refusal.socks()).await,
    }
}

/// The reply that ends the connection. A client that doesn't take it is given up.
async fn end<S: AsyncWrite + Unpin>(inside: &mut S, code: u8) {
    let _ = timeout(HEAD_WITHIN, async {
        reply(inside, code).await?;
        inside.shutdown().await
    })
    .await;
}

async fn reply<S: AsyncWrite + Unpin>(inside: &mut S, code: u8) -> io::Result<()> {
    // The bound address is of no use to anyone, and not told.
    inside.write_all(&[VERSION, code, 0, 1, 0, 0, 0, 0, 0, 0]).await?;
    inside.flush().await
}

async fn negotiate<S: AsyncRead + AsyncWrite + Unpin>(inside: &mut S) -> io::Result<Asked> {
    let [_, count] = read(inside).await?;
    let methods = read_text(inside, count).await?;
    let method = [NO_LOGIN, PASSWORD].into_iter().find(|method| methods.contains(method));
    inside.write_all(&[VERSION, method.unwrap_or(NO_METHOD)]).await?;
    inside.flush().await?;
    match method {
        None => return Err(io::ErrorKind::InvalidData.into()),
        Some(PASSWORD) => {
            let [version, user] = read(inside).await?;
            read_text(inside, user).await?;
            let [password] = read(inside).await?;
            read_text(inside, password).await?;
            inside.write_all(&[version, 0]).await?;
            inside.flush().await?;
        }
        Some(_) => {}
    }
    let [version, command, _, kind] = read(inside).await?;
    if version != VERSION {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let host = match kind {
        1 => Ipv4Addr::from(read::<4, _>(inside).await?).to_string(),
        4 => Ipv6Addr::from(read::<16, _>(inside).await?).to_string(),
        3 => {
            let [length] = read(inside).await?;
            String::from_utf8_lossy(&read_text(inside, length).await?).into_owned()
        }
        _ => return Ok(Err(BAD_ADDRESS)),
    };
    let port = u16::from_be_bytes(read(inside).await?);
    if command != CONNECT {
        return Ok(Err(BAD_COMMAND));
    }
    Ok(Destination::new(&host, port).map_err(|why| Refusal::new(Kind::Malformed, why).socks()))
}

async fn read<const N: usize, S: AsyncRead + Unpin>(inside: &mut S) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    inside.read_exact(&mut bytes).await?;
    Ok(bytes)
}

async fn read_text<S: AsyncRead + Unpin>(inside: &mut S, length: u8) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; length.into()];
    inside.read_exact(&mut bytes).await?;
    Ok(bytes)
}
