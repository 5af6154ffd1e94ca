//! What an aggregator and a sidecar say of themselves, as `racksum status` shows it.
//!
//! Both write these types as JSON. Every text in them is read as a peer's, so it is safe to show.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::job_name::JobName;
use crate::peer_text::PeerText;

/// What an aggregator is doing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AggregatorStatus {
    /// The release that runs.
    #[serde(deserialize_with = "PeerText::string")]
    pub version: String,
    /// Where its control plane is.
    #[serde(deserialize_with = "PeerText::string")]
    pub addr: String,
    /// Milliseconds since it started.
    pub up_ms: u64,
    /// The aggregator that it sends its sums to, if it has a parent.
    #[serde(default, deserialize_with = "PeerText::option")]
    pub parent: Option<String>,
    /// Whether it believes everyone.
    pub insecure: bool,
    /// How datagrams are authenticated.
    #[serde(deserialize_with = "PeerText::string")]
    pub data_auth: String,
    /// Most jobs at a time.
    pub max_jobs: u16,
    /// Whether it takes no more jobs, since it is about to stop.
    pub draining: bool,
    /// The jobs, by name.
    pub jobs: Vec<JobStatus>,
    /// Jobs that wait for room, the first first.
    pub queued: Vec<JobName>,
    /// The shards.
    pub shards: Vec<ShardStatus>,
}

/// A job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobStatus {
    /// Its name.
    #[serde(deserialize_with = "PeerText::string")]
    pub job: String,
    /// Which of its groups; empty if it has none.
    #[serde(deserialize_with = "PeerText::string")]
    pub group: String,
    /// Its number here.
    pub id: u32,
    /// Its life.
    pub generation: u32,
    /// How many ranks it has.
    pub world: u16,
    /// How many lanes.
    pub lanes: u8,
    /// The name of its [`JobState`].
    #[serde(deserialize_with = "PeerText::string")]
    pub state: String,
    /// Milliseconds since its first rank joined.
    pub age_ms: u64,
    /// Ranks that have not joined, or are there no more.
    pub missing: Vec<u16>,
    /// The ranks that it has lost and goes on without.
    pub absent: Vec<u16>,
    /// Milliseconds since a window was last folded, while windows are to be: how long the ranks
    /// that are behind have been waited for.
    pub stalled_ms: Option<u64>,
    /// Its ranks.
    pub ranks: Vec<RankStatus>,
}

/// A rank of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankStatus {
    /// Its number.
    pub rank: u16,
    /// Its number in datagrams.
    pub number: u16,
    /// The ranks whose sum it sends, if it is an aggregator that has joined for them.
    pub rack: Vec<u16>,
    /// Where its data comes from.
    #[serde(deserialize_with = "PeerText::string")]
    pub addr: String,
    /// The name in its certificate.
    #[serde(default, deserialize_with = "PeerText::option")]
    pub identity: Option<String>,
    /// The first op that it has not opened at some shard.
    pub next_op: u32,
    /// Windows that it has opened, over all shards.
    pub opened: u64,
    /// Windows whose results it has, or that had none.
    pub delivered: u64,
    /// Milliseconds since any shard heard it.
    pub silent_ms: u64,
    /// The next window waits for this rank.
    pub behind: bool,
}

/// A shard.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShardStatus {
    /// Where its data socket is.
    #[serde(deserialize_with = "PeerText::string")]
    pub addr: String,
    /// Datagrams received and sent.
    pub datagrams: [u64; 2],
    /// Bytes of them.
    pub bytes: [u64; 2],
    /// Windows folded.
    pub folds: u64,
    /// Messages that the kernel dropped because the receive buffer was full.
    pub kernel_drops: u64,
    /// Messages that could not be sent.
    pub send_failures: u64,
    /// Datagrams that changed nothing, by reason, where there were any.
    #[serde(deserialize_with = "PeerText::counts")]
    pub rejects: BTreeMap<String, u64>,
    /// Packet buffers in all, and free.
    pub buffers: [usize; 2],
}

impl AggregatorStatus {
    /// Leaves out the jobs of which somebody is not to know.
    pub fn keep_only(&mut self, may_know: impl Fn(&str) -> bool) {
        self.jobs.retain(|job| may_know(&job.job));
        self.queued.retain(|job| may_know(&job.name));
    }
}

/// How far a job is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobState {
    /// Ranks are missing.
    Gathering,
    /// Finding out who hears the multicast group.
    Probing,
    /// Ops may run.
    Running,
}

impl JobState {
    /// All, in the order in which a job has them.
    pub const ALL: [Self; 3] = [Self::Gathering, Self::Probing, Self::Running];

    /// Returns its name, as `racksum status` prints it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gathering => "gathering",
            Self::Probing => "probing",
            Self::Running => "running",
        }
    }
}

/// What a sidecar is doing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SidecarStatus {
    /// The release that runs.
    #[serde(deserialize_with = "PeerText::string")]
    pub version: String,
    /// Milliseconds since it started.
    pub up_ms: u64,
    /// Where jobs meet that have ranks on other hosts: the aggregator, and then its standbys.
    #[serde(deserialize_with = "PeerText::list")]
    pub aggregators: Vec<String>,
    /// Whether it calls them without an identity.
    #[serde(default)]
    pub insecure: bool,
    /// Whether it takes no more jobs, since it is about to stop.
    pub draining: bool,
    /// Most jobs at a time.
    pub max_jobs: usize,
    /// Most ranks at a time.
    pub max_ranks: usize,
    /// How many ranks there are, of all jobs.
    pub ranks: usize,
    /// Bytes of memory that ranks have lent and that sums of lists take, and the most that may be.
    pub memory: [u64; 2],
    /// The jobs that the caller may know of, by name.
    pub jobs: Vec<SidecarJobStatus>,
}

/// A job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SidecarJobStatus {
    /// Its name.
    #[serde(deserialize_with = "PeerText::string")]
    pub job: String,
    /// Which of its groups; empty if it has none.
    #[serde(deserialize_with = "PeerText::string")]
    pub group: String,
    /// Its life.
    pub generation: u32,
    /// Whose it is.
    pub uid: u32,
    /// How many ranks it has.
    pub world: u16,
    /// How many of them are to be on this host.
    pub local_world: u16,
    /// How many lanes.
    pub lanes: u8,
    /// The name of its [`SidecarJobState`].
    #[serde(deserialize_with = "PeerText::string")]
    pub state: String,
    /// Milliseconds since its first rank joined.
    pub age_ms: u64,
    /// How many ranks of this host have not joined, or are there no more.
    pub awaited: usize,
    /// Ops that not all ranks of this host have called.
    pub awaited_ops: usize,
    /// Ops that all have called, and that are being summed here or with other hosts.
    pub summed_ops: usize,
    /// Milliseconds since the oldest op was called that not all have called: how long the ranks
    /// that are behind have been waited for.
    pub stalled_ms: Option<u64>,
    /// Its ranks here.
    pub ranks: Vec<SidecarRankStatus>,
}

/// How far a job of a sidecar is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SidecarJobState {
    /// Ranks of this host are missing.
    Gathering,
    /// Ranks of other hosts are missing.
    Calling,
    /// Ops may run.
    Running,
    /// It has ended.
    Over,
}

impl SidecarJobState {
    /// All, in the order in which a job has them.
    pub const ALL: [Self; 4] = [Self::Gathering, Self::Calling, Self::Running, Self::Over];

    /// Returns its name, as `racksum status` prints it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gathering => "gathering",
            Self::Calling => "calling the aggregator",
            Self::Running => "running",
            Self::Over => "over",
        }
    }
}

/// A rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SidecarRankStatus {
    /// Its number.
    pub rank: u16,
    /// Its process, by the sidecar's numbers.
    pub pid: i32,
    /// The op that it calls next.
    pub next_op: u32,
    /// Bytes of memory that it has lent.
    pub lent_bytes: u64,
    /// The oldest op waits for it.
    pub behind: bool,
}
