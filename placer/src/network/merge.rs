//! Measurements that are merged with older ones of the same links.

use std::collections::BTreeSet;

use super::{LinkRecord, Measurement, Network};
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
        self
    }

    /// Returns these measurements merged with older ones, see [`Measurement::over`]. Older paths
    /// are dropped: a path without a newer record may be as its links imply now.
    ///
    /// Both networks must have the ages of the same time, see [`Self::at`].
    #[must_use]
    pub fn over(mut self, older: Self) -> Self {
        for old in older.links {
            match self.links.iter_mut().find(|link| link.of == old.of) {
                Some(link) => link.merge(old, self.half_life_s),
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
        Self { pairs, tree, ..Self { half_life_s, ..self }.over(older) }
    }
}

impl LinkRecord {
    fn merge(&mut self, old: Self, half_life_s: f64) {
        let merged = |new: Option<Measurement>, old: Option<Measurement>| match (new, old) {
            (Some(new), Some(old)) => Some(new.over(old, half_life_s)),
            (new, old) => new.or(old),
        };
        self.up = merged(self.up, old.up);
        self.down = merged(self.down, old.down);
        self.rtt_us = self.rtt_us.or(old.rtt_us);
    }
}

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

    const DAY: f64 = 86_400.0;

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
        let pair = |to: &str, path: Measurement| PairRecord {
            from: "a".into(),
            to: to.into(),
            path,
            rtt_us: None,
        };
        let older = Network {
            half_life_s: 5.0,
            pairs: vec![pair("b", measured(30.0, 1.0)), pair("c", measured(30.0, 1.0))],
            ..Network::default()
        };
        let pairs = vec![pair("b", least(20.0)), pair("c", least(40.0)), pair("d", least(1.0))];
        let merged = Network { pairs, ..Network::default() }.learned_over(older.clone());
        assert_eq!((&merged.pairs[..], merged.half_life_s), (&older.pairs[..1], 5.0));
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
