//! Checks that the ranks agree on each op: compares the descriptors with which the ranks open it.

use alloc::boxed::Box;
use alloc::vec;

use crate::descriptor::Descriptor;
use crate::ids::{OpId, Rank};
use crate::reject::Reject;
use crate::wire::Disagreement;

/// The outcome of comparing a rank's descriptor of an op with the op's first descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Comparison {
    /// The rank is the first to open the op, or its descriptor equals the first one.
    Agrees,
    /// The rank's descriptor is the first that differs, so the op fails now.
    Disagrees(Disagreement),
    /// The op had failed before.
    Failed,
}

/// An op that some rank has opened, or that failed at another shard or elsewhere in a tree.
#[derive(Debug, Clone, Copy)]
struct Opened {
    op: OpId,
    /// A rank and its descriptor. The rank is the first that opened the op or, if the op failed
    /// elsewhere before any rank opened it here, one of the two ranks that disagree.
    one: (Rank, Descriptor),
    /// The first rank with a different descriptor, and that descriptor. `Some` means that the op
    /// has failed.
    other: Option<(Rank, Descriptor)>,
    /// The disagreement, if the op failed at another shard or elsewhere in a tree of aggregators.
    elsewhere: Option<Disagreement>,
}

/// The descriptors of the ops that some rank may have in flight, over all lanes of a shard.
///
/// Every rank opens an op at the shard of the op's first window, even if the ranks disagree about
/// the op's size. Therefore, that shard sees every disagreement about the op.
///
/// A rank has at most `max_ops` ops in flight, and their numbers are consecutive. By opening op
/// `o`, a rank shows that it has ended all ops up to `o - max_ops`. No rank needs an op that every
/// rank has ended, so the table starts after those ops.
///
/// The table spans twice `max_ops` plus the number of shards. That is enough: if a rank has ended
/// an op with a result, every rank has opened that op, and of any `shards` consecutive ops, one has
/// its first window at this shard. Only ranks whose ops keep failing could get further ahead of a
/// rank that has not received the failures. The table rejects their opens until that rank catches
/// up.
#[derive(Debug)]
pub(super) struct Agreement {
    /// The opened ops, indexed by op number modulo the table's length.
    ops: Box<[Option<Opened>]>,
    /// The op after the last one that each rank has opened at this shard, indexed by rank.
    reached: Box<[u32]>,
    /// The first op that some rank may have in flight.
    first: OpId,
    max_ops: u32,
}

impl Agreement {
    /// Creates the table of a job whose ops begin with `first`.
    pub(super) fn new(world: usize, max_ops: u16, shards: u8, first: OpId) -> Self {
        Self {
            ops: vec![None; Self::span(max_ops, shards)].into(),
            reached: vec![first.0; world].into(),
            first,
            max_ops: u32::from(max_ops),
        }
    }

    /// Returns the number of consecutive ops whose opens the table accepts.
    pub(super) const fn span(max_ops: u16, shards: u8) -> usize {
        2 * max_ops as usize + shards as usize
    }

    /// Notes that `rank` has reached `op`. Returns the first op that some rank may have in flight,
    /// if this call has changed it.
    pub(super) fn note_reached(&mut self, rank: Rank, op: OpId) -> Option<OpId> {
        let reached = &mut self.reached[rank.index()];
        *reached = (*reached).max(op.0.saturating_add(1));
        let least = self.reached.iter().min().copied().unwrap_or(0);
        let first = OpId(least.saturating_sub(self.max_ops)).max(self.first);
        (core::mem::replace(&mut self.first, first) != first).then_some(first)
    }

    /// Returns the op after the last one that `rank` has opened at this shard.
    pub(super) fn reached(&self, rank: Rank) -> OpId {
        OpId(self.reached.get(rank.index()).copied().unwrap_or(0))
    }

    /// Checks whether the table accepts an open of `op`.
    pub(super) fn admits(&self, op: OpId) -> Result<(), Reject> {
        match op.0.checked_sub(self.first.0) {
            // wire: W-43
            Some(ahead) if ahead as usize >= self.ops.len() => Err(Reject::BeyondOps),
            Some(_) => Ok(()),
            None => Err(Reject::Stale),
        }
    }

    /// Returns whether every rank has ended `op`.
    pub(super) fn is_past(&self, op: OpId) -> bool {
        op < self.first
    }

    /// Compares `rank`'s descriptor of `op` with the first descriptor of `op`. The caller has
    /// checked `op` with [`Self::admits`].
    pub(super) fn check(&mut self, op: OpId, rank: Rank, descriptor: Descriptor) -> Comparison {
        debug_assert!(self.admits(op).is_ok(), "the record of another op would be lost");
        let mine = (rank, descriptor);
        let place = &mut self.ops[op.0 as usize % self.ops.len()];
        match place.as_mut().filter(|opened| opened.op == op) {
            None => {
                *place = Some(Opened { op, one: mine, other: None, elsewhere: None });
                Comparison::Agrees
            }
            Some(Opened { other: Some(_), .. } | Opened { elsewhere: Some(_), .. }) => {
                Comparison::Failed
            }
            Some(Opened { one: (_, theirs), .. }) if *theirs == descriptor => Comparison::Agrees,
            Some(opened) => {
                opened.other = Some(mine);
                Comparison::Disagrees(Disagreement { one: opened.one, other: mine })
            }
        }
    }

    fn get(&self, op: OpId) -> Option<&Opened> {
        let place = self.ops[op.0 as usize % self.ops.len()].as_ref();
        place.filter(|opened| opened.op == op && !self.is_past(op))
    }

    /// Returns the disagreement that made `op` fail; `None` if `op` did not fail or every rank has
    /// ended it.
    pub(super) fn disagreement(&self, op: OpId) -> Option<Disagreement> {
        let Opened { one, other, elsewhere, .. } = *self.get(op)?;
        elsewhere.or_else(|| Some(Disagreement { one, other: other? }))
    }

    /// Notes that `op` has failed elsewhere. The caller has checked `op` with [`Self::admits`].
    /// Returns false if `op` had failed before, or if every rank has ended it.
    pub(super) fn fail_elsewhere(&mut self, op: OpId, why: Disagreement) -> bool {
        if self.is_past(op) {
            return false;
        }
        let place = &mut self.ops[op.0 as usize % self.ops.len()];
        match place.as_mut().filter(|opened| opened.op == op) {
            Some(Opened { other: Some(_), .. } | Opened { elsewhere: Some(_), .. }) => false,
            Some(opened) => {
                opened.elsewhere = Some(why);
                true
            }
            None => {
                let elsewhere = Some(why);
                *place = Some(Opened { op, one: why.one, other: None, elsewhere });
                true
            }
        }
    }

    /// Returns whether `op` failed elsewhere in the tree.
    pub(super) fn failed_elsewhere(&self, op: OpId) -> bool {
        self.get(op).is_some_and(|opened| opened.elsewhere.is_some())
    }

    /// Returns the first descriptor of `op`; `None` if none is recorded or every rank has ended
    /// `op`.
    pub(super) fn descriptor(&self, op: OpId) -> Option<Descriptor> {
        self.get(op).map(|opened| opened.one.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    const RANKS: [Rank; 2] = [Rank(0), Rank(1)];

    fn sum(elements: u64) -> Descriptor {
        Descriptor::sum(elements, DType::F32)
    }

    #[test]
    fn ops_are_remembered_while_some_rank_may_have_them_in_flight() {
        let mut agreement = Agreement::new(2, 2, 1, OpId(0));
        assert_eq!(agreement.check(OpId(0), RANKS[0], sum(1)), Comparison::Agrees);
        let disagreement = Disagreement { one: (RANKS[0], sum(1)), other: (RANKS[1], sum(2)) };
        let verdict = agreement.check(OpId(0), RANKS[1], sum(2));
        assert_eq!(verdict, Comparison::Disagrees(disagreement));
        assert_eq!(agreement.check(OpId(0), RANKS[0], sum(1)), Comparison::Failed);
        for op in 0..4 {
            assert_eq!(agreement.note_reached(RANKS[0], OpId(op)), None);
        }
        assert_eq!(agreement.note_reached(RANKS[1], OpId(1)), None);
        assert_eq!(agreement.disagreement(OpId(0)), Some(disagreement));
        assert_eq!(agreement.admits(OpId(5)), Err(Reject::BeyondOps));
        assert_eq!(agreement.note_reached(RANKS[1], OpId(2)), Some(OpId(1)));
        assert_eq!(agreement.disagreement(OpId(0)), None);
        assert_eq!(agreement.admits(OpId(0)), Err(Reject::Stale));
        assert_eq!(agreement.admits(OpId(5)), Ok(()));
        assert_eq!(agreement.check(OpId(5), RANKS[0], sum(3)), Comparison::Agrees);
        assert_eq!(agreement.descriptor(OpId(5)), Some(sum(3)));
    }

    #[test]
    fn the_last_number_is_no_exception() {
        let mut agreement = Agreement::new(1, 64, 255, OpId(0));
        let last = OpId(u32::MAX);
        assert_eq!(agreement.admits(last), Err(Reject::BeyondOps));
        assert_eq!(agreement.note_reached(RANKS[0], last), Some(OpId(u32::MAX - 64)));
        assert_eq!(agreement.admits(last), Ok(()));
        assert_eq!(agreement.check(last, RANKS[0], sum(1)), Comparison::Agrees);
    }
}
