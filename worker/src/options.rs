//! The options that a worker connects with.

use std::path::{Path, PathBuf};
use std::time::Duration;

use racksum_proto::auth::{DataAuth, Key};
use racksum_proto::control::OnRankLoss;
use racksum_proto::ids::Generation;
use racksum_proto::job_name::JobName;

use crate::error::ConnectError;
use crate::fault::Faults;

/// The prefix that marks an entry in the list of aggregators as the path of a sidecar.
const SIDECAR: &str = "unix:";

/// Parses the sets of aggregators that a job tries in order, as users write them: `A+B,C` spreads a
/// job over A and B, and fails over to C. `unix:PATH` is the sidecar of this host.
///
/// # Errors
/// Returns a message for the user if an aggregator has no name, or its name contains a space or
/// `;`.
pub fn aggregator_sets(text: &str) -> Result<Vec<Vec<String>>, String> {
    if text.starts_with(SIDECAR) {
        return Ok(vec![vec![text.to_owned()]]);
    }
    let set = |set: &str| set.split('+').map(|host| host.trim().to_owned()).collect();
    let sets: Vec<Vec<String>> = text.split(',').map(set).collect();
    if sets.iter().flatten().any(String::is_empty) {
        return Err(
            "an aggregator in the list is empty; give each as HOST:PORT, with + or , between them"
                .into(),
        );
    }
    if let Some(several) = sets.iter().flatten().find(|host| host.contains(';')) {
        return Err(format!("{several:?} contains a semicolon; separate aggregators with + or ,"));
    }
    let has_space = |host: &&String| host.contains(char::is_whitespace);
    if let Some(several) = sets.iter().flatten().find(has_space) {
        return Err(format!("{several:?} contains a space; separate aggregators with + or ,"));
    }
    Ok(sets)
}

/// The options of a worker: its rank and job, its aggregators, and the limits that it asks for.
#[derive(Debug, Clone, PartialEq)]
pub struct ConnectOptions {
    /// The aggregators, `HOST:PORT`. The job's windows spread over the shards of all of them. A
    /// single `unix:PATH` is the sidecar of this host, which joins the job for the rank.
    pub aggregators: Vec<String>,
    /// The standby sets. When an aggregator fails or is about to stop, the job tries the sets in
    /// this order, beginning with the one after its current set. After the last set, it starts over
    /// with `aggregators`. It moves to the first set whose aggregators all accept it. All ranks
    /// must list the same sets, and no aggregator twice.
    pub standbys: Vec<Vec<String>>,
    /// The job's name.
    pub job: String,
    /// The name of one of the job's groups, which sums on its own; empty if the job has none.
    pub group: String,
    /// The life of the job that this worker belongs to.
    pub generation: Generation,
    /// The secret that all lives of the job share. With the same secret, a greater generation ends
    /// the earlier one.
    pub secret: Option<Key>,
    /// This worker's number, counted from 0.
    pub rank: u16,
    /// Other ranks that this worker represents: it contributes one sum, of their tensors and its
    /// own.
    pub also: Vec<u16>,
    /// The number of ranks in the job.
    pub world: u16,
    /// The number of the job's ranks on this host, for which a sidecar waits; `None` if all ranks
    /// of the job are on this host.
    pub local_world: Option<u16>,
    /// The number of priority classes. Ops in lower-numbered lanes go first.
    pub lanes: u8,
    /// The most slots that a stream may have; 0 leaves the limit to the aggregator.
    pub pool_slots: u32,
    /// Whether to receive results by multicast, if the aggregator has a group.
    pub multicast: bool,
    /// The identity file to connect with. With it, the worker joins only aggregators that the
    /// file's authorities certify.
    pub identity: Option<PathBuf>,
    /// Whether to connect beyond loopback without an identity.
    pub insecure: bool,
    /// How datagrams must be authenticated; `None` leaves the choice to the aggregator.
    pub data_auth: Option<DataAuth>,
    /// Whether to wait while an aggregator has no room for the job, instead of being refused.
    pub wait: bool,
    /// Whether this rank left the job between two ops, by closing its client, and now returns. It
    /// resumes with the op that it would have started next, `Grant::first_op`. Ops that the other
    /// ranks start in the meantime fail, as they do after any rank leaves.
    pub rejoin: bool,
    /// The reaction of the job to the loss of a rank; all ranks must choose the same one.
    pub on_rank_loss: OnRankLoss,
    /// How long to wait for an answer from an aggregator, for room and for the other ranks.
    pub join_timeout: Duration,
    /// How long an op may take. With a sidecar, the smallest value of all ranks of the host
    /// applies.
    pub op_timeout: Duration,
    /// The path's MTU, in bytes; `None` selects the MTU of the interface.
    pub mtu: Option<usize>,
    /// A pattern for the interfaces of this host from which to connect to aggregators on other
    /// hosts; [`select`](racksum_net::interface::select) documents the syntax. `None` leaves the
    /// choice to the kernel's routes.
    pub interface: Option<String>,
    /// Injected faults, for tests.
    pub faults: Faults,
}

impl ConnectOptions {
    /// Returns the full name of the job, including its group.
    #[must_use]
    pub fn job_name(&self) -> JobName {
        JobName::new(&*self.job, &*self.group)
    }

    /// Creates the options of a rank with these aggregators, in the syntax of [`aggregator_sets`],
    /// and defaults for the rest.
    ///
    /// # Errors
    /// Returns [`ConnectError::Arguments`] if the text is not a valid list of aggregators.
    pub fn parse(aggregators: &str, job: impl Into<String>) -> Result<Self, ConnectError> {
        let sets = aggregator_sets(aggregators).map_err(ConnectError::of_aggregators)?;
        let mut sets = sets.into_iter();
        let aggregators = sets.next().unwrap_or_default();
        Ok(Self { aggregators, standbys: sets.collect(), ..Self::new("", job) })
    }

    /// Returns the path of the sidecar, if the rank joins through one.
    #[must_use]
    pub fn sidecar(&self) -> Option<&Path> {
        match &*self.aggregators {
            [only] => only.strip_prefix(SIDECAR).map(Path::new),
            _ => None,
        }
    }

    /// Creates the options of a rank with one aggregator and defaults for the rest.
    #[must_use]
    pub fn new(aggregator: impl Into<String>, job: impl Into<String>) -> Self {
        Self {
            aggregators: vec![aggregator.into()],
            standbys: Vec::new(),
            job: job.into(),
            group: String::new(),
            generation: Generation(0),
            secret: None,
            rank: 0,
            also: Vec::new(),
            world: 1,
            local_world: None,
            lanes: 1,
            pool_slots: 0,
            multicast: true,
            identity: None,
            insecure: false,
            data_auth: None,
            wait: false,
            rejoin: false,
            on_rank_loss: OnRankLoss::Abort,
            join_timeout: Duration::from_secs(300),
            op_timeout: Duration::from_secs(60),
            mtu: None,
            interface: None,
            faults: Faults::default(),
        }
    }
}
