//! The addresses of names, which name servers may take long to tell.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::LazyLock;
use std::time::Duration;

use crate::aside::{Aside, AsideError};
use crate::interface::interfaces;

/// How long a name may take: a first name server that is silent costs 5 s twice (resolv.conf(5)).
pub const PATIENCE: Duration = Duration::from_secs(12);

static NAMES: LazyLock<Aside> = LazyLock::new(|| Aside::new("looking up the name"));

/// Returns the addresses of `HOST:PORT`, without blocking the runtime.
///
/// # Errors
///
/// What the resolver said, or that it says nothing in time.
///
/// # Panics
///
/// Outside of a tokio runtime.
pub async fn resolve(host: &str) -> io::Result<Vec<SocketAddr>> {
    match parsed(host) {
        Some(addr) => Ok(vec![addr]),
        None => found(NAMES.run(PATIENCE, look_up(host)).await),
    }
}

/// Returns the addresses of `HOST:PORT`, and blocks this thread no longer than [`PATIENCE`].
///
/// # Errors
///
/// What the resolver said, or that it says nothing in time.
pub fn resolve_blocking(host: &str) -> io::Result<Vec<SocketAddr>> {
    match parsed(host) {
        Some(addr) => Ok(vec![addr]),
        None => found(NAMES.wait(PATIENCE, look_up(host))),
    }
}

/// Whether an address means something on one link only, and does not say on which.
#[must_use]
pub const fn lacks_zone(addr: &SocketAddr) -> bool {
    matches!(addr, SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() && v6.scope_id() == 0)
}

/// What to do about an address that [lacks its zone](lacks_zone).
pub const NO_ZONE: &str = "a link-local address needs the interface that it is reached through, as \
     in [fe80::1%eth0]:7177";

/// The address that a text is; none if it is a name.
fn parsed(host: &str) -> Option<SocketAddr> {
    host.parse().ok().or_else(|| zoned(host))
}

/// An address whose zone is the name of an interface, of which the standard library takes only the
/// number.
fn zoned(host: &str) -> Option<SocketAddr> {
    let (addr, rest) = host.split_once('%')?;
    let (zone, port) = rest.split_once("]:")?;
    let index = interfaces().ok()?.iter().find(|interface| interface.name == zone)?.index;
    format!("{addr}%{index}]:{port}").parse().ok()
}

fn look_up(host: &str) -> impl FnOnce() -> io::Result<Vec<SocketAddr>> + Send + use<> {
    let host = host.to_owned();
    move || Ok(host.to_socket_addrs()?.collect())
}

fn found(done: Result<io::Result<Vec<SocketAddr>>, AsideError>) -> io::Result<Vec<SocketAddr>> {
    done.unwrap_or_else(|error| Err(io::Error::other(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn names_and_addresses_are_resolved_on_either_kind_of_thread() {
        for host in ["127.0.0.1:7", "[::1]:7", "localhost:7"] {
            let found = resolve(host).await.unwrap();
            assert!(found.iter().all(|addr| addr.ip().is_loopback() && addr.port() == 7));
            assert_eq!(resolve_blocking(host).unwrap(), found);
        }
        let zoned = resolve("[fe80::1%lo]:7").await.unwrap();
        assert!(matches!(zoned[..], [SocketAddr::V6(addr)] if addr.scope_id() > 0), "{zoned:?}");
        assert!(!lacks_zone(&zoned[0]) && lacks_zone(&"[fe80::1]:7".parse().unwrap()));
        assert_eq!(resolve_blocking("[fe80::1%lo]:7").unwrap(), zoned);
        let error = resolve("no port").await.unwrap_err();
        assert_eq!(error.kind(), resolve_blocking("no port").unwrap_err().kind());
    }
}
