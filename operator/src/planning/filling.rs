//! Places for members that are missing beside members that stay.

use std::collections::{BTreeMap, BTreeSet};

use kube::ResourceExt;
use racksum_placer::model::step_time;
use racksum_placer::placement::Placement;
use racksum_placer::problem::Problem;
use racksum_placer::standby::taken_hosts;
use racksum_placer::topology::Topology;

use super::{Request, Room, Sizes, Unplanned};
use crate::quantity::{Amounts, add, times};

/// The members of a group on the hosts of a topology.
#[derive(Debug)]
pub(super) struct Filled {
    /// The workers, and the aggregators that the job begins with.
    pub(super) placement: Placement,
    /// The node of each aggregator, by number.
    pub(super) aggregators: Vec<String>,
}

/// Keeps the placed members of a group where they are, and puts each missing one on the host that
/// makes the step shortest.
///
/// # Errors
/// If no host has room for a missing member.
pub(super) fn filled(
    request: &Request<'_>,
    problem: &Problem<'_>,
    topology: &Topology,
    rooms: &[Room<'_>],
    sizes: &Sizes,
) -> Result<Filled, Unplanned> {
    let mut filling = Filling::new(request, problem, topology, rooms, sizes);
    let each = request.group.spec.aggregators.count as usize;
    let mut aggregators = Vec::with_capacity(request.aggregators.len());
    for (number, placed) in request.aggregators.iter().enumerate() {
        aggregators.push(match placed {
            Some(host) => (*host).to_owned(),
            None => {
                let host = filling.seat_aggregator(number / each)?;
                topology.hosts()[host].name.clone()
            }
        });
    }
    if !request.follows() {
        let missing = request.group.spec.workers.count.saturating_sub(filling.ranks.iter().sum());
        filling.seat_workers(missing)?;
    }
    let Filling { ranks, mut sets, .. } = filling;
    Ok(Filled { placement: Placement { ranks, aggregators: sets.swap_remove(0) }, aggregators })
}

/// A member that has no place yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// An aggregator of a set: 0 is the job's own, and standbys follow.
    Aggregator {
        set: usize,
    },
    Worker,
}

/// A host, and what it can take.
#[derive(Debug)]
struct Seats {
    free: Amounts,
    takes_aggregators: bool,
    /// The unplaced workers that accept the host.
    workers: u32,
}

struct Filling<'a> {
    request: &'a Request<'a>,
    problem: &'a Problem<'a>,
    topology: &'a Topology,
    sizes: &'a Sizes,
    hosts: Vec<Seats>,
    /// Workers per host.
    ranks: Vec<u32>,
    /// Aggregators per host, of each set.
    sets: Vec<Vec<u32>>,
}

impl<'a> Filling<'a> {
    fn new(
        request: &'a Request<'a>,
        problem: &'a Problem<'a>,
        topology: &'a Topology,
        rooms: &[Room<'_>],
        sizes: &'a Sizes,
    ) -> Self {
        let placed = request.placed_workers();
        let rooms: BTreeMap<_, _> = rooms.iter().map(|room| (room.node.name_any(), room)).collect();
        let hosts = topology.hosts().iter();
        let seats = hosts.clone().map(|host| {
            let room = rooms[&host.name];
            let (takes_aggregators, workers) = (room.takes_aggregators, room.workers);
            Seats { free: room.free(), takes_aggregators, workers }
        });
        let ranks = hosts.clone().map(|host| placed.get(host.name.as_str()).copied().unwrap_or(0));
        let each = request.group.spec.aggregators.count as usize;
        let sets = request.aggregators.chunks(each).map(|set| {
            let count = |name: &str| set.iter().filter(|placed| **placed == Some(name)).count();
            let counts = hosts.clone().map(|host| u32::try_from(count(&host.name)));
            counts.map(|count| count.unwrap_or(u32::MAX)).collect()
        });
        let (hosts, ranks, sets) = (seats.collect(), ranks.collect(), sets.collect());
        Self { request, problem, topology, sizes, hosts, ranks, sets }
    }

    /// Puts an aggregator on the host that makes the step shortest, and returns the host.
    fn seat_aggregator(&mut self, set: usize) -> Result<usize, Unplanned> {
        let role = Role::Aggregator { set };
        let is_open = self.open_to(role);
        let mut placement = self.placement(set);
        let hosts = (0..self.hosts.len()).filter(|host| is_open[*host] && self.takes(role, *host));
        let steps = hosts.map(|host| (self.step_with(role, host, &mut placement), host));
        let (_, host) = steps.min().ok_or_else(|| self.no_room(role))?;
        self.put(role, host);
        Ok(host)
    }

    /// Puts workers on the hosts that make the step shortest, one after the other.
    ///
    /// A worker more makes the step on another host longer, or leaves it as it is, unless it brings
    /// the sums to a host with an aggregator. So a step that was computed for fewer workers is
    /// computed again only if it is the shortest. For a job that lost all its workers, this takes
    /// little more than for one worker.
    fn seat_workers(&mut self, missing: u32) -> Result<(), Unplanned> {
        let role = Role::Worker;
        let mut placement = self.placement(0);
        let hosts = (0..self.hosts.len()).filter(|host| missing > 0 && self.takes(role, *host));
        let steps = hosts.map(|host| (self.step_with(role, host, &mut placement), host));
        let mut steps: BTreeSet<(u64, usize)> = steps.collect();
        for _ in 0..missing {
            let is_open = self.open_to(role);
            let (step, host) = loop {
                let (_, host) = steps.pop_first().ok_or_else(|| self.no_room(role))?;
                // Neither a host nor a domain opens again.
                if !is_open[host] || !self.takes(role, host) {
                    continue;
                }
                let step = self.step_with(role, host, &mut placement);
                if steps.first().is_none_or(|next| (step, host) <= *next) {
                    break (step, host);
                }
                steps.insert((step, host));
            };
            self.put(role, host);
            placement.ranks[host] += 1;
            steps.insert((step, host));
        }
        Ok(())
    }

    fn placement(&self, set: usize) -> Placement {
        Placement { ranks: self.ranks.clone(), aggregators: self.sets[set].clone() }
    }

    /// Returns the step with one member more on a host, as the bits of a time that is not negative:
    /// they have its order. The placement is the same afterwards.
    fn step_with(&self, role: Role, host: usize, placement: &mut Placement) -> u64 {
        *of_role(role, &mut placement.ranks, &mut placement.aggregators, host) += 1;
        let step_s = step_time(self.problem, placement).total_s();
        *of_role(role, &mut placement.ranks, &mut placement.aggregators, host) -= 1;
        step_s.max(0.0).to_bits()
    }

    /// Puts a member on a host, and takes its room.
    fn put(&mut self, role: Role, host: usize) {
        let set = match role {
            Role::Aggregator { set } => set,
            Role::Worker => 0,
        };
        *of_role(role, &mut self.ranks, &mut self.sets[set], host) += 1;
        let size = self.size(role);
        let size = size.iter().map(|(name, amount)| (name.clone(), -amount)).collect();
        let seats = &mut self.hosts[host];
        add(&mut seats.free, &size);
        seats.workers -= u32::from(role == Role::Worker);
    }

    /// Returns, per host, whether it is in a domain that a member of a role may use.
    fn open_to(&self, role: Role) -> Vec<bool> {
        let mut is_open = self.in_scope();
        if let Role::Aggregator { set } = role {
            let others = self.sets.iter().enumerate().filter(|(other, _)| *other != set);
            let others: Vec<_> = others.map(|(_, counts)| counts).collect();
            let is_taken = taken_hosts(self.problem, &others);
            is_open.iter_mut().zip(is_taken).for_each(|(is_open, is_taken)| *is_open &= !is_taken);
        }
        is_open
    }

    /// Returns, per host, whether a member may go there without leaving the domains of the scope
    /// that hold members, if the job must not leave them.
    fn in_scope(&self) -> Vec<bool> {
        let all = vec![true; self.hosts.len()];
        let Some(depth) = self.scope().and_then(|scope| self.topology.depth_of(scope)) else {
            return all;
        };
        let has_member =
            |host: usize| self.ranks[host] > 0 || self.sets.iter().any(|counts| counts[host] > 0);
        let mut is_inside = vec![false; self.hosts.len()];
        for (_, host) in self.topology.host_ids().enumerate().filter(|one| has_member(one.0)) {
            let domain = self.topology.domain_at(host, depth);
            is_inside[self.topology.hosts_of(domain)].fill(true);
        }
        // The nodes of all placed members may be gone.
        if is_inside.contains(&true) { is_inside } else { all }
    }

    /// Returns the level whose domain the job must not leave, if any.
    fn scope(&self) -> Option<&str> {
        let topology = &self.request.group.spec.topology;
        let is_bound = topology.requires_scope && !self.request.follows();
        topology.scope.as_deref().filter(|_| is_bound)
    }

    fn takes(&self, role: Role, host: usize) -> bool {
        let seats = &self.hosts[host];
        let accepts = match role {
            Role::Aggregator { .. } => {
                // On the host's network, two aggregators would need the same port.
                let is_port_free = !self.request.group.spec.aggregators.host_network
                    || self.sets.iter().all(|counts| counts[host] == 0);
                seats.takes_aggregators && is_port_free
            }
            Role::Worker => seats.workers > 0,
        };
        accepts && times(&seats.free, self.size(role), |_| true) > 0
    }

    const fn size(&self, role: Role) -> &'a Amounts {
        match role {
            Role::Aggregator { .. } => &self.sizes.aggregator,
            Role::Worker => &self.sizes.worker,
        }
    }

    fn no_room(&self, role: Role) -> Unplanned {
        let what = match role {
            Role::Aggregator { set: 0 } => "aggregator",
            Role::Aggregator { .. } => "standby",
            Role::Worker => "worker",
        };
        let is_apart = role != Role::Worker && self.sets.len() > 1;
        let is_narrowest =
            self.request.group.spec.topology.standby_level.as_deref() == Some("host");
        let place = self.scope().map_or_else(String::new, |scope| format!(" of the job's {scope}"));
        let apart = if is_apart { " apart from those of other sets" } else { "" };
        let mut text =
            format!("no node{place} has room for another {what}{apart}; free one that accepts it");
        if is_apart && !is_narrowest {
            text += ", or set topology.standbyLevel to a narrower level or to host";
        }
        if self.scope().is_some() {
            text += ", or set topology.requiresScope to false";
        }
        Unplanned::Room(text)
    }
}

/// Returns the number of members of a role on a host.
fn of_role<'a>(
    role: Role,
    ranks: &'a mut [u32],
    aggregators: &'a mut [u32],
    host: usize,
) -> &'a mut u32 {
    match role {
        Role::Aggregator { .. } => &mut aggregators[host],
        Role::Worker => &mut ranks[host],
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use racksum_placer::network::{Links, Network};
    use serde_json::json;

    use super::*;
    use crate::members::Members;
    use crate::objects::aggregator;
    use crate::planning::tests::{group, node, worker};
    use crate::planning::{inventory, job, rooms};

    #[test]
    fn workers_placed_at_once_go_where_they_would_go_one_by_one() {
        let node_of = |index: u32| {
            node(&format!("h{index}"), &format!("r{}", index % 3), |node| {
                let rate = [1_000, 10_000, 4_000, 10_000, 2_000][index as usize % 5];
                node["metadata"]["labels"]["racksum.dev/nic-mbit"] = json!(rate.to_string());
            })
        };
        let nodes: Vec<_> = (0..9).map(node_of).collect();
        let pods: Vec<_> = (0..12).map(|index| worker(index, |_| {})).collect();
        let asked = group("PlaceWorkers", 12, |_| {});
        let request = Request {
            group: &asked,
            nodes: &nodes,
            pods: &pods,
            groups: &[],
            network: &Network::default(),
            avoided: BTreeSet::new(),
            aggregator: &aggregator(&asked, 0),
            aggregators: vec![Some("h1")],
            workers: &Members::of(&asked, &[], &pods).workers,
        };
        let (sizes, rooms) = (Sizes::of(&request), rooms(&request));
        let topology = Topology::new(&inventory(&request, &rooms, &sizes).unwrap()).unwrap();
        let links = Links::new(&topology, request.network).unwrap();
        let job = job(&request, &sizes);
        let problem = Problem::new(&topology, &links, &job).unwrap();
        let filling = || Filling::new(&request, &problem, &topology, &rooms, &sizes);
        let (mut at_once, mut one_by_one) = (filling(), filling());
        at_once.seat_workers(12).unwrap();
        for _ in 0..12 {
            let mut placement = one_by_one.placement(0);
            let hosts = (0..nodes.len()).filter(|host| one_by_one.takes(Role::Worker, *host));
            let steps =
                hosts.map(|host| (one_by_one.step_with(Role::Worker, host, &mut placement), host));
            let (_, host) = steps.min().unwrap();
            one_by_one.put(Role::Worker, host);
        }
        assert_eq!(at_once.ranks, one_by_one.ranks);
        assert_eq!(at_once.ranks.iter().sum::<u32>(), 12);
    }
}
