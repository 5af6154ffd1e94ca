//! The status of an aggregator that is queried at its network address, possibly on another host.

use std::fmt;
use std::net::SocketAddr;

use racksum_net::quic::{CallOptions, Credentials, Ended, ask_status};
use racksum_net::runtime::single_threaded;
use racksum_net::{NetError, with_limit};
use racksum_proto::status::AggregatorStatus;
use racksum_proto::time::Span;
use racksum_worker::{ConnectError, addresses};

use super::{Args, PATIENCE, parse};
use crate::environment;
use crate::exit::{Failure, with_flags};

/// Resolves `HOST:PORT`, and queries the addresses in turn until an aggregator answers.
pub(super) fn ask(addr: &str, args: &Args) -> Result<AggregatorStatus, Failure> {
    let addrs = addresses(addr).map_err(|error| match error {
        no_address @ ConnectError::NoAddress { .. } => Failure::usage(format!(
            "{no_address}; it is not the path of a status socket either; for a sidecar, pass \
             unix:PATH"
        )),
        other => other.into(),
    })?;
    let identity = environment::identity(args.identity.clone(), args.insecure)?;
    let credentials = Credentials::read_blocking(identity, args.insecure)?;
    let patience = Span(u64::try_from(PATIENCE.as_nanos()).unwrap_or(u64::MAX));
    ask_each(addr, &addrs, &CallOptions { from: None, credentials, patience })
}

/// Queries the addresses in turn until an aggregator answers.
fn ask_each(
    name: &str,
    addrs: &[SocketAddr],
    caller: &CallOptions,
) -> Result<AggregatorStatus, Failure> {
    let unknown = |why: &dyn fmt::Display| {
        Failure::unavailable(format!("cannot query {name}: {}", with_flags(why)))
    };
    let runtime = single_threaded();
    let runtime = runtime.map_err(|error| unknown(&with_limit(&error)))?;
    let mut tried: Vec<NetError> = Vec::new();
    for to in addrs {
        match runtime.block_on(ask_status(*to, caller)) {
            Ok(json) => return parse(json.as_bytes()).map_err(|why| unknown(&why)),
            Err(Ended::Unconnected(error)) => tried.push(error),
            Err(other) => return Err(unknown(&other)),
        }
    }
    let each: Vec<_> = tried.iter().map(ToString::to_string).collect();
    match tried.pop() {
        Some(only) if tried.is_empty() => Err(only.into()),
        _ => Err(unknown(&each.join("; "))),
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use racksum_aggregator::{Aggregator, Config};

    use super::*;

    #[test]
    fn an_aggregator_is_found_at_each_address_of_its_name() {
        let nobody = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let config = Config { port: 0, pool_mib: 1, max_jobs: 1, ..Config::default() };
        let aggregator = Aggregator::start(config).unwrap();
        let credentials = Credentials::read_blocking(None, false).unwrap();
        let caller = CallOptions { from: None, credentials, patience: Span::from_secs(5) };
        let status = ask_each("two", &[nobody, aggregator.addr()], &caller).unwrap();
        assert_eq!(status.addr, aggregator.addr().to_string());
        let why = ask_each("two", &[nobody, nobody], &caller).unwrap_err().to_string();
        assert!(why.starts_with("cannot query two: no answer from "), "{why}");
        assert_eq!(why.matches(&nobody.to_string()).count(), 2, "{why}");
    }
}
