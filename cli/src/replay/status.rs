// SPDX-License-Identifier: Apache-2.0
//! What the kernel says of this process.

use std::fs::read_to_string;

/// Resident memory, now and at most so far, of one moment; 0 where the kernel
/// does not tell.
pub fn resident_and_peak_bytes() -> (u64, u64) {
    let status = read_to_string("/proc/self/status").unwrap_or_default();
    let told = |key| bytes(&status, key).unwrap_or(0);
    (told("VmRSS:"), told("VmHWM:"))
}

/// Memory that can be had without swapping, if the kernel tells.
pub fn available_bytes() -> Option<u64> {
    bytes(&read_to_string("/proc/meminfo").ok()?, "MemAvailable:")
}

/// A line such as `VmRSS:      1234 kB`.
fn bytes(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_tells() {
        let (resident, peak) = resident_and_peak_bytes();
        assert!(resident > 0);
        assert!(peak >= resident);
        assert!(available_bytes().is_some_and(|bytes| bytes > 0));
    }
}
