//! The ways to aggregators: from which of this host's addresses, through which interface.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};

use racksum_net::interface::{Interface, interface_of, interfaces, local_addr_towards, select};

use crate::error::ConnectError;

/// The way to an aggregator.
#[derive(Debug)]
pub(crate) struct Route {
    pub(crate) to: SocketAddr,
    /// The address of this host that the way begins at.
    pub(crate) from: SocketAddr,
    pub(crate) interface: Option<Interface>,
    /// It begins there because the user said so: calls come from there too.
    pub(crate) is_chosen: bool,
}

impl Route {
    /// The way that the kernel's routes say, or the one that begins at `chosen`.
    fn find(to: SocketAddr, chosen: Option<IpAddr>) -> Result<Self, ConnectError> {
        let local = match chosen {
            Some(chosen) => chosen,
            None => local_addr_towards(to)
                .map_err(|cause| ConnectError::NoWay { to, why: cause.to_string() })?,
        };
        // Not a new address: one of a link means nothing without the scope that `to` has.
        let mut from = to;
        from.set_ip(local);
        from.set_port(0);
        Ok(Self { to, from, interface: interface_of(local), is_chosen: chosen.is_some() })
    }

    /// Which address of this host to call from, unless any will do.
    pub(crate) fn caller(&self) -> Option<IpAddr> {
        self.is_chosen.then(|| self.from.ip())
    }
}

/// The ways to aggregators, through an interface that fits the pattern if there is one.
pub(crate) fn find_routes(
    hosts: &[String],
    pattern: Option<&str>,
) -> Result<Vec<Route>, ConnectError> {
    let addrs = hosts.iter().map(|host| resolve(host)).collect::<Result<Vec<_>, _>>()?;
    let chosen = match (pattern, addrs.first()) {
        (Some(pattern), Some(to)) => choose(&interfaces()?, pattern, *to)?,
        _ => None,
    };
    let routes =
        addrs.into_iter().map(|to| Route::find(to, chosen)).collect::<Result<Vec<_>, _>>()?;
    check_routes(&routes)?;
    Ok(routes)
}

/// The address of `HOST:PORT`.
pub(crate) fn resolve(host: &str) -> Result<SocketAddr, ConnectError> {
    let unknown = |why| ConnectError::NoAddress { host: host.into(), why };
    let mut addrs = host.to_socket_addrs().map_err(|error| unknown(error.to_string()))?;
    match addrs.next() {
        Some(addr) if addr.port() == 0 => Err(unknown("0 is no port".into())),
        Some(addr) => Ok(addr),
        None => Err(unknown("the name has no address".into())),
    }
}

/// The address to call `to` from, of an interface that fits the pattern: the one that the kernel
/// would take if it is one of them, and otherwise the first. None where there is no choice, since
/// `to` is on this host.
fn choose(
    all: &[Interface],
    pattern: &str,
    to: SocketAddr,
) -> Result<Option<IpAddr>, ConnectError> {
    let fitting = select(all, pattern)?;
    if to.ip().is_loopback() {
        return Ok(None);
    }
    let reaches = |ip: &IpAddr| is_of_link(*ip) == is_of_link(to.ip());
    let mut addrs: Vec<IpAddr> =
        fitting.iter().flat_map(|interface| &interface.addrs).copied().collect();
    addrs.retain(|ip| ip.is_ipv6() == to.is_ipv6() && reaches(ip));
    // What the kernel would take is only a preference here.
    let routed = local_addr_towards(to).ok();
    let best = addrs.iter().find(|ip| Some(**ip) == routed).or_else(|| addrs.first());
    best.copied().map(Some).ok_or_else(|| {
        let names: Vec<&str> = fitting.iter().map(|interface| interface.name.as_str()).collect();
        ConnectError::Arguments(format!(
            "{to} cannot be called from {}, which {pattern:?} chooses: no address of it fits",
            names.join(", ")
        ))
    })
}

/// Whether an address means something on one link only.
const fn is_of_link(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

/// Checks that no two names mean one aggregator.
fn check_routes(routes: &[Route]) -> Result<(), ConnectError> {
    let mut seen = BTreeSet::new();
    match routes.iter().find(|route| !seen.insert(route.to)) {
        Some(Route { to, .. }) => {
            Err(ConnectError::Arguments(format!("the aggregator {to} is named twice")))
        }
        None => Ok(()),
    }
}

/// Where the data socket is bound. An aggregator takes a rank's data only from the address that
/// the rank's control connection has, so on a host with several ways the kernel chooses the
/// address for each.
pub(crate) fn data_addr(routes: &[Route]) -> Result<SocketAddr, ConnectError> {
    let Route { to, from, .. } = routes[0];
    if let Some(other) = routes.iter().find(|route| route.to.is_ipv6() != to.is_ipv6()) {
        return Err(ConnectError::Arguments(format!(
            "the aggregators {to} and {} are of two IP versions, and a worker has one data \
             socket; name all of them by IPv4 or all by IPv6",
            other.to
        )));
    }
    if routes.iter().all(|route| route.from == from) {
        return Ok(from);
    }
    let any: IpAddr =
        if to.is_ipv6() { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
    Ok(SocketAddr::new(any, 0))
}

#[cfg(test)]
pub(crate) mod tests;
