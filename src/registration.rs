// SPDX-License-Identifier: Apache-2.0
//! Registering memory, and giving it back to the caller when nobody can touch it
//! any more (C16).
// Hands memory that the caller names by number on to the backend.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;
use tracing::{debug, info, warn};

use crate::backend::Backend;
use crate::batch::VendorBatch;
use crate::error::Error;
use crate::footprint::Footprint;
use crate::memory::{Owners, Regions};
use crate::quiesce::{Patience, Whom};
use crate::region::Region;
use crate::transport::Transport;

/// Why a range was not given back.
enum Kept {
    /// So many outstanding batches use it; the library was not asked.
    Busy(usize),
    /// The library's own error.
    Vendor(Error),
}

impl Transport {
    /// Registers memory, all of it or none, in one vendor call. A range that is
    /// registered already is counted and not given to the library again; an
    /// empty list is fine and makes no call.
    ///
    /// Where a range that could not be removed was before, that one is removed
    /// first; its caller may have mapped other memory there.
    ///
    /// # Errors
    ///
    /// [`Error::NotInstalled`]; [`Error::RegionInvalid`] before any vendor call;
    /// [`Error::RegionLeaving`] while batches still use a range that was there
    /// before; [`Error::Vendor`], after every range of the call was deregistered.
    ///
    /// # Safety
    ///
    /// Each region is memory of this process that stays mapped until
    /// [`Self::deregister`] answered success for it, or the transport was
    /// uninstalled. Peers may read and write it meanwhile, at any time.
    pub unsafe fn register(&self, regions: &[Region]) -> Result<(), Error> {
        self.backend()?;
        if regions.is_empty() {
            return Ok(());
        }
        let memory = self.memory_free_for(regions);
        let unknown = memory.unknown(regions)?;
        let asked_for = Footprint::of(regions);
        let in_the_way: Vec<Region> = memory
            .condemned()
            .iter()
            .filter(|condemned| asked_for.touches(**condemned))
            .copied()
            .collect();
        // From here on nothing else is done about this memory.
        let backend = self.backend()?;
        let call = self.begin_call(memory, &[regions, &in_the_way].concat());
        let mut outcome = self.clear_the_way(&*backend, regions[0], &in_the_way);
        let mut undone = Vec::new();
        if outcome.is_ok() && !unknown.is_empty() {
            // SAFETY: the caller's conditions are the same.
            outcome = unsafe { backend.register(&unknown) };
            if outcome.is_err() {
                // The library may have taken some of them: it does not say which.
                let withdraw = |region: &Region| (*region, self.withdraw(&*backend, *region));
                undone.extend(unknown.iter().rev().map(withdraw));
            }
        }
        call.end(|memory| {
            if outcome.is_ok() {
                memory.add(regions);
            }
            for (region, withdrawn) in &undone {
                if let Err(Kept::Busy(_)) = withdrawn {
                    memory.condemn(*region);
                }
            }
        });
        for (region, withdrawn) in undone {
            if let Err(Kept::Vendor(error)) = withdrawn {
                debug!(
                    address = region.address,
                    %error,
                    "range of a failed registration was not known to the library"
                );
            }
        }
        outcome?;
        for region in &unknown {
            debug!(
                address = region.address,
                length = region.length,
                "region registered"
            );
        }
        Ok(())
    }

    /// Takes one registration of exactly this range back; the last one
    /// deregisters it. A range that is not registered makes no vendor call.
    ///
    /// A range that an outstanding batch uses is waited for, registered or not, up
    /// to the timeout; a batch that had its time in an earlier wait is asked once
    /// more and not waited for again, so that a teardown of many ranges takes one
    /// timeout (C19). A registered range that stays in use is deregistered when its
    /// last batch ends.
    ///
    /// # Errors
    ///
    /// [`Error::RegionBusy`]: the range must not be freed.
    /// [`Error::Vendor`]: the library refused; the range counts as removed.
    pub fn deregister(&self, region: Region) -> Result<(), Error> {
        {
            let mut memory = self.memory_free_for(&[region]);
            if memory.owners(region) == Owners::Several {
                memory.remove(region);
                return Ok(());
            }
        }
        let begun = Instant::now();
        loop {
            // The wait itself makes up for removals that were refused, maybe this.
            let waited = self.wait(Whom::Using(region), Patience::Implicit);
            let mut memory = self.memory_free_for(&[region]);
            let backend = match (self.backend(), memory.owners(region)) {
                (Ok(backend), Owners::One | Owners::Condemned) => backend,
                // Registered once more meanwhile.
                (Ok(_), Owners::Several) => {
                    memory.remove(region);
                    return Ok(());
                }
                // Batches may use memory that is not registered, and memory whose
                // refused removal was made up for.
                (Ok(_), Owners::None) if waited.batches > 0 => {
                    return Err(Error::RegionBusy {
                        address: region.address,
                        length: region.length,
                        batches: waited.batches,
                        waited_ms: waited.elapsed.as_millis(),
                    });
                }
                (_, Owners::None) | (Err(_), _) => return Ok(()),
            };
            let call = self.begin_call(memory, &[region]);
            let withdrawn = self.withdraw(&*backend, region);
            let batches = match withdrawn {
                Ok(()) => {
                    call.end(|memory| memory.remove(region));
                    debug!(
                        address = region.address,
                        length = region.length,
                        "region deregistered"
                    );
                    return Ok(());
                }
                Err(Kept::Vendor(error)) => {
                    call.end(|memory| memory.remove(region));
                    return Err(error);
                }
                Err(Kept::Busy(batches)) => batches,
            };
            let elapsed = begun.elapsed();
            // A batch that began since the wait has its time like any other.
            if waited.batches == 0 && elapsed < self.timeout() {
                drop(call);
                continue;
            }
            call.end(|memory| memory.condemn(region));
            return Err(Error::RegionBusy {
                address: region.address,
                length: region.length,
                batches,
                waited_ms: elapsed.as_millis(),
            });
        }
    }

    /// Deregisters what could not be removed when that was asked for, as far as no
    /// batch uses it any more.
    #[inline]
    pub(crate) fn make_up_for_removals(&self) {
        if self.condemned.load(Ordering::Relaxed) != 0 {
            self.deregister_what_is_due();
        }
    }

    #[cold]
    fn deregister_what_is_due(&self) {
        let memory = self.memory.lock();
        let Ok(backend) = self.backend() else {
            return;
        };
        let due: Vec<Region> = memory
            .condemned()
            .iter()
            .filter(|region| !memory.is_busy(&[**region]))
            .copied()
            .collect();
        if due.is_empty() {
            return;
        }
        let call = self.begin_call(memory, &due);
        let withdrawn: Vec<_> = due
            .iter()
            .map(|region| (*region, self.withdraw(&*backend, *region)))
            .collect();
        call.end(|memory| {
            for (region, withdrawn) in &withdrawn {
                if !matches!(withdrawn, Err(Kept::Busy(_))) {
                    memory.remove(*region);
                }
            }
        });
        report_late_removals(withdrawn);
    }

    /// Removes ranges whose removal was refused before and where `asked_for` and
    /// others are to be registered now.
    fn clear_the_way(
        &self,
        backend: &dyn Backend,
        asked_for: Region,
        in_the_way: &[Region],
    ) -> Result<(), Error> {
        for old in in_the_way {
            // Asked once: whoever uses it may have ended unnoticed.
            for batch in self.concerned(Whom::Using(*old)) {
                let _ = self.ask(&batch, None);
            }
            match self.withdraw(backend, *old) {
                Err(Kept::Busy(batches)) => {
                    return Err(Error::RegionLeaving {
                        address: asked_for.address,
                        length: asked_for.length,
                        old_address: old.address,
                        old_length: old.length,
                        batches,
                    });
                }
                withdrawn => {
                    self.memory.lock().remove(*old);
                    report_late_removals(vec![(*old, withdrawn)]);
                }
            }
        }
        Ok(())
    }

    /// Has the library deregister `region` if no outstanding batch uses it; none
    /// can begin to meanwhile.
    fn withdraw(&self, backend: &dyn Backend, region: Region) -> Result<(), Kept> {
        // Sorts what needs to be sorted, outside the lock.
        self.concerned(Whom::Using(region));
        {
            let mut state = self.state.lock();
            let uses = |batch: &&Arc<VendorBatch>| batch.footprint.touches(region);
            let busy = state.outstanding.iter().filter(uses).count();
            if busy > 0 {
                return Err(Kept::Busy(busy));
            }
            state.leaving.push(region);
        }
        // The entry must go whatever the call does, so it goes with a value.
        let leaving = Leaving(self, region);
        let outcome = backend.deregister(region.address);
        drop(leaving);
        outcome.map_err(Kept::Vendor)
    }

    /// The table of ranges, once no call about any of `regions` is at the library.
    fn memory_free_for(&self, regions: &[Region]) -> MutexGuard<'_, Regions> {
        let mut memory = self.memory.lock();
        self.memory_changed
            .wait_while(&mut memory, |memory| memory.is_busy(regions));
        memory
    }

    /// Begins a call about `regions`: until it has ended, nobody else makes one
    /// about the same memory.
    fn begin_call(&self, mut memory: MutexGuard<'_, Regions>, regions: &[Region]) -> Call<'_> {
        Call {
            transport: self,
            number: memory.begin(regions),
        }
    }

    fn timeout(&self) -> Duration {
        self.state.lock().timeout
    }

    pub(crate) fn backend(&self) -> Result<Arc<dyn Backend>, Error> {
        self.state.lock().backend.clone().ok_or(Error::NotInstalled)
    }
}

/// A call about memory that is at the library now. Ends when dropped, so also when
/// the backend panics.
struct Call<'a> {
    transport: &'a Transport,
    number: u64,
}

impl Call<'_> {
    /// Ends it, with what it came to.
    fn end(self, outcome: impl FnOnce(&mut Regions)) {
        outcome(&mut self.transport.memory.lock());
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        let Transport {
            memory,
            memory_changed,
            condemned,
            ..
        } = self.transport;
        let mut memory = memory.lock();
        memory.end(self.number);
        condemned.store(memory.condemned().len(), Ordering::Relaxed);
        drop(memory);
        memory_changed.notify_all();
    }
}

/// An entry in the list of memory that no batch may begin to use.
struct Leaving<'a>(&'a Transport, Region);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        let entry = state.leaving.iter().position(|region| *region == self.1);
        if let Some(entry) = entry {
            state.leaving.swap_remove(entry);
        }
    }
}

fn report_late_removals(withdrawn: Vec<(Region, Result<(), Kept>)>) {
    for (region, withdrawn) in withdrawn {
        match withdrawn {
            Ok(()) => info!(
                address = region.address,
                length = region.length,
                "region deregistered, its last batch has ended"
            ),
            Err(Kept::Vendor(error)) => warn!(
                address = region.address,
                length = region.length,
                %error,
                "region whose last batch has ended could not be deregistered"
            ),
            Err(Kept::Busy(_)) => {}
        }
    }
}
