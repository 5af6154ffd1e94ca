//! The tree of domains: the cluster at the root, one level of domains per label, hosts at the
//! leaves.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::inventory::{Host, Inventory, MBIT};

/// The index of a vertex of the tree, in preorder: a vertex precedes its descendants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VertexId(pub(crate) usize);

/// The index of a host, in the order of the leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub(crate) usize);

/// The tree of the domains of an inventory.
///
/// Hosts are sorted by their labels and then by name, where numbers count as numbers: `h2` precedes
/// `h10`. The hosts of a domain therefore have consecutive numbers, and so do its vertices.
#[derive(Debug, Clone)]
pub struct Topology {
    levels: Vec<String>,
    vertices: Vec<Vertex>,
    /// The hosts in the order of the leaves.
    hosts: Vec<Host>,
    /// The leaf of each host.
    leaves: Vec<VertexId>,
}

/// A domain or a host.
#[derive(Debug, Clone)]
struct Vertex {
    parent: Option<VertexId>,
    /// The number of edges to the root.
    depth: usize,
    /// The labels from the root, separated by slashes; for a host, its name.
    name: String,
    /// One more than the last vertex of the subtree.
    end: usize,
    hosts: Range<usize>,
}

/// The error for an inventory that describes no tree.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum InventoryError {
    /// The inventory lists no host.
    #[error("the inventory has no hosts; list at least one")]
    Empty,
    /// Two hosts have one name.
    #[error("host {0:?} is listed twice; give each host a name of its own")]
    Duplicate(String),
    /// A host lacks the label of a level that other hosts have.
    #[error("host {host:?} has no label {level:?}; label the host or remove the level")]
    Unlabelled {
        /// The name of the host.
        host: String,
        /// The key of the label.
        level: String,
    },
    /// A name of a host or domain is empty or has control characters, or a domain's name has a
    /// slash, which separates domains in paths.
    #[error("host {host:?} has the name or label {name:?}; {rule}")]
    Name {
        /// The name of the host.
        host: String,
        /// The name that is wrong.
        name: String,
        /// The rule that it breaks.
        rule: &'static str,
    },
    /// A host has the name of a domain.
    #[error("{0:?} is the name of a host and of a domain; rename one of them")]
    Ambiguous(String),
    /// A level has the name by which constraints mean hosts.
    #[error("a level is called \"host\", which in constraints means a host; rename the level")]
    HostLevel,
    /// A level is listed twice.
    #[error("level {0:?} is listed twice; list each level once")]
    DuplicateLevel(String),
    /// The rate of a network interface is no rate that an interface has.
    #[error("host {host:?}: nic_mbit is {rate}; it must be a number from 0.001 to 1e9")]
    Rate {
        /// The name of the host.
        host: String,
        /// The rate given.
        rate: f64,
    },
    /// Other jobs use more of a resource than the host has.
    #[error("host {host:?}: {resource}: used is {used}, but total is {total}; correct one of them")]
    Overused {
        /// The name of the host.
        host: String,
        /// `cpus`, or `gpus` with the type.
        resource: String,
        /// Units that the host has.
        total: u32,
        /// Units that other jobs use.
        used: u32,
    },
}

impl Topology {
    /// Builds the tree of an inventory.
    ///
    /// # Errors
    /// If the inventory is inconsistent; the error names the host.
    pub fn new(inventory: &Inventory) -> Result<Self, InventoryError> {
        check_levels(&inventory.levels)?;
        let mut hosts = Vec::with_capacity(inventory.hosts.len());
        for host in &inventory.hosts {
            check_host(host)?;
            hosts.push((path_of(host, &inventory.levels)?, host.clone()));
        }
        if hosts.is_empty() {
            return Err(InventoryError::Empty);
        }
        hosts.sort_by_cached_key(|(path, host)| {
            let path: Vec<_> = path.iter().map(|label| natural_key(label)).collect();
            (path, natural_key(&host.name))
        });
        check_names(&hosts)?;
        let topology = Self::of_sorted(inventory.levels.clone(), hosts);
        topology.check_domains()?;
        Ok(topology)
    }

    fn check_domains(&self) -> Result<(), InventoryError> {
        let leaves: BTreeSet<_> = self.leaves.iter().collect();
        let vertices = (1..self.vertices.len()).map(VertexId);
        let domains = vertices.filter(|vertex| !leaves.contains(vertex));
        let domains: BTreeSet<_> = domains.map(|domain| self.name(domain)).collect();
        let host = self.hosts.iter().find(|host| domains.contains(host.name.as_str()));
        host.map_or(Ok(()), |host| Err(InventoryError::Ambiguous(host.name.clone())))
    }

    fn of_sorted(levels: Vec<String>, hosts: Vec<(Vec<String>, Host)>) -> Self {
        let root = Vertex { parent: None, depth: 0, name: String::new(), end: 0, hosts: 0..0 };
        let mut tree = Self { levels, vertices: vec![root], hosts: vec![], leaves: vec![] };
        // The domains that contain the previous host, widest first.
        let mut open: Vec<(String, VertexId)> = vec![];
        for (path, host) in hosts {
            let shared = open.iter().zip(&path).take_while(|((name, _), label)| name == *label);
            let shared = shared.count();
            while open.len() > shared {
                open.pop();
            }
            for label in path.into_iter().skip(shared) {
                let parent = open.last().map_or(Self::ROOT, |&(_, vertex)| vertex);
                let name = match tree.name(parent) {
                    "" => label.clone(),
                    prefix => format!("{prefix}/{label}"),
                };
                open.push((label, tree.push(parent, name)));
            }
            let parent = open.last().map_or(Self::ROOT, |&(_, vertex)| vertex);
            let leaf = tree.push(parent, host.name.clone());
            tree.leaves.push(leaf);
            tree.hosts.push(host);
        }
        tree.close();
        tree
    }

    fn push(&mut self, parent: VertexId, name: String) -> VertexId {
        let id = VertexId(self.vertices.len());
        let depth = self.vertices[parent.0].depth + 1;
        let first = self.hosts.len();
        self.vertices.push(Vertex {
            parent: Some(parent),
            depth,
            name,
            end: 0,
            hosts: first..first,
        });
        id
    }

    /// Sets the ends of all subtrees, once all hosts are there.
    fn close(&mut self) {
        for (index, leaf) in self.leaves.iter().enumerate() {
            self.vertices[leaf.0].hosts = index..index + 1;
        }
        for index in (0..self.vertices.len()).rev() {
            let vertex = &mut self.vertices[index];
            vertex.end = vertex.end.max(index + 1);
            let (end, last) = (vertex.end, vertex.hosts.end);
            if let Some(parent) = vertex.parent {
                let parent = &mut self.vertices[parent.0];
                parent.end = parent.end.max(end);
                parent.hosts.end = parent.hosts.end.max(last);
            }
        }
    }

    /// The root: the whole cluster.
    pub const ROOT: VertexId = VertexId(0);

    /// Returns the keys of the levels, widest first.
    #[must_use]
    pub fn levels(&self) -> &[String] {
        &self.levels
    }

    /// Returns the number of vertices.
    #[must_use]
    pub fn vertices(&self) -> usize {
        self.vertices.len()
    }

    /// Returns the hosts in the order of the leaves.
    #[must_use]
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// Returns the numbers of the hosts.
    pub fn host_ids(&self) -> impl Iterator<Item = HostId> + use<> {
        (0..self.hosts.len()).map(HostId)
    }

    /// Returns a host.
    #[must_use]
    pub fn host(&self, host: HostId) -> &Host {
        &self.hosts[host.0]
    }

    /// Returns the number of the host with a name.
    #[must_use]
    pub fn host_named(&self, name: &str) -> Option<HostId> {
        self.hosts.iter().position(|host| host.name == name).map(HostId)
    }

    /// Returns the numbers of all hosts by their names.
    #[must_use]
    pub fn host_numbers(&self) -> BTreeMap<&str, HostId> {
        self.hosts.iter().map(|host| host.name.as_str()).zip(self.host_ids()).collect()
    }

    pub(crate) fn host_mut(&mut self, host: HostId) -> &mut Host {
        &mut self.hosts[host.0]
    }

    /// Returns the innermost domain of a host.
    #[must_use]
    pub fn domain_of(&self, host: HostId) -> VertexId {
        self.parent(self.leaf(host)).unwrap_or(Self::ROOT)
    }

    /// Returns the domain of a host at a depth, or its leaf if the depth is below all levels.
    #[must_use]
    pub fn domain_at(&self, host: HostId, depth: usize) -> VertexId {
        let mut ancestors = self.climb(self.leaf(host));
        ancestors.find(|vertex| self.depth(*vertex) <= depth).unwrap_or(Self::ROOT)
    }

    /// Returns the parent of a vertex, or `None` for the root.
    #[must_use]
    pub fn parent(&self, vertex: VertexId) -> Option<VertexId> {
        self.vertices[vertex.0].parent
    }

    /// Returns the depth of the domains of a level: 1 for the widest level.
    #[must_use]
    pub fn depth_of(&self, level: &str) -> Option<usize> {
        self.levels.iter().position(|known| known == level).map(|index| index + 1)
    }

    /// Returns the domains at a depth: the root at depth 0.
    pub(crate) fn domains(&self, depth: usize) -> impl Iterator<Item = VertexId> {
        let vertices = (0..self.vertices.len()).map(VertexId);
        vertices.filter(move |vertex| self.depth(*vertex) == depth)
    }

    /// Returns the domains that have a link to a parent, widest first.
    pub fn inner_domains(&self) -> impl Iterator<Item = VertexId> {
        (1..=self.levels.len()).flat_map(|depth| self.domains(depth))
    }

    /// Returns the number of edges between a vertex and the root.
    #[must_use]
    pub fn depth(&self, vertex: VertexId) -> usize {
        self.vertices[vertex.0].depth
    }

    /// Returns the path of a domain, such as `a/a1`, the name of a host, or an empty name for the
    /// root.
    #[must_use]
    pub fn name(&self, vertex: VertexId) -> &str {
        &self.vertices[vertex.0].name
    }

    /// Returns the hosts in the subtree of a vertex.
    #[must_use]
    pub fn hosts_of(&self, vertex: VertexId) -> Range<usize> {
        self.vertices[vertex.0].hosts.clone()
    }

    /// Returns the vertices of a subtree, in preorder.
    #[must_use]
    pub fn subtree(&self, vertex: VertexId) -> Range<usize> {
        vertex.0..self.vertices[vertex.0].end
    }

    /// Returns the children of a vertex.
    pub(crate) fn children(&self, vertex: VertexId) -> impl Iterator<Item = VertexId> {
        let end = self.vertices[vertex.0].end;
        let within = move |child: VertexId| (child.0 < end).then_some(child);
        let next = move |child: &VertexId| within(VertexId(self.vertices[child.0].end));
        std::iter::successors(within(VertexId(vertex.0 + 1)), next)
    }

    /// Returns the leaf of a host.
    #[must_use]
    pub fn leaf(&self, host: HostId) -> VertexId {
        self.leaves[host.0]
    }

    /// Returns the vertex with this name: a domain's path or a host's name.
    #[cfg(test)]
    pub(crate) fn vertex(&self, name: &str) -> Option<VertexId> {
        (1..self.vertices.len()).map(VertexId).find(|vertex| self.name(*vertex) == name)
    }

    /// Returns a vertex and its ancestors without the root, from the vertex upwards. These are the
    /// vertices whose links a path from the vertex to the root uses.
    pub(crate) fn climb(&self, from: VertexId) -> impl Iterator<Item = VertexId> {
        let next = |vertex: &VertexId| self.parent(*vertex);
        std::iter::successors(Some(from), next).filter(|vertex| *vertex != Self::ROOT)
    }

    /// Returns the vertices whose links the paths between two hosts use.
    pub(crate) fn links_between(
        &self,
        one: HostId,
        other: HostId,
    ) -> impl Iterator<Item = VertexId> {
        let (one, other) = (self.leaf(one), self.leaf(other));
        let meet = self.meet(one, other);
        let below = move |vertex: &VertexId| *vertex != meet;
        [one, other].into_iter().flat_map(move |end| self.climb(end).take_while(below))
    }

    /// Returns the closest common ancestor of two vertices.
    pub(crate) fn meet(&self, one: VertexId, other: VertexId) -> VertexId {
        let (mut one, mut other) = (one, other);
        while one != other {
            // Preorder: the vertex with the greater index is not an ancestor of the other.
            let deeper = if one > other { &mut one } else { &mut other };
            *deeper = self.parent(*deeper).unwrap_or(Self::ROOT);
        }
        one
    }
}

/// Splits a name into text and numbers, so that `h2` sorts before `h10`.
fn natural_key(name: &str) -> Vec<(String, u64, String)> {
    let mut parts = vec![];
    let mut rest = name;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let (text, tail) = rest.split_at(digits);
        let end = tail.find(|c: char| !c.is_ascii_digit()).unwrap_or(tail.len());
        let (number, tail) = tail.split_at(end);
        // A number too large for 64 bits keeps its place by its text.
        parts.push((text.into(), number.parse().unwrap_or(u64::MAX), number.into()));
        rest = tail;
    }
    parts
}

/// The name by which constraints mean hosts, where others are names of levels.
const HOST: &str = "host";

fn check_levels(levels: &[String]) -> Result<(), InventoryError> {
    let twice = levels.iter().enumerate().find(|(index, level)| levels[..*index].contains(level));
    match twice {
        Some((_, level)) => Err(InventoryError::DuplicateLevel(level.clone())),
        None if levels.iter().any(|level| level == HOST) => Err(InventoryError::HostLevel),
        None => Ok(()),
    }
}

fn check_host(host: &Host) -> Result<(), InventoryError> {
    check_name(host, &host.name)?;
    if !MBIT.contains(&host.nic_mbit) {
        return Err(InventoryError::Rate { host: host.name.clone(), rate: host.nic_mbit });
    }
    let cpus = std::iter::once(("cpus".to_owned(), host.cpus));
    let gpus = host.gpus.iter().map(|(kind, amount)| (format!("gpus.{kind}"), *amount));
    for (resource, amount) in cpus.chain(gpus) {
        if amount.used > amount.total {
            return Err(InventoryError::Overused {
                host: host.name.clone(),
                resource,
                total: amount.total,
                used: amount.used,
            });
        }
    }
    Ok(())
}

fn check_name(host: &Host, name: &str) -> Result<(), InventoryError> {
    if !name.is_empty() && !name.contains(char::is_control) {
        return Ok(());
    }
    let rule = "names must not be empty or contain control characters";
    Err(InventoryError::Name { host: host.name.clone(), name: name.into(), rule })
}

fn path_of(host: &Host, levels: &[String]) -> Result<Vec<String>, InventoryError> {
    let label = |level: &String| {
        let missing =
            || InventoryError::Unlabelled { host: host.name.clone(), level: level.clone() };
        host.labels.get(level).cloned().ok_or_else(missing)
    };
    let path: Vec<String> = levels.iter().map(label).collect::<Result<_, _>>()?;
    for label in &path {
        check_name(host, label)?;
        if label.contains('/') {
            let rule = "labels of levels must not contain slashes";
            return Err(InventoryError::Name {
                host: host.name.clone(),
                name: label.clone(),
                rule,
            });
        }
    }
    Ok(path)
}

fn check_names(hosts: &[(Vec<String>, Host)]) -> Result<(), InventoryError> {
    let mut seen = BTreeSet::new();
    for (_, host) in hosts {
        if !seen.insert(&host.name) {
            return Err(InventoryError::Duplicate(host.name.clone()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(levels: &str, host: &str) -> String {
        let text = format!("levels = [{levels}]\n[[hosts]]\nname = 'h'\n{host}");
        Topology::new(&toml::from_str(&text).unwrap()).unwrap_err().to_string()
    }

    #[test]
    fn a_level_cannot_have_the_name_by_which_constraints_mean_hosts() {
        let why = refusal("'rack', 'host'", "nic_mbit = 1");
        assert!(why.starts_with("a level is called \"host\""), "{why}");
    }

    #[test]
    fn an_amount_of_which_more_is_used_than_there_is_is_named() {
        let why = refusal("", "nic_mbit = 1\ngpus = { h = { total = 2, used = 3 } }");
        let expected = "host \"h\": gpus.h: used is 3, but total is 2; correct one of them";
        assert_eq!(why, expected);
        let why = refusal("", "nic_mbit = 1\ncpus = { total = 2, used = 3 }");
        assert!(why.contains("cpus: used is 3"), "{why}");
    }
    #[test]
    fn a_rate_whose_sums_or_transfers_would_not_be_finite_is_refused() {
        for rate in ["0", "-1", "nan", "inf", "1e-300", "1e300"] {
            let why = refusal("", &format!("nic_mbit = {rate}"));
            assert!(why.contains("it must be a number from 0.001 to 1e9"), "{rate}: {why}");
        }
    }
}
