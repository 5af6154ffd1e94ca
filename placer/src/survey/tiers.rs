//! Domains that measurements show, whatever the labels say.
//!
//! The distance of two hosts is the round-trip time between them, times the share by which the path
//! is slower than the hosts' own links. Hosts of one rack are close to each other, and about as far
//! as each other from the hosts of another rack.

use std::collections::{BTreeMap, BTreeSet};

use super::sample::Sample;
use crate::inventory::{Place, Tree, UNMEASURED};
use crate::topology::{HostId, Topology, VertexId};

/// A host that was measured in another domain than its labels say.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Misplaced {
    /// The host.
    pub host: HostId,
    /// The innermost domain that its labels name.
    pub labelled: VertexId,
    /// The domain whose hosts are closest.
    pub measured: VertexId,
    /// The detour to the hosts of the labelled domain, divided by that to the measured one.
    pub ratio: f64,
}

/// Returns the hosts that are closer to the hosts of another innermost domain than to those of
/// their own.
///
/// The detour to a host is its distance, divided by its distance to the closest other host. A host
/// that is far from all others, behind a slow link of its own, thus says nothing about its domain.
/// The detour to a domain is that to the host of the domain with the shortest one.
#[must_use]
pub fn misplaced(topology: &Topology, samples: &[Sample]) -> Vec<Misplaced> {
    let distances = Distances::new(topology.hosts().len(), samples);
    let domains: Vec<_> = topology.domains(topology.levels().len()).collect();
    if topology.levels().is_empty() {
        return vec![];
    }
    let find = |host: HostId| {
        let detour = |domain: VertexId| {
            let others = topology.hosts_of(domain).filter(|other| *other != host.0);
            others.filter_map(|other| distances.log_detour(host.0, other)).reduce(f64::min)
        };
        let labelled = topology.domain_of(host);
        let own = detour(labelled)?;
        let others = domains.iter().filter(|domain| **domain != labelled);
        let others = others.filter_map(|domain| Some((detour(*domain)?, *domain)));
        let (closest, measured) = others.min_by(|one, other| one.0.total_cmp(&other.0))?;
        let ratio = (own - closest).exp();
        (ratio >= CLEARLY).then_some(Misplaced { host, labelled, measured, ratio })
    };
    topology.host_ids().filter_map(find).collect()
}

/// Returns the tiers of hosts that samples show, widest first: per tier, the number of the group of
/// each host. Groups are numbered in the order of their first hosts.
///
/// Single linkage joins the closest groups first. Where the distance at which groups join rises by
/// more than half at once, there is a tier.
///
/// Returns no tier if all hosts are about as far from each other.
#[must_use]
pub fn tiers(hosts: usize, samples: &[Sample]) -> Vec<Vec<usize>> {
    let mut edges: Vec<_> = Distances::new(hosts, samples).logs.into_iter().collect();
    edges.sort_by(|(one, near), (other, far)| near.total_cmp(far).then(one.cmp(other)));
    let mut groups: Vec<usize> = (0..hosts).collect();
    let mut tiers = vec![];
    let mut last: Option<f64> = None;
    for ((one, other), distance) in edges {
        let (into, from) = {
            let (one, other) = (groups[one], groups[other]);
            (one.min(other), one.max(other))
        };
        if into == from {
            continue;
        }
        if last.is_some_and(|last| distance - last >= CLEARLY.ln()) {
            tiers.push(numbered(&groups));
        }
        last = Some(distance);
        groups.iter_mut().filter(|group| **group == from).for_each(|group| *group = into);
    }
    // No path joins the groups that are left.
    if groups.iter().any(|group| *group != 0) {
        tiers.push(numbered(&groups));
    }
    tiers.reverse();
    tiers
}

/// Returns where samples show hosts that have no labels, or other ones than their labels say.
/// `None` if the labels are right, or if no labels are needed.
///
/// Without labels, the levels are called `tier1`, `tier2` and so on, widest first, and the domains
/// of each are numbered in the order of their first hosts, without the numbers that are names of
/// hosts. Hosts without samples are in a domain [`UNMEASURED`] of each level.
#[must_use]
pub fn found_tree(topology: &Topology, samples: &[Sample]) -> Option<Tree> {
    let name = |host: HostId| topology.host(host).name.clone();
    if topology.levels().is_empty() {
        let tiers = tiers(topology.hosts().len(), samples);
        let levels = (1..=tiers.len()).map(|tier| format!("tier{tier}")).collect();
        // A domain must not have the name of a host.
        let taken: BTreeSet<_> =
            topology.hosts().iter().flat_map(|host| host.name.split('/')).collect();
        let numbers = (1..).map(|number: usize| number.to_string());
        let numbers = numbers.filter(|number| !taken.contains(number.as_str()));
        let numbers: Vec<_> = numbers.take(topology.hosts().len()).collect();
        let measured: BTreeSet<_> =
            samples.iter().flat_map(|sample| [sample.from, sample.to]).collect();
        let labels = |host: HostId| {
            if !measured.contains(&host) {
                return vec![UNMEASURED.to_owned(); tiers.len()];
            }
            tiers.iter().map(|groups| numbers[groups[host.0]].clone()).collect::<Vec<_>>()
        };
        let place = |host: HostId| Place { labels: labels(host), age_s: 0.0 };
        let hosts = topology.host_ids().map(|host| (name(host), place(host)));
        return (!tiers.is_empty()).then(|| Tree { levels, hosts: hosts.collect() });
    }
    let found = misplaced(topology, samples);
    let labels = |domain: VertexId| topology.name(domain).split('/').map(str::to_owned).collect();
    let place = |domain: VertexId| Place { labels: labels(domain), age_s: 0.0 };
    let hosts = found.iter().map(|found| (name(found.host), place(found.measured)));
    let levels = topology.levels().to_vec();
    (!found.is_empty()).then(|| Tree { levels, hosts: hosts.collect() })
}

/// Numbers groups in the order of their first hosts.
fn numbered(groups: &[usize]) -> Vec<usize> {
    let mut numbers = BTreeMap::new();
    groups
        .iter()
        .map(|group| {
            let next = numbers.len();
            *numbers.entry(*group).or_insert(next)
        })
        .collect()
}

/// The distances between hosts.
struct Distances {
    /// The logarithms of the distances, with the smaller number of a pair first.
    logs: BTreeMap<(usize, usize), f64>,
    /// Per host: the two closest others and the logarithms of their distances, closest first.
    closest: Vec<Vec<(usize, f64)>>,
}

impl Distances {
    fn new(hosts: usize, samples: &[Sample]) -> Self {
        // The greatest rate at which each host sends and receives.
        let (mut sends, mut receives) = (vec![0.0f64; hosts], vec![0.0f64; hosts]);
        for sample in samples {
            sends[sample.from.0] = sends[sample.from.0].max(sample.mbit);
            receives[sample.to.0] = receives[sample.to.0].max(sample.mbit);
        }
        let mut found: BTreeMap<_, Vec<f64>> = BTreeMap::new();
        for sample in samples.iter().filter(|sample| sample.mbit > 0.0) {
            let (from, to) = (sample.from.0, sample.to.0);
            let slowdown = sends[from].min(receives[to]) / sample.mbit;
            let distance = slowdown.ln() + sample.rtt_us.max(LEAST_RTT_US).ln();
            found.entry((from.min(to), from.max(to))).or_default().push(distance);
        }
        let mean = |(pair, logs): (_, Vec<f64>)| Some((pair, mean(logs.into_iter())?));
        let logs: BTreeMap<_, _> = found.into_iter().filter_map(mean).collect();
        let mut closest = vec![vec![]; hosts];
        for (&(one, other), &log) in &logs {
            for (host, peer) in [(one, other), (other, one)] {
                let closest: &mut Vec<(usize, f64)> = &mut closest[host];
                closest.insert(closest.partition_point(|(_, known)| *known <= log), (peer, log));
                closest.truncate(2);
            }
        }
        Self { logs, closest }
    }

    /// Returns the logarithm of the distance from `host` to `other`, divided by the distance from
    /// `other` to the closest third host, but at least zero.
    fn log_detour(&self, host: usize, other: usize) -> Option<f64> {
        let log = self.logs.get(&(host.min(other), host.max(other)))?;
        let (_, closest) = self.closest[other].iter().find(|(third, _)| *third != host)?;
        Some((log - closest).max(0.0))
    }
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0u32), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / f64::from(count))
}

/// Distances that differ by this factor tell domains apart.
const CLEARLY: f64 = 1.5;
/// Shorter round trips differ mostly by how busy the hosts are.
const LEAST_RTT_US: f64 = 20.0;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::Inventory;
    use crate::survey::tests::racks;

    /// Samples between all hosts, where `rack` says in which rack a host really is.
    fn samples(hosts: usize, rack: impl Fn(usize) -> usize) -> Vec<Sample> {
        let pairs = (0..hosts).flat_map(|a| (0..hosts).map(move |b| (a, b)));
        let sample = |(from, to): (usize, usize)| {
            let is_near = rack(from) == rack(to);
            Sample {
                from: HostId(from),
                to: HostId(to),
                mbit: if is_near { 100.0 } else { 40.0 },
                loss: 0.0,
                rtt_us: if is_near { 60.0 } else { 90.0 },
                rtt_p99_us: 100.0,
            }
        };
        pairs.filter(|(a, b)| a != b).map(sample).collect()
    }

    #[test]
    fn racks_without_labels_are_found() {
        let found = tiers(9, &samples(9, |host| host % 3));
        assert_eq!(found, [vec![0, 1, 2, 0, 1, 2, 0, 1, 2]]);
        assert!(tiers(9, &samples(9, |_| 0)).is_empty());
    }

    #[test]
    fn racks_within_zones_are_two_tiers() {
        let mut samples = samples(8, |host| host / 2);
        for sample in &mut samples {
            if sample.from.0 / 4 != sample.to.0 / 4 {
                sample.rtt_us *= 4.0;
            }
        }
        let found = tiers(8, &samples);
        assert_eq!(found, [vec![0, 0, 0, 0, 1, 1, 1, 1], vec![0, 0, 1, 1, 2, 2, 3, 3]]);
    }

    #[test]
    fn a_host_that_lies_about_its_rack_is_named() {
        let topology = racks(&[4, 4]);
        // Host 1 says rack 0.
        let samples = samples(8, |host| usize::from(host >= 4 || host == 1));
        let [found] = misplaced(&topology, &samples)[..] else { panic!("one host lies") };
        assert_eq!(topology.host(found.host).name, "r0h1");
        assert_eq!((topology.name(found.labelled), topology.name(found.measured)), ("r0", "r1"));
        assert!(found.ratio > 2.0, "{}", found.ratio);
    }

    #[test]
    fn the_tree_that_is_found_places_hosts_without_labels_and_hosts_that_lie() {
        let labelled = racks(&[4, 4]);
        let samples = samples(8, |host| usize::from(host >= 4 || host == 1));
        let tree = found_tree(&labelled, &samples).unwrap();
        assert_eq!(tree.levels, ["rack"]);
        let place = Place { labels: vec!["r1".into()], age_s: 0.0 };
        assert_eq!(tree.hosts, [("r0h1".into(), place)].into());

        let hosts = labelled.hosts().to_vec();
        let flat = Inventory { levels: vec![], hosts };
        let flat_topology = Topology::new(&flat).unwrap();
        let tree = found_tree(&flat_topology, &samples).unwrap();
        assert_eq!(tree.levels, ["tier1"]);
        let placed = Topology::new(&flat.placed_by(&tree)).unwrap();
        let of = |name: &str| placed.domain_of(placed.host_named(name).unwrap());
        assert_eq!((placed.name(of("r0h0")), placed.name(of("r0h1"))), ("1", "2"));
        assert_eq!(of("r0h1"), of("r1h3"));
    }

    #[test]
    fn no_domain_that_is_found_has_the_name_of_a_host() {
        let mut hosts = racks(&[4, 4]).hosts().to_vec();
        hosts[0].name = "2".into();
        let flat = Inventory { levels: vec![], hosts };
        let topology = Topology::new(&flat).unwrap();
        let samples = samples(8, |host| usize::from(host >= 4));
        let tree = found_tree(&topology, &samples).unwrap();
        let placed = Topology::new(&flat.placed_by(&tree)).unwrap();
        let domains = placed.domains(1).map(|domain| placed.name(domain));
        assert_eq!(domains.collect::<Vec<_>>(), ["1", "3"]);
    }

    #[test]
    fn a_slow_host_does_not_lie() {
        let topology = racks(&[4, 4]);
        let mut samples = samples(8, |host| host / 4);
        for sample in samples.iter_mut().filter(|sample| [sample.from.0, sample.to.0].contains(&2))
        {
            sample.mbit = sample.mbit.min(10.0);
            sample.rtt_us += 500.0;
        }
        assert_eq!(misplaced(&topology, &samples), []);
    }

    #[test]
    fn hosts_beside_distant_hosts_do_not_lie() {
        let topology = racks(&[4, 4]);
        let mut samples = samples(8, |host| host / 4);
        for (host, rtt_us) in [(2, 5_000.0), (3, 20_000.0)] {
            let of_host = |sample: &&mut Sample| [sample.from.0, sample.to.0].contains(&host);
            samples.iter_mut().filter(of_host).for_each(|sample| sample.rtt_us += rtt_us);
        }
        assert_eq!(misplaced(&topology, &samples), []);
        // Also if no other host of the rack is close.
        samples.retain(|sample| ![sample.from.0, sample.to.0].contains(&1));
        assert_eq!(misplaced(&topology, &samples), []);
    }
}
