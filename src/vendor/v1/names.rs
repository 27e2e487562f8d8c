// SPDX-License-Identifier: Apache-2.0
//! Keeps the library's first sight of a peer's name apart from its other calls.
//!
//! Each copy begins by looking the peer's name up in a map that the library does
//! not lock, and a name that is new is put in there: beside another thread's
//! look-up that is a crash, which was seen \[pub\]. So a name is shown to the
//! library while no call can be looking anything up: none begins then, and those
//! that run have ended or are long past it.
//!
//! Whether a call is past its look-up is not guessed from the time that passed,
//! for this process may have been stopped all the while. It is counted: a new name
//! waits in short waits of its own, which a stopped process does not make, and a
//! call that has survived many of them is past.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::endpoint::Endpoint;

/// One wait of a new name.
const TICK: Duration = Duration::from_millis(10);
/// A call that has survived so many of them is past its look-up, which takes
/// microseconds. A call may block for half a minute, and no new peer should wait
/// for that.
const PAST: u32 = 100;
/// More names than a cluster has; a name that was forgotten is shown again.
const MOST_NAMES: usize = 4096;

/// See the module.
pub(super) struct Names {
    tick: Duration,
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Default)]
struct Inner {
    known: HashSet<Endpoint>,
    /// How many ticks each of the calls that run has survived.
    running: HashMap<u64, u32>,
    latest: u64,
    /// Whether some name is waiting to be shown, or is being shown: one at a time.
    introducing: bool,
    /// Whether no call may begin.
    holding: bool,
}

impl Names {
    pub(super) fn new() -> Self {
        Self::with(TICK)
    }

    fn with(tick: Duration) -> Self {
        Self {
            tick,
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
        loop {
            if !inner.known.contains(&peer) {
                if !inner.introducing {
                    self.introduce(&mut inner, peer, show);
                    break;
                }
            } else if !inner.holding {
                break;
            }
            self.changed.wait(&mut inner);
        }
        inner.latest += 1;
        let number = inner.latest;
        inner.running.insert(number, 0);
        let outcome = MutexGuard::unlocked(&mut inner, call);
        inner.running.remove(&number);
        if inner.introducing {
            self.changed.notify_all();
        }
        outcome
    }

    /// Shows `peer` once nothing can be looking a name up.
    fn introduce(&self, inner: &mut MutexGuard<'_, Inner>, peer: Endpoint, show: impl FnOnce()) {
        inner.introducing = true;
        // Calls about known names go on as long as they can: they are held only for
        // what began in this first wait.
        let latest = inner.latest;
        self.outlast(inner, latest);
        inner.holding = true;
        let latest = inner.latest;
        self.outlast(inner, latest);
        MutexGuard::unlocked(inner, show);
        if inner.known.len() == MOST_NAMES {
            inner.known.clear();
        }
        inner.known.insert(peer);
        inner.holding = false;
        inner.introducing = false;
        self.changed.notify_all();
    }

    /// Waits until each call up to number `latest` has ended or is past its
    /// look-up. One that is past stays so, and costs nobody another wait.
    fn outlast(&self, inner: &mut MutexGuard<'_, Inner>, latest: u64) {
        let mut tick = Instant::now() + self.tick;
        loop {
            let mut young = inner.running.iter();
            if !young.any(|(number, ticks)| *number <= latest && *ticks < PAST) {
                return;
            }
            // Calls that end wake this up, and do not make the tick longer.
            if self.changed.wait_until(inner, tick).timed_out() {
                for (number, ticks) in &mut inner.running {
                    // A later one may have begun within this tick.
                    *ticks += u32::from(*number <= latest);
                }
                tick = Instant::now() + self.tick;
            }
        }
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

    impl Names {
        fn until(&self, holds: impl Fn(&Inner) -> bool) {
            let deadline = Instant::now() + SOON;
            while !holds(&self.inner.lock()) {
                assert!(Instant::now() < deadline, "it does not happen");
                thread::yield_now();
            }
        }
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

    /// Runs `meanwhile` while a call about peer 2 blocks.
    fn beside_a_call_that_blocks(names: &Names, meanwhile: impl FnOnce()) {
        let (begun, has_begun) = channel();
        let (end, may_end) = channel::<()>();
        thread::scope(|scope| {
            let blocked = scope.spawn(move || {
                let call = || {
                    begun.send(()).expect("the test listens");
                    may_end.recv_timeout(SOON).expect("the others are done");
                };
                names.call(peer(2), || {}, call);
            });
            has_begun.recv_timeout(SOON).expect("it begins");
            meanwhile();
            end.send(()).expect("it waits");
            blocked.join().expect("no panic");
        });
    }

    #[test]
    fn a_call_that_blocks_holds_up_neither_known_names_nor_new_ones() {
        let names = Names::with(Duration::from_micros(200));
        names.call(peer(1), || {}, || {});
        beside_a_call_that_blocks(&names, || {
            assert_eq!(names.call(peer(1), || panic!("known"), || 7), 7);
            let since = Instant::now();
            let mut shown = None;
            names.call(peer(3), || shown = Some(Instant::now()), || {});
            let waited = shown.expect("new").duration_since(since);
            assert!(waited >= names.tick * PAST, "{waited:?}");
        });
    }

    #[test]
    fn b08_a_call_is_past_its_look_up_by_count_and_not_by_the_time_that_passed() {
        // As in a process that was stopped: an hour is over, no wait was made.
        let names = Names::with(NEVER);
        let (shown, is_shown) = channel();
        thread::scope(|scope| {
            let names = &names;
            beside_a_call_that_blocks(names, || {
                scope.spawn(move || {
                    names.call(peer(3), || shown.send(()).expect("the test listens"), || {});
                });
                names.until(|inner| inner.introducing);
                is_shown
                    .recv_timeout(Duration::from_millis(50))
                    .expect_err("shown beside a call that may be looking a name up");
                assert_eq!(names.inner.lock().running.values().max(), Some(&0));
            });
            is_shown
                .recv_timeout(SOON)
                .expect("shown when it has ended");
        });
    }

    #[test]
    fn b08_a_stuck_call_costs_new_peers_its_wait_once() {
        let names = Names::with(Duration::from_micros(200));
        beside_a_call_that_blocks(&names, || {
            names.call(peer(3), || {}, || {});
            let stuck = names.inner.lock().running.values().copied().max();
            assert_eq!(stuck, Some(PAST));
            for number in 4..100 {
                names.call(peer(number), || {}, || {});
            }
            let stuck = names.inner.lock().running.values().copied().max();
            assert_eq!(stuck, Some(PAST), "nobody waited a single tick more");
        });
    }

    #[test]
    fn b08_known_names_go_on_while_a_new_one_waits() {
        let names = Names::with(NEVER);
        names.call(peer(1), || {}, || {});
        let shown = AtomicUsize::new(0);
        thread::scope(|scope| {
            let (names, shown) = (&names, &shown);
            beside_a_call_that_blocks(names, || {
                scope.spawn(move || {
                    let show = || shown.store(1, Ordering::SeqCst);
                    names.call(peer(3), show, || {});
                });
                names.until(|inner| inner.introducing);
                for _ in 0..100 {
                    names.call(peer(1), || panic!("known"), || {});
                }
                assert_eq!(shown.load(Ordering::SeqCst), 0, "it still waits");
            });
        });
        assert_eq!(shown.into_inner(), 1);
    }

    #[test]
    fn b09_names_are_forgotten_before_they_fill_the_memory() {
        let names = Names::with(NEVER);
        let mut shown = 0;
        for number in 0..=MOST_NAMES {
            names.call(peer(number), || shown += 1, || {});
        }
        assert_eq!(shown, MOST_NAMES + 1);
        assert_eq!(names.inner.lock().known.len(), 1);
        names.call(peer(0), || shown += 1, || {});
        assert_eq!(shown, MOST_NAMES + 2, "shown again");
    }
}
