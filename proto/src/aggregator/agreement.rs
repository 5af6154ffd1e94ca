//! Whether the ranks mean the same op: the descriptors they opened it with.

use alloc::boxed::Box;
use alloc::vec;

use crate::descriptor::Descriptor;
use crate::ids::{OpId, Rank};
use crate::reject::Reject;
use crate::wire::Disagreement;

/// What a rank's descriptor means for the op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The rank is the first, or says what the others said.
    Agrees,
    /// The rank says something else: the op has just failed.
    Disagrees(Disagreement),
    /// The op had failed before.
    Failed,
}

/// An op that some rank has opened.
#[derive(Debug, Clone, Copy)]
struct Opened {
    op: OpId,
    /// The first rank that did, and its descriptor.
    one: (Rank, Descriptor),
    /// The first rank that said something else: the op failed.
    other: Option<(Rank, Descriptor)>,
    /// Why it failed elsewhere in a tree of aggregators.
    elsewhere: Option<Disagreement>,
}

/// The descriptors of the ops that some rank may have in flight, over all lanes of a shard.
///
/// Every rank opens an op at the shard of its first window, whatever it believes of the op's
/// size, so that at least this shard sees every disagreement.
///
/// A rank has at most `max_ops` ops in flight, with numbers in a row. So by opening op `o` it says
/// that it has ended all up to `o - max_ops`, and nobody asks any more for an op that every rank
/// has ended. That is where the table begins. It need not reach further than twice `max_ops` and
/// the number of shards: the oldest op that a rank has in flight comes after ops that ended with
/// a result, which every rank has opened, and of any `shards` ops in a row one has its first
/// window here. Only ranks whose ops keep failing could get further ahead of one that has not
/// heard of it; their opens are not taken until it has.
#[derive(Debug)]
pub(super) struct Agreement {
    /// By the op's number modulo how many there is room for.
    ops: Box<[Option<Opened>]>,
    /// The op after the last that each rank has opened here.
    reached: Box<[u32]>,
    /// The first op that some rank may have in flight.
    first: OpId,
    max_ops: u32,
}

impl Agreement {
    /// The table of a job whose ops begin with `first`.
    pub(super) fn new(world: usize, max_ops: u16, shards: u8, first: OpId) -> Self {
        Self {
            ops: vec![None; Self::span(max_ops, shards)].into(),
            reached: vec![first.0; world].into(),
            first,
            max_ops: u32::from(max_ops),
        }
    }

    /// How many ops in a row opens are taken of.
    pub(super) const fn span(max_ops: u16, shards: u8) -> usize {
        2 * max_ops as usize + shards as usize
    }

    /// Notes that `rank` is as far as `op`. Returns the first op that some rank may have in
    /// flight, if that is another than before.
    pub(super) fn note_reached(&mut self, rank: Rank, op: OpId) -> Option<OpId> {
        let reached = &mut self.reached[rank.index()];
        *reached = (*reached).max(op.0.saturating_add(1));
        let least = self.reached.iter().min().copied().unwrap_or(0);
        let first = OpId(least.saturating_sub(self.max_ops)).max(self.first);
        (core::mem::replace(&mut self.first, first) != first).then_some(first)
    }

    /// The op after the last that `rank` has opened.
    pub(super) fn reached(&self, rank: Rank) -> OpId {
        OpId(self.reached.get(rank.index()).copied().unwrap_or(0))
    }

    /// Whether an open of `op` may be taken.
    pub(super) fn admits(&self, op: OpId) -> Result<(), Reject> {
        match op.0.checked_sub(self.first.0) {
            // wire: W-43
            Some(ahead) if ahead as usize >= self.ops.len() => Err(Reject::BeyondOps),
            Some(_) => Ok(()),
            None => Err(Reject::Stale),
        }
    }

    /// Whether every rank has ended `op`.
    pub(super) fn is_past(&self, op: OpId) -> bool {
        op < self.first
    }

    /// Takes the descriptor with which `rank` opens `op`, which is admitted.
    pub(super) fn check(&mut self, op: OpId, rank: Rank, descriptor: Descriptor) -> Verdict {
        let mine = (rank, descriptor);
        let place = &mut self.ops[op.0 as usize % self.ops.len()];
        match place.as_mut().filter(|opened| opened.op == op) {
            None => {
                *place = Some(Opened { op, one: mine, other: None, elsewhere: None });
                Verdict::Agrees
            }
            Some(Opened { other: Some(_), .. } | Opened { elsewhere: Some(_), .. }) => {
                Verdict::Failed
            }
            Some(Opened { one: (_, said), .. }) if *said == descriptor => Verdict::Agrees,
            Some(opened) => {
                opened.other = Some(mine);
                Verdict::Disagrees(Disagreement { one: opened.one, other: mine })
            }
        }
    }

    fn get(&self, op: OpId) -> Option<&Opened> {
        let place = self.ops[op.0 as usize % self.ops.len()].as_ref();
        place.filter(|opened| opened.op == op && !self.is_past(op))
    }

    /// Why `op` failed, if it did and some rank may have it in flight.
    pub(super) fn disagreement(&self, op: OpId) -> Option<Disagreement> {
        let Opened { one, other, elsewhere, .. } = *self.get(op)?;
        elsewhere.or_else(|| Some(Disagreement { one, other: other? }))
    }

    /// Notes that `op`, which is admitted, has failed elsewhere. Returns whether that is new.
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

    /// Whether `op` failed elsewhere.
    pub(super) fn failed_elsewhere(&self, op: OpId) -> bool {
        self.get(op).is_some_and(|opened| opened.elsewhere.is_some())
    }

    /// What the ranks agree on for `op`.
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
        assert_eq!(agreement.check(OpId(0), RANKS[0], sum(1)), Verdict::Agrees);
        let disagreement = Disagreement { one: (RANKS[0], sum(1)), other: (RANKS[1], sum(2)) };
        let verdict = agreement.check(OpId(0), RANKS[1], sum(2));
        assert_eq!(verdict, Verdict::Disagrees(disagreement));
        assert_eq!(agreement.check(OpId(0), RANKS[0], sum(1)), Verdict::Failed);
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
        assert_eq!(agreement.check(OpId(5), RANKS[0], sum(3)), Verdict::Agrees);
        assert_eq!(agreement.descriptor(OpId(5)), Some(sum(3)));
    }

    #[test]
    fn the_last_number_is_no_exception() {
        let mut agreement = Agreement::new(1, 64, 255, OpId(0));
        let last = OpId(u32::MAX);
        assert_eq!(agreement.admits(last), Err(Reject::BeyondOps));
        assert_eq!(agreement.note_reached(RANKS[0], last), Some(OpId(u32::MAX - 64)));
        assert_eq!(agreement.admits(last), Ok(()));
        assert_eq!(agreement.check(last, RANKS[0], sum(1)), Verdict::Agrees);
    }
}
