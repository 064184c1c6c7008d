//! The first half of a collection: which chunks live.

use crate::{
    error::Error,
    id::ChunkId,
    index::Epoch,
    repository::Repository,
    stream::{Child, Entry, Node, Root, StreamRef},
};
use std::collections::HashSet;

/// List nodes that are fetched at once.
const AT_ONCE: usize = 512;

/// Gathers what lives. From its beginning on, what writers use counts as live by itself.
#[derive(Debug)]
pub struct Mark {
    repository: Repository,
    floor: Epoch,
    live: HashSet<ChunkId>,
    absent: Vec<ChunkId>,
}

impl Repository {
    /// Begins a mark. What it costs lies in the memory for the ids of all live chunks.
    pub fn mark(&self) -> Mark {
        let mut state = self.inner.state();
        state.epoch.0 += 1;
        let epoch = state.epoch;
        let oldest = state.writers.values().min().copied().unwrap_or(epoch);
        Mark { repository: self.clone(), floor: oldest.min(epoch), live: HashSet::new(), absent: Vec::new() }
    }
}

impl Mark {
    /// A chunk that lives.
    pub fn chunk(&mut self, id: ChunkId) {
        if self.live.insert(id) && !self.repository.has(id) {
            self.absent.push(id);
        }
    }

    /// A stream that lives: its chunks, and those of its list.
    ///
    /// # Errors
    /// [`Error::Missing`] or [`Error::Damaged`] where its list can't be read to the end. Then not all of it is marked, and a
    /// collection would remove the rest.
    pub async fn stream(&mut self, stream: &StreamRef) -> Result<(), Error> {
        stream.check().map_err(|what| Error::damaged("a reference to a stream", what))?;
        let (root, depth) = match &stream.root {
            Root::Entries(entries) => {
                entries.iter().for_each(|entry| self.entry(entry));
                return Ok(());
            }
            Root::Tree { id, node_len, depth } => (Child { id: *id, node_len: *node_len, len: stream.len }, *depth),
        };
        let mut stack = vec![(vec![root], depth)];
        let mut inner_nodes = Vec::new();
        while let Some((mut children, depth)) = stack.pop() {
            // What lies below a list that was walked before was marked then.
            children.retain(|child| !self.live.contains(&child.id));
            if children.len() > AT_ONCE {
                stack.push((children.split_off(AT_ONCE), depth));
            }
            let wants = children.iter().map(|child| (child.id, child.node_len)).collect();
            let nodes = self.repository.inner.fetch(wants).await?;
            for (child, bytes) in children.into_iter().zip(nodes) {
                let node = Node::decode(&bytes, depth, child.len);
                match node.map_err(|what| Error::damaged("a list of chunks", what).for_chunk(child.id))? {
                    Node::Leaf(entries) => {
                        entries.iter().for_each(|entry| self.entry(entry));
                        self.live.insert(child.id);
                    }
                    Node::Inner(below) => {
                        inner_nodes.push(child.id);
                        stack.push((below, depth - 1));
                    }
                }
            }
        }
        // Not before all below them is: an error on the way must not make the next walk pass over the rest.
        self.live.extend(inner_nodes);
        Ok(())
    }

    fn entry(&mut self, entry: &Entry) {
        if let Entry::Chunk { id, .. } = entry {
            self.chunk(*id);
        }
    }

    /// Chunks that were marked and are in no pack: what refers to them can't be restored.
    pub fn absent(&self) -> &[ChunkId] {
        &self.absent
    }

    /// True where this chunk was found to live.
    pub fn contains(&self, id: ChunkId) -> bool {
        self.live.contains(&id)
    }

    /// How many chunks live.
    pub fn live(&self) -> usize {
        self.live.len()
    }

    pub(crate) fn into_parts(self) -> (HashSet<ChunkId>, Epoch) {
        (self.live, self.floor)
    }
}
