//! The network interfaces of this host: what they are, and which to use.

use std::borrow::Cow;
use std::io::{self, ErrorKind::PermissionDenied};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use rustix::net::sockopt::{ip_mtu, ipv6_mtu};

use crate::NetError;

/// The largest UDP payload over IPv4: 65,535 less an IP and a UDP header.
pub const MAX_DATAGRAM: usize = 65_507;

mod list;

pub use list::interfaces;

/// One network interface of this host, as it was when it was listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// Its name, as `ip link` shows it.
    pub name: String,
    /// Its index in the kernel; what sockets are told, because names can be changed.
    pub index: u32,
    /// The largest IP packet it carries, in bytes.
    pub mtu: usize,
    /// Its addresses, in the kernel's order.
    pub addrs: Vec<IpAddr>,
    /// It is switched on.
    pub is_up: bool,
    /// It leads back to this host.
    pub is_loopback: bool,
    /// It says that it can multicast. Loopback says no, and can.
    pub is_multicast: bool,
}

impl Interface {
    /// Whether anything can be sent through it at all.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.is_up && !self.addrs.is_empty()
    }

    /// Whether multicast goes through it. Over loopback Linux does so for IPv4, though the
    /// interface does not say so, and not for IPv6.
    #[must_use]
    pub const fn carries_multicast(&self, ipv6: bool) -> bool {
        self.is_multicast || (self.is_loopback && !ipv6)
    }
}

/// The interface that owns the local address `ip`; none if the host has no such address.
#[must_use]
pub fn interface_of(ip: IpAddr) -> Option<Interface> {
    // A host that cannot list its interfaces owns nothing that could be named.
    let all = interfaces().ok()?;
    let owns = |interface: &Interface| interface.addrs.contains(&ip);
    // The whole of 127.0.0.0/8 is loopback's, though only 127.0.0.1 is listed.
    let holds = |interface: &Interface| interface.is_loopback && ip.is_loopback();
    all.iter().find(|i| owns(i)).or_else(|| all.iter().find(|i| holds(i))).cloned()
}

/// The local address from which packets to `peer` leave. Asks the routing table, sends nothing.
///
/// # Errors
///
/// The kernel's, when there is no route to `peer`.
pub fn local_addr_towards(peer: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr = match peer {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    Ok(socket_towards(any, peer)?.local_addr()?.ip())
}

/// The size of the largest IP packet that the kernel expects to pass from this address to `peer`:
/// its routes say it, and routers that have dropped larger ones. Sends nothing.
///
/// # Errors
///
/// The kernel's, when there is no route to `peer`.
pub fn path_mtu(from: IpAddr, peer: SocketAddr) -> io::Result<usize> {
    let socket = socket_towards(from, peer)?;
    let mtu = if peer.is_ipv6() { ipv6_mtu(&socket)? } else { ip_mtu(&socket)? };
    Ok(mtu as usize)
}

/// Whether packets from this address can go to `peer` at all. Those of loopback's stay on this
/// host. Sends nothing.
#[must_use]
pub fn leads_to(from: IpAddr, peer: SocketAddr) -> bool {
    let invalid = |error: io::Error| error.kind() == io::ErrorKind::InvalidInput;
    // What cannot be bound is another fault, which is told when it is.
    !UdpSocket::bind((from, 0)).is_ok_and(|socket| socket.connect(peer).is_err_and(invalid))
}

/// Why an address is that of no host, so that nobody can be called or serve there; `None` where it
/// can be one. Sends nothing.
#[must_use]
pub fn no_host(ip: IpAddr) -> Option<Cow<'static, str>> {
    // Sockets of IPv6 speak IPv6 only.
    if let IpAddr::V6(ip) = ip
        && let Some(mapped) = ip.to_ipv4_mapped()
    {
        return Some(format!("which is an IPv4 address (write {mapped})").into());
    }
    let why = match ip {
        ip if ip.is_unspecified() => Some("which is no host's address"),
        ip if ip.is_multicast() => Some("which is a multicast group, and no host's address"),
        IpAddr::V4(ip) if is_broadcast(ip).unwrap_or(false) => {
            Some("which is a broadcast address, and no host's")
        }
        _ => None,
    };
    why.map(Cow::Borrowed)
}

/// Whether an address is one to broadcast to, as only the kernel knows of its networks: it permits
/// no socket to send there that has not asked for it.
fn is_broadcast(ip: Ipv4Addr) -> io::Result<bool> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    let forbidden = socket.connect((ip, 9)).is_err_and(|error| error.kind() == PermissionDenied);
    socket.set_broadcast(true)?;
    // A route may forbid an address too.
    Ok(forbidden && socket.connect((ip, 9)).is_ok())
}

fn socket_towards(from: IpAddr, peer: SocketAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind((from, 0))?;
    socket.connect(peer)?;
    Ok(socket)
}

/// The largest UDP payload that one packet of `mtu` bytes carries; never above [`MAX_DATAGRAM`].
///
/// # Errors
///
/// [`NetError::MtuTooSmall`] below 1280, IPv6's own minimum: a window must fit 64 fragments.
pub fn max_datagram(mtu: usize, ipv6: bool) -> Result<usize, NetError> {
    if mtu < MIN_MTU {
        return Err(NetError::MtuTooSmall { mtu });
    }
    let headers = if ipv6 { IPV6_HEADER + UDP_HEADER } else { IPV4_HEADER + UDP_HEADER };
    Ok((mtu - headers).min(MAX_DATAGRAM))
}

/// The usable interfaces that fit `pattern`, in the order they were given.
///
/// The grammar is that of `NCCL_SOCKET_IFNAME`, so that one setting serves both: comma separated
/// prefixes (`eth,ens`), exact names (`=eth0,eth1`), and the exclusion of either (`^docker,lo`,
/// `^=docker0`). A blank pattern takes what NCCL takes unasked: all but Docker's bridges and
/// loopback, and those too where there is nothing else.
///
/// # Errors
///
/// [`NetError::NoInterface`] if none fits, [`NetError::EmptyPattern`] if it names nothing.
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

/// Whether `text` starts with `mark`, and what follows it.
fn strip(text: &str, mark: char) -> (bool, &str) {
    text.strip_prefix(mark).map_or((false, text), |rest| (true, rest))
}

/// Prefixes of interfaces that nobody means unless they say so.
const UNASKED: [&str; 2] = ["docker", "lo"];
/// The smallest MTU that a link with IPv6 may have, and the smallest this protocol is made for.
pub const MIN_MTU: usize = 1280;
/// The largest MTU of an interface that carries IP packets in one piece: that of loopback.
pub const MAX_MTU: usize = 65_536;
const IPV4_HEADER: usize = 20;
const IPV6_HEADER: usize = 40;
const UDP_HEADER: usize = 8;

#[cfg(test)]
mod tests;
