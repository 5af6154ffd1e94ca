//! A sidecar: the ranks of a host hand it their tensors in shared memory, and it sums them there.
//!
//! Ranks call it at a unix socket, and pass it the descriptors of memory that they have; an op
//! names a place in it. Once all ranks of the host have called an op, threads of the sidecar fold
//! the tensors in rank order, chunk by chunk, and write the sum over each. Nothing is copied but by
//! ranks whose tensors lie in memory of their own.

mod client;
mod fold;
mod job;
mod lent;
mod message;
mod queue;
mod server;
#[cfg(test)]
mod tests;
mod upstream;

pub use client::{Client, Handle};
pub use lent::Lent;
pub use server::Sidecar;
