//! Places the ranks of a job whose aggregators are placed.
//!
//! Once the aggregators are placed, the load of a link depends only on the number of ranks behind
//! it. A transfer time therefore allows a set of numbers of ranks in each subtree, and these sets
//! add up from the leaves to the domain. The job fits within the time if the domain's set contains
//! its number of ranks. Bisection finds the least time for which it does. Each test visits each
//! vertex once.

use std::cmp::Reverse;

use super::counts::Counts;
use super::link_load::{Capacity, LinkLoads, greatest};
use super::within::{Limit, Within, shortest};
use super::{Aggregators, Found};
use crate::model::{Paths, step_time_in};
use crate::placement::Placement;
use crate::problem::Problem;
use crate::topology::{HostId, Topology, VertexId};

/// A problem with its aggregators placed in a domain.
#[derive(Debug)]
pub(crate) struct RankSearch<'a> {
    problem: &'a Problem<'a>,
    domain: VertexId,
    aggregators: Aggregators,
    /// Per vertex of the domain: the aggregators in its subtree.
    inside: Vec<u32>,
    /// Per host of the domain: seats for ranks.
    seats: Vec<u32>,
    paths: Paths,
    loads: LinkLoads,
}

/// The numbers of ranks that a limit allows in each subtree of the domain.
#[derive(Debug)]
struct Allowed {
    /// The greatest number. For a subtree without aggregators, all smaller numbers are allowed too.
    greatest: Vec<u32>,
    /// The set of numbers, for a subtree with aggregators.
    sets: Vec<Option<Counts>>,
}

impl<'a> RankSearch<'a> {
    /// Creates the search for these aggregators, all of which are in the domain.
    pub(crate) fn new(
        problem: &'a Problem<'a>,
        domain: VertexId,
        aggregators: Aggregators,
    ) -> Self {
        let topology = problem.topology;
        let hosts = topology.hosts_of(domain);
        let mut inside = vec![0; topology.subtree(domain).len()];
        let mut seats: Vec<_> =
            problem.seats[hosts.clone()].iter().map(|seats| seats.ranks).collect();
        for &(host, count) in &aggregators {
            seats[host.0 - hosts.start] = problem.ranks_beside(host.0, count);
            let is_inside = |vertex: &VertexId| *vertex >= domain;
            for vertex in topology.climb(topology.leaf(host)).take_while(is_inside) {
                inside[vertex.0 - domain.0] += count;
            }
        }
        inside[0] = problem.traffic.aggregators;
        let paths = Paths::new(problem, domain, &aggregators);
        let loads = LinkLoads::of(problem.traffic);
        Self { problem, domain, aggregators, inside, seats, paths, loads }
    }

    /// Returns the placement with the shortest step, if there is one that is shorter than `below_s`
    /// seconds.
    pub(crate) fn shortest(&self, below_s: f64) -> Option<Found> {
        shortest(self, &self.paths.rtts_s, below_s)
    }

    fn allowed(&self, limit: Limit) -> Allowed {
        let vertices = self.inside.len();
        let mut allowed = Allowed { greatest: vec![0; vertices], sets: vec![None; vertices] };
        self.seat(limit, &mut allowed);
        // Children precede their parent, which holds the sum of their numbers when its turn comes.
        for index in (0..vertices).rev() {
            let vertex = VertexId(self.domain.0 + index);
            let most = self.problem.limits[vertex.0];
            let capacity = Capacity::of(self.problem.links, vertex, limit.transfer_s);
            if self.inside[index] == 0 {
                let most = most.min(allowed.greatest[index]);
                allowed.greatest[index] = self.loads.greatest(capacity, most);
            } else {
                let plain = Counts::up_to(allowed.greatest[index]);
                let children = allowed.sets[index].take();
                let children = children.map_or_else(|| plain.clone(), |sets| sets.sum(&plain));
                let carried = if index == 0 {
                    Counts::up_to(most)
                } else {
                    self.loads.carried(capacity, self.inside[index], most).into()
                };
                allowed.sets[index] = Some(children.intersection(&carried));
            }
            if index > 0 {
                self.add_to_parent(vertex, &mut allowed);
            }
        }
        allowed
    }

    /// Sets how many ranks each host can take, as far as its own paths to the aggregators decide.
    fn seat(&self, limit: Limit, allowed: &mut Allowed) {
        let topology = self.problem.topology;
        let index = |host: usize| topology.leaf(HostId(host)).0 - self.domain.0;
        let hosts = topology.hosts_of(self.domain);
        for ((host, seats), rtt_s) in hosts.zip(&self.seats).zip(&self.paths.rtts_s) {
            allowed.greatest[index(host)] = if *rtt_s > limit.latency_s { 0 } else { *seats };
        }
        for path in &self.paths.capped {
            let fits = |ranks: u32| {
                let mut transfers = path.transfers(self.problem.traffic, ranks);
                transfers.all(|transfer| transfer.time_s() <= limit.transfer_s)
            };
            let seats = &mut allowed.greatest[index(path.host.0)];
            *seats = greatest(*seats, fits);
        }
    }

    /// Adds a vertex's numbers of ranks to those of its parent.
    fn add_to_parent(&self, vertex: VertexId, allowed: &mut Allowed) {
        let index = vertex.0 - self.domain.0;
        let parent = self.problem.topology.parent(vertex).unwrap_or(Topology::ROOT);
        let parent = parent.0 - self.domain.0;
        match allowed.sets[index].clone() {
            None => {
                let sum = allowed.greatest[parent].saturating_add(allowed.greatest[index]);
                allowed.greatest[parent] = sum;
            }
            Some(set) => {
                let sum = allowed.sets[parent].as_ref().map(|sum| sum.sum(&set));
                allowed.sets[parent] = Some(sum.unwrap_or(set));
            }
        }
    }

    /// Returns the ranks of each host, where the domain as a whole is allowed `total`.
    fn distribute(&self, allowed: &Allowed, total: u32) -> Vec<u32> {
        let topology = self.problem.topology;
        let mut given = vec![0; self.inside.len()];
        given[0] = total;
        for index in 0..self.inside.len() {
            let children = topology.children(VertexId(self.domain.0 + index));
            let children: Vec<_> = children.map(|child| child.0 - self.domain.0).collect();
            if !children.is_empty() {
                self.divide(given[index], &children, allowed, &mut given);
            }
        }
        let mut ranks = vec![0; topology.hosts().len()];
        for host in topology.hosts_of(self.domain) {
            ranks[host] = given[topology.leaf(HostId(host)).0 - self.domain.0];
        }
        ranks
    }

    /// Divides the ranks of a vertex among its children.
    ///
    /// Children with aggregators take as many ranks as they may, since these are closest to an
    /// aggregator. The rest goes to as few other children as possible, the last of which is the
    /// smallest that fits, so that other jobs find large domains free. The order depends on the
    /// seats of a child but not on its links, so a host with a worse link is never preferred.
    fn divide(&self, total: u32, children: &[usize], allowed: &Allowed, given: &mut [u32]) {
        let (shared, mut plain): (Vec<usize>, Vec<usize>) =
            children.iter().partition(|child| allowed.sets[**child].is_some());
        let shared: Vec<_> = shared
            .iter()
            .filter_map(|&child| Some((child, allowed.sets[child].as_ref()?)))
            .collect();
        let room = plain.iter().map(|child| allowed.greatest[*child]);
        let room = room.fold(0, u32::saturating_add);
        // What the children after each one can take together.
        let mut rests = vec![Counts::up_to(room)];
        for (_, set) in shared.iter().skip(1).rev() {
            rests.push(rests[rests.len() - 1].sum(set));
        }
        let mut left = total;
        for ((child, set), rest) in shared.into_iter().zip(rests.into_iter().rev()) {
            let count = set.descending().find(|c| *c <= left && rest.contains(left - c));
            given[child] = count.expect("the parent's set is the sum of its children's");
            left -= given[child];
        }
        plain.sort_by_key(|child| Reverse(self.problem.rooms[self.domain.0 + child]));
        while left > 0 {
            let last = plain.iter().rposition(|child| allowed.greatest[*child] >= left);
            let child = plain.remove(last.unwrap_or(0));
            given[child] = allowed.greatest[child].min(left);
            left -= given[child];
        }
    }
}

impl Within for RankSearch<'_> {
    fn fits(&self, limit: Limit) -> bool {
        self.allowed(limit).contains(0, self.problem.traffic.ranks)
    }

    fn within(&self, limit: Limit) -> Option<Found> {
        let allowed = self.allowed(limit);
        let total = self.problem.traffic.ranks;
        let ranks = allowed.contains(0, total).then(|| self.distribute(&allowed, total))?;
        let mut aggregators = vec![0; ranks.len()];
        for (host, count) in &self.aggregators {
            aggregators[host.0] = *count;
        }
        let placement = Placement { ranks, aggregators };
        let time = step_time_in(self.problem, self.domain, &self.paths, &placement);
        Some(Found { placement, tree: None, time })
    }
}

impl Allowed {
    fn contains(&self, index: usize, ranks: u32) -> bool {
        self.sets[index].as_ref().map_or(ranks <= self.greatest[index], |set| set.contains(ranks))
    }
}
