//! Searches around the hosts of each domain that may have aggregators, where round trips decide.
//!
//! A short longest round trip confines the ranks to hosts near one aggregator, and few of these may
//! have fast links. So the search divides the placements by the domain of one aggregator and by
//! their longest round trip. For each part it solves the relaxed problem on the hosts that are near
//! enough, which gives a bound of that part and aggregators to start from.

use super::exact::better_with;
use super::latency::{Center, centers_of};
use super::tree::{Relaxed, least_transfer};
use super::{Found, LONGEST_S};
use crate::problem::Problem;
use crate::topology::VertexId;

/// Returns the best placement found and a step time in seconds that no placement in the domain can
/// beat. Tries at most `most` parts.
pub(super) fn search(
    problem: &Problem<'_>,
    domain: VertexId,
    relaxed: &Relaxed,
    start: Option<Found>,
    most: usize,
) -> (Option<Found>, f64) {
    let centers = centers_of(problem, domain);
    let mut best = start;
    let step_s = |best: &Option<Found>| best.as_ref().map_or(LONGEST_S, |it| it.time.total_s());
    if centers.is_empty() {
        return (best, relaxed.bound_s);
    }
    let mut bound_s = f64::INFINITY;
    let mut left = most;
    for center in centers {
        let least_s = center.latency_s + relaxed.transfer_s;
        if left < PARTS || least_s >= step_s(&best) {
            // The later centers have no shorter round trips.
            bound_s = bound_s.min(least_s);
            break;
        }
        left -= PARTS;
        let longest_s = step_s(&best) - relaxed.transfer_s;
        for part in 0..PARTS {
            let at = |part: usize| {
                let share = part as f64 / PARTS as f64;
                (longest_s - center.latency_s).mul_add(share, center.latency_s)
            };
            let part = Part { center, from_s: at(part), to_s: at(part + 1) };
            let (found, part_s) = part.search(problem, domain, step_s(&best));
            best = found.or(best);
            bound_s = bound_s.min(part_s);
        }
    }
    // Longer round trips than those of the parts give no shorter step than the best.
    let bound_s = bound_s.min(step_s(&best)).max(relaxed.bound_s);
    (best, bound_s)
}

/// The placements with an aggregator near a center and a longest round trip between two times.
struct Part {
    center: Center,
    from_s: f64,
    to_s: f64,
}

impl Part {
    /// Returns a placement with a step shorter than `below_s` if one is found, and a step time that
    /// no placement of this part beats, or `below_s`.
    fn search(
        &self,
        problem: &Problem<'_>,
        domain: VertexId,
        below_s: f64,
    ) -> (Option<Found>, f64) {
        let confined = self.center.confined(problem, domain, self.to_s);
        let least = least_transfer(&confined, domain, below_s - self.from_s, PRECISION);
        let Some((transfer_s, aggregators)) = least else { return (None, below_s) };
        let found = better_with(problem, domain, aggregators, below_s);
        (found, self.from_s + transfer_s)
    }
}

/// The parts of the round trips around each center.
const PARTS: usize = 6;
/// The relative difference between the bound and the relaxed optimum of a part.
const PRECISION: f64 = 1e-3;
