//! The network of an address. Limits on callers apply to a network as a whole.

use std::net::{IpAddr, Ipv6Addr};

/// Returns the address under which callers are counted: an IPv4 address itself, or the first
/// address of an IPv6 address's /64, since one host may own a whole /64.
pub(crate) fn network(addr: IpAddr) -> IpAddr {
    match addr.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64).into(),
        v4 => v4,
    }
}
