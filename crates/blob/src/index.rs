//! Which chunk lies where: the index in memory.
//!
//! It takes about 60 to 110 bytes of memory for each chunk, so about 2 % of a repository that has nothing but single
//! pages, and far less for files.

use crate::{
    block::{BlockInfo, Member, digest},
    envelope::HEADER,
    id::{ChunkId, PackId},
    pack::Trailer,
};
use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    sync::Arc,
};

/// A pack, as long as this process lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct PackNo(pub(crate) u32);

/// When something was last written or used again, in beginnings of marks and writers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Epoch(pub(crate) u32);

/// Where a chunk lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) pack: PackNo,
    pub(crate) block: u32,
    /// Within the plain block.
    pub(crate) offset: u32,
    pub(crate) len: u32,
    pub(crate) touched: Epoch,
}

/// A block, and where it lies in its pack.
#[derive(Debug, Clone)]
pub(crate) struct BlockAt {
    pub(crate) info: BlockInfo,
    pub(crate) at: u64,
    pub(crate) chunks: u32,
    /// The hash of its members, which encryption binds in; empty in a plain repository.
    pub(crate) digest: [u8; 32],
}

/// A pack that is in the store.
#[derive(Debug, Clone)]
pub(crate) struct PackInfo {
    pub(crate) id: PackId,
    pub(crate) size: u64,
    pub(crate) blocks: Arc<[BlockAt]>,
}

#[derive(Debug, Default)]
pub(crate) struct Index {
    pub(crate) chunks: HashMap<ChunkId, Place>,
    packs: HashMap<PackNo, PackInfo>,
    by_id: HashMap<PackId, PackNo>,
    next: u32,
}

impl Index {
    /// Takes a stored pack in. Chunks that are known keep their place, unless it is to be replaced.
    pub(crate) fn add(&mut self, id: PackId, size: u64, trailer: &Trailer, keyed: bool, epoch: Epoch, replace: bool) -> PackNo {
        let number = match self.by_id.get(&id) {
            Some(number) => *number,
            None => {
                let number = PackNo(self.next);
                self.next += 1;
                self.by_id.insert(id, number);
                number
            }
        };
        let mut at = HEADER as u64;
        let mut blocks = Vec::with_capacity(trailer.blocks.len());
        for (block, (info, members)) in trailer.blocks.iter().enumerate() {
            let digest = if keyed { digest(members) } else { [0; 32] };
            blocks.push(BlockAt { info: info.clone(), at, chunks: members.len() as u32, digest });
            at += u64::from(info.stored);
            self.add_members(number, block as u32, members, epoch, replace);
        }
        self.packs.insert(number, PackInfo { id, size, blocks: blocks.into() });
        number
    }

    fn add_members(&mut self, pack: PackNo, block: u32, members: &[Member], epoch: Epoch, replace: bool) {
        let mut offset = 0;
        for member in members {
            let place = Place { pack, block, offset, len: member.len, touched: epoch };
            offset += member.len;
            match self.chunks.entry(member.id) {
                Entry::Vacant(vacant) => {
                    vacant.insert(place);
                }
                Entry::Occupied(mut known) if replace => {
                    let touched = known.get().touched.max(epoch);
                    known.insert(Place { touched, ..place });
                }
                Entry::Occupied(_) => {}
            }
        }
    }

    pub(crate) fn pack(&self, number: PackNo) -> Option<&PackInfo> {
        self.packs.get(&number)
    }

    pub(crate) fn packs(&self) -> impl Iterator<Item = (PackNo, &PackInfo)> {
        self.packs.iter().map(|(number, info)| (*number, info))
    }

    pub(crate) fn has_pack(&self, id: &PackId) -> bool {
        self.by_id.contains_key(id)
    }

    /// Packs are gone, with all chunks whose place is in them. Several at once: this looks at every chunk.
    pub(crate) fn remove_packs(&mut self, numbers: &HashSet<PackNo>) {
        for number in numbers {
            if let Some(info) = self.packs.remove(number) {
                self.by_id.remove(&info.id);
            }
        }
        self.chunks.retain(|_, place| !numbers.contains(&place.pack));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trailer(ids: &[u8]) -> Trailer {
        let members: Vec<Member> = ids.iter().map(|n| Member { id: ChunkId([*n; 32]), len: 10 }).collect();
        let info = BlockInfo { stored: 7, plain: 10 * ids.len() as u32, flags: 0, crc: 0 };
        Trailer { blocks: vec![(info.clone(), members.clone()), (info, Vec::new())] }
    }

    #[test]
    fn a_chunk_keeps_its_place_until_it_is_moved() {
        let mut index = Index::default();
        let one = index.add(PackId([1; 32]), 100, &trailer(&[1, 2]), false, Epoch(1), false);
        let two = index.add(PackId([2; 32]), 100, &trailer(&[2, 3]), false, Epoch(2), false);
        assert_eq!(index.chunks[&ChunkId([2; 32])].pack, one);
        assert_eq!(index.chunks[&ChunkId([2; 32])].offset, 10);
        assert_eq!(index.pack(two).unwrap().blocks[1].at, HEADER as u64 + 7);
        let three = index.add(PackId([3; 32]), 100, &trailer(&[2]), false, Epoch(0), true);
        let moved = index.chunks[&ChunkId([2; 32])];
        assert_eq!((moved.pack, moved.touched), (three, Epoch(1)));
        index.remove_packs(&HashSet::from([one]));
        assert!(!index.chunks.contains_key(&ChunkId([1; 32])) && index.chunks.contains_key(&ChunkId([2; 32])));
        assert!(!index.has_pack(&PackId([1; 32])) && index.has_pack(&PackId([2; 32])));
    }
}
