//! The status of an aggregator or a sidecar, as `racksum status` shows it.
//!
//! Both programs write these types as JSON. Readers make every text safe to show, like other text
//! from a peer ([`PeerText`]).

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;
use core::ops::AddAssign;

use serde::{Deserialize, Serialize};

use crate::geometry::WINDOW_BYTES;
use crate::job_name::JobName;
use crate::peer_text::PeerText;

/// The status of an aggregator.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AggregatorStatus {
    /// The racksum version of the aggregator.
    #[serde(deserialize_with = "PeerText::string")]
    pub version: String,
    /// The address of the aggregator's control plane.
    #[serde(deserialize_with = "PeerText::string")]
    pub addr: String,
    /// Milliseconds since the aggregator started.
    pub up_ms: u64,
    /// The parent to which the aggregator sends its sums, if it has one.
    #[serde(default, deserialize_with = "PeerText::option")]
    pub parent: Option<String>,
    /// Whether the aggregator accepts callers without verified certificates.
    pub insecure: bool,
    /// The authentication mode of datagrams.
    #[serde(deserialize_with = "PeerText::string")]
    pub data_auth: String,
    /// The most jobs that the aggregator serves at a time.
    pub max_jobs: u16,
    /// Whether the aggregator rejects new jobs because it is about to stop.
    pub draining: bool,
    /// The jobs, sorted by name.
    pub jobs: Vec<JobStatus>,
    /// The jobs that wait for room, in queue order.
    pub queued: Vec<JobName>,
    /// The last jobs that an operator has moved to other aggregators, oldest first.
    pub moved: Vec<MovedJob>,
    /// The shards.
    pub shards: Vec<ShardStatus>,
}

/// A job that an operator has moved to other aggregators.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovedJob {
    /// The names of the job and its group.
    pub job: JobName,
    /// The aggregators that the job has moved to.
    #[serde(deserialize_with = "PeerText::string")]
    pub to: String,
    /// Milliseconds since the move.
    pub ago_ms: u64,
}

/// The status of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobStatus {
    /// The job's name.
    #[serde(deserialize_with = "PeerText::string")]
    pub job: String,
    /// The name of the job's group; empty if the job has no groups.
    #[serde(deserialize_with = "PeerText::string")]
    pub group: String,
    /// The job's number at this aggregator.
    pub id: u32,
    /// The job's generation.
    pub generation: u32,
    /// The number of ranks in the job.
    pub world: u16,
    /// The number of lanes.
    pub lanes: u8,
    /// The name of the job's [`JobState`].
    #[serde(deserialize_with = "PeerText::string")]
    pub state: String,
    /// Milliseconds since the job's first rank joined.
    pub age_ms: u64,
    /// The ranks that have not joined, or are no longer connected.
    pub missing: Vec<u16>,
    /// The lost ranks, without which the job continues.
    pub absent: Vec<u16>,
    /// The aggregators that an operator moves the job to, while that is in progress.
    #[serde(default, deserialize_with = "PeerText::option")]
    pub moving_to: Option<String>,
    /// Milliseconds since the last fold, or since windows began to wait if that was later; `None`
    /// if no window waits. This is how long the job has waited for the ranks that are behind.
    pub stalled_ms: Option<u64>,
    /// The job's ranks.
    pub ranks: Vec<RankStatus>,
}

/// The status of a rank of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankStatus {
    /// The rank.
    pub rank: u16,
    /// The rank's number in datagrams.
    pub number: u16,
    /// The ranks for which this rank sends a sum, if this rank is an aggregator that joined for
    /// them.
    pub rack: Vec<u16>,
    /// The address from which the rank's data comes.
    #[serde(deserialize_with = "PeerText::string")]
    pub addr: String,
    /// The name in the rank's certificate.
    #[serde(default, deserialize_with = "PeerText::option")]
    pub identity: Option<String>,
    /// The op after the last one that the rank has opened at any shard.
    pub next_op: u32,
    /// The number of windows that the rank has opened, over all shards.
    pub opened: u64,
    /// The number of windows that the rank has finished: it has their results, or they have no
    /// result.
    pub delivered: u64,
    /// Milliseconds since any shard last received a datagram from the rank.
    pub silent_ms: u64,
    /// Whether the next window of some stream waits for this rank.
    pub behind: bool,
    /// The contributions of the rank that have arrived completely.
    #[serde(default)]
    pub contributed: Transfers,
    /// The results, all of which go to the rank.
    #[serde(default)]
    pub results: Transfers,
    /// Milliseconds for which the rank had windows open without their results: over all lanes, at
    /// the shard where that is longest.
    #[serde(default)]
    pub busy_ms: u64,
    /// Milliseconds for which windows have waited for the rank's data alone, after the rank had
    /// opened them: over all lanes, at the shard where that is longest.
    #[serde(default)]
    pub waited_ms: u64,
    /// The shortest measured round trip between aggregator and rank, in microseconds. `None` before
    /// the first measurement, or if all took longer than a millisecond and no datagram was lost.
    #[serde(default)]
    pub round_trip_us: Option<u64>,
    /// The rank's own counters, as it last reported them. `None` before the first report, and for
    /// an aggregator that joined for its ranks.
    #[serde(default)]
    pub own: Option<OwnCounters>,
}

/// Counters that a rank keeps itself at one aggregator, since it joined there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnCounters {
    /// The contributions that the rank has sent, and how many of their fragments it sent again.
    pub sent: Transfers,
    /// The results that have arrived completely, and how many of their fragments arrived only as a
    /// copy that was sent again.
    pub results: Transfers,
    /// Milliseconds for which the rank awaited results: over all lanes, at the shard where that is
    /// longest.
    pub busy_ms: u64,
    /// The shortest measured round trip between rank and aggregator, in microseconds. It may
    /// include a wait for other ranks.
    pub round_trip_us: Option<u64>,
    /// The number of datagrams that the kernel dropped because the rank's receive buffer was full,
    /// from all aggregators of the job together.
    pub kernel_drops: u64,
}

impl OwnCounters {
    /// Returns what these counters have grown by since `earlier`, with the shortest round trip of
    /// all time.
    #[must_use]
    pub const fn since(&self, earlier: &Self) -> Self {
        Self {
            sent: self.sent.since(earlier.sent),
            results: self.results.since(earlier.results),
            busy_ms: self.busy_ms.saturating_sub(earlier.busy_ms),
            round_trip_us: self.round_trip_us,
            kernel_drops: self.kernel_drops.saturating_sub(earlier.kernel_drops),
        }
    }

    /// Returns whether a rank that reported `earlier` can report this: no counter shrinks, the
    /// shortest round trip does not grow, and no fragment is larger than a window.
    #[must_use]
    pub fn may_follow(&self, earlier: &Self) -> bool {
        // wire: W-80
        let counters = |it: &Self| {
            let Self { sent, results, busy_ms, kernel_drops, .. } = *it;
            let each = [sent, results].map(|it| [it.bytes, it.fragments, it.again]);
            (each, busy_ms, kernel_drops)
        };
        let ((now, busy, drops), (before, busy_before, drops_before)) =
            (counters(self), counters(earlier));
        let grows = now.iter().flatten().zip(before.iter().flatten()).all(|(now, it)| now >= it);
        let trip = earlier
            .round_trip_us
            .is_none_or(|before_us| self.round_trip_us.is_some_and(|trip_us| trip_us <= before_us));
        let fits = [self.sent, self.results]
            .iter()
            .all(|it| it.bytes <= it.fragments.saturating_mul(WINDOW_BYTES as u64));
        grows && busy >= busy_before && drops >= drops_before && trip && fits
    }
}

/// Windows that were transferred between an aggregator and a rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transfers {
    /// The bytes of their payload.
    pub bytes: u64,
    /// The number of their fragments.
    pub fragments: u64,
    /// The number of fragments that were sent again. If the receiver counts, only those count that
    /// arrived before the first copy.
    pub again: u64,
}

impl Transfers {
    /// Adds a window of `len` bytes.
    pub fn add(&mut self, len: usize, fragments: u32) {
        self.bytes += len as u64;
        self.fragments += u64::from(fragments);
    }

    /// Returns what these counters have grown by since `earlier`.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_sub(earlier.bytes),
            fragments: self.fragments.saturating_sub(earlier.fragments),
            again: self.again.saturating_sub(earlier.again),
        }
    }
}

impl AddAssign for Transfers {
    fn add_assign(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.fragments += other.fragments;
        self.again += other.again;
    }
}

/// The status of a shard.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShardStatus {
    /// The address of the shard's data socket.
    #[serde(deserialize_with = "PeerText::string")]
    pub addr: String,
    /// The number of datagrams that the shard has received and sent.
    pub datagrams: Traffic,
    /// The number of bytes in those datagrams.
    pub bytes: Traffic,
    /// The number of windows folded.
    pub folds: u64,
    /// The number of fragments that had arrived before.
    pub duplicates: u64,
    /// The number of fragments that were sent again.
    pub fragments_again: u64,
    /// The number of nacks that asked for missing fragments.
    pub asks: u64,
    /// The number of datagrams that the kernel dropped because the receive buffer was full or the
    /// sender was refused for flooding.
    pub kernel_drops: u64,
    /// The number of sends that the kernel refused, or had no room for in time.
    pub send_failures: u64,
    /// The number of rejected messages and datagrams, for each reason that has occurred.
    #[serde(deserialize_with = "PeerText::counts")]
    pub rejects: BTreeMap<String, u64>,
    /// The packet buffers.
    pub buffers: Buffers,
}

/// A counter for each direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// The number received.
    pub received: u64,
    /// The number sent.
    pub sent: u64,
}

/// The packet buffers of a shard.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Buffers {
    /// The number of buffers.
    pub total: usize,
    /// The number of free buffers.
    pub free: usize,
}

/// The memory of a sidecar, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// The bytes in use.
    pub used: u64,
    /// The most bytes that may be in use.
    pub limit: u64,
}

impl AggregatorStatus {
    /// Removes all jobs whose names `may_know` rejects.
    pub fn keep_only(&mut self, may_know: impl Fn(&str) -> bool) {
        self.jobs.retain(|job| may_know(&job.job));
        self.queued.retain(|job| may_know(&job.name));
        self.moved.retain(|moved| may_know(&moved.job.name));
    }
}

/// The progress of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobState {
    /// Some ranks have not joined.
    Gathering,
    /// The aggregator is pinging the multicast group to find out which ranks receive its pings.
    Probing,
    /// Ops may run.
    Running,
}

impl JobState {
    /// All states, in the order in which a job enters them.
    pub const ALL: [Self; 3] = [Self::Gathering, Self::Probing, Self::Running];

    /// Returns the state's name, as `racksum status` prints it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gathering => "gathering",
            Self::Probing => "probing",
            Self::Running => "running",
        }
    }
}

/// The status of a sidecar.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SidecarStatus {
    /// The racksum version of the sidecar.
    #[serde(deserialize_with = "PeerText::string")]
    pub version: String,
    /// Milliseconds since the sidecar started.
    pub up_ms: u64,
    /// The aggregators for jobs with ranks on other hosts: the first choice, then the standbys.
    #[serde(deserialize_with = "PeerText::list")]
    pub aggregators: Vec<String>,
    /// Whether the sidecar calls the aggregators without an identity.
    #[serde(default)]
    pub insecure: bool,
    /// Whether the sidecar rejects new jobs because it is about to stop.
    pub draining: bool,
    /// The most jobs that the sidecar serves at a time.
    pub max_jobs: usize,
    /// The most ranks that the sidecar serves at a time, over all jobs.
    pub max_ranks: usize,
    /// The number of ranks, over all jobs.
    pub ranks: usize,
    /// The memory that ranks have lent, plus the memory in which lists of blocks are summed.
    pub memory: Memory,
    /// The jobs that the caller may see, sorted by name.
    pub jobs: Vec<SidecarJobStatus>,
}

/// The status of a sidecar's job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SidecarJobStatus {
    /// The job's name.
    #[serde(deserialize_with = "PeerText::string")]
    pub job: String,
    /// The name of the job's group; empty if the job has no groups.
    #[serde(deserialize_with = "PeerText::string")]
    pub group: String,
    /// The job's generation.
    pub generation: u32,
    /// The user that owns the job.
    pub uid: u32,
    /// The number of ranks in the job.
    pub world: u16,
    /// The number of the job's ranks that are expected on this host.
    pub local_world: u16,
    /// The number of lanes.
    pub lanes: u8,
    /// The name of the job's [`SidecarJobState`].
    #[serde(deserialize_with = "PeerText::string")]
    pub state: String,
    /// Milliseconds since the job's first rank joined.
    pub age_ms: u64,
    /// The number of this host's ranks that have not joined, or are no longer connected.
    pub awaited: usize,
    /// The number of ops that some ranks of this host have called and others have not.
    pub awaited_ops: usize,
    /// The number of ops that all ranks of this host have called, and that are being summed on this
    /// host or with other hosts.
    pub summed_ops: usize,
    /// Milliseconds since a rank first called the oldest op that other ranks still have to call;
    /// `None` if there is no such op. The op has waited that long for the ranks that are behind.
    pub stalled_ms: Option<u64>,
    /// The job's ranks on this host.
    pub ranks: Vec<SidecarRankStatus>,
}

/// The progress of a sidecar's job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SidecarJobState {
    /// Some ranks of this host have not joined.
    Gathering,
    /// The sidecar is joining an aggregator, and waits for it or for ranks of other hosts.
    Calling,
    /// Ops may run.
    Running,
    /// The job has ended.
    Over,
}

impl SidecarJobState {
    /// All states, in the order in which a job enters them.
    pub const ALL: [Self; 4] = [Self::Gathering, Self::Calling, Self::Running, Self::Over];

    /// Returns the state's name, as `racksum status` prints it.
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

/// The status of a rank of a sidecar.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SidecarRankStatus {
    /// The rank.
    pub rank: u16,
    /// The rank's process id, as the sidecar sees it.
    pub pid: i32,
    /// The next op that the rank will call.
    pub next_op: u32,
    /// The bytes of memory that the rank has lent.
    pub lent_bytes: u64,
    /// Whether the oldest op waits for this rank.
    pub behind: bool,
}
