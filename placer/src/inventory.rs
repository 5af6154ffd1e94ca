//! The hosts of a cluster: where they are, and what they have free.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

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
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The aggregator of the host, as HOST:PORT. By default, the address with the usual port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub aggregator: Option<String>,
    /// Labels. Those whose keys are levels place the host in the topology.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// The rate of the host's network interface in Mbit/s.
    pub nic_mbit: f64,
    /// CPU cores.
    #[serde(default, skip_serializing_if = "Amount::is_none")]
    pub cpus: Amount,
    /// GPUs by type.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub gpus: BTreeMap<String, Amount>,
    /// Taints. Only jobs that tolerate all of them may use the host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub taints: Vec<String>,
    /// The greatest number of aggregators on the host. Without it, CPU cores alone limit them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_aggregators: Option<u32>,
}

/// Where hosts are according to measurements.
///
/// In a file, this is the table `tree` of the network.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tree {
    /// The keys of the topology labels, widest first.
    pub levels: Vec<String>,
    /// The places of hosts by their names.
    pub hosts: BTreeMap<String, Place>,
}

/// The place of a host according to measurements.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// The values of all labels, widest first.
    pub labels: Vec<String>,
    /// The age of the measurement in seconds.
    #[serde(default)]
    pub age_s: f64,
}

impl Inventory {
    /// Returns the inventory with the hosts where measurements place them. The labels of all other
    /// hosts stay as they are.
    ///
    /// If the inventory has no levels, it gets those of the tree, and hosts that the tree lacks get
    /// the label [`UNMEASURED`] of each. A tree with other levels than the inventory changes
    /// nothing; [`Links::new`](crate::network::Links::new) then refuses it.
    #[must_use]
    pub fn placed_by(mut self, tree: &Tree) -> Self {
        let has_levels = !self.levels.is_empty();
        if has_levels && self.levels != tree.levels {
            return self;
        }
        self.levels.clone_from(&tree.levels);
        for host in &mut self.hosts {
            let labels = match tree.hosts.get(&host.name) {
                Some(place) => place.labels.clone(),
                None if has_levels => continue,
                None => vec![UNMEASURED.to_owned(); tree.levels.len()],
            };
            host.labels.extend(tree.levels.iter().cloned().zip(labels));
        }
        self
    }
}

/// The label of hosts without labels that no measurement places.
pub const UNMEASURED: &str = "unmeasured";
/// Rates of interfaces in Mbit/s. Sums of greater ones would be infinite, and transfers at lesser
/// ones would take for ever.
pub(crate) const MBIT: RangeInclusive<f64> = 1e-3..=1e9;

impl Host {
    /// Returns the address at which other hosts reach this one, with a port: `port` if it has none.
    #[must_use]
    pub fn address(&self, port: u16) -> String {
        let address = self.address.as_deref().unwrap_or(&self.name);
        match Self::has_port(address) {
            true => address.to_owned(),
            false => Self::with_port(address, port),
        }
    }

    /// Returns the name or IP address at which other hosts reach this one.
    fn name_or_ip(&self) -> &str {
        let address = self.address.as_deref().unwrap_or(&self.name);
        let address = match address.rsplit_once(':') {
            Some((host, _)) if Self::has_port(address) => host,
            _ => address,
        };
        address.trim_start_matches('[').trim_end_matches(']')
    }

    /// Returns the address of the host's aggregator: `aggregator`, or the host's address with
    /// `port` if it has none.
    #[must_use]
    pub fn aggregator(&self, port: u16) -> String {
        let own = self.aggregator.as_deref().filter(|own| Self::has_port(own));
        let host = self.aggregator.as_deref().unwrap_or_else(|| self.name_or_ip());
        own.map_or_else(|| Self::with_port(host, port), str::to_owned)
    }

    fn has_port(address: &str) -> bool {
        address.rsplit_once(':').is_some_and(|(host, port)| {
            let is_bare_v6 = host.contains(':') && !host.ends_with(']');
            port.parse::<u16>().is_ok() && !is_bare_v6
        })
    }

    fn with_port(host: &str, port: u16) -> String {
        match host.contains(':') && !host.starts_with('[') {
            true => format!("[{host}]:{port}"),
            false => format!("{host}:{port}"),
        }
    }

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
#[serde(from = "AmountText", into = "AmountText")]
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

    /// Returns whether the host has none of the resource.
    fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Marks units as used, as far as they are free.
    pub(crate) fn take(&mut self, units: u32) {
        self.used += units.min(self.free());
    }
}

#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a number, or a table of total and used")]
enum AmountText {
    Total(u32),
    Split(Split),
}

#[derive(Serialize, Deserialize)]
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

impl From<Amount> for AmountText {
    fn from(Amount { total, used }: Amount) -> Self {
        match used {
            0 => Self::Total(total),
            used => Self::Split(Split { total, used }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_inventory_has_only_what_is_known() {
        let text = "levels = []\n\n[[hosts]]\nname = \"h\"\nnic_mbit = 1.0\n";
        let inventory: Inventory = toml::from_str(text).unwrap();
        assert_eq!(toml::to_string(&inventory).unwrap(), text);
        let text = format!("{text}cpus = 8\n\n[hosts.gpus]\na100 = 4\n");
        let inventory: Inventory = toml::from_str(&text).unwrap();
        assert_eq!(toml::to_string(&inventory).unwrap(), text);
        let mut used = inventory;
        used.hosts[0].cpus.used = 2;
        assert_eq!(toml::from_str::<Inventory>(&toml::to_string(&used).unwrap()).unwrap(), used);
    }

    #[test]
    fn an_aggregator_is_at_its_own_address_or_at_that_of_its_host() {
        let host = |name: &str, more: &str| -> Host {
            toml::from_str(&format!("name = \"{name}\"\nnic_mbit = 1\n{more}")).unwrap()
        };
        let all = |host: &Host| (host.address(1), host.aggregator(2));
        for (name, more, expected) in [
            ("h", "", ("h:1", "h:2")),
            ("h", "address = \"10.0.0.1\"", ("10.0.0.1:1", "10.0.0.1:2")),
            ("h", "address = \"10.0.0.1:9\"", ("10.0.0.1:9", "10.0.0.1:2")),
            ("h", "address = \"fe80::1\"", ("[fe80::1]:1", "[fe80::1]:2")),
            ("h", "address = \"[fe80::1]:9\"", ("[fe80::1]:9", "[fe80::1]:2")),
            ("h", "aggregator = \"agg\"", ("h:1", "agg:2")),
            ("h", "aggregator = \"agg:8\"", ("h:1", "agg:8")),
        ] {
            let found = all(&host(name, more));
            assert_eq!((&*found.0, &*found.1), expected, "{name} {more}");
        }
    }
}
