//! The probe measures the paths between the hosts of a cluster: loss, round-trip time and
//! throughput.
//!
//! An [`Agent`] runs on each host. A coordinator, [`measure`], connects to all agents, orders pairs
//! of them to send each other pings and trains of datagrams, and turns the results into a
//! [`Network`](racksum_placer::network::Network) for the placer.
//!
//! Orders travel over QUIC with the identities of the cluster. The datagrams of each measurement
//! carry tags of a key that only its two agents and the coordinator know. An agent echoes a ping
//! with an equally long datagram, and sends a train only to an agent that has echoed a ping.
#![forbid(unsafe_code)]

mod agent;
mod coordinator;
mod data;
mod datagram;
mod flow;
mod message;
mod node;
mod outcome;
mod path;
mod survey;
#[cfg(test)]
mod tests;

pub use agent::Agent;
pub use coordinator::measure;
pub use outcome::{MeasureError, Options, Outcome, Usage, WrongLabel};

/// UDP port of an agent's control server. The data socket uses the next one.
pub const PORT: u16 = 7187;
