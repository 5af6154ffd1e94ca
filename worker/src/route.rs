//! The ways to aggregators: from which of this host's addresses, through which interface.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use racksum_net::interface::{
    Interface, interface_of, interfaces, leads_to, local_addr_towards, no_host, select,
};
use racksum_net::resolve::{LINK_LOCAL, is_link_local, resolve_blocking};

use crate::error::ConnectError;

/// The way to an aggregator.
#[derive(Debug, Clone)]
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
        let from = SocketAddr::new(local, 0);
        Ok(Self { to, from, interface: interface_of(local), is_chosen: chosen.is_some() })
    }

    /// Which address of this host to call from, unless any will do.
    pub(crate) fn caller(&self) -> Option<IpAddr> {
        self.is_chosen.then(|| self.from.ip())
    }
}

/// Returns the addresses of the aggregator at `HOST:PORT` that this host has a way to, in the order
/// in which to try them.
///
/// # Errors
/// What is wrong with the text, that the name does not resolve, or that no way leads there.
pub fn addresses(host: &str) -> Result<Vec<SocketAddr>, ConnectError> {
    let ways = find_ways(&[host.to_owned()], None)?;
    Ok(ways.iter().flatten().map(|route| route.to).collect())
}

/// Returns the ways to aggregators, through an interface that fits the pattern if there is one: for
/// each choice of their addresses that this host can call, the ways to all of them.
pub(crate) fn find_ways(
    hosts: &[String],
    pattern: Option<&str>,
) -> Result<Vec<Vec<Route>>, ConnectError> {
    let addrs = hosts.iter().map(|host| resolve(host)).collect::<Result<Vec<_>, _>>()?;
    let interfaces = pattern.map(|pattern| Ok::<_, ConnectError>((pattern, interfaces()?)));
    let interfaces = interfaces.transpose()?;
    let (mut ways, mut error) = (Vec::new(), None);
    for addrs in choices(&addrs) {
        match routes_to(&addrs, interfaces.as_ref().map(|(pattern, all)| (*pattern, &all[..]))) {
            Ok(routes) => ways.push(routes),
            Err(why) => error = error.or(Some(why)),
        }
    }
    match error {
        Some(error) if ways.is_empty() => Err(error),
        _ => Ok(ways),
    }
}

/// The ways to one address of each aggregator, from an interface that fits the pattern.
fn routes_to(
    addrs: &[SocketAddr],
    pattern: Option<(&str, &[Interface])>,
) -> Result<Vec<Route>, ConnectError> {
    let chosen = match (pattern, addrs.first()) {
        (Some((pattern, all)), Some(to)) => choose(all, pattern, *to)?,
        _ => None,
    };
    let routes = addrs.iter().map(|to| Route::find(*to, chosen)).collect::<Result<Vec<_>, _>>()?;
    check_routes(&routes)?;
    Ok(routes)
}

/// Returns which addresses of aggregators to call together, in the order in which to try them: a
/// worker has one data socket, so they are of one IP version if all have an address of it.
fn choices(addrs: &[Vec<SocketAddr>]) -> Vec<Vec<SocketAddr>> {
    let of_version = |is_ipv6: bool| {
        let fitting = |all: &Vec<SocketAddr>| {
            all.iter().copied().filter(|addr| addr.is_ipv6() == is_ipv6).collect::<Vec<_>>()
        };
        addrs.iter().map(fitting).collect::<Vec<_>>()
    };
    let first = addrs.first().and_then(|all| all.first()).is_some_and(SocketAddr::is_ipv6);
    let of_versions = [first, !first].map(of_version);
    let common = of_versions.into_iter().filter(|addrs| addrs.iter().all(|all| !all.is_empty()));
    let mut common: Vec<_> = common.collect();
    if common.is_empty() {
        common.push(addrs.to_vec());
    }
    let mut choices = Vec::new();
    for addrs in common {
        let longest = addrs.iter().map(Vec::len).max().unwrap_or(0);
        for at in 0..longest {
            // Whoever has fewer addresses is called at the last again.
            let choice = addrs.iter().filter_map(|all| all.get(at).or_else(|| all.last())).copied();
            choices.push(choice.collect());
        }
    }
    choices
}

/// The addresses of `HOST:PORT`, each once, in the order of the resolver.
pub(crate) fn resolve(host: &str) -> Result<Vec<SocketAddr>, ConnectError> {
    check_address(host)?;
    let unresolved = |why| ConnectError::Unresolved { host: host.into(), why };
    let mut addrs = resolve_blocking(host).map_err(|error| unresolved(error.to_string()))?;
    let mut seen = BTreeSet::new();
    addrs.retain(|addr| seen.insert(*addr));
    if addrs.is_empty() {
        return Err(unresolved("the name has no address".into()));
    }
    Ok(addrs)
}

/// Checks that a text can be `HOST:PORT`, without resolving the name.
///
/// # Errors
/// What is wrong with it.
pub fn check_address(text: &str) -> Result<(), ConnectError> {
    let wrong = |why: &str| Err(ConnectError::NoAddress { host: text.into(), why: why.into() });
    if text.contains("://") {
        return wrong("it is given without a scheme and ://");
    }
    let Some((host, port)) = text.rsplit_once(':') else { return wrong("the port is missing") };
    match literal(host) {
        Some(addr) if is_link_local(&addr) => return wrong(LINK_LOCAL),
        Some(addr) => {
            if let Some(why) = no_host(addr.ip()) {
                return wrong(&format!("its host is {}, {why}; give the aggregator's", addr.ip()));
            }
        }
        None if host.contains(':') => {
            return wrong("an IPv6 address with a port is written as [ADDRESS]:PORT");
        }
        None if !is_name(host) => return wrong("its host is neither a name nor an IP address"),
        None => {}
    }
    match port.parse::<u16>() {
        Ok(0) => wrong("0 is no port"),
        Ok(_) => Ok(()),
        Err(_) if host == "unix" => wrong("unix:PATH is a sidecar's, which only Python calls"),
        Err(_) => wrong("its port is no number from 1 to 65535"),
    }
}

/// The IP address that a host is given as, with any port, and any zone if it has one: which
/// interfaces there are shows when it is resolved.
fn literal(host: &str) -> Option<SocketAddr> {
    let zoned = host.split_once('%').filter(|(_, zone)| zone.len() > 1 && zone.ends_with(']'));
    let host = zoned.map_or_else(|| host.to_owned(), |(addr, _)| format!("{addr}%1]"));
    format!("{host}:1").parse().ok()
}

/// Whether a text can be the name of a host (RFC 1123; underscores are common in practice). A last
/// label of digits would be an IPv4 address that is none.
fn is_name(text: &str) -> bool {
    let text = text.strip_suffix('.').unwrap_or(text);
    let is_label = |label: &str| {
        let inner = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_');
        (1..=63).contains(&label.len()) && label.chars().all(inner)
    };
    let ends_in_number =
        text.rsplit('.').next().is_some_and(|last| last.chars().all(|c| c.is_ascii_digit()));
    text.len() <= 253 && text.split('.').all(is_label) && !ends_in_number
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
    let reaches = |ip: &IpAddr| is_of_link(*ip) == is_of_link(to.ip()) && leads_to(*ip, to);
    let mut addrs: Vec<IpAddr> =
        fitting.iter().flat_map(|interface| &interface.addrs).copied().collect();
    addrs.retain(|ip| ip.is_ipv6() == to.is_ipv6() && reaches(ip));
    // What the kernel would take is only a preference here.
    let routed = local_addr_towards(to).ok();
    let best = addrs.iter().find(|ip| Some(**ip) == routed).or_else(|| addrs.first());
    best.copied().map(Some).ok_or_else(|| {
        let names: Vec<&str> = fitting.iter().map(|interface| interface.name.as_str()).collect();
        let why = format!(
            "{to} cannot be called from {}, which {pattern:?} chooses: no address of it reaches \
             there; choose another interface",
            names.join(", ")
        );
        ConnectError::Arguments { options: &["interface"], why }
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
            Err(ConnectError::of_aggregators(format!("the aggregator {to} is named twice")))
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
        return Err(ConnectError::of_aggregators(format!(
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
