//! Streams: byte sequences of any length as lists of chunks, and the lists as trees of chunks.
//!
//! A list node holds entries: a chunk with its length, or a run of zeros, which costs nothing. Nodes are chunks like any
//! others. Where one ends is decided by what is in it (about every 32 entries), so that two lists that differ in one place
//! share all other nodes, even where entries were added or left out; the nodes' own ids are lists again, up to one root.
//! A list of a few entries stands in the [`StreamRef`] itself.

use crate::{
    block::MAX_CHUNK,
    codec::{Cursor, put_varint},
    crypto::Cipher,
    id::ChunkId,
};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// At most so many entries stand in a reference itself.
const INLINE: usize = 4;
/// A node has at least so many entries, but for the last of its level …
const NODE_MIN: usize = 8;
/// … and at most so many.
const NODE_MAX: usize = 256;
/// A node ends after an id that ends with five zero bits.
const NODE_MASK: u8 = 31;
/// Highest tree. 8 to the power of 20 pages are more than there will be.
const MAX_DEPTH: u8 = 20;

/// One piece of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Entry {
    Chunk {
        id: ChunkId,
        len: u64,
    },
    /// So many zero bytes.
    Zeros {
        len: u64,
    },
}

impl Entry {
    pub fn len(&self) -> u64 {
        match self {
            Entry::Chunk { len, .. } | Entry::Zeros { len } => *len,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A stream in a repository: what a manifest keeps of it. Equal references are equal bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamRef {
    /// Bytes of the whole stream.
    pub len: u64,
    #[serde(flatten)]
    pub root: Root,
}

/// Where a stream's list of chunks is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Root {
    /// Here.
    Entries(Vec<Entry>),
    /// In a tree of so many levels, of which this is the top node.
    Tree { id: ChunkId, node_len: u64, depth: u8 },
}

impl StreamRef {
    /// No bytes.
    pub fn empty() -> StreamRef {
        StreamRef { len: 0, root: Root::Entries(Vec::new()) }
    }

    /// What one chunk holds.
    pub fn of_chunk(id: ChunkId, len: u64) -> StreamRef {
        let entries = if len == 0 { Vec::new() } else { vec![Entry::Chunk { id, len }] };
        StreamRef { len, root: Root::Entries(entries) }
    }

    /// A hash over length and list of chunks, which are hashes of all bytes. Streams that were cut alike have equal digests
    /// exactly where they are equal.
    pub fn digest(&self) -> [u8; 32] {
        let mut out = self.len.to_le_bytes().to_vec();
        match &self.root {
            Root::Entries(entries) => encode_entries(&mut out, entries),
            Root::Tree { id, depth, .. } => {
                out.push(*depth);
                out.extend_from_slice(&id.0);
            }
        }
        *blake3::hash(&out).as_bytes()
    }

    /// Refuses a reference that can't be one, so that nothing is allocated for it.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        match &self.root {
            Root::Entries(entries) => check_entries(entries, self.len, false),
            Root::Tree { depth, .. } if *depth == 0 || *depth > MAX_DEPTH => Err("its tree has an impossible depth"),
            Root::Tree { node_len, .. } if *node_len as usize > MAX_NODE => Err("its tree's top node is too long"),
            Root::Tree { .. } => Ok(()),
        }
    }
}

/// Longest encoded node.
pub(crate) const MAX_NODE: usize = 1 + NODE_MAX * (32 + 20);

/// A child in a node above the lowest level: the node's own length is needed to read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Child {
    pub(crate) id: ChunkId,
    pub(crate) node_len: u64,
    /// Bytes of the stream below it.
    pub(crate) len: u64,
}

/// What a list node holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Node {
    Leaf(Vec<Entry>),
    Inner(Vec<Child>),
}

fn encode_entries(out: &mut Vec<u8>, entries: &[Entry]) {
    out.push(0);
    for entry in entries {
        match entry {
            Entry::Chunk { id, len } => {
                put_varint(out, len << 1);
                out.extend_from_slice(&id.0);
            }
            Entry::Zeros { len } => put_varint(out, len << 1 | 1),
        }
    }
}

impl Node {
    /// Reads a node of the level `depth` (1: the lowest), which has to be `len` bytes of the stream.
    pub(crate) fn decode(bytes: &[u8], depth: u8, len: u64) -> Result<Node, &'static str> {
        const BAD: &str = "it is no list of chunks";
        let mut cursor = Cursor::new(bytes);
        if cursor.u8() != Some(depth - 1) {
            return Err("it is a list of another level");
        }
        if depth == 1 {
            let mut entries = Vec::new();
            while !cursor.is_at_end() {
                let head = cursor.varint().ok_or(BAD)?;
                let len = head >> 1;
                entries.push(if head & 1 == 1 {
                    Entry::Zeros { len }
                } else {
                    Entry::Chunk { id: cursor.id().ok_or(BAD)?, len }
                });
            }
            check_entries(&entries, len, true)?;
            return Ok(Node::Leaf(entries));
        }
        let (mut children, mut sum) = (Vec::new(), 0_u64);
        while !cursor.is_at_end() {
            let (len, node_len) = (cursor.varint().ok_or(BAD)?, cursor.varint().ok_or(BAD)?);
            let child = Child { len, node_len, id: cursor.id().ok_or(BAD)? };
            sum = sum.checked_add(child.len).ok_or(BAD)?;
            if child.node_len as usize > MAX_NODE {
                return Err(BAD);
            }
            children.push(child);
        }
        if sum != len { Err("its list has another length than the list above it says") } else { Ok(Node::Inner(children)) }
    }

    fn encode(&self, depth: u8) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Node::Leaf(entries) => encode_entries(&mut out, entries),
            Node::Inner(children) => {
                out.push(depth - 1);
                for child in children {
                    put_varint(&mut out, child.len);
                    put_varint(&mut out, child.node_len);
                    out.extend_from_slice(&child.id.0);
                }
            }
        }
        out
    }
}

fn check_entries(entries: &[Entry], len: u64, node: bool) -> Result<(), &'static str> {
    if entries.len() > if node { NODE_MAX } else { INLINE } {
        return Err("its list has too many entries");
    }
    let too_long = |entry: &&Entry| matches!(entry, Entry::Chunk { len, .. } if *len > MAX_CHUNK as u64);
    if entries.iter().find(too_long).is_some() {
        return Err("its list has a chunk that is too long");
    }
    let sum = entries.iter().try_fold(0_u64, |sum, entry| sum.checked_add(entry.len()));
    if sum == Some(len) { Ok(()) } else { Err("its list has another length than it should") }
}

/// Puts entries into nodes as they come. Finished nodes are the caller's to store.
#[derive(Debug, Default)]
pub(crate) struct ListBuilder {
    entries: Vec<Entry>,
    /// The unfinished nodes above the lowest level, lowest first.
    levels: Vec<Vec<Child>>,
    len: u64,
    /// Nodes to store.
    pub(crate) nodes: Vec<Bytes>,
}

impl ListBuilder {
    pub(crate) fn push(&mut self, entry: Entry, cipher: &Cipher) {
        self.len += entry.len();
        if let (Entry::Zeros { len }, Some(Entry::Zeros { len: before })) = (entry, self.entries.last_mut()) {
            *before += len;
            return;
        }
        // A run of zeros is known to be over only now, so a full list waits for the next entry.
        if self.entries.len() >= NODE_MAX || (self.entries.len() >= NODE_MIN && ends_node(self.entries.last())) {
            self.close_leaf(cipher);
        }
        self.entries.push(entry);
    }

    fn close_leaf(&mut self, cipher: &Cipher) {
        let entries = std::mem::take(&mut self.entries);
        let len = entries.iter().map(Entry::len).sum();
        let child = self.emit(Node::Leaf(entries), 1, len, cipher);
        self.push_child(0, child, cipher);
    }

    fn emit(&mut self, node: Node, depth: u8, len: u64, cipher: &Cipher) -> Child {
        let bytes = node.encode(depth);
        let child = Child { id: cipher.chunk_id(&bytes), node_len: bytes.len() as u64, len };
        self.nodes.push(bytes.into());
        child
    }

    fn push_child(&mut self, level: usize, child: Child, cipher: &Cipher) {
        if self.levels.len() == level {
            self.levels.push(Vec::new());
        }
        self.levels[level].push(child);
        let count = self.levels[level].len();
        if count >= NODE_MAX || (count >= NODE_MIN && child.id.0[31] & NODE_MASK == 0) {
            self.close_level(level, cipher);
        }
    }

    fn close_level(&mut self, level: usize, cipher: &Cipher) {
        let children = std::mem::take(&mut self.levels[level]);
        let len = children.iter().map(|child| child.len).sum();
        let child = self.emit(Node::Inner(children), level as u8 + 2, len, cipher);
        self.push_child(level + 1, child, cipher);
    }

    /// Closes all nodes up to the root.
    pub(crate) fn finish(mut self, cipher: &Cipher) -> (StreamRef, Vec<Bytes>) {
        let len = self.len;
        if self.levels.is_empty() && self.entries.len() <= INLINE {
            return (StreamRef { len, root: Root::Entries(self.entries) }, self.nodes);
        }
        if !self.entries.is_empty() {
            self.close_leaf(cipher);
        }
        let mut level = 0;
        loop {
            let above = self.levels[level + 1..].iter().any(|children| !children.is_empty());
            match self.levels[level].as_slice() {
                [only] if !above => {
                    let root = Root::Tree { id: only.id, node_len: only.node_len, depth: level as u8 + 1 };
                    return (StreamRef { len, root }, self.nodes);
                }
                [] => {}
                _ => self.close_level(level, cipher),
            }
            level += 1;
        }
    }
}

fn ends_node(entry: Option<&Entry>) -> bool {
    matches!(entry, Some(Entry::Chunk { id, .. }) if id.0[31] & NODE_MASK == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn build(entries: &[Entry]) -> (StreamRef, HashMap<ChunkId, Bytes>) {
        let mut list = ListBuilder::default();
        for entry in entries {
            list.push(*entry, &Cipher::Plain);
        }
        let (stream, nodes) = list.finish(&Cipher::Plain);
        (stream, nodes.into_iter().map(|node| (Cipher::Plain.chunk_id(&node), node)).collect())
    }

    fn walk(nodes: &HashMap<ChunkId, Bytes>, id: ChunkId, depth: u8, len: u64, out: &mut Vec<Entry>) {
        match Node::decode(&nodes[&id], depth, len).unwrap() {
            Node::Leaf(entries) => out.extend(entries),
            Node::Inner(children) => {
                for child in children {
                    assert_eq!(nodes[&child.id].len() as u64, child.node_len);
                    walk(nodes, child.id, depth - 1, child.len, out);
                }
            }
        }
    }

    fn read(stream: &StreamRef, nodes: &HashMap<ChunkId, Bytes>) -> Vec<Entry> {
        stream.check().unwrap();
        match &stream.root {
            Root::Entries(entries) => entries.clone(),
            Root::Tree { id, depth, .. } => {
                let mut out = Vec::new();
                walk(nodes, *id, *depth, stream.len, &mut out);
                out
            }
        }
    }

    fn entry(n: u64) -> Entry {
        Entry::Chunk { id: Cipher::Plain.chunk_id(&n.to_le_bytes()), len: 4096 }
    }

    proptest! {
        #[test]
        fn lists_read_back(kinds in prop::collection::vec(0..10_u64, 0..3000)) {
            let entries: Vec<Entry> = kinds.iter().enumerate()
                .map(|(n, kind)| if *kind < 2 { Entry::Zeros { len: 4096 } } else { entry(n as u64 / 3 * kind) }).collect();
            let (stream, nodes) = build(&entries);
            let back = read(&stream, &nodes);
            prop_assert_eq!(stream.len, entries.iter().map(Entry::len).sum::<u64>());
            let chunks = |list: &[Entry]| list.iter().filter(|e| matches!(e, Entry::Chunk { .. })).copied().collect::<Vec<_>>();
            prop_assert_eq!(chunks(&back), chunks(&entries));
            prop_assert_eq!(back.iter().map(Entry::len).sum::<u64>(), stream.len);
            let text = serde_json::to_string(&stream).unwrap();
            prop_assert!(text.len() < 600);
            prop_assert_eq!(serde_json::from_str::<StreamRef>(&text).unwrap(), stream);
        }

        #[test]
        fn no_bytes_make_the_reader_of_nodes_panic(bytes in prop::collection::vec(any::<u8>(), 0..100), depth in 1..4_u8, len in any::<u64>()) {
            let _ = Node::decode(&bytes, depth, len);
        }
    }

    #[test]
    fn lists_that_differ_in_one_place_share_almost_all_nodes() {
        let entries: Vec<Entry> = (0..20_000).map(entry).collect();
        let (stream, nodes) = build(&entries);
        assert!(matches!(stream.root, Root::Tree { depth, .. } if depth > 2));
        let mut shifted = entries.clone();
        shifted.insert(7000, entry(1_000_000));
        let (_, others) = build(&shifted);
        let fresh = others.keys().filter(|id| !nodes.contains_key(*id)).count();
        assert!(fresh <= 8, "{fresh} of {} nodes are new", others.len());
        assert!(nodes.values().map(Bytes::len).sum::<usize>() < 20_000 * 38);
    }

    #[test]
    fn impossible_references_are_refused() {
        let id = ChunkId([1; 32]);
        let one = |root, len| StreamRef { len, root };
        for wrong in [
            one(Root::Entries(vec![Entry::Chunk { id, len: 5 }]), 6),
            one(Root::Entries(vec![Entry::Zeros { len: u64::MAX }, Entry::Zeros { len: 1 }]), 0),
            one(Root::Entries(vec![Entry::Chunk { id, len: u64::MAX }]), u64::MAX),
            one(Root::Tree { id, node_len: 1 << 40, depth: 1 }, 6),
            one(Root::Tree { id, node_len: 100, depth: 0 }, 6),
            one(Root::Tree { id, node_len: 100, depth: 200 }, 6),
        ] {
            assert!(wrong.check().is_err(), "{wrong:?}");
        }
    }
}
