// SPDX-License-Identifier: Apache-2.0
//! A trace with the shape of the published conversation trace.

use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, LogNormal};
use rand_pcg::Pcg64Mcg;

/// Of the published trace: the median length of a request in blocks, the spread
/// that puts the 95th percentile at 78, and the longest that its model takes.
const MEDIAN_BLOCKS: f64 = 14.0;
const SPREAD: f64 = 1.044;
const LONGEST: usize = 250;

/// Conversations that a request may go on with.
const CONVERSATIONS: usize = 256;

/// How often a request goes on with one. It then repeats as much of it as fits,
/// 46 % of a request on average, which comes to 37 % of all blocks.
const CONTINUED: f64 = 0.80;

const SEED: u64 = 0x6d65_6d66_6162_7269;

/// Requests without end, always the same ones.
///
/// A request either begins a conversation or repeats the beginning of one and
/// adds blocks of its own, which is what makes prefixes worth caching.
pub struct Synthetic {
    random: Pcg64Mcg,
    lengths: LogNormal<f64>,
    conversations: Vec<Vec<u64>>,
    next_block: u64,
}

impl Synthetic {
    /// From the beginning.
    pub fn new() -> Self {
        let lengths = LogNormal::new(MEDIAN_BLOCKS.ln(), SPREAD);
        Self {
            random: Pcg64Mcg::seed_from_u64(SEED),
            lengths: lengths.expect("the spread is finite and positive"),
            conversations: Vec::with_capacity(CONVERSATIONS),
            next_block: 0,
        }
    }
}

impl Iterator for Synthetic {
    type Item = Vec<u64>;

    fn next(&mut self) -> Option<Vec<u64>> {
        let length = self.lengths.sample(&mut self.random).round() as usize;
        let length = length.clamp(1, LONGEST);
        let mut blocks = Vec::with_capacity(length);
        let known = self.conversations.len();
        let place = if known > 0 && self.random.random_bool(CONTINUED) {
            let place = self.random.random_range(0..known);
            blocks.extend(self.conversations[place].iter().take(length));
            place
        } else if known < CONVERSATIONS {
            self.conversations.push(Vec::new());
            known
        } else {
            self.random.random_range(0..known)
        };
        let own = (length - blocks.len()) as u64;
        blocks.extend(self.next_block..self.next_block + own);
        self.next_block += own;
        self.conversations[place].clone_from(&blocks);
        Some(blocks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn it_has_the_published_traces_shape() {
        // As many as by default, and as many as the published one has.
        for requests in [1000, 12_000] {
            let trace: Vec<_> = Synthetic::new().take(requests).collect();
            let mut lengths: Vec<_> = trace.iter().map(Vec::len).collect();
            lengths.sort_unstable();
            let median = lengths[requests / 2];
            let p95 = lengths[requests * 95 / 100];
            assert!((13..=15).contains(&median), "median {median}");
            assert!((70..=86).contains(&p95), "95th percentile {p95}");

            let mut seen = HashSet::new();
            let total = trace.iter().flatten().count();
            let fresh = trace
                .iter()
                .flatten()
                .filter(|id| seen.insert(**id))
                .count();
            let repeated = 100.0 * (total - fresh) as f64 / total as f64;
            assert!(
                (33.0..=41.0).contains(&repeated),
                "{repeated} % of {total} blocks repeated"
            );
        }
    }

    #[test]
    fn it_is_the_same_every_time_and_repeats_no_block_in_a_request() {
        let first: Vec<_> = Synthetic::new().take(500).collect();
        let second: Vec<_> = Synthetic::new().take(500).collect();
        assert_eq!(first, second);
        for request in &first {
            let distinct: HashSet<_> = request.iter().collect();
            assert_eq!(distinct.len(), request.len());
        }
    }
}
