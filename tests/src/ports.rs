//! Ports that a test may serve at more than once. The tests of the program share this file.

use std::net::{Ipv4Addr, UdpSocket};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

/// Below what systems give to those that ask for any port, so that nobody is given one of these
/// while its server is being replaced.
const FIRST: u32 = 12_000;
const BLOCKS: u32 = 2_500;
/// The port of a control plane, and those of its shards behind it.
const BLOCK: u16 = 8;

/// The first of some ports that nobody else uses.
pub(crate) fn own_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Tests that run at one time in several processes begin at several blocks.
    let first = std::process::id() % BLOCKS * 31;
    let is_free = |port: &u16| {
        let bind = |port| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port));
        (*port..port + BLOCK).all(|port| bind(port).is_ok())
    };
    (0..BLOCKS)
        .map(|_| (first + NEXT.fetch_add(1, Relaxed)) % BLOCKS * u32::from(BLOCK) + FIRST)
        .filter_map(|port| u16::try_from(port).ok())
        .find(is_free)
        .expect("no ports are free")
}
