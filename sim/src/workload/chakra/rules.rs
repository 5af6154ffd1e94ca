//! Rules for facts that a trace lacks. By default the reader refuses such a trace.

use std::collections::BTreeMap;

use racksum_proto::ids::Rank;

use crate::engine::Picos;
use crate::workload::graph::CollectiveKind;

/// The rules that fill the gaps of a trace. The default refuses each gap.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rules {
    /// The rule for collectives without a type or a size.
    pub collective: MissingCollective,
    /// The rule for messages without a size.
    pub message: MissingSize,
    /// The rule for collectives without a process group.
    pub group: MissingGroup,
    /// The rule for work without a time.
    pub time: MissingTime,
    /// The meaning of control dependencies.
    pub control: Control,
    /// The ranks of each process group that the traces name.
    pub groups: BTreeMap<String, Vec<Rank>>,
}

/// A rule for collectives that lack `comm_type` or `comm_size`.
///
/// Traces of PyTorch have such nodes: the host's calls, besides the kernels that do the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MissingCollective {
    /// Refuse the trace.
    #[default]
    Refuse,
    /// Take the node for work of its unit that lasts as long as recorded.
    Compute,
    /// Fill in what is missing.
    Fill {
        /// The type, if that is missing.
        kind: CollectiveKind,
        /// The size in bytes, if that is missing.
        bytes: u64,
    },
}

/// A rule for messages that lack `comm_size`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MissingSize {
    /// Refuse the trace.
    #[default]
    Refuse,
    /// Use this many bytes.
    Bytes(u64),
}

/// A rule for collectives that lack `pg_name`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MissingGroup {
    /// Refuse the trace.
    #[default]
    Refuse,
    /// Use all ranks, in their order.
    World,
}

/// A rule for nodes that record a number of operations or a memory access, but no duration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MissingTime {
    /// Refuse the trace.
    #[default]
    Refuse,
    /// Use the same time for each such node.
    Fixed(Picos),
    /// Divide the number of operations by this rate, which must not be zero. Refuse a node that
    /// has no such number.
    OpsPerSecond(u64),
}

/// The meaning of `ctrl_deps`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Control {
    /// A node waits for them as for its data dependencies.
    #[default]
    Wait,
    /// A node does not wait for them. Converters write the caller of an operation there, which is
    /// often not in the trace or the node itself; Chakra's own feeder ignores them too.
    Ignore,
}
