//! A reader of MLCommons Chakra execution traces.
//!
//! Source: the schema and the feeder of mlcommons/chakra. A trace holds the nodes of one rank:
//! computing, collectives, sends and receives, and the nodes that each waits for. Durations are in
//! microseconds, sizes in bytes. The size of a collective is that of each rank's operand, as
//! ASTRA-sim takes it.
//!
//! Real traces have gaps: a collective without a size, a dependency on a node that the converter
//! lost. [`Rules`] says what to do about each; the default refuses the trace and names the node.
//!
//! A node's unit is its thread or stream (`tid`) on the host or on the device (`is_cpu_op`). Time
//! stamps are not read: work starts when its dependencies and its unit allow.
//!
//! The memory that reading takes is at most a constant times the size of the trace.

mod node;
mod rules;
mod wire;

use std::collections::BTreeMap;

use prost::Message;
use racksum_proto::ids::Rank;

use self::node::Reader;
use super::graph::{Execution, Graph, GraphError, Group};

pub use node::NodeProblem;
pub use rules::{Control, MissingCollective, MissingGroup, MissingSize, MissingTime, Rules};
pub use wire::FrameError;

/// Reads the traces of all ranks; rank r has the r-th trace.
///
/// # Errors
/// If a trace is malformed, lacks a fact that no rule fills, or cannot run with the others.
pub fn read(traces: &[&[u8]], rules: &Rules) -> Result<Execution, ChakraError> {
    let world = (0..traces.len()).map(|rank| Ok(Rank(u16::try_from(rank)?)));
    let world = world
        .collect::<Result<Vec<_>, std::num::TryFromIntError>>()
        .map_err(|_| GraphError::TooManyRanks(traces.len()))?;
    let graphs = world.iter().zip(traces).map(|(rank, trace)| {
        let mut reader = Reader::new(*rank, rules);
        let nodes = nodes(trace, &mut reader);
        let nodes = nodes.map_err(|why| ChakraError::Trace { rank: *rank, why })?;
        Ok(Graph::new(*rank, nodes)?)
    });
    let graphs = graphs.collect::<Result<Vec<_>, ChakraError>>()?;
    let named = rules.groups.iter();
    let named = named.map(|(name, ranks)| Group { name: name.clone(), members: ranks.clone() });
    // `node` gives the world the first number, and the named groups the next ones in their order.
    let world = Group { name: "world".to_owned(), members: world };
    Ok(Execution::new(std::iter::once(world).chain(named).collect(), graphs)?)
}

/// Reads the ranks of process groups from ASTRA-sim's JSON: an object of arrays of ranks.
///
/// # Errors
/// If the text is not such an object; the error names the line.
pub fn groups_from_json(json: &str) -> Result<BTreeMap<String, Vec<Rank>>, GroupsError> {
    serde_json::from_str(json)
        .map_err(|error| GroupsError { line: error.line(), why: error.to_string() })
}

fn nodes(trace: &[u8], reader: &mut Reader<'_>) -> Result<Vec<super::graph::Node>, TraceError> {
    let mut nodes = Vec::new();
    let (mut offset, mut index) = (0, 0);
    loop {
        let problem = |why| TraceError::Frame { index, offset, why };
        let Some(frame) = wire::frame(trace, offset).map_err(problem)? else { break };
        let malformed = |error: prost::DecodeError| problem(FrameError::Message(error.to_string()));
        if index == 0 {
            wire::GlobalMetadata::decode(frame.bytes).map_err(malformed)?;
        } else {
            let node = wire::Node::decode(frame.bytes).map_err(malformed)?;
            nodes.push(reader.node(&node).map_err(|why| TraceError::Node {
                id: node.id,
                name: node.name.clone(),
                why,
            })?);
        }
        offset = frame.offset + frame.bytes.len();
        index += 1;
    }
    if index == 0 {
        return Err(TraceError::Frame { index, offset, why: FrameError::Empty });
    }
    Ok(nodes)
}

/// An error in a set of traces.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ChakraError {
    /// One trace cannot be read.
    #[error("trace of rank {}: {why}", rank.0)]
    Trace {
        /// The rank.
        rank: Rank,
        /// The reason.
        why: TraceError,
    },
    /// The traces cannot run.
    #[error(transparent)]
    Graph(#[from] GraphError),
}

/// An error in one trace.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TraceError {
    /// A message cannot be decoded.
    #[error("message {index} at byte {offset}: {why}")]
    Frame {
        /// The number of the message, from 0; message 0 is the metadata.
        index: usize,
        /// The offset of its length.
        offset: usize,
        /// The reason.
        why: FrameError,
    },
    /// A node cannot be used.
    #[error("node {id} {name:?}: {why}")]
    Node {
        /// The node's number.
        id: u64,
        /// The node's name.
        name: String,
        /// The reason.
        why: NodeProblem,
    },
}

/// An error in a file of process groups.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {why}")]
pub struct GroupsError {
    /// The number of the line, from 1.
    pub line: usize,
    /// The reason.
    pub why: String,
}

#[cfg(test)]
mod tests;
