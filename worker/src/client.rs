//! The client that a training process uses to take part in a job.

mod connecting;

use std::borrow::Cow;
use std::io;
use std::marker::PhantomData;
use std::ops::Range;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use racksum_proto::call::Call;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::WireType;
use racksum_proto::error::SubmitError;
use racksum_proto::ids::{OpId, Rank};
use racksum_proto::stats::{SidecarStats, Stats};

use crate::blocks::Blocks;
use crate::error::{ConnectError, Error};
use crate::operand::Operand;
use crate::options::ConnectOptions;
use crate::sidecar::{self, SIDECAR_TIMEOUT};
use crate::tensor::{Element, as_bytes_mut, lend};
use crate::transport::{Grant, LEAVE_TIMEOUT, LentMemory, Reduced, StatsQuery, Transport};

pub use self::connecting::Connecting;

/// A rank of a job. Ops may end in any order, but all ranks must start the same ops in the same
/// order.
///
/// The client sends its tensors to aggregators over UDP, or hands them to the sidecar of its host
/// through shared memory, depending on [`ConnectOptions::aggregators`]. Its methods are the same
/// for both.
#[derive(Debug)]
pub struct Client {
    transport: Arc<dyn Transport>,
}

/// An op in flight. Dropping the handle does not stop the op, because the other ranks need it. The
/// operand is then freed when the op ends.
#[derive(Debug)]
#[must_use = "call `wait` or await the handle to get the op's result"]
pub struct Handle<T> {
    pub(crate) op: OpId,
    /// A weak reference, because a handle need not keep its client alive: a closed client has no
    /// ops.
    transport: Weak<dyn Transport>,
    result: PhantomData<fn() -> T>,
}

impl Client {
    /// Joins a job and returns once all its ranks have joined.
    ///
    /// # Errors
    /// Returns an error if the job cannot be joined, or if some ranks do not join in time.
    pub fn connect(options: &ConnectOptions) -> Result<Self, ConnectError> {
        Connecting::new().run(options)
    }

    pub(crate) fn over(transport: Arc<dyn Transport>) -> Self {
        Self { transport }
    }

    /// Sums `tensor` in place with the tensors of all other ranks, and waits for the result.
    /// Returns the ranks that are missing from the sum.
    ///
    /// # Errors
    /// Returns an error if there is no result. The tensor then holds sums in some places only.
    pub fn allreduce<T: Element>(&self, tensor: &mut [T]) -> Result<Vec<Rank>, Error> {
        let descriptor = Descriptor::sum(tensor.len() as u64, T::DTYPE);
        Ok(self.reduce(as_bytes_mut(tensor), descriptor)?.absent)
    }

    /// Reduces the bytes of `tensor` in place with the tensors of all other ranks, as the
    /// descriptor says, and waits for the result.
    ///
    /// # Errors
    /// Returns an error if there is no result. The tensor then holds sums in some places only.
    pub fn reduce(&self, tensor: &mut [u8], descriptor: Descriptor) -> Result<Reduced<()>, Error> {
        let (loan, region) = lend(tensor);
        let reduced = self.transport.reduce(region.into(), descriptor);
        let reduced = reduced.map(|Reduced { absent, .. }| Reduced { tensor: (), absent });
        drop(loan);
        reduced
    }

    /// Starts the reduction of a tensor or of a list of its blocks. Blocks that are not listed
    /// count as zero, and listed blocks that are zero count as not listed. The op owns the operand
    /// until `wait` returns it. Ops on the same memory run in call order: each begins when the
    /// earlier ones have ended. With a sidecar, this method waits for those ops, and copies
    /// operands that are not in [lent](Self::lend) memory.
    ///
    /// If this rank refuses the call, the call still gets an op number. Other ranks that made the
    /// same call then get a mismatch error.
    ///
    /// If aggregators sum in a tree, an op with [`WireType::Fixed32`] starts once all ranks have
    /// called it, because they must first agree on its exponents. Without a sidecar, this method
    /// waits for that agreement, and returns an error if the agreement fails.
    ///
    /// # Errors
    /// Returns an error if the op does not start: for example [`SubmitError::TooManyOps`], until
    /// [`has_room_within`](Self::has_room_within) returns true.
    pub fn submit<T: Into<Operand>>(
        &self,
        operand: T,
        descriptor: Descriptor,
    ) -> Result<Handle<T>, Error> {
        let op = self.transport.submit(operand.into(), descriptor)?;
        Ok(Handle { op, transport: Arc::downgrade(&self.transport), result: PhantomData })
    }

    /// Opens an empty op in place of a call that the caller refuses, so that the ops of all ranks
    /// stay in step. Ranks that made the call get [`OpError::Mismatch`].
    ///
    /// [`OpError::Mismatch`]: racksum_proto::error::OpError::Mismatch
    ///
    /// # Errors
    /// Returns an error if the op does not start, like [`submit`](Self::submit).
    pub fn refuse(&self, call: Call) -> Result<(), Error> {
        self.transport.refuse(call)
    }

    /// Waits up to `limit` until [`submit`](Self::submit) would not wait for earlier ops on the
    /// memory at these addresses. Returns false on timeout.
    #[must_use]
    pub fn is_free_within(&self, memory: &Range<usize>, limit: Duration) -> bool {
        self.transport.is_free_within(memory, limit)
    }

    /// Waits up to `limit` for room for one more op in a lane. Returns whether there is room.
    /// Another thread may still use that room first.
    #[must_use]
    pub fn has_room_within(&self, lane: u8, limit: Duration) -> bool {
        self.transport.has_room_within(lane, limit)
    }

    /// Returns, without waiting, whether a lane has room for `ops` more ops. Another thread may
    /// still use that room first. Returns true for a client that takes no more ops, because it
    /// refuses them without waiting.
    #[must_use]
    pub fn has_room_for(&self, lane: u8, ops: usize) -> bool {
        self.transport.has_room_for(lane, ops)
    }

    /// Returns whether [`submit`](Self::submit) waits, for an op of this wire type, until all ranks
    /// have called the op. Returns false with a sidecar, because the sidecar waits instead.
    #[must_use]
    pub fn must_agree(&self, wire: WireType) -> bool {
        self.transport.must_agree(wire)
    }

    /// Takes the memory of sums that the caller no longer needs, and reuses it for the sums of
    /// later ops. Allocating fresh memory would take longer than computing the sums.
    pub fn recycle(&self, blocks: Blocks) {
        self.transport.recycle(blocks);
    }

    /// Lends `len` bytes of new memory to the sidecar, which reduces tensors in it without a copy.
    /// Returns `None` if the client has no sidecar.
    ///
    /// # Errors
    /// Returns the kernel's error if there is not enough memory, the sidecar's reason if it refuses
    /// the memory, or a timeout if it does not answer within [`SIDECAR_TIMEOUT`].
    ///
    /// [`SIDECAR_TIMEOUT`]: Self::SIDECAR_TIMEOUT
    pub fn lend(&self, len: usize) -> io::Result<Option<Arc<dyn LentMemory>>> {
        let Some(lent) = self.offer(len)? else { return Ok(None) };
        let taken = self.is_taken_within(&*lent, Self::SIDECAR_TIMEOUT);
        taken.unwrap_or_else(|| Err(Self::unanswered()))?;
        Ok(Some(lent))
    }

    /// Offers `len` bytes of new memory to the sidecar, like [`lend`](Self::lend), but does not
    /// wait for its answer.
    ///
    /// # Errors
    /// Returns the kernel's error if there is not enough memory.
    pub fn offer(&self, len: usize) -> io::Result<Option<Arc<dyn LentMemory>>> {
        self.transport.offer(len)
    }

    /// Waits up to `limit` for the sidecar's answer to an offer of memory. Returns `None` on
    /// timeout.
    ///
    /// # Errors
    /// Returns the sidecar's reason if it refuses the memory.
    pub fn is_taken_within(
        &self,
        lent: &dyn LentMemory,
        limit: Duration,
    ) -> Option<io::Result<()>> {
        self.transport.is_taken_within(lent, limit)
    }

    /// How long a sidecar may take to answer.
    pub const SIDECAR_TIMEOUT: Duration = SIDECAR_TIMEOUT;

    /// Returns the error for a sidecar that has not answered in time.
    #[must_use]
    pub fn unanswered() -> io::Error {
        sidecar::unanswered()
    }

    /// Leaves the job, as dropping the client does. Ops in flight end with an error, and so do
    /// later ops.
    ///
    /// If other ranks may lack sums that this rank has, the client first stays for at most
    /// [`linger`](Self::linger). With a sidecar, an op in flight still ends with its result if all
    /// ranks of the host have called it, unless other hosts delay the op for more than five
    /// seconds. Once this method returns, the sidecar no longer uses this rank's memory, unless the
    /// sidecar is stuck.
    ///
    /// Finally, the client waits for at most two seconds until the aggregators, or the sidecar,
    /// know that the rank has left. Once they know, the process may end in any way, and the rank
    /// does not count as lost.
    pub fn close(&self) {
        self.transport.close();
    }

    /// Returns the longest time that a closing client stays for ranks that may lack its sums. It
    /// exceeds the time that a job needs to detect a dead aggregator process and to move. It is
    /// limited because the last acknowledgement may never arrive: another rank may be stopped, or
    /// may have left during the move.
    #[must_use]
    pub fn linger(&self) -> Duration {
        self.transport.linger()
    }

    /// Waits up to `limit` until no other rank can lack a sum that this rank has. Returns false on
    /// timeout. With a sidecar, the client starts no more ops and waits until the sidecar has
    /// released the rank.
    #[expect(clippy::must_use_candidate, reason = "a caller may leave either way")]
    pub fn may_leave_within(&self, limit: Duration) -> bool {
        self.transport.may_leave_within(limit)
    }

    /// Begins to leave the job, even if other ranks may lack sums that this rank has.
    pub fn leave(&self) {
        self.transport.leave();
    }

    /// Waits up to `limit` until the aggregators, or the sidecar, know that the rank has left, or
    /// have had a second to answer. If the process ends before they know, the rank counts as lost.
    /// Returns false on timeout.
    #[expect(clippy::must_use_candidate, reason = "a caller may end either way")]
    pub fn has_left_within(&self, limit: Duration) -> bool {
        self.transport.has_left_within(limit)
    }

    /// How long [`close`](Self::close) waits for the aggregators to learn that the rank has left.
    pub const LEAVE_TIMEOUT: Duration = LEAVE_TIMEOUT;

    /// Returns whether no more ops can start: the client was closed, or the session has ended.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.transport.is_over()
    }

    /// Returns the network counters so far. With a sidecar, they count the traffic of all ranks of
    /// the host, as of the last [refresh](Self::refreshes_stats_within).
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.transport.stats()
    }

    /// Waits up to `limit` until [`stats`](Self::stats) is up to date or the sidecar is gone.
    /// Returns false on timeout; the caller may then wait again with the same query.
    pub fn refreshes_stats_within(&self, query: &mut StatsQuery, limit: Duration) -> bool {
        self.transport.refreshes_stats_within(query, limit)
    }

    /// Returns the counters of the exchange with the sidecar. Without a sidecar, all of them are
    /// zero.
    #[must_use]
    pub fn sidecar_stats(&self) -> SidecarStats {
        self.transport.sidecar_stats()
    }

    /// Returns the limits and the data path settings that the job was granted.
    #[must_use]
    pub fn grant(&self) -> Grant {
        self.transport.grant()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.transport.close();
    }
}

impl<T> Handle<T> {
    /// Waits up to `limit` for the op to end. Returns whether it has ended; if so,
    /// [`wait`](Self::wait) returns immediately.
    #[must_use]
    pub fn ends_within(&self, limit: Duration) -> bool {
        self.transport.upgrade().is_none_or(|transport| transport.ends_within(self.op, limit))
    }

    /// Waits for the op to end and returns the reduced operand. A block list then holds the blocks
    /// of the union, sorted.
    ///
    /// # Errors
    /// Returns an error if there is no result. A tensor in the caller's memory then holds sums in
    /// some places and not in others.
    pub fn wait(self) -> Result<Reduced<T>, Error>
    where
        T: TryFrom<Operand>,
    {
        self.take()
    }

    /// Waits for the op to end and takes its result.
    fn take(&self) -> Result<Reduced<T>, Error>
    where
        T: TryFrom<Operand>,
    {
        let transport = self.transport.upgrade().ok_or(CLOSED)?;
        let Reduced { tensor, absent } = transport.finish(self.op)?;
        let tensor = tensor.try_into().map_err(|_| CLOSED)?;
        Ok(Reduced { tensor, absent })
    }
}

/// Waits for the op like [`Handle::wait`], without blocking the thread.
impl<T: TryFrom<Operand>> Future for Handle<T> {
    type Output = Result<Reduced<T>, Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let transport = self.transport.upgrade();
        match transport.is_none_or(|transport| transport.poll_ended(self.op, context.waker())) {
            true => Poll::Ready(self.take()),
            false => Poll::Pending,
        }
    }
}

impl<T> Drop for Handle<T> {
    fn drop(&mut self) {
        if let Some(transport) = self.transport.upgrade() {
            transport.abandon(self.op);
        }
    }
}

/// The error of an op whose client was dropped.
const CLOSED: SubmitError = SubmitError::Ended { why: Cow::Borrowed("the client was closed") };
