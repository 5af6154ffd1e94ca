//! Bottleneck-Select-Scale-Iterate: the order of Sincronia, in integers and without std.
//!
//! BSSI (Agarwal et al., "Sincronia: Near-Optimal Network Design for Coflows", SIGCOMM 2018) is a
//! primal-dual algorithm. It fills the order from the end. In each round it selects the port with
//! the most demand, places last the job with the least weight per demand on that port, and scales
//! the weights of the other jobs down in proportion to their demand there. Any allocation of rates
//! that respects the order is then within four times of the least average completion time.
//!
//! A round costs one pass over the ports and one over the jobs, so `n` jobs on `m` ports take
//! O(n² + nm).
//!
//! # Arithmetic
//!
//! Ratios are compared exactly. A residual weight has 64 fractional bits; the part that a round
//! takes away is rounded down to them, so no residual becomes negative. The unit of demands does
//! not matter, not even where it would have to decide ties.

extern crate alloc;

use alloc::vec::Vec;
use core::cmp::Ordering;

/// Jobs that compete for ports.
#[derive(Debug, Clone, Copy)]
pub struct Jobs<'a> {
    /// The weight of each job, in any unit.
    pub weights: &'a [u64],
    /// The demand of each job on each port, in any unit: one row of ports after another.
    pub demands: &'a [u64],
    /// The rate of each port, in any unit, but not zero.
    pub rates: &'a [u64],
    /// The demand of a job that does not use a port. It is added to every demand when jobs are
    /// compared: 0 in Sincronia, 1 in the published code of CoInNetFlow.
    pub d0: u64,
}

impl Jobs<'_> {
    fn demand(&self, job: usize, port: usize) -> u64 {
        self.demands[job * self.rates.len() + port]
    }

    /// Returns the demand of `job` on `port` for comparisons between jobs.
    fn cost(&self, job: usize, port: usize) -> u64 {
        self.demand(job, port).saturating_add(self.d0)
    }
}

/// Orders `jobs`; returns their indices, the first to be served first.
///
/// Among ports with equal load, the first is selected. Among jobs with equal ratios, the one with
/// the lowest index is placed last, as in Sincronia's published simulator. Jobs that demand
/// nothing come first.
///
/// # Panics
///
/// Panics if there is not one demand for each job and port, or if a rate is zero.
#[must_use]
pub fn order(jobs: &Jobs<'_>) -> Vec<usize> {
    let cells = jobs.weights.len() * jobs.rates.len();
    assert_eq!(jobs.demands.len(), cells, "one demand for each job and port");
    let mut residuals: Vec<u128> =
        jobs.weights.iter().map(|&weight| u128::from(weight) << FRACTION_BITS).collect();
    let mut loads: Vec<u128> = (0..jobs.rates.len())
        .map(|port| (0..jobs.weights.len()).map(|job| u128::from(jobs.demand(job, port))).sum())
        .collect();
    let mut waiting: Vec<usize> = (0..jobs.weights.len()).collect();
    let mut order = Vec::with_capacity(waiting.len());
    while let Some(port) = busiest(&loads, jobs.rates) {
        let Some(place) = cheapest(jobs, port, &waiting, &residuals) else { break };
        let last = waiting.remove(place);
        scale(jobs, port, last, &waiting, &mut residuals);
        for (port, load) in loads.iter_mut().enumerate() {
            *load -= u128::from(jobs.demand(last, port));
        }
        order.push(last);
    }
    order.extend(waiting);
    order.reverse();
    order
}

/// Orders jobs that reduce over workers, with one port for each worker as in CoInNetFlow (Ho,
/// KAUST 2023). A job demands its remaining size at each of its workers.
///
/// # Panics
///
/// Panics if a worker is not below `workers`.
#[must_use]
pub fn order_reductions(reductions: &[Reduction<'_>], workers: usize, d0: u64) -> Vec<usize> {
    let mut demands = alloc::vec![0; reductions.len() * workers];
    for (job, reduction) in reductions.iter().enumerate() {
        for &worker in reduction.workers {
            assert!(worker < workers, "worker {worker} of job {job} is not below {workers}");
            demands[job * workers + worker] = reduction.remaining;
        }
    }
    let weights: Vec<u64> = reductions.iter().map(|it| it.weight).collect();
    let rates = alloc::vec![1; workers];
    order(&Jobs { weights: &weights, demands: &demands, rates: &rates, d0 })
}

/// The head tensor of a job that reduces over workers.
#[derive(Debug, Clone, Copy)]
pub struct Reduction<'a> {
    /// The weight of the job, in any unit.
    pub weight: u64,
    /// The elements or bytes of the tensor that are not reduced yet.
    pub remaining: u64,
    /// The workers of the job.
    pub workers: &'a [usize],
}

/// A quotient of whole numbers, compared exactly. The divisor is not zero.
#[derive(Debug, Clone, Copy)]
pub struct Ratio {
    over: u128,
    under: u64,
}

impl Ratio {
    /// Creates the ratio of `over` to `under`.
    ///
    /// # Panics
    ///
    /// Panics if `under` is zero.
    #[must_use]
    pub const fn new(over: u128, under: u64) -> Self {
        assert!(under > 0, "a ratio to zero has no value");
        Self { over, under }
    }

    /// Returns the dividend.
    #[must_use]
    pub const fn over(self) -> u128 {
        self.over
    }

    /// Returns the divisor.
    #[must_use]
    pub const fn under(self) -> u64 {
        self.under
    }

    /// Returns the least whole number that is not below the ratio.
    #[must_use]
    pub fn ceil(self) -> u128 {
        self.over.div_ceil(u128::from(self.under))
    }

    /// Returns the whole part, and the rest that is still to be divided.
    fn parts(self) -> (u128, u128) {
        (self.over / u128::from(self.under), self.over % u128::from(self.under))
    }

    /// Returns the ratio times `factor`, rounded down. The result must fit.
    fn times(self, factor: u64) -> u128 {
        let (whole, rest) = self.parts();
        // The rest is below a u64, so its product with another fits.
        whole * u128::from(factor) + rest * u128::from(factor) / u128::from(self.under)
    }
}

impl Ord for Ratio {
    fn cmp(&self, other: &Self) -> Ordering {
        let ((whole, rest), (others, others_rest)) = (self.parts(), other.parts());
        let cross =
            || (rest * u128::from(other.under)).cmp(&(others_rest * u128::from(self.under)));
        whole.cmp(&others).then_with(cross)
    }
}

impl PartialOrd for Ratio {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Ratio {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Ratio {}

/// Returns the port that needs the longest to serve its load; none if nothing is demanded.
fn busiest(loads: &[u128], rates: &[u64]) -> Option<usize> {
    let mut busiest: Option<(usize, Ratio)> = None;
    for (port, (&load, &rate)) in loads.iter().zip(rates).enumerate() {
        let takes = Ratio::new(load, rate);
        if load > 0 && busiest.is_none_or(|(_, most)| takes > most) {
            busiest = Some((port, takes));
        }
    }
    busiest.map(|(port, _)| port)
}

/// Returns the place among the `waiting` of the job with the least weight per demand on `port`;
/// none if no job demands anything there.
fn cheapest(jobs: &Jobs<'_>, port: usize, waiting: &[usize], residuals: &[u128]) -> Option<usize> {
    let mut cheapest: Option<(usize, Ratio)> = None;
    for (place, &job) in waiting.iter().enumerate() {
        let cost = jobs.cost(job, port);
        if cost == 0 {
            continue;
        }
        let ratio = Ratio::new(residuals[job], cost);
        if cheapest.is_none_or(|(_, least)| ratio < least) {
            cheapest = Some((place, ratio));
        }
    }
    cheapest.map(|(place, _)| place)
}

/// Takes from each waiting job the weight that `last` has for the same demand on `port`.
fn scale(jobs: &Jobs<'_>, port: usize, last: usize, waiting: &[usize], residuals: &mut [u128]) {
    let price = Ratio::new(residuals[last], jobs.cost(last, port));
    for &job in waiting {
        // No ratio is below the price, so the difference is never negative.
        residuals[job] -= price.times(jobs.cost(job, port));
    }
}

/// The fractional bits of a residual weight.
const FRACTION_BITS: u32 = 64;
