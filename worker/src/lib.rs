//! The worker: what a training process holds to sum its gradients with those of other ranks.
//!
//! [`Client`] joins a job at an aggregator and reduces tensors: [`Client::allreduce`] in place,
//! [`Client::submit`] for several at a time, and for tensors of which only some blocks exist.
//! Tensors are scanned, encoded and sent window by window as credit allows, never copied whole. The
//! decisions are `racksum-proto`'s, the packets `racksum-net`'s.

mod blocks;
mod client;
mod control;
mod engine;
mod error;
mod exponents;
mod fault;
mod grant;
mod join;
mod lookout;
mod operand;
mod options;
mod payload;
mod proof;
mod route;
mod scan;
mod search;
pub mod sidecar;
mod supervisor;
pub mod tensor;

pub use blocks::Blocks;
pub use client::{Client, Connecting, GiveUp, Handle, Reduced};
pub use control::Awaited;
pub use engine::Stats;
pub use error::{ConnectError, Error};
pub use fault::Faults;
pub use operand::Operand;
pub use options::{ConnectOptions, aggregator_sets};
pub use route::{addresses, check_address, check_sidecar};
pub use scan::scan;
pub use tensor::Region;
