//! The folds of ops in shared memory, which any number of threads work on.

mod lists;
mod place;
mod tensors;

use std::sync::Arc;

use racksum_proto::descriptor::Descriptor;

use self::lists::Lists;
pub(super) use self::lists::give;
pub(super) use self::place::{List, Memory, Place};
use self::tensors::Tensors;
use super::budget::Budget;
use super::fold_error::FoldError;
use super::sums::Sums;

/// Bytes of a tensor that are folded at a time: those of all ranks of a host stay in a cache until
/// the sum is written over them. Whole blocks of every size.
const CHUNK: usize = 32 << 10;

/// Chunks that a thread folds before it looks whose turn it is: they take longer than to look, and
/// not so long that another job would notice.
const TURN: usize = 32;

/// Blocks that a scan looks at together.
const SCANNED: usize = 64;

/// What a rank has handed for an op.
#[derive(Debug, Clone)]
pub(super) struct Share {
    pub(super) rank: u16,
    pub(super) handed: Handed,
}

/// A tensor, or some blocks of one.
#[derive(Debug, Clone)]
pub(super) enum Handed {
    /// It is reduced where it lies.
    Tensor(Place),
    /// Its rank gets another list.
    List(List),
}

/// An op that all ranks of the host have called.
#[derive(Debug)]
pub(super) struct Fold {
    descriptor: Descriptor,
    /// In rank order.
    shares: Vec<Share>,
    work: Work,
}

/// What there is to do.
#[derive(Debug)]
enum Work {
    Tensors(Tensors),
    /// Where some ranks have handed lists: a tensor is then a list of its blocks that are not zero.
    Lists(Lists),
}

impl Handed {
    /// Whether some memory is another's too.
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        self.places().any(|own| other.places().any(|place| own.overlaps(place)))
    }

    /// What it has of memory.
    fn places(&self) -> impl Iterator<Item = &Place> {
        let places = match self {
            Self::Tensor(place) => [Some(place), None],
            Self::List(list) => list.places().map(Some),
        };
        places.into_iter().flatten()
    }
}

/// What room for sums of this is taken of: all that ranks hand is of one sidecar.
pub(super) fn budget_of(shares: &[Share]) -> &Arc<Budget> {
    let first = shares.iter().find_map(|share| share.handed.places().next());
    first.expect("ranks have handed something").budget()
}

impl Fold {
    /// A fold of what ranks have handed, in rank order, to one descriptor. If these are not all
    /// ranks of the job, it makes their part of the sum.
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

    /// Whether there is nothing to fold.
    pub(super) const fn is_empty(&self) -> bool {
        matches!(&self.work, Work::Tensors(tensors) if tensors.is_empty())
    }

    /// What is folded.
    pub(super) const fn descriptor(&self) -> Descriptor {
        self.descriptor
    }

    /// What the ranks have handed.
    pub(super) fn shares(&self) -> &[Share] {
        &self.shares
    }

    /// Whether no more threads are of use.
    pub(super) fn is_taken(&self) -> bool {
        match &self.work {
            Work::Tensors(tensors) => tensors.is_taken(),
            Work::Lists(lists) => lists.is_taken(),
        }
    }

    /// Whether one more thread may work on it now: while the first begins it, others would wait.
    pub(super) fn admit(&self) -> bool {
        match &self.work {
            Work::Tensors(_) => true,
            Work::Lists(lists) => lists.admit(),
        }
    }

    /// Folds for a turn, and says so once others may join in. Returns true to the one thread that
    /// ends it.
    pub(super) fn work(&self, sum: &mut Vec<u8>, begun: impl FnOnce()) -> bool {
        sum.resize(CHUNK, 0);
        match &self.work {
            Work::Tensors(tensors) => tensors.work(sum),
            Work::Lists(lists) => lists.work(sum, begun),
        }
    }

    /// Of tensors of one host's part, the blocks that are not zero at some rank.
    pub(super) fn held(&self) -> impl Iterator<Item = u32> {
        let tensors = match &self.work {
            Work::Tensors(tensors) => Some(tensors.held()),
            Work::Lists(_) => None,
        };
        tensors.into_iter().flatten()
    }

    /// What came of a fold that has ended: of lists, the sums of their union.
    pub(super) fn sums(&self) -> Result<Option<&Sums>, FoldError> {
        match &self.work {
            Work::Tensors(_) => Ok(None),
            Work::Lists(lists) => lists.sums().map(Some),
        }
    }
}
