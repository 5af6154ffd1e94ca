//! Execution graphs: what each rank of a job computes and sends, and in which order.
//!
//! A [`Node`] is one piece of [`Work`] and the nodes that it waits for. A [`Graph`] holds the nodes
//! of one rank, and an [`Execution`] the graphs of all ranks. The readers in
//! [`chakra`](super::chakra) and [`goal`](super::goal) produce an execution, and the simulator runs
//! it.
//!
//! An execution that exists can run to its end: every dependency exists, every collective is called
//! by all members of its group, every message has a sender and a receiver, and no nodes wait for
//! each other, within a rank or across ranks. `execution` checks the calls and `order` the order.

mod execution;
mod order;

use std::collections::BTreeMap;
use std::fmt;

use racksum_proto::ids::Rank;

use crate::engine::Picos;

pub use execution::{Execution, Group};

/// A node's number, unique within its rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u64);

/// A group's index in its execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub usize);

/// A part of a rank that computes one piece of work at a time: a processor, a thread or a stream.
/// Only computing occupies it; a rank may take part in many collectives and messages meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Unit(pub u32);

/// A piece of work of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// The node's number.
    pub id: NodeId,
    /// The name that errors and reports use.
    pub name: String,
    /// The unit that does the work.
    pub unit: Unit,
    /// The work.
    pub work: Work,
    /// The nodes of the same rank that this node waits for before it starts.
    pub after: Vec<Dependency>,
}

/// An event of another node that a node waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Dependency {
    /// The other node.
    pub node: NodeId,
    /// The event.
    pub event: Event,
}

/// The two events in a node's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Event {
    /// The work has started.
    Started,
    /// The work has ended.
    Ended,
}

/// The work of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Computing, for a given time.
    Compute(Picos),
    /// A rank's part in a collective.
    Collective(Collective),
    /// Sending a message. The work ends when the message has been handed to the network, whether
    /// or not the peer has started to receive it.
    Send(Message),
    /// Receiving a message.
    Recv(Message),
}

/// A rank's call of a collective. The n-th call of a group, in the order of the rank's nodes, meets
/// the n-th calls of the other members.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Collective {
    /// The operation.
    pub kind: CollectiveKind,
    /// The bytes of each rank's operand.
    pub bytes: u64,
    /// The group that takes part.
    pub group: GroupId,
    /// The priority; larger numbers go first, as in ASTRA-sim.
    pub priority: u32,
}

/// The operation of a collective. In an operation with a root, the group's first member is it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CollectiveKind {
    /// All members get the sum.
    AllReduce,
    /// The root gets the sum.
    Reduce,
    /// All members get all operands.
    AllGather,
    /// The root gets all operands.
    Gather,
    /// Each member gets its part of the root's operand.
    Scatter,
    /// All members get the root's operand.
    Broadcast,
    /// Each member gets its part of every operand.
    AllToAll,
    /// Each member gets its part of the sum.
    ReduceScatter,
    /// All members wait for each other.
    Barrier,
}

/// A message between two ranks. The n-th send from one rank to another with one tag, in the order
/// of the sender's nodes, meets the receiver's n-th receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// The other rank.
    pub peer: Rank,
    /// Bytes sent, or the size of the buffer that receives them.
    pub bytes: u64,
    /// The tag.
    pub tag: u32,
    /// The network card of this rank.
    pub nic: u32,
}

/// The nodes of one rank. Their ids are unique, and their dependencies exist.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Graph {
    nodes: Vec<Node>,
    /// For each node the indices of the nodes that wait for it, and the event.
    dependents: Vec<Vec<(usize, Event)>>,
}

impl Graph {
    /// Creates the graph of `rank`. A node that names a dependency twice waits for it once.
    ///
    /// # Errors
    /// If two nodes have one id, or if a node waits for a node that does not exist.
    pub fn new(rank: Rank, mut nodes: Vec<Node>) -> Result<Self, GraphError> {
        let mut indices = BTreeMap::new();
        for (index, node) in nodes.iter().enumerate() {
            if let Some(first) = indices.insert(node.id, index) {
                let first: &Node = &nodes[first];
                return Err(GraphError::Duplicate {
                    node: Place::new(rank, node),
                    first: first.name.clone(),
                });
            }
        }
        let mut dependents = vec![Vec::new(); nodes.len()];
        for (index, node) in nodes.iter_mut().enumerate() {
            node.after.sort_unstable();
            node.after.dedup();
            for dependency in &node.after {
                let Some(on) = indices.get(&dependency.node) else {
                    let (node, on) = (Place::new(rank, node), dependency.node);
                    return Err(GraphError::UnknownDependency { node, on });
                };
                dependents[*on].push((index, dependency.event));
            }
        }
        Ok(Self { nodes, dependents })
    }

    /// Returns the nodes in the order of their file.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Returns the nodes that wait for the node at `index`, and the event that they wait for.
    #[must_use]
    pub fn dependents(&self, index: usize) -> &[(usize, Event)] {
        &self.dependents[index]
    }
}

/// A node and its rank, for messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The rank.
    pub rank: Rank,
    /// The node's number.
    pub id: NodeId,
    /// The node's name.
    pub name: Box<str>,
}

impl Place {
    pub(crate) fn new(rank: Rank, node: &Node) -> Self {
        Self { rank, id: node.id, name: node.name.as_str().into() }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {} {:?} of rank {}", self.id.0, self.name, self.rank.0)
    }
}

/// A reason why graphs cannot run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GraphError {
    /// Two nodes of a rank have one id.
    #[error("{node} has the id of {first:?}; ids must be unique within a rank")]
    Duplicate {
        /// The later node.
        node: Place,
        /// The name of the earlier node.
        first: String,
    },
    /// A node waits for a node that does not exist.
    #[error("{node} waits for node {}, which the rank does not have", on.0)]
    UnknownDependency {
        /// The node that waits.
        node: Place,
        /// The id that does not exist.
        on: NodeId,
    },
    /// Nodes wait for each other.
    #[error("{}", cycle(.0))]
    Cycle(Vec<Place>),
    /// There are no ranks.
    #[error("the execution has no ranks")]
    NoRanks,
    /// There are more ranks than a job can have.
    #[error("the execution has {0} ranks; the limit is {MOST_RANKS}")]
    TooManyRanks(usize),
    /// A group has no members.
    #[error("group {0:?} has no members")]
    EmptyGroup(String),
    /// A group has a member twice.
    #[error("group {group:?} has rank {} twice", member.0)]
    RepeatedMember {
        /// The group.
        group: String,
        /// The repeated member.
        member: Rank,
    },
    /// A group has a member that cannot be reached, because the execution has no such rank.
    #[error(
        "group {group:?} has rank {}, but the execution has only ranks 0 to {}", member.0, ranks - 1
    )]
    UnknownMember {
        /// The group.
        group: String,
        /// The member.
        member: Rank,
        /// The number of ranks.
        ranks: usize,
    },
    /// A collective names a group that does not exist.
    #[error("{node} uses group number {}, which the execution does not have", group.0)]
    UnknownGroup {
        /// The node.
        node: Place,
        /// The group.
        group: GroupId,
    },
    /// A rank calls a collective of a group that it is not in.
    #[error("{node} uses group {group:?}, which does not have this rank")]
    NotMember {
        /// The node.
        node: Place,
        /// The group.
        group: String,
    },
    /// A member of a group never makes a call that another member makes.
    #[error("{node} is call {call} of group {group:?}, but rank {} makes only {calls}", member.0)]
    MissingCall {
        /// The node that makes the call.
        node: Place,
        /// The number of the call, from 1.
        call: usize,
        /// The group.
        group: String,
        /// The member that does not make it.
        member: Rank,
        /// The number of calls that the member makes.
        calls: usize,
    },
    /// Two members of a group make different calls.
    #[error("{node} meets {other} in call {call} of group {group:?}, but differs in {what}")]
    DifferentCalls {
        /// One node.
        node: Place,
        /// The other node.
        other: Place,
        /// The number of the call, from 1.
        call: usize,
        /// The group.
        group: String,
        /// The property in which they differ.
        what: &'static str,
    },
    /// A message goes to its own rank, or to a rank that does not exist.
    #[error("{node} names rank {} as its peer; it must be another of the {ranks} ranks", peer.0)]
    UnknownPeer {
        /// The node.
        node: Place,
        /// The peer.
        peer: Rank,
        /// The number of ranks.
        ranks: usize,
    },
    /// A message lacks its sender or its receiver.
    #[error("{node} has no matching {partner} at rank {}", peer.0)]
    Unmatched {
        /// The node.
        node: Place,
        /// The missing partner: a send or a receive.
        partner: &'static str,
        /// The rank that should have the partner.
        peer: Rank,
    },
    /// A message does not fit the buffer that receives it.
    #[error("{recv} has room for {room} bytes, but {send} sends it {bytes}")]
    Truncated {
        /// The node that sends.
        send: Place,
        /// Bytes sent.
        bytes: u64,
        /// The node that receives.
        recv: Place,
        /// Size of the buffer.
        room: u64,
    },
}

/// Describes a cycle by its first nodes.
fn cycle(nodes: &[Place]) -> String {
    let named: Vec<_> = nodes.iter().take(NAMED).map(ToString::to_string).collect();
    let more = nodes.len().saturating_sub(NAMED);
    let more = if more == 0 { String::new() } else { format!(" and {more} more nodes") };
    match named.as_slice() {
        [only] => format!("{only} waits for itself; remove the dependency"),
        _ => format!("these nodes wait for each other: {}{more}", named.join(", ")),
    }
}

/// The largest number of ranks of an execution.
pub const MOST_RANKS: usize = 1 << 16;
/// The number of nodes of a cycle that a message names.
const NAMED: usize = 8;

#[cfg(test)]
mod tests;
