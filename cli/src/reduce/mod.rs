//! `racksum reduce`: sums the gradients in safetensors files, one file for each rank.

mod file;
mod keys;
mod parent;
mod quoted;
mod rank;
mod report;
mod survey;

use std::path::PathBuf;

use clap::ArgGroup;
use racksum_proto::control::OnRankLoss;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{Reduction, WireType};
use racksum_worker::{ConnectOptions, Faults};

use self::file::{GradientFile, Tensor};
use self::quoted::Quoted;
use crate::args::{self, Fanout, Format};
use crate::exit::Failure;
use crate::member::{Member, MemberArgs};
use crate::process_group::{end_with_parent, send_to_parent};
use crate::standby::StandbyArgs;
use crate::stderr;

#[derive(Debug, Clone, clap::Args)]
#[command(after_long_help = format!("{HELP}\n\n{}", args::EXIT_CODES))]
#[command(group(ArgGroup::new("faults").args(["drop", "dup", "reorder"]).multiple(true)))]
pub(crate) struct Args {
    /// Gradient files, one per rank, rank 0 first; with --rank, only this rank's file.
    #[arg(required = true, value_name = "RANK.safetensors")]
    files: Vec<PathBuf>,
    /// File for the result; an existing file is replaced, even an input [default: only print the
    /// table].
    #[arg(long, value_name = "SUM.safetensors")]
    out: Option<PathBuf>,
    #[command(flatten)]
    member: MemberArgs,
    /// Reduction: sum, avg, min, max.
    #[arg(short = 'o', long, default_value = "sum")]
    op: Reduction,
    /// Wire type: f32, bf16, f16, int8 or fixed32 [default: each tensor's type].
    #[arg(long)]
    wire: Option<WireType>,
    /// Number of elements in a block: a power of two from 32 to 1024.
    #[arg(long, default_value_t = Descriptor::DEFAULT_BLOCK)]
    #[arg(value_parser = args::number::<usize>(args::BLOCKS))]
    block: usize,
    /// Number of shards of the aggregator on this host.
    #[arg(
        long,
        default_value_t = 1,
        value_parser = args::number::<u8>(args::SHARDS),
        conflicts_with = "rank"
    )]
    shards: u8,
    /// How results reach the ranks on this host.
    #[arg(long, value_enum, ignore_case = true, default_value_t = Fanout::Auto)]
    #[arg(conflicts_with = "rank")]
    fanout: Fanout,
    /// MTU of the path [default: the interface's].
    #[arg(long, value_parser = args::number::<usize>(args::MTUS), requires = "rank")]
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
    /// Seed of the faults.
    #[arg(long, default_value_t = 1, requires = "faults")]
    #[arg(value_parser = args::number::<u64>(0..=u64::MAX))]
    seed: u64,
    /// Timeout of each tensor in seconds.
    #[arg(long, default_value_t = 60, value_parser = args::number::<u64>(args::SECONDS))]
    timeout: u64,
    #[command(flatten)]
    standby: StandbyArgs,
    /// Policy when a rank is lost: abort, or continue and report the tensors that lack its values.
    #[arg(long, value_name = "POLICY", default_value = "abort", requires = "rank")]
    on_rank_loss: OnRankLoss,
    /// Output format.
    #[arg(long, value_enum, ignore_case = true, default_value_t = Format::Text)]
    format: Format,
    /// Print the report as JSON on standard output, for the parent process to merge.
    #[arg(long, hide = true, requires = "rank")]
    raw: bool,
    /// Write the result into this file, which the parent process moves to --out.
    #[arg(long, hide = true, requires = "raw", requires = "out")]
    into: Option<PathBuf>,
}

/// Text of `--help` after the flags.
const HELP: &str = "\
Without --rank, an aggregator and one worker process per file run on this host. Other users of the
host cannot join the job, and can read its traffic only if --data-auth is none or mac. All files
must hold the same tensors, with the same names, dtypes and shapes. The result holds these tensors
reduced over the files, without the __metadata__ of the files.

Examples:
  racksum reduce rank0.safetensors rank1.safetensors --out sum.safetensors
  racksum reduce --op avg --wire bf16 rank*.safetensors --out mean.safetensors
  racksum reduce rank*.safetensors --format json     how sparse the gradients are, for programs
  racksum reduce --aggregator HOST:7177 --insecure --rank 0 --world 2 rank0.safetensors";

impl Args {
    /// Returns a rank's connection options.
    fn connect_options(&self, member: &Member) -> ConnectOptions {
        let faults =
            Faults { drop: self.drop, duplicate: self.dup, reorder: self.reorder, seed: self.seed };
        ConnectOptions {
            on_rank_loss: self.on_rank_loss,
            mtu: self.mtu,
            ..member.options(self.timeout, faults)
        }
    }

    /// Returns the descriptor of a tensor's op. The descriptor covers the tensor's name and shape,
    /// so that all ranks must agree on them.
    ///
    /// # Errors
    /// A message that names the tensor and the problem.
    fn descriptor(&self, tensor: &Tensor) -> Result<Descriptor, Failure> {
        let descriptor = Descriptor {
            tag: tensor.tag(),
            wire: self.wire_of(tensor),
            reduction: self.op,
            ..Descriptor::sum(tensor.elements, tensor.dtype)
        };
        let checked = descriptor
            .with_block(self.block)
            .and_then(|descriptor| descriptor.validate().map(|()| descriptor));
        checked.map_err(|error| Failure::usage(format!("tensor {}: {error}", Quoted(&tensor.name))))
    }

    /// Returns the wire type of a tensor. Tensors that the requested wire type cannot carry, such
    /// as counters and flags, keep their native wire type.
    fn wire_of(&self, tensor: &Tensor) -> WireType {
        let asked = self.wire.filter(|_| !self.travels_as_is(tensor));
        asked.unwrap_or_else(|| tensor.dtype.native_wire())
    }

    /// Returns whether a tensor keeps its native wire type because the requested one cannot carry
    /// it.
    fn travels_as_is(&self, tensor: &Tensor) -> bool {
        self.wire.is_some_and(|wire| !wire.carries(tensor.dtype))
    }

    /// Warns in one line about the tensors that keep their native wire type.
    ///
    /// # Errors
    /// A message for the user, if the requested wire type can carry none of the tensors.
    fn warn_unnarrowed(&self, file: &GradientFile) -> Result<(), Failure> {
        let Some(wire) = self.wire else { return Ok(()) };
        let as_is: Vec<&Tensor> =
            file.tensors.iter().filter(|tensor| self.travels_as_is(tensor)).collect();
        let Some(first) = as_is.first() else { return Ok(()) };
        let (wire, name, dtype) = (wire.name(), Quoted(&first.name), first.dtype.name());
        if as_is.len() == file.tensors.len() {
            return Err(Failure::usage(format!(
                "tensor {name}: wire type {wire} cannot carry a tensor of {dtype}, nor any other \
                 tensor of the file; leave --wire out"
            )));
        }
        let which = match as_is.len() - 1 {
            0 => "keeps its own type".to_owned(),
            others => format!("and {others} more keep their own types"),
        };
        stderr::warn(format_args!(
            "--wire {wire} cannot carry a tensor of {dtype}: tensor {name} {which}"
        ));
        Ok(())
    }

    /// Returns the descriptors of the ops of a file's tensors, in order.
    fn descriptors(&self, file: &GradientFile) -> Result<Vec<Descriptor>, Failure> {
        file.tensors.iter().map(|tensor| self.descriptor(tensor)).collect()
    }
}

/// Runs the reduction, as the parent process of all ranks or as one rank.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let Some(member) = args.member.member("reduce")? else { return parent::run(args) };
    let [path] = &args.files[..] else {
        return Err(Failure::usage(format!(
            "with --rank, give only this rank's file, not {} files",
            args.files.len()
        )));
    };
    if args.raw {
        end_with_parent()?;
        return send_to_parent(&rank::run_for_parent(args, &member, path));
    }
    rank::run(args, &member, path)
}
