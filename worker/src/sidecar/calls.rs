//! Ops that ranks of a job have called: from the first call of one until its sums are handed out.

use std::collections::BTreeMap;
use std::sync::Arc;

use racksum_net::clock::Clock;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::time::Time;

use super::fold::{Handed, Memory};

/// An op that not all ranks have called.
#[derive(Debug)]
pub(super) struct Gathering {
    pub(super) since: Time,
    /// With what each has handed, unless it refused the call.
    pub(super) called: BTreeMap<u16, (Descriptor, Option<Handed>)>,
    pub(super) memories: Vec<Arc<Memory>>,
}

/// An op that is being folded.
#[derive(Debug)]
pub(super) struct Folding {
    /// When some rank called it.
    pub(super) since: Time,
    /// It is folded, and on its way to other hosts.
    pub(super) is_passed: bool,
    /// What its ranks have handed is in these.
    pub(super) _memories: Vec<Arc<Memory>>,
}

impl Gathering {
    pub(super) fn begin() -> Self {
        Self { since: Clock::start().now(), called: BTreeMap::new(), memories: Vec::new() }
    }
}
