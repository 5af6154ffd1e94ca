//! The interface between a client and the transport that carries its ops, and the types that both
//! use.

use std::borrow::Cow;
use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use racksum_proto::call::Call;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::WireType;
use racksum_proto::error::SubmitError;
use racksum_proto::ids::{OpId, Rank};
use racksum_proto::stats::{SidecarStats, Stats};

use crate::blocks::Blocks;
use crate::error::Error;
use crate::operand::Operand;

/// The outcome of an op.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reduced<T> {
    /// The reduced tensor, or `()` if the op reduced the caller's tensor in place.
    pub tensor: T,
    /// The ranks that were lost before they had contributed to the whole tensor, in ascending
    /// order. All other ranks have contributed. The list is empty unless the job has
    /// [`OnRankLoss::Continue`](racksum_proto::control::OnRankLoss). With a sidecar, it is always
    /// empty.
    pub absent: Vec<Rank>,
}

/// The limits and the data path settings that a job was granted when it began. An aggregator that
/// the job moves to may grant other ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Grant {
    /// The number of ops that may be in flight.
    pub max_ops: u16,
    /// The first op. It is above 0 if the rank has rejoined its job.
    pub first_op: OpId,
    /// The number of shards that serve the job's windows; 0 with a sidecar.
    pub shards: usize,
    /// Whether results arrive by multicast.
    pub multicast: bool,
    /// The number of slots of a stream; 0 with a sidecar.
    pub pool_slots: u32,
    /// The number of bytes of a window that fit in one datagram; 0 with a sidecar.
    pub fragment_payload: u16,
}

/// A request for the current counters, which a caller repeats until it is answered.
#[derive(Debug, Default)]
pub struct StatsQuery {
    /// The number that identifies the request at the sidecar; `None` before it is sent.
    pub(crate) number: Option<u64>,
}

/// Memory that a rank lends to its sidecar, which reduces tensors in it without a copy. On drop,
/// the rank takes the memory back.
pub trait LentMemory: Debug + Send + Sync {
    /// Returns the address of the memory in this process.
    fn start(&self) -> NonNull<u8>;

    /// Returns the number that identifies the memory in messages.
    fn id(&self) -> u32;
}

/// One rank's membership in a job, over UDP to aggregators or through shared memory to a sidecar.
/// [`Client`](crate::Client) documents the methods of the same names. Dropping a transport closes
/// it and joins its threads.
pub(crate) trait Transport: Debug + Send + Sync {
    /// Returns the limits and the data path settings that the job was granted.
    fn grant(&self) -> Grant;

    /// Starts an op. A call that this rank refuses gets an op number too.
    fn submit(&self, operand: Operand, descriptor: Descriptor) -> Result<OpId, Error>;

    /// Waits for an op to end, and takes its result.
    fn finish(&self, op: OpId) -> Result<Reduced<Operand>, Error>;

    /// Starts an op and waits for its result.
    fn reduce(&self, operand: Operand, descriptor: Descriptor) -> Result<Reduced<Operand>, Error> {
        let op = self.submit(operand, descriptor)?;
        let reduced = self.finish(op);
        self.abandon(op);
        reduced
    }

    /// Abandons an op that no caller will wait for. Ignores an op whose result was already taken.
    fn abandon(&self, op: OpId);

    /// Starts an empty op in place of a refused call.
    fn refuse(&self, call: Call) -> Result<(), Error>;

    /// Waits up to `limit` for an op to end. Returns whether it has.
    fn ends_within(&self, op: OpId, limit: Duration) -> bool;

    /// Returns whether an op has ended. If not, stores `waker`, which is woken when the op ends.
    fn poll_ended(&self, op: OpId, waker: &Waker) -> bool;

    /// Waits up to `limit` until [`submit`](Self::submit) would not wait for earlier ops on this
    /// memory. Returns false on timeout.
    fn is_free_within(&self, memory: &Range<usize>, limit: Duration) -> bool;

    /// Waits up to `limit` until a lane has room for one more op. Returns whether it has.
    fn has_room_within(&self, lane: u8, limit: Duration) -> bool;

    /// Returns, without waiting, whether a lane has room for `ops` more ops.
    fn has_room_for(&self, lane: u8, ops: usize) -> bool;

    /// Returns whether [`submit`](Self::submit) waits, for an op of this wire type, until all ranks
    /// have called the op.
    fn must_agree(&self, wire: WireType) -> bool;

    /// Takes back the memory of sums, to reuse it for the sums of later ops.
    fn recycle(&self, blocks: Blocks);

    /// Offers `len` bytes of new memory to the sidecar, if there is one.
    fn offer(&self, len: usize) -> io::Result<Option<Arc<dyn LentMemory>>>;

    /// Waits up to `limit` for the answer to an offer of memory. Returns `None` on timeout.
    fn is_taken_within(&self, lent: &dyn LentMemory, limit: Duration) -> Option<io::Result<()>>;

    /// Returns the network counters, as of the last refresh.
    fn stats(&self) -> Stats;

    /// Waits up to `limit` until the counters are up to date. Returns whether they are.
    fn refreshes_stats_within(&self, query: &mut StatsQuery, limit: Duration) -> bool;

    /// Returns the counters of the exchange with a sidecar.
    fn sidecar_stats(&self) -> SidecarStats;

    /// Returns whether no more ops can start.
    fn is_over(&self) -> bool;

    /// Returns the longest time that a closing rank stays.
    fn linger(&self) -> Duration;

    /// Waits up to `limit` until the rank may leave. Returns whether it may.
    fn may_leave_within(&self, limit: Duration) -> bool;

    /// Begins to leave the job. Ops in flight end with an error, and so do later ops.
    fn leave(&self);

    /// Waits up to `limit` until the aggregators, or the sidecar, know that the rank has left, or
    /// have had a second to answer. If the process ends before they know, the rank counts as lost.
    /// Returns false on timeout.
    fn has_left_within(&self, limit: Duration) -> bool;

    /// Leaves the job once no other rank needs this one, or after [`linger`](Self::linger).
    fn close(&self) {
        self.may_leave_within(self.linger());
        self.leave();
        self.has_left_within(LEAVE_TIMEOUT);
    }
}

/// How long a closing rank waits for the aggregators to learn that it has left. They answer within
/// a round trip unless they are stopped or gone.
pub(crate) const LEAVE_TIMEOUT: Duration = Duration::from_secs(2);

/// The error for a caller that waits for an op that no longer exists.
pub(crate) const GONE: SubmitError =
    SubmitError::Ended { why: Cow::Borrowed("the op no longer exists") };
