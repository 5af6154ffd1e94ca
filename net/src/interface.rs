//! Network interfaces of this host: their properties, and the choice of which to use.

use std::borrow::Cow;
use std::io::{self, ErrorKind::PermissionDenied};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use rustix::net::sockopt::{ip_mtu, ipv6_mtu};

use crate::NetError;

/// The largest UDP payload over IPv4: 65,535 bytes minus the IP header and the UDP header.
pub const MAX_DATAGRAM: usize = 65_507;

mod list;

pub use list::interfaces;

/// Network interface of this host, with its properties at the time it was listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// The name, as `ip link` shows it.
    pub name: String,
    /// The index in the kernel. Sockets use the index because names can change.
    pub index: u32,
    /// The largest IP packet that the interface carries, in bytes.
    pub mtu: usize,
    /// The addresses, in the kernel's order.
    pub addrs: Vec<IpAddr>,
    /// Whether the interface is up.
    pub is_up: bool,
    /// Whether this is a loopback interface.
    pub is_loopback: bool,
    /// Whether the interface reports multicast support. Loopback does not, yet it carries IPv4
    /// multicast.
    pub is_multicast: bool,
}

impl Interface {
    /// Checks whether the interface is up and has an address.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.is_up && !self.addrs.is_empty()
    }

    /// Checks whether the interface carries multicast. On Linux, loopback carries IPv4 multicast
    /// without reporting it, and does not carry IPv6 multicast.
    #[must_use]
    pub const fn carries_multicast(&self, ipv6: bool) -> bool {
        self.is_multicast || (self.is_loopback && !ipv6)
    }
}

/// Returns the interface that owns the local address `ip`; `None` if the host has no such address,
/// or if its interfaces cannot be listed.
#[must_use]
pub fn interface_of(ip: IpAddr) -> Option<Interface> {
    let all = interfaces().ok()?;
    let owns = |interface: &Interface| interface.addrs.contains(&ip);
    // Loopback owns all of 127.0.0.0/8, although only 127.0.0.1 is listed.
    let holds = |interface: &Interface| interface.is_loopback && ip.is_loopback();
    all.iter().find(|i| owns(i)).or_else(|| all.iter().find(|i| holds(i))).cloned()
}

/// Returns the local address from which the kernel would send packets to `peer`. Sends nothing.
///
/// # Errors
///
/// The kernel's error if there is no route to `peer`.
pub fn local_addr_towards(peer: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr = match peer {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    Ok(socket_towards(any, peer)?.local_addr()?.ip())
}

/// Returns the size in bytes of the largest IP packet that the kernel expects to reach `peer` from
/// the address `from`. The kernel learns the size from its routes, and from routers that report
/// dropped packets. Sends nothing.
///
/// # Errors
///
/// The kernel's error if there is no route to `peer`.
pub fn path_mtu(from: IpAddr, peer: SocketAddr) -> io::Result<usize> {
    let socket = socket_towards(from, peer)?;
    let mtu = if peer.is_ipv6() { ipv6_mtu(&socket)? } else { ip_mtu(&socket)? };
    Ok(mtu as usize)
}

/// Checks whether packets from the local address `from` can reach `peer` at all. Packets from a
/// loopback address cannot leave this host. Sends nothing.
#[must_use]
pub fn leads_to(from: IpAddr, peer: SocketAddr) -> bool {
    let invalid = |error: io::Error| error.kind() == io::ErrorKind::InvalidInput;
    // If `from` cannot be bound, return true: the caller's later bind reports the error.
    !UdpSocket::bind((from, 0)).is_ok_and(|socket| socket.connect(peer).is_err_and(invalid))
}

/// Returns the reason why an address cannot belong to a host, as a relative clause for a message;
/// `None` if it can. No process can serve at such an address or connect to it. Sends nothing.
#[must_use]
pub fn no_host(ip: IpAddr) -> Option<Cow<'static, str>> {
    // IPv6 sockets of this crate are IPv6-only, so IPv4-mapped addresses do not work with them.
    if let IpAddr::V6(ip) = ip
        && let Some(mapped) = ip.to_ipv4_mapped()
    {
        return Some(format!("which is an IPv4-mapped address (write {mapped})").into());
    }
    let why = match ip {
        ip if ip.is_unspecified() => Some("which is not a host's address"),
        ip if ip.is_multicast() => Some("which is a multicast group, not a host's address"),
        IpAddr::V4(ip) if is_broadcast(ip).unwrap_or(false) => {
            Some("which is a broadcast address, not a host's")
        }
        _ => None,
    };
    why.map(Cow::Borrowed)
}

/// Checks whether an address is a broadcast address. Only the kernel knows the broadcast addresses
/// of its networks. It lets a socket connect to one only if the socket has `SO_BROADCAST`.
fn is_broadcast(ip: Ipv4Addr) -> io::Result<bool> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    let forbidden = socket.connect((ip, 9)).is_err_and(|error| error.kind() == PermissionDenied);
    socket.set_broadcast(true)?;
    // A route can also forbid an address, but then the kernel refuses it even with `SO_BROADCAST`.
    Ok(forbidden && socket.connect((ip, 9)).is_ok())
}

fn socket_towards(from: IpAddr, peer: SocketAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind((from, 0))?;
    socket.connect(peer)?;
    Ok(socket)
}

/// Returns the largest UDP payload that one IP packet of `mtu` bytes carries, at most
/// [`MAX_DATAGRAM`].
///
/// # Errors
///
/// [`NetError::MtuTooSmall`] if `mtu` is below 1280, the minimum MTU of IPv6. The limit ensures
/// that a window fits into 64 fragments.
pub fn max_datagram(mtu: usize, ipv6: bool) -> Result<usize, NetError> {
    if mtu < MIN_MTU {
        return Err(NetError::MtuTooSmall { mtu });
    }
    let headers = if ipv6 { IPV6_HEADER + UDP_HEADER } else { IPV4_HEADER + UDP_HEADER };
    Ok((mtu - headers).min(MAX_DATAGRAM))
}

/// Returns the usable interfaces that match `pattern`, in the order of `all`.
///
/// The grammar is that of `NCCL_SOCKET_IFNAME`, so one setting serves both NCCL and racksum. A
/// pattern holds comma-separated prefixes (`eth,ens`) or exact names (`=eth0,eth1`), or excludes
/// either (`^docker,lo`, `^=docker0`). A blank pattern selects the same interfaces as NCCL's
/// default: all but Docker's bridges and loopback. If no other interface is usable, a blank pattern
/// selects all usable interfaces.
///
/// # Errors
///
/// [`NetError::NoInterface`] if no usable interface matches, [`NetError::EmptyPattern`] if the
/// pattern names nothing.
pub fn select<'a>(all: &'a [Interface], pattern: &str) -> Result<Vec<&'a Interface>, NetError> {
    let usable: Vec<&Interface> = all.iter().filter(|interface| interface.is_usable()).collect();
    let fitting = |pattern: &Pattern<'_>| -> Vec<&'a Interface> {
        usable.iter().copied().filter(|interface| pattern.fits(&interface.name)).collect()
    };
    let chosen = if pattern.trim().is_empty() {
        let preferred = fitting(&Pattern { exclude: true, exact: false, names: UNASKED.to_vec() });
        if preferred.is_empty() { usable.clone() } else { preferred }
    } else {
        fitting(&Pattern::parse(pattern)?)
    };
    if chosen.is_empty() {
        let names: Vec<&str> = usable.iter().map(|interface| interface.name.as_str()).collect();
        let usable = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        return Err(NetError::NoInterface { pattern: pattern.to_owned(), usable });
    }
    Ok(chosen)
}

/// A parsed interface pattern.
struct Pattern<'a> {
    exclude: bool,
    exact: bool,
    names: Vec<&'a str>,
}

impl<'a> Pattern<'a> {
    fn parse(text: &'a str) -> Result<Self, NetError> {
        let rest = text.trim();
        let (exclude, rest) = strip(rest, '^');
        let (exact, rest) = strip(rest, '=');
        let names: Vec<&str> =
            rest.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
        if names.is_empty() {
            return Err(NetError::EmptyPattern { pattern: text.to_owned() });
        }
        Ok(Self { exclude, exact, names })
    }

    fn fits(&self, name: &str) -> bool {
        let named = self
            .names
            .iter()
            .any(|wanted| if self.exact { name == *wanted } else { name.starts_with(wanted) });
        named != self.exclude
    }
}

/// Checks whether `text` starts with `mark`, and returns the text without it.
fn strip(text: &str, mark: char) -> (bool, &str) {
    text.strip_prefix(mark).map_or((false, text), |rest| (true, rest))
}

/// Name prefixes of the interfaces that a blank pattern excludes.
const UNASKED: [&str; 2] = ["docker", "lo"];
/// The smallest MTU that IPv6 permits for a link, and the smallest that this protocol supports.
pub const MIN_MTU: usize = 1280;
/// The largest MTU that racksum supports, which is the MTU of loopback.
pub const MAX_MTU: usize = 65_536;
const IPV4_HEADER: usize = 20;
const IPV6_HEADER: usize = 40;
const UDP_HEADER: usize = 8;

#[cfg(test)]
mod tests;
