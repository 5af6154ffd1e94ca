//! Nodes and links, and the trees over which jobs aggregate.

use std::collections::BTreeMap;

use crate::link::LinkConfig;
use crate::random::mix;

/// A node's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub usize);

impl NodeId {
    /// Returns the number as 32 bits.
    ///
    /// # Panics
    /// If there are 2^32 nodes.
    #[must_use]
    pub fn number(self) -> u32 {
        u32::try_from(self.0).expect("a topology has fewer than 2^32 nodes")
    }
}

/// A link's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub usize);

/// The kind of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A host with GPUs.
    Worker,
    /// A switch, which may aggregate.
    Switch,
}

/// A node of a topology.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Unique name.
    pub name: String,
    /// The kind.
    pub kind: Kind,
}

/// One direction of a cable between two nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// The sending end.
    pub from: NodeId,
    /// The receiving end.
    pub to: NodeId,
    /// The link in the opposite direction.
    pub back: LinkId,
    /// Rate, delay and buffer.
    pub config: LinkConfig,
}

/// Nodes that are connected by links, each of which has one in the opposite direction.
#[derive(Debug, Clone, Default)]
pub struct Topology {
    nodes: Vec<Node>,
    links: Vec<Link>,
    /// Per node: the links from it.
    out: Vec<Vec<LinkId>>,
    names: BTreeMap<String, NodeId>,
    /// Per node: links to the closest worker. Filled by [`Self::finish`].
    heights: Vec<usize>,
}

/// A reason why a topology cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TopologyError {
    /// Two nodes have one name.
    #[error("two nodes are named {0:?}; give each node a name of its own")]
    Twice(String),
    /// A link or job names an unknown node.
    #[error("there is no node {0:?}")]
    Unknown(String),
    /// A link sends nothing.
    #[error("the link from {from:?} to {to:?} has a rate of zero; give it a positive rate")]
    ZeroRate {
        /// The sending end.
        from: String,
        /// The receiving end.
        to: String,
    },
    /// A link leads to its own start.
    #[error("the link of {0:?} leads to itself")]
    Loop(String),
    /// A node that no worker reaches.
    #[error("no worker reaches node {0:?}")]
    Unconnected(String),
    /// No switch is above all workers that aggregate.
    #[error("no switch is above all workers: {one:?} and {other:?} have none in common")]
    Apart {
        /// A worker.
        one: String,
        /// A worker that has no switch in common with it.
        other: String,
    },
}

/// The switches over which a job aggregates, with the job's workers as leaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tree {
    /// The nodes, each after its children; the root is last. A job with one worker has only that.
    pub nodes: Vec<TreeNode>,
}

/// A node of a job's tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TreeNode {
    /// The worker or switch.
    pub node: NodeId,
    /// The way to the parent. `None` at the root.
    pub parent: Option<Branch>,
    /// The ways to the children, in ascending order of these. Empty at a worker.
    pub children: Vec<Branch>,
}

/// An edge of a job's tree, as seen from one of its ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Branch {
    /// The other end, as an index into the tree's nodes.
    pub to: usize,
    /// The link to the other end.
    pub link: LinkId,
}

/// Racks below one core switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TwoLayers {
    /// Number of racks.
    pub racks: usize,
    /// Workers in each.
    pub workers_per_rack: usize,
    /// Between a worker and its rack's switch, in both directions.
    pub worker: LinkConfig,
    /// Between a rack's switch and the core, in both directions.
    pub uplink: LinkConfig,
}

impl TwoLayers {
    /// Builds the topology. Workers come first, rack by rack, so that worker *w* is node *w*.
    #[must_use]
    pub fn build(&self) -> Topology {
        let mut topology = Topology::default();
        let mut add = |name: String, kind| topology.add_node(&name, kind).expect("a new name");
        let workers = self.racks * self.workers_per_rack;
        for worker in 0..workers {
            add(format!("w{worker}"), Kind::Worker);
        }
        for rack in 0..self.racks {
            add(format!("tor{rack}"), Kind::Switch);
        }
        let core = add("core".into(), Kind::Switch);
        for rack in 0..self.racks {
            let tor = NodeId(workers + rack);
            for worker in 0..self.workers_per_rack {
                let worker = NodeId(rack * self.workers_per_rack + worker);
                topology.connect(worker, tor, self.worker, self.worker).expect("known nodes");
            }
            topology.connect(tor, core, self.uplink, self.uplink).expect("known nodes");
        }
        topology.finish().expect("connected");
        topology
    }
}

impl Topology {
    /// Adds a node.
    ///
    /// # Errors
    /// If a node has this name.
    pub fn add_node(&mut self, name: &str, kind: Kind) -> Result<NodeId, TopologyError> {
        let id = NodeId(self.nodes.len());
        if self.names.insert(name.into(), id).is_some() {
            return Err(TopologyError::Twice(name.into()));
        }
        self.nodes.push(Node { name: name.into(), kind });
        self.out.push(vec![]);
        Ok(id)
    }

    /// Connects two nodes with a link in each direction.
    ///
    /// # Errors
    /// If both are one node, or a rate is zero.
    pub fn connect(
        &mut self,
        one: NodeId,
        other: NodeId,
        there: LinkConfig,
        back: LinkConfig,
    ) -> Result<(), TopologyError> {
        if one == other {
            return Err(TopologyError::Loop(self.name(one).into()));
        }
        for (from, to, config) in [(one, other, there), (other, one, back)] {
            if config.rate_bps == 0 {
                let [from, to] = [from, to].map(|node| self.name(node).into());
                return Err(TopologyError::ZeroRate { from, to });
            }
        }
        let first = self.links.len();
        self.links.push(Link { from: one, to: other, back: LinkId(first + 1), config: there });
        self.links.push(Link { from: other, to: one, back: LinkId(first), config: back });
        self.out[one.0].push(LinkId(first));
        self.out[other.0].push(LinkId(first + 1));
        Ok(())
    }

    /// Computes what trees need. Call this once all nodes are connected.
    ///
    /// # Errors
    /// If no worker reaches some node.
    pub fn finish(&mut self) -> Result<(), TopologyError> {
        self.heights = vec![usize::MAX; self.nodes.len()];
        let mut reached: Vec<_> = self.workers().collect();
        reached.iter().for_each(|worker| self.heights[worker.0] = 0);
        let mut next = 0;
        while let Some(&node) = reached.get(next) {
            next += 1;
            for link in &self.out[node.0] {
                let to = self.links[link.0].to;
                if self.heights[to.0] == usize::MAX {
                    self.heights[to.0] = self.heights[node.0] + 1;
                    reached.push(to);
                }
            }
        }
        match self.heights.iter().position(|height| *height == usize::MAX) {
            Some(node) => Err(TopologyError::Unconnected(self.nodes[node].name.clone())),
            None => Ok(()),
        }
    }

    /// Returns the nodes.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Returns the links.
    #[must_use]
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// Returns a node's name.
    #[must_use]
    pub fn name(&self, node: NodeId) -> &str {
        &self.nodes[node.0].name
    }

    /// Returns the node with a name.
    ///
    /// # Errors
    /// If there is none.
    pub fn node(&self, name: &str) -> Result<NodeId, TopologyError> {
        self.names.get(name).copied().ok_or_else(|| TopologyError::Unknown(name.into()))
    }

    /// Returns all workers in ascending order.
    pub fn workers(&self) -> impl Iterator<Item = NodeId> + '_ {
        let is_worker = |node: &NodeId| self.nodes[node.0].kind == Kind::Worker;
        (0..self.nodes.len()).map(NodeId).filter(is_worker)
    }

    /// Returns the workers of each rack: those that share their lowest switch.
    #[must_use]
    pub fn racks(&self) -> Vec<Vec<NodeId>> {
        let mut racks: BTreeMap<NodeId, Vec<NodeId>> = BTreeMap::new();
        for worker in self.workers() {
            let switch = self.out[worker.0].iter().map(|link| self.links[link.0].to).min();
            racks.entry(switch.unwrap_or(worker)).or_default().push(worker);
        }
        racks.into_values().collect()
    }

    /// Returns the tree over which the workers of a job aggregate: the lowest switch above all of
    /// them, and the switches on the way to it. Of several equal ones, `salt` chooses, so that jobs
    /// spread over parallel links.
    ///
    /// # Errors
    /// If no switch is above all workers.
    pub fn tree(&self, workers: &[NodeId], salt: u64) -> Result<Tree, TopologyError> {
        let mut workers = workers.to_vec();
        workers.sort_unstable();
        workers.dedup();
        if let [worker] = workers[..] {
            let only = TreeNode { node: worker, parent: None, children: vec![] };
            return Ok(Tree { nodes: vec![only] });
        }
        let rank = |node: NodeId| mix(salt ^ mix(node.0 as u64));
        let above = |worker: &NodeId| self.reaches(*worker, |link| (link.from, link.to));
        let mut common = workers.first().map(above).unwrap_or_default();
        for worker in workers.iter().skip(1) {
            let of_worker = above(worker);
            common.iter_mut().zip(of_worker).for_each(|(common, other)| *common &= other);
        }
        let roots = (0..self.nodes.len()).map(NodeId);
        let roots = roots.filter(|node| common.get(node.0) == Some(&true));
        let root = roots.min_by_key(|root| (self.heights[root.0], rank(*root), *root));
        let root = root.ok_or_else(|| self.apart(&workers))?;
        let below = self.reaches(root, |link| (link.to, link.from));
        let mut tree = Tree { nodes: vec![] };
        let mut places = BTreeMap::new();
        self.add_to_tree(&mut tree, &mut places, root, &workers, &|node| {
            // The way up from a node: towards the root, over the link that the salt chooses.
            let up = self.out[node.0].iter().filter(|link| {
                let to = self.links[link.0].to;
                self.heights[to.0] > self.heights[node.0] && below[to.0]
            });
            up.copied().min_by_key(|link| (mix(rank(node) ^ mix(link.0 as u64)), *link))
        });
        Ok(tree)
    }

    /// Adds the ways from the workers to the root, in ascending order of height.
    fn add_to_tree(
        &self,
        tree: &mut Tree,
        places: &mut BTreeMap<NodeId, usize>,
        root: NodeId,
        workers: &[NodeId],
        up: &dyn Fn(NodeId) -> Option<LinkId>,
    ) {
        let mut ways: BTreeMap<(usize, NodeId), Option<LinkId>> = BTreeMap::new();
        for worker in workers {
            let mut node = *worker;
            while node != root {
                let link = up(node).expect("the root is above");
                ways.insert((self.heights[node.0], node), Some(link));
                node = self.links[link.0].to;
            }
        }
        ways.insert((self.heights[root.0], root), None);
        for (place, (_, node)) in ways.keys().enumerate() {
            places.insert(*node, place);
            tree.nodes.push(TreeNode { node: *node, parent: None, children: vec![] });
        }
        for (place, link) in ways.values().enumerate() {
            let Some(link) = link else { continue };
            let Link { to, back, .. } = self.links[link.0];
            let to = places[&to];
            tree.nodes[place].parent = Some(Branch { to, link: *link });
            tree.nodes[to].children.push(Branch { to: place, link: back });
        }
    }

    /// Returns which nodes can be reached from one by going up, or down if `ends` exchanges the
    /// ends of links.
    fn reaches(&self, from: NodeId, ends: fn(&Link) -> (NodeId, NodeId)) -> Vec<bool> {
        let mut reached = vec![false; self.nodes.len()];
        reached[from.0] = true;
        let mut left = vec![from];
        while let Some(node) = left.pop() {
            for link in &self.out[node.0] {
                let to = self.links[link.0].to;
                // Seen from above, the way up of a node below leads here.
                let (low, high) = ends(&Link { from: node, to, ..self.links[link.0] });
                if self.heights[low.0] < self.heights[high.0] && !reached[to.0] {
                    reached[to.0] = true;
                    left.push(to);
                }
            }
        }
        reached
    }

    fn apart(&self, workers: &[NodeId]) -> TopologyError {
        let up = |worker: NodeId| self.reaches(worker, |link| (link.from, link.to));
        let first = workers.first().copied().unwrap_or(NodeId(0));
        let of_first = up(first);
        let is_apart = |worker: &&NodeId| {
            let of_worker = up(**worker);
            !of_first.iter().zip(of_worker).any(|(one, other)| *one && other)
        };
        let other = workers.iter().find(is_apart).copied().unwrap_or(first);
        let [one, other] = [first, other].map(|worker| self.name(worker).into());
        TopologyError::Apart { one, other }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Picos;

    const LINK: LinkConfig = LinkConfig::lossless(10_000_000_000, Picos::ZERO);

    fn racks(racks: usize, workers_per_rack: usize) -> Topology {
        TwoLayers { racks, workers_per_rack, worker: LINK, uplink: LINK }.build()
    }

    /// Describes a tree as `parent(children)`.
    fn text(topology: &Topology, tree: &Tree, place: usize) -> String {
        let TreeNode { node, children, .. } = &tree.nodes[place];
        let below: Vec<_> = children.iter().map(|it| text(topology, tree, it.to)).collect();
        let below = if below.is_empty() { String::new() } else { format!("({})", below.join(" ")) };
        format!("{}{below}", topology.name(*node))
    }

    fn tree_of(topology: &Topology, workers: &[usize], salt: u64) -> Result<String, TopologyError> {
        let workers: Vec<_> = workers.iter().map(|worker| NodeId(*worker)).collect();
        let tree = topology.tree(&workers, salt)?;
        for (place, node) in tree.nodes.iter().enumerate() {
            for child in &node.children {
                let back = tree.nodes[child.to].parent.unwrap();
                assert_eq!(back.to, place);
                assert_eq!(topology.links()[back.link.0].back, child.link);
                assert_eq!(topology.links()[child.link.0].to, tree.nodes[child.to].node);
            }
        }
        Ok(text(topology, &tree, tree.nodes.len() - 1))
    }

    #[test]
    fn a_job_aggregates_at_the_lowest_switch_above_its_workers() {
        let topology = racks(3, 2);
        assert_eq!(topology.racks(), [[0, 1], [2, 3], [4, 5]].map(|rack| rack.map(NodeId)));
        let tree = |workers: &[usize]| tree_of(&topology, workers, 0).unwrap();
        assert_eq!(tree(&[4]), "w4");
        assert_eq!(tree(&[3, 2]), "tor1(w2 w3)");
        assert_eq!(tree(&[0, 5, 1]), "core(tor0(w0 w1) tor2(w5))");
    }

    #[test]
    fn jobs_spread_over_parallel_switches_and_links() {
        // Two racks, two spines, two links between each pair.
        let mut topology = Topology::default();
        for worker in ["w0", "w1"] {
            topology.add_node(worker, Kind::Worker).unwrap();
        }
        for switch in ["tor0", "tor1", "s0", "s1"] {
            topology.add_node(switch, Kind::Switch).unwrap();
        }
        let mut connect = |one, other| {
            let [one, other] = [one, other].map(|name| topology.node(name).unwrap());
            topology.connect(one, other, LINK, LINK).unwrap();
        };
        connect("w0", "tor0");
        connect("w1", "tor1");
        for (tor, spine) in [("tor0", "s0"), ("tor0", "s1"), ("tor1", "s0"), ("tor1", "s1")] {
            connect(tor, spine);
            connect(tor, spine);
        }
        topology.finish().unwrap();
        let trees: Vec<_> =
            (0..64).map(|salt| tree_of(&topology, &[0, 1], salt).unwrap()).collect();
        for spine in ["s0", "s1"] {
            let expected = format!("{spine}(tor0(w0) tor1(w1))");
            assert!(trees.iter().filter(|tree| **tree == expected).count() > 16, "{trees:?}");
        }
        let links: std::collections::BTreeSet<_> = (0..64)
            .map(|salt| topology.tree(&[NodeId(0), NodeId(1)], salt).unwrap().nodes[2].parent)
            .map(|branch| branch.unwrap().link)
            .collect();
        assert_eq!(links.len(), 4);
    }

    #[test]
    fn what_cannot_work_is_refused() {
        let mut topology = Topology::default();
        let [one, other] = ["w0", "w1"].map(|name| topology.add_node(name, Kind::Worker).unwrap());
        let [near, far] = ["s0", "s1"].map(|name| topology.add_node(name, Kind::Switch).unwrap());
        let twice = topology.add_node("w0", Kind::Switch);
        assert_eq!(twice, Err(TopologyError::Twice("w0".into())));
        assert_eq!(topology.node("w9"), Err(TopologyError::Unknown("w9".into())));
        let itself = topology.connect(one, one, LINK, LINK);
        assert_eq!(itself, Err(TopologyError::Loop("w0".into())));
        let dead = LinkConfig { rate_bps: 0, ..LINK };
        let error = topology.connect(one, near, LINK, dead).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the link from \"s0\" to \"w0\" has a rate of zero; give it a positive rate"
        );
        topology.connect(one, near, LINK, LINK).unwrap();
        assert_eq!(topology.finish(), Err(TopologyError::Unconnected("s1".into())));
        topology.connect(other, far, LINK, LINK).unwrap();
        topology.finish().unwrap();
        let apart = tree_of(&topology, &[0, 1], 0).unwrap_err();
        assert_eq!(apart, TopologyError::Apart { one: "w0".into(), other: "w1".into() });
    }
}
