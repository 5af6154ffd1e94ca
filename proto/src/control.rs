//! The messages of the control plane: how a rank joins and leaves a job.
//!
//! The messages are JSON frames on one QUIC stream, which stays open until the rank leaves or is
//! lost. A worker sends [`FromWorker::Prove`], and proves its data path with the information in the
//! answer, [`FromAggregator::Prove`] (see [`path`](crate::path)). Then the worker sends
//! [`FromWorker::Join`]. It receives [`FromAggregator::Waiting`] until all ranks have joined, and
//! then [`FromAggregator::Welcome`]. If the job has a multicast group, the worker sends
//! [`FromWorker::PingArrived`] once a ping arrives. [`FromAggregator::Ready`] starts the ops.

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
use crate::move_target::MoveTarget;
use crate::peer_text::{PeerText, Unshown};
use crate::status::OwnCounters;

/// The version of the control protocol. An aggregator refuses joins with another version.
pub const CONTROL_VERSION: u16 = 1;
/// The permitted range of the number of slots per stream.
pub const POOL_SLOTS: RangeInclusive<u32> = 2..=4096;
/// The most ops that a rank may have in flight.
pub const MAX_OPS: u16 = 64;

/// A message from a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromWorker {
    /// The worker asks to prove its data path before it joins. This is the first message of a rank.
    Prove {
        /// [`CONTROL_VERSION`] of the worker.
        version: u16,
    },
    /// The worker lacks answers to some pings, and asks for the size of the largest ping that
    /// arrived at each shard.
    AskPingSizes,
    /// The worker asks to join a job as a rank.
    Join(Join),
    /// Another rank has joined the sender, which sums for its ranks and joins for them at the
    /// receiver.
    AddRank(Join),
    /// A rank that had joined the sender is lost.
    RankLost(LostRank),
    /// A multicast ping arrived.
    PingArrived,
    /// The rank's own counters at this aggregator. The rank sends them at most once a second, and
    /// only if they have changed.
    Counters(OwnCounters),
    /// The worker leaves the job.
    Leave {
        /// The op that the rank would start next, at which it may rejoin. `None` if the rank leaves
        /// in the middle of an op.
        next_op: Option<OpId>,
    },
    /// The worker gives up an attempt to rejoin that has not succeeded yet. It may try again later.
    CancelRejoin,
    /// A worker that waits at another aggregator asks which ranks of its job wait at this
    /// aggregator. This is the worker's first and only message.
    AskPresent(Join),
    /// The caller asks for the aggregator's status. This is the caller's first and only message.
    AskStatus {
        /// [`CONTROL_VERSION`] of the caller.
        version: u16,
    },
    /// The caller asks whether the aggregator would admit this join, without joining. An aggregator
    /// that asks for one of its ranks names the rank's caller in `begun_by`.
    AskRoom(Join),
    /// An operator asks the aggregator to move all groups of a job to other aggregators. This is
    /// the caller's first and only message.
    MoveJob {
        /// [`CONTROL_VERSION`] of the caller.
        version: u16,
        /// The job, without a group.
        job: JobName,
        /// The aggregators to move to.
        to: MoveTarget,
    },
    /// An operator asks the aggregator to move all its jobs to other aggregators, and then to stop
    /// as at SIGTERM. This is the caller's first and only message.
    DrainTo {
        /// [`CONTROL_VERSION`] of the caller.
        version: u16,
        /// The aggregators to move to.
        to: MoveTarget,
    },
    /// The rank has learned of other aggregators since it joined, or has forgotten them. All
    /// aggregators of the job receive this.
    MayMove {
        /// Whether the rank knows other aggregators that it can move to.
        may_move: bool,
    },
    /// The rank can move to the aggregators that [`FromAggregator::PrepareMove`] named.
    MovePrepared {
        /// The number of the move, from the request.
        number: u32,
    },
    /// The rank cannot move to the aggregators that [`FromAggregator::PrepareMove`] named.
    CannotMove {
        /// The number of the move, from the request.
        number: u32,
        /// The reason, as a sentence for the operator.
        #[serde(deserialize_with = "PeerText::string", serialize_with = "PeerText::write")]
        reason: String,
    },
    /// The worker would prefer another aggregator, and waits for [`FromAggregator::MayLeave`]. The
    /// aggregator does not answer if the job has begun or the aggregator has a parent.
    Withdraw,
    /// The worker stays at this aggregator after a [`FromWorker::Withdraw`].
    Stay,
    /// The worker continues the job at another aggregator.
    Move,
    /// The sender is an aggregator that is stopping, so its ranks are lost.
    Stop,
}

impl FromWorker {
    /// Returns whether the sender sends nothing after this message.
    #[must_use]
    pub const fn is_last(&self) -> bool {
        matches!(self, Self::Leave { .. } | Self::CancelRejoin | Self::Move | Self::Stop)
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
    /// The job's secret, if it has one. All lives of the job share it, and no other job knows it.
    pub secret: Option<Key>,
    /// The identity or address of the rank, if an aggregator joins for it; `None` if the rank joins
    /// by itself.
    pub begun_by: Option<CallerId>,
    /// The rank's number.
    pub rank: u16,
    /// The number of ranks in the job.
    pub world: u16,
    /// The number of lanes that the job requests.
    pub lanes: u8,
    /// The UDP ports on which the worker sends and receives data: one for all shards, or one per
    /// shard.
    pub data_ports: Vec<u16>,
    /// The size of the rank's receive buffer, in bytes.
    pub receive_buffer: u32,
    /// The size of the largest datagram that every shard has received and answered, in bytes.
    pub max_datagram: u16,
    /// Whether the rank can listen to a multicast group.
    pub multicast: bool,
    /// The required authentication of datagrams; `None` leaves it to the aggregator.
    pub data_auth: Option<DataAuth>,
    /// The index of this aggregator among the job's aggregators, and the number of these
    /// aggregators. The job's windows are spread over the shards of all of them.
    pub stripe: (u8, u8),
    /// The most slots per stream that the rank requests; 0 leaves the number to the aggregator.
    pub pool_slots: u32,
    /// Whether the rank waits until the aggregator has room for the job, instead of being refused.
    pub wait: bool,
    /// The policy for a lost rank.
    pub on_rank_loss: OnRankLoss,
    /// Whether the rank knows other aggregators that it can move to.
    pub may_move: bool,
    /// Whether the sender is an aggregator that joins on behalf of this rank and others. The sender
    /// contributes the sum of all of them.
    pub aggregates: bool,
    /// Whether the rank has left the job and now rejoins it.
    pub rejoin: bool,
    /// The point at which the job resumes, if it has run at another aggregator before.
    pub resume: Option<Resume>,
}

/// The identity of a caller that joins a job: the name in its certificate or, without certificates,
/// its address.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallerId {
    /// The name in the caller's certificate.
    Identity(IdentityName),
    /// The IP address from which the caller connects.
    Address(IpAddr),
}

impl CallerId {
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

impl fmt::Display for CallerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Identity(name) => write!(f, "identity {name:?}"),
            Self::Address(addr) => write!(f, "{addr}"),
        }
    }
}

/// The point at which a job resumes after a move to another aggregator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resume {
    /// The oldest op whose results some rank may lack, as far as this rank knows. The job resumes
    /// with the greatest of the ops that its ranks name.
    pub first_op: OpId,
    /// The lost ranks, without which the job continues, as far as this rank knows.
    pub absent: Vec<LostRank>,
}

/// A lost rank, without which a job continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostRank {
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
    /// The job continues without the contributions of the lost rank.
    Continue,
}

impl OnRankLoss {
    /// All policies.
    pub const ALL: [Self; 2] = [Self::Abort, Self::Continue];

    /// Returns the policy's name, as users write it.
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
    /// The aggregator refuses one of the ranks that the receiver joins for. The connection ends,
    /// and the receiver may call again for its other ranks.
    RefusedRank {
        /// The refused rank.
        rank: u16,
        /// The reason, as a sentence for the user.
        #[serde(deserialize_with = "PeerText::string", serialize_with = "PeerText::write")]
        reason: String,
    },
    /// The information with which the worker proves its data path.
    Prove {
        /// The UDP port of each shard, at the aggregator's address.
        data_ports: Vec<u16>,
        /// The token that the worker's pings carry.
        token: Key,
        /// The IP address that the worker calls from, as the aggregator sees it.
        ip: IpAddr,
    },
    /// The sizes of the worker's largest pings that reached the shards. This answers
    /// [`FromWorker::AskPingSizes`].
    PingSizes {
        /// The size of the largest ping that arrived at each shard, in bytes; 0 if none arrived.
        sizes: Vec<u16>,
    },
    /// The port for a lifeline: a TCP connection that quickly reveals the death of the rank or the
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
    /// The ranks of the job that wait for other ranks. This answers [`FromWorker::AskPresent`].
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
    /// The aggregator would admit the join now. This answers [`FromWorker::AskRoom`].
    Room,
    /// The job is about to move to these aggregators. The rank checks that it can join them, keeps
    /// sums for other ranks from now on, and answers with [`FromWorker::MovePrepared`] or
    /// [`FromWorker::CannotMove`].
    PrepareMove {
        /// The number of the move, which no earlier move of this aggregator had.
        number: u32,
        /// The aggregators to move to.
        to: MoveTarget,
    },
    /// All ranks are prepared. The rank moves to the aggregators that
    /// [`FromAggregator::PrepareMove`] named.
    MoveNow {
        /// The number of the move.
        number: u32,
    },
    /// The job does not move to the aggregators that [`FromAggregator::PrepareMove`] named.
    CancelMove {
        /// The number of the move.
        number: u32,
    },
    /// The jobs have moved. This answers [`FromWorker::MoveJob`] and [`FromWorker::DrainTo`].
    Moved {
        /// The number of jobs; each group of a job counts.
        jobs: u16,
    },
    /// The rank may leave. The job has not begun, and does not begin with this rank until the rank
    /// sends [`FromWorker::Stay`].
    MayLeave,
    /// All ranks have joined; the message carries the rank's grant.
    Welcome(Welcome),
    /// Ops may start.
    Ready {
        /// Whether this rank receives results by multicast.
        multicast: bool,
    },
    /// A rank is lost, and the job continues without it. If a result lacks *n* ranks, the first *n*
    /// of these messages name them.
    ContinueWithout(LostRank),
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

/// The aggregator's grant to a rank of a job.
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
    /// The size of the payload of a full fragment, in bytes.
    pub fragment_payload: u16,
    /// The most bytes in flight to each shard.
    pub in_flight: u32,
    /// The rank's first op at this aggregator. It is greater than 0 only if the job has moved to
    /// this aggregator, or if the rank has rejoined.
    pub first_op: OpId,
    /// The multicast group for results, if the rank should listen.
    pub group: Option<SocketAddr>,
    /// The authentication mode of datagrams.
    pub data_auth: DataAuth,
    /// The keys for authentication; `None` without authentication.
    pub keys: Option<Keys>,
    /// The number of datagrams that each shard had sealed before this rank rejoined. The rank
    /// accepts none of these datagrams. Empty for a rank that has not rejoined.
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
