//! Conversion of a trace's node, with the rules for what it lacks.

use std::collections::BTreeMap;

use racksum_proto::ids::Rank;

use super::rules::{Control, MissingCollective, MissingGroup, MissingSize, MissingTime, Rules};
use super::wire::{self, NodeType, Value};
use crate::engine::Picos;
use crate::workload::duration::{self, DurationError, MICROSECOND, SECOND};
use crate::workload::graph::{
    Collective, CollectiveKind, Dependency, Event, GroupId, Message, Node, NodeId, Unit, Work,
};

/// A reader of one rank's nodes.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    rank: Rank,
    rules: &'a Rules,
    /// The unit of each thread or stream, on the host (true) or the device.
    units: BTreeMap<(bool, i128), Unit>,
}

impl<'a> Reader<'a> {
    pub(super) const fn new(rank: Rank, rules: &'a Rules) -> Self {
        Self { rank, rules, units: BTreeMap::new() }
    }

    /// Converts a node.
    pub(super) fn node(&mut self, node: &wire::Node) -> Result<Node, NodeProblem> {
        let kind = NodeType::from_number(node.kind).map_err(NodeProblem::Type)?;
        let attributes = Attributes(&node.attributes);
        let work = match kind {
            NodeType::Metadata => Work::Compute(Picos::ZERO),
            NodeType::Memory | NodeType::Compute => Work::Compute(self.time(node, attributes)?),
            NodeType::Send => Work::Send(self.message(attributes, "comm_src", "comm_dst")?),
            NodeType::Recv => Work::Recv(self.message(attributes, "comm_dst", "comm_src")?),
            NodeType::Collective => self.collective(node, attributes)?,
        };
        let after = match self.rules.control {
            Control::Wait => node.ctrl_deps.iter().chain(&node.data_deps),
            Control::Ignore => [].iter().chain(&node.data_deps),
        };
        let after = after.map(|id| Dependency { node: NodeId(*id), event: Event::Ended });
        Ok(Node {
            id: NodeId(node.id),
            name: node.name.clone(),
            unit: self.unit(attributes)?,
            work,
            after: after.collect(),
        })
    }

    /// Returns the unit of a node. Chakra's feeder takes a node for the host's if it does not say.
    fn unit(&mut self, attributes: Attributes<'_>) -> Result<Unit, NodeProblem> {
        let is_host = attributes.flag("is_cpu_op")?.unwrap_or(true);
        let thread = attributes.integer("tid")?.unwrap_or(0);
        let next = u32::try_from(self.units.len()).map_err(|_| NodeProblem::TooManyUnits)?;
        Ok(*self.units.entry((is_host, thread)).or_insert(Unit(next)))
    }

    /// Returns the time of a computing node or a memory access.
    fn time(&self, node: &wire::Node, attributes: Attributes<'_>) -> Result<Picos, NodeProblem> {
        let ops = attributes.unsigned("num_ops")?.filter(|ops| *ops > 0);
        let moves = attributes.unsigned("tensor_size")?.is_some_and(|bytes| bytes > 0);
        if node.duration_micros > 0 || (ops.is_none() && !moves) {
            return recorded(node);
        }
        match (self.rules.time, ops) {
            (MissingTime::Fixed(time), _) => Ok(time),
            (MissingTime::OpsPerSecond(rate), Some(ops)) => {
                let picos = u128::from(ops) * u128::from(SECOND.0);
                let picos = picos.checked_div(rate.into()).ok_or(NodeProblem::ZeroRate)?;
                let picos = u64::try_from(picos).map_err(|_| DurationError::TooLong)?;
                Ok(duration::from_whole_units(picos, Picos(1))?)
            }
            (MissingTime::Refuse | MissingTime::OpsPerSecond(_), _) => Err(NodeProblem::NoTime),
        }
    }

    fn message(
        &self,
        attributes: Attributes<'_>,
        own: &'static str,
        other: &'static str,
    ) -> Result<Message, NodeProblem> {
        if let Some(rank) = attributes.small(own)?.filter(|rank| *rank != self.rank.0) {
            return Err(NodeProblem::OtherRank { attribute: own, rank });
        }
        let peer = attributes.small(other)?.ok_or(NodeProblem::NoPeer(other))?;
        let bytes = match (attributes.unsigned("comm_size")?, self.rules.message) {
            (Some(bytes), _) | (None, MissingSize::Bytes(bytes)) => bytes,
            (None, MissingSize::Refuse) => return Err(NodeProblem::NoSize),
        };
        let tag = attributes.small("comm_tag")?.unwrap_or(0);
        Ok(Message { peer: Rank(peer), bytes, tag, nic: 0 })
    }

    fn collective(
        &self,
        node: &wire::Node,
        attributes: Attributes<'_>,
    ) -> Result<Work, NodeProblem> {
        let kind = attributes.integer("comm_type")?.map(collective_kind).transpose()?;
        let bytes = attributes.unsigned("comm_size")?;
        let (kind, bytes) = match (kind, bytes, self.rules.collective) {
            (Some(kind), Some(bytes), _) => (kind, bytes),
            // A barrier moves no data.
            (Some(CollectiveKind::Barrier), None, _) => (CollectiveKind::Barrier, 0),
            (.., MissingCollective::Compute) => return Ok(Work::Compute(recorded(node)?)),
            (kind, bytes, MissingCollective::Fill { kind: other, bytes: size }) => {
                (kind.unwrap_or(other), bytes.unwrap_or(size))
            }
            (_, None, MissingCollective::Refuse) => return Err(NodeProblem::NoSize),
            (None, _, MissingCollective::Refuse) => return Err(NodeProblem::NoCollectiveType),
        };
        let priority = attributes.small("comm_priority")?.unwrap_or(0);
        let group = self.group(attributes)?;
        Ok(Work::Collective(Collective { kind, bytes, group, priority }))
    }

    fn group(&self, attributes: Attributes<'_>) -> Result<GroupId, NodeProblem> {
        let Some(name) = attributes.text("pg_name")?.filter(|name| !name.is_empty()) else {
            return match self.rules.group {
                MissingGroup::World => Ok(GroupId(0)),
                MissingGroup::Refuse => Err(NodeProblem::NoGroup),
            };
        };
        match self.rules.groups.keys().position(|group| *group == name) {
            Some(index) => Ok(GroupId(index + 1)),
            None => Err(NodeProblem::UnknownGroup(name)),
        }
    }
}

/// Returns the time that a node has recorded, which may be zero.
fn recorded(node: &wire::Node) -> Result<Picos, NodeProblem> {
    Ok(duration::from_whole_units(node.duration_micros, MICROSECOND)?)
}

/// Returns the operation with a number of the schema's `CollectiveCommType`.
fn collective_kind(number: i128) -> Result<CollectiveKind, NodeProblem> {
    Ok(match number {
        0 => CollectiveKind::AllReduce,
        1 => CollectiveKind::Reduce,
        2 => CollectiveKind::AllGather,
        3 => CollectiveKind::Gather,
        4 => CollectiveKind::Scatter,
        5 => CollectiveKind::Broadcast,
        6 => CollectiveKind::AllToAll,
        7 | 8 => CollectiveKind::ReduceScatter,
        9 => CollectiveKind::Barrier,
        _ => return Err(NodeProblem::CollectiveType(number)),
    })
}

/// The attributes of a node. The last one of a name counts, as in protobuf.
#[derive(Clone, Copy)]
struct Attributes<'a>(&'a [wire::Attribute]);

impl<'a> Attributes<'a> {
    /// Returns the value of an attribute if the node has it. The value is none if it has a type
    /// that no attribute of interest has, such as a list.
    fn value(self, name: &str) -> Option<Option<&'a Value>> {
        self.0.iter().rev().find(|it| it.name == name).map(|it| it.value.as_ref())
    }

    fn integer(self, name: &'static str) -> Result<Option<i128>, NodeProblem> {
        let integer = |value: Option<&Value>| {
            let integer = value.and_then(Value::integer);
            integer.ok_or(NodeProblem::Attribute { name, expected: "a whole number" })
        };
        self.value(name).map(integer).transpose()
    }

    /// Returns a number that is not negative.
    fn unsigned(self, name: &'static str) -> Result<Option<u64>, NodeProblem> {
        let expected = "a number of 0 or more";
        let unsigned = |it| u64::try_from(it).or(Err(NodeProblem::Attribute { name, expected }));
        self.integer(name)?.map(unsigned).transpose()
    }

    /// Returns a number that fits its small type, such as a rank.
    fn small<T: TryFrom<i128>>(self, name: &'static str) -> Result<Option<T>, NodeProblem> {
        let expected = "a number in its range";
        let small = |it| T::try_from(it).or(Err(NodeProblem::Attribute { name, expected }));
        self.integer(name)?.map(small).transpose()
    }

    fn flag(self, name: &'static str) -> Result<Option<bool>, NodeProblem> {
        match self.value(name) {
            None => Ok(None),
            Some(Some(Value::Bool(flag))) => Ok(Some(*flag)),
            Some(_) => Err(NodeProblem::Attribute { name, expected: "a bool" }),
        }
    }

    /// Returns a text. Some writers give a group's name as a number.
    fn text(self, name: &'static str) -> Result<Option<String>, NodeProblem> {
        match self.value(name) {
            None => Ok(None),
            Some(Some(Value::Text(text))) => Ok(Some(text.clone())),
            Some(value) => match value.and_then(Value::integer) {
                Some(number) => Ok(Some(number.to_string())),
                None => Err(NodeProblem::Attribute { name, expected: "a string" }),
            },
        }
    }
}

/// A reason why a node cannot be used.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum NodeProblem {
    /// The simulator has no such work.
    #[error("its type is {0}, which the simulator does not support")]
    Type(String),
    /// An attribute has a value of another type or range.
    #[error("its attribute {name} must be {expected}")]
    Attribute {
        /// The attribute.
        name: &'static str,
        /// The type or range.
        expected: &'static str,
    },
    /// The rank has too many threads and streams.
    #[error("the rank has too many threads and streams")]
    TooManyUnits,
    /// The node has work, but no time.
    #[error("it has no duration_micros; correct the trace, or choose a rule in `time`")]
    NoTime,
    /// The rule for missing times divides by zero.
    #[error("the rule in `time` has a rate of zero")]
    ZeroRate,
    /// The time is too long.
    #[error(transparent)]
    Time(#[from] DurationError),
    /// A communication has no size.
    #[error("it has no comm_size; correct the trace, or choose a rule for missing sizes")]
    NoSize,
    /// A collective has no type.
    #[error("it has no comm_type; correct the trace, or choose a rule in `collective`")]
    NoCollectiveType,
    /// A collective has a type that the schema does not have.
    #[error("its comm_type is {0}, which the schema does not have")]
    CollectiveType(i128),
    /// A collective has no group.
    #[error("it has no pg_name; correct the trace, or choose a rule in `group`")]
    NoGroup,
    /// A collective has a group whose ranks are not known.
    #[error("its process group {0:?} has no ranks in `groups`; list them")]
    UnknownGroup(String),
    /// A message has no peer.
    #[error("it has no {0}; correct the trace")]
    NoPeer(&'static str),
    /// A message belongs to another rank.
    #[error("its {attribute} is rank {rank}; give the traces in the order of their ranks")]
    OtherRank {
        /// The attribute.
        attribute: &'static str,
        /// The rank that it names.
        rank: u16,
    },
}
