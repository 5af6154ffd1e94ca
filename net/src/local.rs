//! Processes of one host: messages that carry descriptors, and memory that is shared.

mod line;
mod memory;
mod sealed;
mod systemd;
#[cfg(test)]
mod tests;

pub use line::{Line, LineError, Listener, Peer};
pub use memory::SharedMemory;
pub use sealed::Sealed;
pub use systemd::{listener_of_systemd, tell_systemd};
