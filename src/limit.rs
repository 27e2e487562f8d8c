// SPDX-License-Identifier: Apache-2.0
//! One limiter for the log lines that a fault repeats.
//!
//! A peer that is down is met by every submission, and a line for each would
//! bury the log. So one message about one peer is written once a second at most,
//! and says how many were passed over since the last one.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// One line in this time, for each message and peer.
const INTERVAL: Duration = Duration::from_secs(1);
/// More than a cluster has; past it the lines that are silent longest are
/// forgotten, so that made-up peers cannot grow this further.
const MOST_ENTRIES: usize = 4096;

/// See the module. Cheap enough for what went wrong, not for what went well.
#[derive(Debug, Default)]
pub(crate) struct Limiter(Mutex<HashMap<(&'static str, Box<str>), Entry>>);

#[derive(Debug)]
struct Entry {
    last: Instant,
    passed_over: u64,
}

impl Limiter {
    /// Whether to log `message` about `peer` now, and how many times it was passed
    /// over since it was last logged.
    pub(crate) fn admit(&self, message: &'static str, peer: &str) -> Option<u64> {
        self.admit_at(message, peer, Instant::now())
    }

    fn admit_at(&self, message: &'static str, peer: &str, now: Instant) -> Option<u64> {
        let mut entries = self.0.lock();
        let key = (message, Box::from(peer));
        if let Some(entry) = entries.get_mut(&key) {
            if now.saturating_duration_since(entry.last) < INTERVAL {
                entry.passed_over += 1;
                return None;
            }
            entry.last = now;
            return Some(std::mem::take(&mut entry.passed_over));
        }
        if entries.len() >= MOST_ENTRIES {
            // What is not within its second limits nothing any more.
            entries.retain(|_, entry| now.saturating_duration_since(entry.last) < INTERVAL);
            if entries.len() >= MOST_ENTRIES {
                entries.clear();
            }
        }
        let entry = Entry {
            last: now,
            passed_over: 0,
        };
        entries.insert(key, entry);
        Some(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b06_a_message_about_a_peer_is_admitted_once_a_second_with_its_count() {
        let limiter = Limiter::default();
        let begun = Instant::now();
        let after = |ms| begun + Duration::from_millis(ms);
        assert_eq!(limiter.admit_at("down", "a", begun), Some(0));
        for ms in 0..999 {
            assert_eq!(limiter.admit_at("down", "a", after(ms)), None);
        }
        assert_eq!(limiter.admit_at("down", "b", after(5)), Some(0), "a peer");
        assert_eq!(
            limiter.admit_at("refused", "a", after(5)),
            Some(0),
            "a message"
        );
        assert_eq!(limiter.admit_at("down", "a", after(1000)), Some(999));
        assert_eq!(limiter.admit_at("down", "a", after(1001)), None);
        assert_eq!(limiter.admit_at("down", "a", after(2000)), Some(1));
    }

    #[test]
    fn b10_made_up_peers_do_not_grow_it_further() {
        let limiter = Limiter::default();
        let begun = Instant::now();
        for peer in 0..3 * MOST_ENTRIES {
            assert_eq!(limiter.admit_at("down", &peer.to_string(), begun), Some(0));
            assert!(limiter.0.lock().len() <= MOST_ENTRIES);
        }
    }
}
