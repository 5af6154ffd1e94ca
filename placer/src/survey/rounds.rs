//! The order in which pairs of hosts are measured.

use crate::topology::{HostId, Topology, VertexId};

/// Two hosts between which links are measured, in both directions.
pub type Pair = (HostId, HostId);

/// Returns all pairs of `hosts` numbers in rounds, so that each number is in one pair per round.
///
/// This is the circle method: the first number stays, and the others move by one place per round.
/// With an odd number of hosts, one of them rests in each round.
///
/// ```
/// use racksum_placer::survey::circle;
///
/// let rounds: Vec<_> = circle(4).collect();
/// assert_eq!(rounds[0], [(0, 3), (1, 2)]);
/// assert_eq!(rounds[1], [(0, 1), (2, 3)]);
/// assert_eq!(rounds.len(), 3);
/// ```
pub fn circle(hosts: usize) -> impl Iterator<Item = Vec<(usize, usize)>> {
    let places = hosts.next_multiple_of(2);
    let moving = places.saturating_sub(1);
    (0..moving).map(move |round| {
        let at = |place: usize| if place == 0 { 0 } else { (place - 1 + round) % moving + 1 };
        let pairs = (0..places / 2).map(|place| (at(place), at(places - 1 - place)));
        pairs.filter(|(one, other)| *one < hosts && *other < hosts).collect()
    })
}

/// Returns the pairs of hosts to measure: all pairs within an innermost domain, and `samples` pairs
/// for each two innermost domains.
///
/// With `samples` of `None`, all pairs are returned.
#[must_use]
pub fn sampled_pairs(topology: &Topology, samples: Option<usize>) -> Vec<Pair> {
    let Some(samples) = samples else {
        let rounds = circle(topology.hosts().len()).flatten();
        return rounds.map(|(one, other)| (HostId(one), HostId(other))).collect();
    };
    let domains: Vec<_> = topology.domains(topology.levels().len()).collect();
    let within = domains.iter().flat_map(|domain| {
        let hosts = topology.hosts_of(*domain);
        circle(hosts.len())
            .flatten()
            .map(move |(one, other)| (hosts.start + one, hosts.start + other))
    });
    let between = circle(domains.len()).flatten().flat_map(|(one, other)| {
        let (ones, others) = (topology.hosts_of(domains[one]), topology.hosts_of(domains[other]));
        // Different hosts each time, so that one bad host does not speak for its domain.
        let most = samples.min(ones.len() * others.len());
        (0..most).map(move |sample| {
            let shift = sample / least_common_multiple(ones.len(), others.len());
            (ones.start + sample % ones.len(), others.start + (sample + shift) % others.len())
        })
    });
    within.chain(between).map(|(one, other)| (HostId(one), HostId(other))).collect()
}

/// Returns pairs of hosts whose paths all use the link of a domain: each with one host of the
/// domain and one outside it. No host is in two pairs.
///
/// As many pairs as possible load the link together, so hosts outside are taken from each of the
/// other domains of the same depth in turn.
#[must_use]
pub fn contended_pairs(
    topology: &Topology,
    domain: VertexId,
    is_usable: impl Fn(HostId) -> bool,
) -> Vec<Pair> {
    let usable = |hosts: std::ops::Range<usize>| {
        hosts.map(HostId).filter(|host| is_usable(*host)).collect::<Vec<_>>()
    };
    let others = topology.domains(topology.depth(domain)).filter(|other| *other != domain);
    let others: Vec<_> = others.map(|other| usable(topology.hosts_of(other))).collect();
    let longest = others.iter().map(Vec::len).max().unwrap_or(0);
    let outside = (0..longest).flat_map(|place| others.iter().filter_map(move |o| o.get(place)));
    usable(topology.hosts_of(domain)).into_iter().zip(outside.copied()).collect()
}

fn least_common_multiple(one: usize, other: usize) -> usize {
    let (mut divisor, mut rest) = (one, other);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    one / divisor * other
}

/// Groups pairs into rounds in which no two pairs share a link.
///
/// Pairs that are measured at the same time must not slow each other down. Each pair goes into the
/// first round that has both of its paths free.
#[must_use]
pub fn rounds(topology: &Topology, pairs: &[Pair]) -> Vec<Vec<Pair>> {
    let mut rounds: Vec<(Vec<bool>, Vec<Pair>)> = vec![];
    for &(one, other) in pairs {
        let links: Vec<_> = links_between(topology, one, other).collect();
        let is_free = |busy: &[bool]| links.iter().all(|link| !busy[link.0]);
        let free = rounds.iter().position(|(busy, _)| is_free(busy));
        let round = free.unwrap_or_else(|| {
            rounds.push((vec![false; topology.vertices()], vec![]));
            rounds.len() - 1
        });
        let (busy, members) = &mut rounds[round];
        links.iter().for_each(|link| busy[link.0] = true);
        members.push((one, other));
    }
    rounds.into_iter().map(|(_, members)| members).collect()
}

/// Returns the vertices whose links the paths between two hosts use.
pub(super) fn links_between(
    topology: &Topology,
    one: HostId,
    other: HostId,
) -> impl Iterator<Item = VertexId> {
    let (one, other) = (topology.leaf(one), topology.leaf(other));
    let meet = topology.meet(one, other);
    let below = move |vertex: &VertexId| *vertex != meet;
    [one, other].into_iter().flat_map(move |end| topology.climb(end).take_while(below))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::survey::tests::racks;

    #[test]
    fn the_circle_of_eight_is_that_of_superbench() {
        let rounds: Vec<_> = circle(8).collect();
        assert_eq!(rounds[0], [(0, 7), (1, 6), (2, 5), (3, 4)]);
        assert_eq!(rounds[1], [(0, 1), (2, 7), (3, 6), (4, 5)]);
    }

    #[test]
    fn the_circle_has_each_pair_once_and_each_host_once_a_round() {
        for hosts in 0..20 {
            let mut pairs = vec![];
            for round in circle(hosts) {
                let mut members: Vec<_> = round.iter().flat_map(|(a, b)| [*a, *b]).collect();
                members.sort_unstable();
                members.dedup();
                assert_eq!(members.len(), round.len() * 2, "{hosts}: {round:?}");
                pairs.extend(round.into_iter().map(|(a, b)| (a.min(b), a.max(b))));
            }
            pairs.sort_unstable();
            let all = (0..hosts).flat_map(|a| (a + 1..hosts).map(move |b| (a, b)));
            assert!(pairs.into_iter().eq(all), "{hosts}");
        }
    }

    #[test]
    fn a_thousand_hosts_in_racks_of_32_need_17_856_pairs() {
        let topology = racks(&[32; 32]);
        assert_eq!(sampled_pairs(&topology, Some(4)).len(), 32 * 496 + 496 * 4);
        let topology = racks(&[2; 500]);
        assert_eq!(sampled_pairs(&topology, None).len(), 499_500);
    }

    #[test]
    fn samples_between_two_racks_differ_in_both_hosts_where_possible() {
        let topology = racks(&[3, 5]);
        let pairs = sampled_pairs(&topology, Some(20));
        let mut between: Vec<_> = pairs.into_iter().filter(|(a, b)| a.0 < 3 && b.0 >= 3).collect();
        assert_eq!(between.len(), 15);
        between.sort_unstable();
        between.dedup();
        assert_eq!(between.len(), 15);
    }

    #[test]
    fn contended_pairs_share_only_the_link_of_the_domain() {
        let topology = racks(&[3, 2, 2]);
        let rack = topology.vertex("r0").unwrap();
        let pairs = contended_pairs(&topology, rack, |_| true);
        assert_eq!(pairs, [(0, 3), (1, 5), (2, 4)].map(|(a, b)| (HostId(a), HostId(b))));
        let pairs = contended_pairs(&topology, rack, |host| host != HostId(3) && host.0 != 1);
        assert_eq!(pairs, [(0, 4), (2, 5)].map(|(a, b)| (HostId(a), HostId(b))));
    }

    #[test]
    fn pairs_of_one_round_share_no_link() {
        let topology = racks(&[4, 4, 4]);
        let pairs = sampled_pairs(&topology, None);
        let rounds = rounds(&topology, &pairs);
        assert_eq!(rounds.iter().map(Vec::len).sum::<usize>(), pairs.len());
        for round in rounds {
            let links = round.iter().flat_map(|(a, b)| links_between(&topology, *a, *b));
            let mut links: Vec<_> = links.collect();
            let all = links.len();
            links.sort_unstable();
            links.dedup();
            assert_eq!(links.len(), all, "{round:?}");
        }
    }
}
