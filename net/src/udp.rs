//! The data path's sockets: batches of datagrams in and out, a system call for many.
//!
//! [`UdpSocket`] is opened from a [`UdpConfig`]. Out go [`Transmit`]s through a [`SendRing`], each
//! up to 64 equal datagrams that the kernel cuts from one buffer (GSO). In come messages through a
//! [`RecvRing`] into the caller's buffers, each of them again many datagrams that the kernel joined
//! (GRO). The rings own what the system calls point at, so no call allocates. Nothing here blocks
//! but [`wait()`] and its kin, and a [`Waker`] ends those from another thread.

mod buffers;
mod cmsg;
mod filter;
mod full;
mod gather;
mod gso_batch;
mod recv;
mod send;
mod socket;
mod wait;

pub use buffers::BufferReport;
pub use gather::Gather;
pub use gso_batch::GsoBatch;
pub use recv::{Received, RecvRing};
pub use send::{SendError, SendOutcome, SendRing, Transmit};
pub use socket::{UdpConfig, UdpSocket};
pub use wait::{MAX_FDS, Waker, wait, wait_writable};

pub use crate::interface::MAX_DATAGRAM;

/// How many datagrams the kernel cuts from one message; newer kernels would do more.
pub const MAX_SEGMENTS: usize = 64;

/// How many messages go out with one system call.
pub const SEND_BATCH: usize = 32;

/// How many messages come in with one system call at most.
pub const RECV_BATCH: usize = 8;

/// The spare room a receive buffer should have: more than the kernel ever joins to one message.
pub const RECV_CAPACITY: usize = 65_536;

/// The ECN bits of a sender that understands marking instead of dropping (RFC 3168: ECT(0)).
pub const ECT0: u8 = 0b10;

/// The ECN bits of a datagram that met a queue (RFC 3168: CE).
pub const CE: u8 = 0b11;

/// The TOS byte that a job of several lanes marks a lane with; none in a job of one, which asks
/// for no priority and gets none.
///
/// Lanes 0 to 3 are AF41, AF31, AF21 and AF11 (RFC 2597), by falling priority; the others are best
/// effort.
#[must_use]
pub const fn tos_of_lane(lane: u8, lanes: u8) -> Option<u8> {
    match lane {
        _ if lanes < 2 => None,
        0..4 => Some(tos_of_dscp(AF11 + 8 * (3 - lane))),
        _ => Some(tos_of_dscp(0)),
    }
}

/// The DSCP of assured forwarding's lowest class; the others follow 8 apart.
const AF11: u8 = 10;

/// The TOS byte for a DSCP (0..=63), marked ECT(0).
#[must_use]
pub const fn tos_of_dscp(dscp: u8) -> u8 {
    (dscp << 2) | ECT0
}

#[cfg(test)]
mod tests;
