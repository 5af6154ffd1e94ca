//! What a sidecar and its ranks say to each other.

use std::net::SocketAddr;

use racksum_proto::auth::Key;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::ids::Generation;
use racksum_proto::job_name::JobName;
use racksum_proto::loss::Loss;
use racksum_proto::peer_text::PeerText;
use serde::{Deserialize, Serialize};

use crate::engine::Stats;

/// Some of the JSON of a message, whose texts are read with [`PeerText`] once it is whole.
pub(super) type Json = String;

/// The version of these messages. Both sides are of one release.
pub(super) const VERSION: u16 = 1;

/// What a rank says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FromRank {
    /// It wants to be a rank of a job. The first message.
    Join(Join),
    /// It is no rank, and wants to know what the sidecar does. The first message and the last.
    AskStatus,
    /// It has the memory whose descriptor comes with this, and calls it so from now on.
    Lend { memory: u32 },
    /// It needs this memory no more.
    TakeBack { memory: u32 },
    /// It starts its next op, on a tensor in some memory from `at` on, or on a list of blocks whose
    /// indices are there.
    Submit { descriptor: [u8; Descriptor::LEN], memory: u32, at: u64, list: Option<ListAt> },
    /// It refuses its next op: a descriptor that says so.
    Refuse { descriptor: [u8; Descriptor::LEN] },
    /// It wants to know what has left the host.
    AskStats,
    /// It leaves the job.
    Leave,
}

/// Where a rank has a list of blocks besides its indices, numbers of 32 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ListAt {
    pub(super) blocks: u32,
    /// Where in the memory the values begin.
    pub(super) values: u64,
}

/// A wish to be a rank of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Join {
    /// [`VERSION`] of the rank.
    pub(super) version: u16,
    pub(super) job: JobName,
    pub(super) generation: Generation,
    /// What all lives of the job have in common and nobody else knows, if there is such a thing.
    pub(super) secret: Option<Key>,
    pub(super) rank: u16,
    /// How many ranks the job has.
    pub(super) world: u16,
    /// How many of them are on this host.
    pub(super) local_world: u16,
    pub(super) lanes: u8,
    /// Milliseconds that joining may take.
    pub(super) join_timeout: u64,
    /// Milliseconds that an op may take.
    pub(super) op_timeout: u64,
}

/// What a sidecar says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FromSidecar {
    /// It is of another release.
    WrongVersion { speaks: u16 },
    /// The process cannot be that rank, and why.
    Refused {
        #[serde(deserialize_with = "PeerText::string", serialize_with = "PeerText::write")]
        reason: String,
    },
    /// The job, which has ranks on other hosts, cannot be joined at the aggregator.
    NotJoined(NotJoined),
    /// Ranks that have not joined yet.
    Waiting { missing: Vec<u16> },
    /// All ranks have joined: ops may start.
    Ready,
    /// It has the memory that was lent, or has not, and why.
    Lent {
        memory: u32,
        #[serde(default, deserialize_with = "PeerText::option")]
        refused: Option<String>,
    },
    /// What has left the host for the job, and come back.
    Stats(Stats),
    /// What the sidecar does: a part of the JSON of a `racksum_proto::status::SidecarStatus`. It
    /// comes without a descriptor, of which a user may have only so many on their way.
    Status { part: Json, more: bool },
    /// An op has ended.
    Ended { op: u32, outcome: Outcome },
    /// Ranks are gone, and the job is over.
    Lost { ranks: Vec<u16>, why: Loss },
    /// The job has nowhere to go on, and why.
    CutOff {
        #[serde(deserialize_with = "PeerText::string", serialize_with = "PeerText::write")]
        why: String,
    },
    /// An op has timed out, and the job is over.
    TimedOut,
    /// A greater generation of the job has begun: a sentence.
    Superseded {
        #[serde(deserialize_with = "PeerText::string", serialize_with = "PeerText::write")]
        why: String,
    },
}

/// Why a job cannot be joined at the aggregator: what a rank that joins there itself is told.
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
    /// For so many milliseconds.
    NoRoom {
        #[serde(deserialize_with = "PeerText::string", serialize_with = "PeerText::write")]
        why: String,
        waited: u64,
        #[serde(deserialize_with = "PeerText::string", serialize_with = "PeerText::write")]
        elsewhere: String,
    },
    /// For so many milliseconds.
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

/// What came of an op.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Outcome {
    /// Its tensor is reduced.
    Reduced,
    /// The sums of its list and those of the others, so many blocks, are sealed; their descriptor
    /// comes with this.
    Union { blocks: u32 },
    /// The ranks called it differently. The job goes on.
    Mismatch { one: Called, other: Called },
    /// A value that the wire type cannot carry. The job goes on.
    Overflow { element: u64 },
    /// Not all ranks had called it in time. The job is over.
    Timeout { after: u64, missing: Vec<u16> },
}

/// What a rank called an op with.
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
