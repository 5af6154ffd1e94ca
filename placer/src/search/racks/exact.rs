//! Tries all choices of hosts for the aggregators of racks.
//!
//! Once these are placed, the sums of racks are the same however many ranks each rack has. What is
//! left of a link then gives each rack a greatest number of ranks within a limit.

use super::super::within::{Limit, Within, shortest};
use super::super::{EXACT_VISITS, Found, LONGEST_S};
use super::{Room, Search};
use crate::model::transfer_s;
use crate::placement::Placement;
use crate::racks::{Tree, tree_loads};
use crate::topology::{HostId, VertexId};

/// The hosts of the aggregators: one in each rack that is used, the root's first.
type Centers = Vec<HostId>;

/// Returns the placement with the shortest step of these choices, if it is shorter than `below_s`
/// seconds.
pub(super) fn search(search: &Search<'_>, choices: Vec<Centers>, below_s: f64) -> Option<Found> {
    choices.into_iter().fold(None, |best: Option<Found>, centers| {
        let below_s = best.as_ref().map_or(below_s, |best| best.time.total_s());
        let ranks = RankSearch::new(search, centers);
        let limit = Limit { transfer_s: below_s.min(LONGEST_S), latency_s: below_s };
        ranks.fits(limit).then(|| shortest(&ranks, &ranks.rtts_s, below_s)).flatten().or(best)
    })
}

/// Returns the choices of hosts for the aggregators, or `None` if there are too many to try all.
pub(super) fn choices(search: &Search<'_>) -> Option<Vec<Centers>> {
    let Search { problem, domain, racks } = search;
    let most = EXACT_VISITS / problem.topology.subtree(*domain).len();
    let mut sets: Vec<Centers> = vec![vec![]];
    for rack in racks {
        let hosts = problem.topology.hosts_of(*rack).map(HostId);
        let hosts: Vec<_> = hosts.filter(|host| problem.seats[host.0].aggregators > 0).collect();
        if sets.len().saturating_mul(hosts.len() + 1) > most {
            return None;
        }
        let more = |set: &Centers| {
            let set = set.clone();
            hosts.iter().map(move |host| [&set[..], &[*host]].concat()).collect::<Vec<_>>()
        };
        let with_one: Vec<_> = sets.iter().flat_map(more).collect();
        sets.extend(with_one);
    }
    let rooted = |set: &Centers| {
        let set = set.clone();
        (0..set.len()).map(move |root| {
            let mut centers = set.clone();
            centers[..=root].rotate_right(1);
            centers
        })
    };
    (sets.len() * racks.len() <= most).then(|| sets.iter().flat_map(rooted).collect())
}

/// A problem whose aggregators are placed.
struct RankSearch<'a> {
    search: &'a Search<'a>,
    centers: Centers,
    /// The time in seconds of the transfers that do not depend on the ranks.
    sums_s: f64,
    /// The round trips from the hosts of the racks to the root, in seconds.
    rtts_s: Vec<f64>,
}

impl<'a> RankSearch<'a> {
    fn new(search: &'a Search<'a>, centers: Centers) -> Self {
        let (topology, links) = (search.problem.topology, search.problem.links);
        let root = centers[0];
        let tree = Tree { root, racks: centers[1..].to_vec() };
        let none = Placement::none(topology);
        let loads = tree_loads(search.problem, &none, &tree);
        let is_above_hosts = |vertex: &usize| topology.children(VertexId(*vertex)).next().is_some();
        let vertices = (1..topology.vertices()).filter(is_above_hosts);
        let of_links = vertices.map(|vertex| {
            let (up, down) = loads.links[vertex];
            let up_s = transfer_s(up, links.up[vertex].bytes_per_s);
            up_s.max(transfer_s(down, links.down[vertex].bytes_per_s))
        });
        let of_paths = loads.paths.iter().map(|((from, to), bytes)| {
            transfer_s(*bytes, links.ceiling(*from, *to).unwrap_or(f64::INFINITY))
        });
        let sums_s = of_links.chain(of_paths).fold(0.0, f64::max);
        let in_rack = |center: HostId| {
            let hosts = topology.hosts_of(topology.domain_of(center)).map(HostId);
            hosts.map(move |host| search.rtt_s(host, center, root))
        };
        let rtts_s = centers.iter().copied().flat_map(in_rack).collect();
        Self { search, centers, sums_s, rtts_s }
    }

    /// Returns the ranks for which each rack has room within a limit, or `None` if its aggregators
    /// do not.
    fn rooms(&self, limit: Limit) -> Option<Vec<Room>> {
        if self.sums_s > limit.transfer_s {
            return None;
        }
        let rooms = self.centers.iter().enumerate().map(|(index, center)| {
            let others = (index == 0).then_some(self.centers.len() - 1);
            self.search.room_of(*center, self.centers[0], others, limit)
        });
        rooms.collect()
    }
}

impl Within for RankSearch<'_> {
    fn fits(&self, limit: Limit) -> bool {
        let rooms = self.rooms(limit);
        rooms.is_some_and(|rooms| self.search.total(&rooms) >= self.search.problem.traffic.ranks)
    }

    fn within(&self, limit: Limit) -> Option<Found> {
        let rooms = self.rooms(limit)?;
        if self.search.total(&rooms) < self.search.problem.traffic.ranks {
            return None;
        }
        Some(self.search.placed(&rooms, limit))
    }
}
