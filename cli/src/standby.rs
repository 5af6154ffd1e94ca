//! A standby: an aggregator in a rank's own process, where the job goes on when its own is gone.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use racksum_aggregator::{Aggregator, Config};
use racksum_net::clock::Clock;
use racksum_proto::time::Span;

use crate::exit::Failure;
use crate::member::Member;
use crate::stderr;

/// The flags of a standby.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct StandbyArgs {
    /// Be an aggregator as well, at this address, for when those before it in --aggregator are
    /// gone; it is named there too.
    #[arg(long, value_name = "IP:PORT", requires = "rank")]
    standby: Option<SocketAddr>,
    /// The identity file of this aggregator, as `racksum identity issue --role aggregator` writes
    /// it.
    #[arg(long, value_name = "FILE", requires = "standby")]
    standby_identity: Option<PathBuf>,
}

impl StandbyArgs {
    /// Starts the standby, if there is to be one.
    pub(crate) fn start(&self, member: &Member) -> Result<Option<Standby>, Failure> {
        let Some(at) = self.standby else { return Ok(None) };
        let config = Config {
            bind: at.ip(),
            port: at.port(),
            max_jobs: 1,
            identity: self.standby_identity.clone(),
            insecure: member.insecure,
            data_auth: member.data_auth,
            ..Config::default()
        };
        let aggregator = Aggregator::start(config)?;
        for warning in aggregator.warnings() {
            stderr::warn(format_args!("standby: {warning}"));
        }
        Ok(Some(Standby { aggregator }))
    }
}

/// A running standby.
pub(crate) struct Standby {
    aggregator: Aggregator,
}

impl Standby {
    /// Stops, once the job that has moved here has ended at all other ranks too, which may take so
    /// many seconds.
    pub(crate) fn finish(self, patience_s: u64) {
        let clock = Clock::start();
        let end = clock.now() + Span::from_secs(patience_s);
        while self.aggregator.jobs() > 0 {
            if clock.now() >= end {
                stderr::warn(format_args!(
                    "standby: stops although its job goes on after {patience_s} s"
                ));
                return;
            }
            std::thread::sleep(POLL);
        }
    }
}

/// How often a standby looks whether its job has ended.
const POLL: Duration = Duration::from_millis(20);
