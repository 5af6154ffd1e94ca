//! The messages of the control plane: how a rank joins and leaves a job.
//!
//! The messages are JSON frames on one QUIC stream that lives as long as the rank. A worker sends
//! [`FromWorker::Prove`] and proves its data path with the contents of [`FromAggregator::Prove`]
//! (see [`path`](crate::path)). Then the worker sends [`FromWorker::Join`]. It receives
//! [`FromAggregator::Waiting`] until all ranks have joined, and then [`FromAggregator::Welcome`].
//! With a multicast group, the worker sends [`FromWorker::Heard`] once a ping arrives.
//! [`FromAggregator::Ready`] starts the ops.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::net::{IpAddr, SocketAddr};
use core::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use crate::auth::{DataAuth, Key, Keys};
use crate::geometry::{Fragmentation, WINDOW_BYTES};
use crate::identity_name::IdentityName;
use crate::ids::{Generation, JobId, OpId, Rank};
use crate::job_name::JobName;
use crate::loss::Loss;
use crate::peer_text::{PeerText, Unshown};

/// The version of the control protocol. An aggregator refuses joins with another version.
pub const CONTROL_VERSION: u16 = 1;
/// The least and the most slots of a stream.
pub const POOL_SLOTS: RangeInclusive<u32> = 2..=4096;
/// The most ops that a rank may have in flight.
pub const MAX_OPS: u16 = 64;

/// A message from a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromWorker {
    /// The worker asks to prove its data path before it joins. This is the first message.
    Prove {
        /// [`CONTROL_VERSION`] of the worker.
        version: u16,
    },
    /// The worker asks for the size of the largest ping that arrived, since not all were answered.
    Arrived,
    /// The worker asks to join a job as a rank.
    Join(Join),
    /// Another rank has joined the sender. The sender sums for its ranks and joins for them at its
    /// parent, which receives this message.
    Also(Join),
    /// A rank that had joined the sender is lost.
    Parted(Absent),
    /// A multicast ping arrived.
    Heard,
    /// The worker leaves the job.
    Leave {
        /// The op that the rank would start next, and at which it may come back. `None` if the rank
        /// leaves in the middle of an op.
        next_op: Option<OpId>,
    },
    /// The worker gives up its attempt to rejoin before it has done anything, and may try again
    /// later.
    Retreat,
    /// The worker waits at another aggregator, and asks which ranks wait here in the job that it
    /// would join. This is the worker's first and only message.
    Look(Join),
    /// The caller asks for the aggregator's status. This is the caller's first and only message.
    AskStatus {
        /// [`CONTROL_VERSION`] of the caller.
        version: u16,
    },
    /// The worker would prefer another aggregator, and waits for [`FromAggregator::Free`]. The
    /// aggregator does not answer once the job has begun.
    Withdraw,
    /// The worker stays after a [`FromWorker::Withdraw`].
    Stay,
    /// The worker continues the job at another aggregator.
    Move,
    /// The sender is an aggregator that stops, so its ranks are lost.
    Stop,
}

impl FromWorker {
    /// Returns whether the sender sends nothing after this message.
    #[must_use]
    pub const fn is_last(&self) -> bool {
        matches!(self, Self::Leave { .. } | Self::Retreat | Self::Move | Self::Stop)
    }
}

/// A request to join a job as a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Join {
    /// [`CONTROL_VERSION`] of the worker.
    pub version: u16,
    /// The names of the job and its group.
    pub job: JobName,
    /// The job's generation.
    pub generation: Generation,
    /// The job's secret, if it has one. All lives of the job share it, and nobody else knows it.
    pub secret: Option<Key>,
    /// The identity or address of the rank, if an aggregator joins for it; `None` if the rank joins
    /// by itself.
    pub begun_by: Option<Beginner>,
    /// The rank's number.
    pub rank: u16,
    /// The number of ranks in the job.
    pub world: u16,
    /// The number of lanes that the job wants.
    pub lanes: u8,
    /// The UDP ports on which the worker sends and receives data: one for all shards, or one per
    /// shard.
    pub data_ports: Vec<u16>,
    /// The size of the rank's receive buffer, in bytes.
    pub receive_buffer: u32,
    /// The size of the largest datagram that passes to every shard and back, in bytes.
    pub max_datagram: u16,
    /// Whether the rank can listen to a multicast group.
    pub multicast: bool,
    /// The required authentication of datagrams; `None` leaves it to the aggregator.
    pub data_auth: Option<DataAuth>,
    /// The index of this aggregator among the job's aggregators, and their number. The job's
    /// windows are spread over the shards of all of them.
    pub stripe: (u8, u8),
    /// The most slots per stream that the rank asks for; 0 leaves the number to the aggregator.
    pub pool_slots: u32,
    /// Whether the rank waits for room for the job, instead of being refused.
    pub wait: bool,
    /// The policy for a lost rank.
    pub on_rank_loss: OnRankLoss,
    /// Whether the rank knows other aggregators that it can move to.
    pub may_move: bool,
    /// Whether the sender is an aggregator that joins for this rank, and for others that join it.
    /// The sender contributes the sum of all of them.
    pub relays: bool,
    /// Whether the rank has left the job and now rejoins it.
    pub rejoin: bool,
    /// The place where the job resumes, if it has run at another aggregator before.
    pub resume: Option<Resume>,
}

/// The identity of a caller that joins a job: its certificate's name, if certificates are in use.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Beginner {
    /// The name in the caller's certificate.
    Identity(IdentityName),
    /// The address from which the caller called.
    Address(IpAddr),
}

impl Beginner {
    /// Checks that an identity name from a peer is valid.
    ///
    /// # Errors
    /// Returns a sentence that says why the name is invalid.
    pub fn check(&self) -> Result<(), String> {
        match self {
            Self::Identity(name) => name.check(),
            Self::Address(_) => Ok(()),
        }
    }
}

impl fmt::Display for Beginner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Identity(name) => write!(f, "identity {name:?}"),
            Self::Address(addr) => write!(f, "{addr}"),
        }
    }
}

/// The place where a job resumes after a move to another aggregator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resume {
    /// The oldest op of which some rank may lack results, as far as this rank knows. The job
    /// resumes with the greatest op that a rank names.
    pub first_op: OpId,
    /// The lost ranks that the job goes on without, as far as this rank knows.
    pub absent: Vec<Absent>,
}

/// A lost rank that a job goes on without.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Absent {
    /// The lost rank.
    pub rank: u16,
    /// The reason for the loss.
    pub why: Loss,
}

/// The policy for a job that loses a rank. All ranks of the job must ask for the same policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnRankLoss {
    /// The job's ops fail, and the job ends.
    #[default]
    Abort,
    /// The job goes on, and nobody contributes in place of the lost rank.
    Continue,
}

impl OnRankLoss {
    /// All policies.
    pub const ALL: [Self; 2] = [Self::Abort, Self::Continue];

    /// Returns the name that users write.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Abort => "abort",
            Self::Continue => "continue",
        }
    }
}

/// A message from an aggregator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromAggregator {
    /// The aggregator refuses the worker's join.
    Refused {
        /// The reason, as a sentence for the user.
        #[serde(deserialize_with = "PeerText::string", serialize_with = "PeerText::write")]
        reason: String,
    },
    /// The aggregator does not support the worker's version of the protocol.
    WrongVersion {
        /// [`CONTROL_VERSION`] of the aggregator.
        speaks: u16,
    },
    /// The aggregator refuses a rank that had joined the receiving aggregator. The conversation
    /// ends, and the receiver may call again for its other ranks.
    RefusedRank {
        /// The refused rank.
        rank: u16,
        /// The reason, as a sentence for the user.
        #[serde(deserialize_with = "PeerText::string", serialize_with = "PeerText::write")]
        reason: String,
    },
    /// The data with which the worker proves its data path.
    Prove {
        /// The UDP port of each shard, at the aggregator's address.
        data_ports: Vec<u16>,
        /// The token that the worker's pings carry.
        token: Key,
        /// The address of the worker's call, as the aggregator sees it.
        ip: IpAddr,
    },
    /// The sizes of the largest pings of the worker that arrived, as the answer to
    /// [`FromWorker::Arrived`].
    Arrived {
        /// The size at each shard, in bytes; 0 if no ping arrived.
        sizes: Vec<u16>,
    },
    /// The place for a lifeline: a connection that soon reveals the death of the rank or the
    /// aggregator.
    Lifeline {
        /// A TCP port at the aggregator's address.
        port: u16,
        /// The token that the rank sends first on the lifeline.
        token: Key,
    },
    /// The aggregator has no room for the job yet.
    Queued {
        /// The number of jobs that wait ahead of this one.
        before: u16,
        /// The reason, as a sentence for the user.
        #[serde(deserialize_with = "PeerText::string", serialize_with = "PeerText::write")]
        why: String,
    },
    /// Some ranks of the job have not joined.
    Waiting {
        /// The ranks that have not joined.
        missing: Vec<u16>,
        /// Milliseconds since this rank joined.
        waited_ms: u64,
    },
    /// The ranks of the job that wait for others. This answers [`FromWorker::Look`].
    Present {
        /// The waiting ranks. The list is empty if the job does not exist, has begun, or would
        /// refuse the caller.
        ranks: Vec<u16>,
    },
    /// A part of the aggregator's status, as JSON. This answers [`FromWorker::AskStatus`].
    Status {
        /// The next part of the JSON text.
        part: Unshown,
        /// Whether more parts follow.
        more: bool,
    },
    /// The rank may leave. The job has not begun, and does not begin with this rank until the rank
    /// sends [`FromWorker::Stay`].
    Free,
    /// All ranks have joined; the message has the rank's grant.
    Welcome(Welcome),
    /// Ops may start.
    Ready {
        /// Whether this rank receives results by multicast.
        multicast: bool,
    },
    /// A rank is lost, and the job goes on without it. A result that lacks *n* ranks lacks those
    /// named by the first *n* of these messages.
    Without(Absent),
    /// The aggregator is about to stop; the rank should move to another aggregator if it knows one.
    Drain,
    /// Ranks are lost, which ends the job.
    PeerLost {
        /// The lost ranks.
        ranks: Vec<u16>,
        /// The reason for the loss.
        why: Loss,
    },
    /// The aggregator's parent is lost, which ends the job.
    ParentLost {
        /// The reason, as a sentence for the user.
        #[serde(deserialize_with = "PeerText::string", serialize_with = "PeerText::write")]
        reason: String,
    },
    /// A new life of the job has begun, which ends this one.
    Superseded {
        /// The generation of the new life.
        by: Generation,
        /// A sentence for the user that names both lives and the callers that began them.
        #[serde(deserialize_with = "PeerText::string", serialize_with = "PeerText::write")]
        why: String,
    },
}

/// The grant of a job to a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// The job's number in datagrams.
    pub job: JobId,
    /// The rank's number in datagrams to this aggregator.
    pub rank: Rank,
    /// The ranks of the job that the receiving aggregator has joined for; empty for a worker.
    pub rack: Vec<u16>,
    /// The UDP port of each shard, at the aggregator's address.
    pub data_ports: Vec<u16>,
    /// The number of slots of each of the job's streams.
    pub pool_slots: u32,
    /// The most ops that each rank may have in flight.
    pub max_ops: u16,
    /// The payload of a fragment, in bytes.
    pub fragment_payload: u16,
    /// The most bytes in flight to each shard.
    pub in_flight: u32,
    /// The rank's first op here. It is not 0 if the job has moved here, or if the rank was here
    /// before.
    pub first_op: OpId,
    /// The multicast group for results, if the rank should listen.
    pub group: Option<SocketAddr>,
    /// The authentication mode of datagrams.
    pub data_auth: DataAuth,
    /// The keys for authentication; `None` without authentication.
    pub keys: Option<Keys>,
    /// The number of datagrams that each shard had sealed before a rank rejoined. The rank accepts
    /// none of them. Empty for a rank that has not left before.
    pub sealed: Vec<u64>,
    /// Whether some rank knows other aggregators that the job can move to.
    pub may_move: bool,
    /// Whether sums pass through several aggregators in sequence.
    pub in_tree: bool,
}

impl Welcome {
    /// Returns whether the grant is within the protocol's limits. An unsound grant could make the
    /// receiver use any amount of memory, or trust data that is not authenticated.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let ports = !self.data_ports.is_empty() && !self.data_ports.contains(&0);
        let keys = self.keys.is_some() == (self.data_auth != DataAuth::None);
        let payload = usize::from(self.fragment_payload);
        let cut = payload <= WINDOW_BYTES && Fragmentation::new(payload).is_some();
        let window = POOL_SLOTS.contains(&self.pool_slots) && self.in_flight > 0;
        ports && keys && cut && window && (1..=MAX_OPS).contains(&self.max_ops)
    }
}
