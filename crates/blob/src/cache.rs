//! Unpacked blocks that may be wanted again soon: those that several chunks share.

use crate::index::PackNo;
use bytes::Bytes;
use std::{
    collections::{HashMap, VecDeque},
    sync::{Mutex, PoisonError},
};

/// Most bytes that are kept.
const LIMIT: usize = 32 << 20;

/// A block of a pack.
pub(crate) type BlockKey = (PackNo, u32);

#[derive(Debug, Default)]
pub(crate) struct BlockCache {
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    blocks: HashMap<BlockKey, Bytes>,
    /// Oldest first.
    order: VecDeque<BlockKey>,
    bytes: usize,
}

impl BlockCache {
    pub(crate) fn get(&self, key: BlockKey) -> Option<Bytes> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).blocks.get(&key).cloned()
    }

    pub(crate) fn put(&self, key: BlockKey, block: Bytes) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.bytes += block.len();
        if let Some(old) = kept.blocks.insert(key, block) {
            kept.bytes -= old.len();
        } else {
            kept.order.push_back(key);
        }
        while kept.bytes > LIMIT {
            let Some(oldest) = kept.order.pop_front() else { break };
            if let Some(block) = kept.blocks.remove(&oldest) {
                kept.bytes -= block.len();
            }
        }
    }
}
