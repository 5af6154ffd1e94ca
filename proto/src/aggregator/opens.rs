//! Opens: records which windows each rank opens, and checks that the ranks agree.

use super::Aggregation;
use super::agreement;
use super::stream::Placed;
use crate::descriptor::Descriptor;
use crate::geometry::{Geometry, Stripe};
use crate::ids::{OpId, Rank};
use crate::observer::{Event, Observer};
use crate::reject::Reject;
use crate::wire::{Flags, Header};

impl Aggregation {
    pub(super) fn handle_open(
        &mut self,
        header: &Header,
        body: &[u8],
        observer: &mut impl Observer,
    ) -> Result<(), Reject> {
        let resumed = header.flags.has(Flags::RESUMED);
        // wire: W-63
        if resumed && self.config.moved_at.is_none() {
            return Err(Reject::Body);
        }
        let open = self.opens.decode(body, resumed)?;
        // wire: W-24
        if open.descriptor.lane != header.lane {
            return Err(Reject::Body);
        }
        let (lane, rank, op) = (header.lane, header.sender, header.window.op);
        let (shard, shards) = (self.config.shard, self.config.shards);
        let stripe = Stripe::new(op, Geometry::new(&open.descriptor).windows(), shard, shards);
        let nth = stripe.nth(header.window.index).ok_or(Reject::Shape)?;
        // wire: W-20
        if nth + open.windows > stripe.len() {
            return Err(Reject::Shape);
        }
        let now = self.last_received[rank.index()];
        self.note_reached(rank, op);
        // After a move, a rank may open an op again even if every rank has ended the op, since the
        // rank cannot tell whether others still lack the op's results.
        let is_over = self.config.moved_at.is_some() && self.agreement.is_past(op);
        if !is_over {
            self.agreement.admits(op)?;
        }
        let stream = &mut self.streams[usize::from(lane)];
        if stream.sequence.is_settled(op) {
            // If other ranks open the op in another lane, this lane may have passed the op's number
            // without ever containing the op.
            if is_over || !self.check_agreement(op, rank, &open.descriptor, observer) {
                return Err(Reject::Stale);
            }
            self.queue.note(lane, rank, |due| due.failed = Some(op));
            return Ok(());
        }
        if !stream.has_room_for(op) {
            return Err(Reject::BeyondOps);
        }
        let failed = is_over || self.check_agreement(op, rank, &open.descriptor, observer);
        if failed && !is_over {
            self.queue.note(lane, rank, |due| due.failed = Some(op));
        }
        let stream = &mut self.streams[usize::from(lane)];
        match stream.place(op, &open, rank, stripe) {
            // A failed op still counts for the order of ops: the rank's next op comes after it.
            Placed::At(_) if failed => {
                // An op that has all its results must not fail.
                let entry = stream.sequence.get(op);
                if entry.is_some_and(|entry| entry.end() > stream.resulted) {
                    stream.sequence.fail(op);
                }
            }
            Placed::Failed => {}
            Placed::At(base) if stream.handle_stretch(now, rank, base + u64::from(nth), &open) => {
                observer.on_event(&Event::Opened { rank, op });
            }
            Placed::At(_) | Placed::Missing => self.queue.note(lane, rank, |due| due.open = true),
        }
        Ok(())
    }

    /// Notes that `rank` has opened `op`. Fails the ops that every rank has ended and that still
    /// lack results at this shard.
    pub(super) fn note_reached(&mut self, rank: Rank, op: OpId) {
        if let Some(first) = self.agreement.note_reached(rank, op) {
            for stream in &mut self.streams {
                stream.sequence.fail_before(first, stream.resulted);
            }
        }
    }

    /// Compares a rank's descriptor of an op with the first descriptor, and fails the op if they
    /// differ. Returns whether the op has failed, now or before.
    fn check_agreement(
        &mut self,
        op: OpId,
        rank: Rank,
        descriptor: &Descriptor,
        observer: &mut impl Observer,
    ) -> bool {
        match self.agreement.check(op, rank, *descriptor) {
            agreement::Comparison::Agrees => false,
            agreement::Comparison::Failed => true,
            // wire: W-40
            agreement::Comparison::Disagrees(disagreement) => {
                self.fail(op, disagreement, observer);
                true
            }
        }
    }
}
