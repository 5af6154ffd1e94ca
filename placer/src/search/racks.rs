//! Finds the placement with an aggregator in each rack whose transfers take the least time.
//!
//! For a transfer time, each rack has a greatest number of ranks, with its best host for the
//! aggregator. The root's rack has one for each number of other racks, whose sums the root
//! receives. A link above racks carries a number of sums and results, so it limits how many racks
//! in its subtree are used and, above the root, how many outside. Picking the racks with most room
//! first is exact under such nested limits, and so is bisection over the time. Round trips are
//! ignored. This is a heuristic if paths have ceilings of their own, or if the job limits the ranks
//! of domains wider than a rack. If there are few choices of hosts for the aggregators, [`exact`]
//! tries all of them instead, with round trips.

mod exact;

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::Found;
use super::link_load::greatest;
use super::tree::{LONGEST_S, PRECISION, SHORTEST_S, middle};
use super::within::Limit;
use crate::model::transfer_s;
use crate::placement::Placement;
use crate::problem::Problem;
use crate::racks::{Tree, tree_step_time};
use crate::topology::{HostId, Topology, VertexId};

/// Returns the placement found in a domain, and a step time in seconds that no placement there can
/// beat. `None` if none was found, or if no step can be shorter than `below_s` seconds.
pub(crate) fn search(
    problem: &Problem<'_>,
    domain: VertexId,
    below_s: f64,
) -> Option<(Found, f64)> {
    let search = Search::new(problem, domain);
    let Some(choices) = exact::choices(&search) else { return search.heuristic(below_s) };
    let found = exact::search(&search, choices, below_s)?;
    let bound_s = found.time.total_s();
    Some((found, bound_s))
}

/// Like [`search`], without trying all choices of hosts for the aggregators.
#[cfg(test)]
pub(crate) fn heuristic(problem: &Problem<'_>, domain: VertexId) -> Option<(Found, f64)> {
    Search::new(problem, domain).heuristic(LONGEST_S)
}

struct Search<'a> {
    problem: &'a Problem<'a>,
    domain: VertexId,
    racks: Vec<VertexId>,
}

/// A rack that is used: the host of its aggregator, and the greatest number of ranks.
#[derive(Debug, Clone, Copy)]
struct Room {
    rack: VertexId,
    aggregator: HostId,
    ranks: u32,
}

impl<'a> Search<'a> {
    fn new(problem: &'a Problem<'a>, domain: VertexId) -> Self {
        let depth = problem.topology.levels().len();
        let subtree = problem.topology.subtree(domain).map(VertexId);
        let racks = subtree.filter(|vertex| problem.topology.depth(*vertex) == depth).collect();
        Self { problem, domain, racks }
    }

    /// Returns a placement whose transfers take little time, if that is less than `below_s`
    /// seconds, and a time that no placement can beat.
    fn heuristic(&self, below_s: f64) -> Option<(Found, f64)> {
        let (best, enough, too_short) = self.least(below_s)?;
        let limit = Limit { transfer_s: enough, latency_s: f64::INFINITY };
        let found = self.placed(&best, limit);
        // The search is exact without these limits, and they never shorten a step.
        let links = self.problem.links.without_pairs();
        let depth = self.problem.topology.levels().len();
        let without = self.problem.with_links(&links).without_limits_above(depth);
        let is_exact = !self.problem.links.has_pairs() && without.limits == self.problem.limits;
        let bound_s = if is_exact {
            too_short
        } else {
            Search::new(&without, self.domain).least(below_s).map_or(0.0, |(.., bound_s)| bound_s)
        };
        Some((found, bound_s))
    }

    /// Returns racks that have room within a transfer time, that time, and a shorter one within
    /// which no racks were found.
    fn least(&self, below_s: f64) -> Option<(Vec<Room>, f64, f64)> {
        let (mut too_short, mut enough) = (0.0, below_s.min(LONGEST_S));
        let mut best = self.within(enough)?;
        while enough - too_short > enough * PRECISION && enough > SHORTEST_S {
            let middle_s = middle(too_short, enough);
            match self.within(middle_s) {
                Some(found) => (best, enough) = (found, middle_s),
                None => too_short = middle_s,
            }
        }
        Some((best, enough, too_short))
    }

    /// Returns racks for which all transfers end in time, the root's first.
    fn within(&self, time_s: f64) -> Option<Vec<Room>> {
        let room = |rack: &VertexId| self.room(*rack, None, &[], time_s);
        let mut rooms: Vec<_> = self.racks.iter().filter_map(room).collect();
        rooms.retain(|room| room.ranks > 0);
        rooms.sort_by_key(|room| (Reverse(room.ranks), room.rack));
        let all = self.problem.traffic.ranks;
        for others in 0..self.racks.len() {
            let most = rooms.iter().take(others).map(|room| room.ranks);
            let most = most.fold(0, u32::saturating_add);
            for rack in &self.racks {
                let most_at_root = self.problem.rooms[rack.0];
                if most.saturating_add(most_at_root) < all {
                    continue;
                }
                let Some(root) = self.room(*rack, Some(others), &[], time_s) else { continue };
                let picked = self.picked(root, others, &rooms, time_s);
                if let Some(picked) = picked.filter(|picked| self.total(picked) >= all) {
                    return Some(picked);
                }
            }
        }
        None
    }

    /// Returns the number of ranks for which racks have room within the limits of their domains.
    fn total(&self, racks: &[Room]) -> u32 {
        let mut sums: BTreeMap<VertexId, u32> = BTreeMap::new();
        for room in racks {
            sums.insert(room.rack, room.ranks);
        }
        // A vertex follows its ancestors.
        while let Some((vertex, ranks)) = sums.pop_last() {
            let ranks = ranks.min(self.problem.limits[vertex.0]);
            if vertex == self.domain {
                return ranks;
            }
            let parent = self.problem.topology.parent(vertex).unwrap_or(Topology::ROOT);
            let sum = sums.entry(parent).or_default();
            *sum = sum.saturating_add(ranks);
        }
        0
    }

    /// Returns whether a link carries these numbers of results, or of sums of racks, in time.
    fn carries(&self, vertex: VertexId, sums_up: u32, sums_down: u32, time_s: f64) -> bool {
        let (links, result) = (self.problem.links, self.problem.traffic.result);
        let fits =
            |sums: u32, bytes_per_s| transfer_s(f64::from(sums) * result, bytes_per_s) <= time_s;
        fits(sums_up, links.up[vertex.0].bytes_per_s)
            && fits(sums_down, links.down[vertex.0].bytes_per_s)
    }

    /// Returns the copies of a result that a link carries to this many aggregators behind it.
    fn copies(&self, aggregators: u32) -> u32 {
        if self.problem.traffic.is_multicast { aggregators.min(1) } else { aggregators }
    }

    /// Returns the greatest number of ranks in a rack and the host of the aggregator with which it
    /// has room for them. Takes the number of other racks if the rack is the root's.
    fn room(
        &self,
        rack: VertexId,
        others: Option<usize>,
        excluded: &[HostId],
        time_s: f64,
    ) -> Option<Room> {
        let (topology, problem) = (self.problem.topology, self.problem);
        let sums = u32::try_from(others.unwrap_or(1)).ok()?;
        let (up, down) = match others {
            Some(_) => (self.copies(sums), sums),
            None => (1, 1),
        };
        if rack != self.domain && !self.carries(rack, up, down, time_s) {
            return None;
        }
        let hosts = topology.hosts_of(rack).map(HostId);
        let seats: Vec<_> = hosts.clone().map(|host| self.seats(host, None, time_s)).collect();
        let first = topology.hosts_of(rack).start;
        let mut best: Option<Room> = None;
        let can_aggregate =
            |host: &HostId| problem.seats[host.0].aggregators > 0 && !excluded.contains(host);
        for host in hosts.filter(can_aggregate) {
            let mut beside: u32 = seats.iter().fold(0, |sum, seats| sum.saturating_add(*seats));
            beside -= seats[host.0 - first];
            for peer in problem.links.peers(host) {
                if topology.hosts_of(rack).contains(&peer.host.0) {
                    let of_peer = seats[peer.host.0 - first];
                    beside -= of_peer - self.seats(peer.host, Some(host), time_s).min(of_peer);
                }
            }
            let Some(remote) = self.remote(host, others, beside, time_s) else { continue };
            let ranks = problem.ranks_beside(host.0, 1).saturating_add(remote);
            let ranks = ranks.min(problem.limits[rack.0]).min(problem.traffic.ranks);
            if best.is_none_or(|best| ranks > best.ranks) {
                best = Some(Room { rack, aggregator: host, ranks });
            }
        }
        best
    }

    /// Returns the greatest number of ranks within a limit in the rack of an aggregator, or `None`
    /// if the aggregator's link does not even carry what it exchanges with others. Takes the number
    /// of other racks if the rack is the root's.
    fn room_of(
        &self,
        center: HostId,
        root: HostId,
        others: Option<usize>,
        limit: Limit,
    ) -> Option<Room> {
        let Problem { topology, limits, traffic, .. } = self.problem;
        let rack = topology.domain_of(center);
        let is_near = |host: &HostId| self.rtt_s(*host, center, root) <= limit.latency_s;
        let hosts = topology.hosts_of(rack).map(HostId);
        let hosts = hosts.filter(|host| *host != center && is_near(host));
        let seats = hosts.map(|host| self.seats(host, Some(center), limit.transfer_s));
        let remote =
            self.remote(center, others, seats.fold(0, u32::saturating_add), limit.transfer_s)?;
        let beside = if is_near(&center) { self.problem.ranks_beside(center.0, 1) } else { 0 };
        let ranks = beside.saturating_add(remote).min(limits[rack.0]).min(traffic.ranks);
        Some(Room { rack, aggregator: center, ranks })
    }

    /// Returns the round trip from a host to the root through the aggregator of its rack, in
    /// seconds.
    fn rtt_s(&self, host: HostId, center: HostId, root: HostId) -> f64 {
        let Problem { topology, links, .. } = self.problem;
        links.rtt(topology, host, center) + links.rtt(topology, center, root)
    }

    /// Returns the number of ranks that a host without an aggregator can have, if these send to an
    /// aggregator of the rack.
    fn seats(&self, host: HostId, aggregator: Option<HostId>, time_s: f64) -> u32 {
        let (problem, traffic) = (self.problem, self.problem.traffic);
        let leaf = problem.topology.leaf(host).0;
        let path = |from, to| problem.links.ceiling(from, to).unwrap_or(f64::INFINITY);
        let (path_up, path_down) = aggregator
            .map_or((f64::INFINITY, f64::INFINITY), |peer| (path(host, peer), path(peer, host)));
        let up = problem.links.up[leaf].bytes_per_s.min(path_up);
        let down = problem.links.down[leaf].bytes_per_s.min(path_down);
        greatest(problem.seats[host.0].ranks, |ranks| {
            let sent = f64::from(ranks) * traffic.contribution;
            transfer_s(sent, up) <= time_s
                && transfer_s(traffic.copies(ranks) * traffic.result, down) <= time_s
        })
    }

    /// Returns the number of ranks on other hosts of the rack that an aggregator's link allows, at
    /// most `most`, or `None` if it does not even carry what it sends to other aggregators.
    fn remote(&self, host: HostId, others: Option<usize>, most: u32, time_s: f64) -> Option<u32> {
        let (links, traffic) = (self.problem.links, self.problem.traffic);
        let leaf = self.problem.topology.leaf(host).0;
        let others = others.map(|others| u32::try_from(others).unwrap_or(u32::MAX));
        let fits = |ranks: u32| {
            let results = match others {
                // One group of receivers: ranks of the rack and other racks.
                Some(others) => traffic.copies(ranks.saturating_add(others)),
                // The sum that goes to the root is as large as a result.
                None => traffic.copies(ranks) + 1.0,
            };
            let sums = f64::from(others.unwrap_or(1));
            let received = f64::from(ranks).mul_add(traffic.contribution, sums * traffic.result);
            transfer_s(results * traffic.result, links.up[leaf].bytes_per_s) <= time_s
                && transfer_s(received, links.down[leaf].bytes_per_s) <= time_s
        };
        fits(0).then(|| greatest(most, fits))
    }

    /// Returns the root and the other racks with most room, or `None` if the links above racks do
    /// not carry so many sums in time.
    fn picked(&self, root: Room, others: usize, rooms: &[Room], time_s: f64) -> Option<Vec<Room>> {
        let topology = self.problem.topology;
        let slow = self.slow_peers(root.aggregator, time_s);
        let hosts_of = |vertex: VertexId| topology.hosts_of(vertex);
        let others_of_root = rooms.iter().filter(|room| room.rack != root.rack);
        let mut rooms: Vec<Room> = others_of_root.copied().collect();
        for room in &mut rooms {
            if slow.contains(&room.aggregator) {
                let other = self.room(room.rack, None, &slow, time_s);
                *room = other.unwrap_or(Room { ranks: 0, ..*room });
            }
        }
        let mut picked = vec![root];
        let mut counts: BTreeMap<VertexId, u32> = BTreeMap::new();
        // Domains that hold the root need enough other racks within them, the innermost first.
        let within = |vertex: &VertexId| *vertex != self.domain;
        let above = |rack: VertexId| topology.climb(rack).skip(1).take_while(within);
        let wholes =
            above(root.rack).map(|vertex| (vertex, self.least_inside(vertex, others, time_s)));
        let wholes: Vec<_> = wholes.chain([(self.domain, others)]).collect();
        for (whole, least) in wholes {
            let inside = |room: &Room| hosts_of(whole).contains(&hosts_of(room.rack).start);
            let mut count = picked.iter().skip(1).filter(|room| inside(room)).count();
            rooms.retain(|room| {
                let fits = |vertex: VertexId| {
                    let more = counts.get(&vertex).copied().unwrap_or(0) + 1;
                    hosts_of(vertex).contains(&root.aggregator.0)
                        || self.carries(vertex, more, self.copies(more), time_s)
                };
                let is_picked =
                    count < least && room.ranks > 0 && inside(room) && above(room.rack).all(fits);
                if is_picked {
                    count += 1;
                    picked.push(*room);
                    above(room.rack).for_each(|vertex| *counts.entry(vertex).or_default() += 1);
                }
                !is_picked
            });
            if count < least {
                return None;
            }
        }
        Some(picked)
    }

    /// Returns the least number of other racks in a domain that holds the root, such that its link
    /// carries the sums and results of those outside in time.
    fn least_inside(&self, vertex: VertexId, others: usize, time_s: f64) -> usize {
        let others = u32::try_from(others).unwrap_or(u32::MAX);
        let outside =
            greatest(others, |outside| self.carries(vertex, self.copies(outside), outside, time_s));
        (others - outside) as usize
    }

    /// Returns the hosts whose path to or from a root was measured and is too slow for a sum.
    fn slow_peers(&self, root: HostId, time_s: f64) -> Vec<HostId> {
        let result = self.problem.traffic.result;
        let is_slow = |ceiling: Option<f64>| {
            ceiling.is_some_and(|bytes_per_s| transfer_s(result, bytes_per_s) > time_s)
        };
        let peers = self.problem.links.peers(root).iter();
        let slow = peers.filter(|peer| is_slow(peer.ceiling_to()) || is_slow(peer.ceiling_from()));
        slow.map(|peer| peer.host).collect()
    }

    /// Places the ranks in racks that have room for them within a limit. The root's rack gets as
    /// many as it can.
    fn placed(&self, racks: &[Room], limit: Limit) -> Found {
        let (topology, problem) = (self.problem.topology, self.problem);
        let root = racks[0].aggregator;
        let mut placement = Placement::none(topology);
        placement.aggregators[root.0] = 1;
        let mut left = problem.traffic.ranks;
        let mut limits = problem.limits.clone();
        let mut used = vec![];
        for Room { rack, aggregator, ranks } in racks {
            let ancestors = || std::iter::once(*rack).chain(topology.climb(*rack).skip(1));
            let most = ancestors().map(|vertex| limits[vertex.0]).min().unwrap_or(0);
            let mut more = left.min(*ranks).min(most).min(limits[Topology::ROOT.0]);
            left -= more;
            ancestors().for_each(|vertex| limits[vertex.0] -= more);
            if more > 0 {
                used.push(*aggregator);
            }
            let beside = more.min(problem.ranks_beside(aggregator.0, 1));
            placement.ranks[aggregator.0] = beside;
            more -= beside;
            let is_near = |host: &HostId| self.rtt_s(*host, *aggregator, root) <= limit.latency_s;
            let hosts = topology.hosts_of(*rack).map(HostId);
            let hosts = hosts.filter(|host| host != aggregator && is_near(host));
            let seats = |host| self.seats(host, Some(*aggregator), limit.transfer_s);
            let mut hosts: Vec<_> = hosts.map(|host| (seats(host), host)).collect();
            hosts.sort_by_key(|(seats, host)| (Reverse(*seats), *host));
            for (seats, host) in hosts {
                placement.ranks[host.0] = seats.min(more);
                more -= placement.ranks[host.0];
            }
        }
        let tree = Tree { root, racks: used.into_iter().filter(|host| *host != root).collect() };
        let time = tree_step_time(problem, &placement, &tree);
        Found { placement, tree: Some(tree), time }
    }
}
