//! Routes to aggregators: the local address and interface to call each one from.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use racksum_net::interface::{
    Interface, interface_of, interfaces, leads_to, local_addr_towards, no_host, select,
};
use racksum_net::resolve::{LINK_LOCAL, is_link_local, resolve_blocking};

use crate::error::ConnectError;

/// The route to an aggregator.
#[derive(Debug, Clone)]
pub(crate) struct Route {
    pub(crate) to: SocketAddr,
    /// The local address at which the route begins.
    pub(crate) from: SocketAddr,
    pub(crate) interface: Option<Interface>,
    /// Whether the user chose the local address. Control connections then use it too.
    pub(crate) is_chosen: bool,
}

impl Route {
    /// Returns the kernel's route to an aggregator, or the one that begins at `chosen`.
    fn find(to: SocketAddr, chosen: Option<IpAddr>) -> Result<Self, ConnectError> {
        let local = match chosen {
            Some(chosen) => chosen,
            None => local_addr_towards(to)
                .map_err(|cause| ConnectError::NoWay { to, why: cause.to_string() })?,
        };
        let from = SocketAddr::new(local, 0);
        Ok(Self { to, from, interface: interface_of(local), is_chosen: chosen.is_some() })
    }

    /// Returns the local address to connect from, or `None` if any will do.
    pub(crate) fn caller(&self) -> Option<IpAddr> {
        self.is_chosen.then(|| self.from.ip())
    }
}

/// Returns the addresses of the aggregator at `HOST:PORT` that this host has a route to, in the
/// order in which to try them.
///
/// # Errors
/// Returns an error if the text is malformed, the name does not resolve, or no route leads there.
pub fn addresses(host: &str) -> Result<Vec<SocketAddr>, ConnectError> {
    let ways = find_ways(&[host.to_owned()], None)?;
    Ok(ways.iter().flatten().map(|route| route.to).collect())
}

/// Returns the routes to a set of aggregators, one list for each combination of their addresses
/// that this host can call. With a pattern, routes begin at an interface that fits it.
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

/// Returns the MTU for datagrams over these routes, in bytes: the one that the user `asked` for, or
/// the smallest of the interfaces'. All shards get the same fragments of a window, so one MTU
/// applies to all routes.
///
/// # Errors
/// Returns [`ConnectError::Arguments`] if an interface cannot send datagrams of the size asked for.
pub(crate) fn mtu_of(routes: &[Route], asked: Option<usize>) -> Result<usize, ConnectError> {
    let narrowest = routes.iter().filter_map(|route| Some(route.interface.as_ref()?.mtu)).min();
    match (asked, narrowest) {
        (Some(asked), Some(narrowest)) if asked > narrowest => {
            let why = format!(
                "MTU {asked} exceeds {narrowest}, the MTU of the interface towards the aggregator; \
                 lower `mtu`"
            );
            Err(ConnectError::Arguments { options: &["mtu"], why })
        }
        (asked, narrowest) => Ok(asked.or(narrowest).unwrap_or(1500)),
    }
}

/// Returns the routes to one address of each aggregator, from an interface that fits the pattern.
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

/// Returns the combinations of aggregator addresses to call, in the order in which to try them. A
/// worker has one data socket, so all addresses of a combination have the same IP version, if the
/// aggregators share one.
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
            // An aggregator with fewer addresses repeats its last one.
            let choice = addrs.iter().filter_map(|all| all.get(at).or_else(|| all.last())).copied();
            choices.push(choice.collect());
        }
    }
    choices
}

/// Returns the addresses of `HOST:PORT`, each once, in the resolver's order.
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

/// Checks that a text has the form `HOST:PORT`, without resolving the name.
///
/// # Errors
/// Returns an error that names the defect.
pub fn check_address(text: &str) -> Result<(), ConnectError> {
    let wrong = |why: &str| Err(ConnectError::NoAddress { host: text.into(), why: why.into() });
    if text.contains("://") {
        return wrong("remove the scheme and ://");
    }
    let Some((host, port)) = text.rsplit_once(':') else { return wrong("the port is missing") };
    match literal(host) {
        Some(addr) if is_link_local(&addr) => return wrong(LINK_LOCAL),
        Some(addr) => {
            if let Some(why) = no_host(addr.ip()) {
                return wrong(&format!(
                    "its host is {}, {why}; give the aggregator's address",
                    addr.ip()
                ));
            }
        }
        None if host.contains(':') => {
            return wrong("write an IPv6 address with a port as [ADDRESS]:PORT");
        }
        None if !is_name(host) => return wrong("its host is neither a name nor an IP address"),
        None => {}
    }
    match port.parse::<u16>() {
        Ok(0) => wrong("its port must not be 0"),
        Ok(_) => Ok(()),
        Err(_) if host == "unix" => {
            wrong("unix:PATH names a sidecar; give the HOST:PORT of an aggregator here")
        }
        Err(_) => wrong("its port must be a number from 1 to 65535"),
    }
}

/// Parses a host as an IP address, with a placeholder for the port and for the zone, if any. Only
/// resolution shows whether the zone's interface exists.
fn literal(host: &str) -> Option<SocketAddr> {
    let zoned = host.split_once('%').filter(|(_, zone)| zone.len() > 1 && zone.ends_with(']'));
    let host = zoned.map_or_else(|| host.to_owned(), |(addr, _)| format!("{addr}%1]"));
    format!("{host}:1").parse().ok()
}

/// Returns whether a text can be a host name (RFC 1123, plus underscores, which are common in
/// practice). Rejects a last label of digits, which would be a malformed IPv4 address.
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

/// Returns the local address to call `to` from, on an interface that fits the pattern. Prefers the
/// address that the kernel would use; if the pattern rules that one out, returns the first that has
/// a route. Returns `None` if `to` is a loopback address, which leaves no choice.
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
    // The kernel's choice is only a preference here, so ignore its error.
    let routed = local_addr_towards(to).ok();
    let best = addrs.iter().find(|ip| Some(**ip) == routed).or_else(|| addrs.first());
    best.copied().map(Some).ok_or_else(|| {
        let names: Vec<&str> = fitting.iter().map(|interface| interface.name.as_str()).collect();
        let why = format!(
            "cannot reach {to} from the interfaces that {pattern:?} selects ({}): none of their \
             addresses has a route to it; choose another interface",
            names.join(", ")
        );
        ConnectError::Arguments { options: &["interface"], why }
    })
}

/// Returns whether an address is link-local.
const fn is_of_link(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

/// Checks that no two routes lead to the same aggregator.
fn check_routes(routes: &[Route]) -> Result<(), ConnectError> {
    let mut seen = BTreeSet::new();
    match routes.iter().find(|route| !seen.insert(route.to)) {
        Some(Route { to, .. }) => Err(ConnectError::of_aggregators(format!(
            "the aggregator {to} is listed twice; list each aggregator once"
        ))),
        None => Ok(()),
    }
}

/// Returns the address to bind the data socket to. An aggregator takes a rank's data only from the
/// address of the rank's control connection. If the routes begin at different addresses, the socket
/// is bound to the unspecified address, and the kernel chooses one for each route.
pub(crate) fn data_addr(routes: &[Route]) -> Result<SocketAddr, ConnectError> {
    let Route { to, from, .. } = routes[0];
    if let Some(other) = routes.iter().find(|route| route.to.is_ipv6() != to.is_ipv6()) {
        return Err(ConnectError::of_aggregators(format!(
            "the aggregators {to} and {} have different IP versions, and a worker has one data \
             socket; give all of them as IPv4 or all as IPv6",
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
