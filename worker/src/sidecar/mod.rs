//! A sidecar sums the tensors of a host's ranks in shared memory.
//!
//! Ranks connect to its unix socket and pass it the file descriptors of memory that they lend. An
//! op names a place in this memory. Once all ranks of the host have called an op, threads of the
//! sidecar fold the tensors in rank order, chunk by chunk, and overwrite each tensor with the sum.
//! A rank copies its operand only if the operand lies in private memory. If ranks pass lists of
//! blocks, the threads fold only the blocks in the union of the lists. Ranks receive these sums in
//! a sealed file, because the size of the union is not known in advance.
//!
//! A rank may change its lent memory at any time, which can harm only its own job. The sidecar
//! copies the indices of a list out of that memory once, and checks the copy.

mod budget;
mod caller_limit;
mod calls;
mod chunks;
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
