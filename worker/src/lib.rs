//! The worker: the part of a training process that sums its gradients with those of other ranks.
//!
//! [`Client`] joins a job at an aggregator and reduces tensors. [`Client::allreduce`] reduces one
//! tensor in place. [`Client::submit`] starts an op without waiting for its result, and also takes
//! lists of blocks. Over UDP, the worker scans, encodes and sends a tensor window by window as
//! credit allows, and never copies it whole. With a sidecar, the tensor goes through shared memory.
//! `racksum-proto` makes the decisions; `racksum-net` sends and receives the packets.

mod aggregator_selector;
mod blocks;
mod client;
mod control;
mod driver;
mod engine;
mod error;
mod exponents;
mod fault;
mod grant;
mod join;
mod join_message;
mod operand;
mod options;
mod payload;
mod peer_poll;
mod proof;
mod route;
mod scan;
pub mod sidecar;
mod span;
mod supervisor;
pub mod tensor;
mod transport;
mod trial;
mod udp_transport;

pub use blocks::Blocks;
pub use client::{Client, Connecting, Handle};
pub use control::{Awaited, CancelHandle};
pub use error::{ConnectError, Error};
pub use fault::Faults;
pub use operand::Operand;
pub use options::{ConnectOptions, aggregator_sets};
pub use racksum_proto::stats::{SidecarStats, Stats};
pub use route::{addresses, check_address};

pub use scan::scan;
pub use sidecar::check_sidecar;
pub use tensor::Region;
pub use transport::{Grant, LentMemory, Reduced, StatsQuery};
