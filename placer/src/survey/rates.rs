//! The rates of links that samples of paths and contended measurements show.

use std::collections::BTreeMap;

use super::directions::{directed, directed_links, down, up};
use super::rounds::Pair;
use super::sample::{Contended, Sample};
use super::totals::{Flow, Totals, agreed, limits};
use crate::network::{Passed, is_slower};
use crate::topology::{HostId, Topology, VertexId};

/// Returns the links, and whether they were loaded upwards, of contended measurements that show a
/// limit which no second one confirms.
///
/// If a pair begins late, the others find more room before, and the total is too great. If a host
/// has other work, it is too low. Such a link should therefore be measured again.
#[must_use]
pub fn unconfirmed(
    topology: &Topology,
    samples: &[Sample],
    contended: &[Contended],
) -> Vec<(VertexId, bool)> {
    let hosts = HostRates::new(topology, samples);
    let totals = hosts.totals(topology, contended).into_iter();
    let is_open = |totals: &Totals| !totals.is_confirmed() && totals.limit().is_some();
    totals.filter(|(_, totals)| is_open(totals)).map(|(link, _)| link).collect()
}

/// Returns the greatest rates that samples and contended measurements got through the directions of
/// links, of which two agree if there are several.
#[must_use]
pub fn passed(topology: &Topology, samples: &[Sample], contended: &[Contended]) -> Vec<Passed> {
    let hosts = HostRates::new(topology, samples);
    let mut rates = hosts.0.clone();
    for ((of, is_up), totals) in hosts.totals(topology, contended) {
        let rate = &mut rates[directed(of, is_up)];
        *rate = [*rate, totals.mbit()].into_iter().flatten().reduce(f64::max);
    }
    let passed = rates.into_iter().enumerate().filter_map(|(link, mbit)| {
        let of = topology.name(VertexId(link / 2)).into();
        Some(Passed { of, is_up: link.is_multiple_of(2), mbit: mbit? })
    });
    passed.collect()
}

/// Per direction of a link: the greatest rate in Mbit/s that samples over it agree on.
#[derive(Debug)]
pub struct HostRates(Vec<Option<f64>>);

impl HostRates {
    /// Finds the rates that samples show.
    #[must_use]
    pub fn new(topology: &Topology, samples: &[Sample]) -> Self {
        let mut all = vec![vec![]; 2 * topology.vertices()];
        for sample in samples {
            for link in directed_links(topology, sample.from, sample.to) {
                all[link].push(sample.mbit);
            }
        }
        Self(all.into_iter().map(confirmed).collect())
    }

    /// Returns the rate of a path in Mbit/s if its hosts are its only limits, or `None` if no
    /// sample shows one of them.
    #[must_use]
    pub fn path(&self, topology: &Topology, (from, to): Pair) -> Option<f64> {
        let leaf = |host: HostId| topology.leaf(host).0;
        Some(self.0[up(leaf(from))]?.min(self.0[down(leaf(to))]?))
    }

    /// Returns whether something passes a host's link in both directions, as far as samples show.
    #[must_use]
    pub fn passes(&self, topology: &Topology, host: HostId) -> bool {
        self.path(topology, (host, host)) != Some(0.0)
    }

    /// Returns the contended measurements of each link and direction, up if true. Leaves out pairs
    /// whose hosts no sample shows: they may be slow themselves.
    fn totals(
        &self,
        topology: &Topology,
        contended: &[Contended],
    ) -> BTreeMap<(VertexId, bool), Totals> {
        let mut links = BTreeMap::<_, Totals>::new();
        for Contended { of, is_up, pairs } in contended {
            let (mut flows, mut mbit) = (vec![], 0.0);
            for pair in pairs {
                let Some(alone) = self.path(topology, (pair.from, pair.to)) else { continue };
                let links = directed_links(topology, pair.from, pair.to);
                flows.push(Flow { links, mbit: alone.min(pair.tested_mbit) });
                mbit += pair.mbit;
            }
            if flows.len() > 1 {
                links.entry((*of, *is_up)).or_default().add(mbit, flows);
            }
        }
        links
    }
}

/// Per direction of a link: its rate in Mbit/s, if the samples show it.
pub(super) struct Rates(pub(super) Vec<Option<f64>>);

impl Rates {
    pub(super) fn new(topology: &Topology, samples: &[Sample], contended: &[Contended]) -> Self {
        let hosts = HostRates::new(topology, samples);
        let greatest = &hosts.0;
        // A link is no limit if the fastest path over it is as fast as its hosts.
        let mut is_limit = vec![true; greatest.len()];
        for sample in samples {
            let alone = hosts.path(topology, (sample.from, sample.to));
            if alone.is_none_or(|alone| is_slower(sample.mbit, alone)) {
                continue;
            }
            for link in directed_links(topology, sample.from, sample.to) {
                let is_fastest = !greatest[link].is_some_and(|most| is_slower(sample.mbit, most));
                is_limit[link] &= !is_fastest;
            }
        }
        let is_leaf = |link: usize| topology.subtree(VertexId(link / 2)).len() == 1;
        let shown = |link: usize| greatest[link].filter(|_| is_leaf(link) || is_limit[link]);
        let mut rates: Vec<_> = (0..greatest.len()).map(shown).collect();
        let totals = hosts.totals(topology, contended).into_iter();
        let totals: BTreeMap<_, _> =
            totals.map(|((of, is_up), it)| (directed(of, is_up), it)).collect();
        let single = (0..rates.len()).filter(|link| !is_leaf(*link) && !totals.contains_key(link));
        let single: BTreeMap<_, _> = single.filter_map(|link| Some((link, rates[link]?))).collect();
        let limits = limits(topology, &totals, single);
        for link in totals.into_keys() {
            rates[link] = match (rates[link], limits.get(&link).copied()) {
                (_, None) => None,
                // Single paths have shown the rate already, and more exactly.
                (Some(known), Some(total)) if !is_slower(known, total) => Some(known),
                (_, Some(total)) => Some(total),
            };
        }
        Self(rates)
    }

    /// Returns the rate of the slowest of some links.
    pub(super) fn of(&self, links: &[usize]) -> f64 {
        links.iter().filter_map(|link| self.0[*link]).fold(f64::INFINITY, f64::min)
    }
}

/// Returns the greatest rate that the next one confirms, or the greatest of all if none is.
fn confirmed(mut rates: Vec<f64>) -> Option<f64> {
    rates.sort_by(|one, other| other.total_cmp(one));
    agreed(&rates).or_else(|| rates.first().copied())
}
