//! Registered ranges of local memory.

use std::collections::BTreeMap;

use crate::error::Error;

/// One range of memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Address of the first byte.
    pub address: usize,
    /// Bytes.
    pub length: usize,
}

impl Region {
    /// Whether the two share a byte.
    pub fn overlaps(&self, address: usize, length: usize) -> bool {
        address < self.address.saturating_add(self.length)
            && self.address < address.saturating_add(length)
    }

    fn check(&self) -> Result<(), Error> {
        let reason = if self.address == 0 {
            "starts at null"
        } else if self.length == 0 {
            "is empty, register at least one byte"
        } else if self.address.checked_add(self.length).is_none() {
            "reaches past the end of the address space"
        } else {
            return Ok(());
        };
        Err(self.invalid(reason.to_owned()))
    }

    fn invalid(&self, reason: String) -> Error {
        Error::RegionInvalid {
            address: self.address,
            length: self.length,
            reason,
        }
    }
}

/// The ranges that the library knows, with how often each was registered.
///
/// The library names a range by its address alone, so one address has one
/// length here. Ranges may overlap otherwise: the engine passes such ranges on,
/// and whether they are possible is the library's to say.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    ranges: BTreeMap<usize, Range>,
}

#[derive(Debug)]
struct Range {
    length: usize,
    count: usize,
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
        for region in regions {
            region.check()?;
            let known = self.ranges.get(&region.address).map(|range| range.length);
            let listed = unknown.iter().find(|new| new.address == region.address);
            match known.or(listed.map(|new| new.length)) {
                None => unknown.push(*region),
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

    /// Whether exactly this range is registered once. One of several registrations
    /// is taken back at once, for the others go on using the range.
    pub(crate) fn is_last_owner(&mut self, region: Region) -> bool {
        let count = self.count(region);
        if count > 1 {
            self.remove(region);
        }
        count == 1
    }

    /// How often exactly this range is registered.
    fn count(&self, region: Region) -> usize {
        match self.ranges.get(&region.address) {
            Some(range) if range.length == region.length => range.count,
            _ => 0,
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
        regions.remove(A);
        assert_eq!(regions.count(A), 1);
        regions.remove(A);
        assert_eq!(regions.count(A), 0);
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
        regions.remove(longer);
        assert_eq!(regions.count(A), 1, "a range of another length is not ours");
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
