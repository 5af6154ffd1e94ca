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

/// The descriptors of the ops in flight, over all lanes of a shard.
///
/// Every rank opens an op at the shard of its first window, whatever it believes of the op's
/// size, so that at least this shard sees every disagreement.
#[derive(Debug)]
pub(super) struct Agreement {
    /// Sorted by op.
    open: Vec<(OpId, Rank, Descriptor)>,
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
        match self.open.binary_search_by_key(&op, |entry| entry.0) {
            Ok(i) => {
                let (_, first, theirs) = self.open[i];
                if theirs == descriptor {
                    return Verdict::Agrees;
                }
                self.open.remove(i);
                let disagreement = Disagreement { one: (first, theirs), other: (rank, descriptor) };
                if self.failed.len() == Self::MAX_FAILED {
                    self.failed.pop_front();
                }
                self.failed.push_back((op, disagreement));
                Verdict::Disagrees(disagreement)
            }
            Err(_) if self.open.len() == self.max_open => Verdict::TooMany,
            Err(i) => {
                self.open.insert(i, (op, rank, descriptor));
                Verdict::Agrees
            }
        }
    }

    /// Why `op` failed, if it did.
    pub(super) fn disagreement(&self, op: OpId) -> Option<Disagreement> {
        self.failed.iter().find(|(failed, _)| *failed == op).map(|(_, why)| *why)
    }

    /// What the ranks agree on for `op`.
    pub(super) fn descriptor(&self, op: OpId) -> Option<Descriptor> {
        let found = self.open.binary_search_by_key(&op, |entry| entry.0);
        found.ok().map(|i| self.open[i].2)
    }

    /// Forgets an op that every rank has the result of.
    pub(super) fn settle(&mut self, op: OpId) {
        if let Ok(i) = self.open.binary_search_by_key(&op, |entry| entry.0) {
            self.open.remove(i);
        }
    }

    /// Disagreements that are remembered for ranks that have yet to open the op.
    const MAX_FAILED: usize = 64;
}
