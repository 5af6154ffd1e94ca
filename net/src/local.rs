//! Communication between processes of one host: messages with descriptors, and shared memory.

mod call_error;
mod limits;
mod line;
mod listener;
mod memory;
mod name;
mod sealed;
mod systemd;
#[cfg(test)]
mod tests;
mod trust;

pub use call_error::CallError;
pub use limits::{fail_at_file_limit, is_known_user, own_user, raise_open_files};
pub use line::{Line, LineError, Peer, call_for_stream};
pub use listener::Listener;
pub use memory::SharedMemory;
pub use name::{Name, listen_for_streams, remove_dead};
pub use sealed::Sealed;
pub use systemd::{listener_of_systemd, notify_systemd};
