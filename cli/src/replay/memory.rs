// SPDX-License-Identifier: Apache-2.0
//! Blocks of memory that a library fills and empties behind the compiler's back.

use std::collections::TryReserveError;
use std::sync::atomic::{AtomicU64, Ordering};

use memfabric_transport::Region;

const WORD: usize = size_of::<u64>();

/// What fresh memory holds, so that a block that was never written is not taken
/// for one that was.
const POISON: u64 = 0xdddd_dddd_dddd_dddd;

/// Equal blocks in one range of memory.
///
/// The words are atomic because others write to them while this program holds a
/// reference: the library's worker, and in the target another process. A plain
/// buffer behind a shared reference could be assumed not to change; an atomic
/// may not. Relaxed loads and stores suffice, for what orders them against the
/// copies is the library's answer that a batch is done.
pub struct Memory {
    words: Box<[AtomicU64]>,
    block_bytes: usize,
}

impl Memory {
    /// Bytes from one block to the next: blocks begin at a whole word.
    pub fn stride(block_bytes: usize) -> usize {
        block_bytes.next_multiple_of(WORD)
    }

    /// Bytes that `blocks` blocks take, if they can be counted.
    pub fn size(blocks: usize, block_bytes: usize) -> Option<usize> {
        block_bytes
            .checked_next_multiple_of(WORD)?
            .checked_mul(blocks)
    }

    /// `blocks` blocks, every page of them touched.
    pub fn new(blocks: usize, block_bytes: usize) -> Result<Self, TryReserveError> {
        let count = Self::size(blocks, block_bytes).unwrap_or(usize::MAX) / WORD;
        let mut words = Vec::new();
        words.try_reserve_exact(count)?;
        words.extend(std::iter::repeat_with(|| AtomicU64::new(POISON)).take(count));
        Ok(Self {
            words: words.into_boxed_slice(),
            block_bytes,
        })
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.region().length / Self::stride(self.block_bytes)
    }

    /// The words of block `index`; the last one may be used in part.
    pub fn block(&self, index: usize) -> &[AtomicU64] {
        let words = Self::stride(self.block_bytes) / WORD;
        &self.words[index * words..][..words]
    }

    /// Makes block `index` look as if it was never written.
    pub fn poison(&self, index: usize) {
        for word in self.block(index) {
            word.store(POISON, Ordering::Relaxed);
        }
    }

    /// Where block `index` begins.
    pub fn address(&self, index: usize) -> usize {
        self.region().address + index * Self::stride(self.block_bytes)
    }

    /// All of it, to register.
    pub fn region(&self) -> Region {
        Region {
            address: self.words.as_ptr().expose_provenance(),
            length: self.words.len() * WORD,
        }
    }
}
