//! Bodies as they pass: streamed, counted, never held.

use crate::connection::Request;
use bytes::Bytes;
use http_body_util::Full;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use std::{
    pin::Pin,
    sync::{Arc, atomic::Ordering::Relaxed},
    task::{Context, Poll, ready},
};

/// A body on its way, or an answer of our own. The request is under way for as long as one of its bodies is.
pub(crate) enum Passing {
    Sent(Incoming, Arc<Request>),
    Received(Incoming, Arc<Request>),
    Own(Full<Bytes>),
}

impl Passing {
    /// A text of our own.
    pub fn text(text: impl Into<Bytes>) -> Passing {
        Passing::Own(Full::new(text.into()))
    }
}

impl Body for Passing {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let (frame, count) = match &mut *self {
            Passing::Sent(body, request) => (ready!(Pin::new(body).poll_frame(cx)), &request.sent),
            Passing::Received(body, request) => (ready!(Pin::new(body).poll_frame(cx)), &request.received),
            Passing::Own(body) => return Pin::new(body).poll_frame(cx).map_err(|never| match never {}),
        };
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
        {
            count.fetch_add(data.len() as u64, Relaxed);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Passing::Sent(body, _) | Passing::Received(body, _) => body.is_end_stream(),
            Passing::Own(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Passing::Sent(body, _) | Passing::Received(body, _) => body.size_hint(),
            Passing::Own(body) => body.size_hint(),
        }
    }
}
