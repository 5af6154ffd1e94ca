//! Inventories from the files of other programs.
//!
//! [`slurm`] reads `topology.conf` and `topology.yaml`, [`topograph`] the JSON of Topograph, and
//! [`kubernetes`] a list of nodes. Each reader takes text and returns an [`Import`]: hosts, and
//! levels with the **widest first**. The formats differ in direction, and each reader says which
//! direction its format has.
//!
//! Only nodes of Kubernetes may have the rates of their network interfaces, in a label. Other rates
//! come from the caller as [`NicRate`]s, and an import without them is no inventory.

pub mod hostlist;
pub mod kubernetes;
mod rates;
pub mod slurm;
pub mod topograph;
mod tree;

use std::collections::{BTreeMap, BTreeSet};

pub use rates::{NicRate, NicRateError};

use crate::inventory::{Amount, Host, Inventory};
use crate::topology::{InventoryError, Topology};
use hostlist::HostlistError;

/// The hosts of a file, and where they are.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Import {
    /// The levels of the topology, widest first. Every host has a label for each of them.
    pub levels: Vec<String>,
    /// The hosts, in the order of the file. Empty for a flat network, whose file lists none.
    pub hosts: Vec<ImportedHost>,
    /// Facts about the file that its reader had to decide on.
    pub notes: Vec<Note>,
}

/// A host of a file. A resource that the format does not have is zero.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ImportedHost {
    /// The name of the host.
    pub name: String,
    /// The labels, including those of all levels.
    pub labels: BTreeMap<String, String>,
    /// The rate of the network interface in Mbit/s, if the file has it.
    pub nic_mbit: Option<f64>,
    /// CPU cores.
    pub cpus: u32,
    /// GPUs by type.
    pub gpus: BTreeMap<String, u32>,
    /// Taints.
    pub taints: Vec<String>,
}

/// A decision of a reader that the user should know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// The place in the file, if the note is about one.
    pub place: Option<Place>,
    /// The text, without a full stop.
    pub text: String,
}

impl std::fmt::Display for Note {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write_at(self.place.as_ref(), &self.text, f)
    }
}

impl Import {
    /// Checks that rates name hosts of the file. A flat network lists none, so any may be named.
    ///
    /// # Errors
    /// If a host that a rate names is not in the file.
    pub fn check_rates(&self, rates: &[NicRate]) -> Result<(), ImportError> {
        let known: BTreeSet<_> = self.hosts.iter().map(|host| &host.name).collect();
        let named = rates.iter().flat_map(|rate| rate.hosts.iter().flatten());
        let unknown = named.into_iter().find(|name| !known.contains(name) && !known.is_empty());
        unknown.map_or(Ok(()), |name| Err(ImportErrorKind::RateOf(name.clone()).nowhere()))
    }

    /// Returns the import with only these hosts, in this order.
    ///
    /// # Errors
    /// If a host is not in the file, or is named twice. A flat network has all hosts.
    pub fn only(self, names: &[String]) -> Result<Self, ImportError> {
        let mut hosts: BTreeMap<_, _> =
            self.hosts.into_iter().map(|host| (host.name.clone(), host)).collect();
        let is_flat = self.levels.is_empty() && hosts.is_empty();
        let mut seen = BTreeSet::new();
        if let Some(name) = names.iter().find(|name| !seen.insert(*name)) {
            return Err(ImportErrorKind::Twice(name.clone()).nowhere());
        }
        let only = names.iter().map(|name| match hosts.remove(name) {
            Some(host) => Ok(host),
            None if is_flat => Ok(ImportedHost { name: name.clone(), ..ImportedHost::default() }),
            None => Err(ImportErrorKind::Missing(name.clone()).nowhere()),
        });
        Ok(Self { hosts: only.collect::<Result<_, _>>()?, ..self })
    }

    /// Returns the inventory of the hosts, with these rates of their network interfaces. A rate in
    /// the file wins over that of all hosts, and a rate of named hosts over both.
    ///
    /// # Errors
    /// If a host has no rate, or the hosts are no tree.
    pub fn inventory(&self, rates: &[NicRate]) -> Result<Inventory, ImportError> {
        let rates = rates::by_host(rates);
        let host = |host: &ImportedHost| {
            let missing = || ImportErrorKind::Rate.of(&host.name);
            Ok(Host {
                aggregator: None,
                address: None,
                max_aggregators: None,
                name: host.name.clone(),
                labels: host.labels.clone(),
                nic_mbit: rates(&host.name, host.nic_mbit).ok_or_else(missing)?,
                cpus: Amount { total: host.cpus, used: 0 },
                gpus: host
                    .gpus
                    .iter()
                    .map(|(kind, &total)| (kind.clone(), Amount { total, used: 0 }))
                    .collect(),
                taints: host.taints.clone(),
            })
        };
        let hosts = self.hosts.iter().map(host).collect::<Result<_, ImportError>>()?;
        let inventory = Inventory { levels: self.levels.clone(), hosts };
        Topology::new(&inventory).map_err(|error| ImportErrorKind::Inventory(error).nowhere())?;
        Ok(inventory)
    }
}

/// The error for a file that is no inventory.
#[derive(Debug, Clone, PartialEq)]
pub struct ImportError {
    /// The place in the file, if the error is about one.
    pub place: Option<Place>,
    /// The reason.
    pub kind: ImportErrorKind,
}

impl std::fmt::Display for ImportError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write_at(self.place.as_ref(), &self.kind, f)
    }
}

impl std::error::Error for ImportError {}

/// The reason why a file is no inventory.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ImportErrorKind {
    /// The text is not of the format.
    #[error("{0}")]
    Syntax(String),
    /// A host list is malformed.
    #[error("{0}")]
    Hostlist(#[from] HostlistError),
    /// A name is used twice.
    #[error("{what} {name:?} is defined twice, first {first}; define it once")]
    Duplicate {
        /// The word for the thing: `switch`, `block`, `topology`, `host`.
        what: &'static str,
        /// The name.
        name: String,
        /// The first place.
        first: Place,
    },
    /// A switch lists a child that is not defined.
    #[error("switch {parent:?} lists the switch {child:?}, which the file does not define")]
    Unknown {
        /// The switch that lists the child.
        parent: String,
        /// The child.
        child: String,
    },
    /// A switch has two parents.
    #[error(
        "{child:?} is below {parent:?}, and below {other:?} {first}; racksum plans on trees, so \
         list it below one of them"
    )]
    TwoParents {
        /// The switch or host.
        child: String,
        /// The second parent.
        parent: String,
        /// The first parent.
        other: String,
        /// The place of the first parent.
        first: Place,
    },
    /// A switch has both switches and hosts below it.
    #[error(
        "switch {0:?} has both Switches and Nodes; put the nodes below a switch of their own, as \
         Slurm requires"
    )]
    Mixed(String),
    /// Switches are below each other.
    #[error(
        "the switches {0} form a cycle; each switch needs a way up to one that nothing is above"
    )]
    Cycle(String),
    /// The tree has too many levels.
    #[error("the tree has {0} levels, and racksum reads at most {MOST_LEVELS}")]
    Deep(usize),
    /// The sizes of blocks do not double.
    #[error(
        "block size {size} does not follow {previous}: each size is the previous one times 2, 4, \
         8 and so on"
    )]
    BlockSize {
        /// The size before.
        previous: u32,
        /// The size.
        size: u32,
    },
    /// The file has several topologies, and none was chosen.
    #[error("the file has several topologies; choose {}", .0.join(" or "))]
    Ambiguous(Vec<String>),
    /// The file has no topology of the name.
    #[error("the file has no topology {name:?}; it has {}", names.join(", "))]
    NoTopology {
        /// The name that was asked for.
        name: String,
        /// The names that there are.
        names: Vec<String>,
    },
    /// The topology has none of the kinds that are trees, or several.
    #[error("topology {0:?} must be exactly one of tree, block and flat; racksum reads no others")]
    Unsupported(String),
    /// The file lists nothing.
    #[error("the file lists no hosts")]
    Empty,
    /// Levels are listed with the narrowest first.
    #[error(
        "level {first:?} is listed before {second:?}, but {second:?} is wider: {example:?} \
         contains several values of {first:?}; list the widest level first, or leave the second out"
    )]
    Reversed {
        /// The level that is listed first.
        first: String,
        /// The level that is listed after it.
        second: String,
        /// A value of the second level.
        example: String,
    },
    /// An instance lists no switches.
    #[error("it has no network_layers; remove it, or let Topograph find its switches")]
    Layers,
    /// A host lacks a label that its name or level comes from.
    #[error("it has no label {0:?}; label it, or choose another label")]
    Unlabelled(String),
    /// The amount of a resource is not a number.
    #[error("{resource} is {amount:?}; racksum reads numbers, as in 64 or 63500m")]
    Amount {
        /// The resource.
        resource: String,
        /// The amount.
        amount: String,
    },
    /// The label with the rate of a node's network interface is not a rate.
    #[error(
        "the label {NIC_LABEL} is {0:?}; give a number of Mbit/s from 0.001 to 1e9",
        NIC_LABEL = kubernetes::NIC_LABEL
    )]
    NicLabel(String),
    /// A host is not in the file.
    #[error("the file does not list host {0:?}; every host needs a place in the topology")]
    Missing(String),
    /// A host or switch is listed twice in one place.
    #[error("{0:?} is listed twice; list it once")]
    Twice(String),
    /// A rate is for a host that is not in the file.
    #[error("the file does not list host {0:?}, for whose network interface a rate is given")]
    RateOf(String),
    /// A host has no rate.
    #[error("the rate of its network interface is not given; give one for all hosts")]
    Rate,
    /// The hosts are no inventory.
    #[error("{0}")]
    Inventory(InventoryError),
}

impl ImportErrorKind {
    fn at(self, line: usize) -> ImportError {
        ImportError { place: Some(Place::Line(line)), kind: self }
    }

    fn of(self, host: &str) -> ImportError {
        ImportError { place: Some(Place::Host(host.into())), kind: self }
    }

    const fn nowhere(self) -> ImportError {
        ImportError { place: None, kind: self }
    }
}

/// A place in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// In a line of the file, from 1.
    Line(usize),
    /// In the entry of a host.
    Host(String),
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Line(line) => write!(f, "in line {line}"),
            Self::Host(host) => write!(f, "for host {host:?}"),
        }
    }
}

fn write_at(
    place: Option<&Place>,
    text: impl std::fmt::Display,
    f: &mut std::fmt::Formatter<'_>,
) -> std::fmt::Result {
    match place {
        Some(Place::Line(line)) => write!(f, "line {line}: {text}"),
        Some(Place::Host(host)) => write!(f, "host {host:?}: {text}"),
        None => write!(f, "{text}"),
    }
}

/// Returns the message of a parser's error without the position at its end, which the error names
/// as a line.
fn without_position(error: impl std::fmt::Display) -> String {
    let text = error.to_string();
    text.rfind(" at line ").map_or_else(|| text.clone(), |end| text[..end].to_owned())
}

/// The greatest number of levels of a topology: that of Kueue.
pub const MOST_LEVELS: usize = 16;
