//! Endpoints whose cached description must be read anew before its next use.
//!
//! A peer that restarts listens on a new port, while its old description may
//! stay cached in the engine, per thread, for an hour. Whatever suggests that a
//! peer is gone (a refused submission, a failed batch, the library's peer-down
//! callback) marks its endpoint here; each submitting thread drops what it has
//! cached about an endpoint that was marked since it last looked.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// More endpoints than a cluster has; a hostile library cannot grow it further.
const MAX_ENDPOINTS: usize = 4096;

thread_local! {
    /// For each transport and segment, the number of the latest mark when this
    /// thread last resolved it. Only filled once there is a mark at all.
    static RESOLVED: RefCell<HashMap<(u64, u64), u64>> = RefCell::default();
}

/// The marks. Its lock is never held across a vendor call or a log line, so
/// that the peer-down callback may take it inside any vendor call.
#[derive(Debug, Default)]
pub(crate) struct Suspects {
    /// Number of the latest mark; 0 before the first.
    latest: AtomicU64,
    marks: Mutex<Marks>,
}

#[derive(Debug, Default)]
struct Marks {
    by_endpoint: HashMap<Box<str>, u64>,
    /// Every endpoint counts as marked up to here: marks that were discarded.
    discarded: u64,
}

impl Suspects {
    /// Marks `endpoint`.
    pub(crate) fn mark(&self, endpoint: &str) {
        let mut marks = self.marks.lock();
        let number = self.latest.load(Ordering::Relaxed) + 1;
        if marks.by_endpoint.len() >= MAX_ENDPOINTS && !marks.by_endpoint.contains_key(endpoint) {
            marks.by_endpoint.clear();
            marks.discarded = number;
        }
        marks.by_endpoint.insert(endpoint.into(), number);
        self.latest.store(number, Ordering::Release);
    }

    /// Whether what this thread has cached about `segment` must be dropped before
    /// its `endpoint` is used again. True once for each mark and thread; in the
    /// usual case, that nothing was ever marked, one load.
    pub(crate) fn must_refresh(&self, transport: u64, segment: u64, endpoint: &str) -> bool {
        let latest = self.latest();
        if latest == 0 {
            return false;
        }
        RESOLVED.with_borrow_mut(|resolved| {
            let seen = resolved.entry((transport, segment)).or_insert(0);
            *seen < latest && self.marked_since(endpoint, std::mem::replace(seen, latest))
        })
    }

    /// Number of the latest mark: unchanged since a caller last looked means
    /// that nothing needs to be dropped, which is the usual case and one load.
    pub(crate) fn latest(&self) -> u64 {
        self.latest.load(Ordering::Acquire)
    }

    /// Whether `endpoint` was marked after mark number `seen`.
    pub(crate) fn marked_since(&self, endpoint: &str, seen: u64) -> bool {
        let marks = self.marks.lock();
        let number = marks.by_endpoint.get(endpoint).copied().unwrap_or(0);
        number.max(marks.discarded) > seen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_new_to_each_caller_once() {
        let suspects = Suspects::default();
        assert_eq!(suspects.latest(), 0);
        suspects.mark("10.0.0.1:1");
        assert!(suspects.marked_since("10.0.0.1:1", 0));
        assert!(!suspects.marked_since("10.0.0.2:1", 0));
        let seen = suspects.latest();
        assert!(!suspects.marked_since("10.0.0.1:1", seen));
        suspects.mark("10.0.0.1:1");
        assert!(suspects.marked_since("10.0.0.1:1", seen));
    }

    #[test]
    fn each_thread_refreshes_a_marked_segment_once() {
        let suspects = Suspects::default();
        assert!(!suspects.must_refresh(1, 7, "10.0.0.1:1"));
        suspects.mark("10.0.0.1:1");
        let refreshes = || {
            (
                suspects.must_refresh(1, 8, "10.0.0.2:1"),
                suspects.must_refresh(1, 7, "10.0.0.1:1"),
                suspects.must_refresh(1, 7, "10.0.0.1:1"),
                suspects.must_refresh(2, 7, "10.0.0.1:1"),
            )
        };
        assert_eq!(refreshes(), (false, true, false, true));
        std::thread::scope(|scope| {
            let other = scope.spawn(refreshes).join().expect("no panic");
            assert_eq!(other, (false, true, false, true));
        });
        suspects.mark("10.0.0.1:1");
        assert!(suspects.must_refresh(1, 7, "10.0.0.1:1"), "marked anew");
    }

    #[test]
    fn discarded_marks_make_everybody_suspect_rather_than_nobody() {
        let suspects = Suspects::default();
        for port in 0..=MAX_ENDPOINTS {
            suspects.mark(&format!("10.0.0.1:{port}"));
        }
        assert!(suspects.marks.lock().by_endpoint.len() <= MAX_ENDPOINTS);
        assert!(suspects.marked_since("10.0.0.1:0", 0));
        assert!(!suspects.marked_since("10.0.0.1:0", suspects.latest()));
    }
}
