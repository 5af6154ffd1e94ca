//! Tries all choices of hosts for the aggregators.

use super::ranks::RankSearch;
use super::tree::LONGEST_S;
use super::within::{Limit, Within};
use super::{Aggregators, Found};
use crate::problem::Problem;
use crate::topology::{HostId, VertexId};

/// Returns the placement with the shortest step in a domain, given choices of hosts for the
/// aggregators.
pub(crate) fn search(
    problem: &Problem<'_>,
    domain: VertexId,
    choices: impl IntoIterator<Item = Aggregators>,
) -> Option<Found> {
    choices.into_iter().fold(None, |best: Option<Found>, aggregators| {
        let below_s = best.as_ref().map_or(LONGEST_S, |found| found.time.total_s());
        better_with(problem, domain, aggregators, below_s).or(best)
    })
}

/// Returns the best placement with these aggregators, if its step is shorter than `below_s`.
pub(crate) fn better_with(
    problem: &Problem<'_>,
    domain: VertexId,
    aggregators: Aggregators,
    below_s: f64,
) -> Option<Found> {
    let ranks = RankSearch::new(problem, domain, aggregators);
    ranks
        .fits(Limit { transfer_s: below_s, latency_s: below_s })
        .then(|| ranks.shortest(below_s))?
}

/// Returns the choices of hosts for the aggregators in a domain, or `None` if there are more than
/// `most`. Of choices that differ only in hosts that are alike, one counts.
pub(crate) fn choices(
    problem: &Problem<'_>,
    domain: VertexId,
    most: usize,
) -> Option<Vec<Aggregators>> {
    let hosts = problem.topology.hosts_of(domain);
    let mut rooms = vec![0u32; problem.seats.len() + 1];
    for host in hosts.clone().rev() {
        rooms[host] = rooms[host + 1].saturating_add(problem.seats[host].aggregators);
    }
    let mut choices = Choices { problem, domain, most, rooms, found: vec![] };
    let left = problem.traffic.aggregators;
    choices.extend(&mut vec![], hosts.start, left).then_some(choices.found)
}

struct Choices<'a> {
    problem: &'a Problem<'a>,
    domain: VertexId,
    most: usize,
    /// Per host: the aggregators for which it and the later hosts have seats.
    rooms: Vec<u32>,
    found: Vec<Aggregators>,
}

impl Choices<'_> {
    /// Adds all choices that place `left` more aggregators on hosts from `first` on. Returns false
    /// if there are too many.
    fn extend(&mut self, choice: &mut Aggregators, first: usize, left: u32) -> bool {
        if left == 0 {
            self.found.push(choice.clone());
            return self.found.len() <= self.most;
        }
        for host in first..self.problem.topology.hosts_of(self.domain).end {
            if self.rooms[host] < left {
                break;
            }
            // Of hosts that are alike, the first have the most aggregators.
            let is_like_previous = self.problem.is_like_previous(self.domain, host);
            let of_previous = choice.last().filter(|(last, _)| last.0 + 1 == host);
            let of_previous = of_previous.map_or(0, |(_, count)| *count);
            let most = if is_like_previous { of_previous } else { left };
            let most = most.min(left).min(self.problem.seats[host].aggregators);
            for count in 1..=most {
                choice.push((HostId(host), count));
                let is_complete = self.extend(choice, host + 1, left - count);
                choice.pop();
                if !is_complete {
                    return false;
                }
            }
        }
        true
    }
}
