//! Processes of one host: messages that carry descriptors, and memory that is shared.

mod line;
mod memory;
#[cfg(test)]
mod tests;

pub use line::{Line, LineError, Listener, Peer};
pub use memory::SharedMemory;
