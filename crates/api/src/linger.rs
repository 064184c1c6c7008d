//! What a client still sends when its answer is there already.
//!
//! An answer to a body that nobody reads, such as 413, would end the connection while the client writes, and most clients
//! then tell of a broken pipe instead of the answer. So the rest of a body is read and thrown away, within limits.

use axum::{body::Body, extract::Request};
use bytes::Bytes;
use http::header;
use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

/// Most bytes that are thrown away; a client that has more to send is cut off.
const MOST: u64 = 64 << 20;
/// The longest that it takes.
const LONGEST: Duration = Duration::from_secs(10);

/// Lets the rest of a request's body run out where its reader stops early.
pub(crate) fn patient(request: Request) -> Request {
    // A client that asks first sends nothing that isn't wanted.
    if request.body().is_end_stream() || request.headers().contains_key(header::EXPECT) {
        return request;
    }
    request.map(|body| Body::new(Patient(Some(body))))
}

/// A body whose rest is read when it is dropped; `None` once it has ended.
struct Patient(Option<Body>);

impl HttpBody for Patient {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Some(body) = &mut self.0 else { return Poll::Ready(None) };
        let polled = Pin::new(body).poll_frame(context);
        if matches!(polled, Poll::Ready(None | Some(Err(_)))) {
            self.0 = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.0.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.0.as_ref().map_or_else(|| SizeHint::with_exact(0), HttpBody::size_hint)
    }
}

impl Drop for Patient {
    fn drop(&mut self) {
        if self.is_end_stream() {
            return;
        }
        if let (Some(body), Ok(runtime)) = (self.0.take(), tokio::runtime::Handle::try_current()) {
            runtime.spawn(tokio::time::timeout(LONGEST, throw_away(body)));
        }
    }
}

async fn throw_away(mut body: Body) {
    let mut thrown = 0;
    while let Some(Ok(frame)) = body.frame().await {
        thrown += frame.data_ref().map_or(0, |bytes| bytes.len() as u64);
        if thrown > MOST {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    #[tokio::test(start_paused = true)]
    async fn the_rest_of_a_body_is_read_but_not_without_end() {
        for (pieces, expected) in [(3, 3), (1000, 65)] {
            let read = Arc::new(AtomicUsize::new(0));
            let count = read.clone();
            let piece = Bytes::from(vec![0; 1 << 20]);
            let chunks = futures_util::stream::iter((0..pieces).map(move |_| {
                count.fetch_add(1, Ordering::Relaxed);
                Ok::<_, std::io::Error>(piece.clone())
            }));
            let request = patient(Request::new(Body::from_stream(chunks)));
            drop(request);
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert_eq!(read.load(Ordering::Relaxed), expected);
        }
    }
}
