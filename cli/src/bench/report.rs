//! The rows of a benchmark: in nccl-tests' layout for people, and as JSON for programs.

use hdrhistogram::Histogram;
use racksum_benches::data::Pattern;
use racksum_proto::counted::counted;
use serde::Serialize;

use super::Args;
use super::rank::Measured;

/// The row of one size, over all ranks that were measured.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    workers: u16,
    /// The only rank that the figures cover, or `None` if they cover all ranks.
    rank: Option<u16>,
    bytes: u64,
    count: u64,
    dtype: &'static str,
    wire: &'static str,
    op: &'static str,
    density: f64,
    overlap: &'static str,
    block: usize,
    input: &'static str,
    shards: u32,
    lanes: u8,
    ops_in_flight: u16,
    pool_slots: u32,
    fanout: &'static str,
    iters: u32,
    time_us: Times,
    algbw_gb_s: f64,
    busbw_gb_s: f64,
    tx_bytes_per_rank: u64,
    rx_bytes_per_rank: u64,
    retransmits: u64,
    kernel_drops: u64,
    wrong: Option<u64>,
}

/// Times of the iterations, in microseconds.
#[derive(Debug, Serialize)]
struct Times {
    min: f64,
    p50: f64,
    p99: f64,
    max: f64,
}

impl Row {
    /// Builds a row from the ranks' measurements, or returns `None` if there are none. An iteration
    /// takes as long as its slowest rank.
    pub(crate) fn new(
        args: &Args,
        pattern: &Pattern,
        rank: Option<u16>,
        measured: &[Measured],
    ) -> Option<Self> {
        let first = measured.first()?;
        let slowest = (0..first.times_us.len()).map(|i| {
            measured.iter().filter_map(|rank| rank.times_us.get(i)).fold(0f64, |a, b| a.max(*b))
        });
        let time_us = Times::of(slowest);
        let world = f64::from(pattern.world);
        let total = first.bytes as f64 * f64::from(args.ops_in_flight.max(1));
        let algbw = total / (time_us.p50 * 1e3).max(f64::MIN_POSITIVE);
        let most = |of: fn(&Measured) -> u64| measured.iter().map(of).max().unwrap_or(0);
        let wire = args.wire_type();
        Some(Self {
            workers: pattern.world,
            rank,
            bytes: first.bytes,
            count: first.count,
            dtype: args.datatype.name(),
            wire: wire.name(),
            op: args.op.name(),
            density: pattern.density,
            overlap: pattern.overlap.name(),
            block: args.block,
            input: args.input.name(),
            shards: first.shards,
            lanes: args.lanes,
            ops_in_flight: args.ops_in_flight,
            pool_slots: first.pool_slots,
            fanout: if first.multicast { "multicast" } else { "unicast" },
            iters: args.iters,
            algbw_gb_s: algbw,
            busbw_gb_s: algbw * 2.0 * (world - 1.0) / world,
            time_us,
            tx_bytes_per_rank: most(|rank| rank.tx_bytes),
            rx_bytes_per_rank: most(|rank| rank.rx_bytes),
            retransmits: measured.iter().map(|rank| rank.retransmits).sum(),
            kernel_drops: measured.iter().map(|rank| rank.kernel_drops).sum(),
            wrong: measured.iter().map(|rank| rank.wrong).sum(),
        })
    }

    /// Returns the number of wrong elements, or 0 if they were not checked.
    pub(crate) fn wrong(&self) -> u64 {
        self.wrong.unwrap_or(0)
    }

    pub(crate) fn json(&self) -> String {
        // Numbers and names always serialize, so the default is never used.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Formats the row as a line of the table.
    pub(crate) fn line(&self) -> String {
        let wrong = self.wrong.map_or_else(|| "N/A".to_owned(), |wrong| wrong.to_string());
        format!(
            "{:>12}  {:>12}  {:>8}  {:>6}  {:>7}  {:>9.1}  {:>9.1}  {:>6.2}  {:>6.2}  {:>6}  \
             {:>11}  {:>11}  {:>6}",
            self.bytes,
            self.count,
            self.dtype,
            self.op,
            self.wire,
            self.time_us.p50,
            self.time_us.p99,
            self.algbw_gb_s,
            self.busbw_gb_s,
            wrong,
            self.tx_bytes_per_rank,
            self.rx_bytes_per_rank,
            self.retransmits,
        )
    }

    /// Formats the header of a table, for all ranks or for one rank.
    pub(crate) fn head(pattern: &Pattern, rank: Option<u16>) -> String {
        let whose = rank.map_or_else(
            || "time is that of the slowest rank".to_owned(),
            |rank| format!("all figures are for rank {rank} only"),
        );
        format!(
            "# {}, density {} ({} overlap), blocks of {}; {whose}\n\
             #{:>11}  {:>12}  {:>8}  {:>6}  {:>7}  {:>9}  {:>9}  {:>6}  {:>6}  {:>6}  {:>11}  \
             {:>11}  {:>6}\n\
             #{:>11}  {:>12}  {:>8}  {:>6}  {:>7}  {:>9}  {:>9}  {:>6}  {:>6}  {:>6}  {:>11}  \
             {:>11}  {:>6}",
            counted(pattern.world, "rank"),
            pattern.density,
            pattern.overlap.name(),
            pattern.block,
            "size",
            "count",
            "type",
            "redop",
            "wire",
            "time",
            "p99",
            "algbw",
            "busbw",
            "#wrong",
            "tx/rank",
            "rx/rank",
            "again",
            "(B)",
            "(elements)",
            "",
            "",
            "",
            "(us)",
            "(us)",
            "(GB/s)",
            "(GB/s)",
            "",
            "(B)",
            "(B)",
            "",
        )
    }
}

/// Converts a time in microseconds to whole nanoseconds.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a time is not negative, and the conversion saturates"
)]
fn nanos(micros: f64) -> u64 {
    (micros * 1e3) as u64
}

impl Times {
    fn of(micros: impl Iterator<Item = f64>) -> Self {
        // The histogram records any number of nanoseconds, to three significant digits.
        let mut histogram = Histogram::<u64>::new_with_bounds(1, u64::MAX / 2, 3).ok();
        let (mut min, mut max) = (f64::INFINITY, 0f64);
        for time in micros {
            min = min.min(time);
            max = max.max(time);
            if let Some(histogram) = &mut histogram {
                histogram.saturating_record(nanos(time));
            }
        }
        let quantile = |q: f64| {
            let ns = histogram.as_ref().map_or(0, |histogram| histogram.value_at_quantile(q));
            (ns as f64 / 1e3).clamp(min.min(max), max)
        };
        Self { min: min.min(max), p50: quantile(0.5), p99: quantile(0.99), max }
    }
}
