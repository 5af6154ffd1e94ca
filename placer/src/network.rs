//! Measurements of the links, their ages, and the rates that they imply today.
//!
//! [`Network`] is the file that the probe writes. [`Links`] holds a rate and a delay for each link
//! of a topology, with the source of each. A planner reads only [`Links`].

mod links;
mod merge;

use serde::{Deserialize, Serialize};

use crate::inventory::{MOST_MBIT, Tree};
pub(crate) use links::Peer;
pub use links::{Bottleneck, Links, Rate, Source, goodput_share};

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
        self
    }

    /// Checks all values, whatever hosts and domains exist.
    ///
    /// # Errors
    /// If a value is outside its range.
    pub fn check(&self) -> Result<(), NetworkError> {
        check("the network file", "half_life_s", self.half_life_s, &POSITIVE)?;
        self.links.iter().try_for_each(LinkRecord::check)?;
        self.pairs.iter().try_for_each(|pair| {
            let of = format!("{} -> {}", pair.from, pair.to);
            pair.path.check(&of)?;
            check_rtt(&of, pair.rtt_us)
        })
    }

    /// Returns the age of the oldest measurement in seconds, if there is any.
    #[must_use]
    pub fn oldest_s(&self) -> Option<f64> {
        let links = self.links.iter().flat_map(|link| [link.up, link.down]).flatten();
        let paths = self.pairs.iter().map(|pair| pair.path);
        links.chain(paths).map(|measurement| measurement.age_s).reduce(f64::max)
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

/// The error for a network file that is wrong or that describes another cluster.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum NetworkError {
    /// A record names a host or domain that the inventory does not list.
    #[error("the network file names {0:?}, which is neither a host nor a domain of the inventory")]
    Unknown(String),
    /// A value is not a number or outside its range.
    #[error("{of}: {field} is {value}; it must be {range}")]
    Value {
        /// The link or path.
        of: String,
        /// The name of the field.
        field: &'static str,
        /// The value given.
        value: f64,
        /// The range of valid values.
        range: &'static str,
    },
    /// A link or path has two records.
    #[error("the network file has two records of {0:?}; remove the older one")]
    Twice(String),
    /// A record of a path starts and ends at one host.
    #[error("the network file has a path from {0:?} to itself; remove it")]
    Loop(String),
}

impl LinkRecord {
    fn check(&self) -> Result<(), NetworkError> {
        [self.up, self.down].iter().flatten().try_for_each(|measured| measured.check(&self.of))?;
        check_rtt(&self.of, self.rtt_us)
    }
}

impl Measurement {
    fn check(&self, of: &str) -> Result<(), NetworkError> {
        check(of, "mbit", self.mbit, &RATE)?;
        check(of, "loss", self.loss, &SHARE)?;
        check(of, "age_s", self.age_s, &NOT_NEGATIVE)?;
        check(of, "confidence", self.confidence, &SHARE)
    }

    /// Returns the confidence today.
    #[must_use]
    pub fn confidence_today(&self, half_life_s: f64) -> f64 {
        self.confidence * (-self.age_s / half_life_s).exp2()
    }
}

fn check_rtt(of: &str, rtt_us: Option<f64>) -> Result<(), NetworkError> {
    rtt_us.map_or(Ok(()), |rtt_us| check(of, "rtt_us", rtt_us, &RTT))
}

/// A range of valid values, and how a message names it.
struct Valid {
    name: &'static str,
    holds: fn(f64) -> bool,
}

const POSITIVE: Valid = Valid { name: "a positive number", holds: |value| value > 0.0 };
const NOT_NEGATIVE: Valid =
    Valid { name: "zero or a positive number", holds: |value| value >= 0.0 };
/// Sums of such rates and round trips stay finite.
const RATE: Valid =
    Valid { name: "a number from 0 to 1e9", holds: |value| (0.0..=MOST_MBIT).contains(&value) };
const RTT: Valid =
    Valid { name: "a number from 0 to 1e9", holds: |value| (0.0..=1e9).contains(&value) };
const SHARE: Valid =
    Valid { name: "a number from 0 to 1", holds: |value| (0.0..=1.0).contains(&value) };

fn check(of: &str, field: &'static str, value: f64, valid: &Valid) -> Result<(), NetworkError> {
    if value.is_finite() && (valid.holds)(value) {
        return Ok(());
    }
    Err(NetworkError::Value { of: of.into(), field, value, range: valid.name })
}
