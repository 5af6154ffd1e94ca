//! UDP sockets of the data path, which send and receive batches of datagrams with few system calls.
//!
//! [`UdpSocket`] is opened from a [`UdpConfig`]. A [`SendRing`] sends [`Transmit`]s, each of up to
//! 64 datagrams that the kernel cuts from one buffer (GSO). A [`RecvRing`] receives messages into
//! the caller's buffers. A message of a socket is not a message of the protocol: it may hold
//! several datagrams that the kernel joined (GRO). The rings own the storage of the system calls,
//! so no call allocates. Only [`wait()`], [`wait_writable`], [`Gather::pause`] and
//! [`UdpSocket::send_patiently`] block. A [`Waker`] ends a wait or a pause from another thread.

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
pub use send::{SendError, SendOutcome, SendRing, Tail, Transmit};
pub use socket::{UdpConfig, UdpSocket};
pub use wait::{MAX_FDS, Waker, wait, wait_writable};

pub use crate::interface::MAX_DATAGRAM;

/// Limit on the datagrams that the kernel cuts from one message. Newer kernels allow more.
pub const MAX_SEGMENTS: usize = 64;

/// Limit on the messages that one system call sends.
pub const SEND_BATCH: usize = 32;

/// Limit on the messages that one system call receives.
pub const RECV_BATCH: usize = 8;

/// Recommended spare capacity of a receive buffer, in bytes: more than the kernel ever joins into
/// one message.
pub const RECV_CAPACITY: usize = 65_536;

/// ECN bits of a sender that supports marking instead of dropping (RFC 3168: ECT(0)).
pub const ECT0: u8 = 0b10;

/// ECN bits of a datagram that met congestion in a queue (RFC 3168: CE).
pub const CE: u8 = 0b11;

/// Returns the TOS byte for a lane of a job with several lanes. Returns `None` for a job with one
/// lane, which needs no priority.
///
/// Lanes 0 to 3 get AF41, AF31, AF21 and AF11 (RFC 2597), in order of decreasing priority; all
/// other lanes are best effort.
#[must_use]
pub const fn tos_of_lane(lane: u8, lanes: u8) -> Option<u8> {
    match lane {
        _ if lanes < 2 => None,
        0..4 => Some(tos_of_dscp(AF11 + 8 * (3 - lane))),
        _ => Some(tos_of_dscp(0)),
    }
}

/// DSCP of AF11, the lowest class of assured forwarding. Each higher class adds 8 to the DSCP.
const AF11: u8 = 10;

/// Returns the TOS byte for a DSCP (0..=63), marked ECT(0).
#[must_use]
pub const fn tos_of_dscp(dscp: u8) -> u8 {
    (dscp << 2) | ECT0
}

#[cfg(test)]
mod tests;
