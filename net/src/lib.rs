//! System calls for packets: all of racksum's access to the kernel's network stack.
//!
//! This crate covers batched UDP with GSO and GRO, multicast, socket buffer sizes, the host's
//! interfaces, QUIC endpoints with their TLS identities, and the clock. The protocol rules are in
//! `racksum-proto`, and callers own the event loops.
//!
//! [`local`] connects processes of one host and shares memory between them.
//!
//! Start with [`udp::UdpSocket`] for the data path and [`quic::connect`] for the control path. The
//! crate is for Linux only: the data path needs `sendmmsg`, `UDP_SEGMENT`, `UDP_GRO` and
//! `SO_RXQ_OVFL`.
#![deny(unsafe_op_in_unsafe_fn)]

mod alive;
pub mod aside;
pub mod auth;
pub mod clock;
mod error;
pub mod file;
pub mod interface;
pub mod local;
pub mod log_limit;
pub mod multicast;
mod options;
pub mod quic;
pub mod resolve;
pub mod runtime;
pub mod udp;

pub use error::{FileKind, NetError, with_limit};
