//! Checks of a sidecar's options, made before the sidecar starts.

use racksum_net::interface::{interfaces, select};
use racksum_net::quic::Credentials;

use crate::aggregator_selector::AggregatorSelector;
use crate::error::ConnectError;
use crate::options::ConnectOptions;
use crate::route::{find_ways, mtu_of, resolve};

/// Checks those options of a sidecar that can be checked before a job joins: the identity, the
/// network interface, the MTU and the aggregators. Returns a sentence for each set of aggregators
/// that cannot be reached yet, because a name does not resolve or there is no route.
///
/// # Errors
/// Returns a [`ConnectError`] for a fault that later attempts cannot fix.
pub fn check_sidecar(options: &ConnectOptions) -> Result<Vec<String>, ConnectError> {
    let credentials = Credentials::of_aggregator(options.identity.as_deref(), options.insecure)?;
    let pattern = options.interface.as_deref();
    if let Some(pattern) = pattern {
        select(&interfaces()?, pattern)?;
    }
    AggregatorSelector::new(options, 0).check()?;
    let mut unknown = Vec::new();
    for hosts in std::iter::once(&options.aggregators).chain(&options.standbys) {
        for host in hosts {
            match resolve(host) {
                Ok(addrs) => {
                    // It is enough if the credentials allow calls to one of the addresses.
                    let checked: Vec<_> =
                        addrs.iter().map(|addr| credentials.check(*addr)).collect();
                    if checked.iter().all(Result::is_err) {
                        checked.into_iter().collect::<Result<(), _>>()?;
                    }
                }
                Err(ConnectError::Unresolved { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        match find_ways(hosts, pattern) {
            Ok(ways) => {
                ways.iter().try_for_each(|routes| mtu_of(routes, options.mtu).map(|_| ()))?
            }
            Err(later @ (ConnectError::Unresolved { .. } | ConnectError::NoWay { .. })) => {
                unknown.push(later.to_string());
            }
            Err(error) => return Err(error),
        }
    }
    Ok(unknown)
}
