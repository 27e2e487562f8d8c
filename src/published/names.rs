//! Keeps the library's first sight of a peer's name apart from its other calls.
//!
//! Each copy begins by looking the peer's name up in a map that the library does
//! not lock, and a name that is new is put in there: beside another thread's
//! look-up that is a crash, which was seen \[pub\]. So a name is shown to the
//! library while no call can be looking anything up: none begins meanwhile, and
//! those that run have ended or are long past it.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::endpoint::Endpoint;

/// After so long a call is past its look-up, which takes microseconds. A call may
/// block for half a minute, and no new peer should wait for it.
const PAST_LOOK_UP: Duration = Duration::from_secs(1);

/// See the module.
pub(super) struct Names {
    past_look_up: Duration,
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Default)]
struct Inner {
    known: HashSet<Endpoint>,
    /// When each of the calls that run began.
    running: HashMap<u64, Instant>,
    latest: u64,
    /// Whether a name is being shown, or is about to be.
    showing: bool,
}

impl Names {
    pub(super) fn new() -> Self {
        Self::with(PAST_LOOK_UP)
    }

    fn with(past_look_up: Duration) -> Self {
        Self {
            past_look_up,
            inner: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Makes a call about `peer`. If it is the first, `show` comes before it: a
    /// call that has the library look the name up and returns at once. Neither may
    /// panic.
    pub(super) fn call<T>(
        &self,
        peer: Endpoint,
        show: impl FnOnce(),
        call: impl FnOnce() -> T,
    ) -> T {
        let mut inner = self.inner.lock();
        self.changed.wait_while(&mut inner, |inner| inner.showing);
        if !inner.known.contains(&peer) {
            inner.showing = true;
            while let Some(youngest) = inner.running.values().max() {
                let past = *youngest + self.past_look_up;
                if self.changed.wait_until(&mut inner, past).timed_out() {
                    break;
                }
            }
            MutexGuard::unlocked(&mut inner, show);
            inner.known.insert(peer);
            inner.showing = false;
            self.changed.notify_all();
        }
        inner.latest += 1;
        let number = inner.latest;
        inner.running.insert(number, Instant::now());
        let outcome = MutexGuard::unlocked(&mut inner, call);
        inner.running.remove(&number);
        if inner.showing {
            self.changed.notify_all();
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;

    const NEVER: Duration = Duration::from_secs(3600);
    const SOON: Duration = Duration::from_secs(30);

    fn peer(number: usize) -> Endpoint {
        Endpoint::parse(&format!("10.0.0.1:{}", 1000 + number)).expect("a literal")
    }

    #[test]
    fn a_name_is_shown_once_and_beside_no_other_call() {
        const THREADS: usize = 8;
        let names = Names::with(NEVER);
        let [calls, shows, shown, overlaps] = [(); 4].map(|()| AtomicUsize::new(0));
        thread::scope(|scope| {
            for offset in 0..THREADS {
                let (names, calls, shows) = (&names, &calls, &shows);
                let (shown, overlaps) = (&shown, &overlaps);
                scope.spawn(move || {
                    for number in 0..100 {
                        let show = || {
                            shown.fetch_add(1, Ordering::SeqCst);
                            let beside = shows.fetch_add(1, Ordering::SeqCst);
                            thread::yield_now();
                            let running = calls.load(Ordering::SeqCst);
                            overlaps.fetch_add(beside + running, Ordering::SeqCst);
                            shows.fetch_sub(1, Ordering::SeqCst);
                        };
                        let call = || {
                            calls.fetch_add(1, Ordering::SeqCst);
                            overlaps.fetch_add(shows.load(Ordering::SeqCst), Ordering::SeqCst);
                            thread::yield_now();
                            calls.fetch_sub(1, Ordering::SeqCst);
                        };
                        names.call(peer(number + offset % 2), show, call);
                    }
                });
            }
        });
        assert_eq!(overlaps.into_inner(), 0);
        assert_eq!(shown.into_inner(), 101);
    }

    #[test]
    fn a_call_that_blocks_holds_up_neither_known_names_nor_new_ones() {
        let names = Names::with(Duration::from_millis(20));
        names.call(peer(1), || {}, || {});
        let (begun, has_begun) = channel();
        let (end, may_end) = channel::<()>();
        thread::scope(|scope| {
            let names = &names;
            let blocked = scope.spawn(move || {
                let call = || {
                    begun.send(Instant::now()).expect("the test listens");
                    may_end.recv_timeout(SOON).expect("the others are done");
                };
                names.call(peer(2), || {}, call);
            });
            let since = has_begun.recv_timeout(SOON).expect("it begins");
            assert_eq!(names.call(peer(1), || panic!("known"), || 7), 7);
            let mut shown = None;
            names.call(peer(3), || shown = Some(Instant::now()), || {});
            let waited = shown.expect("new").duration_since(since);
            assert!(waited >= Duration::from_millis(20), "{waited:?}");
            end.send(()).expect("it waits");
            blocked.join().expect("no panic");
        });
    }
}
