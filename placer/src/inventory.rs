//! The hosts of a cluster: where they are, and what they have free.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The hosts of a cluster, as an operator or an import describes them.
///
/// ```
/// let inventory: racksum_placer::inventory::Inventory = toml::from_str(
///     r#"
///     levels = ["zone", "rack"]
///     [[hosts]]
///     name = "h1"
///     labels = { zone = "a", rack = "a1" }
///     nic_mbit = 10_000
///     cpus = 32
///     gpus = { h100 = { total = 8, used = 2 } }
///     "#,
/// )?;
/// assert_eq!(inventory.hosts[0].gpus["h100"].free(), 6);
/// # Ok::<(), toml::de::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Inventory {
    /// The keys of the topology labels, widest first. May be empty.
    #[serde(default)]
    pub levels: Vec<String>,
    /// The hosts, in any order.
    pub hosts: Vec<Host>,
}

/// A host and its resources.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// The host's name, unique in the inventory.
    pub name: String,
    /// The address at which other hosts reach this one, as HOST or HOST:PORT. By default, the name.
    #[serde(default)]
    pub address: Option<String>,
    /// Labels. Those whose keys are levels place the host in the topology.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// The rate of the host's network interface in Mbit/s.
    pub nic_mbit: f64,
    /// CPU cores.
    #[serde(default)]
    pub cpus: Amount,
    /// GPUs by type.
    #[serde(default)]
    pub gpus: BTreeMap<String, Amount>,
    /// Taints. Only jobs that tolerate all of them may use the host.
    #[serde(default)]
    pub taints: Vec<String>,
    /// The greatest number of aggregators on the host. Without it, CPU cores alone limit them.
    #[serde(default)]
    pub max_aggregators: Option<u32>,
}

/// Where hosts are according to measurements.
///
/// In a file, this is the table `tree` of the network.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tree {
    /// The keys of the topology labels, widest first.
    pub levels: Vec<String>,
    /// The names of hosts, each with the values of all labels, widest first.
    pub hosts: BTreeMap<String, Vec<String>>,
}

impl Inventory {
    /// Returns the inventory with the hosts where measurements place them. The labels of all other
    /// hosts stay as they are.
    ///
    /// A tree with other levels than the inventory counts only if the inventory has none.
    #[must_use]
    pub fn placed_by(mut self, tree: &Tree) -> Self {
        if self.levels.is_empty() {
            self.levels.clone_from(&tree.levels);
        }
        if self.levels != tree.levels {
            return self;
        }
        for host in &mut self.hosts {
            if let Some(values) = tree.hosts.get(&host.name) {
                host.labels.extend(tree.levels.iter().cloned().zip(values.iter().cloned()));
            }
        }
        self
    }
}

impl Host {
    /// Returns the host as if no job used it.
    pub(crate) fn freed(&self) -> Self {
        let mut freed = self.clone();
        freed.cpus.used = 0;
        freed.gpus.values_mut().for_each(|gpus| gpus.used = 0);
        freed
    }
}

/// The amount of a resource that a host has, and the part of it that other jobs use.
///
/// A file may give the total alone, as a number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "AmountText")]
pub struct Amount {
    /// The number of units that the host has.
    pub total: u32,
    /// The number of units that other jobs use.
    pub used: u32,
}

impl Amount {
    /// Returns the number of units that are free.
    #[must_use]
    pub const fn free(self) -> u32 {
        self.total.saturating_sub(self.used)
    }

    /// Marks units as used, as far as they are free.
    pub(crate) fn take(&mut self, units: u32) {
        self.used += units.min(self.free());
    }
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a number, or a table of total and used")]
enum AmountText {
    Total(u32),
    Split(Split),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Split {
    total: u32,
    #[serde(default)]
    used: u32,
}

impl From<AmountText> for Amount {
    fn from(text: AmountText) -> Self {
        match text {
            AmountText::Total(total) => Self { total, used: 0 },
            AmountText::Split(Split { total, used }) => Self { total, used },
        }
    }
}
