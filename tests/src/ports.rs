//! Ports that a test can bind more than once. The CLI's tests (`cli/tests/cli`) include this file
//! too.

use std::net::{Ipv4Addr, UdpSocket};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

/// First port of the range. The range lies below the ephemeral ports, so that the system assigns
/// none of its ports while a server restarts.
const FIRST: u32 = 12_000;
const BLOCKS: u32 = 2_500;
/// Number of ports of one server: one for its control plane, and the next ones for its shards.
const BLOCK: u16 = 8;

/// Reserves [`BLOCK`] consecutive free ports, which no other test of this process gets, and returns
/// the first.
pub(crate) fn own_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Tests in several processes start at different blocks.
    let first = std::process::id() % BLOCKS * 31;
    let is_free = |port: &u16| {
        let bind = |port| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port));
        (*port..port + BLOCK).all(|port| bind(port).is_ok())
    };
    (0..BLOCKS)
        .map(|_| (first + NEXT.fetch_add(1, Relaxed)) % BLOCKS * u32::from(BLOCK) + FIRST)
        .filter_map(|port| u16::try_from(port).ok())
        .find(is_free)
        .expect("the range has no block of free ports")
}
