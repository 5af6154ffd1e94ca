//! Folds of ops in shared memory. Any number of threads may work on one fold.

mod lists;
mod place;
mod tensors;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use racksum_proto::descriptor::Descriptor;
use racksum_proto::schedule::Turn;

use self::lists::Lists;
pub(super) use self::lists::give;
pub(super) use self::place::{LentRange, List, Memory};
use self::tensors::Tensors;
use super::budget::Budget;
use super::fold_error::FoldError;
use super::sums::Sums;

/// Number of bytes of each tensor that a thread folds at a time. It is a multiple of every block
/// size, and small enough that the chunks of all ranks stay in the cache until the sum overwrites
/// them.
const CHUNK: usize = 32 << 10;

/// Number of blocks in one scan, which returns a `u64` with one bit for each block.
const SCANNED: usize = 64;

/// The operand of one rank for an op.
#[derive(Debug, Clone)]
pub(super) struct Share {
    pub(super) rank: u16,
    pub(super) handed: Handed,
}

/// An operand: a tensor, or a list of some of its blocks.
#[derive(Debug, Clone)]
pub(super) enum Handed {
    /// A tensor that is reduced in place.
    Tensor(LentRange),
    /// A list of blocks. The rank receives the sums as another list.
    List(List),
}

/// The fold of an op that all ranks of the host have called.
#[derive(Debug)]
pub(super) struct Fold {
    descriptor: Descriptor,
    /// The operands, in rank order.
    shares: Vec<Share>,
    work: Work,
}

/// The work of a fold, by the kind of its operands.
#[derive(Debug)]
enum Work {
    Tensors(Tensors),
    /// At least one operand is a list. A tensor then counts as the list of its non-zero blocks.
    Lists(Lists),
}

impl Handed {
    /// Returns whether this operand and `other` overlap in lent memory.
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        self.places().any(|own| other.places().any(|place| own.overlaps(place)))
    }

    /// Returns the places in lent memory that the operand occupies.
    fn places(&self) -> impl Iterator<Item = &LentRange> {
        let places = match self {
            Self::Tensor(place) => [Some(place), None],
            Self::List(list) => list.places().map(Some),
        };
        places.into_iter().flatten()
    }
}

/// Returns the budget for the sums of these operands, which all belong to one sidecar.
pub(super) fn budget_of(shares: &[Share]) -> &Arc<Budget> {
    let first = shares.iter().find_map(|share| share.handed.places().next());
    first.expect("a fold has at least one operand").budget()
}

impl Fold {
    /// Creates a fold of operands, which must be in rank order. If the job has more ranks than
    /// operands, the result is a partial sum.
    pub(super) fn new(descriptor: Descriptor, shares: Vec<Share>, world: u32) -> Self {
        let places = shares.iter().map(|share| match &share.handed {
            Handed::Tensor(place) => Some(place.clone()),
            Handed::List(_) => None,
        });
        let work = match places.collect::<Option<Vec<_>>>() {
            Some(places) => Work::Tensors(Tensors::new(descriptor, places, world)),
            None => Work::Lists(Lists::new(descriptor, shares.clone(), world)),
        };
        Self { descriptor, shares, work }
    }

    /// Returns whether there is nothing to fold, because the tensors have no elements.
    pub(super) const fn is_empty(&self) -> bool {
        matches!(&self.work, Work::Tensors(tensors) if tensors.is_empty())
    }

    /// Returns the op's descriptor.
    pub(super) const fn descriptor(&self) -> Descriptor {
        self.descriptor
    }

    /// Returns the operands, in rank order.
    pub(super) fn shares(&self) -> &[Share] {
        &self.shares
    }

    /// Returns whether threads have taken all of the work.
    pub(super) fn is_taken(&self) -> bool {
        match &self.work {
            Work::Tensors(tensors) => tensors.is_taken(),
            Work::Lists(lists) => lists.is_taken(),
        }
    }

    /// Tries to admit one more thread, and returns whether that thread may work on the fold. While
    /// the first thread prepares a fold of lists, no other thread is admitted, because it would
    /// only wait.
    pub(super) fn admit(&self) -> bool {
        match &self.work {
            Work::Tensors(_) => true,
            Work::Lists(lists) => lists.admit(),
        }
    }

    /// Folds until the turn is over or no work is left. The turn is charged for the bytes read and
    /// written. Calls `begun` after preparing a fold of lists, so that other threads can join in.
    /// Returns true only in the thread that finishes the fold.
    pub(super) fn work<J>(
        &self,
        turn: &mut Turn<J>,
        sum: &mut Vec<u8>,
        begun: impl FnOnce(),
    ) -> bool {
        sum.resize(CHUNK, 0);
        match &self.work {
            Work::Tensors(tensors) => tensors.work(turn, sum),
            Work::Lists(lists) => lists.work(turn, sum, begun),
        }
    }

    /// Returns the indices of the blocks that are non-zero at any rank of this host. These blocks
    /// are recorded only if all operands are tensors and the result is a partial sum; otherwise,
    /// the iterator is empty.
    pub(super) fn held(&self) -> impl Iterator<Item = u32> {
        let tensors = match &self.work {
            Work::Tensors(tensors) => Some(tensors.held()),
            Work::Lists(_) => None,
        };
        tensors.into_iter().flatten()
    }

    /// Returns the sums of a finished fold of lists. Returns `None` for tensors, which hold their
    /// sums themselves.
    pub(super) fn sums(&self) -> Result<Option<&Sums>, FoldError> {
        match &self.work {
            Work::Tensors(_) => Ok(None),
            Work::Lists(lists) => lists.sums().map(Some),
        }
    }
}
