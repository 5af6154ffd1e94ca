//! What the machines tell whoever watches: counters, traces, checkers.

use crate::error::OpError;
use crate::ids::{OpId, Rank, WindowId};
use crate::reject::Reject;

/// Something that happened in a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event<'a> {
    /// A datagram changed nothing but a counter.
    Rejected(Reject),
    /// A fragment that had arrived before came again.
    Duplicate {
        /// Who sent it.
        from: Rank,
        /// Its window.
        window: WindowId,
        /// Its number.
        fragment: u8,
    },
    /// A rank opened a stretch of windows.
    Opened {
        /// The rank.
        rank: Rank,
        /// The op.
        op: OpId,
    },
    /// All that is owed of a window has arrived; it is folded now.
    Folded {
        /// The window.
        window: WindowId,
        /// Blocks of the union.
        union: u64,
        /// How many ranks contributed.
        contributors: u32,
    },
    /// Missing fragments were asked for.
    Asked {
        /// Who was asked.
        of: Rank,
        /// The first window asked for.
        from: WindowId,
    },
    /// Fragments were sent again.
    Again {
        /// Their window.
        window: WindowId,
        /// The fragments.
        fragments: u64,
    },
    /// A slot was given back: every rank has acknowledged its window.
    Retired {
        /// The window.
        window: WindowId,
    },
    /// An op ended with its result.
    Done {
        /// The op.
        op: OpId,
    },
    /// An op ended with an error.
    Failed {
        /// The op.
        op: OpId,
        /// Why; `None` at the aggregator, where it is a disagreement.
        error: Option<&'a OpError>,
    },
}

/// Watches a machine. The default does nothing and costs nothing.
pub trait Observer {
    /// Called as things happen.
    fn on_event(&mut self, event: &Event<'_>) {
        let _ = event;
    }
}

impl Observer for () {}

impl<T: Observer + ?Sized> Observer for &mut T {
    fn on_event(&mut self, event: &Event<'_>) {
        (**self).on_event(event);
    }
}
