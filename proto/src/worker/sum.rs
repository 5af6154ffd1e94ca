//! A worker that belongs to an aggregator with a parent: it contributes the sums of the ranks
//! below.

use alloc::vec::Vec;

use super::{ChildShard, Op, Share, Transmit, Worker};
use crate::descriptor::Descriptor;
use crate::error::{OpError, SubmitError};
use crate::ids::{OpId, Rank, WindowId};
use crate::observer::Observer;
use crate::time::{Span, Time};
use crate::wire::{Disagreement, Header, Kind, MissingRanks};

/// An op that failed at the ranks below.
#[derive(Debug, Clone, Copy)]
pub(super) struct Failure {
    op: OpId,
    lane: u8,
    why: Disagreement,
    /// The time at which the failure was last sent.
    sent_at: Option<Time>,
}

impl Failure {
    /// Returns the time at which to send the failure, for the first time or again. The worker
    /// repeats the failure until the parent confirms it with a fail.
    pub(super) fn due(&self) -> Time {
        self.sent_at.map_or(Time(0), |at| at + Self::PATIENCE)
    }

    const PATIENCE: Span = Span::from_millis(10);
}

/// The ranks below that ops wait for, to be reported to the parent.
#[derive(Debug, Default)]
pub(super) struct Waits {
    /// The lane that [`Worker::poll_waits`] returns next.
    lane: Option<u8>,
    /// The lane whose wait `awaited` holds; `None` once the wait is sent.
    of: Option<u8>,
    awaited: Vec<(Rank, Span)>,
    sent_at: Time,
}

impl Waits {
    /// The interval between reports.
    const PATIENCE: Span = Span::from_millis(200);
}

impl Worker {
    /// Starts an op under the number that it has at the ranks below. Its windows count as scanned
    /// once their contributions are folded. Ops of different lanes may start in any order.
    ///
    /// # Errors
    /// Returns the same errors as [`Self::submit`].
    pub fn submit_sum(
        &mut self,
        now: Time,
        id: OpId,
        descriptor: Descriptor,
        timeout: Span,
    ) -> Result<(), SubmitError> {
        let windows = self.check(&descriptor)?;
        self.insert(now, Op::new(id, descriptor, Share::unscanned(windows), now, timeout));
        Ok(())
    }

    /// Returns the ops in flight, with their lanes.
    pub fn sums(&self) -> impl Iterator<Item = (OpId, u8)> + '_ {
        let ops = self.ops.iter().filter(|op| op.is_in_flight());
        ops.map(|op| (op.id(), op.descriptor().lane))
    }

    /// Drops an op that the ranks below no longer need.
    pub fn drop_sum(&mut self, op: OpId, observer: &mut impl Observer) {
        self.fail(op, OpError::Ended { why: "the ranks dropped the op".into() }, observer);
    }

    /// Fails an op that the ranks below disagree about, and queues a report to the parent.
    pub fn fail_sum(&mut self, op: OpId, why: Disagreement, observer: &mut impl Observer) {
        let Disagreement { one, other } = why;
        // The lane comes from the aggregators below, so it may not exist here.
        let lane = if one.1.lane < self.config.lanes { one.1.lane } else { 0 };
        self.fail(op, OpError::Mismatch { op, one, other }, observer);
        if self.failures.len() < usize::from(self.config.max_ops) {
            self.failures.push(Failure { op, lane, why, sent_at: None });
        }
    }

    /// Stops reporting the failure of an op, since the parent has confirmed it.
    pub(super) fn note_failure_confirmed(&mut self, op: OpId) {
        self.failures.retain(|failure| failure.op != op);
    }

    /// Writes a fail for an op that failed below.
    pub(super) fn write_failure(&mut self, now: Time, out: &mut [u8]) -> Option<Transmit> {
        let ChildShard { shard, .. } = self.config.child?;
        let failure = self.failures.iter_mut().find(|failure| failure.due() <= now)?;
        failure.sent_at = Some(now);
        let Failure { op, lane, why, .. } = *failure;
        why.encode(out.get_mut(Header::LEN..)?.first_chunk_mut()?);
        let at = self.config.stream(lane, shard);
        let header = Header { window: WindowId::new(op, 0), ..self.header(at, Kind::Fail) };
        Some(self.finish(at, header, Disagreement::LEN, out))
    }

    /// Returns the next lane whose awaited ranks the driver must report, if a report is due. The
    /// driver must answer with [`Self::queue_waits`], and poll until `None`.
    pub fn poll_waits(&mut self) -> Option<u8> {
        let (lane, lanes) = (self.waits.lane?, self.config.lanes);
        if self.waits.of.is_some() {
            // The wait of another lane has not been sent yet.
            return None;
        }
        self.waits.lane = (lane + 1 < lanes).then_some(lane + 1);
        Some(lane)
    }

    /// Queues a wait to the parent: the ranks below that a lane waits for, and how long each has
    /// been silent. Queues nothing if `ranks` is empty.
    pub fn queue_waits(&mut self, lane: u8, ranks: impl Iterator<Item = (Rank, Span)>) {
        let Waits { awaited, .. } = &mut self.waits;
        awaited.clear();
        awaited.extend(ranks.take(MissingRanks::MAX));
        self.waits.of = (!self.waits.awaited.is_empty()).then_some(lane);
    }

    /// Returns the time at which the next report of the awaited ranks below is due.
    pub(super) fn waits_due(&self) -> Time {
        let any = self.config.child.is_some() && self.sums().next().is_some();
        if any { self.waits.sent_at + Waits::PATIENCE } else { Time::NEVER }
    }

    pub(super) fn note_waits_due(&mut self, now: Time) {
        if self.waits_due() <= now {
            self.waits.sent_at = now;
            self.waits.lane = Some(0);
        }
    }

    /// Writes a wait that names the awaited ranks below.
    pub(super) fn write_waits(&mut self, out: &mut [u8]) -> Option<Transmit> {
        let (ChildShard { shard, .. }, lane) = (self.config.child?, self.waits.of.take()?);
        let at = self.config.stream(lane, shard);
        let len =
            MissingRanks::encode(self.waits.awaited.iter().copied(), out.get_mut(Header::LEN..)?);
        let header = self.header(at, Kind::Wait);
        Some(self.finish(at, header, len, out))
    }

    /// Returns the progress in a lane and shard: the first window whose result may be missing, and
    /// the lowest window that some rank has not acknowledged.
    #[must_use]
    pub fn reached(&self, lane: u8, shard: u8) -> (WindowId, WindowId) {
        self.streams[self.config.stream(lane, shard)].reached()
    }

    /// Returns the ranks that a lane of a shard waits for, and how long each had been silent when
    /// the aggregator reported it.
    #[must_use]
    pub fn waits(&self, now: Time, lane: u8, shard: u8) -> &[(Rank, Span)] {
        self.streams[self.config.stream(lane, shard)].waited(now)
    }
}
