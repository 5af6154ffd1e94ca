//! The network of an address, by which limits on callers count.

use std::net::{IpAddr, Ipv6Addr};

/// Returns the address that limits apply to. For IPv6 it is the /64, since a host owns a whole /64.
pub(crate) fn network(addr: IpAddr) -> IpAddr {
    match addr.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64).into(),
        v4 => v4,
    }
}
