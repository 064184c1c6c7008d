//! Opening a WebSocket to the server.

use super::{
    failure::{Failure, Result},
    http::{Client, Wire, problem_of},
};
use http::{Request, header};
use std::time::Duration;
use tokio_tungstenite::{
    WebSocketStream, client_async,
    tungstenite::{self, handshake::client::generate_key},
};

/// A WebSocket to the server.
pub type Socket = WebSocketStream<Box<dyn Wire>>;

/// Opens one at `path`, within `limit`.
///
/// # Errors
/// The server can't be reached, or what it says instead.
pub async fn open(client: &Client, path: &str, limit: Duration) -> Result<Socket> {
    let (host, target) = client.target(path);
    let mut request = Request::builder()
        .uri(format!("ws://{host}{target}"))
        .header(header::HOST, &host)
        .header(header::CONNECTION, "Upgrade")
        .header(header::UPGRADE, "websocket")
        .header("sec-websocket-version", "13")
        .header("sec-websocket-key", generate_key());
    if let Some(value) = client.authorization()? {
        request = request.header(header::AUTHORIZATION, value);
    }
    let request = request.body(()).map_err(|e| Failure::usage(format!("can't ask for that: {e}")))?;
    let opening = async {
        let stream = client.connect().await.map_err(|e| client.unreachable(&e))?;
        client_async(request, stream).await.map_err(refusal)
    };
    let late = |_| Failure::unreachable("the server didn't answer in time");
    Ok(tokio::time::timeout(limit, opening).await.map_err(late)??.0)
}

/// The failure of a link that was there.
pub fn broken(error: tungstenite::Error) -> Failure {
    Failure::unreachable(format!("the link broke: {error}"))
}

/// What the server says instead of opening a WebSocket.
fn refusal(error: tungstenite::Error) -> Failure {
    match error {
        tungstenite::Error::Http(response) => {
            let status = response.status();
            let body = response.into_body().unwrap_or_default();
            Failure::of_problem(problem_of(status, &body))
        }
        other => broken(other),
    }
}
