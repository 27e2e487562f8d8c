// SPDX-License-Identifier: Apache-2.0
//! The registered regions of a handle, in memory that its peers map.

use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use crate::abi::{SM_ERROR, SM_INVALID_PARAM, SM_MALLOC_FAILED, SM_NOT_CONNECTED, SM_OK};
use crate::record::{self, Counter};
use crate::sys::{self, SharedWords};

/// Regions that one handle can register.
pub(crate) const CAPACITY: usize = 65_536;

// The words of the table: a header, then the regions by rising address.
const INSTANCE: usize = 0;
const CLOSED: usize = 1;
/// Odd while the regions are being changed.
const SEQUENCE: usize = 2;
const COUNT: usize = 3;
const FIRST: usize = 4;
const WORDS_PER_REGION: usize = 4;
/// The length of a table in words, the same in every process.
pub(crate) const WORDS: usize = FIRST + CAPACITY * WORDS_PER_REGION;

/// One registered range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Region {
    pub(crate) address: u64,
    pub(crate) length: u64,
    /// `CLOCK_MONOTONIC` nanoseconds from which on peers may use it.
    pub(crate) visible_since: u64,
    /// What to add (wrapping) to an address of it for the one that the kernel
    /// can copy from and to; not 0 for emulated device memory only.
    pub(crate) shift: u64,
}

impl Region {
    fn end(&self) -> u64 {
        self.address + self.length
    }
}

/// The handle's own side: the only writer.
pub(crate) struct Regions {
    table: SharedWords,
    regions: Vec<Region>,
}

impl Regions {
    pub(crate) fn new(instance: u64) -> std::io::Result<Self> {
        let table = SharedWords::create(WORDS)?;
        table.store(INSTANCE, instance, Ordering::Release);
        Ok(Self {
            table,
            regions: Vec::new(),
        })
    }

    pub(crate) fn fd(&self) -> u32 {
        self.table.fd()
    }

    /// Registers a range, or says why not, as a code and a text.
    pub(crate) fn add(&mut self, region: Region) -> Result<(), (i32, String)> {
        let Region {
            address, length, ..
        } = region;
        if address == 0 || length == 0 || address.checked_add(length).is_none() {
            let text = format!("{address:#x}+{length} is no range of memory");
            return Err((SM_INVALID_PARAM, text));
        }
        let at = self
            .regions
            .partition_point(|other| other.address < address);
        if let Some(other) = self.regions.get(at)
            && (other.address, other.length) == (address, length)
        {
            return Ok(());
        }
        let before = at.checked_sub(1).map(|at| self.regions[at]);
        let after = self.regions.get(at).copied();
        for other in [before, after].into_iter().flatten() {
            if address < other.end() && other.address < region.end() {
                let text = format!(
                    "{address:#x}+{length} overlaps the registered {:#x}+{}",
                    other.address, other.length
                );
                return Err((SM_ERROR, text));
            }
        }
        if self.regions.len() == CAPACITY {
            return Err((
                SM_MALLOC_FAILED,
                format!("{CAPACITY} regions are registered"),
            ));
        }
        self.regions.insert(at, region);
        record::add(Counter::regions, 1);
        self.publish(at);
        Ok(())
    }

    /// The region that begins at `address`.
    pub(crate) fn find(&self, address: u64) -> Option<Region> {
        let at = self
            .regions
            .partition_point(|region| region.address < address);
        self.regions
            .get(at)
            .filter(|region| region.address == address)
            .copied()
    }

    /// Withdraws the region that begins at `address`.
    pub(crate) fn remove(&mut self, address: u64) {
        let at = self
            .regions
            .partition_point(|region| region.address < address);
        if self
            .regions
            .get(at)
            .is_some_and(|region| region.address == address)
        {
            self.regions.remove(at);
            record::subtract(Counter::regions, 1);
            self.publish(at);
        }
    }

    /// What to add to an address of `address+length` to copy it, see [`Region`].
    pub(crate) fn shift(&self, address: u64, length: u64) -> u64 {
        locate(&self.regions, address, length).map_or(0, |region| region.shift)
    }

    /// Whether any region needs [`Self::shift`].
    pub(crate) fn any_shift(&self) -> bool {
        self.regions.iter().any(|region| region.shift != 0)
    }

    /// Tells peers that the handle is gone.
    pub(crate) fn close(&mut self) {
        record::subtract(Counter::regions, self.regions.len() as u64);
        self.regions.clear();
        self.table.store(CLOSED, 1, Ordering::Release);
        self.publish(0);
    }

    /// Writes the regions from index `from` on.
    fn publish(&self, from: usize) {
        let sequence = self.table.load(SEQUENCE, Ordering::Relaxed);
        self.table.store(SEQUENCE, sequence + 1, Ordering::Relaxed);
        // The odd sequence is seen before any of the words below.
        fence(Ordering::Release);
        for (index, region) in self.regions.iter().enumerate().skip(from) {
            let word = FIRST + index * WORDS_PER_REGION;
            self.table.store(word, region.address, Ordering::Relaxed);
            self.table.store(word + 1, region.length, Ordering::Relaxed);
            self.table
                .store(word + 2, region.visible_since, Ordering::Relaxed);
            self.table.store(word + 3, region.shift, Ordering::Relaxed);
        }
        self.table
            .store(COUNT, self.regions.len() as u64, Ordering::Relaxed);
        self.table.store(SEQUENCE, sequence + 2, Ordering::Release);
    }
}

fn locate(regions: &[Region], address: u64, length: u64) -> Option<&Region> {
    let end = address.checked_add(length)?;
    let after = regions.partition_point(|region| region.address <= address);
    let region = &regions[after.checked_sub(1)?];
    (end <= region.end()).then_some(region)
}

/// A peer's side: reads the table, keeps the last consistent copy.
pub(crate) struct RemoteRegions {
    table: SharedWords,
    sequence: u64,
    regions: Vec<Region>,
}

impl RemoteRegions {
    /// Maps the table of a peer, which must be that `instance`.
    pub(crate) fn open(pid: u32, fd: u32, instance: u64) -> std::io::Result<Self> {
        let table = SharedWords::open(pid, fd, WORDS)?;
        if table.load(INSTANCE, Ordering::Acquire) != instance {
            return Err(std::io::Error::other(
                "the peer's region table is another's",
            ));
        }
        Ok(Self {
            table,
            sequence: u64::MAX,
            regions: Vec::new(),
        })
    }

    /// Takes over what the peer has changed since the last time.
    fn refresh(&mut self) -> Result<(), i32> {
        // A writer needs microseconds; one that was killed half-way never ends.
        let deadline = sys::monotonic_ns() + Duration::from_millis(100).as_nanos() as u64;
        loop {
            if self.table.load(CLOSED, Ordering::Acquire) != 0 {
                return Err(SM_NOT_CONNECTED);
            }
            let before = self.table.load(SEQUENCE, Ordering::Acquire);
            if before == self.sequence {
                return Ok(());
            }
            if before.is_multiple_of(2) {
                self.copy();
                fence(Ordering::Acquire);
                if self.table.load(SEQUENCE, Ordering::Relaxed) == before {
                    self.sequence = before;
                    return Ok(());
                }
            }
            // What was copied is of no use.
            self.sequence = u64::MAX;
            if sys::monotonic_ns() > deadline {
                return Err(SM_NOT_CONNECTED);
            }
            std::thread::yield_now();
        }
    }

    fn copy(&mut self) {
        let count = self
            .table
            .load(COUNT, Ordering::Relaxed)
            .min(CAPACITY as u64) as usize;
        let table = &self.table;
        self.regions.clear();
        self.regions.extend((0..count).map(|index| {
            let word = FIRST + index * WORDS_PER_REGION;
            Region {
                address: table.load(word, Ordering::Relaxed),
                length: table.load(word + 1, Ordering::Relaxed),
                visible_since: table.load(word + 2, Ordering::Relaxed),
                shift: table.load(word + 3, Ordering::Relaxed),
            }
        }));
    }

    /// Checks every range, and translates its address into one that the kernel
    /// can copy from and to. `SM_OK`, or the code and the first bad range.
    pub(crate) fn check(
        &mut self,
        addresses: &[usize],
        lengths: &[usize],
        mut translate: impl FnMut(usize, usize),
    ) -> (i32, Option<usize>) {
        if let Err(code) = self.refresh() {
            return (code, None);
        }
        let mut now = 0;
        for (index, (&address, &length)) in addresses.iter().zip(lengths).enumerate() {
            if length == 0 {
                translate(index, address);
                continue;
            }
            let Some(region) = locate(&self.regions, address as u64, length as u64) else {
                return (SM_INVALID_PARAM, Some(index));
            };
            if region.visible_since != 0 {
                if now == 0 {
                    now = sys::monotonic_ns();
                }
                if region.visible_since > now {
                    return (SM_INVALID_PARAM, Some(index));
                }
            }
            translate(index, (address as u64).wrapping_add(region.shift) as usize);
        }
        (SM_OK, None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(address: u64, length: u64) -> Region {
        Region {
            address,
            length,
            visible_since: 0,
            shift: 0,
        }
    }

    fn pair() -> (Regions, RemoteRegions) {
        let own = Regions::new(7).expect("a memfd");
        let seen = RemoteRegions::open(std::process::id(), own.fd(), 7).expect("the same memfd");
        (own, seen)
    }

    fn check(seen: &mut RemoteRegions, address: usize, length: usize) -> i32 {
        seen.check(&[address], &[length], |_, _| {}).0
    }

    #[test]
    fn a_range_is_good_only_inside_one_registered_region() {
        let (mut own, mut seen) = pair();
        own.add(region(0x1000, 0x100)).expect("free");
        own.add(region(0x1100, 0x100))
            .expect("adjacent, not overlapping");
        assert_eq!(check(&mut seen, 0x1000, 0x100), SM_OK);
        assert_eq!(check(&mut seen, 0x10ff, 1), SM_OK);
        assert_eq!(check(&mut seen, 0x1180, 0x80), SM_OK);
        assert_eq!(
            check(&mut seen, 0x1000, 0x101),
            SM_INVALID_PARAM,
            "across two regions"
        );
        assert_eq!(
            check(&mut seen, 0xfff, 2),
            SM_INVALID_PARAM,
            "begins before"
        );
        assert_eq!(check(&mut seen, 0x1200, 1), SM_INVALID_PARAM, "behind");
        assert_eq!(
            check(&mut seen, 0x1100, usize::MAX),
            SM_INVALID_PARAM,
            "wraps around"
        );
    }

    #[test]
    fn the_first_bad_range_is_named() {
        let (mut own, mut seen) = pair();
        own.add(region(0x1000, 0x100)).expect("free");
        let (code, at) = seen.check(&[0x1000, 0x5000, 0x6000], &[8, 8, 8], |_, _| {});
        assert_eq!((code, at), (SM_INVALID_PARAM, Some(1)));
    }

    #[test]
    fn a_withdrawn_region_is_refused_from_then_on() {
        let (mut own, mut seen) = pair();
        own.add(region(0x1000, 0x100)).expect("free");
        own.add(region(0x2000, 0x100)).expect("free");
        assert_eq!(check(&mut seen, 0x1000, 1), SM_OK);
        own.remove(0x1000);
        assert_eq!(check(&mut seen, 0x1000, 1), SM_INVALID_PARAM);
        assert_eq!(check(&mut seen, 0x2000, 1), SM_OK);
    }

    #[test]
    fn the_same_range_twice_is_one_region_and_an_overlap_is_refused() {
        let (mut own, _) = pair();
        own.add(region(0x1000, 0x100)).expect("free");
        own.add(region(0x1000, 0x100)).expect("the same");
        assert_eq!(own.regions.len(), 1);
        for (address, length) in [(0x1000, 0x80), (0x1000, 0x200), (0xff0, 0x11), (0x10ff, 1)] {
            let (code, text) = own.add(region(address, length)).expect_err("an overlap");
            assert_eq!(code, SM_ERROR);
            assert!(text.contains("overlaps"), "{text}");
        }
    }

    #[test]
    fn ranges_that_are_none_are_refused() {
        let (mut own, _) = pair();
        for (address, length) in [(0, 8), (8, 0), (u64::MAX, 2)] {
            assert_eq!(
                own.add(region(address, length)).map_err(|e| e.0),
                Err(SM_INVALID_PARAM)
            );
        }
    }

    #[test]
    fn a_region_is_visible_from_its_time_on() {
        let (mut own, mut seen) = pair();
        let hour = 3_600_000_000_000;
        let visible_since = sys::monotonic_ns() + hour;
        own.add(Region {
            visible_since,
            ..region(0x1000, 8)
        })
        .expect("free");
        own.add(Region {
            visible_since: 1,
            ..region(0x2000, 8)
        })
        .expect("free");
        assert_eq!(check(&mut seen, 0x1000, 8), SM_INVALID_PARAM);
        assert_eq!(check(&mut seen, 0x2000, 8), SM_OK);
    }

    #[test]
    fn a_closed_table_means_a_peer_that_is_gone() {
        let (mut own, mut seen) = pair();
        own.add(region(0x1000, 8)).expect("free");
        own.close();
        assert_eq!(check(&mut seen, 0x1000, 8), SM_NOT_CONNECTED);
    }

    #[test]
    fn a_table_of_another_instance_is_not_taken() {
        let own = Regions::new(7).expect("a memfd");
        assert!(RemoteRegions::open(std::process::id(), own.fd(), 8).is_err());
    }

    #[test]
    fn readers_never_see_a_half_changed_table() {
        let (mut own, mut seen) = pair();
        own.add(region(0x1_0000, 8)).expect("free");
        std::thread::scope(|scope| {
            let reader = scope.spawn(move || {
                for _ in 0..20_000 {
                    // Always registered, whatever else changes around it.
                    assert_eq!(check(&mut seen, 0x1_0000, 8), SM_OK);
                }
            });
            while !reader.is_finished() {
                own.add(region(0x1000, 8)).expect("free");
                own.remove(0x1000);
            }
        });
    }
}
