//! Coflows and the fabric that carries them.

use std::collections::BTreeSet;

use crate::coflow::bssi::Ratio;
use crate::engine::Picos;

/// The flows of one stage of a job, which has its result when the last of them ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Coflow {
    /// The number that the trace or the caller gives it. It decides ties.
    pub id: u64,
    /// The weight of its completion time, in any unit.
    pub weight: u64,
    /// The time at which it arrives and its flows are known.
    pub release: Picos,
    /// The number of its sources or of its destinations, whichever is smaller.
    pub width: usize,
    /// The flows. Several may have the same ends.
    pub flows: Vec<Flow>,
}

impl Coflow {
    /// Creates a coflow with weight 1 that is as wide as its flows are.
    #[must_use]
    pub fn new(id: u64, release: Picos, flows: Vec<Flow>) -> Self {
        let distinct = |end: fn(&Flow) -> usize| flows.iter().map(end).collect::<BTreeSet<_>>();
        let width = distinct(|it| it.source).len().min(distinct(|it| it.destination).len());
        Self { id, weight: 1, release, width, flows }
    }
}

/// Data to be sent from an ingress port to an egress port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flow {
    /// The ingress port.
    pub source: usize,
    /// The egress port.
    pub destination: usize,
    /// The size in bytes.
    pub bytes: u64,
}

/// One big switch: flows contend only for the ports at which they enter and leave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fabric {
    ingress_bps: Vec<u64>,
    egress_bps: Vec<u64>,
}

impl Fabric {
    /// Creates a fabric from the rates of its ports, in bits per second.
    pub fn new(ingress_bps: Vec<u64>, egress_bps: Vec<u64>) -> Result<Self, WorkloadError> {
        for (side, rates) in [(Side::Ingress, &ingress_bps), (Side::Egress, &egress_bps)] {
            if let Some(port) = rates.iter().position(|&rate| rate == 0) {
                return Err(WorkloadError::NoRate { side, port });
            }
        }
        Ok(Self { ingress_bps, egress_bps })
    }

    /// Creates a fabric of as many ingress as egress ports that all have one rate.
    pub fn uniform(ports: usize, rate_bps: u64) -> Result<Self, WorkloadError> {
        Self::new(vec![rate_bps; ports], vec![rate_bps; ports])
    }

    /// Returns the rates of the ingress ports, in bits per second.
    #[must_use]
    pub fn ingress_bps(&self) -> &[u64] {
        &self.ingress_bps
    }

    /// Returns the rates of the egress ports, in bits per second.
    #[must_use]
    pub fn egress_bps(&self) -> &[u64] {
        &self.egress_bps
    }

    /// Returns the rates of all ports: those of the ingress ports, then those of the egress ports.
    #[must_use]
    pub fn rates_bps(&self) -> Vec<u64> {
        [self.ingress_bps.as_slice(), &self.egress_bps].concat()
    }

    /// Returns the bytes that `flows` put on each port, in the order of [`Self::rates_bps`].
    pub(super) fn demands(&self, flows: impl IntoIterator<Item = Flow>) -> Vec<u64> {
        let mut demands = vec![0; self.ingress_bps.len() + self.egress_bps.len()];
        for flow in flows {
            demands[flow.source] += flow.bytes;
            demands[self.ingress_bps.len() + flow.destination] += flow.bytes;
        }
        demands
    }

    /// Returns the longest time that one port needs for `demands`, in units of 8 seconds.
    pub(super) fn bottleneck(&self, demands: &[u64]) -> Ratio {
        let rates = self.ingress_bps.iter().chain(&self.egress_bps);
        let takes = demands.iter().zip(rates).map(|(&bytes, &rate)| Ratio::new(bytes.into(), rate));
        takes.max().unwrap_or(Ratio::new(0, 1))
    }
}

/// Coflows on a fabric, checked: each flow has its ports, ids are unique, and sums do not overflow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workload {
    fabric: Fabric,
    coflows: Vec<Coflow>,
}

impl Workload {
    /// Checks `coflows` against `fabric`.
    pub fn new(fabric: Fabric, coflows: Vec<Coflow>) -> Result<Self, WorkloadError> {
        let mut ids = BTreeSet::new();
        let mut total_bytes = 0u64;
        for coflow in &coflows {
            if !ids.insert(coflow.id) {
                return Err(WorkloadError::RepeatedId { id: coflow.id });
            }
            for flow in &coflow.flows {
                let ends = [
                    (Side::Ingress, flow.source, fabric.ingress_bps.len()),
                    (Side::Egress, flow.destination, fabric.egress_bps.len()),
                ];
                for (side, port, ports) in ends {
                    if port >= ports {
                        return Err(WorkloadError::NoPort { id: coflow.id, side, port, ports });
                    }
                }
                total_bytes = total_bytes.checked_add(flow.bytes).ok_or(WorkloadError::TooMuch)?;
            }
        }
        Ok(Self { fabric, coflows })
    }

    /// Returns the fabric.
    #[must_use]
    pub const fn fabric(&self) -> &Fabric {
        &self.fabric
    }

    /// Returns the coflows.
    #[must_use]
    pub fn coflows(&self) -> &[Coflow] {
        &self.coflows
    }

    /// Returns the time that each coflow would take alone, which no schedule beats: the oracle's
    /// time, that of its busiest port. Rounded up to whole picoseconds.
    #[must_use]
    pub fn oracle_ps(&self) -> Vec<u128> {
        self.coflows.iter().map(|it| self.busiest_port_ps(std::slice::from_ref(it))).collect()
    }

    /// Returns the time that the busiest port needs for all coflows together. No schedule ends all
    /// of them sooner.
    #[must_use]
    pub fn busiest_ps(&self) -> u128 {
        self.busiest_port_ps(&self.coflows)
    }

    fn busiest_port_ps(&self, coflows: &[Coflow]) -> u128 {
        let flows = coflows.iter().flat_map(|it| it.flows.iter().copied());
        let demands = self.fabric.demands(flows);
        let rates = self.fabric.ingress_bps.iter().chain(&self.fabric.egress_bps);
        let takes = demands
            .iter()
            .zip(rates)
            .map(|(&bytes, &rate)| Ratio::new(u128::from(bytes) * WORK_PER_BYTE, rate).ceil());
        takes.max().unwrap_or(0)
    }
}

/// The side of the fabric that a port is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Flows enter the fabric.
    Ingress,
    /// Flows leave the fabric.
    Egress,
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        })
    }
}

/// A reason why coflows do not fit a fabric.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WorkloadError {
    /// A port has a rate of zero.
    #[error("{side} port {port} has rate 0; give every port a rate of at least 1 bit/s")]
    NoRate {
        /// The side of the port.
        side: Side,
        /// The port.
        port: usize,
    },
    /// A flow uses a port that the fabric lacks.
    #[error("coflow {id} uses {side} port {port}, but the fabric has {ports}, numbered from 0")]
    NoPort {
        /// The coflow.
        id: u64,
        /// The side of the port.
        side: Side,
        /// The port.
        port: usize,
        /// The number of ports on that side.
        ports: usize,
    },
    /// Two coflows have one id.
    #[error("two coflows have id {id}; ids must be unique")]
    RepeatedId {
        /// The id.
        id: u64,
    },
    /// The sizes of all flows together do not fit in 64 bits.
    #[error("the flows have 2^64 bytes or more together; split the workload")]
    TooMuch,
}

/// The units of work in a byte. A unit is what one bit per second moves in a picosecond, so work
/// divided by a rate in bits per second is a time in picoseconds.
pub(super) const WORK_PER_BYTE: u128 = 8 * 1_000_000_000_000;
