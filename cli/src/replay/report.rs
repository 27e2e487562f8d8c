// SPDX-License-Identifier: Apache-2.0
//! What a replay did, as a table and as JSON.

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use indicatif::{BinaryBytes, HumanCount};
use serde::Serialize;

use super::content::Mismatch;
use super::message::Verified;
use super::side::{Sizes, Totals};

/// Everything that is told at the end.
#[derive(Debug, Serialize)]
pub struct Report {
    /// What ran.
    pub library: Library,
    /// What was replayed.
    pub trace: Trace,
    /// With which sizes.
    pub sizes: ReportedSizes,
    /// Through the transport.
    pub transport: Side,
    /// Straight through the library's calls.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub raw: Option<Side>,
    /// How the two compare.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transport_over_raw: Option<Ratio>,
    /// What the target found in its pools; None if it could not be asked.
    pub in_place: Option<Verified>,
    /// Of the initiator, staging included.
    pub memory: Memory,
    /// Contract violations counted by the emulator, in both processes; None with
    /// another library.
    pub violations: Option<Vec<String>>,
    /// Whether Ctrl-C ended it.
    pub interrupted: bool,
    /// What else went wrong.
    pub problems: Vec<String>,
    /// Whether all went well.
    pub ok: bool,
}

/// The library that ran.
#[derive(Debug, Serialize)]
pub struct Library {
    /// Its file.
    pub path: String,
    /// The emulator's own words; None with another library.
    pub emulator: Option<String>,
    /// `MF_PROTOCOL`'s name.
    pub protocol: &'static str,
}

/// The trace.
#[derive(Debug, Serialize)]
pub struct Trace {
    /// Its file; None if it is the synthetic one.
    pub file: Option<String>,
    /// Requests to replay.
    pub requests: u64,
}

/// The sizes in bytes and pieces.
#[derive(Debug, Serialize)]
pub struct ReportedSizes {
    block_bytes: usize,
    pool_bytes: usize,
    pool_blocks: usize,
    in_flight: usize,
    blocks_per_sub_batch: usize,
}

impl ReportedSizes {
    /// Of `sizes`.
    pub fn of(sizes: Sizes) -> Self {
        Self {
            block_bytes: sizes.block_bytes,
            pool_bytes: sizes.block_bytes * sizes.slots.get(),
            pool_blocks: sizes.slots.get(),
            in_flight: sizes.in_flight,
            blocks_per_sub_batch: sizes.blocks_per_sub_batch,
        }
    }
}

/// One side's numbers.
#[derive(Debug, Serialize)]
pub struct Side {
    requests: u64,
    sub_batches: u64,
    blocks_written: u64,
    blocks_read: u64,
    duplicates: u64,
    bytes_written: u64,
    bytes_read: u64,
    hit_rate: f64,
    seconds: f64,
    /// Of these, for making and comparing contents.
    content_seconds: f64,
    write_gb_per_s: f64,
    read_gb_per_s: f64,
    gb_per_s: f64,
    latency_us: Latency,
    vendor_calls: VendorCalls,
    /// Of the blocks that were read.
    pub mismatches: u64,
    first_mismatches: Vec<Mismatch>,
    /// Tasks that polled FAILED.
    pub failed_tasks: u64,
    failed_sub_batches: u64,
    query_errors: u64,
}

/// Of a sub-batch, from submission to the poll that saw it done.
#[derive(Debug, Serialize)]
struct Latency {
    p50: f64,
    p90: f64,
    p99: f64,
    p99_9: f64,
    max: f64,
}

/// Calls of the library on the way of the data.
#[derive(Debug, Serialize)]
struct VendorCalls {
    smem_trans_batch_copy: u64,
    /// Only the emulator counts them.
    smem_trans_batch_status_query: Option<u64>,
    counted_by: &'static str,
}

/// The transport's throughput by that of the raw calls.
#[derive(Debug, Serialize)]
pub struct Ratio {
    /// Over the slices of the trace that each side replayed in turn.
    pub median: f64,
    /// Slices.
    pub slices: usize,
}

/// Resident memory.
#[derive(Debug, Serialize)]
pub struct Memory {
    /// At the end of the replay.
    pub resident_bytes: u64,
    /// At its highest.
    pub peak_bytes: u64,
}

impl Side {
    /// Of `totals`.
    pub fn of(totals: &Totals, emulated: bool) -> Self {
        let bytes_written = totals.blocks_written * totals.block_bytes;
        let bytes_read = totals.blocks_read * totals.block_bytes;
        let seconds = totals.elapsed.as_secs_f64();
        let rate = |bytes: u64| {
            if seconds > 0.0 {
                bytes as f64 / seconds / 1e9
            } else {
                0.0
            }
        };
        let blocks = totals.blocks_written + totals.blocks_read;
        let microseconds = |nanoseconds: u64| nanoseconds as f64 / 1e3;
        let quantile = |q| microseconds(totals.latency.value_at_quantile(q));
        Self {
            requests: totals.requests,
            sub_batches: totals.sub_batches,
            blocks_written: totals.blocks_written,
            blocks_read: totals.blocks_read,
            duplicates: totals.duplicates,
            bytes_written,
            bytes_read,
            hit_rate: totals.blocks_read as f64 / blocks.max(1) as f64,
            seconds,
            content_seconds: totals.contents.as_secs_f64(),
            write_gb_per_s: rate(bytes_written),
            read_gb_per_s: rate(bytes_read),
            gb_per_s: rate(totals.bytes()),
            latency_us: Latency {
                p50: quantile(0.5),
                p90: quantile(0.9),
                p99: quantile(0.99),
                p99_9: quantile(0.999),
                max: microseconds(totals.latency.max()),
            },
            vendor_calls: if emulated {
                VendorCalls {
                    smem_trans_batch_copy: totals.calls.submit,
                    smem_trans_batch_status_query: Some(totals.calls.query),
                    counted_by: "emulator",
                }
            } else {
                VendorCalls {
                    smem_trans_batch_copy: totals.vendor_batches,
                    smem_trans_batch_status_query: None,
                    counted_by: "memfabric",
                }
            },
            mismatches: totals.mismatches,
            first_mismatches: totals.first_mismatches.clone(),
            failed_tasks: totals.failed_tasks,
            failed_sub_batches: totals.failed_sub_batches,
            query_errors: totals.query_errors,
        }
    }

    fn rows(&self) -> Vec<(&'static str, String)> {
        let count = |number| HumanCount(number).to_string();
        let moved = |blocks, bytes| format!("{} ({})", HumanCount(blocks), BinaryBytes(bytes));
        let latency = &self.latency_us;
        let time = |us: f64| {
            if us < 10_000.0 {
                format!("{us:.0} us")
            } else {
                format!("{:.1} ms", us / 1e3)
            }
        };
        let calls = &self.vendor_calls;
        let queries = calls.smem_trans_batch_status_query;
        vec![
            ("requests", count(self.requests)),
            ("sub-batches", count(self.sub_batches)),
            (
                "blocks written",
                moved(self.blocks_written, self.bytes_written),
            ),
            ("blocks read", moved(self.blocks_read, self.bytes_read)),
            ("hit rate", format!("{:.1} %", self.hit_rate * 100.0)),
            ("time", format!("{:.2} s", self.seconds)),
            (
                "  making and comparing contents",
                format!("{:.2} s", self.content_seconds),
            ),
            ("throughput", format!("{:.2} GB/s", self.gb_per_s)),
            ("  written", format!("{:.2} GB/s", self.write_gb_per_s)),
            ("  read", format!("{:.2} GB/s", self.read_gb_per_s)),
            ("sub-batch latency p50", time(latency.p50)),
            ("  p90", time(latency.p90)),
            ("  p99", time(latency.p99)),
            ("  p99.9", time(latency.p99_9)),
            ("  max", time(latency.max)),
            (
                "vendor calls: batch_copy",
                count(calls.smem_trans_batch_copy),
            ),
            (
                "  batch_status_query",
                queries.map_or_else(|| "not counted".to_owned(), count),
            ),
            ("mismatches in what was read", count(self.mismatches)),
            ("failed tasks", count(self.failed_tasks)),
            ("query errors", count(self.query_errors)),
        ]
    }
}

impl Report {
    /// Everything that makes a replay a failure.
    pub fn faults(&self) -> Vec<String> {
        let sides = || std::iter::once(&self.transport).chain(&self.raw);
        let failed: u64 = sides().map(|side| side.failed_tasks).sum();
        let misread: u64 = sides().map(|side| side.mismatches).sum();
        let misplaced = self.in_place.as_ref().map_or(0, |found| found.mismatches);
        let violations = self.violations.as_ref().map_or(0, Vec::len) as u64;
        let counted = [
            (failed, "failed tasks"),
            (misread, "mismatches in what was read"),
            (misplaced, "mismatches in the pool"),
            (violations, "violations of the library's contract"),
        ];
        let counted = counted.iter().filter(|(number, _)| *number > 0);
        counted
            .map(|(number, what)| format!("{what}: {}", HumanCount(*number)))
            .chain(self.problems.iter().cloned())
            .collect()
    }

    /// The table, with what does not fit into one below it.
    pub fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(NOTHING);
        let mut cells: Vec<Vec<String>> = Vec::new();
        for (label, value) in self.transport.rows() {
            cells.push(vec![label.to_owned(), value]);
        }
        if let Some(raw) = &self.raw {
            table.set_header(["", "transport", "raw"]);
            for (row, (_, value)) in cells.iter_mut().zip(raw.rows()) {
                row.push(value);
            }
        }
        table.add_rows(cells);
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let mut text = table.trim_fmt();
        text.push('\n');
        for line in self.lines() {
            text.push('\n');
            text.push_str(&line);
        }
        text
    }

    fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if let Some(ratio) = &self.transport_over_raw {
            lines.push(format!(
                "transport / raw: {:.3} (median over {} slices of the trace)",
                ratio.median, ratio.slices
            ));
        }
        let sides = || std::iter::once(&self.transport).chain(&self.raw);
        match &self.in_place {
            Some(found) => lines.push(format!(
                "in the pool: {} blocks verified, {} mismatches",
                HumanCount(found.blocks),
                HumanCount(found.mismatches)
            )),
            None => lines.push("in the pool: not verified".to_owned()),
        }
        let mut memory = format!(
            "resident memory: {} (staging included, peak {})",
            BinaryBytes(self.memory.resident_bytes),
            BinaryBytes(self.memory.peak_bytes)
        );
        if let Some(found) = &self.in_place {
            memory.push_str(&format!(", target {}", BinaryBytes(found.resident_bytes)));
        }
        lines.push(memory);
        lines.push(match &self.violations {
            Some(violations) => format!("violations: {}", violations.len()),
            None => "violations: only the emulator counts them".to_owned(),
        });
        let read = sides().flat_map(|side| &side.first_mismatches);
        lines.extend(read.map(|mismatch| format!("  read: {mismatch}")));
        let found = self
            .in_place
            .iter()
            .flat_map(|found| &found.first_mismatches);
        lines.extend(found.map(|mismatch| format!("  in the pool: {mismatch}")));
        let violations = self.violations.iter().flatten();
        lines.extend(violations.map(|text| format!("  violation: {text}")));
        if self.interrupted {
            lines.push("interrupted: this is what was done so far".to_owned());
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroUsize;

    fn report() -> Report {
        let sizes = Sizes {
            block_bytes: 4096,
            slots: NonZeroUsize::MIN,
            in_flight: 1,
            blocks_per_sub_batch: 1,
        };
        let mut totals = Totals::new(sizes.block_bytes);
        totals.blocks_written = 3;
        totals.blocks_read = 1;
        totals.elapsed = std::time::Duration::from_micros(8);
        Report {
            library: Library {
                path: "libmf_smem.so".to_owned(),
                emulator: Some("emulator".to_owned()),
                protocol: "host_rdma",
            },
            trace: Trace {
                file: None,
                requests: 1,
            },
            sizes: ReportedSizes::of(sizes),
            transport: Side::of(&totals, true),
            raw: None,
            transport_over_raw: None,
            in_place: Some(Verified::default()),
            memory: Memory {
                resident_bytes: 1,
                peak_bytes: 2,
            },
            violations: Some(Vec::new()),
            interrupted: false,
            problems: Vec::new(),
            ok: true,
        }
    }

    #[test]
    fn rates_are_bytes_over_the_whole_time() {
        let side = report().transport;
        assert_eq!(side.gb_per_s, 4.0 * 4096.0 / 8e-6 / 1e9);
        assert_eq!(side.write_gb_per_s, 3.0 * side.read_gb_per_s);
        assert_eq!(side.hit_rate, 0.25);
    }

    #[test]
    fn anything_wrong_anywhere_is_a_fault() {
        assert_eq!(report().faults(), Vec::<String>::new());
        type Spoil = fn(&mut Report);
        let spoils: [(Spoil, &str); 7] = [
            (
                |report| report.transport.failed_tasks = 2,
                "failed tasks: 2",
            ),
            (
                |report| report.transport.mismatches = 1,
                "mismatches in what was read: 1",
            ),
            (
                |report| {
                    let mut totals = Totals::new(1);
                    totals.failed_tasks = 4;
                    report.raw = Some(Side::of(&totals, true));
                },
                "failed tasks: 4",
            ),
            (
                |report| {
                    let mut totals = Totals::new(1);
                    totals.mismatches = 5;
                    report.raw = Some(Side::of(&totals, true));
                },
                "mismatches in what was read: 5",
            ),
            (
                |report| {
                    report.in_place = Some(Verified {
                        mismatches: 3,
                        ..Verified::default()
                    });
                },
                "mismatches in the pool: 3",
            ),
            (
                |report| report.violations = Some(vec!["queried twice".to_owned()]),
                "violations of the library's contract: 1",
            ),
            (|report| report.problems.push("gone".to_owned()), "gone"),
        ];
        for (spoil, fault) in spoils {
            let mut report = report();
            spoil(&mut report);
            assert_eq!(report.faults(), [fault]);
        }
    }

    #[test]
    fn violations_and_mismatches_are_spelled_out_below_the_table() {
        let mut report = report();
        report.violations = Some(vec!["queried twice".to_owned()]);
        report.transport.first_mismatches.push(Mismatch {
            block: 7,
            slot: 1,
            offset: 2,
            expected: 3,
            got: 4,
        });
        let table = report.table();
        assert!(table.contains("\nviolations: 1\n"), "{table}");
        assert!(table.contains("\n  violation: queried twice"), "{table}");
        let line = "\n  read: block 7 in slot 1: byte 2 is 0x04, should be 0x03";
        assert!(table.contains(line), "{table}");
    }
}
