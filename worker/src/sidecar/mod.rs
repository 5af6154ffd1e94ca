//! A sidecar: the ranks of a host hand it their tensors in shared memory, and it sums them there.
//!
//! Ranks call it at a unix socket, and pass it the descriptors of memory that they have; an op
//! names a place in it. Once all ranks of the host have called an op, threads of the sidecar fold
//! the tensors in rank order, chunk by chunk, and write the sum over each. Nothing is copied but by
//! ranks whose tensors lie in memory of their own. Of lists of blocks they fold the union, which
//! ranks get in a sealed file, since nobody knows before how large it is.
//!
//! A rank may do anything to the memory that it has lent, at any time: only the values of its job's
//! sums depend on that. Whatever is used as a place or a length is read once, and checked then.

mod budget;
mod calls;
mod chunks;
mod client;
mod door;
mod error_map;
mod fold;
mod fold_error;
mod job;
mod lent;
mod lives;
mod member;
mod message;
mod preflight;
mod queue;
mod rank_session;
mod server;
mod status;
mod sums;
#[cfg(test)]
mod tests;
mod thread;
mod upstream;

pub use client::{Asked, Client, Handle, Traffic};
pub use lent::Lent;
pub use preflight::check_sidecar;
pub use server::{Limits, Sidecar};
pub use status::{AskError, ask};
