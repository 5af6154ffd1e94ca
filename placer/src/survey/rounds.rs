//! The order in which pairs of hosts are measured.

use std::ops::Range;

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
    (0..rounds_of_circle(hosts)).map(move |round| round_of_circle(hosts, round))
}

const fn rounds_of_circle(hosts: usize) -> usize {
    hosts.next_multiple_of(2).saturating_sub(1)
}

fn round_of_circle(hosts: usize, round: usize) -> Vec<(usize, usize)> {
    let (places, moving) = (hosts.next_multiple_of(2), rounds_of_circle(hosts));
    let at = |place: usize| if place == 0 { 0 } else { (place - 1 + round) % moving + 1 };
    let pairs = (0..places / 2).map(|place| (at(place), at(places - 1 - place)));
    pairs.filter(|(one, other)| *one < hosts && *other < hosts).collect()
}

/// Returns the pairs of hosts to measure: all pairs within an innermost domain, and `samples` pairs
/// for each two innermost domains.
///
/// With `samples` of `None`, all pairs are returned.
///
/// A budget may end before the pairs do. The first pairs are therefore a sample of all: hosts and
/// rounds are in an order that `seed` shuffles, pairs within domains alternate with as many between
/// domains, and all domains have a pair before any two have a second one.
#[must_use]
pub fn sampled_pairs(topology: &Topology, samples: Option<usize>, seed: u64) -> Vec<Pair> {
    let Some(samples) = samples else {
        return shuffled_circle(shuffled(0..topology.hosts().len(), seed), seed)
            .flatten()
            .collect();
    };
    let domains = topology.domains(topology.levels().len());
    let domains: Vec<_> = domains.map(|domain| shuffled(topology.hosts_of(domain), seed)).collect();
    let mut circles: Vec<_> =
        domains.iter().map(|hosts| shuffled_circle(hosts.clone(), seed)).collect();
    let mut within = std::iter::from_fn(|| {
        let round: Vec<_> = circles.iter_mut().filter_map(Iterator::next).flatten().collect();
        Some(round).filter(|round| !round.is_empty())
    });
    let largest = domains.iter().map(Vec::len).max().unwrap_or(0);
    let samples = samples.min(largest.saturating_mul(largest));
    let rounds = shuffled(0..rounds_of_circle(domains.len()), seed);
    let turns = (0..samples).flat_map(|sample| rounds.iter().map(move |round| (sample, *round)));
    let mut between = turns.map(|(sample, round)| {
        let pairs = round_of_circle(domains.len(), round).into_iter();
        let pairs = pairs.map(|(one, other)| (&domains[one], &domains[other]));
        let pairs = pairs.filter(|(ones, others)| sample < ones.len() * others.len());
        // Different hosts each time, so that one bad host does not speak for its domain.
        let pair = |(ones, others): (&Vec<usize>, &Vec<usize>)| {
            let shift = sample / least_common_multiple(ones.len(), others.len());
            let turn = sample + round * samples;
            (HostId(ones[turn % ones.len()]), HostId(others[(turn + shift) % others.len()]))
        };
        pairs.map(pair).collect()
    });
    alternately([&mut within, &mut between])
}

/// Returns the rounds of pairs of some hosts, in an order that a seed shuffles.
fn shuffled_circle(hosts: Vec<usize>, seed: u64) -> impl Iterator<Item = Vec<Pair>> {
    // With the same seed, the rounds would have the order of the hosts.
    shuffled(0..rounds_of_circle(hosts.len()), !seed).into_iter().map(move |round| {
        let pairs = round_of_circle(hosts.len(), round).into_iter();
        pairs.map(|(one, other)| (HostId(hosts[one]), HostId(hosts[other]))).collect()
    })
}

/// Returns the pairs of two sources, always the next ones of that which is behind.
fn alternately(mut sources: [&mut dyn Iterator<Item = Vec<Pair>>; 2]) -> Vec<Pair> {
    let (mut pairs, mut taken) = (vec![], [0, 0]);
    loop {
        let behind = usize::from(taken[1] < taken[0]);
        let mut order = [behind, 1 - behind].into_iter();
        let next = order.find_map(|which| Some((which, sources[which].next()?)));
        let Some((which, round)) = next else { return pairs };
        taken[which] += round.len();
        pairs.extend(round);
    }
}

/// Returns numbers in an order that depends on a seed alone.
fn shuffled(numbers: Range<usize>, seed: u64) -> Vec<usize> {
    let mut numbers: Vec<_> = numbers.collect();
    numbers.sort_by_cached_key(|number| mixed(seed, *number as u64));
    numbers
}

/// Returns a number that looks random: two steps of `SplitMix64`.
const fn mixed(seed: u64, number: u64) -> u64 {
    step(step(seed) ^ number)
}

const fn step(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
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
    let usable =
        |hosts: Range<usize>| hosts.map(HostId).filter(|host| is_usable(*host)).collect::<Vec<_>>();
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

/// Groups pairs into rounds of at most `most` pairs, of which no two share a link.
///
/// Pairs that are measured at the same time must not slow each other down. Each pair goes into the
/// first round that has both of its paths free.
///
/// # Panics
/// If `most` is zero.
#[must_use]
pub fn rounds(topology: &Topology, pairs: &[Pair], most: usize) -> Vec<Vec<Pair>> {
    assert!(most > 0, "a round needs room for a pair");
    let mut rounds: Vec<Vec<Pair>> = vec![];
    let mut busy = vec![Numbers::default(); topology.vertices()];
    let mut full = Numbers::default();
    for &(one, other) in pairs {
        let links: Vec<_> = topology.links_between(one, other).collect();
        let taken: Vec<_> = links.iter().map(|link| &busy[link.0]).chain([&full]).collect();
        let round = Numbers::first_missing(&taken);
        links.iter().for_each(|link| busy[link.0].insert(round));
        if round == rounds.len() {
            rounds.push(vec![]);
        }
        rounds[round].push((one, other));
        if rounds[round].len() == most {
            full.insert(round);
        }
    }
    rounds
}

/// A set of small numbers. Thousands of hosts have millions of pairs and thousands of rounds, so
/// the search for a free round looks at 64 rounds at a time.
#[derive(Debug, Clone, Default)]
struct Numbers {
    words: Vec<u64>,
    /// The number of first words that are full.
    full: usize,
}

impl Numbers {
    fn insert(&mut self, number: usize) {
        if self.words.len() <= number / 64 {
            self.words.resize(number / 64 + 1, 0);
        }
        self.words[number / 64] |= 1 << (number % 64);
        while self.words.get(self.full) == Some(&u64::MAX) {
            self.full += 1;
        }
    }

    /// Returns the least number that none of some sets has.
    fn first_missing(sets: &[&Self]) -> usize {
        let mut word = sets.iter().map(|set| set.full).max().unwrap_or(0);
        loop {
            let taken = sets.iter().map(|set| set.words.get(word).copied().unwrap_or(0));
            let taken = taken.fold(0, |all, bits| all | bits);
            if taken != u64::MAX {
                return 64 * word + taken.trailing_ones() as usize;
            }
            word += 1;
        }
    }
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
        assert_eq!(sampled_pairs(&topology, Some(4), 1).len(), 32 * 496 + 496 * 4);
        let topology = racks(&[2; 500]);
        assert_eq!(sampled_pairs(&topology, None, 1).len(), 499_500);
    }

    #[test]
    fn samples_between_two_racks_differ_in_both_hosts_where_possible() {
        let topology = racks(&[3, 5]);
        let pairs = sampled_pairs(&topology, Some(20), 1);
        let mut between: Vec<_> =
            pairs.into_iter().filter(|(a, b)| (a.0 < 3) != (b.0 < 3)).collect();
        assert_eq!(between.len(), 15);
        between.sort_unstable();
        between.dedup();
        assert_eq!(between.len(), 15);
    }

    /// Returns how many pairs each host has that are between two domains, or within one.
    fn partners(topology: &Topology, pairs: &[Pair], is_between: bool) -> Vec<usize> {
        let mut partners = vec![0; topology.hosts().len()];
        let domain = |host: HostId| topology.domain_of(host);
        let counted = pairs.iter().filter(|(a, b)| (domain(*a) != domain(*b)) == is_between);
        counted.flat_map(|(a, b)| [a.0, b.0]).for_each(|host| partners[host] += 1);
        partners
    }

    #[test]
    fn all_hosts_of_a_rack_speak_for_it() {
        let topology = racks(&[8; 9]);
        let pairs = sampled_pairs(&topology, Some(4), 1);
        let partners = partners(&topology, &pairs, true);
        assert!(partners.iter().all(|partners| (3..=5).contains(partners)), "{partners:?}");
    }

    #[test]
    fn the_first_rounds_of_a_flat_cluster_are_a_sample_of_all_its_paths() {
        let topology = racks(&[1000]);
        for seed in 0..4 {
            let pairs = sampled_pairs(&topology, Some(4), seed);
            // Hosts with consecutive numbers are often in one rack.
            let mut partners = vec![[0; 4]; 1000];
            for (one, other) in &pairs[..50 * 500] {
                partners[one.0][other.0 / 250] += 1;
                partners[other.0][one.0 / 250] += 1;
            }
            for (host, partners) in partners.iter().enumerate() {
                assert_eq!(partners.iter().sum::<usize>(), 50);
                assert!(partners.iter().all(|part| *part > 0), "{seed}: {host}: {partners:?}");
            }
        }
    }

    #[test]
    fn the_first_rounds_of_racks_have_pairs_within_them_and_between_them() {
        for (domains, hosts) in [(10, 64), (100, 4)] {
            let topology = racks(&vec![hosts; domains]);
            let pairs = sampled_pairs(&topology, Some(4), 1);
            let rounds = rounds(&topology, &pairs, usize::MAX);
            let first: Vec<_> = rounds[..rounds.len() / 4].concat();
            let within = partners(&topology, &first, false);
            let between = partners(&topology, &first, true);
            assert!(within.iter().all(|partners| *partners >= 3), "{domains} {within:?}");
            assert!(between.iter().sum::<usize>() > domains * 8, "{domains} {between:?}");
        }
    }

    #[test]
    fn a_seed_decides_which_pairs_come_first() {
        let topology = racks(&[5, 3, 4]);
        for samples in [None, Some(1), Some(30)] {
            let pairs = |seed: u64| sampled_pairs(&topology, samples, seed);
            assert_eq!(pairs(1), pairs(1));
            assert_ne!(pairs(1), pairs(2));
        }
        let all = |samples: Option<usize>| {
            let pairs = sampled_pairs(&topology, samples, 3).into_iter();
            let mut all: Vec<_> = pairs.map(|(a, b)| (a.min(b), a.max(b))).collect();
            all.sort_unstable();
            all
        };
        assert_eq!(all(Some(30)), all(None));
        assert_eq!(all(None).len(), 66);
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

    /// Checks that rounds have all pairs once, that no link is in two pairs of a round, and that no
    /// round is longer than `most`.
    fn check_rounds(topology: &Topology, pairs: &[Pair], most: usize) -> usize {
        let rounds = rounds(topology, pairs, most);
        let mut planned: Vec<_> = rounds.iter().flatten().copied().collect();
        let mut wanted = pairs.to_vec();
        planned.sort_unstable();
        wanted.sort_unstable();
        assert!(planned == wanted, "the rounds have other pairs");
        for round in &rounds {
            assert!(round.len() <= most && !round.is_empty(), "{} pairs", round.len());
            let links = round.iter().flat_map(|(a, b)| topology.links_between(*a, *b));
            let mut links: Vec<_> = links.collect();
            let all = links.len();
            links.sort_unstable();
            links.dedup();
            assert_eq!(links.len(), all, "{round:?}");
        }
        rounds.len()
    }

    #[test]
    fn pairs_of_one_round_share_no_link() {
        let topology = racks(&[4, 4, 4]);
        let pairs = sampled_pairs(&topology, None, 1);
        check_rounds(&topology, &pairs, usize::MAX);
        // One pair at a time.
        assert_eq!(check_rounds(&topology, &pairs, 1), pairs.len());
    }

    #[test]
    fn two_thousand_hosts_are_measured_in_rounds_of_bounded_length() {
        let topology = racks(&[32; 63]);
        let pairs = sampled_pairs(&topology, Some(4), 1);
        assert_eq!(pairs.len(), 63 * 496 + 63 * 62 / 2 * 4);
        let rounds = check_rounds(&topology, &pairs, 256);
        // The uplink of each rack is in 62 * 4 pairs.
        assert!((248..=400).contains(&rounds), "{rounds}");
    }

    #[test]
    fn all_pairs_of_two_thousand_hosts_without_labels_are_the_rounds_of_the_circle() {
        let topology = racks(&[2000]);
        let pairs = sampled_pairs(&topology, Some(4), 1);
        assert_eq!(pairs.len(), 1_999_000);
        let rounds = rounds(&topology, &pairs, 1000);
        assert_eq!(rounds.len(), 1999);
        assert!(rounds.iter().all(|round| round.len() == 1000));
    }
}
