//! Walks through a stream's list of chunks, from the left to the right, fetching list nodes ahead by whole families.

use crate::{
    error::Error,
    id::ChunkId,
    repository::Inner,
    stream::{Child, Entry, Node, Root, StreamRef},
};
use bytes::Bytes;
use std::{collections::VecDeque, ops::Range, sync::Arc};

/// Where a walk stands.
pub(crate) struct Walk {
    inner: Arc<Inner>,
    /// What is still to come, the next one last.
    stack: Vec<Step>,
    /// Where the next step begins in the stream.
    at: u64,
    range: Range<u64>,
    refused: Option<Error>,
}

enum Step {
    Entry(Entry),
    /// A node that is fetched already.
    Node {
        bytes: Bytes,
        id: ChunkId,
        depth: u8,
        len: u64,
    },
    /// The root of a tree.
    Root {
        child: Child,
        depth: u8,
    },
}

impl Step {
    fn len(&self) -> u64 {
        match self {
            Step::Entry(entry) => entry.len(),
            Step::Node { len, .. } => *len,
            Step::Root { child, .. } => child.len,
        }
    }
}

impl Walk {
    /// A walk over the entries that lie in `range`, at least in part.
    pub(crate) fn new(inner: Arc<Inner>, stream: &StreamRef, range: Range<u64>) -> Walk {
        let refused = stream.check().err().map(|what| Error::damaged("a reference to a stream", what));
        let stack = match &stream.root {
            Root::Entries(entries) => entries.iter().rev().map(|entry| Step::Entry(*entry)).collect(),
            Root::Tree { id, node_len, depth } => {
                let child = Child { id: *id, node_len: *node_len, len: stream.len };
                vec![Step::Root { child, depth: *depth }]
            }
        };
        Walk { inner, stack, at: 0, range, refused }
    }

    /// The next entries, of about `size` bytes together, and where they begin; `None` at the end.
    pub(crate) async fn next(&mut self, size: u64) -> Result<Option<(u64, Vec<Entry>)>, Error> {
        if let Some(error) = self.refused.take() {
            return Err(error);
        }
        let (mut entries, mut begin, mut bytes) = (Vec::new(), self.at, 0);
        while let Some(step) = self.stack.pop() {
            let (from, till) = (self.at, self.at + step.len());
            if till <= self.range.start {
                self.at = till;
                begin = till;
                continue;
            }
            if from >= self.range.end {
                self.stack.clear();
                break;
            }
            match step {
                Step::Entry(entry) => {
                    entries.push(entry);
                    self.at = till;
                    // Zeros cost nothing to fetch, but someone may have to write them.
                    bytes += entry.len();
                    if bytes >= size {
                        break;
                    }
                }
                Step::Node { bytes, id, depth, len } => self.enter(&bytes, id, depth, len).await?,
                Step::Root { child, depth } => {
                    let bytes = self.inner.fetch(vec![(child.id, child.node_len)]).await?.into_iter().next().unwrap_or_default();
                    self.enter(&bytes, child.id, depth, child.len).await?;
                }
            }
        }
        Ok(if entries.is_empty() { None } else { Some((begin, entries)) })
    }

    /// Puts what a node holds onto the stack. Nodes below it are fetched all at once: they lie side by side.
    async fn enter(&mut self, bytes: &[u8], id: ChunkId, depth: u8, len: u64) -> Result<(), Error> {
        let node = Node::decode(bytes, depth, len);
        let node = node.map_err(|what| Error::damaged("a list of chunks", what).for_chunk(id))?;
        match node {
            Node::Leaf(entries) => self.stack.extend(entries.into_iter().rev().map(Step::Entry)),
            Node::Inner(children) => {
                let fetched = self.fetch_children(&children).await?;
                let steps = children.into_iter().zip(fetched).map(|(child, bytes)| Step::Node {
                    bytes,
                    id: child.id,
                    depth: depth - 1,
                    len: child.len,
                });
                let mut steps: VecDeque<Step> = steps.collect();
                while let Some(step) = steps.pop_back() {
                    self.stack.push(step);
                }
            }
        }
        Ok(())
    }

    /// The nodes of children; those outside of the range are left out.
    async fn fetch_children(&self, children: &[Child]) -> Result<Vec<Bytes>, Error> {
        let mut at = self.at;
        let needed: Vec<bool> = children
            .iter()
            .map(|child| {
                let (from, till) = (at, at + child.len);
                at = till;
                till > self.range.start && from < self.range.end
            })
            .collect();
        let wants = children.iter().zip(&needed).filter(|(_, needed)| **needed).map(|(child, _)| (child.id, child.node_len));
        let mut fetched = self.inner.fetch(wants.collect()).await?.into_iter();
        Ok(needed.into_iter().map(|needed| if needed { fetched.next().unwrap_or_default() } else { Bytes::new() }).collect())
    }
}
