//! One rank of a benchmark: connects, reduces, measures and checks.

use racksum_benches::data::{Input, Pattern};
use racksum_net::clock::Clock;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::error::OpError;
use racksum_worker::{Blocks, Client, ConnectOptions, Error, Faults, Stats};

use super::{Args, agree};
use crate::exit::Failure;
use crate::member::Member;
use crate::memory;
use crate::progress;

/// The measurements of one size at one rank.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Measured {
    pub(crate) bytes: u64,
    pub(crate) count: u64,
    pub(crate) times_us: Vec<f64>,
    pub(crate) tx_bytes: u64,
    pub(crate) rx_bytes: u64,
    pub(crate) retransmits: u64,
    pub(crate) kernel_drops: u64,
    pub(crate) pool_slots: u32,
    pub(crate) shards: u32,
    pub(crate) multicast: bool,
    /// Number of wrong elements, or `None` if they were not checked.
    pub(crate) wrong: Option<u64>,
}

/// A report from a rank to its parent process: one line of JSON.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(crate) enum RankMessage {
    /// The work that the rank has done so far, in the unit of [`super::effort`].
    Reached(u64),
    /// The measurements of the next size.
    Measured(Box<Measured>),
}

/// A connected rank.
pub(crate) struct Runner {
    client: Client,
    clock: Clock,
    pattern: Pattern,
    rank: u16,
}

impl Runner {
    pub(crate) fn connect(args: &Args, member: &Member) -> Result<Self, Failure> {
        let faults =
            Faults { drop: args.drop, duplicate: args.dup, reorder: args.reorder, seed: args.seed };
        let options = ConnectOptions {
            lanes: args.lanes,
            pool_slots: args.pool_slots,
            mtu: args.mtu,
            ..member.options(args.timeout, faults)
        };
        let client = progress::connect(&options)?;
        let pattern = args.pattern(member.world, args.density.unwrap_or(1.0));
        Ok(Self { client, clock: Clock::start(), pattern, rank: member.rank })
    }

    /// Checks that all ranks were given the same flags.
    pub(crate) fn agree(&self, args: &Args) -> Result<(), Failure> {
        let mut flags = agree::encode(args);
        self.client.reduce(&mut flags, agree::descriptor(args)).map_err(explained)?;
        agree::check(args, &flags)
    }

    /// Sets the data pattern for all sizes from now on.
    pub(crate) const fn set_pattern(&mut self, pattern: Pattern) {
        self.pattern = pattern;
    }

    pub(crate) const fn pattern(&self) -> Pattern {
        self.pattern
    }

    /// Measures one size and calls `reached` after each iteration.
    pub(crate) fn measure(
        &self,
        bytes: u64,
        args: &Args,
        mut reached: impl FnMut() -> Result<(), Failure>,
    ) -> Result<Measured, Failure> {
        let mut case = self.prepare(bytes, args)?;
        for _ in 0..args.warmup_iters {
            self.iterate(&mut case)?;
            reached()?;
        }
        // Limit the initial capacity, because the user may ask for a huge number of iterations.
        let mut times_us = Vec::with_capacity(args.iters.min(1 << 16) as usize);
        let mut spent = Stats::default();
        for _ in 0..args.iters {
            let iteration = self.iterate(&mut case)?;
            times_us.push(iteration.us());
            spent = sum(&spent, &iteration.spent);
            reached()?;
        }
        let iters = u64::from(args.iters.max(1));
        Ok(Measured {
            bytes: case.pristine.len() as u64,
            count: case.descriptor.elements,
            times_us,
            tx_bytes: spent.tx_bytes / iters,
            rx_bytes: spent.rx_bytes / iters,
            retransmits: spent.retransmits,
            kernel_drops: spent.kernel_drops,
            pool_slots: self.client.grant().pool_slots,
            shards: u32::try_from(self.client.grant().shards).unwrap_or(u32::MAX),
            multicast: self.client.grant().multicast,
            wrong: self.check(args, &case),
        })
    }

    /// Prepares the tensors of one size, and a pristine copy to restore them from.
    pub(crate) fn prepare(&self, bytes: u64, args: &Args) -> Result<Case, Failure> {
        let descriptor = Descriptor { tag: self.pattern.tag(), ..args.descriptor(bytes)? };
        let len =
            usize::try_from(descriptor.elements * args.datatype.size() as u64).map_err(|_| {
                Failure::usage(format!("{bytes} bytes exceed the address space of this host"))
            })?;
        let mut pristine = memory::zeros(len)?;
        self.pattern.fill(self.rank, args.datatype, &mut pristine);
        let tensors = (0..args.ops_in_flight.max(1)).map(|_| memory::copy(&pristine));
        let tensors = tensors.collect::<Result<Vec<_>, _>>()?;
        let blocks = (args.input == Input::Blocks).then(|| self.blocks(&descriptor, &pristine));
        Ok(Case { descriptor, lanes: args.lanes, pristine, tensors, blocks, reduced: None })
    }

    /// Returns the non-zero blocks of a tensor as a list.
    fn blocks(&self, descriptor: &Descriptor, tensor: &[u8]) -> Blocks {
        let size = descriptor.dtype.size() * descriptor.block_elements();
        let mut blocks = Blocks::default();
        for (index, block) in (0..).zip(tensor.chunks(size)) {
            if self.pattern.holds(self.rank, u64::from(index)) {
                blocks.indices.push(index);
                blocks.values.extend_from_slice(block);
            }
        }
        blocks
    }

    /// Runs one iteration between two barriers, so that no rank prepares its next iteration while
    /// another rank's op still needs the processor.
    pub(crate) fn iterate(&self, case: &mut Case) -> Result<Iteration, Failure> {
        let mut blocks = case.blocks.clone();
        if blocks.is_none() {
            for tensor in &mut case.tensors {
                tensor.copy_from_slice(&case.pristine);
            }
        }
        self.barrier()?;
        let before = self.client.stats();
        let start = self.clock.now();
        self.reduce(case, blocks.as_mut()).map_err(explained)?;
        let end = self.clock.now();
        let spent = difference(&self.client.stats(), &before);
        self.barrier()?;
        Ok(Iteration { start_ns: start.0, end_ns: end.0, spent })
    }

    /// Runs the timed part of an iteration.
    fn reduce(&self, case: &mut Case, blocks: Option<&mut Blocks>) -> Result<(), Error> {
        match (blocks, &mut case.tensors[..]) {
            (Some(blocks), _) => {
                let handle = self.client.submit(std::mem::take(blocks), case.descriptor)?;
                let former = case.reduced.replace(handle.wait()?.tensor);
                former.into_iter().for_each(|sums| self.client.recycle(sums));
                Ok(())
            }
            (None, [tensor]) => self.client.reduce(tensor, case.descriptor).map(|_| ()),
            (None, tensors) => self.several(tensors, case.descriptor, case.lanes),
        }
    }

    /// Runs several ops at the same time, spread over the lanes.
    fn several(
        &self,
        tensors: &mut [Vec<u8>],
        descriptor: Descriptor,
        lanes: u8,
    ) -> Result<(), Error> {
        let handles = (0..)
            .zip(tensors.iter_mut())
            .map(|(i, tensor): (u8, _)| {
                let descriptor = Descriptor { lane: i % lanes, ..descriptor };
                self.client.submit(std::mem::take(tensor), descriptor)
            })
            .collect::<Result<Vec<_>, _>>()?;
        for (tensor, handle) in tensors.iter_mut().zip(handles) {
            *tensor = handle.wait()?.tensor;
        }
        Ok(())
    }

    /// Waits for all ranks by reducing one element.
    fn barrier(&self) -> Result<(), Failure> {
        let one = Descriptor::sum(1, DType::I32);
        self.client.reduce(&mut [1, 0, 0, 0], one).map(|_| ()).map_err(explained)
    }

    /// Counts the wrong elements of the last iteration. Returns `None` if checks are off.
    pub(crate) fn check(&self, args: &Args, case: &Case) -> Option<u64> {
        if args.check == 0 {
            return None;
        }
        let Descriptor { dtype, wire, reduction, .. } = case.descriptor;
        let wrong = |tensor: &[u8]| self.pattern.wrong(dtype, wire, reduction, tensor);
        match &case.reduced {
            None => Some(case.tensors.iter().map(|tensor| wrong(tensor)).sum()),
            Some(blocks) => {
                let mut tensor = vec![0; case.pristine.len()];
                let full = case.descriptor.block_elements() * dtype.size();
                let mut at = 0;
                for index in &blocks.indices {
                    let start = *index as usize * full;
                    let len = full.min(tensor.len() - start);
                    tensor[start..start + len].copy_from_slice(&blocks.values[at..at + len]);
                    at += len;
                }
                Some(wrong(&tensor))
            }
        }
    }
}

/// Converts an op's error to a failure. If the ranks disagree, adds advice for the user.
fn explained(error: Error) -> Failure {
    match error {
        Error::Op(error @ (OpError::Mismatch { .. } | OpError::Dropped { .. })) => {
            Failure::failed(format!(
                "{error}; give all ranks of a benchmark the same flags, and give every other \
                 command its own --job"
            ))
        }
        error => error.into(),
    }
}

/// The times and traffic of one iteration at this rank.
#[derive(Debug, Clone)]
pub(crate) struct Iteration {
    pub(crate) start_ns: u64,
    pub(crate) end_ns: u64,
    /// The traffic of the ops, without the barriers.
    pub(crate) spent: Stats,
}

impl Iteration {
    pub(crate) fn us(&self) -> f64 {
        (self.end_ns - self.start_ns) as f64 / 1e3
    }
}

/// The prepared data of one size.
pub(crate) struct Case {
    descriptor: Descriptor,
    lanes: u8,
    pristine: Vec<u8>,
    tensors: Vec<Vec<u8>>,
    blocks: Option<Blocks>,
    /// The result of the last iteration, if the input is a list of blocks.
    reduced: Option<Blocks>,
}

fn difference(after: &Stats, before: &Stats) -> Stats {
    Stats {
        tx_bytes: after.tx_bytes - before.tx_bytes,
        rx_bytes: after.rx_bytes - before.rx_bytes,
        retransmits: after.retransmits - before.retransmits,
        kernel_drops: after.kernel_drops - before.kernel_drops,
        ..Stats::default()
    }
}

fn sum(one: &Stats, other: &Stats) -> Stats {
    Stats {
        tx_bytes: one.tx_bytes + other.tx_bytes,
        rx_bytes: one.rx_bytes + other.rx_bytes,
        retransmits: one.retransmits + other.retransmits,
        kernel_drops: one.kernel_drops + other.kernel_drops,
        ..Stats::default()
    }
}
