// SPDX-License-Identifier: Apache-2.0
//! Which block is in which slot of the target's pool.

use std::num::NonZeroUsize;

use lru::LruCache;

/// What to do about a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// It is in this slot: read it.
    Read(usize),
    /// It is not in the pool, and this slot is free for it: write it.
    Write(usize),
    /// It is being written: it can be read once that is done.
    BeingWritten,
    /// Every slot has a transfer in flight.
    Full,
}

/// The pool as the initiator sees it: least recently used blocks leave first.
///
/// A claimed block is pinned until it is released, and the slot of a pinned
/// block is never given to another one. Use is what counts as recent, not
/// completion, so that what is evicted does not depend on timing.
#[derive(Debug)]
pub struct Pool {
    blocks: LruCache<u64, Resident>,
    free: Vec<usize>,
}

#[derive(Debug)]
struct Resident {
    slot: usize,
    pins: usize,
    being_written: bool,
}

impl Pool {
    /// An empty pool.
    pub fn new(slots: NonZeroUsize) -> Self {
        Self {
            blocks: LruCache::new(slots),
            free: (0..slots.get()).rev().collect(),
        }
    }

    /// Pins `block` where it is, or a slot for it.
    pub fn claim(&mut self, block: u64) -> Claim {
        if let Some(resident) = self.blocks.get_mut(&block) {
            if resident.being_written {
                return Claim::BeingWritten;
            }
            resident.pins += 1;
            return Claim::Read(resident.slot);
        }
        let Some(slot) = self.free.pop().or_else(|| self.evict()) else {
            return Claim::Full;
        };
        let resident = Resident {
            slot,
            pins: 1,
            being_written: true,
        };
        self.blocks.put(block, resident);
        Claim::Write(slot)
    }

    fn evict(&mut self) -> Option<usize> {
        let mut oldest_first = self.blocks.iter().rev();
        let (block, _) = oldest_first.find(|(_, resident)| resident.pins == 0)?;
        let block = *block;
        self.blocks.pop(&block).map(|resident| resident.slot)
    }

    /// Takes one claim back. A block whose slot does not hold it (`intact` is
    /// false: a write that failed or was never made) is forgotten.
    pub fn release(&mut self, block: u64, intact: bool) {
        let Some(resident) = self.blocks.peek_mut(&block) else {
            return;
        };
        resident.pins -= 1;
        resident.being_written = false;
        if !intact {
            let slot = resident.slot;
            self.blocks.pop(&block);
            self.free.push(slot);
        }
    }

    /// Every block in the pool with its slot.
    pub fn residents(&self) -> impl Iterator<Item = (u64, usize)> {
        let residents = self.blocks.iter();
        residents.map(|(block, resident)| (*block, resident.slot))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(slots: usize) -> Pool {
        Pool::new(NonZeroUsize::new(slots).expect("not empty"))
    }

    fn write(pool: &mut Pool, block: u64) -> usize {
        match pool.claim(block) {
            Claim::Write(slot) => {
                pool.release(block, true);
                slot
            }
            other => panic!("block {block}: {other:?}"),
        }
    }

    #[test]
    fn the_least_recently_used_block_is_evicted() {
        let mut pool = pool(2);
        let one = write(&mut pool, 1);
        let two = write(&mut pool, 2);
        assert_ne!(one, two);
        assert_eq!(pool.claim(1), Claim::Read(one));
        pool.release(1, true);
        assert_eq!(write(&mut pool, 3), two, "2 was used before 1");
        assert_eq!(pool.claim(1), Claim::Read(one));
        assert!(pool.residents().all(|(block, _)| block != 2));
    }

    #[test]
    fn a_slot_in_flight_is_given_to_nobody() {
        let mut pool = pool(2);
        let one = write(&mut pool, 1);
        assert_eq!(pool.claim(1), Claim::Read(one));
        let Claim::Write(two) = pool.claim(2) else {
            panic!("a slot is free");
        };
        assert_eq!(pool.claim(3), Claim::Full);
        pool.release(2, true);
        assert_eq!(pool.claim(3), Claim::Write(two), "1 is older but pinned");
    }

    #[test]
    fn a_block_is_read_only_after_its_write() {
        let mut pool = pool(2);
        let Claim::Write(slot) = pool.claim(1) else {
            panic!("the pool is empty");
        };
        assert_eq!(pool.claim(1), Claim::BeingWritten);
        pool.release(1, true);
        assert_eq!(pool.claim(1), Claim::Read(slot));
        assert_eq!(pool.claim(1), Claim::Read(slot), "two reads at a time");
        pool.release(1, true);
        assert_eq!(pool.claim(2), Claim::Write(1 - slot));
        assert_eq!(pool.claim(3), Claim::Full, "one of the reads is in flight");
    }

    #[test]
    fn a_failed_write_leaves_no_block_behind() {
        let mut pool = pool(1);
        assert_eq!(pool.claim(1), Claim::Write(0));
        pool.release(1, false);
        assert_eq!(pool.residents().count(), 0);
        assert_eq!(pool.claim(1), Claim::Write(0));
    }
}
