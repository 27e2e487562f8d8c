// SPDX-License-Identifier: Apache-2.0
//! Registered ranges that are known to be the host's memory.
//!
//! The engine asks where memory is with every request, and CANN's answer costs
//! more than the rest of a submission. What was the host's memory when it was
//! registered is so until it is removed, so it needs no question.
//!
//! The table is the process's, as addresses are. An address that it does not
//! know is CANN's to answer; so whatever is in doubt is taken out.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

use crate::region::Region;

static RANGES: RwLock<BTreeMap<usize, Range>> = RwLock::new(BTreeMap::new());

/// How often something was taken out: a thread's latest hit is good until then.
/// Changed and taken down under the table's lock, which orders the two; compared
/// without it, for who was told of a removal sees its number too.
static REMOVALS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The latest hit of this thread. Most requests of a thread are in one range,
    /// and then need no lock.
    static LATEST: Cell<Hit> = const {
        Cell::new(Hit {
            removals: 0,
            start: 0,
            end: 0,
        })
    };
}

#[derive(Clone, Copy)]
struct Hit {
    removals: u64,
    start: usize,
    end: usize,
}

#[derive(Clone, Copy)]
struct Range {
    end: usize,
    /// Whose registration it is.
    owner: usize,
}

/// Adds a range that was registered by `owner`, which is any number that is one
/// transport's own. One address has one range, the latest.
pub(crate) fn add(region: Region, owner: usize) {
    let end = region.address.saturating_add(region.length);
    let mut ranges = RANGES.write();
    let before = ranges.insert(region.address, Range { end, owner });
    if before.is_some_and(|before| before.end > end) {
        REMOVALS.fetch_add(1, Ordering::Relaxed);
    }
}

/// Takes the range that starts at `address` out, however often it was added.
pub(crate) fn remove(address: usize) {
    let mut ranges = RANGES.write();
    if ranges.remove(&address).is_some() {
        REMOVALS.fetch_add(1, Ordering::Relaxed);
    }
}

/// Takes all ranges of `owner` out.
pub(crate) fn forget(owner: usize) {
    let mut ranges = RANGES.write();
    ranges.retain(|_, range| range.owner != owner);
    REMOVALS.fetch_add(1, Ordering::Relaxed);
}

/// Whether `address` is in a range that was added.
///
/// Of ranges that overlap, the one that begins last decides; a "no" is always
/// allowed.
pub(crate) fn holds(address: usize) -> bool {
    let latest = LATEST.get();
    if latest.removals == REMOVALS.load(Ordering::Relaxed)
        && (latest.start..latest.end).contains(&address)
    {
        return true;
    }
    let ranges = RANGES.read();
    let found = ranges.range(..=address).next_back();
    let Some((&start, range)) = found.filter(|(_, range)| address < range.end) else {
        return false;
    };
    LATEST.set(Hit {
        removals: REMOVALS.load(Ordering::Relaxed),
        start,
        end: range.end,
    });
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(address: usize, length: usize) -> Region {
        Region { address, length }
    }

    // Each test has addresses and owners of its own, for the table is one.

    #[test]
    fn a11_a_range_is_known_from_its_registration_to_its_removal() {
        assert!(!holds(0x1000));
        add(region(0x1000, 0x100), 1);
        for address in [0x1000, 0x10ff] {
            assert!(holds(address), "{address:#x}");
        }
        for address in [0xfff, 0x1100, usize::MAX] {
            assert!(!holds(address), "{address:#x}");
        }
        add(region(0x1000, 0x100), 1);
        remove(0x1000);
        assert!(!holds(0x1000), "one removal is enough to ask again");
        remove(0x1000);
    }

    #[test]
    fn a11_a_removal_reaches_every_thread() {
        add(region(0x2000, 0x100), 2);
        let (asked, removed) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert!(holds(0x2001));
                asked.wait();
                removed.wait();
                assert!(!holds(0x2001), "answered from what the thread had kept");
            });
            asked.wait();
            remove(0x2000);
            removed.wait();
        });
    }

    #[test]
    fn a11_a_shorter_range_at_one_address_replaces_the_longer_one() {
        add(region(0x3000, 0x100), 3);
        assert!(holds(0x30ff));
        add(region(0x3000, 0x10), 3);
        assert!(!holds(0x30ff));
        assert!(holds(0x300f));
        remove(0x3000);
    }

    #[test]
    fn a11_the_end_of_a_transport_takes_its_ranges_out_alone() {
        add(region(0x4000, 0x100), 4);
        add(region(0x4100, 0x100), 5);
        assert!(holds(0x4000) && holds(0x4100));
        forget(4);
        assert!(!holds(0x4000));
        assert!(holds(0x4100));
        forget(5);
        assert!(!holds(0x4100));
    }
}
