//! The protocol of racksum, sans-IO: wire layout, windows and masks, and both halves of the
//! sliding-window sum as state machines.
//!
//! Nothing here owns a socket, a clock, a thread or randomness: time and packets come in as
//! arguments, and what is to be sent is polled out. Production, tests and the simulator
//! therefore run the same code (invariant I8).
//!
//! Read [`descriptor::Descriptor`] for what an op is, [`geometry::Geometry`] for how it is cut
//! into blocks, windows and fragments, then [`worker::Worker`] and [`aggregator::Aggregation`]
//! for the two halves.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod aggregator;
pub mod arith;
pub mod auth;
pub mod call;
pub mod congestion;
pub mod control;
pub mod counted;
mod density;
pub mod descriptor;
pub mod dtype;
pub mod error;
pub mod fold;
pub mod geometry;
pub mod identity_name;
pub mod ids;
pub mod job_name;
pub mod lives;
pub mod loss;
pub mod names;
pub mod observer;
pub mod path;
pub mod peer_text;
mod recovery;
pub mod reject;
pub mod rtt;
mod sequence;
pub mod status;
pub mod time;
mod waited;
pub mod wire;
pub mod worker;
