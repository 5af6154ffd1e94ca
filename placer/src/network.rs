//! Measurements of the links, their ages, and the rates that they imply today.
//!
//! [`Network`] is the file that the probe writes. [`Links`] holds a rate and a delay for each link
//! of a topology, with the source of each. A planner reads only [`Links`].

mod check;
mod links;
mod merge;

use serde::{Deserialize, Serialize};

use crate::inventory::Tree;

pub use self::check::NetworkError;
pub(crate) use self::links::Peer;
pub use self::links::{Bottleneck, Links, Rate, Source, goodput_share};
pub use self::merge::Passed;

/// Measurements of a cluster's links.
///
/// The link of a vertex connects it to its parent: the link of a host is its network interface, and
/// the link of a rack is the rack's uplink.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// The time in which a measurement loses half of its confidence, in seconds.
    #[serde(default = "default_half_life")]
    pub half_life_s: f64,
    /// The time of the measurements in seconds since 1970. Their ages count from then. Without it,
    /// they count from now.
    #[serde(default)]
    pub measured_at: Option<u64>,
    /// Hosts that were measured elsewhere than their labels say, or that have no labels.
    #[serde(default)]
    pub tree: Option<Tree>,
    /// Links of domains and hosts.
    #[serde(default)]
    pub links: Vec<LinkRecord>,
    /// Paths between hosts that differ from what their links imply.
    #[serde(default)]
    pub pairs: Vec<PairRecord>,
}

impl Default for Network {
    fn default() -> Self {
        Self {
            half_life_s: default_half_life(),
            measured_at: None,
            tree: None,
            links: vec![],
            pairs: vec![],
        }
    }
}

impl Network {
    /// Returns the network with all ages as they are at a time in seconds since 1970. A time before
    /// that of the measurements counts as that time, since clocks may differ.
    #[must_use]
    pub fn at(mut self, now: u64) -> Self {
        let Some(measured_at) = self.measured_at.replace(now) else { return self };
        #[expect(clippy::cast_precision_loss, reason = "far fewer than 2^53 seconds")]
        let passed_s = now.saturating_sub(measured_at) as f64;
        self.measurements_mut().for_each(|measurement| measurement.age_s += passed_s);
        let places = self.tree.iter_mut().flat_map(|tree| tree.hosts.values_mut());
        places.for_each(|place| place.age_s += passed_s);
        self
    }

    /// Returns the age of the oldest measurement in seconds, if that is old enough to deserve a
    /// warning: less than a quarter of its confidence is left.
    #[must_use]
    pub fn stale_s(&self) -> Option<f64> {
        self.oldest_s().filter(|oldest_s| *oldest_s > STALE_HALF_LIVES * self.half_life_s)
    }

    /// Returns the age of the oldest measurement in seconds, if there is any.
    fn oldest_s(&self) -> Option<f64> {
        let links = self.links.iter().flat_map(|link| [link.up, link.down]).flatten();
        let paths = self.pairs.iter().map(|pair| pair.path);
        let ages = links.chain(paths).map(|measurement| measurement.age_s);
        let places = self.tree.iter().flat_map(|tree| tree.hosts.values());
        ages.chain(places.map(|place| place.age_s)).reduce(f64::max)
    }

    /// Returns the measured loss of a link upwards or downwards, or zero if there is none.
    pub(crate) fn loss_of(&self, of: &str, is_up: bool) -> f64 {
        let link = self.links.iter().find(|link| link.of == of);
        let measured = link.and_then(|link| if is_up { link.up } else { link.down });
        measured.map_or(0.0, |measured| measured.loss)
    }

    fn measurements_mut(&mut self) -> impl Iterator<Item = &mut Measurement> {
        let links = self.links.iter_mut().flat_map(|link| [&mut link.up, &mut link.down]);
        links.flatten().chain(self.pairs.iter_mut().map(|pair| &mut pair.path))
    }
}

/// Returns whether a rate is clearly lower than another one.
pub(crate) fn is_slower(mbit: f64, limit: f64) -> bool {
    mbit < limit * (1.0 - RATE_TOLERANCE)
}

/// Rates that differ by a smaller share count as the same.
pub(crate) const RATE_TOLERANCE: f64 = 0.1;

/// The age from which a measurement is stale, in half-lives.
const STALE_HALF_LIVES: f64 = 2.0;

/// The link between a vertex and its parent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkRecord {
    /// The path of a domain, such as `a/a1`, or the name of a host.
    pub of: String,
    /// From the vertex to its parent.
    pub up: Option<Measurement>,
    /// From the parent to the vertex.
    pub down: Option<Measurement>,
    /// The median round-trip time that this link adds to a path, in microseconds.
    pub rtt_us: Option<f64>,
    /// The 99th percentile of the round-trip times that this link adds to a path, in microseconds.
    /// Percentiles do not add up exactly, so it is an estimate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rtt_p99_us: Option<f64>,
}

/// A path from one host to another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PairRecord {
    /// The name of the sending host.
    pub from: String,
    /// The name of the receiving host.
    pub to: String,
    /// The throughput and loss of the path.
    pub path: Measurement,
    /// The median round-trip time in microseconds.
    pub rtt_us: Option<f64>,
    /// The 99th percentile of the round-trip times in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rtt_p99_us: Option<f64>,
}

/// The throughput and loss of one direction of a link or path.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measurement {
    /// Throughput at the receiver in Mbit/s. Zero means that nothing passes.
    pub mbit: f64,
    /// The share of datagrams that are lost, from 0 to 1.
    #[serde(default)]
    pub loss: f64,
    /// The age of the measurement in seconds.
    #[serde(default)]
    pub age_s: f64,
    /// The confidence at the time of the measurement, from 0 to 1.
    #[serde(default = "full_confidence")]
    pub confidence: f64,
    /// Whether the value was inferred from other measurements.
    #[serde(default)]
    pub is_inferred: bool,
    /// Whether `mbit` is only the least that passes, so that the rate may be greater.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_least: bool,
}

const fn default_half_life() -> f64 {
    24.0 * 3600.0
}

const fn full_confidence() -> f64 {
    1.0
}

impl Measurement {
    /// Returns the confidence today.
    #[must_use]
    pub fn confidence_today(&self, half_life_s: f64) -> f64 {
        self.confidence * (-self.age_s / half_life_s).exp2()
    }
}
