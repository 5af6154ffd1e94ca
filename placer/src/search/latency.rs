//! A lower bound of the longest round trip between a rank and an aggregator.
//!
//! All ranks are within the longest round trip of each aggregator. So some host with a seat for an
//! aggregator has hosts with seats for all ranks that close, and some host with a seat for a rank
//! has as many seats for aggregators. The least round trip for which both hold is a bound, and
//! bisection finds it. Hosts of one domain share the test: the closest of them to their parent
//! stands for all.

use crate::model::NEARER;
use crate::network::Peer;
use crate::problem::{Problem, Seats};
use crate::topology::{HostId, Topology, VertexId};

/// Returns a time in seconds that the longest round trip of each placement in a domain reaches.
pub(crate) fn least_latency_s(problem: &Problem<'_>, domain: VertexId) -> f64 {
    if problem.topology.depth(domain) > problem.topology.levels().len() {
        return 0.0;
    }
    let aggregators = Members {
        needed: problem.traffic.aggregators,
        is_center: |seats| seats.ranks > 0,
        seats: |problem, host| problem.seats[host].aggregators,
        beside: |problem, host| problem.seats[host].aggregators,
    };
    let gathered_s = [ranks(problem), aggregators]
        .map(|members| Reach::new(problem, domain, &members).least_s());
    // Other sums of the same delays may be a rounding error shorter.
    closest_s(problem, domain).max(gathered_s[0]).max(gathered_s[1]) * NEARER
}

/// The domains that have room for the ranks around hosts for aggregators, those with the shortest
/// round trips first.
pub(super) fn centers_of<'a>(problem: &'a Problem<'a>, domain: VertexId) -> Vec<Center> {
    if problem.topology.depth(domain) > problem.topology.levels().len() {
        return vec![];
    }
    let reach = Reach::new(problem, domain, &ranks(problem));
    if reach.centers.iter().any(|centers| !centers.shortcuts.is_empty()) {
        // Distances over links would not do.
        return vec![];
    }
    let center = |centers: &Centers| Center {
        latency_s: reach.least(|rtt_s| reach.fits(centers, rtt_s)),
        parent: centers.parent,
        nearest_s: centers.nearest_s,
    };
    let mut centers: Vec<_> = reach.centers.iter().map(center).collect();
    centers.sort_by(|one, other| {
        one.latency_s.total_cmp(&other.latency_s).then(one.parent.cmp(&other.parent))
    });
    centers
}

/// The parent of hosts that may have aggregators, one of which has a shortest distance.
#[derive(Debug, Clone, Copy)]
pub(super) struct Center {
    /// No placement with an aggregator on one of these hosts has a shorter longest round trip.
    pub(super) latency_s: f64,
    pub(super) parent: VertexId,
    /// The shortest round trip from the parent to such a host.
    nearest_s: f64,
}

impl Center {
    /// Returns a problem without seats for ranks that are not within a round trip of the nearest
    /// host, and without seats for aggregators that not enough of the other ranks are close to.
    pub(super) fn confined<'a>(
        &self,
        problem: &Problem<'a>,
        domain: VertexId,
        rtt_s: f64,
    ) -> Problem<'a> {
        let (topology, links) = (problem.topology, problem.links);
        let index = |vertex: VertexId| vertex.0 - domain.0;
        let mut from_center_s = vec![f64::NAN; topology.subtree(domain).len()];
        let mut up_s = self.nearest_s;
        from_center_s[index(self.parent)] = up_s;
        for vertex in topology.climb(self.parent).take_while(|vertex| *vertex != domain) {
            up_s += links.rtt[vertex.0];
            from_center_s[index(topology.parent(vertex).unwrap_or(domain))] = up_s;
        }
        // A parent precedes its children.
        for vertex in topology.subtree(domain).skip(1).map(VertexId) {
            if from_center_s[index(vertex)].is_nan() {
                let parent = topology.parent(vertex).unwrap_or(domain);
                from_center_s[index(vertex)] = from_center_s[index(parent)] + links.rtt[vertex.0];
            }
        }
        let hosts = topology.hosts_of(domain);
        let near = problem.with_changed_seats(|host, seats| {
            let host = HostId(host);
            let is_near = hosts.contains(&host.0)
                && from_center_s[index(topology.leaf(host))] * NEARER <= rtt_s;
            let is_center = topology.domain_of(host) == self.parent && seats.aggregators > 0;
            if !is_near && !is_center {
                seats.ranks = 0;
            }
        });
        // Each aggregator has all ranks within the round trip.
        let reach = Reach::new(&near, domain, &ranks(&near));
        let mut is_reached = vec![false; topology.hosts().len()];
        for centers in &reach.centers {
            for host in topology.hosts_of(centers.parent) {
                let to_parent_s = links.rtt[topology.leaf(HostId(host)).0];
                is_reached[host] = reach.seats(centers, to_parent_s, rtt_s) >= reach.needed;
            }
        }
        near.with_changed_seats(|host, seats| {
            if !is_reached[host] {
                seats.aggregators = 0;
            }
        })
    }
}

fn ranks(problem: &Problem<'_>) -> Members {
    Members {
        needed: problem.traffic.ranks,
        is_center: |seats| seats.aggregators > 0,
        seats: |problem, host| problem.seats[host].ranks,
        beside: |problem, host| problem.ranks_beside(host, 1),
    }
}

/// Returns the shortest round trip between two hosts of a domain, or none if one host has seats for
/// the whole job.
fn closest_s(problem: &Problem<'_>, domain: VertexId) -> f64 {
    let (topology, links, traffic) = (problem.topology, problem.links, problem.traffic);
    let mut hosts = topology.hosts_of(domain);
    let has_all = |host: usize| {
        problem.seats[host].aggregators >= traffic.aggregators
            && problem.ranks_beside(host, traffic.aggregators) >= traffic.ranks
    };
    if hosts.any(has_all) {
        return 0.0;
    }
    let is_usable = |host: HostId| {
        let seats = &problem.seats[host.0];
        seats.ranks > 0 || seats.aggregators > 0
    };
    // Per vertex: the shortest round trip to a host in its subtree.
    let mut shortest_s = vec![f64::INFINITY; topology.subtree(domain).len()];
    let mut least_s = f64::INFINITY;
    for host in topology.hosts_of(domain).map(HostId).filter(|host| is_usable(*host)) {
        shortest_s[topology.leaf(host).0 - domain.0] = 0.0;
        let peers = links.peers(host).iter().filter(|peer| is_usable(peer.host));
        least_s = peers.filter_map(Peer::rtt).fold(least_s, f64::min);
    }
    for index in (1..shortest_s.len()).rev() {
        let vertex = VertexId(domain.0 + index);
        let through_s = shortest_s[index] + links.rtt[vertex.0];
        let parent = &mut shortest_s[topology.parent(vertex).unwrap_or(domain).0 - domain.0];
        least_s = least_s.min(*parent + through_s);
        *parent = parent.min(through_s);
    }
    least_s
}

/// The members of a job that gather around a center: its ranks or its aggregators.
struct Members {
    needed: u32,
    /// Whether a host may be a center: it has seats for the other members.
    is_center: fn(&Seats) -> bool,
    /// The seats of a host.
    seats: fn(&Problem<'_>, usize) -> u32,
    /// The seats of a host that is the center.
    beside: fn(&Problem<'_>, usize) -> u32,
}

/// Seats by their distance, the nearest first: each with the sum up to there.
type Sums = Vec<(f64, u32)>;

/// The hosts of a domain around each possible center.
struct Reach<'a> {
    problem: &'a Problem<'a>,
    domain: VertexId,
    needed: u32,
    /// Per vertex of the domain: the seats in its subtree by the round trip from it.
    inside: Vec<Sums>,
    centers: Vec<Centers>,
}

/// The possible centers that are children of one vertex.
struct Centers {
    parent: VertexId,
    /// The shortest round trip from a center to the parent.
    nearest_s: f64,
    /// Seats of centers beside themselves: by the round trip to the parent, the longest first, the
    /// most seats of any so far.
    own: Vec<(f64, u32)>,
    /// Seats at the end of measured paths that are shorter than the links.
    shortcuts: Sums,
}

impl<'a> Reach<'a> {
    fn new(problem: &'a Problem<'a>, domain: VertexId, members: &Members) -> Self {
        let (topology, links) = (problem.topology, problem.links);
        let mut inside: Vec<Sums> = vec![vec![]; topology.subtree(domain).len()];
        for host in topology.hosts_of(domain) {
            let seats = (members.seats)(problem, host);
            if seats > 0 {
                inside[topology.leaf(HostId(host)).0 - domain.0].push((0.0, seats));
            }
        }
        // Children precede their parent, which then has the seats of all of them.
        for index in (0..inside.len()).rev() {
            let vertex = VertexId(domain.0 + index);
            if index > 0 {
                let through = |&(rtt_s, seats): &(f64, u32)| (rtt_s + links.rtt[vertex.0], seats);
                let more: Vec<_> = inside[index].iter().map(through).collect();
                inside[topology.parent(vertex).unwrap_or(domain).0 - domain.0].extend(more);
            }
            inside[index] = summed(std::mem::take(&mut inside[index]));
        }
        let centers = centers(problem, domain, members);
        Self { problem, domain, needed: members.needed, inside, centers }
    }

    /// Returns a round trip within which no center reaches all members, or zero if no center needs
    /// any, or none has enough members.
    fn least_s(&self) -> f64 {
        self.least(|rtt_s| self.centers.iter().any(|centers| self.fits(centers, rtt_s)))
    }

    fn least(&self, fits: impl Fn(f64) -> bool) -> f64 {
        let farthest_s = self.inside[0].last().map_or(0.0, |(rtt_s, _)| *rtt_s);
        let to_domain_s = |centers: &Centers| centers.nearest_s + self.climb_s(centers.parent);
        let centers_s = self.centers.iter().map(to_domain_s).fold(0.0, f64::max);
        let (mut too_short, mut enough) = (0.0, farthest_s + centers_s);
        if fits(too_short) || !fits(enough) {
            return 0.0;
        }
        while enough - too_short > enough * PRECISION {
            let middle = f64::midpoint(too_short, enough);
            *if fits(middle) { &mut enough } else { &mut too_short } = middle;
        }
        too_short
    }

    /// Returns the round trip from a vertex to the domain.
    fn climb_s(&self, vertex: VertexId) -> f64 {
        let Problem { topology, links, .. } = self.problem;
        let within = topology.climb(vertex).take_while(|vertex| *vertex != self.domain);
        within.map(|vertex| links.rtt[vertex.0]).sum()
    }

    /// Returns whether a center of a vertex may have enough seats within a round trip.
    fn fits(&self, centers: &Centers, rtt_s: f64) -> bool {
        self.seats(centers, centers.nearest_s, rtt_s) >= self.needed
    }

    /// Returns at least the seats within a round trip of a center whose way to its parent and back
    /// takes `to_parent_s` seconds.
    fn seats(&self, centers: &Centers, to_parent_s: f64, rtt_s: f64) -> u32 {
        let Problem { topology, links, .. } = self.problem;
        let within = |vertex: VertexId, rtt_s| at(&self.inside[vertex.0 - self.domain.0], rtt_s);
        // Sums of the same delays in another order differ by a rounding error.
        let slack_s = rtt_s * (1.0 - NEARER);
        let mut left_s = rtt_s - to_parent_s;
        let mut vertex = centers.parent;
        let mut seats = within(vertex, left_s + slack_s);
        while vertex != self.domain {
            let parent = topology.parent(vertex).unwrap_or(Topology::ROOT);
            left_s -= links.rtt[vertex.0];
            let all = within(parent, left_s + slack_s);
            let counted = within(vertex, left_s - links.rtt[vertex.0] - slack_s);
            seats = seats.saturating_add(all.saturating_sub(counted));
            vertex = parent;
        }
        // A center whose way to its parent and back takes longer is not among these.
        let own =
            centers.own.partition_point(|(to_parent_s, _)| 2.0 * to_parent_s > rtt_s - slack_s);
        let own = own.checked_sub(1).map_or(0, |last| centers.own[last].1);
        seats.saturating_add(own).saturating_add(at(&centers.shortcuts, rtt_s + slack_s))
    }
}

/// Returns the possible centers of a domain by their parent.
fn centers(problem: &Problem<'_>, domain: VertexId, members: &Members) -> Vec<Centers> {
    let (topology, links) = (problem.topology, problem.links);
    let mut all: Vec<Centers> = vec![];
    let first = topology.hosts_of(domain).start;
    let to_domain_s = |host: usize| {
        let within = topology.climb(topology.leaf(HostId(host))).take_while(|v| *v != domain);
        within.map(|vertex| links.rtt[vertex.0]).sum::<f64>()
    };
    let to_domain_s: Vec<_> = topology.hosts_of(domain).map(to_domain_s).collect();
    let hosts = topology.hosts_of(domain).map(HostId);
    for host in hosts.filter(|host| (members.is_center)(&problem.seats[host.0])) {
        let (leaf, parent) = (topology.leaf(host), topology.domain_of(host));
        if all.last().is_none_or(|last| last.parent != parent) {
            let (own, shortcuts) = (vec![], vec![]);
            all.push(Centers { parent, nearest_s: f64::INFINITY, own, shortcuts });
        }
        let centers = all.last_mut().expect("added above");
        centers.nearest_s = centers.nearest_s.min(links.rtt[leaf.0]);
        centers.own.push((links.rtt[leaf.0], (members.beside)(problem, host.0)));
        let shorter = links.peers(host).iter().filter_map(|peer| {
            let rtt_s = peer.shortest_rtt()?;
            let is_inside = topology.hosts_of(domain).contains(&peer.host.0);
            // No way within the domain is longer than that over its root.
            let longest_s = |to_domain_s: &[f64]| {
                (to_domain_s[host.0 - first] + to_domain_s[peer.host.0 - first]) / NEARER
            };
            let is_shorter = || {
                rtt_s < longest_s(&to_domain_s)
                    && rtt_s < links.rtt_of_links(topology, host, peer.host)
            };
            (is_inside && is_shorter()).then(|| (rtt_s, (members.seats)(problem, peer.host.0)))
        });
        centers.shortcuts.extend(shorter);
    }
    for centers in &mut all {
        centers.own.sort_by(|one, other| other.0.total_cmp(&one.0));
        let mut most = 0;
        for (_, seats) in &mut centers.own {
            most = most.max(*seats);
            *seats = most;
        }
        centers.shortcuts = summed(std::mem::take(&mut centers.shortcuts));
    }
    all
}

/// Sorts seats by their distance, and adds those that are nearer to each.
fn summed(mut seats: Sums) -> Sums {
    seats.sort_unstable_by(|one, other| one.0.total_cmp(&other.0));
    let mut sum = 0u32;
    for (_, seats) in &mut seats {
        sum = sum.saturating_add(*seats);
        *seats = sum;
    }
    seats
}

/// Returns the seats within a distance.
fn at(sums: &Sums, rtt_s: f64) -> u32 {
    let count = sums.partition_point(|(distance_s, _)| *distance_s <= rtt_s);
    count.checked_sub(1).map_or(0, |last| sums[last].1)
}

/// The relative difference between the bound and the least round trip of the test.
const PRECISION: f64 = 1e-4;
