// SPDX-License-Identifier: Apache-2.0
//! Emulated device memory: where the kernel can copy it.
//!
//! The emulated `libascendcl.so` hands out device memory that the CPU cannot
//! touch: a mapping without access of a memfd, with a second, accessible mapping
//! elsewhere. Both show in `/proc/self/maps`, which is all that is shared here.

use crate::copy;

/// The memfd's name, as that library chose it.
const NAME: &str = "/memfd:mf-emulator-device";

/// What to add (wrapping) to an address for one that can be copied, see
/// [`crate::regions::Region`]. 0 for all other memory.
pub(crate) fn shift(address: u64) -> u64 {
    if copy::readable(address) {
        return 0;
    }
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    find_shift(&maps, address).unwrap_or(0)
}

struct Mapping<'a> {
    start: u64,
    end: u64,
    accessible: bool,
    offset: u64,
    /// Device and inode.
    file: (&'a str, &'a str),
}

fn find_shift(maps: &str, address: u64) -> Option<u64> {
    let device: Vec<Mapping> = maps.lines().filter_map(parse).collect();
    let hidden = device
        .iter()
        .find(|it| (it.start..it.end).contains(&address))?;
    let position = hidden.offset + (address - hidden.start);
    let visible = device.iter().find(|it| {
        let covered = it.offset..it.offset + (it.end - it.start);
        it.accessible && it.file == hidden.file && covered.contains(&position)
    })?;
    Some((visible.start + (position - visible.offset)).wrapping_sub(address))
}

/// A line about emulated device memory.
fn parse(line: &str) -> Option<Mapping<'_>> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let access = fields.next()?;
    let offset = fields.next()?;
    let file = (fields.next()?, fields.next()?);
    if fields.next()? != NAME {
        return None;
    }
    let hex = |text| u64::from_str_radix(text, 16).ok();
    Some(Mapping {
        start: hex(start)?,
        end: hex(end)?,
        accessible: access.starts_with("rw"),
        offset: hex(offset)?,
        file,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
5000-6000 r--p 00000000 08:01 77 /usr/bin/host
10000-30000 ---s 00001000 00:01 42 /memfd:mf-emulator-device (deleted)
40000-50000 rw-s 00000000 00:01 41 /memfd:mf-emulator-device (deleted)
60000-81000 rw-s 00000000 00:01 42 /memfd:mf-emulator-device (deleted)
90000-91000 ---p 00000000 00:00 0
";

    #[test]
    fn hidden_device_memory_is_found_in_its_other_mapping() {
        let shift = find_shift(MAPS, 0x10800).expect("device memory");
        assert_eq!(0x10800_u64.wrapping_add(shift), 0x61800);
    }

    #[test]
    fn other_memory_that_cannot_be_read_stays_where_it_is() {
        assert_eq!(find_shift(MAPS, 0x90000), None);
        assert_eq!(find_shift(MAPS, 0x8), None);
        assert_eq!(shift(0x8), 0);
    }
}
