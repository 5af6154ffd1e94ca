//! A sidecar sums the tensors of a host's ranks in shared memory.
//!
//! Ranks connect to its unix socket and pass it the descriptors of memory that they lend. An op
//! names a place in this memory. Once all ranks of the host have called an op, threads of the
//! sidecar fold the tensors in rank order, chunk by chunk. They overwrite each tensor with the sum.
//! Only ranks whose tensors lie in private memory copy data. For lists of blocks, the threads fold
//! the union. Ranks receive the union in a sealed file, because its size is not known in advance.
//!
//! A rank may change the memory that it has lent at any time, which affects only the values of its
//! own job's sums. The sidecar reads each offset and length in that memory once, and then checks
//! it.

mod budget;
mod calls;
mod chunks;
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
pub(crate) mod unix_transport;
mod upstream;

pub use preflight::check_sidecar;
pub use server::{Limits, Sidecar};
pub use status::{AskError, ask};
pub(crate) use unix_transport::{SIDECAR_TIMEOUT, unanswered};
