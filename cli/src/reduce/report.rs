//! The report of a reduction, for each tensor and in total: a table for people, JSON for programs.

use std::collections::BTreeSet;
use std::io::{self, Write};

use racksum_proto::counted::counted;
use racksum_proto::peer_text::PeerText;
use racksum_proto::rank_list::named;
use serde::{Deserialize, Serialize};

use super::Args;
use super::file::Tensor;
use super::survey::Held;
use crate::args::Format;
use crate::exit::{Failure, stdout_failure};

/// The report of one rank after it has reduced all its tensors.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Report {
    /// For each tensor, counts of the blocks that the ranks hold.
    pub(super) held: Vec<Held>,
    /// For each tensor, the ranks that were lost before they had contributed all of it.
    pub(super) absent: Vec<Vec<u16>>,
    /// A hash of all results, which must be the same at every rank.
    pub(super) digest: u64,
    pub(super) shards: usize,
    pub(super) multicast: bool,
    /// UDP payload that the rank sent for the tensors, in bytes, including headers,
    /// acknowledgements and retransmissions.
    pub(super) tx_bytes: u64,
    pub(super) rx_bytes: u64,
    pub(super) retransmits: u64,
    pub(super) kernel_drops: u64,
    pub(super) time_us: f64,
}

/// The data to print.
pub(super) struct Table<'a> {
    pub(super) args: &'a Args,
    pub(super) tensors: &'a [Tensor],
    /// The rank and world of a distributed run, or `None` if all ranks report.
    pub(super) rank: Option<(u16, u16)>,
    /// The reports of all ranks, or of this rank alone.
    pub(super) reports: &'a [Report],
}

/// The JSON line of a tensor.
#[derive(Debug, Serialize)]
struct Row<'a> {
    tensor: &'a str,
    dtype: &'static str,
    wire: &'static str,
    shape: &'a [usize],
    elements: u64,
    /// The ranks that were lost before they had contributed all of the tensor.
    absent: &'a [u16],
    #[serde(flatten)]
    held: &'a Held,
}

/// The last JSON line, with the totals.
#[derive(Debug, Serialize)]
struct Total<'a> {
    ranks: u16,
    /// The only rank that the traffic and time cover, or `None` if they cover all ranks.
    rank: Option<u16>,
    tensors: usize,
    op: &'static str,
    block: usize,
    shards: usize,
    fanout: &'static str,
    elements: u64,
    /// The ranks that are absent from at least one tensor.
    absent: BTreeSet<u16>,
    #[serde(flatten)]
    held: &'a Held,
    /// UDP payload that each rank sent, in bytes, including headers, acknowledgements and
    /// retransmissions.
    tx_bytes: Vec<u64>,
    rx_bytes: Vec<u64>,
    retransmits: u64,
    kernel_drops: u64,
    time_us: f64,
    out: Option<String>,
}

impl Table<'_> {
    /// Prints the report in the format that the flags ask for.
    pub(super) fn print(&self) -> Result<(), Failure> {
        self.write(&mut io::stdout().lock()).map_err(stdout_failure)
    }

    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let Some(first) = self.reports.first() else { return Ok(()) };
        let world = self.rank.map_or(self.reports.len(), |(_, world)| usize::from(world));
        let sum = sum(&first.held, world);
        match self.args.format {
            Format::Text => self.write_text(out, first, &sum)?,
            Format::Json => self.write_json(out, first, &sum)?,
        }
        out.flush()
    }

    fn write_json(&self, out: &mut impl Write, first: &Report, sum: &Held) -> io::Result<()> {
        let mut write_line = |line: Result<String, serde_json::Error>| {
            // Numbers and names always serialize, so the default is never used.
            writeln!(out, "{}", escaped(&line.unwrap_or_default()))
        };
        for ((tensor, held), absent) in self.tensors.iter().zip(&first.held).zip(&first.absent) {
            write_line(serde_json::to_string(&Row {
                tensor: &tensor.name,
                dtype: tensor.dtype.name(),
                wire: self.wire(tensor),
                shape: &tensor.shape,
                elements: tensor.elements,
                absent,
                held,
            }))?;
        }
        write_line(serde_json::to_string(&Total {
            ranks: u16::try_from(sum.rank_blocks.len()).unwrap_or(u16::MAX),
            rank: self.rank.map(|(rank, _)| rank),
            tensors: self.tensors.len(),
            op: self.args.op.name(),
            block: self.args.block,
            shards: first.shards,
            fanout: fanout(first),
            elements: self.elements(),
            absent: absent(first),
            held: sum,
            tx_bytes: self.reports.iter().map(|report| report.tx_bytes).collect(),
            rx_bytes: self.reports.iter().map(|report| report.rx_bytes).collect(),
            retransmits: self.reports.iter().map(|report| report.retransmits).sum(),
            kernel_drops: self.reports.iter().map(|report| report.kernel_drops).sum(),
            time_us: self.time_us(),
            out: self.args.out.as_ref().map(|path| path.display().to_string()),
        }))
    }

    fn write_text(&self, out: &mut impl Write, first: &Report, sum: &Held) -> io::Result<()> {
        let world = sum.rank_blocks.len();
        let names = self.tensors.iter().map(|tensor| shown(&tensor.name).chars().count());
        let width = names.max().unwrap_or(0).clamp("# tensor".len(), MAX_NAME);
        let each = if world <= MAX_RANKS { "each rank" } else { "least, mean, most" };
        let across = 6 * world.min(MAX_RANKS);
        writeln!(
            out,
            "# {}, {}, blocks of {}, {}, {}; density is the share of blocks that are not zero;\n\
             # tx and rx are the bytes of these blocks on the wire",
            counted(world, "rank"),
            self.args.op.name(),
            self.args.block,
            counted(first.shards, "shard"),
            fanout(first)
        )?;
        writeln!(
            out,
            "{:<width$}  {:>5}  {:>7}  {:>11}  {:>8}  {:>across$}  {:>6}  {:>11}  {:>11}  {:>11}",
            "# tensor",
            "dtype",
            "wire",
            "elements",
            "blocks",
            "density",
            "union",
            "tx",
            "rx",
            "dense"
        )?;
        writeln!(
            out,
            "{:<width$}  {:>5}  {:>7}  {:>11}  {:>8}  {each:>across$}  {:>6}  {:>11}  {:>11}  \
             {:>11}",
            "#", "", "", "", "", "(%)", "(B/rank)", "(B/rank)", "(B/rank)"
        )?;
        let mut line = |[name, dtype, wire]: [&str; 3], elements: u64, held: &Held, note: &str| {
            writeln!(
                out,
                "{name:<width$}  {dtype:>5}  {wire:>7}  {elements:>11}  {:>8}  {:>across$}  {:>6}  \
                 {:>11}  {:>11}  {:>11}{note}",
                held.blocks,
                densities(held),
                percent(held.union_blocks, held.blocks),
                mean(&held.rank_bytes),
                held.union_bytes,
                held.dense_bytes
            )
        };
        for ((tensor, held), absent) in self.tensors.iter().zip(&first.held).zip(&first.absent) {
            let name = shown(&tensor.name);
            let names = [&name, tensor.dtype.name(), self.wire(tensor)];
            line(names, tensor.elements, held, &lacks(absent))?;
        }
        line(["# all", "", ""], self.elements(), sum, "")?;
        write_absent(out, first)?;
        self.write_traffic(out, sum)
    }

    /// Writes the measured traffic and time, and the path of the result.
    fn write_traffic(&self, out: &mut impl Write, sum: &Held) -> io::Result<()> {
        let mean_of =
            |of: fn(&Report) -> u64| mean(&self.reports.iter().map(of).collect::<Vec<_>>());
        let who = self.rank.map_or_else(|| "a rank".to_owned(), |(rank, _)| format!("rank {rank}"));
        let (tx, rx) = (mean_of(|report| report.tx_bytes), mean_of(|report| report.rx_bytes));
        let dense = sum.dense_bytes;
        let again: u64 = self.reports.iter().map(|report| report.retransmits).sum();
        writeln!(
            out,
            "# {who} sent {tx} B ({} % of the dense size, {dense} B) and received {rx} B ({} %), \
             headers included;\n# {} retransmitted; {:.1} ms",
            percent(tx, dense),
            percent(rx, dense),
            counted(again, "fragment"),
            self.time_us() / 1e3,
        )?;
        match &self.args.out {
            Some(path) => writeln!(out, "# wrote {}", PeerText::of(path.display())),
            None => Ok(()),
        }
    }

    fn elements(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.elements).sum()
    }

    /// Returns the time of the slowest rank in microseconds.
    fn time_us(&self) -> f64 {
        self.reports.iter().map(|report| report.time_us).fold(0.0, f64::max)
    }

    fn wire(&self, tensor: &Tensor) -> &'static str {
        self.args.wire_of(tensor).name()
    }
}

/// Returns the end of a tensor's line, which names the ranks that were lost before they had
/// contributed all of the tensor.
fn lacks(absent: &[u16]) -> String {
    match absent {
        [] => String::new(),
        _ => format!("  lacks {}", named(absent.iter().copied())),
    }
}

/// Returns the ranks that are absent from at least one tensor.
fn absent(report: &Report) -> BTreeSet<u16> {
    report.absent.iter().flatten().copied().collect()
}

/// Writes which ranks were lost, and how many tensors lack their contributions.
fn write_absent(out: &mut impl Write, report: &Report) -> io::Result<()> {
    for rank in absent(report) {
        let lack = report.absent.iter().filter(|absent| absent.contains(&rank)).count();
        let of = report.absent.len();
        writeln!(
            out,
            "# rank {rank} was lost: {lack} of {of} tensors lack some or all of its values"
        )?;
    }
    Ok(())
}

const fn fanout(report: &Report) -> &'static str {
    if report.multicast { "multicast" } else { "unicast" }
}

/// Adds up the counts of all tensors.
fn sum(held: &[Held], world: usize) -> Held {
    let mut sum = Held {
        blocks: 0,
        dense_bytes: 0,
        rank_blocks: vec![0; world],
        rank_bytes: vec![0; world],
        union_blocks: 0,
        union_bytes: 0,
    };
    for held in held {
        sum.blocks += held.blocks;
        sum.dense_bytes += held.dense_bytes;
        sum.union_blocks += held.union_blocks;
        sum.union_bytes += held.union_bytes;
        let add = |to: &mut Vec<u64>, from: &[u64]| {
            to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
        };
        add(&mut sum.rank_blocks, &held.rank_blocks);
        add(&mut sum.rank_bytes, &held.rank_bytes);
    }
    sum
}

/// Formats the share of blocks that each rank holds, or the least, mean and greatest share if there
/// are many ranks.
fn densities(held: &Held) -> String {
    let share = |blocks: u64| format!("{:>5}", percent(blocks, held.blocks));
    let ranks = &held.rank_blocks;
    let shares: Vec<String> = if ranks.len() <= MAX_RANKS {
        ranks.iter().map(|blocks| share(*blocks)).collect()
    } else {
        let least = ranks.iter().min().copied().unwrap_or(0);
        let most = ranks.iter().max().copied().unwrap_or(0);
        [least, mean(ranks), most].map(share).into()
    };
    shares.join(" ")
}

fn mean(of: &[u64]) -> u64 {
    of.iter().sum::<u64>() / (of.len() as u64).max(1)
}

fn percent(part: u64, whole: u64) -> String {
    if whole == 0 { "-".to_owned() } else { format!("{:.1}", part as f64 / whole as f64 * 1e2) }
}

/// Returns a tensor's name in a form that is safe to print.
fn shown(name: &str) -> String {
    PeerText::of(name).into()
}

/// Escapes those characters of a JSON line that could control a terminal, without changing the
/// meaning of the line. JSON itself escapes only control characters below U+0020.
fn escaped(json: &str) -> String {
    let mut line = String::with_capacity(json.len());
    for c in json.chars() {
        if matches!(c, ' '..='~') || PeerText::is_plain(c.encode_utf8(&mut [0; 4])) {
            line.push(c);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                line += &format!("\\u{unit:04x}");
            }
        }
    }
    line
}

/// Maximum number of ranks whose densities are printed one by one.
const MAX_RANKS: usize = 8;
/// Maximum width of the column of names. A longer name shifts the rest of its line.
const MAX_NAME: usize = 48;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::parsed;

    /// Returns `absent` from the last JSON object of a report in which tensor `i` lacks the ranks
    /// `absent[i]`.
    fn absent_of_all(absent: &[&[u16]]) -> serde_json::Value {
        let args: Args = parsed(&["reduce", "--format", "json", "file"]);
        let report = Report {
            held: Vec::new(),
            absent: absent.iter().map(|ranks| ranks.to_vec()).collect(),
            digest: 0,
            shards: 1,
            multicast: false,
            tx_bytes: 0,
            rx_bytes: 0,
            retransmits: 0,
            kernel_drops: 0,
            time_us: 0.0,
        };
        let mut out = Vec::new();
        let table = Table { args: &args, tensors: &[], rank: Some((0, 8)), reports: &[report] };
        table.write(&mut out).unwrap();
        serde_json::from_slice::<serde_json::Value>(&out).unwrap()["absent"].clone()
    }

    #[test]
    fn programs_read_once_for_all_which_ranks_were_lost() {
        assert_eq!(absent_of_all(&[&[], &[7], &[5, 7]]), serde_json::json!([5, 7]));
        assert_eq!(absent_of_all(&[&[], &[]]), serde_json::json!([]));
    }

    #[test]
    fn a_tensor_s_name_is_shown_without_control_characters_and_programs_read_it_as_it_is() {
        let name = "a\n\x1b[31m\x7f\u{9b}1m\u{202e}\u{e0041}é\"\\";
        let line = escaped(&serde_json::to_string(name).unwrap());
        for text in [&line, &shown(name)] {
            assert!(PeerText::is_plain(text), "{text:?}");
        }
        assert_eq!(serde_json::from_str::<String>(&line).unwrap(), name);
        assert!(shown(&"x".repeat(1 << 20)).len() <= PeerText::MAX);
    }
}
