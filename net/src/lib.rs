//! The packet syscalls and the clock: everything by which racksum touches the kernel's network.
//!
//! Here are UDP batches with GSO and GRO, multicast, socket sizing, the interfaces of the host,
//! QUIC endpoints with their TLS identities, and the one clock of the project. Not here: any rule
//! of the protocol (that is `racksum-proto`) and any thread; callers own the loops.
//!
//! [`local`] is how processes of one host talk, and share memory.
//!
//! Read [`udp::UdpSocket`] for the data path and [`quic::connect`] for the control path. Linux
//! only: the data path lives on `sendmmsg`, `UDP_SEGMENT`, `UDP_GRO` and `SO_RXQ_OVFL`.
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
