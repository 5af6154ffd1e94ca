//! Measurements that are merged with older ones of the same links.

use std::collections::{BTreeMap, BTreeSet};

use super::{LinkRecord, Measurement, Network, is_slower};
use crate::inventory::Tree;
use crate::topology::{Topology, VertexId};

impl Network {
    /// Returns the network without records of hosts and domains that a topology lacks.
    #[must_use]
    pub fn only_of(mut self, topology: &Topology) -> Self {
        let vertices = (1..topology.vertices()).map(VertexId);
        let known: BTreeSet<_> = vertices.map(|vertex| topology.name(vertex)).collect();
        self.links.retain(|link| known.contains(link.of.as_str()));
        self.pairs
            .retain(|pair| [&pair.from, &pair.to].iter().all(|host| known.contains(host.as_str())));
        if let Some(tree) = &mut self.tree {
            tree.hosts.retain(|host, _| known.contains(host.as_str()));
        }
        self
    }

    /// Removes measurements and places of hosts that are too old to count: those of four half-lives
    /// and more have less than a sixteenth of their confidence. Returns the names of hosts whose
    /// places are forgotten.
    pub fn forget(&mut self) -> Vec<String> {
        let most_s = FORGOTTEN * self.half_life_s;
        let is_young = |measured: &Measurement| measured.age_s < most_s;
        self.pairs.retain(|pair| is_young(&pair.path));
        self.links.retain_mut(|link| {
            let had_rate = link.up.is_some() || link.down.is_some();
            link.up = link.up.filter(is_young);
            link.down = link.down.filter(is_young);
            // A round trip is as old as the rates beside it.
            !had_rate || link.up.is_some() || link.down.is_some()
        });
        let Some(tree) = &mut self.tree else { return vec![] };
        let before = members(tree);
        let old = tree.hosts.extract_if(.., |_, place| place.age_s >= most_s);
        let old: Vec<_> = old.map(|(host, _)| host).collect();
        if tree.hosts.is_empty() && !old.is_empty() {
            // Links without rates have no age, and may be of domains that only the tree had.
            let is_bare = |link: &LinkRecord| link.up.is_none() && link.down.is_none();
            self.links.retain(|link| !(is_bare(link) && before.contains_key(&link.of)));
            self.tree = None;
        }
        old
    }

    /// Returns these measurements merged with older ones, see [`Measurement::over`]. `topology` is
    /// that of these measurements, and `measured` holds the names of the senders and receivers of
    /// the paths that were measured, also of those that their links explain.
    ///
    /// An older record of a path stays until the path is measured again, and so does the place of a
    /// host. All older records go once they are too old, see [`Self::forget`], or once the topology
    /// lacks their hosts or domains.
    ///
    /// Both networks must have the ages of the same time, see [`Self::at`].
    #[must_use]
    pub fn over(
        mut self,
        mut older: Self,
        topology: &Topology,
        measured: &BTreeSet<(String, String)>,
    ) -> Self {
        older.forget();
        let mut older = older.only_of(topology);
        self.keep_places(older.tree.as_ref(), topology, measured);
        older.drop_changed_domains(self.tree.as_ref());
        older.drop_round_trips(topology, measured);
        let pairs = std::mem::take(&mut older.pairs).into_iter();
        self.pairs.extend(pairs.filter(|pair| {
            // A measured path without a record is as its links imply now.
            !measured.contains(&(pair.from.clone(), pair.to.clone()))
        }));
        self.over_links(older)
    }

    /// Returns the network without rates of links that are slower than what has passed these links
    /// since.
    ///
    /// A link that limits nothing gets no rate. An older, slower one would therefore stay.
    #[must_use]
    pub fn without_slower(mut self, passed: &[Passed]) -> Self {
        let passed = passed.iter().map(|it| ((it.of.as_str(), it.is_up), it.mbit));
        let passed: BTreeMap<_, _> = passed.collect();
        for link in &mut self.links {
            for (is_up, rate) in [(true, &mut link.up), (false, &mut link.down)] {
                let mbit = passed.get(&(link.of.as_str(), is_up)).copied();
                *rate = rate.filter(|old| mbit.is_none_or(|mbit| !is_slower(old.mbit, mbit)));
            }
        }
        self.links.retain(LinkRecord::has_values);
        self
    }

    /// Drops the round trips of links on measured paths. If such a link adds nothing now, it has no
    /// new record that would replace an older one.
    fn drop_round_trips(&mut self, topology: &Topology, measured: &BTreeSet<(String, String)>) {
        let hosts = topology.host_numbers();
        let host = |name: &String| hosts.get(name.as_str()).copied();
        let paths = measured.iter().filter_map(|(from, to)| host(from).zip(host(to)));
        let links = paths.flat_map(|(from, to)| topology.links_between(from, to));
        let names: BTreeSet<_> = links.map(|vertex| topology.name(vertex)).collect();
        for link in self.links.iter_mut().filter(|link| names.contains(link.of.as_str())) {
            (link.rtt_us, link.rtt_p99_us) = (None, None);
        }
        self.links.retain(LinkRecord::has_values);
    }

    /// Takes over the places of hosts in an older tree that were not measured now.
    fn keep_places(
        &mut self,
        older: Option<&Tree>,
        topology: &Topology,
        measured: &BTreeSet<(String, String)>,
    ) {
        let Some(older) = older.filter(|older| older.levels == topology.levels()) else { return };
        let measured: BTreeSet<_> = measured.iter().flat_map(|(from, to)| [from, to]).collect();
        let kept = older.hosts.iter().filter(|(host, _)| !measured.contains(host));
        for (host, place) in kept {
            let empty = || Tree { levels: older.levels.clone(), hosts: BTreeMap::new() };
            let tree = self.tree.get_or_insert_with(empty);
            tree.hosts.entry(host.clone()).or_insert_with(|| place.clone());
        }
    }

    /// Drops the links of domains that have other hosts in a newer tree: without labels, a domain's
    /// name is only its number.
    fn drop_changed_domains(&mut self, newer: Option<&Tree>) {
        let members = |tree: Option<&Tree>| tree.map(members).unwrap_or_default();
        let (before, after) = (members(self.tree.as_ref()), members(newer));
        self.links.retain(|link| before.get(&link.of) == after.get(&link.of));
    }

    /// Merges links with older ones.
    fn over_links(mut self, older: Self) -> Self {
        let numbers = self.links.iter().enumerate();
        let numbers: BTreeMap<_, _> =
            numbers.map(|(number, link)| (link.of.clone(), number)).collect();
        for old in older.links {
            match numbers.get(&old.of) {
                Some(number) => self.links[*number].merge(old, self.half_life_s),
                None => self.links.push(old),
            }
        }
        self
    }

    /// Returns what counters of jobs show, merged with older measurements. Jobs do not use all
    /// paths, so older paths stay, except those through which a job got more than the record says.
    /// The paths of `self` are such lower bounds, and are not kept themselves.
    ///
    /// Both networks must have the ages of the same time, see [`Self::at`].
    #[must_use]
    pub fn learned_over(mut self, older: Self) -> Self {
        let bounds = std::mem::take(&mut self.pairs);
        let mut pairs = older.pairs.clone();
        pairs.retain(|old| {
            let bounds =
                bounds.iter().filter(|path| (&path.from, &path.to) == (&old.from, &old.to));
            bounds.into_iter().all(|bound| bound.path.mbit <= old.path.mbit)
        });
        let (tree, half_life_s) = (older.tree.clone(), older.half_life_s);
        Self { pairs, tree, ..Self { half_life_s, ..self }.over_links(older) }
    }
}

/// The greatest rate that a measurement got through one direction of a link.
#[derive(Debug, Clone, PartialEq)]
pub struct Passed {
    /// The path of a domain, or the name of a host.
    pub of: String,
    /// Whether it is the direction from the vertex to its parent.
    pub is_up: bool,
    /// The rate in Mbit/s.
    pub mbit: f64,
}

impl LinkRecord {
    const fn has_values(&self) -> bool {
        self.up.is_some() || self.down.is_some() || self.rtt_us.is_some()
    }

    fn merge(&mut self, old: Self, half_life_s: f64) {
        let merged = |new: Option<Measurement>, old: Option<Measurement>| match (new, old) {
            (Some(new), Some(old)) => Some(new.over(old, half_life_s)),
            (new, old) => new.or(old),
        };
        self.up = merged(self.up, old.up);
        self.down = merged(self.down, old.down);
        self.rtt_us = self.rtt_us.or(old.rtt_us);
        self.rtt_p99_us = self.rtt_p99_us.or(old.rtt_p99_us);
    }
}

/// Returns the hosts of each domain of a tree by the domain's path.
fn members(tree: &Tree) -> BTreeMap<String, BTreeSet<String>> {
    let mut members: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    for (host, place) in &tree.hosts {
        for depth in 1..=place.labels.len() {
            members.entry(place.labels[..depth].join("/")).or_default().insert(host.clone());
        }
    }
    members
}

/// Half-lives after which a measurement is forgotten.
const FORGOTTEN: f64 = 4.0;

impl Measurement {
    /// Returns this measurement merged with an older one of the same link.
    ///
    /// A rate that was attained is possible: the result is never below this measurement's. An older
    /// rate above it counts the more, the less certain this measurement is, and fully if this one
    /// is a lower bound. With full confidence, a measurement that is no bound replaces the older
    /// one. The confidences add up like those of independent measurements.
    #[must_use]
    pub fn over(self, older: Self, half_life_s: f64) -> Self {
        let [new, old] = [self, older].map(|measured| measured.confidence_today(half_life_s));
        let old_weight = old * (1.0 - new);
        let weights = new + old_weight;
        let mean = |new_value: f64, old_value: f64| match weights > 0.0 {
            true => (new * new_value + old_weight * old_value) / weights,
            false => new_value,
        };
        let loss = mean(self.loss, older.loss);
        if self.is_least && older.mbit > self.mbit {
            return Self { loss, ..older };
        }
        let is_mixed = older.mbit > self.mbit && self.mbit > 0.0 && old_weight > 0.0;
        let mbit = match is_mixed {
            true => mean(self.mbit.ln(), older.mbit.ln()).exp(),
            false => self.mbit,
        };
        let faded = (-self.age_s / half_life_s).exp2();
        let confidence = if faded > 0.0 { (weights / faded).min(1.0) } else { 0.0 };
        Self { mbit, loss, confidence, is_least: self.is_least && older.is_least, ..self }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::PairRecord;
    use super::*;
    use crate::inventory::{Inventory, Place};

    const DAY: f64 = 86_400.0;

    /// Returns the topology of racks `r0`, `r1` and so on with hosts `r0h0`, `r0h1` and so on.
    fn racks(hosts: &[usize]) -> Topology {
        let hosts = (0..).zip(hosts).flat_map(|(rack, hosts)| {
            (0..*hosts).map(move |host| {
                let labels = format!("labels = {{ rack = 'r{rack}' }}");
                format!("[[hosts]]\nname = 'r{rack}h{host}'\nnic_mbit = 100\n{labels}\n")
            })
        });
        let text = format!("levels = ['rack']\n{}", hosts.collect::<String>());
        Topology::new(&toml::from_str::<Inventory>(&text).unwrap()).unwrap()
    }

    fn measured(mbit: f64, confidence: f64) -> Measurement {
        Measurement { mbit, loss: 0.0, age_s: 0.0, confidence, is_inferred: false, is_least: false }
    }

    fn least(mbit: f64) -> Measurement {
        Measurement { is_inferred: true, is_least: true, ..measured(mbit, 0.9) }
    }

    #[test]
    fn a_lower_bound_raises_a_rate_and_never_lowers_it() {
        let old = Measurement { age_s: DAY, ..measured(50.0, 1.0) };
        assert_eq!(least(40.0).over(old, DAY), old);
        let raised = least(80.0).over(old, DAY);
        assert_eq!((raised.mbit, raised.age_s, raised.is_least), (80.0, 0.0, false));
        assert!(raised.is_inferred);
        let both = least(80.0).over(least(60.0), DAY);
        assert_eq!((both.mbit, both.is_least), (80.0, true));
        assert_eq!(least(60.0).over(least(80.0), DAY).mbit, 80.0);
    }

    #[test]
    fn an_uncertain_rate_moves_an_older_one_the_more_the_older_that_is() {
        let rate = |age_s: f64| {
            measured(25.0, 0.5).over(Measurement { age_s, ..measured(100.0, 1.0) }, DAY).mbit
        };
        // Fresh, both count alike: the geometric mean.
        assert!((rate(0.0) - 50.0).abs() < 1e-9, "{}", rate(0.0));
        assert!(rate(DAY) < 41.0 && rate(100.0 * DAY) < 25.1);
    }

    #[test]
    fn a_path_goes_only_once_a_job_gets_more_through_it() {
        let pair = |to: &str, path: Measurement| PairRecord { path, ..pair("a", to, 0.0, 0.0) };
        let older = Network {
            half_life_s: 5.0,
            pairs: vec![pair("b", measured(30.0, 1.0)), pair("c", measured(30.0, 1.0))],
            ..Network::default()
        };
        let pairs = vec![pair("b", least(20.0)), pair("c", least(40.0)), pair("d", least(1.0))];
        let merged = Network { pairs, ..Network::default() }.learned_over(older.clone());
        assert_eq!((&merged.pairs[..], merged.half_life_s), (&older.pairs[..1], 5.0));
    }

    fn pair(from: &str, to: &str, mbit: f64, age_s: f64) -> PairRecord {
        PairRecord {
            from: from.into(),
            to: to.into(),
            path: Measurement { age_s, ..measured(mbit, 1.0) },
            rtt_us: None,
            rtt_p99_us: None,
        }
    }

    fn paths(names: &[(&str, &str)]) -> BTreeSet<(String, String)> {
        names.iter().map(|(from, to)| ((*from).to_owned(), (*to).to_owned())).collect()
    }

    #[test]
    fn paths_that_are_not_measured_again_keep_their_records_and_ages_until_these_are_too_old() {
        let older = Network {
            pairs: vec![
                pair("r0h0", "r0h1", 10.0, DAY),
                pair("r0h1", "r0h0", 11.0, DAY),
                pair("r0h0", "r1h0", 12.0, DAY),
                pair("r0h0", "r1h1", 13.0, 4.0 * DAY),
                pair("r0h0", "gone", 14.0, DAY),
            ],
            ..Network::default()
        };
        let new = Network { pairs: vec![pair("r0h0", "r0h1", 20.0, 0.0)], ..Network::default() };
        let measured = paths(&[("r0h0", "r0h1"), ("r0h1", "r0h0")]);
        let merged = new.over(older, &racks(&[2, 2]), &measured);
        // The second path is as its links imply now.
        let kept = [pair("r0h0", "r0h1", 20.0, 0.0), pair("r0h0", "r1h0", 12.0, DAY)];
        assert_eq!(merged.pairs, kept);
    }

    fn tree(places: &[(&str, &str, f64)]) -> Tree {
        let place = |labels: &str, age_s: f64| Place { labels: vec![labels.into()], age_s };
        let hosts = places.iter().map(|(host, at, age_s)| ((*host).into(), place(at, *age_s)));
        Tree { levels: vec!["rack".into()], hosts: hosts.collect() }
    }

    #[test]
    fn the_place_of_a_host_stays_until_it_is_measured_again_or_too_old() {
        let older = Network {
            tree: Some(tree(&[
                ("r0h0", "r1", DAY),
                ("r0h1", "r1", DAY),
                ("r0h2", "r1", 5.0 * DAY),
                ("gone", "r1", DAY),
            ])),
            ..Network::default()
        };
        let topology = racks(&[3, 2]);
        let measured = paths(&[("r0h0", "r1h0")]);
        let merged = Network::default().over(older.clone(), &topology, &measured);
        assert_eq!(merged.tree, Some(tree(&[("r0h1", "r1", DAY)])));
        let other_levels = Tree { levels: vec!["zone".into()], ..tree(&[("r0h1", "r1", DAY)]) };
        let older = Network { tree: Some(other_levels), ..Network::default() };
        assert_eq!(Network::default().over(older, &topology, &measured).tree, None);
    }

    #[test]
    fn a_domain_with_other_hosts_than_before_loses_its_older_link() {
        let link = |of: &str| LinkRecord {
            of: of.into(),
            up: Some(measured(50.0, 1.0)),
            down: None,
            rtt_us: None,
            rtt_p99_us: None,
        };
        let at =
            |r0h1: &str| tree(&[("r0h0", "r0", 0.0), ("r0h1", r0h1, 0.0), ("r1h0", "r1", 0.0)]);
        let older = Network {
            tree: Some(at("r0")),
            links: vec![link("r0"), link("r1h0")],
            ..<_>::default()
        };
        let (topology, measured) = (racks(&[2, 1]), paths(&[("r0h0", "r0h1"), ("r0h0", "r1h0")]));
        let kept = |r0h1: &str| {
            let new = Network { tree: Some(at(r0h1)), ..Network::default() };
            let links = new.over(older.clone(), &topology, &measured).links;
            links.into_iter().map(|link| link.of).collect::<Vec<_>>()
        };
        assert_eq!(kept("r0"), ["r0", "r1h0"]);
        assert_eq!(kept("r1"), ["r1h0"]);
    }

    #[test]
    fn an_uplink_that_is_no_longer_slow_loses_its_older_rate_and_round_trip() {
        let record = |of: &str, mbit: f64| LinkRecord {
            of: of.into(),
            up: Some(measured(mbit, 1.0)),
            down: Some(measured(mbit, 1.0)),
            rtt_us: Some(2000.0),
            rtt_p99_us: Some(3000.0),
        };
        let older = Network {
            links: vec![record("r0", 50.0), record("r1", 500.0), record("r2", 50.0)],
            ..Network::default()
        };
        // Nothing limits the uplinks now, so they have no new records.
        let passed = |of: &str, mbit: f64| Passed { of: of.into(), is_up: true, mbit };
        let older = older.without_slower(&[passed("r0", 200.0), passed("r1", 200.0)]);
        let paths = paths(&[("r0h0", "r1h0"), ("r1h0", "r0h0")]);
        let merged = Network::default().over(older, &racks(&[2, 2, 2]), &paths);
        let bare = |link: LinkRecord| LinkRecord { rtt_us: None, rtt_p99_us: None, ..link };
        assert_eq!(
            merged.links,
            [
                LinkRecord { up: None, ..bare(record("r0", 50.0)) },
                // It may still be as fast as it was.
                bare(record("r1", 500.0)),
                record("r2", 50.0),
            ]
        );
        let gone = Network { links: vec![bare(record("r0", 50.0))], ..Network::default() };
        let both = [true, false].map(|is_up| Passed { is_up, ..passed("r0", 200.0) });
        assert_eq!(gone.without_slower(&both).links, []);
    }

    #[test]
    fn a_tree_that_is_too_old_is_forgotten_with_the_links_of_its_domains() {
        let link = |of: &str, age_s: Option<f64>| LinkRecord {
            of: of.into(),
            up: age_s.map(|age_s| Measurement { age_s, ..measured(50.0, 1.0) }),
            down: None,
            rtt_us: Some(5.0),
            rtt_p99_us: None,
        };
        let mut network = Network {
            tree: Some(tree(&[("h0", "1", 0.0), ("h1", "2", 0.0)])),
            links: vec![
                link("1", Some(0.0)),
                link("2", None),
                link("h0", None),
                link("h1", Some(0.0)),
            ],
            measured_at: Some(1000),
            ..Network::default()
        };
        assert_eq!(network.clone().forget(), [""; 0]);
        network = network.at(1000 + 4 * 86_400);
        assert_eq!(network.forget(), ["h0", "h1"]);
        assert_eq!((network.tree, &network.links[..]), (None, &[link("h0", None)][..]));
    }

    proptest! {
        #[test]
        fn a_certain_measurement_replaces_and_no_merge_is_below_the_new_rate(
            new in 0.1..1e3, old in 0.0..1e3, confidence in 0.0..1.0, age_s in 0.0..1e6,
            is_least: bool, was_least: bool,
        ) {
            let old = Measurement { age_s, is_least: was_least, ..measured(old, 1.0) };
            prop_assert_eq!(measured(new, 1.0).over(old, DAY), measured(new, 1.0));
            let merged = Measurement { is_least, ..measured(new, confidence) }.over(old, DAY);
            prop_assert!(merged.mbit >= new * (1.0 - 1e-12));
            prop_assert!(merged.mbit <= new.max(old.mbit) * (1.0 + 1e-12));
            prop_assert!((0.0..=1.0).contains(&merged.confidence));
        }
    }
}
