//! Calls to an aggregator at its network address, possibly on another host.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use racksum_net::quic::{CallOptions, Credentials, Ended};
use racksum_net::runtime::single_threaded;
use racksum_net::{NetError, with_limit};
use racksum_proto::time::Span;

use crate::environment;
use crate::exit::{Failure, with_flags};

/// Time that an aggregator may take to answer.
const PATIENCE: Span = Span::from_secs(5);

/// A call to an aggregator.
pub(crate) struct Call<'a> {
    /// The verb of the call, for errors, such as "query".
    pub(crate) verb: &'a str,
    /// The aggregator's name, for errors.
    pub(crate) name: &'a str,
    pub(crate) addrs: Vec<SocketAddr>,
    pub(crate) identity: Option<PathBuf>,
    pub(crate) insecure: bool,
}

impl Call<'_> {
    /// Calls the addresses in turn until an aggregator answers.
    pub(crate) fn ask<T>(
        self,
        ask: impl AsyncFn(SocketAddr, &CallOptions) -> Result<T, Ended>,
    ) -> Result<T, Failure> {
        let Self { verb, name, addrs, identity, insecure } = self;
        let (identity, insecure) = environment::credentials(identity, insecure)?;
        let credentials = Credentials::read_blocking(identity, insecure)?;
        let caller = CallOptions { from: None, credentials, patience: PATIENCE };
        let cannot = |why: &dyn fmt::Display| {
            Failure::unavailable(format!("cannot {verb} {name}: {}", with_flags(why)))
        };
        let runtime = single_threaded();
        let runtime = runtime.map_err(|error| cannot(&with_limit(&error)))?;
        let mut tried: Vec<NetError> = Vec::new();
        for to in addrs {
            match runtime.block_on(ask(to, &caller)) {
                Ok(answer) => return Ok(answer),
                Err(Ended::Unconnected(error)) => tried.push(error),
                Err(other) => return Err(cannot(&other)),
            }
        }
        let each: Vec<_> = tried.iter().map(ToString::to_string).collect();
        match tried.pop() {
            Some(only) if tried.is_empty() => Err(only.into()),
            _ => Err(cannot(&each.join("; "))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use racksum_aggregator::{Aggregator, Config};
    use racksum_net::quic::ask_status;

    use super::*;

    #[test]
    fn an_aggregator_is_found_at_each_address_of_its_name() {
        let nobody = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let config = Config { port: 0, pool_mib: 1, max_jobs: 1, ..Config::default() };
        let aggregator = Aggregator::start(config).unwrap();
        let ask = |addrs: [SocketAddr; 2]| {
            let (addrs, identity, insecure) = (addrs.to_vec(), None, false);
            Call { verb: "query", name: "two", addrs, identity, insecure }
                .ask(async |to, caller| ask_status(to, caller).await)
        };
        let status = ask([nobody, aggregator.addr()]).unwrap();
        assert!(status.contains(&aggregator.addr().to_string()), "{status}");
        let why = ask([nobody, nobody]).unwrap_err().to_string();
        assert!(why.starts_with("cannot query two: no answer from "), "{why}");
        assert_eq!(why.matches(&nobody.to_string()).count(), 2, "{why}");
    }
}
