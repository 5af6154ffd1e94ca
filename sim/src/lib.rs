//! A discrete-event simulator that runs the protocol's own code, packet by packet.
//!
//! A [`plan::Plan`] describes a run. A [`cluster::Cluster`] simulates the run on links with finite
//! rates and queues, and injects faults according to the rules in [`fault`]. The checkers in
//! [`check`] verify the run. [`swarm`] draws a plan from each seed.
//!
//! [`workload`] holds the work of training jobs: layer profiles, arrivals, traces and placements.
//!
//! [`node`] wraps the two state machines of `racksum-proto` with tensors and slots, as the real
//! drivers do, but with the scalar reference arithmetic. The simulator has no protocol
//! implementation of its own, reads no clock, and takes all randomness from a seed.
//!
//! [`coflow`] stands apart: it orders jobs that share links, and simulates fluids, not packets.

pub mod check;
pub mod child;
pub mod cluster;
pub mod coflow;
pub mod engine;
pub mod fabric;
pub mod fault;
pub mod host;
pub mod inputs;
pub mod link;
pub mod node;
pub mod plan;
pub mod random;
pub mod results;
pub mod run;
pub mod scenario;
pub mod schedules;
pub mod swarm;
mod text;
pub mod training;
pub mod transport;
pub mod workload;

#[cfg(test)]
mod pair;
#[cfg(test)]
mod tests;
