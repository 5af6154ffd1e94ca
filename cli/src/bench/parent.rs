//! The benchmark on one host: an aggregator in this process, and a process for each rank.

use std::collections::VecDeque;

use racksum_aggregator::Config;

use super::rank::{Measured, RankMessage};
use super::report::Row;
use super::{Args, WORKERS, effort, line_of, print, verdict};
use crate::args::{Fanout, Format};
use crate::embedded::Embedded;
use crate::exit::{Failure, print_line};
use crate::process_group::ProcessGroup;
use crate::progress::Work;

/// Runs the benchmark and prints its rows.
pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let defaults = Config::default();
    let config = Config {
        port: 0,
        shards: args.shards.unwrap_or(1),
        pool_slots: if args.pool_slots == 0 { defaults.pool_slots } else { args.pool_slots },
        max_jobs: 1,
        data_auth: args.member.data_auth,
        fanout: args.fanout.unwrap_or(Fanout::Auto).into(),
        ..defaults
    };
    let aggregator = Embedded::start(config)?;
    let world = args.workers.unwrap_or(WORKERS);
    let mut workers = Workers::start(world, &aggregator)?;
    let work = args.work();
    let line = line_of(&work);
    let (mut wrong, mut done) = (0, 0_u64);
    for density in args.densities() {
        let pattern = args.pattern(world, density);
        if args.format == Format::Text {
            line.print(|| print_line(&Row::head(&pattern, None)))?;
        }
        for bytes in args.sizes() {
            let measured = workers.measured(&work)?;
            done = done.saturating_add(effort(bytes).saturating_mul(args.rounds()));
            work.reach(done);
            if let Some(row) = Row::new(args, &pattern, None, &measured) {
                wrong += row.wrong();
                line.print(|| print(args.format, &row))?;
            }
        }
    }
    drop(line);
    for rank in 0..usize::from(world) {
        let status = workers.process_group.end(rank)?;
        if !status.success() && wrong == 0 {
            return Err(workers.process_group.ended_early(rank));
        }
    }
    verdict(wrong)
}

/// The ranks' processes and their pending measurements. Some ranks may be ahead of others.
struct Workers {
    process_group: ProcessGroup,
    ahead: Vec<VecDeque<Measured>>,
    /// Whether each rank's output has ended.
    ended: Vec<bool>,
}

impl Workers {
    /// Starts the ranks with the flags of this process.
    fn start(world: u16, aggregator: &Embedded) -> Result<Self, Failure> {
        let process_group = ProcessGroup::start(world, |rank, command| {
            command.args(std::env::args_os().skip(1)).arg("--raw");
            aggregator.call(command, rank, world);
        })?;
        let world = usize::from(world);
        Ok(Self { process_group, ahead: vec![VecDeque::new(); world], ended: vec![false; world] })
    }

    /// Returns the next measurement of every rank, and updates the progress while it waits. If a
    /// rank ends without its measurement, returns why it ended.
    fn measured(&mut self, work: &Work) -> Result<Vec<Measured>, Failure> {
        while self.ahead.iter().any(VecDeque::is_empty) {
            let lacks = |rank: &usize| self.ended[*rank] && self.ahead[*rank].is_empty();
            if let Some(rank) = (0..self.ended.len()).find(lacks) {
                return Err(self.process_group.ended_early(rank));
            }
            match self.process_group.recv()? {
                (_, Some(RankMessage::Reached(done))) => work.reach(done),
                (rank, Some(RankMessage::Measured(measured))) => {
                    self.ahead[rank].push_back(*measured)
                }
                (rank, None) => self.ended[rank] = true,
            }
        }
        Ok(self.ahead.iter_mut().filter_map(VecDeque::pop_front).collect())
    }
}
