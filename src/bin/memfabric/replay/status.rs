//! What the kernel says of this process.

use std::fs::read_to_string;

/// Resident memory; 0 where the kernel does not tell.
pub fn resident_bytes() -> u64 {
    bytes("/proc/self/status", "VmRSS:").unwrap_or(0)
}

/// The most resident memory so far; 0 where the kernel does not tell.
pub fn peak_bytes() -> u64 {
    bytes("/proc/self/status", "VmHWM:").unwrap_or(0)
}

/// Memory that can be had without swapping, if the kernel tells.
pub fn available_bytes() -> Option<u64> {
    bytes("/proc/meminfo", "MemAvailable:")
}

/// A line such as `VmRSS:      1234 kB`.
fn bytes(file: &str, key: &str) -> Option<u64> {
    let text = read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_tells() {
        assert!(resident_bytes() > 0);
        assert!(peak_bytes() >= resident_bytes());
        assert!(available_bytes().is_some_and(|bytes| bytes > 0));
    }
}
