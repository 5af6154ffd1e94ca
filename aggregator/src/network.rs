//! The network of an address, which limits on callers count by.

use std::net::{IpAddr, Ipv6Addr};

/// Returns the address that limits apply to: for IPv6 the /64, since a host has all of it.
pub(crate) fn network(addr: IpAddr) -> IpAddr {
    match addr.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64).into(),
        v4 => v4,
    }
}
