//! Conversion of the package's `ConnectOptions` to the worker's.

use std::path::PathBuf;
use std::time::Duration;

use pyo3::prelude::*;
use racksum_proto::ids::Generation;
use racksum_worker::{ConnectOptions, aggregator_sets};

use crate::errors::{bad, read};

/// The attributes of the package's `ConnectOptions`, with the same names and meanings.
#[derive(Debug, FromPyObject)]
pub(crate) struct Options {
    aggregator: String,
    job: String,
    group: String,
    secret: Option<String>,
    generation: u32,
    rank: u16,
    world: u16,
    lanes: u8,
    pool_slots: u32,
    multicast: bool,
    identity: Option<PathBuf>,
    insecure: bool,
    data_auth: Option<String>,
    wait: bool,
    rejoin: bool,
    on_rank_loss: String,
    join_timeout: f64,
    timeout: f64,
    mtu: Option<usize>,
    interface: Option<String>,
    local_world: Option<u16>,
}

impl Options {
    pub(crate) fn into_connect_options(self, py: Python<'_>) -> PyResult<ConnectOptions> {
        let data_auth = self.data_auth.as_deref().map(|name| read(py, "data_auth", name));
        let data_auth = data_auth.transpose()?;
        let on_rank_loss = read(py, "on_rank_loss", &self.on_rank_loss)?;
        let secret = self.secret.as_deref().map(|text| read(py, "secret", text)).transpose()?;
        let sets = aggregator_sets(&self.aggregator);
        let mut sets = sets.map_err(|why| bad(py, "aggregator", why))?.into_iter();
        Ok(ConnectOptions {
            aggregators: sets.next().unwrap_or_default(),
            standbys: sets.collect(),
            group: self.group,
            secret,
            generation: Generation(self.generation),
            rank: self.rank,
            world: self.world,
            local_world: self.local_world,
            lanes: self.lanes,
            pool_slots: self.pool_slots,
            multicast: self.multicast,
            identity: self.identity,
            insecure: self.insecure,
            data_auth,
            wait: self.wait,
            rejoin: self.rejoin,
            on_rank_loss,
            join_timeout: seconds(self.join_timeout),
            op_timeout: seconds(self.timeout),
            mtu: self.mtu,
            interface: self.interface,
            ..ConnectOptions::new("", self.job)
        })
    }
}

/// Converts seconds to a duration. The package has already rejected NaN and negative values.
fn seconds(seconds: f64) -> Duration {
    // Values beyond the range of `Duration` mean no limit.
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}
