//! The messages of the control plane: how a rank joins and leaves a job.
//!
//! They travel as JSON frames on one QUIC stream that lives as long as the rank does. A worker
//! says [`FromWorker::Prove`] and proves its data path with what [`FromAggregator::Prove`] says
//! (see [`path`](crate::path)). Then it says [`FromWorker::Join`] and hears
//! [`FromAggregator::Waiting`] until all ranks are there, then [`FromAggregator::Welcome`]. With a
//! multicast group it says [`FromWorker::Heard`] once a probe arrives. [`FromAggregator::Ready`]
//! starts the ops.

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

/// The control protocol's version: a join of another is refused.
pub const CONTROL_VERSION: u16 = 1;
/// The least and the most slots of a stream.
pub const POOL_SLOTS: RangeInclusive<u32> = 2..=4096;
/// Ops in flight that a rank may have.
pub const MAX_OPS: u16 = 64;

/// What a worker says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromWorker {
    /// It wants to prove its data path before it joins. The first message.
    Prove {
        /// [`CONTROL_VERSION`] of the worker.
        version: u16,
    },
    /// It asks how large the probes are that arrived, since not all were answered.
    Arrived,
    /// It wants to be a rank of a job.
    Join(Join),
    /// Another rank has joined the aggregator that speaks, whose job this is the parent of.
    Also(Join),
    /// A rank that had joined the aggregator that speaks is gone from the job.
    Parted(Absent),
    /// A multicast probe arrived.
    Heard,
    /// It is done with the job.
    Leave {
        /// The number of the op that it would start next: the rank may come back there. None if it
        /// leaves in the middle of one.
        next_op: Option<OpId>,
    },
    /// It has tried to come back, and has done nothing yet: as if it had not tried.
    Retreat,
    /// It asks which ranks of its job wait for others that it could join with this, as the first
    /// and only message: it waits at another aggregator.
    Look(Join),
    /// It asks what the aggregator does, as the first and only message.
    AskStatus {
        /// [`CONTROL_VERSION`] of who asks.
        version: u16,
    },
    /// It would rather be elsewhere, and waits to hear [`FromAggregator::Free`]; in vain if the job
    /// has begun.
    Withdraw,
    /// It would not, after all.
    Stay,
    /// It goes on with the job at another aggregator.
    Move,
    /// It is an aggregator, and stops: its ranks are lost.
    Stop,
}

impl FromWorker {
    /// Whether nothing is said after it.
    #[must_use]
    pub const fn is_last(&self) -> bool {
        matches!(self, Self::Leave { .. } | Self::Retreat | Self::Move | Self::Stop)
    }
}

/// A worker's wish to be a rank of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Join {
    /// [`CONTROL_VERSION`] of the worker.
    pub version: u16,
    /// The job's name, and its group's.
    pub job: JobName,
    /// The job's life.
    pub generation: Generation,
    /// What all lives of the job have in common and nobody else knows, if there is such a thing.
    pub secret: Option<Key>,
    /// Who has joined an aggregator that speaks for it; `None` of a rank that speaks for itself.
    pub begun_by: Option<Beginner>,
    /// The worker's number.
    pub rank: u16,
    /// How many ranks the job has.
    pub world: u16,
    /// How many lanes the job wants.
    pub lanes: u8,
    /// The UDP ports on which the worker sends and receives data: one for all shards, or one for
    /// each.
    pub data_ports: Vec<u16>,
    /// Bytes that its receive buffer holds.
    pub receive_buffer: u32,
    /// Bytes of the largest datagram that passes to every shard and back.
    pub max_datagram: u16,
    /// Whether it would listen to a multicast group.
    pub multicast: bool,
    /// How datagrams must be authenticated; `None` leaves it to the aggregator.
    pub data_auth: Option<DataAuth>,
    /// Which of how many aggregators this one is for the job, whose windows are spread over the
    /// shards of all of them.
    pub stripe: (u8, u8),
    /// How many slots a stream it asks for at most; 0 leaves it to the aggregator.
    pub pool_slots: u32,
    /// Whether to wait while there is no room for the job, rather than to be refused.
    pub wait: bool,
    /// What becomes of the job when it loses a rank.
    pub on_rank_loss: OnRankLoss,
    /// Whether the rank knows other aggregators to go on at.
    pub may_move: bool,
    /// Whether it is an aggregator that speaks: for this rank, which has joined it, and for those
    /// that join it as well. It contributes the sum of all of them.
    pub relays: bool,
    /// Whether the rank has left the job, and comes back to it.
    pub rejoin: bool,
    /// Where the job goes on, if it has run at another aggregator before.
    pub resume: Option<Resume>,
}

/// Who has joined a job: by its certificate, where there are any.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Beginner {
    /// The name in its certificate.
    Identity(IdentityName),
    /// The address that it has called from.
    Address(IpAddr),
}

impl Beginner {
    /// Checks that what a peer says is the name of an identity may be one.
    ///
    /// # Errors
    /// A sentence that says why it cannot.
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

/// Where a job goes on that moves from one aggregator to another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resume {
    /// The oldest op that some rank may not have all results of, as far as this rank knows. The job
    /// goes on with the greatest that a rank names.
    pub first_op: OpId,
    /// The ranks that the job has lost and goes on without, as far as this rank knows.
    pub absent: Vec<Absent>,
}

/// A rank that a job goes on without.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Absent {
    /// Which.
    pub rank: u16,
    /// What became of it.
    pub why: Loss,
}

/// What becomes of a job that loses a rank. All its ranks say the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnRankLoss {
    /// Its ops fail, and it is over.
    #[default]
    Abort,
    /// It goes on without the rank, in whose place nobody contributes.
    Continue,
}

impl OnRankLoss {
    /// All policies.
    pub const ALL: [Self; 2] = [Self::Abort, Self::Continue];

    /// Its name, as users write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Abort => "abort",
            Self::Continue => "continue",
        }
    }
}

/// What an aggregator says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromAggregator {
    /// The worker cannot be that rank, and why.
    Refused {
        /// A sentence for the user.
        #[serde(deserialize_with = "PeerText::string", serialize_with = "PeerText::write")]
        reason: String,
    },
    /// The aggregator speaks this version of the protocol, and not the worker's.
    WrongVersion {
        /// Its [`CONTROL_VERSION`].
        speaks: u16,
    },
    /// A rank that has joined the aggregator which hears this cannot be, and why: the conversation
    /// is over, and the aggregator may call again for its others.
    RefusedRank {
        /// Which.
        rank: u16,
        /// A sentence for the user.
        #[serde(deserialize_with = "PeerText::string", serialize_with = "PeerText::write")]
        reason: String,
    },
    /// What the worker proves its data path with.
    Prove {
        /// The UDP port of each shard, at the aggregator's address.
        data_ports: Vec<u16>,
        /// What its probes show.
        token: Key,
        /// The address that the worker calls from, as the aggregator sees it.
        ip: IpAddr,
    },
    /// Bytes of the largest probe of the worker that arrived at each shard; 0 for none.
    Arrived {
        /// By shard.
        sizes: Vec<u16>,
    },
    /// Where the rank may lay a lifeline, by which its death, and the aggregator's, is known soon.
    Lifeline {
        /// A TCP port at the aggregator's address.
        port: u16,
        /// What to say there first.
        token: Key,
    },
    /// There is no room for the job yet.
    Queued {
        /// Jobs that wait and were there before.
        before: u16,
        /// What is in the way: a sentence for the user.
        #[serde(deserialize_with = "PeerText::string", serialize_with = "PeerText::write")]
        why: String,
    },
    /// The world is incomplete.
    Waiting {
        /// The ranks that have not joined.
        missing: Vec<u16>,
        /// Milliseconds since this rank joined.
        waited_ms: u64,
    },
    /// These ranks of the job wait for others. The answer to a look.
    Present {
        /// Which; none if there is no such job, if it has begun, or would not have who asks.
        ranks: Vec<u16>,
    },
    /// What the aggregator does: a part of some JSON. The answer to the question.
    Status {
        /// The next part.
        part: Unshown,
        /// Whether there are more.
        more: bool,
    },
    /// The rank may leave: the job has not begun, and does not begin with it before it says that it
    /// stays.
    Free,
    /// All ranks are there; this is what they are granted.
    Welcome(Welcome),
    /// Ops may start.
    Ready {
        /// Whether results come by multicast to this rank.
        multicast: bool,
    },
    /// A rank is gone, and the job goes on without it. A result that lacks *n* ranks lacks those
    /// that the first *n* of these named.
    Without(Absent),
    /// The aggregator is about to stop: the rank had better go on at another, if it knows one.
    Drain,
    /// Ranks are gone, and the job is over with them.
    PeerLost {
        /// Which.
        ranks: Vec<u16>,
        /// What became of them.
        why: Loss,
    },
    /// The aggregator has a parent, which is gone, and the job is over with it.
    ParentLost {
        /// What became of it: a sentence for the user.
        #[serde(deserialize_with = "PeerText::string", serialize_with = "PeerText::write")]
        reason: String,
    },
    /// A new life of the job has begun, and this one is over.
    Superseded {
        /// The new one.
        by: Generation,
        /// Which life has ended which, and who began them: a sentence for the user.
        #[serde(deserialize_with = "PeerText::string", serialize_with = "PeerText::write")]
        why: String,
    },
}

/// What a job is granted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// The job's number in datagrams.
    pub job: JobId,
    /// The rank's number in datagrams, among those that send theirs here.
    pub rank: Rank,
    /// The ranks that an aggregator has joined for, and that are of the job; empty for a rank.
    pub rack: Vec<u16>,
    /// The UDP port of each shard, at the aggregator's address.
    pub data_ports: Vec<u16>,
    /// Slots of each of the job's streams.
    pub pool_slots: u32,
    /// Ops that each rank may have in flight.
    pub max_ops: u16,
    /// Bytes of payload of a fragment.
    pub fragment_payload: u16,
    /// Most bytes in flight towards each shard.
    pub in_flight: u32,
    /// The rank's first op here: another than 0 if the job has moved here, or the rank was here
    /// before.
    pub first_op: OpId,
    /// The group that results are multicast to, if the rank should listen.
    pub group: Option<SocketAddr>,
    /// How datagrams are authenticated.
    pub data_auth: DataAuth,
    /// With which keys; none where nothing is authenticated.
    pub keys: Option<Keys>,
    /// How many datagrams each shard has sealed before: none of these is for a rank that has come
    /// back. Empty for all others.
    pub sealed: Vec<u64>,
    /// Whether some rank knows other aggregators to go on at.
    pub may_move: bool,
    /// Whether sums go through several aggregators, one after the other.
    pub in_tree: bool,
}

impl Welcome {
    /// Whether it keeps to what an aggregator may grant. What does not might have its receiver use
    /// any amount of memory, or believe what nobody has authenticated.
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
