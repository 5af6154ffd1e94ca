//! What is checked before a sidecar serves.

use racksum_net::interface::{interfaces, select};
use racksum_net::quic::Credentials;

use crate::aggregator_selector::AggregatorSelector;
use crate::error::ConnectError;
use crate::options::ConnectOptions;
use crate::route::{find_ways, resolve};

/// Checks what can be known of a host's sidecar before a job is joined: its identity, the
/// interface to call from, and that the aggregators may be called at all. Returns what is not known
/// yet and may be later, a sentence each.
///
/// # Errors
/// What will never do.
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
                    // One that may be called is enough.
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
            Ok(_) => {}
            Err(later @ (ConnectError::Unresolved { .. } | ConnectError::NoWay { .. })) => {
                unknown.push(later.to_string());
            }
            Err(error) => return Err(error),
        }
    }
    Ok(unknown)
}
