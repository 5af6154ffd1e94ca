//! The measurements from which the links of a network are computed.

use crate::topology::{HostId, VertexId};

/// The measurements of the path from one host to another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// The sending host.
    pub from: HostId,
    /// The receiving host.
    pub to: HostId,
    /// The throughput at the receiver while no other pair was measured, in Mbit/s.
    pub mbit: f64,
    /// The share of the datagrams that were lost.
    pub loss: f64,
    /// The median round-trip time in microseconds.
    pub rtt_us: f64,
    /// The 99th percentile of the round-trip times in microseconds.
    pub rtt_p99_us: f64,
}

/// The throughput of several pairs that sent over one link at the same time.
#[derive(Debug, Clone, PartialEq)]
pub struct Contended {
    /// The domain whose link all pairs used.
    pub of: VertexId,
    /// Whether the pairs sent from the domain to its parent, or into the domain.
    pub is_up: bool,
    /// The pairs.
    pub pairs: Vec<ContendedPair>,
}

/// One of several pairs that sent over a link at the same time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ContendedPair {
    /// The sending host.
    pub from: HostId,
    /// The receiving host.
    pub to: HostId,
    /// The throughput at the receiver in Mbit/s.
    pub mbit: f64,
    /// The throughput that the pair's train was made to test, in Mbit/s. A greater one does not
    /// show.
    pub tested_mbit: f64,
}
