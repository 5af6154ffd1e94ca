//! Failed ops: tells the ranks, the other shards and the rest of the tree.

use super::Aggregation;
use crate::descriptor::Descriptor;
use crate::ids::{OpId, Rank};
use crate::observer::{Event, Observer};
use crate::reject::Reject;
use crate::wire::{Disagreement, Header};

/// A failed op to report.
///
/// A rank that receives the failure from one shard drops the op at all shards, and other ranks
/// would wait in vain for that rank at the other shards. So the driver passes the failure to the
/// aggregator's other shards, with [`Aggregation::handle_failed_beside`], and to the parent, unless
/// the parent reported it.
#[derive(Debug, Clone, Copy)]
pub struct Failed {
    /// The op.
    pub op: OpId,
    /// The two ranks that disagree, with their descriptors.
    pub why: Disagreement,
    /// Whether the parent reported the failure.
    pub from_parent: bool,
}

impl Aggregation {
    /// Returns the next failed op to report to the other shards and to the parent.
    pub fn poll_failed(&mut self) -> Option<Failed> {
        self.failed.pop_front()
    }

    /// Fails an op that has failed at another shard of the same aggregator.
    pub fn handle_failed_beside(
        &mut self,
        op: OpId,
        why: Disagreement,
        observer: &mut impl Observer,
    ) {
        self.fail_elsewhere(op, why, observer);
    }

    /// Fails an op at every rank and in all lanes: the ranks may disagree about the op's lane.
    pub(super) fn fail(
        &mut self,
        op: OpId,
        disagreement: Disagreement,
        observer: &mut impl Observer,
    ) {
        for stream in &mut self.streams {
            stream.sequence.fail(op);
        }
        for (rank, descriptor) in [disagreement.one, disagreement.other] {
            self.queue.note(descriptor.lane, rank, |due| due.failed = Some(op));
        }
        if self.config.shards > 1 || self.config.is_of_tree() {
            let why = self.named(disagreement);
            self.failed.push_back(Failed { op, why, from_parent: false });
        }
        self.queue.broadcast_failure(op);
        observer.on_event(&Event::Failed { op, error: None });
    }

    /// Fails an op because the parent reports that ranks elsewhere disagree about it.
    pub fn handle_parent_failed(
        &mut self,
        op: OpId,
        why: Disagreement,
        observer: &mut impl Observer,
    ) {
        if self.fail_elsewhere(op, why, observer) {
            self.failed.push_back(Failed { op, why, from_parent: true });
        }
    }

    /// Handles a failure from a child aggregator: ranks of its rack disagree about an op.
    pub(super) fn handle_failure(
        &mut self,
        header: &Header,
        body: &[u8],
        observer: &mut impl Observer,
    ) -> Result<(), Reject> {
        // wire: W-65
        let why = Disagreement::decode(body)?;
        let (op, lane, rank) = (header.window.op, header.lane, header.sender);
        self.note_reached(rank, op);
        if !self.agreement.is_past(op) {
            self.agreement.admits(op)?;
            if self.fail_elsewhere(op, why, observer) {
                self.failed.push_back(Failed { op, why, from_parent: false });
            }
        }
        // Answer a repeated report too: the child repeats it until it receives the answer.
        self.queue.note(lane, rank, |due| due.failed = Some(op));
        Ok(())
    }

    /// Fails an op because of a disagreement elsewhere. Returns false if the op had failed before
    /// or is out of range.
    fn fail_elsewhere(
        &mut self,
        op: OpId,
        why: Disagreement,
        observer: &mut impl Observer,
    ) -> bool {
        if self.agreement.admits(op).is_err() || !self.agreement.fail_elsewhere(op, why) {
            return false;
        }
        for stream in &mut self.streams {
            // An op that has all its results must not fail.
            let entry = stream.sequence.get(op);
            if entry.is_some_and(|entry| entry.end() > stream.resulted) {
                stream.sequence.fail(op);
            }
        }
        // Without a tree, the shard at which the op failed has told all ranks. A rank that missed
        // that message is told here once it sends a nack for the op.
        if self.config.is_of_tree() {
            self.queue.broadcast_failure(op);
        }
        observer.on_event(&Event::Failed { op, error: None });
        true
    }

    /// Replaces the ranks in a disagreement with the numbers that identify them in fail messages.
    pub(super) fn named(&self, disagreement: Disagreement) -> Disagreement {
        let name = |(rank, descriptor): (Rank, Descriptor)| {
            (self.names.get(rank.index()).copied().unwrap_or(rank), descriptor)
        };
        Disagreement { one: name(disagreement.one), other: name(disagreement.other) }
    }
}
