//! A discrete-event simulator that runs the protocol's own code, packet by packet.
//!
//! A [`plan::Plan`] says what a run is made of; [`cluster::Cluster`] runs it on links with rates
//! and queues, among [`fault`]s; the [`check`]ers judge what they see of it; and [`swarm`] draws
//! a plan from every seed. [`node`] wraps the two state machines of `racksum-proto` with tensors
//! and slots, as the real drivers do, but with the scalar reference arithmetic. There is no second
//! implementation of the protocol here, no clock and no randomness but a seed.

pub mod check;
pub mod cluster;
pub mod engine;
pub mod fault;
pub mod host;
pub mod inputs;
pub mod link;
pub mod node;
pub mod plan;
pub mod random;
pub mod relay;
pub mod run;
pub mod swarm;

#[cfg(test)]
mod pair;
#[cfg(test)]
mod tests;
