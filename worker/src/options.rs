//! What a worker connects with.

use std::path::PathBuf;
use std::time::Duration;

use racksum_proto::auth::{DataAuth, Key};
use racksum_proto::control::OnRankLoss;
use racksum_proto::ids::Generation;
use racksum_proto::job_name::JobName;

use crate::fault::Faults;

/// The sets of aggregators of a job, in the order in which they are tried, as users write them:
/// `A+B,C` spreads a job over A and B, and goes on at C.
///
/// # Errors
/// A sentence, if an aggregator has no name, or one with a space.
pub fn aggregator_sets(text: &str) -> Result<Vec<Vec<String>>, String> {
    let set = |set: &str| set.split('+').map(|host| host.trim().to_owned()).collect();
    let sets: Vec<Vec<String>> = text.split(',').map(set).collect();
    if sets.iter().flatten().any(String::is_empty) {
        return Err("an aggregator between + and , has no name; give each as HOST:PORT".into());
    }
    if let Some(several) = sets.iter().flatten().find(|host| host.contains(';')) {
        return Err(format!("{several:?} has a ; in it; put + or , between two aggregators"));
    }
    let has_space = |host: &&String| host.contains(char::is_whitespace);
    if let Some(several) = sets.iter().flatten().find(has_space) {
        return Err(format!("{several:?} has a space in it; put + or , between two aggregators"));
    }
    Ok(sets)
}

/// Who a worker is, and where its aggregators are.
#[derive(Debug, Clone, PartialEq)]
pub struct ConnectOptions {
    /// The aggregators, `HOST:PORT`; the job's windows are spread over the shards of all.
    pub aggregators: Vec<String>,
    /// Where the job goes on when one of these is gone, or is about to stop: at all of the first
    /// set that it can, in this order, and then from the start. All ranks name the same, and no
    /// aggregator twice.
    pub standbys: Vec<Vec<String>>,
    /// The job's name.
    pub job: String,
    /// The name of one of the job's groups, which sums by itself; empty if it has none.
    pub group: String,
    /// The job's life.
    pub generation: Generation,
    /// What all lives of the job have in common and nobody else knows: a greater generation with
    /// the same secret ends the one before.
    pub secret: Option<Key>,
    /// This worker's number, from 0.
    pub rank: u16,
    /// Ranks that this worker speaks for besides its own: it contributes the sum of all of them.
    pub also: Vec<u16>,
    /// How many ranks the job has.
    pub world: u16,
    /// Priority classes; an op of a lower lane goes first.
    pub lanes: u8,
    /// Most slots a stream; 0 leaves it to the aggregator.
    pub pool_slots: u32,
    /// Whether to listen to a multicast group, if the aggregator has one.
    pub multicast: bool,
    /// The identity file to connect with; only aggregators of its authorities are joined then.
    pub identity: Option<PathBuf>,
    /// Connect beyond loopback without identities.
    pub insecure: bool,
    /// How datagrams must be authenticated; `None` leaves it to the aggregator.
    pub data_auth: Option<DataAuth>,
    /// Whether to wait while an aggregator has no room for the job, rather than to be refused.
    pub wait: bool,
    /// Whether this rank has left the job between two ops, by closing its client, and comes back to
    /// it: it goes on with the op that it would have started next, `Client::welcome().first_op`.
    /// What the others start in the meantime fails, as of any rank that has left.
    pub rejoin: bool,
    /// What becomes of the job when it loses a rank; all ranks say the same.
    pub on_rank_loss: OnRankLoss,
    /// How long to wait for an aggregator that answers, for room and for the other ranks.
    pub join_timeout: Duration,
    /// How long an op may take. Beside a sidecar the least counts that a rank of the host says.
    pub op_timeout: Duration,
    /// The path's MTU; `None` takes the interface's.
    pub mtu: Option<usize>,
    /// Which of this host's interfaces to call aggregators on other hosts from, in the grammar of
    /// [`select`](racksum_net::interface::select); `None` leaves it to the routes.
    pub interface: Option<String>,
    /// Faults on purpose.
    pub faults: Faults,
}

impl ConnectOptions {
    /// What the job is called.
    #[must_use]
    pub fn job_name(&self) -> JobName {
        JobName::new(&*self.job, &*self.group)
    }

    /// A rank of a job at one aggregator; the rest are defaults.
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
