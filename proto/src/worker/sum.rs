//! A worker whose contributions are the sums of ranks below: it is one of an aggregator that has a
//! parent.

use alloc::vec;
use alloc::vec::Vec;

use super::{Op, Relay, Transmit, Worker};
use crate::descriptor::Descriptor;
use crate::error::{OpError, SubmitError};
use crate::ids::{OpId, Rank, WindowId};
use crate::observer::Observer;
use crate::time::{Span, Time};
use crate::wire::{Disagreement, Header, Kind, MissingRanks};

/// An op that failed below.
#[derive(Debug, Clone, Copy)]
pub(super) struct Failure {
    op: OpId,
    lane: u8,
    why: Disagreement,
    /// When it was last said.
    said_at: Option<Time>,
}

impl Failure {
    /// When it is to be said again: until the parent says it as well.
    pub(super) fn due(&self) -> Time {
        self.said_at.map_or(Time(0), |at| at + Self::PATIENCE)
    }

    const PATIENCE: Span = Span::from_millis(10);
}

/// Whom ops wait for below, to be said to the parent.
#[derive(Debug, Default)]
pub(super) struct Waits {
    /// The lane whose ranks are asked for next.
    lane: Option<u8>,
    /// The lane that is to be said of, and what.
    of: Option<u8>,
    said: Vec<(Rank, Span)>,
    said_at: Time,
}

impl Waits {
    /// How often it is said.
    const PATIENCE: Span = Span::from_millis(200);
}

impl Worker {
    /// Starts an op under the number that it has for the ranks whose sum this is: it is scanned as
    /// their contributions are folded. Ops of different lanes may start in any order.
    ///
    /// # Errors
    /// As [`Self::submit`].
    pub fn submit_sum(
        &mut self,
        now: Time,
        id: OpId,
        descriptor: Descriptor,
        timeout: Span,
    ) -> Result<(), SubmitError> {
        let windows = self.check(&descriptor)?;
        self.insert(now, id, Op::new(descriptor, vec![0; windows as usize], 0, now, timeout));
        Ok(())
    }

    /// The ops in flight, with their lanes.
    pub fn sums(&self) -> impl Iterator<Item = (OpId, u8)> + '_ {
        self.ops.iter().filter(|op| !op.ended).map(|op| (op.id, op.descriptor.lane))
    }

    /// Gives up an op that no rank below has any use for.
    pub fn drop_sum(&mut self, op: OpId, observer: &mut impl Observer) {
        self.fail(op, OpError::Ended { why: "the ranks have dropped it".into() }, observer);
    }

    /// Fails an op that the ranks below disagree on, and sees to it that the parent hears of it.
    pub fn fail_sum(&mut self, op: OpId, why: Disagreement, observer: &mut impl Observer) {
        let Disagreement { one, other } = why;
        // What aggregators below say may name any.
        let lane = if one.1.lane < self.config.lanes { one.1.lane } else { 0 };
        self.fail(op, OpError::Mismatch { op, one, other }, observer);
        if self.failures.len() < usize::from(self.config.max_ops) {
            self.failures.push(Failure { op, lane, why, said_at: None });
        }
    }

    /// Notes that the parent has heard that an op failed.
    pub(super) fn note_failure_heard(&mut self, op: OpId) {
        self.failures.retain(|failure| failure.op != op);
    }

    /// Says that an op failed below.
    pub(super) fn write_failure(&mut self, now: Time, out: &mut [u8]) -> Option<Transmit> {
        let Relay { shard, .. } = self.config.relay?;
        let failure = self.failures.iter_mut().find(|failure| failure.due() <= now)?;
        failure.said_at = Some(now);
        let Failure { op, lane, why, .. } = *failure;
        why.encode(out.get_mut(Header::LEN..)?.first_chunk_mut()?);
        let at = self.config.stream(lane, shard);
        let header = Header { window: WindowId::new(op, 0), ..self.header(at, Kind::Fail) };
        Some(self.finish(at, header, Disagreement::LEN, out))
    }

    /// A lane with ops in flight, if it is time to say whom they wait for below: the driver tells
    /// [`Self::say_waits`]. Poll until `None`.
    pub fn poll_waits(&mut self) -> Option<u8> {
        let (lane, lanes) = (self.waits.lane?, self.config.lanes);
        if self.waits.of.is_some() {
            // What was said of another is yet to be sent.
            return None;
        }
        self.waits.lane = (lane + 1 < lanes).then_some(lane + 1);
        Some(lane)
    }

    /// Tells the parent whom the ops of a lane wait for below, and how long nothing was heard of
    /// each.
    pub fn say_waits(&mut self, lane: u8, ranks: impl Iterator<Item = (Rank, Span)>) {
        let Waits { said, .. } = &mut self.waits;
        said.clear();
        said.extend(ranks.take(MissingRanks::MAX));
        self.waits.of = (!self.waits.said.is_empty()).then_some(lane);
    }

    /// When it is time to say whom ops wait for below.
    pub(super) fn waits_due(&self) -> Time {
        let any = self.config.relay.is_some() && self.sums().next().is_some();
        if any { self.waits.said_at + Waits::PATIENCE } else { Time::NEVER }
    }

    pub(super) fn note_waits_due(&mut self, now: Time) {
        if self.waits_due() <= now {
            self.waits.said_at = now;
            self.waits.lane = Some(0);
        }
    }

    /// Says whom ops wait for below.
    pub(super) fn write_waits(&mut self, out: &mut [u8]) -> Option<Transmit> {
        let (Relay { shard, .. }, lane) = (self.config.relay?, self.waits.of.take()?);
        let at = self.config.stream(lane, shard);
        let len =
            MissingRanks::encode(self.waits.said.iter().copied(), out.get_mut(Header::LEN..)?);
        let header = self.header(at, Kind::Wait);
        Some(self.finish(at, header, len, out))
    }

    /// In a lane and shard: the first window that may have a result that has not come, and the
    /// lowest that some rank has not acknowledged.
    #[must_use]
    pub fn reached(&self, lane: u8, shard: u8) -> (WindowId, WindowId) {
        let stream = &self.streams[self.config.stream(lane, shard)];
        (stream.sequence.window(stream.cursor), stream.sequence.window(stream.low))
    }

    /// Whom a lane of a shard waits for, and how long nothing was heard of each.
    #[must_use]
    pub fn waits(&self, now: Time, lane: u8, shard: u8) -> &[(Rank, Span)] {
        self.streams[self.config.stream(lane, shard)].waited.ranks(now)
    }
}
