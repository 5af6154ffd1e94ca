//! A job that asks for hosts.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::inventory::Host;

/// The needs of a job, and the bytes that it sends.
///
/// ```
/// let job: racksum_placer::job::Job = toml::from_str(
///     r#"
///     name = "vision"
///     ranks = 4
///     gpus_per_rank = 1
///     bytes = 100_000_000
///     scope = "zone"
///     "#,
/// )?;
/// assert_eq!(job.aggregators, 1.into());
/// # Ok::<(), toml::de::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// The job's name.
    pub name: String,
    /// The number of ranks.
    pub ranks: u32,
    /// GPUs that each rank uses.
    #[serde(default)]
    pub gpus_per_rank: u32,
    /// The only type of GPU that the job can use. Without it, any type serves, but all GPUs of a
    /// rank have one type.
    #[serde(default)]
    pub gpu_type: Option<String>,
    /// CPU cores that each rank uses.
    #[serde(default)]
    pub cpus_per_rank: u32,
    /// The bytes of a rank's tensors that are reduced in each step.
    pub bytes: u64,
    /// The share of blocks that are not zero at a rank.
    #[serde(default = "one")]
    pub own_density: f64,
    /// The share of blocks that are not zero in the sum. Never less than `own_density`.
    #[serde(default = "one")]
    pub union_density: f64,
    /// The number of aggregators, each of which sums an equal share of the windows. `auto`: the
    /// least number from 1 to 16 whose step is within 1 % of the shortest.
    #[serde(default = "one_aggregator")]
    pub aggregators: Setting<u32>,
    /// The shards of each aggregator. Without it, as many as its link keeps busy and its cores
    /// allow.
    #[serde(default)]
    pub shards: Option<u32>,
    /// Whether each rack in use, a domain of the innermost level, has an aggregator whose parent is
    /// the job's aggregator. `auto`: if that gives a shorter step.
    #[serde(default = "no_racks")]
    pub racks: Setting<bool>,
    /// The number of standbys, each a set of as many aggregators that the job moves to when earlier
    /// ones are gone.
    #[serde(default)]
    pub standbys: u32,
    /// The level of the topology, such as `rack`, of whose domains none may hold aggregators of two
    /// sets, or `host`. Without it, the innermost level.
    #[serde(default)]
    pub standby_level: Option<String>,
    /// CPU cores that each aggregator uses.
    #[serde(default)]
    pub cpus_per_aggregator: u32,
    /// Whether the network delivers multicast, so that results cross each link once.
    #[serde(default)]
    pub is_multicast: bool,
    /// The narrowest level of the topology, such as `zone`, to one of whose domains the job is
    /// confined if possible. Without it, the innermost level.
    #[serde(default)]
    pub scope: Option<String>,
    /// Whether the job must not leave one domain of its scope's level at all.
    #[serde(default)]
    pub requires_scope: bool,
    /// The share of the step time. A wider domain is chosen although a narrower one has room only
    /// if it saves more.
    #[serde(default = "default_widen_gain")]
    pub widen_gain: f64,
    /// Taints that the job tolerates.
    #[serde(default)]
    pub tolerates: Vec<String>,
    /// Hosts that ranks and aggregators may use. Empty: all.
    #[serde(default)]
    pub only: Vec<Selector>,
    /// Hosts that ranks and aggregators may not use.
    #[serde(default)]
    pub except: Vec<Selector>,
    /// The greatest number of ranks per host.
    #[serde(default)]
    pub max_ranks_per_host: Option<u32>,
    /// The greatest number of ranks per domain, by level.
    #[serde(default)]
    pub max_ranks_per_domain: BTreeMap<String, u32>,
    /// Whether aggregators need hosts without ranks.
    #[serde(default)]
    pub has_dedicated_aggregators: bool,
}

impl Job {
    /// Returns whether ranks can use this type of GPU.
    pub(crate) fn uses_gpu(&self, name: &str) -> bool {
        self.gpu_type.as_ref().is_none_or(|wanted| wanted == name)
    }
}

/// A value that the job gives or leaves to the planner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a value, or \"auto\"")]
pub enum Setting<T> {
    /// The job gives the value.
    Given(T),
    /// The planner chooses the value.
    Auto(Auto),
}

impl<T: Copy> Setting<T> {
    /// Returns the value that the job gives.
    #[must_use]
    pub const fn given(self) -> Option<T> {
        match self {
            Self::Given(value) => Some(value),
            Self::Auto(Auto::Auto) => None,
        }
    }
}

/// The word `auto` in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Auto {
    /// The planner chooses.
    Auto,
}

impl<T> From<T> for Setting<T> {
    fn from(value: T) -> Self {
        Self::Given(value)
    }
}

/// Labels and values that a host must have, all of them. The key `host` means the host's name.
pub type Selector = BTreeMap<String, String>;

/// Returns whether a host has all labels of a selector.
pub(crate) fn selects(selector: &Selector, host: &Host) -> bool {
    selector.iter().all(|(key, value)| match key.as_str() {
        "host" => host.name == *value,
        key => host.labels.get(key) == Some(value),
    })
}

/// The greatest number of aggregators of a job. The search takes time in its square.
pub(crate) const MOST_AGGREGATORS: u32 = 1024;

const fn one() -> f64 {
    1.0
}

const fn one_aggregator() -> Setting<u32> {
    Setting::Given(1)
}

const fn no_racks() -> Setting<bool> {
    Setting::Given(false)
}

const fn default_widen_gain() -> f64 {
    0.1
}
