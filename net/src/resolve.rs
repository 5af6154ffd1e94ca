//! Name resolution with a time limit, because name servers may take long to answer.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::LazyLock;
use std::time::Duration;

use crate::aside::{Aside, AsideError};

/// Time limit for resolving a name. If the first name server is silent, a resolver may wait for it
/// twice, 5 s each time (resolv.conf(5)).
pub const PATIENCE: Duration = Duration::from_secs(12);

static NAMES: LazyLock<Aside> = LazyLock::new(|| Aside::new("looking up the name"));

/// Returns the addresses of `HOST:PORT`, except link-local ones, without blocking the runtime.
///
/// # Errors
///
/// The resolver's error, or an error if the resolver does not answer in time.
/// [`io::ErrorKind::Unsupported`] if all addresses are [link-local](LINK_LOCAL).
///
/// # Panics
///
/// If `host` contains a name and the caller is outside of a tokio runtime.
pub async fn resolve(host: &str) -> io::Result<Vec<SocketAddr>> {
    match parsed(host) {
        Some(addr) => callable(vec![addr]),
        None => found(NAMES.run(PATIENCE, look_up(host)).await),
    }
}

/// Returns the addresses of `HOST:PORT` like [`resolve`], but blocks this thread for up to
/// [`PATIENCE`].
///
/// # Errors
///
/// The errors of [`resolve`].
pub fn resolve_blocking(host: &str) -> io::Result<Vec<SocketAddr>> {
    match parsed(host) {
        Some(addr) => callable(vec![addr]),
        None => found(NAMES.wait(PATIENCE, look_up(host))),
    }
}

/// Checks whether an address is valid on one link only. QUIC's address validation omits the link,
/// so no handshake from such an address succeeds.
#[must_use]
pub const fn is_link_local(addr: &SocketAddr) -> bool {
    matches!(addr, SocketAddr::V6(v6) if v6.ip().is_unicast_link_local())
}

/// Error text for a [link-local](is_link_local) address.
pub const LINK_LOCAL: &str =
    "link-local addresses (fe80::/10) are not supported; give another address of that host";

/// Parses `HOST:PORT` as an address; `None` if the host is a name.
fn parsed(host: &str) -> Option<SocketAddr> {
    host.parse().ok().or_else(|| without_zone(host).parse().ok())
}

/// Removes the zone of an address, because the standard library accepts only numeric zones.
fn without_zone(host: &str) -> String {
    let zoned = host.split_once('%').and_then(|(addr, rest)| Some((addr, rest.split_once(']')?.1)));
    zoned.map_or_else(|| host.to_owned(), |(addr, port)| format!("{addr}]{port}"))
}

fn look_up(host: &str) -> impl FnOnce() -> io::Result<Vec<SocketAddr>> + Send + use<> {
    let host = host.to_owned();
    move || Ok(host.to_socket_addrs()?.collect())
}

fn found(done: Result<io::Result<Vec<SocketAddr>>, AsideError>) -> io::Result<Vec<SocketAddr>> {
    callable(done.unwrap_or_else(|error| Err(io::Error::other(error)))?)
}

/// Removes the link-local addresses. Fails if there were only link-local addresses.
fn callable(mut addrs: Vec<SocketAddr>) -> io::Result<Vec<SocketAddr>> {
    let any = !addrs.is_empty();
    addrs.retain(|addr| !is_link_local(addr));
    if any && addrs.is_empty() {
        return Err(io::Error::new(io::ErrorKind::Unsupported, LINK_LOCAL));
    }
    Ok(addrs)
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
        let error = resolve("no port").await.unwrap_err();
        assert_eq!(error.kind(), resolve_blocking("no port").unwrap_err().kind());
    }

    #[test]
    fn link_local_addresses_are_left_out_or_refused() {
        for host in ["[fe80::1]:7", "[fe80::1%1]:7", "[fe80::1%lo]:7", "[febf::1%no.such]:7"] {
            let error = resolve_blocking(host).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::Unsupported, "{host}: {error}");
        }
        let [link, global] = ["[fe80::1%3]:7", "[2001:db8::1]:7"].map(|addr| addr.parse().unwrap());
        assert_eq!(callable(vec![link, global]).unwrap(), [global]);
        assert_eq!(callable(Vec::new()).unwrap(), []);
    }
}
