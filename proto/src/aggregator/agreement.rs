//! Whether the ranks mean the same op: the descriptors they opened it with.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::descriptor::Descriptor;
use crate::ids::{OpId, Rank};
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
    /// More ops are open than the job was granted.
    TooMany,
}

/// An op that some rank has opened.
#[derive(Debug, Clone, Copy)]
struct Opened {
    op: OpId,
    /// The first rank that did, and its descriptor.
    rank: Rank,
    descriptor: Descriptor,
    /// Another rank went past the op without it. What it has instead is not known yet.
    skipped: bool,
}

/// The descriptors of the ops in flight, over all lanes of a shard.
///
/// Every rank opens an op at the shard of its first window, whatever it believes of the op's
/// size, so that at least this shard sees every disagreement.
#[derive(Debug)]
pub(super) struct Agreement {
    /// Sorted by op.
    open: Vec<Opened>,
    failed: VecDeque<(OpId, Disagreement)>,
    max_open: usize,
}

impl Agreement {
    pub(super) fn new(max_open: usize) -> Self {
        Self {
            open: Vec::with_capacity(max_open),
            failed: VecDeque::with_capacity(Self::MAX_FAILED),
            max_open,
        }
    }

    /// Takes the descriptor with which `rank` opens `op`.
    pub(super) fn check(&mut self, op: OpId, rank: Rank, descriptor: Descriptor) -> Verdict {
        if self.disagreement(op).is_some() {
            return Verdict::Failed;
        }
        match self.open.binary_search_by_key(&op, |entry| entry.op) {
            Ok(i) => {
                let first = self.open[i];
                if first.descriptor == descriptor {
                    return Verdict::Agrees;
                }
                self.open.remove(i);
                let disagreement =
                    Disagreement { one: (first.rank, first.descriptor), other: (rank, descriptor) };
                if self.failed.len() == Self::MAX_FAILED {
                    self.failed.pop_front();
                }
                self.failed.push_back((op, disagreement));
                Verdict::Disagrees(disagreement)
            }
            Err(_) if self.open.len() == self.max_open && !self.forget_skipped() => {
                Verdict::TooMany
            }
            Err(_) => {
                let i = self.open.partition_point(|entry| entry.op < op);
                self.open.insert(i, Opened { op, rank, descriptor, skipped: false });
                Verdict::Agrees
            }
        }
    }

    /// Makes room by forgetting an op that was skipped; returns whether there was one.
    fn forget_skipped(&mut self) -> bool {
        let Some(i) = self.open.iter().position(|entry| entry.skipped) else { return false };
        self.open.remove(i);
        true
    }

    /// Why `op` failed, if it did.
    pub(super) fn disagreement(&self, op: OpId) -> Option<Disagreement> {
        self.failed.iter().find(|(failed, _)| *failed == op).map(|(_, why)| *why)
    }

    /// What the ranks agree on for `op`.
    pub(super) fn descriptor(&self, op: OpId) -> Option<Descriptor> {
        let found = self.open.binary_search_by_key(&op, |entry| entry.op);
        found.ok().map(|i| self.open[i].descriptor)
    }

    /// Forgets an op that every rank has the result of. One that a rank skipped is kept: that
    /// rank has yet to open it, elsewhere or otherwise, and both are to be told.
    pub(super) fn settle(&mut self, op: OpId, skipped: bool) {
        if let Ok(i) = self.open.binary_search_by_key(&op, |entry| entry.op) {
            if skipped {
                self.open[i].skipped = true;
            } else {
                self.open.remove(i);
            }
        }
    }

    /// Disagreements that are remembered for ranks that have yet to open the op.
    const MAX_FAILED: usize = 64;
}
