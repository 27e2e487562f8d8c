// SPDX-License-Identifier: Apache-2.0
//! Who may touch what: a picture of memory that knows no clause of the contract.
//!
//! One side is the vendor's: which batches may still read or write which memory
//! of this process, and which ranges it has registered. The other is the caller's:
//! what it was told is free or registered, and what it has unmapped. Where the two
//! cannot both be, memory would be overwritten, whatever clause it came by.

use memfabric_transport::Region;

use super::vendor::Group;

/// See the module. A life is one instance of the vendor's library, and of the
/// transport over it: what another one does to memory, it cannot know.
#[derive(Debug, Default)]
pub struct Picture {
    /// Counts what happens.
    now: u64,
    accesses: Vec<Access>,
    entries: Vec<Entry>,
    /// What callers know to be registered, once for each registration.
    held: Vec<(usize, Region)>,
    /// What they wanted to be removed and were told is busy.
    refused: Vec<(usize, Region)>,
    unmapped: Vec<Unmapped>,
    fault: Option<String>,
}

/// What a batch may still do to a piece of memory.
#[derive(Debug)]
struct Access {
    life: usize,
    id: u64,
    what: &'static str,
    piece: Region,
    since: u64,
}

/// A range in the vendor's table of registrations.
#[derive(Debug)]
struct Entry {
    life: usize,
    region: Region,
    since: u64,
}

impl Entry {
    fn is(&self, life: usize, region: Region) -> bool {
        (self.life, self.region) == (life, region)
    }
}

/// A range that the caller has given back to the system, and may have again from
/// it: as other memory.
#[derive(Debug)]
struct Unmapped {
    region: Region,
    at: u64,
}

impl Picture {
    /// The first thing that may not be.
    pub fn fault(&self) -> Option<String> {
        self.fault.clone()
    }

    fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    fn wrong(&mut self, what: String) {
        self.fault.get_or_insert(what);
    }

    // The vendor's side.

    /// A batch was accepted by the library whose endpoint is `own`.
    pub fn accepted(&mut self, life: usize, id: u64, group: &Group, own: &str) {
        let since = self.tick();
        let read = group.opcode == 0;
        let mut add = |what, address, length| {
            let piece = Region { address, length };
            self.accesses.push(Access {
                life,
                id,
                what,
                piece,
                since,
            });
        };
        for (local, remote, length) in &group.pieces {
            add(if read { "write" } else { "read" }, *local, *length);
            if group.peer == own {
                add(if read { "read" } else { "write" }, *remote, *length);
            }
        }
    }

    /// What batch `id` did to memory has stopped.
    pub fn stopped(&mut self, life: usize, id: u64) {
        self.accesses
            .retain(|access| access.life != life || access.id != id);
    }

    /// The library gives the result of batch `id`: the transport will take its
    /// memory for free.
    pub fn result_given(&mut self, life: usize, id: u64, result: i32) {
        let goes_on = |access: &&Access| access.life == life && access.id == id;
        if let Some(access) = self.accesses.iter().find(goes_on) {
            let what = format!("{access} and has the result {result}");
            self.wrong(what);
        }
    }

    pub fn registered(&mut self, life: usize, regions: &[Region]) {
        let since = self.tick();
        for region in regions {
            let same = |entry: &Entry| entry.life == life && entry.region.address == region.address;
            if self.entries.iter().any(same) {
                self.wrong(format!("the library gets {} again", show(*region)));
            }
            self.entries.push(Entry {
                life,
                region: *region,
                since,
            });
        }
    }

    pub fn deregistered(&mut self, life: usize, address: usize) {
        let ours = |entry: &Entry| entry.life == life && entry.region.address == address;
        let Some(place) = self.entries.iter().position(ours) else {
            return;
        };
        let region = self.entries.swap_remove(place).region;
        if let Some(access) = self.access_to(life, region, u64::MAX) {
            let what = format!("{} is deregistered, {access}", show(region));
            self.wrong(what);
        }
    }

    /// The instance was destroyed.
    pub fn down(&mut self, life: usize) {
        let ours = |access: &&Access| access.life == life;
        if let Some(access) = self.accesses.iter().find(ours) {
            let what = format!("the library is taken down, {access}");
            self.wrong(what);
        }
        self.entries.retain(|entry| entry.life != life);
        self.held.retain(|(of, _)| *of != life);
        self.refused.retain(|(of, _)| *of != life);
    }

    /// Ranges that the library of this life has, sorted.
    pub fn table(&self, life: usize) -> Vec<Region> {
        let ours = self.entries.iter().filter(|entry| entry.life == life);
        let mut table: Vec<_> = ours.map(|entry| entry.region).collect();
        table.sort_by_key(|region| (region.address, region.length));
        table
    }

    // The caller's side.

    /// A registration was answered OK.
    pub fn told_registered(&mut self, life: usize, regions: &[Region]) {
        for region in regions {
            self.held.push((life, *region));
            // That its removal was wanted is over with.
            self.refused.retain(|refused| *refused != (life, *region));
            if !self.entries.iter().any(|entry| entry.is(life, *region)) {
                self.wrong(format!(
                    "{} is said to be registered, the library does not have it",
                    show(*region)
                ));
            }
            let mut wrong = None;
            for unmapped in &self.unmapped {
                let Some(other) = common(unmapped.region, *region) else {
                    continue;
                };
                let of_old = |entry: &&Entry| {
                    entry.life == life
                        && entry.since < unmapped.at
                        && common(entry.region, other).is_some()
                };
                if let Some(access) = self.access_to(life, other, unmapped.at) {
                    wrong.get_or_insert(format!(
                        "{} is said to be registered, {access} as it was before it was unmapped",
                        show(*region)
                    ));
                }
                if let Some(entry) = self.entries.iter().find(of_old) {
                    wrong.get_or_insert(format!(
                        "{} is said to be registered, the library has {} from before it was unmapped",
                        show(*region),
                        show(entry.region)
                    ));
                }
            }
            if let Some(wrong) = wrong {
                self.wrong(wrong);
            }
        }
    }

    /// A removal was answered with something else than "busy".
    pub fn told_removed(&mut self, life: usize, region: Region) {
        let this = (life, region);
        if let Some(place) = self.held.iter().position(|held| *held == this) {
            self.held.swap_remove(place);
            if self.held.contains(&this) {
                return;
            }
        } else if let Some(place) = self.refused.iter().position(|refused| *refused == this) {
            self.refused.swap_remove(place);
        }
        let still = self.entries.iter().any(|entry| entry.is(life, region));
        if let Some(access) = self.access_to(life, region, u64::MAX) {
            let what = format!("{} is said to be free, {access}", show(region));
            self.wrong(what);
        }
        if still {
            self.wrong(format!(
                "{} is said to be free, the library still has it",
                show(region)
            ));
        }
        if self.access_to(life, region, u64::MAX).is_none() {
            self.unmap(life, region);
        }
    }

    /// A removal was answered "busy". A caller who takes it for granted all the same
    /// forgets the range, and unmaps it.
    pub fn told_busy(&mut self, life: usize, region: Region, granted: bool) {
        let this = (life, region);
        if let Some(place) = self.held.iter().position(|held| *held == this) {
            self.held.swap_remove(place);
            self.refused.push(this);
        } else if !self.refused.contains(&this) {
            // Not registered: there is nothing to forget.
            return;
        }
        if granted {
            self.unmap(life, region);
        }
    }

    /// Unless the caller uses a part of it under another registration.
    fn unmap(&mut self, life: usize, region: Region) {
        let used = |(of, held): &(usize, Region)| *of == life && common(*held, region).is_some();
        if self.held.iter().any(used) {
            return;
        }
        let at = self.tick();
        self.unmapped.push(Unmapped { region, at });
    }

    /// What a batch of this life that was accepted before `before` may do there.
    fn access_to(&self, life: usize, region: Region, before: u64) -> Option<&Access> {
        self.accesses.iter().find(|access| {
            access.life == life && access.since < before && common(access.piece, region).is_some()
        })
    }
}

impl std::fmt::Display for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let piece = show(self.piece);
        write!(f, "batch {} may still {} {piece}", self.id, self.what)
    }
}

fn show(region: Region) -> String {
    format!("{:#x}+{:#x}", region.address, region.length)
}

/// The bytes that are in both.
fn common(one: Region, other: Region) -> Option<Region> {
    let end = |region: Region| region.address.saturating_add(region.length);
    let address = one.address.max(other.address);
    let length = end(one).min(end(other)).checked_sub(address)?;
    (length > 0).then_some(Region { address, length })
}
