//! Processes of one host: messages that carry descriptors, and memory that is shared.

mod line;
mod memory;
mod systemd;
#[cfg(test)]
mod tests;

pub use line::{Line, LineError, Listener, Peer};
pub use memory::SharedMemory;
pub use systemd::{listener_of_systemd, tell_systemd};
