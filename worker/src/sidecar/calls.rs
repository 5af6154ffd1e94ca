//! Ops of a job, from the first rank's call until the ranks receive the sums.

use std::collections::BTreeMap;
use std::sync::Arc;

use racksum_net::clock::Clock;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::time::Time;

use super::fold::{Handed, Memory};

/// An op that some ranks have not called yet.
#[derive(Debug)]
pub(super) struct Gathering {
    pub(super) since: Time,
    /// The descriptor and the operand of each rank that called the op, by rank. A rank that refused
    /// the op has no operand.
    pub(super) called: BTreeMap<u16, (Descriptor, Option<Handed>)>,
    pub(super) memories: Vec<Arc<Memory>>,
}

/// An op that the sidecar is folding, or has passed upstream to be summed across hosts.
#[derive(Debug)]
pub(super) struct Folding {
    /// The time at which the first rank called the op.
    pub(super) since: Time,
    /// Whether the op has been folded and its sum passed upstream.
    pub(super) is_passed: bool,
    /// The memory of the operands, kept alive until the op ends.
    pub(super) _memories: Vec<Arc<Memory>>,
}

impl Gathering {
    pub(super) fn begin() -> Self {
        Self { since: Clock::start().now(), called: BTreeMap::new(), memories: Vec::new() }
    }
}
