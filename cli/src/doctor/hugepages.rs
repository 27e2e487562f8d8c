// SPDX-License-Identifier: Apache-2.0
//! Huge pages for Store's memory pool: what there is, what Store asks for.

use std::path::PathBuf;

use super::machine::Machine;
use super::report::Finding;

const POOLS: &str = "/sys/kernel/mm/hugepages";
const NODES: &str = "/sys/devices/system/node";
const USE: &str = "MC_STORE_USE_HUGEPAGE";
const SIZE: &str = "MC_STORE_HUGEPAGE_SIZE";
/// What Store can use, and how it is written.
const SIZES: [(u64, &str); 3] = [(2 << 10, "2MB"), (512 << 10, "512MB"), (1 << 20, "1GB")];
const MIB: u64 = 1 << 20;

/// Pages of one size.
struct Pool {
    size_kb: u64,
    /// Reserved for the pool.
    total: u64,
    free: u64,
    /// Free, but promised to a mapping.
    promised: u64,
    /// Node, total, free.
    nodes: Vec<(u64, u64, u64)>,
}

impl Pool {
    fn read(machine: &Machine<'_>, folder: &str, size_kb: u64) -> Option<Self> {
        let of = |place: &str, file: &str| machine.number(format!("{place}/{file}"));
        let pool = format!("{POOLS}/{folder}");
        let nodes = machine
            .list(NODES)
            .into_iter()
            .filter_map(|name| {
                let node = name.strip_prefix("node")?.parse().ok()?;
                let pool = format!("{NODES}/{name}/hugepages/{folder}");
                Some((
                    node,
                    of(&pool, "nr_hugepages")?,
                    of(&pool, "free_hugepages")?,
                ))
            })
            .collect();
        Some(Self {
            size_kb,
            total: of(&pool, "nr_hugepages")?,
            free: of(&pool, "free_hugepages")?,
            promised: of(&pool, "resv_hugepages").unwrap_or(0),
            nodes,
        })
    }

    /// The system's default size, from `/proc/meminfo`, for where `/sys` is not.
    fn from_meminfo(machine: &Machine<'_>) -> Option<Self> {
        Some(Self {
            size_kb: meminfo(machine, "Hugepagesize")?,
            total: meminfo(machine, "HugePages_Total")?,
            free: meminfo(machine, "HugePages_Free")?,
            promised: meminfo(machine, "HugePages_Rsvd").unwrap_or(0),
            nodes: Vec::new(),
        })
    }

    fn available(&self) -> u64 {
        self.free.saturating_sub(self.promised)
    }

    fn describe(&self) -> String {
        let mut text = format!("{} reserved, {} free", self.total, self.available());
        let nodes: Vec<String> = self
            .nodes
            .iter()
            .map(|(node, total, free)| format!("node {node}: {total} reserved, {free} free"))
            .collect();
        if !nodes.is_empty() {
            text += &format!(" ({})", nodes.join("; "));
        }
        text
    }
}

/// Checks the pools, Store's variables, and room for `store_bytes`.
pub fn check(machine: &Machine<'_>, store_bytes: Option<u64>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let wanted = machine.variable(USE);
    let asked = wanted.is_some() || store_bytes.is_some();
    let pools = pools(machine, asked, &mut findings);

    findings.push(match wanted.as_deref() {
        None if store_bytes.is_some() => Finding::warning(USE, "unset: Store takes ordinary pages")
            .needs("set, for huge pages")
            .mend(format!("export {USE}=1")),
        None => Finding::ok(USE, "unset: Store takes ordinary pages"),
        Some("1") => Finding::ok(USE, "1"),
        Some(value) => Finding::warning(
            USE,
            format!("'{value}', which turns huge pages on: set to anything, it does"),
        )
        .needs("1, or unset for ordinary pages")
        .mend(format!("export {USE}=1")),
    });

    let (size_kb, name) = match size(machine) {
        Ok(size) => size,
        Err(value) => {
            findings.push(
                Finding::warning(
                    SIZE,
                    format!("'{value}', so Store falls back to 2MB with a warning"),
                )
                .needs("2MB, 512MB or 1GB")
                .mend(format!("export {SIZE}=2MB")),
            );
            SIZES[0]
        }
    };
    let pool = pools.iter().find(|pool| pool.size_kb == size_kb);
    if asked {
        findings.push(fit(&pools, pool, size_kb, name, store_bytes.is_some()));
    } else if machine.variable(SIZE).is_some() {
        findings.push(Finding::ok(SIZE, format!("{name}, without effect")));
    }
    if let Some(bytes) = store_bytes {
        findings.push(room(machine, pool, size_kb, name, bytes));
    }
    findings
}

fn pools(machine: &Machine<'_>, asked: bool, findings: &mut Vec<Finding>) -> Vec<Pool> {
    const CHECK: &str = "hugepages";
    let mut pools: Vec<Pool> = machine
        .list(POOLS)
        .into_iter()
        .filter_map(|folder| {
            let size_kb = folder
                .strip_prefix("hugepages-")?
                .strip_suffix("kB")?
                .parse()
                .ok()?;
            Pool::read(machine, &folder, size_kb)
        })
        .collect();
    pools.sort_by_key(|pool| pool.size_kb);
    if pools.is_empty() {
        let found = if machine.exists(POOLS) {
            format!("{POOLS} has none")
        } else {
            format!("there is no {POOLS}")
        };
        pools.extend(Pool::from_meminfo(machine));
        let found = match pools.first() {
            Some(pool) => format!(
                "{found}; /proc/meminfo has {}: {}",
                size_name(pool.size_kb),
                pool.describe()
            ),
            None => found,
        };
        findings.push(if asked {
            Finding::warning(CHECK, found)
                .needs(format!("{POOLS}, to see every size"))
                .mend("docker run -v /sys:/sys:ro …")
        } else {
            Finding::ok(CHECK, found)
        });
        return pools;
    }
    for pool in &pools {
        let size = size_name(pool.size_kb);
        findings.push(Finding::ok(CHECK, format!("{size}: {}", pool.describe())));
    }
    pools
}

/// The size that Store takes, in KiB with its name, or the value that it does
/// not understand.
fn size(machine: &Machine<'_>) -> Result<(u64, &'static str), String> {
    let Some(value) = machine.variable(SIZE) else {
        return Ok(SIZES[0]);
    };
    let kb = parse_kb(&value);
    let known = SIZES.into_iter().find(|(size, _)| Some(*size) == kb);
    known.ok_or(value)
}

/// Store reads a number with or without a unit, in either case.
fn parse_kb(text: &str) -> Option<u64> {
    let text = text.trim();
    let end = text
        .find(|c: char| !(c.is_ascii_digit() || c == '.'))
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let bytes: f64 = match unit.trim().to_ascii_uppercase().as_str() {
        "" | "B" => 1.0,
        "K" | "KB" => 1024.0,
        "M" | "MB" => 1024.0 * 1024.0,
        "G" | "GB" => 1024.0 * 1024.0 * 1024.0,
        _ => return None,
    };
    let bytes = number.parse::<f64>().ok()? * bytes;
    (bytes % 1024.0 == 0.0).then_some((bytes / 1024.0) as u64)
}

fn size_name(kb: u64) -> String {
    match kb {
        kb if kb % (1 << 20) == 0 => format!("{}GB", kb >> 20),
        kb if kb % (1 << 10) == 0 => format!("{}MB", kb >> 10),
        kb => format!("{kb}kB"),
    }
}

/// Store's size against the machine's.
///
/// How many pages are reserved is left to [`room`] where it is asked for.
fn fit(pools: &[Pool], pool: Option<&Pool>, size_kb: u64, name: &str, counted: bool) -> Finding {
    // The fall-back is in every Mooncake that was not integrated.
    let note = if size_kb == SIZES[1].0 {
        ", which takes an integrated Mooncake: others fall back to 2MB"
    } else {
        ""
    };
    let Some(pool) = pool else {
        let usable: Vec<&str> = SIZES
            .iter()
            .filter(|(size, _)| pools.iter().any(|pool| pool.size_kb == *size))
            .map(|(_, name)| *name)
            .collect();
        let found = format!("{name} pages, which this machine does not have: mmap fails");
        if pools.is_empty() {
            return Finding::warning(SIZE, format!("{name}; the machine's sizes are unknown"))
                .needs("a size that the machine has");
        }
        let finding = Finding::problem(SIZE, found).needs(if usable.is_empty() {
            "a machine with pages of 2MB, 512MB or 1GB".to_owned()
        } else {
            usable.join(" or ")
        });
        return match usable.first() {
            Some(size) => finding.mend(format!("export {SIZE}={size}")),
            None => finding,
        };
    };
    if pool.total == 0 && !counted {
        return Finding::problem(
            SIZE,
            format!("{name}, of which none is reserved: mmap fails with errno 12"),
        )
        .needs("reserved pages; --store-bytes says how many")
        .mend(format!(
            "echo <pages> > {POOLS}/hugepages-{size_kb}kB/nr_hugepages"
        ));
    }
    Finding::ok(SIZE, format!("{name}{note}"))
}

/// Whether `bytes` fit, and if not the commands that make room.
fn room(
    machine: &Machine<'_>,
    pool: Option<&Pool>,
    size_kb: u64,
    name: &str,
    bytes: u64,
) -> Finding {
    const CHECK: &str = "store pages";
    let needed = bytes.div_ceil(size_kb * 1024);
    let (total, available) = pool.map_or((0, 0), |pool| (pool.total, pool.available()));
    let needs = format!("{needed} pages of {name} for {bytes} bytes");
    let missing = needed.saturating_sub(available);
    if missing == 0 {
        return Finding::ok(CHECK, format!("{available} of {name} are free")).needs(needs);
    }
    let mut found = format!("{available} of {name} are free, {missing} are missing");
    let missing_mb = missing.saturating_mul(size_kb) / 1024;
    if let Some(free_kb) = meminfo(machine, "MemAvailable")
        && free_kb / 1024 < missing_mb
    {
        found += &format!(
            ", which are {missing_mb} MB, and only {} MB of memory are available",
            free_kb / 1024
        );
    }
    let total = total + missing;
    let file = format!("{POOLS}/hugepages-{size_kb}kB/nr_hugepages");
    let finding = Finding::problem(CHECK, found)
        .needs(needs)
        .mend(format!("echo {total} > {file}"));
    // vm.nr_hugepages is about the default size alone.
    let default_kb = meminfo(machine, "Hugepagesize").unwrap_or(2 * MIB / 1024);
    if size_kb == default_kb {
        let conf = PathBuf::from("/etc/sysctl.d/99-hugepages.conf");
        finding
            .mend(format!(
                "echo 'vm.nr_hugepages = {total}' > {}",
                conf.display()
            ))
            .mend(format!("sysctl -p {}", conf.display()))
    } else {
        finding.mend(format!(
            "echo 'w {file} - - - - {total}' > /etc/tmpfiles.d/99-hugepages.conf"
        ))
    }
}

/// A number of `/proc/meminfo`; sizes are in kB.
pub fn meminfo(machine: &Machine<'_>, key: &str) -> Option<u64> {
    let text = machine.text("/proc/meminfo")?;
    let value = text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name == key).then_some(value)
    })?;
    value.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_store_reads_them() {
        for (text, kb) in [
            ("2MB", Some(2048)),
            ("512MB", Some(524_288)),
            ("1GB", Some(1 << 20)),
            (" 2 mb ", Some(2048)),
            ("0.5GB", Some(524_288)),
            ("2097152", Some(2048)),
            ("2MiB", None),
            ("huge", None),
            ("", None),
        ] {
            assert_eq!(parse_kb(text), kb, "{text}");
        }
    }

    #[test]
    fn sizes_are_named_as_the_variable_takes_them() {
        for (kb, name) in SIZES {
            assert_eq!(size_name(kb), name);
        }
        assert_eq!(size_name(64), "64kB");
        assert_eq!(size_name(16 << 20), "16GB");
    }
}
