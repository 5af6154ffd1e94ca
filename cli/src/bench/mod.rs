//! `racksum bench`: measures how fast tensors of many sizes are reduced, and checks the results.

mod agree;
mod parent;
mod rank;
mod report;

use std::io::BufRead;
use std::sync::Arc;

use clap::ValueEnum;
use racksum_benches::data::{Input, Overlap, Pattern};
use racksum_proto::counted::{are, counted};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{DType, Reduction, WireType};
use racksum_proto::names::UnknownName;
use racksum_worker::Stats;
use rank::{RankMessage, Runner};
use report::Row;
use serde::Deserialize;

use crate::args::{self, Fanout, Format};
use crate::exit::{Failure, print_line};
use crate::member::{Member, MemberArgs};
use crate::process_group::{end_with_parent, send_to_parent};
use crate::progress::{Line, Pace, Work};
use crate::{memory, stderr};

#[derive(Debug, Clone, clap::Args)]
#[command(after_long_help = format!("{HELP}\n\n{}", args::EXIT_CODES))]
pub(crate) struct Args {
    /// Smallest size, in bytes or with the unit K, M, G or T.
    #[arg(short = 'b', long, value_parser = args::size, default_value = "4K")]
    min_bytes: u64,
    /// Largest size.
    #[arg(short = 'e', long, value_parser = args::size, default_value = "64M")]
    max_bytes: u64,
    /// Factor between successive sizes.
    #[arg(short = 'f', long, default_value_t = 8)]
    #[arg(value_parser = args::number::<u64>(2..=u64::MAX))]
    step_factor: u64,
    /// Difference between successive sizes, instead of a factor.
    #[arg(short = 'i', long, value_parser = args::size, conflicts_with = "step_factor")]
    step_bytes: Option<u64>,
    /// Number of timed iterations.
    #[arg(short = 'n', long, default_value_t = 20)]
    #[arg(value_parser = args::number::<u32>(1..=u32::MAX.into()))]
    iters: u32,
    /// Number of warm-up iterations.
    #[arg(short = 'w', long, default_value_t = 3)]
    #[arg(value_parser = args::number::<u32>(args::ANY_U32))]
    warmup_iters: u32,
    /// Element type: f32, f64, f16, bf16, i32, i64.
    #[arg(short = 'd', long, default_value = "f32")]
    datatype: DType,
    /// Reduction: sum, avg, min, max.
    #[arg(short = 'o', long, default_value = "sum")]
    op: Reduction,
    /// Whether to check every element of the last iteration's result: 0 or 1.
    #[arg(short = 'c', long, default_value_t = 1)]
    #[arg(value_parser = args::number::<u8>(0..=1))]
    check: u8,
    /// Number of ranks on this host, each a process [default: 4].
    #[arg(long, value_parser = args::number::<u16>(1..=256))]
    workers: Option<u16>,
    #[command(flatten)]
    member: MemberArgs,
    /// Share of each rank's blocks that are not zero, from 0 to 1 [default: 1, then 0.01].
    #[arg(long, value_parser = args::share)]
    density: Option<f64>,
    /// Overlap of the ranks' non-zero blocks.
    #[arg(long, value_enum, ignore_case = true, default_value_t = Overlap::Random)]
    overlap: Overlap,
    /// Number of elements in a block: a power of two from 32 to 1024. A window has at most 64
    /// blocks, so use 512 for dense tensors with 2 bytes per element on the wire.
    #[arg(long, default_value_t = 256, value_parser = args::number::<usize>(args::BLOCKS))]
    block: usize,
    /// Form of an op's input.
    #[arg(long, value_enum, ignore_case = true, default_value_t = Input::Dense)]
    input: Input,
    /// Wire type: bf16, f16, int8 or fixed32 [default: the element type].
    #[arg(long)]
    wire: Option<WireType>,
    /// Number of shards of the aggregator on this host [default: 1].
    #[arg(long, value_parser = args::number::<u8>(args::SHARDS))]
    shards: Option<u8>,
    /// Maximum number of slots per stream; 0 lets the aggregator choose.
    #[arg(long, default_value_t = 0, value_parser = args::slots)]
    pool_slots: u32,
    /// How results reach the ranks on this host [default: auto].
    #[arg(long, value_enum, ignore_case = true)]
    fanout: Option<Fanout>,
    /// Number of lanes of the job, over which the ops in flight are spread.
    #[arg(long, default_value_t = 1, value_parser = args::number::<u8>(1..=8))]
    lanes: u8,
    /// Number of ops in flight, which together make one iteration.
    #[arg(long, default_value_t = 1, value_parser = args::number::<u16>(1..=64))]
    ops_in_flight: u16,
    /// MTU of the path [default: the interface's].
    #[arg(long, value_parser = args::number::<usize>(args::MTUS))]
    mtu: Option<usize>,
    /// Share of datagrams that each rank drops on purpose, in each direction.
    #[arg(long, value_parser = args::share, default_value = "0")]
    drop: f64,
    /// Share of datagrams that each rank duplicates.
    #[arg(long, value_parser = args::share, default_value = "0")]
    dup: f64,
    /// Share of datagrams that each rank delays.
    #[arg(long, value_parser = args::share, default_value = "0")]
    reorder: f64,
    /// Seed of the data and of the faults.
    #[arg(long, default_value_t = 1, value_parser = args::number::<u64>(0..=u64::MAX))]
    seed: u64,
    /// Timeout of each op in seconds.
    #[arg(long, default_value_t = 60, value_parser = args::number::<u64>(args::SECONDS))]
    timeout: u64,
    /// Output format.
    #[arg(long, value_enum, ignore_case = true, default_value_t = Format::Text)]
    format: Format,
    /// Print the measurements as JSON, for the parent process to merge.
    #[arg(long, hide = true)]
    raw: bool,
    /// Read commands from standard input, one per line, as the peers of
    /// `cargo xtask bench peers` do.
    #[arg(long, hide = true, requires = "rank")]
    interactive: bool,
}

/// Text of `--help` after the flags.
const HELP: &str = "\
Without --rank, an aggregator and the workers run on this host, each worker in its own process.
Without flags, the benchmark measures and checks a dense sweep and a sweep with a density of 1 %,
in less than a minute.

The columns are those of nccl-tests. An iteration takes as long as its slowest rank; time and p99
are the median and the 99th percentile over the iterations. algbw is size / time and busbw is
algbw * 2 (n-1)/n; #wrong counts elements that differ from the expected sum; tx and rx are the UDP
payload of an iteration at the rank with the most; again counts retransmitted fragments.

Examples:
  racksum bench                                      this host, 4 ranks
  racksum bench -b 1M -e 1G -f 4 --workers 8         other sizes, more ranks
  racksum bench --density 0.01 --overlap all         sparse: all ranks hold the same 1 % of blocks
  racksum bench --wire int8 --drop 0.01              8-bit elements, on a path that loses 1 %
  racksum bench --format json | jq .busbw_gb_s       for programs, one object per size
  racksum bench --aggregator HOST:7177 --insecure --rank 0 --world 2     one rank of two";

/// Default number of ranks on this host.
const WORKERS: u16 = 4;

impl Args {
    /// Refuses flags that are invalid or would have no effect. Runs before anything starts.
    fn check(&self) -> Result<(), Failure> {
        let usage = |error: String| Err(Failure::usage(error));
        self.check_least()?;
        if self.step_bytes == Some(0) {
            return usage("-i must be at least 1, not 0".into());
        }
        let Some(most) = self.most() else {
            return usage(format!(
                "-b must not be greater than -e: no size lies between {} and {} bytes",
                self.min_bytes, self.max_bytes
            ));
        };
        self.descriptor(most)?;
        self.check_memory(most)?;
        let world = self.member.world.or(self.workers).unwrap_or(WORKERS);
        let most = 1.0 / f64::from(world.max(1));
        let mut densities = self.densities().into_iter();
        if let (Overlap::None, Some(density)) =
            (self.overlap, densities.find(|density| *density > most))
        {
            return usage(format!(
                "--overlap none leaves each of {world} ranks at most {most:.3} of the blocks, not \
                 {density}; lower --density"
            ));
        }
        // The parent process passes all its flags on to its ranks, so a rank with `--raw` may have
        // the flags below.
        if !self.member.is_rank() || self.raw {
            return Ok(());
        }
        let local = [
            ("--workers", self.workers.is_some()),
            ("--shards", self.shards.is_some()),
            ("--fanout", self.fanout.is_some()),
        ];
        let given = local.iter().find(|(_, given)| *given);
        given.map_or(Ok(()), |(flag, _)| {
            usage(format!("{flag} applies only to a run on this host, and conflicts with --rank"))
        })
    }

    /// Refuses tensors that do not fit in this host's memory.
    fn check_memory(&self, most: u64) -> Result<(), Failure> {
        let here = if self.member.is_rank() { 1 } else { self.workers.unwrap_or(WORKERS) };
        // Each op has a tensor, and each rank has one pristine copy to restore the tensors from.
        let each = most.saturating_mul(1 + u64::from(self.ops_in_flight.max(1)));
        let what = format!("tensors of {most} bytes");
        memory::check_host(&what, each, here, "lower -e, --workers or --ops-in-flight")
    }

    /// Returns the descriptor of an op on a tensor of at most `bytes`.
    fn descriptor(&self, bytes: u64) -> Result<Descriptor, Failure> {
        let elements = bytes / self.datatype.size() as u64;
        let descriptor = Descriptor {
            wire: self.wire_type(),
            reduction: self.op,
            ..Descriptor::sum(elements, self.datatype)
        };
        descriptor
            .with_block(self.block)
            .and_then(|descriptor| descriptor.validate().map(|()| descriptor))
            .map_err(|error| Failure::usage(error.to_string()))
    }

    /// Returns the wire type of the elements.
    fn wire_type(&self) -> WireType {
        self.wire.unwrap_or_else(|| self.datatype.native_wire())
    }

    fn pattern(&self, world: u16, density: f64) -> Pattern {
        let Self { block, overlap, seed, .. } = *self;
        Pattern { world, block, density, overlap, seed }
    }

    /// Returns the densities to measure.
    fn densities(&self) -> Vec<f64> {
        self.density.map_or_else(|| vec![1.0, 0.01], |density| vec![density])
    }

    /// Returns a progress counter for the whole benchmark.
    fn work(&self) -> Arc<Work> {
        let each = self.sizes().map(effort).fold(0, u64::saturating_add);
        let rounds = self.rounds() * self.densities().len() as u64;
        Work::new(each.saturating_mul(rounds))
    }

    /// Returns the number of iterations for each size, including the warm-up.
    fn rounds(&self) -> u64 {
        u64::from(self.warmup_iters) + u64::from(self.iters)
    }

    /// Checks that the smallest size has room for at least one element.
    fn check_least(&self) -> Result<(), Failure> {
        let (least, element) = (self.min_bytes, self.datatype.size() as u64);
        if least >= element {
            return Ok(());
        }
        let name = self.datatype.name();
        Err(Failure::usage(format!(
            "-b must be at least {element} bytes, one element of {name}, not {least}"
        )))
    }

    /// Returns the largest size to measure, or `None` if the range is empty.
    fn most(&self) -> Option<u64> {
        let Some(step) = self.step_bytes else { return self.sizes().last() };
        let room = self.max_bytes.checked_sub(self.min_bytes)?;
        Some(self.min_bytes + room / step * step)
    }

    /// Returns the sizes to measure.
    fn sizes(&self) -> impl Iterator<Item = u64> {
        let next = |size: &u64| match self.step_bytes {
            Some(step) => size.checked_add(step),
            None => size.checked_mul(self.step_factor),
        };
        std::iter::successors(Some(self.min_bytes), next).take_while(|size| *size <= self.max_bytes)
    }
}

/// Runs the benchmark, as the parent process of all ranks or as one rank.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    args.check()?;
    if !args.raw && u16::from(args.lanes) > args.ops_in_flight {
        stderr::warn(format_args!(
            "--ops-in-flight {1} uses only {1} of {0} lanes; raise it to {0}, or lower --lanes",
            args.lanes, args.ops_in_flight
        ));
    }
    let Some(member) = args.member.member("bench")? else { return parent::run(args) };
    if args.raw {
        end_with_parent()?;
    }
    if args.interactive {
        return interact(args, &mut Runner::connect(args, &member)?);
    }
    match measure(args, &member) {
        // The parent process prints the reason once for all ranks.
        Err(failure) if args.raw => send_to_parent(&Err::<(), _>(failure)),
        measured => measured,
    }
}

/// Measures all sizes as one rank.
fn measure(args: &Args, member: &Member) -> Result<(), Failure> {
    let Member { rank, world, .. } = *member;
    let mut runner = Runner::connect(args, member)?;
    runner.agree(args)?;
    let work = args.work();
    // If all ranks run on this host, their parent process draws the line from the progress that
    // rank 0 reports.
    let line = (!args.raw).then(|| line_of(&work));
    let mut pace = Pace::start();
    let mut is_report_due = || args.raw && rank == 0 && pace.is_due();
    let print_alone = |print: &dyn Fn() -> Result<(), Failure>| match &line {
        Some(line) => line.print(print),
        None => print(),
    };
    let mut wrong = 0;
    for density in args.densities() {
        let pattern = args.pattern(world, density);
        runner.set_pattern(pattern);
        if args.format == Format::Text && !args.raw {
            print_alone(&|| print_line(&Row::head(&pattern, Some(rank))))?;
        }
        for bytes in args.sizes() {
            let measured = runner.measure(bytes, args, || {
                work.advance(effort(bytes));
                if is_report_due() {
                    send_to_parent(&Ok(RankMessage::Reached(work.done())))
                } else {
                    Ok(())
                }
            })?;
            wrong += measured.wrong.unwrap_or(0);
            if args.raw {
                send_to_parent(&Ok(RankMessage::Measured(Box::new(measured))))?;
            } else if let Some(row) = Row::new(args, &pattern, Some(rank), &[measured]) {
                print_alone(&|| print(args.format, &row))?;
            }
        }
    }
    drop(line);
    // The parent process counts the wrong elements of all ranks.
    if args.raw { Ok(()) } else { verdict(wrong) }
}

/// Starts a line that shows the progress of the benchmark.
fn line_of(work: &Arc<Work>) -> Line {
    let work = Arc::clone(work);
    Line::start(move |passed| format!("measuring: {}", work.text(passed)))
}

/// Estimates the cost of an op in bytes: the size of its tensor, plus 64 KiB for the op's fixed
/// cost.
const fn effort(bytes: u64) -> u64 {
    bytes.saturating_add(64 << 10)
}

fn print(format: Format, row: &Row) -> Result<(), Failure> {
    match format {
        Format::Text => print_line(&row.line()),
        Format::Json => print_line(&row.json()),
    }
}

fn verdict(wrong: u64) -> Result<(), Failure> {
    match wrong {
        0 => Ok(()),
        _ => Err(Failure::failed(format!("{} {} wrong", counted(wrong, "element"), are(wrong)))),
    }
}

/// The settings that an interactive benchmark can change.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Change {
    bytes: Option<u64>,
    mode: Option<String>,
    density: Option<f64>,
    overlap: Option<String>,
    wire: Option<String>,
    input: Option<String>,
}

/// Runs the commands on standard input: `go` runs an iteration, `set {…}` changes settings, and
/// `quit` ends the run.
fn interact(args: &Args, runner: &mut Runner) -> Result<(), Failure> {
    let mut args = args.clone();
    let mut case = runner.prepare(args.min_bytes, &args)?;
    print_line(&format!("{{\"ready\":true,\"bytes\":{}}}", args.min_bytes))?;
    for line in std::io::stdin().lock().lines() {
        let line =
            line.map_err(|error| Failure::failed(format!("cannot read standard input: {error}")))?;
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("go", "") => {
                let iteration = runner.iterate(&mut case)?;
                let us = iteration.us();
                let rank::Iteration { start_ns, end_ns, spent } = iteration;
                let Stats { tx_bytes, rx_bytes, retransmits, .. } = spent;
                print_line(&format!(
                    "{{\"us\":{us},\"start_ns\":{start_ns},\"end_ns\":{end_ns},\
                     \"tx_bytes\":{tx_bytes},\"rx_bytes\":{rx_bytes},\
                     \"retransmits\":{retransmits}}}"
                ))?;
            }
            ("set", change) => {
                let change = serde_json::from_str(change).map_err(|error| {
                    Failure::usage(format!("cannot parse `set {change}`: {error}"))
                })?;
                apply(&mut args, runner, change)?;
                case = runner.prepare(args.min_bytes, &args)?;
                runner.iterate(&mut case)?;
                verdict(runner.check(&args, &case).unwrap_or(0))?;
                print_line(&format!("{{\"ready\":true,\"bytes\":{}}}", args.min_bytes))?;
            }
            ("quit", "") => return Ok(()),
            _ => {
                return Err(Failure::usage(format!(
                    "unknown command {line:?}; use go, set {{…}} or quit"
                )));
            }
        }
    }
    Ok(())
}

fn apply(args: &mut Args, runner: &mut Runner, change: Change) -> Result<(), Failure> {
    let usage = |error: String| Failure::usage(error);
    args.min_bytes = change.bytes.unwrap_or(args.min_bytes);
    args.check_least()?;
    let mut pattern = runner.pattern();
    match change.mode.as_deref() {
        Some("dense" | "small") => pattern.density = 1.0,
        Some("sparse") | None => {}
        Some(mode) => {
            return Err(Failure::usage(format!(
                "unknown mode {mode:?}; use dense, small or sparse"
            )));
        }
    }
    pattern.density = change.density.unwrap_or(pattern.density);
    if let Some(overlap) = change.overlap {
        pattern.overlap = Overlap::from_str(&overlap, true).map_err(usage)?;
    }
    if let Some(wire) = change.wire {
        args.wire = Some(wire.parse().map_err(|error: UnknownName| usage(error.to_string()))?);
    }
    if let Some(input) = change.input {
        args.input = Input::from_str(&input, true).map_err(usage)?;
    }
    runner.set_pattern(pattern);
    Ok(())
}
