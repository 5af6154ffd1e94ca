//! Checks of a network file: values out of range, and names that the inventory lacks.

use super::{LinkRecord, Measurement, Network, PairRecord};
use crate::inventory::{MBIT, Tree};
use crate::topology::Topology;

/// The error for a network file that is wrong or that describes another cluster.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum NetworkError {
    /// A record names a host or domain that the inventory does not list.
    #[error("the network file names {0:?}, which is neither a host nor a domain of the inventory")]
    Unknown(String),
    /// A name is empty or has control characters, which a terminal would obey.
    #[error(
        "the network file has the name {0:?}; names must not be empty or contain control characters"
    )]
    Name(String),
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
    /// The tree has other levels than the inventory.
    #[error(
        "the tree of the network file has the levels {tree:?}, and the inventory {inventory:?}; \
         measure again with `racksum probe run`"
    )]
    Levels {
        /// The levels of the tree.
        tree: Vec<String>,
        /// The levels of the inventory.
        inventory: Vec<String>,
    },
    /// A host of the tree has more or fewer labels than the tree has levels.
    #[error("the tree of the network file gives {host:?} {labels} labels for {levels} levels")]
    Labels {
        /// The name of the host.
        host: String,
        /// The number of its labels.
        labels: usize,
        /// The number of levels.
        levels: usize,
    },
    /// A record of a path starts and ends at one host.
    #[error("the network file has a path from {0:?} to itself; remove it")]
    Loop(String),
}

impl Network {
    /// Checks all values, whatever hosts and domains exist.
    ///
    /// # Errors
    /// If a value is outside its range.
    pub fn check(&self) -> Result<(), NetworkError> {
        self.check_half_life()?;
        self.tree.iter().try_for_each(Tree::check)?;
        self.links.iter().try_for_each(LinkRecord::check)?;
        self.pairs.iter().try_for_each(PairRecord::check)
    }

    pub(super) fn check_half_life(&self) -> Result<(), NetworkError> {
        check("the network file", "half_life_s", self.half_life_s, &POSITIVE)
    }
}

impl Tree {
    fn check(&self) -> Result<(), NetworkError> {
        self.levels.iter().try_for_each(|level| check_name(level))?;
        self.hosts.iter().try_for_each(|(host, place)| {
            check_name(host)?;
            place.labels.iter().try_for_each(|label| check_name(label))?;
            check(host, "age_s", place.age_s, &NOT_NEGATIVE)?;
            let (labels, levels) = (place.labels.len(), self.levels.len());
            match labels == levels {
                true => Ok(()),
                false => Err(NetworkError::Labels { host: host.clone(), labels, levels }),
            }
        })
    }

    /// Checks that a topology has the hosts and the levels of this tree.
    pub(super) fn check_against(&self, topology: &Topology) -> Result<(), NetworkError> {
        self.check()?;
        if self.levels != topology.levels() {
            let (tree, inventory) = (self.levels.clone(), topology.levels().to_vec());
            return Err(NetworkError::Levels { tree, inventory });
        }
        let known = topology.host_numbers();
        let gone = self.hosts.keys().find(|host| !known.contains_key(host.as_str()));
        gone.map_or(Ok(()), |host| Err(NetworkError::Unknown(host.clone())))
    }
}

impl LinkRecord {
    pub(super) fn check(&self) -> Result<(), NetworkError> {
        check_name(&self.of)?;
        [self.up, self.down].iter().flatten().try_for_each(|measured| measured.check(&self.of))?;
        check_trips(&self.of, [self.rtt_us, self.rtt_p99_us])
    }
}

impl PairRecord {
    pub(super) fn check(&self) -> Result<(), NetworkError> {
        [&self.from, &self.to].into_iter().try_for_each(|name| check_name(name))?;
        let of = self.name();
        self.path.check(&of)?;
        check_trips(&of, [self.rtt_us, self.rtt_p99_us])
    }

    /// Returns the name of the path in messages.
    pub(super) fn name(&self) -> String {
        format!("{} -> {}", self.from, self.to)
    }
}

impl Measurement {
    fn check(&self, of: &str) -> Result<(), NetworkError> {
        check(of, "mbit", self.mbit, &RATE)?;
        check(of, "loss", self.loss, &SHARE)?;
        check(of, "age_s", self.age_s, &NOT_NEGATIVE)?;
        check(of, "confidence", self.confidence, &SHARE)
    }
}

fn check_name(name: &str) -> Result<(), NetworkError> {
    match name.is_empty() || name.contains(char::is_control) {
        true => Err(NetworkError::Name(name.into())),
        false => Ok(()),
    }
}

fn check_trips(of: &str, trips: [Option<f64>; 2]) -> Result<(), NetworkError> {
    let named = ["rtt_us", "rtt_p99_us"].into_iter().zip(trips);
    named
        .filter_map(|(field, trip)| Some((field, trip?)))
        .try_for_each(|(field, trip)| check(of, field, trip, &TIME_US))
}

/// A range of valid values, and how a message names it.
struct Valid {
    name: &'static str,
    holds: fn(f64) -> bool,
}

const POSITIVE: Valid = Valid { name: "a positive number", holds: |value| value > 0.0 };
const NOT_NEGATIVE: Valid =
    Valid { name: "zero or a positive number", holds: |value| value >= 0.0 };
/// Zero, or the rate of an interface. A greater one would make sums of rates infinite.
const RATE: Valid =
    Valid { name: "a number from 0 to 1e9", holds: |value| (0.0..=*MBIT.end()).contains(&value) };
const TIME_US: Valid =
    Valid { name: "a number from 0 to 1e12", holds: |value| (0.0..=1e12).contains(&value) };
const SHARE: Valid =
    Valid { name: "a number from 0 to 1", holds: |value| (0.0..=1.0).contains(&value) };

fn check(of: &str, field: &'static str, value: f64, valid: &Valid) -> Result<(), NetworkError> {
    if value.is_finite() && (valid.holds)(value) {
        return Ok(());
    }
    Err(NetworkError::Value { of: of.into(), field, value, range: valid.name })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::{Host, Inventory, Place};
    use crate::network::Links;

    fn flat() -> Inventory {
        let host = |name: &str| -> Host {
            toml::from_str(&format!("name = \"{name}\"\nnic_mbit = 100")).unwrap()
        };
        Inventory { levels: vec![], hosts: ["h0", "h1", "h2"].map(host).into() }
    }

    fn tree(levels: &[&str], hosts: &[(&str, &[&str])]) -> Tree {
        let texts = |texts: &[&str]| -> Vec<String> {
            texts.iter().map(|text| (*text).to_owned()).collect()
        };
        let place = |labels: &[&str]| Place { labels: texts(labels), age_s: 0.0 };
        let hosts = hosts.iter().map(|(host, labels)| ((*host).to_owned(), place(labels)));
        Tree { levels: texts(levels), hosts: hosts.collect() }
    }

    fn refusal(inventory: &Inventory, tree: Tree) -> Option<String> {
        let topology = Topology::new(&inventory.clone().placed_by(&tree)).unwrap();
        let network = Network { tree: Some(tree), ..Network::default() };
        Links::new(&topology, &network).err().map(|error| error.to_string())
    }

    #[test]
    fn a_tree_is_checked_against_the_inventory() {
        let known: [(&str, &[&str]); 2] = [("h0", &["1"]), ("h1", &["2"])];
        assert_eq!(refusal(&flat(), tree(&["tier1"], &known)), None);
        let gone: [(&str, &[&str]); 1] = [("h9", &["1"])];
        let why = refusal(&flat(), tree(&["tier1"], &gone)).unwrap();
        assert!(why.contains("names \"h9\", which is neither a host nor a domain"), "{why}");
        let short = Network { tree: Some(tree(&["tier1", "tier2"], &known)), ..<_>::default() };
        let why = short.check().unwrap_err().to_string();
        assert!(why.contains("gives \"h0\" 1 labels for 2 levels"), "{why}");
        let mut labelled = flat();
        labelled.levels = vec!["zone".into()];
        for host in &mut labelled.hosts {
            host.labels.insert("zone".into(), "a".into());
        }
        let why = refusal(&labelled, tree(&["tier1"], &known)).unwrap();
        assert!(why.contains("the levels [\"tier1\"], and the inventory [\"zone\"]"), "{why}");
        assert_eq!(refusal(&labelled, tree(&["zone"], &known)), None);
    }

    #[test]
    fn a_host_without_labels_that_the_tree_lacks_is_unmeasured() {
        let tree = tree(&["tier1"], &[("h0", &["1"]), ("h1", &["1"])]);
        let topology = Topology::new(&flat().placed_by(&tree)).unwrap();
        let domain = topology.domain_of(topology.host_named("h2").unwrap());
        assert_eq!(topology.name(domain), "unmeasured");
    }

    #[test]
    fn no_name_has_control_characters() {
        for name in ["", "\\u001b[31mred", "a\\nb"] {
            for text in [
                format!("[[links]]\nof = \"{name}\""),
                format!("[[pairs]]\nfrom = 'a'\nto = \"{name}\"\npath = {{ mbit = 1 }}"),
                format!("[tree]\nlevels = ['rack']\nhosts = {{ h = {{ labels = [\"{name}\"] }} }}"),
                format!("[tree]\nlevels = []\nhosts = {{ \"{name}\" = {{ labels = [] }} }}"),
            ] {
                let why = toml::from_str::<Network>(&text).unwrap().check().unwrap_err();
                assert!(matches!(why, NetworkError::Name(_)), "{text}: {why}");
            }
        }
    }

    #[test]
    fn no_record_has_a_value_that_is_not_finite_or_out_of_range() {
        let network = |text: &str| -> Network { toml::from_str(text).unwrap() };
        let up = |fields: &str| network(&format!("[[links]]\nof = \"h\"\nup = {{ {fields} }}"));
        assert_eq!(up("mbit = 1e9, loss = 1, age_s = 1e9").check(), Ok(()));
        for fields in ["mbit = inf", "mbit = nan", "mbit = 1.1e9", "mbit = -1"] {
            assert!(up(fields).check().is_err(), "{fields}");
        }
        for fields in ["loss = nan", "age_s = inf", "age_s = -1", "confidence = 1.1"] {
            assert!(up(&format!("mbit = 1, {fields}")).check().is_err(), "{fields}");
        }
        for field in ["rtt_us", "rtt_p99_us"] {
            for value in ["nan", "inf", "-1", "1e300"] {
                let of = format!("{field} = {value}");
                let link = format!("[[links]]\nof = \"h\"\n{of}");
                assert!(network(&link).check().is_err(), "{link}");
                let pair = format!("[[pairs]]\nfrom = 'a'\nto = 'b'\npath = {{ mbit = 1 }}\n{of}");
                assert!(network(&pair).check().is_err(), "{pair}");
            }
        }
        let tree = "levels = ['rack']\n[tree.hosts]\nh = { labels = ['a'], age_s = inf }";
        assert!(network(&format!("[tree]\n{tree}")).check().is_err());
        assert!(network("half_life_s = inf").check().is_err());
    }
}
