//! A fluid simulation: flows move at constant rates between events.
//!
//! Time is in whole picoseconds, rates in whole bits per second, and the work left in bits per
//! second times picoseconds. A flow ends at the end of the picosecond in which its last bit moves.
//! Every step is integer arithmetic, so a run is exact up to that rounding and the same everywhere.

use crate::coflow::rates::{Rates, Sending};
use crate::coflow::workload::{Flow, WORK_PER_BYTE, Workload};
use crate::engine::Picos;

/// Runs `workload` to its end with one order, in which coflows take part when they are released.
///
/// # Panics
///
/// Panics if `order` does not name every coflow once.
pub fn run(workload: &Workload, order: &[usize], rates: Rates) -> Result<Outcome, TooLong> {
    let mut named = order.to_vec();
    named.sort_unstable();
    let is_whole = named.into_iter().eq(0..workload.coflows().len());
    assert!(is_whole, "an order names every coflow once");
    let mut fluid = Fluid::new(workload);
    loop {
        match fluid.next_release() {
            Some(release) => fluid.step(order, rates, release)?,
            None if fluid.is_idle() => return Ok(fluid.into_outcome()),
            None => fluid.step(order, rates, Picos::NEVER)?,
        }
    }
}

/// The completion times of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// The time at which each coflow completes, in the order of the workload.
    pub completed: Vec<Picos>,
}

impl Outcome {
    /// Returns the time at which the last coflow completes.
    #[must_use]
    pub fn makespan(&self) -> Picos {
        self.completed.iter().copied().max().unwrap_or(Picos::ZERO)
    }

    /// Returns the sum over all coflows of the time from release to completion.
    #[must_use]
    pub fn total_ps(&self, workload: &Workload) -> u128 {
        self.times(workload).map(|(_, takes)| takes).sum()
    }

    /// Returns the sum over all coflows of weight times the time from release to completion. It
    /// saturates.
    #[must_use]
    pub fn weighted_ps(&self, workload: &Workload) -> u128 {
        let weighted = self.times(workload).map(|(weight, takes)| u128::from(weight) * takes);
        weighted.fold(0, u128::saturating_add)
    }

    fn times<'a>(&'a self, workload: &'a Workload) -> impl Iterator<Item = (u64, u128)> + 'a {
        let pairs = self.completed.iter().zip(workload.coflows());
        pairs.map(|(at, it)| (it.weight, at.since(it.release).0.into()))
    }
}

/// An error: a run ends after the last time that 64 bits of picoseconds can express.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the coflows need more than 213 simulated days; scale sizes down or rates up")]
pub struct TooLong;

/// The state of a run.
#[derive(Debug)]
pub struct Fluid<'a> {
    workload: &'a Workload,
    now: Picos,
    /// The unfinished flows of each coflow, in the order of its flows.
    sending: Vec<Vec<Sending>>,
    /// The time at which each coflow completed.
    completed: Vec<Option<Picos>>,
    /// The coflows that are not released, the latest first.
    future: Vec<usize>,
}

impl<'a> Fluid<'a> {
    /// Creates the state at time zero.
    #[must_use]
    pub fn new(workload: &'a Workload) -> Self {
        let coflows = workload.coflows();
        let start = |flow: &Flow| Sending {
            source: flow.source,
            destination: flow.destination,
            left: u128::from(flow.bytes) * WORK_PER_BYTE,
            rate_bps: 0,
        };
        let sending = coflows
            .iter()
            .map(|it| it.flows.iter().filter(|flow| flow.bytes > 0).map(start).collect())
            .collect();
        let mut future: Vec<usize> = (0..coflows.len()).collect();
        future.sort_by_key(|&it| std::cmp::Reverse((coflows[it].release, coflows[it].id)));
        let completed = vec![None; coflows.len()];
        let mut fluid = Self { workload, now: Picos::ZERO, sending, completed, future };
        fluid.release();
        fluid
    }

    /// Returns the current time.
    #[must_use]
    pub const fn now(&self) -> Picos {
        self.now
    }

    /// Returns the time at which the next coflow is released, if any is still to come.
    #[must_use]
    pub fn next_release(&self) -> Option<Picos> {
        self.future.last().map(|&it| self.workload.coflows()[it].release)
    }

    /// Returns whether no released coflow has data left.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.active().next().is_none()
    }

    /// Returns the coflows that are released and have data left, in the order of the workload.
    pub fn active(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.completed.len()).filter(|&it| self.is_active(it))
    }

    /// Returns whether a coflow is released and has data left.
    #[must_use]
    pub fn is_active(&self, coflow: usize) -> bool {
        self.completed[coflow].is_none() && self.workload.coflows()[coflow].release <= self.now
    }

    /// Returns the flows of a coflow that have data left, with what is left of each, rounded up to
    /// whole bytes.
    pub fn left(&self, coflow: usize) -> impl Iterator<Item = Flow> + '_ {
        self.sending[coflow].iter().map(|flow| Flow {
            source: flow.source,
            destination: flow.destination,
            bytes: u64::try_from(flow.left.div_ceil(WORK_PER_BYTE))
                .expect("no more is left than there was"),
        })
    }

    /// Runs to the next time at which rates change, but not beyond `until`. Active coflows that
    /// `order` does not name get no rate.
    pub fn step(&mut self, order: &[usize], rates: Rates, until: Picos) -> Result<(), TooLong> {
        let order: Vec<usize> = order.iter().copied().filter(|&it| self.is_active(it)).collect();
        let changes_in = rates.assign(self.workload.fabric(), &order, &mut self.sending);
        let room = u128::from(until.since(self.now).0);
        let span_ps = changes_in.map_or(room, |span| span.min(room));
        let span = u64::try_from(span_ps).expect("the room is a time");
        // The last instant stands for "never"; no event can be there.
        let now = self.now.0.checked_add(span).filter(|&now| now < Picos::NEVER.0);
        self.now = Picos(now.ok_or(TooLong)?);
        for coflow in order {
            let flows = &mut self.sending[coflow];
            for flow in flows.iter_mut() {
                flow.left = flow.left.saturating_sub(u128::from(flow.rate_bps) * span_ps);
                flow.rate_bps = 0;
            }
            flows.retain(|flow| flow.left > 0);
            if flows.is_empty() {
                self.completed[coflow] = Some(self.now);
            }
        }
        self.release();
        Ok(())
    }

    /// Returns the completion times.
    ///
    /// # Panics
    ///
    /// Panics if a coflow has not completed.
    #[must_use]
    pub fn into_outcome(self) -> Outcome {
        let completed = self.completed.into_iter();
        Outcome { completed: completed.map(|it| it.expect("every coflow has ended")).collect() }
    }

    /// Releases the coflows that are due. A coflow without data completes at once.
    fn release(&mut self) {
        while let Some(&coflow) = self.future.last()
            && self.workload.coflows()[coflow].release <= self.now
        {
            self.future.pop();
            if self.sending[coflow].is_empty() {
                self.completed[coflow] = Some(self.now);
            }
        }
    }
}
