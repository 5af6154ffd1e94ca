//! Messages between a sidecar and its ranks.

use std::net::SocketAddr;

use racksum_proto::auth::Key;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::ids::Generation;
use racksum_proto::job_name::JobName;
use racksum_proto::loss::Loss;
use racksum_proto::peer_text::PeerText;
use racksum_proto::stats::Stats;
use serde::{Deserialize, Serialize};

/// A part of a JSON document. The reader sanitizes all texts of the whole document with
/// [`PeerText`].
pub(super) type Json = String;

/// The version of these messages. A sidecar and its ranks must come from the same release.
pub(super) const VERSION: u16 = 1;

/// A message from a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FromRank {
    /// Asks to join a job. This is the first message of every rank.
    Join(Join),
    /// Asks for the sidecar's status. This is the only message of a caller that is not a rank.
    AskStatus,
    /// Lends memory, to which later messages refer by this number. The message carries the memory's
    /// file descriptor.
    Lend { memory: u32 },
    /// Takes back lent memory.
    TakeBack { memory: u32 },
    /// Starts the rank's next op on a tensor at offset `at` of lent memory, or on a list of blocks
    /// whose indices start there.
    Submit { descriptor: [u8; Descriptor::LEN], memory: u32, at: u64, list: Option<ListAt> },
    /// Refuses the rank's next op, with a descriptor that marks the op as refused.
    Refuse { descriptor: [u8; Descriptor::LEN] },
    /// Asks for the job's network statistics.
    AskStats,
    /// Leaves the job.
    Leave,
}

/// The number of blocks in a list, and the offset of their values. The indices are 32-bit numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ListAt {
    pub(super) blocks: u32,
    /// Offset of the values in the memory.
    pub(super) values: u64,
}

/// A request to join a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Join {
    /// The rank's [`VERSION`].
    pub(super) version: u16,
    pub(super) job: JobName,
    pub(super) generation: Generation,
    /// The secret that the ranks of all lives of the job share, if the job has one. Nobody else may
    /// know it.
    pub(super) secret: Option<Key>,
    pub(super) rank: u16,
    /// Number of ranks in the job.
    pub(super) world: u16,
    /// Number of ranks on this host.
    pub(super) local_world: u16,
    pub(super) lanes: u8,
    /// Timeout for joining, in milliseconds.
    pub(super) join_timeout: u64,
    /// Timeout for each op, in milliseconds.
    pub(super) op_timeout: u64,
}

/// A message from a sidecar.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FromSidecar {
    /// The sidecar comes from another release, which uses version `speaks` of these messages.
    WrongVersion { speaks: u16 },
    /// The sidecar refuses the rank.
    Refused {
        #[serde(deserialize_with = "PeerText::string", serialize_with = "PeerText::write")]
        reason: String,
    },
    /// The sidecar cannot join the job at the aggregator. Only jobs with ranks on other hosts need
    /// an aggregator.
    NotJoined(NotJoined),
    /// Some ranks have not joined yet.
    Waiting { missing: Vec<u16> },
    /// All ranks have joined, so ops may start.
    Ready,
    /// The sidecar has accepted the lent memory, or has refused it for the reason in `refused`.
    Lent {
        memory: u32,
        #[serde(default, deserialize_with = "PeerText::option")]
        refused: Option<String>,
    },
    /// Network statistics of the job: the traffic between this host and the aggregator.
    Stats(Stats),
    /// A part of the sidecar's status, which is the JSON form of a
    /// `racksum_proto::status::SidecarStatus`. The status is not sent as a file, because the kernel
    /// limits how many descriptors a user may have in flight.
    Status { part: Json, more: bool },
    /// An op has ended.
    Ended { op: u32, outcome: Outcome },
    /// Ranks are lost, and the job is over.
    Lost { ranks: Vec<u16>, why: Loss },
    /// The job cannot continue; `why` is the reason.
    CutOff {
        #[serde(deserialize_with = "PeerText::string", serialize_with = "PeerText::write")]
        why: String,
    },
    /// An op has timed out, and the job is over.
    TimedOut,
    /// A greater generation of the job has begun. `why` is a sentence that names both generations.
    Superseded {
        #[serde(deserialize_with = "PeerText::string", serialize_with = "PeerText::write")]
        why: String,
    },
}

/// The reason why the sidecar cannot join a job at the aggregator. The variants match the errors
/// that a rank receives if it joins without a sidecar.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum NotJoined {
    Refused {
        #[serde(deserialize_with = "PeerText::string", serialize_with = "PeerText::write")]
        reason: String,
    },
    Draining,
    OtherVersion {
        speaks: u16,
        own: u16,
    },
    OtherProtocol {
        addr: SocketAddr,
    },
    /// The aggregator had no room for the job within `waited` milliseconds.
    NoRoom {
        #[serde(deserialize_with = "PeerText::string", serialize_with = "PeerText::write")]
        why: String,
        waited: u64,
        #[serde(deserialize_with = "PeerText::string", serialize_with = "PeerText::write")]
        elsewhere: String,
    },
    /// Some ranks did not join within `waited` milliseconds.
    Incomplete {
        missing: Vec<u16>,
        waited: u64,
        #[serde(deserialize_with = "PeerText::string", serialize_with = "PeerText::write")]
        elsewhere: String,
    },
    Lost {
        ranks: Vec<u16>,
        why: Loss,
    },
    NoAggregator {
        #[serde(deserialize_with = "PeerText::string", serialize_with = "PeerText::write")]
        tried: String,
    },
}

/// The outcome of an op.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Outcome {
    /// The rank's tensor is reduced.
    Reduced,
    /// The union of the ranks' lists has `blocks` blocks. The message carries the descriptor of the
    /// sealed file that holds the sums.
    Union { blocks: u32 },
    /// Two ranks called the op with different descriptors. The job continues.
    Mismatch { one: Called, other: Called },
    /// Other hosts' ranks dropped the op after a mismatch, before this host learned of it. The job
    /// continues.
    Dropped,
    /// The wire type cannot carry a value of the block that begins at index `element`. The job
    /// continues.
    Overflow { element: u64 },
    /// The op did not end within `after` milliseconds. `missing` lists the ranks that the op waited
    /// for, if they are known. The job is over.
    Timeout { after: u64, missing: Vec<u16> },
}

/// The descriptor with which a rank called an op.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Called {
    pub(super) rank: u16,
    pub(super) descriptor: [u8; Descriptor::LEN],
}

impl Called {
    pub(super) fn new(rank: u16, descriptor: &Descriptor) -> Self {
        let mut called = Self { rank, descriptor: [0; Descriptor::LEN] };
        descriptor.encode(&mut called.descriptor);
        called
    }
}
