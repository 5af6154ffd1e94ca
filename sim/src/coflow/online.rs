//! Sincronia online: coflows arrive over time, and epochs of doubling length decide their order.
//!
//! The `j`-th epoch of a cycle, from 0, ends 2^(j+1) units after the cycle's start. At the start of
//! an epoch, the coflows that were released in the first half of the time so far are candidates.
//! Those that fit into half of the epoch are admitted and ordered by BSSI. All others follow, for
//! work conservation: by the time that they would take alone over the time that they have waited.
//! Waiting moves a coflow forward, so none starves. New coflows join these at once. After some
//! epochs, eight by default, the cycle starts anew, so that epochs do not grow for ever.
//!
//! The published simulator orders by what the coflows had at first; this one orders by what they
//! have left. Another difference is how coflows are admitted: by a greedy solution of Sincronia's
//! linear program, which is the optimum on one port and keeps its bound on the load on all.

use crate::coflow::admission::admit;
use crate::coflow::bssi::Ratio;
use crate::coflow::fluid::{Fluid, Outcome, TooLong};
use crate::coflow::order::by_bssi;
use crate::coflow::rates::Rates;
use crate::coflow::workload::{WORK_PER_BYTE, Workload};
use crate::engine::Picos;

/// The lengths of epochs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Epochs {
    unit: Picos,
    per_cycle: u32,
}

impl Epochs {
    /// The number of epochs in a cycle of the published experiments.
    pub const PER_CYCLE: u32 = 8;

    /// Creates cycles of `per_cycle` epochs. The first epoch of a cycle has two units, and so has
    /// the second; each further one is twice as long as its predecessor.
    pub const fn new(unit: Picos, per_cycle: u32) -> Result<Self, EpochsError> {
        if unit.0 == 0 {
            return Err(EpochsError::NoUnit);
        }
        // A cycle lasts 2^per_cycle units, which must be below 2^63 ps.
        let most = unit.0.leading_zeros().saturating_sub(1);
        if per_cycle == 0 || per_cycle > most {
            return Err(EpochsError::Count { per_cycle, most });
        }
        Ok(Self { unit, per_cycle })
    }

    /// Returns the time from the start of a cycle to the end of its epoch `index`.
    const fn end(self, index: u32) -> u64 {
        self.unit.0 << (index + 1)
    }

    const fn cycle(self) -> u64 {
        self.end(self.per_cycle - 1)
    }
}

/// A reason why epochs cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EpochsError {
    /// The unit is zero.
    #[error("the unit of epochs is 0 ps; use the time of a typical small coflow")]
    NoUnit,
    /// There are no epochs in a cycle, or too many for 64 bits of picoseconds.
    #[error("a cycle has {per_cycle} epochs, but with this unit it can have 1 to {most}")]
    Count {
        /// The number of epochs in a cycle.
        per_cycle: u32,
        /// The largest number that is accepted.
        most: u32,
    },
}

/// Runs `workload` to its end with greedy rates.
pub fn run(workload: &Workload, epochs: Epochs) -> Result<Outcome, TooLong> {
    let mut online =
        Online { workload, epochs, oracle_ps: workload.oracle_ps(), fluid: Fluid::new(workload) };
    let mut cycle = 0;
    while online.has_more() {
        cycle = online.skip_idle_cycles(cycle)?;
        for index in 0..epochs.per_cycle {
            let end = epochs.end(index).checked_add(cycle).ok_or(TooLong)?;
            online.epoch(Picos(end))?;
        }
        cycle += epochs.cycle();
    }
    Ok(online.fluid.into_outcome())
}

struct Online<'a> {
    workload: &'a Workload,
    epochs: Epochs,
    oracle_ps: Vec<u128>,
    fluid: Fluid<'a>,
}

impl Online<'_> {
    fn has_more(&self) -> bool {
        self.fluid.next_release().is_some() || !self.fluid.is_idle()
    }

    /// Moves past the cycles from `cycle` on in which there is nothing to do; returns the start of
    /// the first one in which there is.
    fn skip_idle_cycles(&mut self, cycle: u64) -> Result<u64, TooLong> {
        let Some(release) = self.fluid.next_release().filter(|_| self.fluid.is_idle()) else {
            return Ok(cycle);
        };
        let idle = release.since(Picos(cycle)).0 / self.epochs.cycle();
        let cycle = cycle + idle * self.epochs.cycle();
        if idle > 0 {
            self.fluid.step(&[], Rates::Greedy, Picos(cycle))?;
        }
        Ok(cycle)
    }

    /// Runs one epoch, which begins now.
    fn epoch(&mut self, end: Picos) -> Result<(), TooLong> {
        let admitted = self.admitted(end);
        let mut order = self.with_the_rest(&admitted);
        while self.fluid.now() < end && self.has_more() {
            let release = self.fluid.next_release();
            let until = release.map_or(end, |release| release.min(end));
            self.fluid.step(&order, Rates::Greedy, until)?;
            if release.is_some_and(|release| release <= self.fluid.now()) {
                order = self.with_the_rest(&admitted);
            }
        }
        Ok(())
    }

    /// Returns the coflows that the epoch from now to `end` admits, ordered by BSSI.
    fn admitted(&self, end: Picos) -> Vec<usize> {
        let start = self.fluid.now();
        let is_candidate = |&it: &usize| self.workload.coflows()[it].release.0 <= start.0 / 2;
        let candidates: Vec<usize> = self.fluid.active().filter(is_candidate).collect();
        let fabric = self.workload.fabric();
        let demands: Vec<Vec<u64>> =
            candidates.iter().map(|&it| fabric.demands(self.fluid.left(it))).collect();
        let weight = |place: usize| self.workload.coflows()[candidates[place]].weight;
        let ordered = |places: &[usize]| -> Vec<usize> {
            let jobs = places.iter().map(|&place| (weight(place), demands[place].clone()));
            by_bssi(fabric, jobs).into_iter().map(|index| places[index]).collect()
        };
        let half = u128::from(end.since(start).0 / 2);
        let room = fabric.rates_bps().into_iter().map(|rate_bps| {
            u64::try_from(half * u128::from(rate_bps) / WORK_PER_BYTE).unwrap_or(u64::MAX)
        });
        let all: Vec<usize> = (0..candidates.len()).collect();
        let mut kept = admit(&ordered(&all), &demands, room.collect());
        kept.sort_unstable();
        ordered(&kept).into_iter().map(|place| candidates[place]).collect()
    }

    /// Returns `admitted`, followed by all other coflows with data left.
    fn with_the_rest(&self, admitted: &[usize]) -> Vec<usize> {
        let mut rest: Vec<usize> =
            self.fluid.active().filter(|it| !admitted.contains(it)).collect();
        // The published rule counts half a cycle as waited for, so that new coflows differ.
        let now = self.fluid.now().0.saturating_add(self.epochs.cycle() / 2);
        rest.sort_by_cached_key(|&it| {
            let coflow = &self.workload.coflows()[it];
            let waited = now.saturating_sub(coflow.release.0).max(1);
            (Ratio::new(self.oracle_ps[it], waited), coflow.release, coflow.id)
        });
        [admitted, &rest].concat()
    }
}
