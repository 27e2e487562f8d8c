// SPDX-License-Identifier: Apache-2.0
//! What the two processes say to each other: one JSON value a line, orders on
//! the target's standard input, answers on its standard output.

use serde::{Deserialize, Serialize};

use super::content::Mismatch;

/// Blocks that one order names, so that a line stays short.
pub const BLOCKS_PER_ORDER: usize = 4096;

/// From the initiator.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// Compare these blocks where they are.
    Verify {
        /// Number of the pool.
        pool: usize,
        /// Ids with their slots.
        blocks: Vec<(u64, usize)>,
    },
    /// Answer [`Answer::Verified`]. Nothing moves any more, and the initiator
    /// leaves first.
    Sum,
    /// Tear down, answer [`Answer::Left`] and exit.
    Leave,
}

/// From the target.
#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    /// The pools are registered.
    Ready {
        /// `ip:port` of the target.
        endpoint: String,
        /// Where each pool begins.
        pools: Vec<usize>,
    },
    /// There will be no pools.
    Refused(String),
    /// The sum of all comparisons.
    Verified(Verified),
    /// The transport is down.
    Left {
        /// Contract violations that the emulator counted in the target.
        violations: Vec<String>,
    },
}

/// What the target found in its pools.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Verified {
    /// Blocks compared.
    pub blocks: u64,
    /// Blocks that are not what they should be.
    pub mismatches: u64,
    /// The first of them.
    pub first_mismatches: Vec<Mismatch>,
    /// Resident memory of the target, pools included.
    pub resident_bytes: u64,
}
