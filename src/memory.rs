// SPDX-License-Identifier: Apache-2.0
//! Registered ranges of local memory.

use std::collections::{BTreeMap, HashMap};

use crate::error::Error;
use crate::footprint::Footprint;
use crate::region::Region;

/// The ranges that the library knows, and what is being done about them.
///
/// The library names a range by its address alone, so one address has one
/// length here. Ranges may overlap otherwise: the engine passes such ranges on,
/// and whether they are possible is the library's to say.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    ranges: BTreeMap<usize, Range>,
    /// Ranges whose removal was refused because batches used them (C16). Their
    /// owner was told so once and may have forgotten them.
    condemned: Vec<Region>,
    /// Calls about memory that are at the library now, by number.
    calls: Vec<(u64, Footprint)>,
    latest_call: u64,
}

#[derive(Debug)]
struct Range {
    length: usize,
    count: usize,
}

/// Whose a range is that is to be removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owners {
    /// Not ours, or not with this length.
    None,
    /// The caller alone.
    One,
    /// Others as well.
    Several,
    /// Nobody: its removal was refused before.
    Condemned,
}

impl Regions {
    /// Which of `regions` the library does not know yet, each once, in order.
    ///
    /// # Errors
    ///
    /// [`Error::RegionInvalid`] for a range that is empty or wraps, and for one
    /// whose address is registered with another length.
    pub(crate) fn unknown(&self, regions: &[Region]) -> Result<Vec<Region>, Error> {
        let mut unknown: Vec<Region> = Vec::with_capacity(regions.len());
        let mut listed: HashMap<usize, usize> = HashMap::with_capacity(regions.len());
        for region in regions {
            region.check()?;
            let known = self.ranges.get(&region.address).map(|range| range.length);
            match known.or(listed.get(&region.address).copied()) {
                None => {
                    listed.insert(region.address, region.length);
                    unknown.push(*region);
                }
                Some(length) if length == region.length => {}
                Some(length) => {
                    return Err(region.invalid(format!(
                        "is registered with {length} bytes, remove that range first"
                    )));
                }
            }
        }
        Ok(unknown)
    }

    /// Counts one more registration of each of `regions`.
    pub(crate) fn add(&mut self, regions: &[Region]) {
        for region in regions {
            self.ranges
                .entry(region.address)
                .or_insert(Range {
                    length: region.length,
                    count: 0,
                })
                .count += 1;
        }
    }

    /// Who has registered exactly this range.
    pub(crate) fn owners(&self, region: Region) -> Owners {
        match self.ranges.get(&region.address) {
            Some(range) if range.length == region.length => match range.count {
                1 => Owners::One,
                _ => Owners::Several,
            },
            _ if self.condemned.contains(&region) => Owners::Condemned,
            _ => Owners::None,
        }
    }

    /// Takes one registration of `region` back.
    pub(crate) fn remove(&mut self, region: Region) {
        if let Some(range) = self.ranges.get_mut(&region.address)
            && range.length == region.length
        {
            range.count -= 1;
            if range.count == 0 {
                self.ranges.remove(&region.address);
            }
        }
        self.condemned.retain(|condemned| *condemned != region);
    }

    /// Notes that `region`, which nobody may count on any more, could not be
    /// removed yet.
    pub(crate) fn condemn(&mut self, region: Region) {
        self.remove(region);
        self.condemned.push(region);
    }

    /// Condemned ranges.
    pub(crate) fn condemned(&self) -> &[Region] {
        &self.condemned
    }

    /// Whether a call that is at the library now is about memory of `regions`.
    pub(crate) fn is_busy(&self, regions: &[Region]) -> bool {
        let mut calls = self.calls.iter();
        calls.any(|(_, at_work)| regions.iter().any(|region| at_work.touches(*region)))
    }

    /// Whether no call is at the library now.
    pub(crate) fn is_idle(&self) -> bool {
        self.calls.is_empty()
    }

    /// Begins a call about `regions`: until [`Self::end`] they are busy.
    pub(crate) fn begin(&mut self, regions: &[Region]) -> u64 {
        self.latest_call += 1;
        let footprint = Footprint::of(regions);
        self.calls.push((self.latest_call, footprint));
        self.latest_call
    }

    /// Ends a call.
    pub(crate) fn end(&mut self, call: u64) {
        self.calls.retain(|(number, _)| *number != call);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Region = Region {
        address: 0x1000,
        length: 0x100,
    };

    #[test]
    fn case_18_a_range_is_known_until_its_last_removal() {
        let mut regions = Regions::default();
        assert_eq!(regions.unknown(&[A, A]).expect("valid"), [A]);
        regions.add(&[A, A]);
        assert!(regions.unknown(&[A]).expect("valid").is_empty());
        assert_eq!(regions.owners(A), Owners::Several);
        regions.remove(A);
        assert_eq!(regions.owners(A), Owners::One);
        regions.remove(A);
        assert_eq!(regions.owners(A), Owners::None);
        assert_eq!(regions.unknown(&[A]).expect("valid"), [A]);
    }

    #[test]
    fn case_18_one_address_has_one_length() {
        let mut regions = Regions::default();
        let longer = Region { length: 0x200, ..A };
        assert!(regions.unknown(&[A, longer]).is_err());
        regions.add(&[A]);
        let text = regions
            .unknown(&[longer])
            .expect_err("other length")
            .to_string();
        assert!(text.contains("registered with 256 bytes"), "{text}");
        assert_eq!(regions.owners(longer), Owners::None, "not with this length");
        regions.remove(longer);
        assert_eq!(regions.owners(A), Owners::One);
    }

    #[test]
    fn c16_a_condemned_range_leaves_its_address_to_another_one() {
        let mut regions = Regions::default();
        let longer = Region { length: 0x200, ..A };
        regions.add(&[A]);
        regions.condemn(A);
        assert_eq!(regions.owners(A), Owners::Condemned);
        assert_eq!(regions.condemned(), [A]);
        assert_eq!(regions.unknown(&[longer]).expect("free"), [longer]);
        regions.add(&[longer]);
        assert_eq!(regions.owners(longer), Owners::One);
        regions.remove(A);
        assert_eq!(regions.owners(A), Owners::None);
        assert_eq!(regions.owners(longer), Owners::One);
    }

    #[test]
    fn a08_a_call_is_in_the_way_of_its_own_memory_alone() {
        let mut regions = Regions::default();
        let other = Region {
            address: 0x5000,
            ..A
        };
        let call = regions.begin(&[A]);
        assert!(regions.is_busy(&[other, A]));
        assert!(!regions.is_busy(&[other]) && !regions.is_idle());
        regions.end(call);
        assert!(!regions.is_busy(&[A]) && regions.is_idle());
    }

    #[test]
    fn unusable_ranges_are_named() {
        for (address, length, reason) in [
            (0, 1, "null"),
            (1, 0, "empty"),
            (usize::MAX, 2, "address space"),
        ] {
            let error = Regions::default()
                .unknown(&[Region { address, length }])
                .expect_err(reason);
            assert!(error.to_string().contains(reason), "{error}");
        }
    }

    #[test]
    fn ranges_overlap_only_where_they_share_a_byte() {
        assert!(A.overlaps(0x10ff, 1));
        assert!(A.overlaps(0xfff, 2));
        assert!(!A.overlaps(0x1100, 1));
        assert!(!A.overlaps(0xfff, 1));
    }
}
