// SPDX-License-Identifier: Apache-2.0
//! When a thread reads a peer's cached description again.
//!
//! A peer that restarts listens on a new port, while its old description may
//! stay cached in the engine, per thread, for an hour. Whatever suggests that a
//! peer is gone (a refused submission, a failed batch, the library's peer-down
//! callback) marks its endpoint here; each submitting thread drops what it has
//! cached about an endpoint that was marked since it last looked. A description
//! without an endpoint is read again as well, for the peer may have one by now.
//!
//! Reading a description is a call to the peer or to the metadata store, which
//! the engine may make under a lock of its own. So a thread reads that of one
//! peer again at most once in [`INTERVAL`], whatever the reason. A mark waits
//! until then.

use std::cell::RefCell;
use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};

/// More endpoints than a cluster has; a hostile library cannot grow it further.
const MAX_ENDPOINTS: usize = 4096;
/// More peers than a thread has.
const MAX_SEGMENTS: usize = 4096;
/// A thread reads the description of one peer again at most once in this time.
const INTERVAL: Duration = Duration::from_secs(1);

thread_local! {
    /// What this thread knows of the segments of each transport. Only filled
    /// once there is a mark at all, or a peer without an endpoint.
    static SEGMENTS: RefCell<Segments> = RefCell::default();
}

#[derive(Default)]
struct Segments(HashMap<(u64, u64), Segment>);

#[derive(Default)]
struct Segment {
    /// Number of the latest mark when this thread last resolved the segment.
    seen: u64,
    /// When its description was last read again.
    read_again: Option<Instant>,
}

impl Segments {
    /// The entry of one segment of one transport.
    ///
    /// A table that is full is emptied: a forgotten peer costs one needless
    /// read. What limits a read right now is kept if there is room for it.
    fn entry(&mut self, transport: u64, segment: u64, now: impl Fn() -> Instant) -> &mut Segment {
        let key = (transport, segment);
        if self.0.len() >= MAX_SEGMENTS && !self.0.contains_key(&key) {
            let now = now();
            self.0.retain(|_, known| !known.may_read_again(now));
            if self.0.len() >= MAX_SEGMENTS {
                self.0.clear();
            }
        }
        self.0.entry(key).or_default()
    }
}

impl Segment {
    fn may_read_again(&self, now: Instant) -> bool {
        self.read_again
            .is_none_or(|last| now.saturating_duration_since(last) >= INTERVAL)
    }

    /// Whether the description may be read again now; if so, that is taken for
    /// done, and with it every mark up to `latest`.
    fn admit(&mut self, now: Instant, latest: u64) -> bool {
        let admitted = self.may_read_again(now);
        if admitted {
            self.read_again = Some(now);
            self.seen = latest;
        }
        admitted
    }
}

/// Runs `ask` on this thread's segments. At the thread's end they are gone: then
/// everything is read again, which is slow but right.
fn of_this_thread(ask: impl FnOnce(&mut Segments) -> bool) -> bool {
    SEGMENTS
        .try_with(|segments| ask(&mut segments.borrow_mut()))
        .unwrap_or(true)
}

/// The marks. Its lock is never held across a vendor call or a log line, so
/// that the peer-down callback may take it inside any vendor call.
#[derive(Debug, Default)]
pub(crate) struct Stale {
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

impl Stale {
    /// Marks `endpoint`.
    pub(crate) fn mark(&self, endpoint: &str) {
        let mut marks = self.marks.lock();
        let number = self.latest.load(Ordering::Relaxed) + 1;
        if marks.by_endpoint.len() >= MAX_ENDPOINTS && !marks.by_endpoint.contains_key(endpoint) {
            marks.by_endpoint.clear();
            marks.discarded = number;
        }
        marks.by_endpoint.insert(endpoint.into(), number);
        // Under the lock: a caller that saw this number and then takes the lock
        // finds the mark, so the number needs no order of its own.
        self.latest.store(number, Ordering::Relaxed);
    }

    /// Whether what this thread has cached about `segment` must be dropped before
    /// its `endpoint` is used again. True once for each mark and thread, as soon
    /// as a re-read is admitted; in the usual case, that nothing was ever marked,
    /// one load.
    pub(crate) fn must_refresh(&self, transport: u64, segment: u64, endpoint: &[u8]) -> bool {
        self.latest() != 0 && self.must_refresh_at(transport, segment, endpoint, Instant::now)
    }

    #[cold]
    fn must_refresh_at(
        &self,
        transport: u64,
        segment: u64,
        endpoint: &[u8],
        now: impl Fn() -> Instant,
    ) -> bool {
        let latest = self.latest();
        of_this_thread(|segments| {
            let known = segments.entry(transport, segment, &now);
            if known.seen >= latest {
                return false;
            }
            if !self.marked_since(&String::from_utf8_lossy(endpoint), known.seen) {
                known.seen = latest;
                return false;
            }
            known.admit(now(), latest)
        })
    }

    /// Whether this thread may read the description of `segment` again because it
    /// lacks something; if so, that is taken for done.
    pub(crate) fn may_reread(&self, transport: u64, segment: u64) -> bool {
        self.may_reread_at(transport, segment, Instant::now)
    }

    fn may_reread_at(&self, transport: u64, segment: u64, now: impl Fn() -> Instant) -> bool {
        let latest = self.latest();
        of_this_thread(|segments| {
            let known = segments.entry(transport, segment, &now);
            known.admit(now(), latest)
        })
    }

    /// Number of the latest mark: unchanged since a caller last looked means
    /// that nothing needs to be dropped, which is the usual case and one load.
    pub(crate) fn latest(&self) -> u64 {
        self.latest.load(Ordering::Relaxed)
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
        let stale = Stale::default();
        assert_eq!(stale.latest(), 0);
        stale.mark("10.0.0.1:1");
        assert!(stale.marked_since("10.0.0.1:1", 0));
        assert!(!stale.marked_since("10.0.0.2:1", 0));
        let seen = stale.latest();
        assert!(!stale.marked_since("10.0.0.1:1", seen));
        stale.mark("10.0.0.1:1");
        assert!(stale.marked_since("10.0.0.1:1", seen));
    }

    #[test]
    fn each_thread_refreshes_a_marked_segment_once() {
        let stale = Stale::default();
        assert!(!stale.must_refresh(1, 7, b"10.0.0.1:1"));
        stale.mark("10.0.0.1:1");
        let refreshes = || {
            (
                stale.must_refresh(1, 8, b"10.0.0.2:1"),
                stale.must_refresh(1, 7, b"10.0.0.1:1"),
                stale.must_refresh(1, 7, b"10.0.0.1:1"),
                stale.must_refresh(2, 7, b"10.0.0.1:1"),
            )
        };
        assert_eq!(refreshes(), (false, true, false, true));
        std::thread::scope(|scope| {
            let other = scope.spawn(refreshes).join().expect("no panic");
            assert_eq!(other, (false, true, false, true));
        });
        stale.mark("10.0.0.1:1");
        let later = || Instant::now() + INTERVAL;
        assert!(
            stale.must_refresh_at(1, 7, b"10.0.0.1:1", later),
            "marked again"
        );
    }

    /// `ms` after `begun`, as a clock.
    fn clock(begun: Instant, ms: u64) -> impl Fn() -> Instant {
        move || begun + Duration::from_millis(ms)
    }

    #[test]
    fn b05_a_description_is_read_again_once_a_second_whatever_the_reason() {
        let stale = Stale::default();
        let begun = Instant::now();
        let lacks = |segment, ms| stale.may_reread_at(1, segment, clock(begun, ms));
        let suspect =
            |segment, ms| stale.must_refresh_at(1, segment, b"10.0.0.1:1", clock(begun, ms));
        assert!(lacks(7, 0));
        for ms in 0..1000 {
            assert!(!lacks(7, ms), "after {ms} ms");
            stale.mark("10.0.0.1:1");
            assert!(!suspect(7, ms), "after {ms} ms");
        }
        assert!(lacks(8, 5), "another peer has its own second");
        assert!(suspect(7, 1000), "the marks have waited");
        assert!(!suspect(7, 2000), "and were served");
        assert!(lacks(7, 2000));
    }

    #[test]
    fn b05_a_thousand_marks_are_a_few_reads_and_the_last_one_is_not_lost() {
        let stale = Stale::default();
        let begun = Instant::now();
        let mut reads = 0;
        for ms in 0..1000 {
            stale.mark("10.0.0.1:1");
            reads += u32::from(stale.must_refresh_at(1, 7, b"10.0.0.1:1", clock(begun, ms)));
        }
        assert_eq!(reads, 1);
        // Nothing is marked after that, yet the peer is read again.
        assert!(stale.must_refresh_at(1, 7, b"10.0.0.1:1", clock(begun, 1000)));
        stale.mark("10.0.0.1:1");
        let later = clock(begun, 60_000);
        assert!(
            stale.must_refresh_at(1, 7, b"10.0.0.1:1", later),
            "at once if the last read is long ago"
        );
    }

    #[test]
    fn b09_what_a_thread_knows_of_segments_is_bounded() {
        let stale = Stale::default();
        stale.mark("10.0.0.1:1");
        let begun = Instant::now();
        for segment in 0..3 * MAX_SEGMENTS as u64 {
            let _ = stale.must_refresh_at(1, segment, b"10.0.0.2:1", clock(begun, 0));
            let _ = stale.may_reread_at(2, segment, clock(begun, segment));
            SEGMENTS.with_borrow(|segments| assert!(segments.0.len() <= MAX_SEGMENTS));
        }
        let latest = 3 * MAX_SEGMENTS as u64 - 1;
        assert!(
            !stale.may_reread_at(2, latest, clock(begun, latest)),
            "the limit of the latest peer is forgotten"
        );
        assert!(stale.must_refresh_at(1, 1, b"10.0.0.1:1", clock(begun, 0)));
    }

    #[test]
    fn a17_at_a_threads_end_every_description_is_read_again() {
        struct AtTheEnd;
        impl Drop for AtTheEnd {
            fn drop(&mut self) {
                let stale = Stale::default();
                stale.mark("10.0.0.1:1");
                // SEGMENTS may be there or not; neither panics.
                let _ = stale.must_refresh(1, 7, b"10.0.0.1:1");
                let _ = stale.may_reread(1, 7);
            }
        }
        thread_local! {
            static BEFORE: AtTheEnd = const { AtTheEnd };
            static AFTER: AtTheEnd = const { AtTheEnd };
        }
        std::thread::spawn(|| {
            BEFORE.with(|_| {});
            let _ = Stale::default().may_reread(1, 7);
            AFTER.with(|_| {});
        })
        .join()
        .expect("no panic at the thread's end");
    }

    #[test]
    fn discarded_marks_make_everybody_suspect_rather_than_nobody() {
        let stale = Stale::default();
        for port in 0..=MAX_ENDPOINTS {
            stale.mark(&format!("10.0.0.1:{port}"));
        }
        assert!(stale.marks.lock().by_endpoint.len() <= MAX_ENDPOINTS);
        assert!(stale.marked_since("10.0.0.1:0", 0));
        assert!(!stale.marked_since("10.0.0.1:0", stale.latest()));
    }
}
