// SPDX-License-Identifier: Apache-2.0
//! What is in a block: every byte follows from the block's id.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::{Deserialize, Serialize};

/// An odd number, so that the words of a block are all different.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The contents of blocks of one size.
///
/// Words step from a start that the id is hashed to. It is cheap on purpose:
/// the copies are to be measured, not this.
#[derive(Clone, Copy, Debug)]
pub struct Content {
    block_bytes: usize,
}

/// The first byte of a block that is not what it should be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mismatch {
    /// The block's id.
    pub block: u64,
    /// Its place in the pool.
    pub slot: usize,
    /// Position of the byte in the block.
    pub offset: usize,
    /// What the id says.
    pub expected: u8,
    /// What is there.
    pub got: u8,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            block,
            slot,
            offset,
            expected,
            got,
        } = self;
        write!(
            f,
            "block {block} in slot {slot}: byte {offset} is {got:#04x}, should be {expected:#04x}"
        )
    }
}

impl Content {
    /// Of blocks of `block_bytes`.
    pub fn of(block_bytes: usize) -> Self {
        Self { block_bytes }
    }

    /// Writes block `block` to `words`.
    pub fn fill(self, words: &[AtomicU64], block: u64) {
        let start = start(block);
        for (index, word) in words.iter().enumerate() {
            word.store(word_at(start, index), Relaxed);
        }
    }

    /// Compares every byte of `words`, in memory order, with block `block`.
    pub fn check(self, words: &[AtomicU64], block: u64, slot: usize) -> Result<(), Mismatch> {
        let start = start(block);
        let whole = self.block_bytes / 8;
        let differ = words[..whole]
            .iter()
            .enumerate()
            .fold(0, |differ, (index, word)| {
                differ | (word.load(Relaxed) ^ word_at(start, index))
            });
        if differ == 0 && self.block_bytes.is_multiple_of(8) {
            return Ok(());
        }
        for offset in 0..self.block_bytes {
            let (index, byte) = (offset / 8, offset % 8);
            let expected = word_at(start, index).to_ne_bytes()[byte];
            let got = words[index].load(Relaxed).to_ne_bytes()[byte];
            if got != expected {
                return Err(Mismatch {
                    block,
                    slot,
                    offset,
                    expected,
                    got,
                });
            }
        }
        Ok(())
    }
}

/// The finalizer of splitmix64: ids that are close start far apart.
fn start(block: u64) -> u64 {
    let mut x = block.wrapping_add(STEP);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn word_at(start: u64, index: usize) -> u64 {
    let word = start.wrapping_add(STEP.wrapping_mul(index as u64));
    word ^ (word >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::memory::Memory;

    fn memory(block_bytes: usize) -> Memory {
        Memory::new(3, block_bytes).expect("a few bytes")
    }

    #[test]
    fn what_is_filled_checks_and_no_other_block_does() {
        for block_bytes in [1, 7, 8, 9, 4096, 4099] {
            let memory = memory(block_bytes);
            let content = Content::of(block_bytes);
            content.fill(memory.block(1), 7);
            assert_eq!(content.check(memory.block(1), 7, 1), Ok(()));
            let other = content.check(memory.block(1), 8, 1);
            assert!(other.is_err(), "{block_bytes} bytes: 8 passes for 7");
            let unwritten = content.check(memory.block(2), 7, 2);
            assert!(unwritten.is_err(), "{block_bytes} bytes: poison passes");
        }
    }

    #[test]
    fn every_byte_is_compared_also_in_the_tail() {
        let block_bytes = 19;
        let memory = memory(block_bytes);
        let content = Content::of(block_bytes);
        for offset in 0..24 {
            content.fill(memory.block(0), 5);
            let word = &memory.block(0)[offset / 8];
            let mut bytes = word.load(Relaxed).to_ne_bytes();
            let expected = bytes[offset % 8];
            bytes[offset % 8] ^= 0x40;
            word.store(u64::from_ne_bytes(bytes), Relaxed);
            let outcome = content.check(memory.block(0), 5, 2);
            if offset < block_bytes {
                let mismatch = outcome.expect_err("a byte is wrong");
                assert_eq!((mismatch.offset, mismatch.slot), (offset, 2));
                assert_eq!(mismatch.expected, expected);
                assert_eq!(mismatch.got, expected ^ 0x40);
            } else {
                assert_eq!(outcome, Ok(()), "byte {offset} is not the block's");
            }
        }
    }

    #[test]
    fn a_shifted_copy_does_not_check() {
        let memory = memory(64);
        let content = Content::of(64);
        content.fill(memory.block(0), 5);
        let words: Vec<u64> = memory
            .block(0)
            .iter()
            .map(|word| word.load(Relaxed))
            .collect();
        for (word, value) in memory.block(1)[1..].iter().zip(words) {
            word.store(value, Relaxed);
        }
        assert!(content.check(memory.block(1), 5, 1).is_err());
    }
}
