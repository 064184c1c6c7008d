//! A connection to a port inside: the server's connection carries its bytes from here on.

use super::connection::{Connection, FromServer, ToServer};
use crate::{
    activity::Kind,
    core::Core,
    network::{Incoming, Outgoing},
};
use std::sync::Arc;
use wire::{Frame, control::Answer};

/// Serves it to its end.
pub async fn serve(core: &Arc<Core>, mut connection: Connection, port: u16) {
    let name = format!("port {port}");
    let (mut from_inside, to_inside) = match core.dial(port).await {
        Ok(halves) => halves,
        Err(error) => {
            let _ = connection.send(&Answer::Error { error }).await;
            return;
        }
    };
    if connection.send(&Answer::Streaming).await.is_err() {
        return;
    }
    let (from, to) = connection.split();
    let moves = || core.note_activity(Kind::Traffic, &name);
    let whole = {
        let (inward, outward) = (inward(from, to_inside, moves), outward(&mut from_inside, to, moves));
        tokio::pin!(inward, outward);
        tokio::select! {
            () = &mut inward => false,
            whole = &mut outward => {
                if whole {
                    inward.await;
                }
                whole
            }
        }
    };
    if !whole {
        // One side broke, or the server hung up before the program had its say.
        from_inside.abort();
    }
}

/// From the server to the program, until the server hangs up or nobody listens inside. `moves` is told of bytes.
async fn inward(mut from: FromServer, to: Outgoing, moves: impl Fn()) {
    let mut said = false;
    loop {
        let frame = tokio::select! {
            frame = from.frame() => frame,
            () = to.gone(), if !said => return,
        };
        match frame {
            Ok(Some(Frame::Data { bytes, .. })) if !said => {
                moves();
                if !to.send(&bytes).await {
                    return;
                }
            }
            Ok(Some(Frame::End { .. })) => {
                to.finish();
                said = true;
            }
            Ok(_) | Err(_) => return,
        }
    }
}

/// From the program to the server. False: broken off.
async fn outward(from: &mut Incoming, mut to: ToServer, moves: impl Fn()) -> bool {
    loop {
        match from.next().await {
            Ok(Some(bytes)) => {
                moves();
                if to.send_data(bytes).await.is_err() {
                    return false;
                }
            }
            Ok(None) => return to.send_end().await.is_ok(),
            Err(_) => {
                let _ = to.send_reset("the connection was reset").await;
                return false;
            }
        }
    }
}
