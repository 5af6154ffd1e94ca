//! The links that limit pairs of hosts which send at the same time.

use std::collections::{BTreeMap, BTreeSet};

use crate::network::is_slower;
use crate::topology::{Topology, VertexId};

/// The contended measurements of one direction of a link.
///
/// Only those that load the link most count: with fewer pairs, the hosts may be the limit.
#[derive(Debug, Default)]
pub(super) struct Totals {
    /// The total rates in Mbit/s, the greatest first.
    mbit: Vec<f64>,
    /// The pairs of the measurement that loads the link most.
    flows: Vec<Flow>,
}

/// One of the pairs that send at the same time.
#[derive(Debug, Clone)]
pub(super) struct Flow {
    /// The directions of links that the pair uses.
    pub(super) links: Vec<usize>,
    /// The rate in Mbit/s if the hosts are the only limits.
    pub(super) mbit: f64,
}

impl Totals {
    /// Adds a measurement of some pairs with this total rate.
    pub(super) fn add(&mut self, mbit: f64, flows: Vec<Flow>) {
        let (known, new) = (total(&self.flows), total(&flows));
        if is_slower(new, known) {
            return;
        }
        if is_slower(known, new) {
            self.mbit.clear();
        }
        if new > known {
            self.flows = flows;
        }
        let place = self.mbit.partition_point(|other| *other > mbit);
        self.mbit.insert(place, mbit);
    }

    /// Returns whether two totals agree.
    pub(super) fn is_confirmed(&self) -> bool {
        agreed(&self.mbit).is_some()
    }

    /// Returns the total rate. Without two totals that agree, the least one counts.
    pub(super) fn mbit(&self) -> Option<f64> {
        agreed(&self.mbit).or_else(|| self.mbit.last().copied())
    }

    /// Returns the total rate if hosts are not the only limits of the pairs.
    pub(super) fn limit(&self) -> Option<f64> {
        let mbit = self.mbit()?;
        is_slower(mbit, total(&self.flows)).then_some(mbit)
    }

    /// Returns whether all pairs use a link.
    fn all_use(&self, link: usize) -> bool {
        self.flows.iter().all(|flow| flow.links.contains(&link))
    }

    /// Returns whether a pair uses a link.
    fn any_uses(&self, link: usize) -> bool {
        self.flows.iter().any(|flow| flow.links.contains(&link))
    }

    /// Returns the total rate of the pairs if these links limit them too, by rate. The links are in
    /// the order of a path, and each divides its rate in proportion to what arrives.
    fn within(&self, limits: &[(usize, f64)]) -> f64 {
        let mut flows = self.flows.clone();
        for (link, mbit) in limits {
            let on_link = flows.iter_mut().filter(|flow| flow.links.contains(link));
            let on_link: Vec<_> = on_link.collect();
            let arrives: f64 = on_link.iter().map(|flow| flow.mbit).sum();
            if arrives > *mbit {
                on_link.into_iter().for_each(|flow| flow.mbit *= mbit / arrives);
            }
        }
        total(&flows)
    }
}

/// Returns the greatest rate that the next one confirms. The greatest rate is the first.
pub(super) fn agreed(rates: &[f64]) -> Option<f64> {
    let mut pairs = rates.windows(2);
    pairs.find(|pair| !is_slower(pair[1], pair[0])).map(|pair| pair[0])
}

fn total(flows: &[Flow]) -> f64 {
    flows.iter().map(|flow| flow.mbit).sum()
}

/// Returns the rates of the links that limit their pairs. `known` holds the rates of other links,
/// which single paths show.
///
/// A slow link also lowers the totals of other links whose pairs use it: those of racks, if the
/// uplink of their zone is slow, or if one of the racks that they send to is. The link whose pairs
/// get the least share of what their hosts can do is therefore the first one. It explains the
/// totals of others, unless all of its own pairs use the other link, which passed no more: then
/// either may be slow.
pub(super) fn limits(
    topology: &Topology,
    totals: &BTreeMap<usize, Totals>,
    known: BTreeMap<usize, f64>,
) -> BTreeMap<usize, f64> {
    let mut search = Search { topology, totals, known };
    let mut shares: BTreeMap<usize, f64> =
        totals.keys().filter_map(|link| Some((*link, search.share(*link)?))).collect();
    let mut found = BTreeMap::new();
    while let Some((&link, _)) = shares.iter().min_by(|one, other| one.1.total_cmp(other.1)) {
        shares.remove(&link);
        let Some(mbit) = search.rate(link) else { continue };
        found.insert(link, mbit);
        search.known.insert(link, mbit);
        shares.retain(|other, share| match totals[other].any_uses(link) {
            true => search.share(*other).inspect(|new| *share = *new).is_some(),
            false => true,
        });
    }
    found
}

/// The links whose rates are known so far.
struct Search<'a> {
    topology: &'a Topology,
    totals: &'a BTreeMap<usize, Totals>,
    known: BTreeMap<usize, f64>,
}

impl Search<'_> {
    /// Returns the other links that limit the pairs of a link, in the order of a path, with their
    /// rates.
    fn others(&self, link: usize) -> Vec<(usize, f64)> {
        let used = self.totals[&link].flows.iter().flat_map(|flow| &flow.links);
        let used: BTreeSet<_> = used.filter(|other| **other != link).collect();
        let passed = self.totals[&link].limit().unwrap_or(f64::INFINITY);
        let tells = |(other, mbit): &(usize, f64)| {
            let is_apart = self.totals.get(other).is_none_or(|it| !it.all_use(link));
            is_apart || is_slower(*mbit, passed)
        };
        let others = used.into_iter().filter_map(|other| Some((*other, *self.known.get(other)?)));
        let mut others: Vec<_> = others.filter(tells).collect();
        others.sort_by_key(|(other, _)| self.place(*other));
        others
    }

    /// Returns the share of a link's total in what its pairs get if only their hosts and other
    /// links limit them. `None` if these explain the total.
    fn share(&self, link: usize) -> Option<f64> {
        let totals = &self.totals[&link];
        let (mbit, expected) = (totals.limit()?, totals.within(&self.others(link)));
        is_slower(mbit, expected).then_some(mbit / expected)
    }

    /// Returns the rate of a link with which its pairs get their total, although others limit them
    /// too.
    fn rate(&self, link: usize) -> Option<f64> {
        let (totals, others) = (&self.totals[&link], self.others(link));
        let mbit = totals.limit()?;
        let at = others.partition_point(|(other, _)| self.place(*other) < self.place(link));
        let (before, after) = others.split_at(at);
        if after.is_empty() {
            return Some(mbit);
        }
        let (mut low, mut high) = (mbit, total(&totals.flows));
        for _ in 0..STEPS {
            let rate = f64::midpoint(low, high);
            let is_more = totals.within(&[before, &[(link, rate)], after].concat()) > mbit;
            *(if is_more { &mut high } else { &mut low }) = rate;
        }
        Some(low)
    }

    /// Returns the place of a link on the paths that use it: up from the narrowest domains, then
    /// down.
    fn place(&self, link: usize) -> i64 {
        let depth = i64::try_from(self.topology.depth(VertexId(link / 2))).unwrap_or(i64::MAX);
        if link.is_multiple_of(2) { -depth } else { depth }
    }
}

/// Steps of a bisection: more than the digits of a rate.
const STEPS: usize = 40;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::directions::{directed_links, down, up};
    use super::super::sample::{Contended, ContendedPair, Sample};
    use super::*;
    use crate::inventory::Inventory;
    use crate::network::Network;
    use crate::survey::tests::racks;
    use crate::survey::{contended_pairs, fit, sampled_pairs};
    use crate::topology::HostId;

    /// Returns zones of racks of hosts.
    fn zones([zones, racks_of_zone, hosts]: [usize; 3]) -> Topology {
        let mut all = racks(&vec![hosts; zones * racks_of_zone]).hosts().to_vec();
        for host in &mut all {
            let rack: usize = host.labels["rack"][1..].parse().unwrap();
            host.labels.insert("zone".into(), format!("z{}", rack / racks_of_zone));
        }
        let levels = ["zone", "rack"].map(str::to_owned).into();
        Topology::new(&Inventory { levels, hosts: all }).unwrap()
    }

    /// Returns the rates of pairs that send at the same time over links with these rates.
    fn sent(topology: &Topology, mbit: &[f64], pairs: &[(HostId, HostId)]) -> Vec<f64> {
        let flow = |&(from, to): &(HostId, HostId)| Flow {
            links: directed_links(topology, from, to),
            mbit: 100.0,
        };
        let mut flows: Vec<_> = pairs.iter().map(flow).collect();
        let mut links: Vec<_> = (2..mbit.len()).collect();
        let depth = |link: usize| i64::try_from(topology.depth(VertexId(link / 2))).unwrap();
        links.sort_by_key(|link| if link % 2 == 0 { -depth(*link) } else { depth(*link) });
        for link in links {
            let arrives: f64 =
                flows.iter().filter(|it| it.links.contains(&link)).map(|it| it.mbit).sum();
            for flow in flows.iter_mut().filter(|it| it.links.contains(&link)) {
                flow.mbit *= (mbit[link] / arrives).min(1.0);
            }
        }
        flows.into_iter().map(|flow| flow.mbit).collect()
    }

    /// Returns the network that a measurement of links with these rates implies.
    fn measured(topology: &Topology, mbit: &[f64]) -> Network {
        let pairs = sampled_pairs(topology, None, 1).into_iter();
        let samples = pairs.flat_map(|(one, other)| [(one, other), (other, one)]).map(|pair| {
            let (from, to) = pair;
            let mbit = sent(topology, mbit, &[pair])[0];
            Sample { from, to, mbit, loss: 0.0, rtt_us: 50.0, rtt_p99_us: 60.0 }
        });
        let contended = topology.inner_domains().flat_map(|of| [(of, true), (of, false)]);
        let contended = contended.map(|(of, is_up)| {
            let pairs = contended_pairs(topology, of, |_| true).into_iter();
            let pairs = pairs.map(|(one, other)| if is_up { (one, other) } else { (other, one) });
            let pairs: Vec<_> = pairs.collect();
            let rates = sent(topology, mbit, &pairs).into_iter();
            let pairs = pairs.into_iter().zip(rates).map(|((from, to), mbit)| ContendedPair {
                from,
                to,
                mbit,
                tested_mbit: 100.0,
            });
            Contended { of, is_up, pairs: pairs.collect() }
        });
        fit(topology, &samples.collect::<Vec<_>>(), &contended.collect::<Vec<_>>())
    }

    /// Returns rates of links that limit nothing.
    fn open(topology: &Topology) -> Vec<f64> {
        vec![1e6; 2 * topology.vertices()]
    }

    /// Returns the rates of the links of domains: the name, whether it is up, and the rate.
    fn domains(topology: &Topology, network: &Network) -> Vec<(String, bool, f64)> {
        let domains: BTreeSet<_> = topology.inner_domains().map(|it| topology.name(it)).collect();
        let links = network.links.iter().filter(|link| domains.contains(link.of.as_str()));
        let ways = links.flat_map(|link| [(link, true, link.up), (link, false, link.down)]);
        ways.filter_map(|(link, is_up, it)| Some((link.of.clone(), is_up, it?.mbit))).collect()
    }

    #[test]
    fn the_slow_link_of_a_rack_slows_no_other_rack_that_sends_to_it() {
        let topology = racks(&[4, 4, 4]);
        let mut mbit = open(&topology);
        // It passes a single path, and limits two.
        mbit[down(topology.vertex("r1").unwrap().0)] = 120.0;
        let found = domains(&topology, &measured(&topology, &mbit));
        let [(of, false, rate)] = &found[..] else { panic!("{found:?}") };
        assert!(of == "r1" && (rate - 120.0).abs() < 1e-6, "{found:?}");
    }

    #[test]
    fn the_slow_uplink_of_a_zone_slows_no_link_of_its_racks() {
        let topology = zones([3, 2, 4]);
        let mut mbit = open(&topology);
        mbit[up(topology.vertex("z0").unwrap().0)] = 150.0;
        let found = domains(&topology, &measured(&topology, &mbit));
        let [(of, true, rate)] = &found[..] else { panic!("{found:?}") };
        assert!(of == "z0" && (rate - 150.0).abs() < 1e-6, "{found:?}");
    }

    #[test]
    fn either_of_two_racks_may_be_slow_if_there_are_no_others() {
        let topology = racks(&[4, 4]);
        let mut mbit = open(&topology);
        mbit[up(topology.vertex("r0").unwrap().0)] = 150.0;
        let found = domains(&topology, &measured(&topology, &mbit));
        assert_eq!(found, [("r0".into(), true, 150.0), ("r1".into(), false, 150.0)]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]

        /// With enough other domains, no link gets a rate that is not its own.
        #[test]
        fn links_of_domains_have_their_rates_or_none(
            slow in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>(),
                60.0..1200.0_f64), 0..4),
            shape in prop_oneof![Just([4, 3, 4]), Just([4, 2, 4]), Just([4, 4, 2])],
        ) {
            let topology = zones(shape);
            let mut mbit = open(&topology);
            let all: Vec<_> = topology.inner_domains().collect();
            for (of, is_up, rate) in slow {
                let of = of.get(&all).0;
                mbit[if is_up { up(of) } else { down(of) }] = rate;
            }
            for (of, is_up, rate) in domains(&topology, &measured(&topology, &mbit)) {
                let vertex = topology.vertex(&of).unwrap().0;
                let truth = mbit[if is_up { up(vertex) } else { down(vertex) }];
                prop_assert!(rate >= 0.85 * truth.min(1200.0) && rate <= 1.01 * truth,
                    "{} {} {} {}", of, is_up, rate, truth);
            }
        }
    }
}
