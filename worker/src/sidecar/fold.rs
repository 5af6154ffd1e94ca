//! Folds of ops in shared memory. Any number of threads work on one fold.

mod lists;
mod place;
mod tensors;

use std::sync::Arc;

use racksum_proto::descriptor::Descriptor;
use racksum_proto::schedule::Turn;

use self::lists::Lists;
pub(super) use self::lists::give;
pub(super) use self::place::{List, Memory, Place};
use self::tensors::Tensors;
use super::budget::Budget;
use super::fold_error::FoldError;
use super::sums::Sums;

/// Bytes of a tensor that a thread folds at a time. The chunks of all ranks of a host stay in a
/// cache until the sum overwrites them. A multiple of every block size.
const CHUNK: usize = 32 << 10;

/// Blocks that one scan covers.
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
    Tensor(Place),
    /// A list of blocks. Its rank receives the sums as another list.
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
    /// At least one operand is a list. A tensor then counts as the list of its nonzero blocks.
    Lists(Lists),
}

impl Handed {
    /// Returns whether two operands share memory.
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        self.places().any(|own| other.places().any(|place| own.overlaps(place)))
    }

    /// Returns the places in lent memory that the operand occupies.
    fn places(&self) -> impl Iterator<Item = &Place> {
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
    first.expect("ranks have handed something").budget()
}

impl Fold {
    /// Creates a fold of operands in rank order. The result is a partial sum if the job has more
    /// ranks than these.
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

    /// Tries to admit one more thread, and returns whether it may work now. While the first thread
    /// prepares a fold of lists, no other is admitted: it would only wait.
    pub(super) fn admit(&self) -> bool {
        match &self.work {
            Work::Tensors(_) => true,
            Work::Lists(lists) => lists.admit(),
        }
    }

    /// Folds until the turn is over or there is nothing left to fold. The turn is charged for the
    /// bytes read and written. Calls `begun` after preparing a fold of lists, so that other threads
    /// can join in. Returns true to the one thread that finishes the fold.
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

    /// Returns the blocks that are nonzero at some rank, if the fold is a partial sum of tensors.
    pub(super) fn held(&self) -> impl Iterator<Item = u32> {
        let tensors = match &self.work {
            Work::Tensors(tensors) => Some(tensors.held()),
            Work::Lists(_) => None,
        };
        tensors.into_iter().flatten()
    }

    /// Returns the result of a finished fold: for lists, the sums of their union.
    pub(super) fn sums(&self) -> Result<Option<&Sums>, FoldError> {
        match &self.work {
            Work::Tensors(_) => Ok(None),
            Work::Lists(lists) => lists.sums().map(Some),
        }
    }
}
