//! The sans-IO protocol of racksum: the wire layout, windows and masks, and the state machines of
//! both sides of the sliding-window sum.
//!
//! This crate owns no sockets, clocks, threads or random numbers. Time and packets come in as
//! arguments, and the driver polls for packets to send. Production, tests and the simulator
//! therefore run the same code (invariant I8).
//!
//! Start with [`descriptor::Descriptor`], which defines an op, and [`geometry::Geometry`], which
//! cuts an op into blocks, windows and fragments. Then read the two sides: [`worker::Worker`] and
//! [`aggregator::Aggregation`].
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod aggregator;
pub mod arith;
pub mod auth;
mod busy;
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
pub mod move_target;
pub mod names;
pub mod observer;
pub mod path;
pub mod peer_text;
pub mod rank_list;
mod recovery;
pub mod reject;
pub mod rtt;
pub mod schedule;
mod sequence;
pub mod stats;
pub mod status;
pub mod time;
pub mod verdict;
mod waited;
pub mod wire;
pub mod worker;
