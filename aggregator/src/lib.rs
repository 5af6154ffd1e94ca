//! The aggregator: receives the ranks' block-sparse streams over UDP, folds them window by window
//! in rank order, and sends the sums back.
//!
//! A shard is one thread with one socket. Each shard runs the aggregator half of `racksum-proto`
//! for every job, and owns packet buffers that it allocates at start. Ranks join by calling the
//! control server over QUIC. `racksum-proto` makes the protocol's decisions, and `racksum-net`
//! makes the system calls. Read [`Aggregator`] and [`Config`] first.

mod admission;
mod admit_rule;
mod arena;
mod caller_limits;
mod caller_session;
mod config;
mod control_stream;
mod destinations;
mod error;
mod expiry;
mod failure;
mod handshake;
mod job_keys;
mod job_move;
mod lifelines;
mod multicast_ping;
mod network;
mod parent_session;
mod paths;
mod queue;
mod quotas;
mod rank_session;
mod registry;
mod server;
mod shard;
mod slots;
mod start;
mod status;
mod wall_clock;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

pub use admit_rule::Admit;
pub use config::{Config, ConfigError, Fanout, MAX_SHARDS, PORT, bind_address, bounds, host_mib};
pub use error::{Options, StartError};
use failure::Failure;
use racksum_net::quic::{Credentials, change_credentials, quinn};
pub use registry::MAX_LANES;
use registry::{SharedRegistry, lock};
use shard::ShardHandle;
pub use shard::ShardStats;
pub use slots::MAX_WORLD;
use tokio::sync::watch;

/// A running aggregator. Dropping it stops it.
#[derive(Debug)]
pub struct Aggregator {
    addr: SocketAddr,
    registry: SharedRegistry,
    endpoint: quinn::Endpoint,
    /// The current credentials: this aggregator's identity, and the authorities that it trusts.
    credentials: Arc<Mutex<Credentials>>,
    /// Set once an operator has asked this aggregator to drain.
    drain_requested: watch::Sender<bool>,
    /// Signals that an authority is no longer trusted.
    change_authorities: watch::Sender<()>,
    control: Option<JoinHandle<()>>,
    failure: Failure,
    warnings: Vec<String>,
}

impl Aggregator {
    /// Returns the address of the control plane, which workers connect to.
    #[must_use]
    pub const fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Returns each shard's counters, which may be slightly out of date.
    #[must_use]
    pub fn stats(&self) -> Vec<ShardStats> {
        lock(&self.registry).shards().iter().map(ShardHandle::stats).collect()
    }

    /// Returns the addresses of the shards' data sockets.
    #[must_use]
    pub fn data_addrs(&self) -> Vec<SocketAddr> {
        lock(&self.registry).shards().iter().map(|shard| shard.addr).collect()
    }

    /// Returns the current configuration.
    #[must_use]
    pub fn config(&self) -> Config {
        lock(&self.registry).config().clone()
    }

    /// Applies another configuration. Running jobs keep their grants. If an authority is no longer
    /// trusted, callers that have not joined must connect again. Returns the keys that differ from
    /// the running configuration but take effect only after a restart; they keep their old values.
    ///
    /// # Errors
    /// The new credentials cannot be used; the configuration is unchanged.
    pub fn reload(&self, reload: Reload) -> Result<Vec<&'static str>, StartError> {
        let Reload { config, fixed, credentials } = reload;
        let Some(credentials) = credentials else {
            lock(&self.registry).reconfigure(config);
            return Ok(fixed);
        };
        change_credentials(&self.endpoint, &credentials)?;
        lock(&self.registry).reconfigure(config);
        let mut before = self.credentials.lock().unwrap_or_else(PoisonError::into_inner);
        if !credentials.accept_all_of(&before) {
            self.change_authorities.send_replace(());
        }
        *before = credentials;
        Ok(fixed)
    }

    /// Stops accepting jobs, and asks the ranks of running jobs to move to another aggregator. Jobs
    /// without a standby are served until they end; [`Self::jobs`] returns how many jobs are left.
    pub fn drain(&self) {
        lock(&self.registry).drain();
    }

    /// Waits, possibly forever, until an operator asks this aggregator to drain and stop. All jobs
    /// that run have moved by then.
    pub async fn drain_requested(&self) {
        let mut requested = self.drain_requested.subscribe();
        if requested.wait_for(|requested| *requested).await.is_err() {
            // The channel cannot close, because `self` holds the sender.
            std::future::pending().await
        }
    }

    /// Waits until no connection is open.
    pub async fn idle(&self) {
        self.endpoint.wait_idle().await;
    }

    /// Returns why the aggregator stopped serving, if one of its threads has failed. After such a
    /// failure, the control server closes the connections of all ranks.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        self.failure.subscribe().borrow().clone()
    }

    /// Waits, possibly forever, until one of the threads fails. Returns the reason for the failure.
    pub async fn failed(&self) -> String {
        let mut failure = self.failure.subscribe();
        match failure.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(why)) => why.clone(),
            // The channel cannot close, because `self` holds the sender.
            _ => std::future::pending().await,
        }
    }

    /// Returns the number of open jobs, including those that still gather ranks.
    #[must_use]
    pub fn jobs(&self) -> usize {
        lock(&self.registry).jobs()
    }

    /// Returns warnings about degraded resources, such as small receive buffers. A warning that
    /// several shards share appears once.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let registry = lock(&self.registry);
        let all = registry.shards().iter().filter_map(|shard| shard.shortfall.clone());
        let all: BTreeSet<_> = all.collect();
        self.warnings.iter().cloned().chain(all).collect()
    }
}

/// A new configuration for a running aggregator, with the credentials that it names.
#[derive(Debug)]
pub struct Reload {
    config: Config,
    fixed: Vec<&'static str>,
    /// The new credentials; `None` if the new configuration removes the identity, which needs a
    /// restart. Until then the present identity stays in use, even if its file no longer exists.
    credentials: Option<Credentials>,
}

impl Reload {
    /// Checks a configuration against the `running` one, and reads the identity file again. The
    /// read may block forever, for example on an unreachable network file system. Do not call this
    /// function from a thread that other threads wait for.
    ///
    /// # Errors
    /// The configuration is invalid, or the identity file cannot be used.
    pub fn read(mut config: Config, running: &Config) -> Result<Self, StartError> {
        config.validate()?;
        // Ignore the warning about smaller packet buffers: the start has already reported it.
        let _smaller = host_mib().map_or(Ok(None), |mib| config.fit_memory(mib))?;
        let fixed = config.fixed_changes(running);
        let stays = config.identity.is_none() && running.identity.is_some();
        let config = config.with_fixed_of(running);
        let read = || Credentials::of_aggregator(config.identity.as_deref(), config.insecure);
        let credentials = if stays { None } else { Some(read()?) };
        Ok(Self { config, fixed, credentials })
    }
}

impl Drop for Aggregator {
    fn drop(&mut self) {
        lock(&self.registry).stop();
        self.endpoint.close(0u32.into(), b"the aggregator stops");
        if let Some(control) = self.control.take() {
            // Ignore a panic of the control thread: the panic hook has already printed it.
            drop(control.join());
        }
    }
}

#[cfg(test)]
mod tests;
