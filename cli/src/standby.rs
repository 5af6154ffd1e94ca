//! A standby: an aggregator in a rank's own process, which takes over the job when the job's
//! aggregator fails.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use racksum_aggregator::{Aggregator, Config, Options, StartError, bind_address};
use racksum_net::clock::Clock;
use racksum_proto::time::Span;

use crate::exit::Failure;
use crate::member::Member;
use crate::stderr;

/// The flags of a standby.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct StandbyArgs {
    /// Also run a standby aggregator at this address, which --aggregator must list too; the job
    /// moves to it when the aggregators before it in the list have failed.
    #[arg(long, value_name = "IP:PORT", requires = "rank", value_parser = address)]
    standby: Option<SocketAddr>,
    /// Identity file of the standby, as `racksum identity issue --role aggregator` writes it.
    #[arg(long, value_name = "FILE", requires = "standby")]
    standby_identity: Option<PathBuf>,
}

fn address(text: &str) -> Result<SocketAddr, String> {
    let addr: SocketAddr = text.parse().map_err(|_| "must be IP:PORT".to_owned())?;
    bind_address(&addr.ip().to_string()).map(|_| addr)
}

impl StandbyArgs {
    /// Starts the standby, if the flags ask for one.
    pub(crate) fn start(&self, member: &Member) -> Result<Option<Standby>, Failure> {
        let Some(at) = self.standby else { return Ok(None) };
        if !member.names(at) {
            return Err(Failure::usage(format!(
                "--aggregator does not list the standby {at}, so no rank would move to it; add it, \
                 after a comma, to --aggregator of every rank"
            )));
        }
        let config = Config {
            bind: at.ip(),
            port: at.port(),
            max_jobs: 1,
            identity: self.standby_identity.clone(),
            insecure: member.insecure,
            data_auth: member.data_auth,
            ..Config::default()
        };
        let aggregator = Aggregator::start(config).map_err(|error| of_standby(&error))?;
        for warning in aggregator.warnings() {
            stderr::warn(format_args!("standby: {warning}"));
        }
        Ok(Some(Standby { aggregator }))
    }
}

/// Returns the failure for a standby that did not start. The message names the flags of a standby
/// instead of those of an aggregator.
fn of_standby(error: &StartError) -> Failure {
    let options = Options { port: "--standby", identity: "--standby-identity", memory: &[] };
    let failure = Failure::of_start(error, &options);
    Failure { why: format!("cannot start the standby: {failure}"), ..failure }
}

/// A running standby.
pub(crate) struct Standby {
    aggregator: Aggregator,
}

impl Standby {
    /// Stops the standby. If the job has moved to it, first waits until the job has ended at all
    /// other ranks, for at most `patience_s` seconds.
    pub(crate) fn finish(self, patience_s: u64) {
        let clock = Clock::start();
        let end = clock.now() + Span::from_secs(patience_s);
        while self.aggregator.jobs() > 0 {
            if clock.now() >= end {
                stderr::warn(format_args!(
                    "standby: stopping although its job still runs after {patience_s} s; the job \
                     loses this aggregator"
                ));
                return;
            }
            std::thread::sleep(POLL);
        }
    }
}

/// How often a standby checks whether its job has ended.
const POLL: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn a_standby_that_does_not_start_is_told_of_by_its_own_flags() {
        let taken = UdpSocket::bind("127.0.0.1:0").unwrap();
        let here = Config { port: taken.local_addr().unwrap().port(), ..Config::default() };
        let open = Config { bind: "0.0.0.0".parse().unwrap(), port: 0, ..Config::default() };
        let large = Config { pool_mib: 1 << 20, ..Config::default() };
        for (config, expected) in [
            (here, "address in use; choose another port with --standby, "),
            (open, "set --standby-identity to an"),
            (large, "; use a host with more"),
        ] {
            let why = of_standby(&Aggregator::start(config).unwrap_err()).to_string();
            assert!(
                why.starts_with("cannot start the standby: ") && why.contains(expected),
                "{why}"
            );
        }
        // Other text that looks like a flag stays unchanged.
        let path: PathBuf = "/none/--identity/--port".into();
        let unread = Config { identity: Some(path), ..Config::default() };
        let why = of_standby(&Aggregator::start(unread).unwrap_err()).to_string();
        assert!(why.contains(" /none/--identity/--port: "), "{why}");
        let none = of_standby(&StartError::Memory { mib: 1024 }).to_string();
        assert!(none.contains("; raise the limit on") && !none.contains("--pool"), "{none}");
    }
}
