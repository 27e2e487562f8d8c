// SPDX-License-Identifier: Apache-2.0
//! Which memory of this process something covers: a vendor batch, or a call
//! about memory.

use std::sync::OnceLock;

use crate::region::Region;

/// Pieces of memory, asked about by range.
///
/// The pieces are copies. The arrays that a vendor batch gives to the library are
/// not `const` in its interface, and are the library's until the batch is done, so
/// they can answer no question of ours.
#[derive(Debug, Default)]
pub(crate) struct Footprint {
    starts: Vec<usize>,
    lengths: Vec<usize>,
    /// The pieces in order, those that touch joined; made by the first question.
    spans: OnceLock<Vec<Span>>,
}

/// First byte, and the one behind the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Span {
    start: usize,
    end: usize,
}

impl Footprint {
    /// Covers `regions`.
    pub(crate) fn of(regions: &[Region]) -> Self {
        Self {
            starts: regions.iter().map(|region| region.address).collect(),
            lengths: regions.iter().map(|region| region.length).collect(),
            spans: OnceLock::new(),
        }
    }

    /// Covers nothing from now on, keeping the room.
    pub(crate) fn clear(&mut self) {
        self.starts.clear();
        self.lengths.clear();
        if self.spans.get().is_some() {
            self.spans.take();
        }
    }

    /// Adds pieces, before the first question: one length for each start. None
    /// wraps.
    #[inline]
    pub(crate) fn add(&mut self, starts: &[usize], lengths: &[usize]) {
        debug_assert_eq!(starts.len(), lengths.len());
        debug_assert!(self.spans.get().is_none(), "cleared before it is filled");
        match (starts, lengths) {
            // What a group of one piece costs counts.
            ([start], [length]) => {
                self.starts.push(*start);
                self.lengths.push(*length);
            }
            _ => {
                self.starts.extend_from_slice(starts);
                self.lengths.extend_from_slice(lengths);
            }
        }
    }

    /// Whether a piece and `region` share a byte. The first question sorts the
    /// pieces, so it is not for a lock that others need.
    pub(crate) fn touches(&self, region: Region) -> bool {
        Self::among(self.spans.get_or_init(|| self.sorted()), region)
    }

    /// As [`Self::touches`], if that needs no sorting any more.
    pub(crate) fn touches_if_known(&self, region: Region) -> Option<bool> {
        self.spans.get().map(|spans| Self::among(spans, region))
    }

    fn among(spans: &[Span], region: Region) -> bool {
        let next = spans.partition_point(|span| span.end <= region.address);
        let end = region.address.saturating_add(region.length);
        spans
            .get(next)
            .is_some_and(|span| span.start.max(region.address) < end)
    }

    fn sorted(&self) -> Vec<Span> {
        let pieces = self.starts.iter().zip(&self.lengths);
        let mut spans: Vec<_> = pieces
            .map(|(start, length)| Span {
                start: *start,
                end: start.saturating_add(*length),
            })
            .collect();
        spans.sort_unstable();
        spans.dedup_by(|next, last| {
            let touching = next.start <= last.end;
            if touching {
                last.end = last.end.max(next.end);
            }
            touching
        });
        spans
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(address: usize, length: usize) -> Region {
        Region { address, length }
    }

    #[test]
    fn a_footprint_touches_where_a_byte_is_shared_and_nowhere_else() {
        let footprint = Footprint::of(&[
            region(0x3000, 0x100),
            region(0x1000, 0x100),
            region(0x1080, 0x10),
            region(0x1100, 0x80),
        ]);
        assert_eq!(footprint.touches_if_known(region(0, 1)), None);
        for (address, length, touches) in [
            (0xfff, 1, false),
            (0xfff, 2, true),
            (0x1090, 1, true),
            (0x10a0, 1, true),
            (0x117f, 1, true),
            (0x1180, 0x1e80, false),
            (0x1180, 0x1e81, true),
            (0x30ff, 1, true),
            (0x3100, usize::MAX, false),
            (0, usize::MAX, true),
            (0x1010, 0, false),
        ] {
            let asked = region(address, length);
            assert_eq!(footprint.touches(asked), touches, "{asked:x?}");
            assert_eq!(footprint.touches_if_known(asked), Some(touches));
        }
        assert!(!Footprint::default().touches(region(0, usize::MAX)));
    }

    #[test]
    fn what_was_cleared_is_not_covered_any_more() {
        let mut footprint = Footprint::of(&[region(0x1000, 8)]);
        assert!(footprint.touches(region(0x1000, 1)));
        footprint.clear();
        assert!(!footprint.touches(region(0x1000, 1)));
        footprint.clear();
        footprint.add(&[0x2000], &[8]);
        footprint.add(&[0x3000], &[8]);
        assert!(footprint.touches(region(0x2007, 1)));
        assert!(footprint.touches(region(0x3007, 1)));
    }
}
