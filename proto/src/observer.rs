//! Events of the state machines, for observers: counters, traces and checkers.

use crate::error::OpError;
use crate::ids::{OpId, Rank, WindowId};
use crate::reject::Reject;

/// An event in a state machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event<'a> {
    /// A datagram changed nothing but a counter.
    Rejected(Reject),
    /// A fragment arrived that had arrived before.
    Duplicate {
        /// The sender.
        from: Rank,
        /// The fragment's window.
        window: WindowId,
        /// The fragment's number.
        fragment: u8,
    },
    /// A rank opened a stretch of windows.
    Opened {
        /// The rank.
        rank: Rank,
        /// The op.
        op: OpId,
    },
    /// All owed contributions of a window have arrived, so it is folded now.
    Folded {
        /// The window.
        window: WindowId,
        /// The mask of blocks that at least one rank contributed.
        union: u64,
        /// The number of ranks that contributed.
        contributors: u32,
    },
    /// Missing fragments were asked for.
    Asked {
        /// The rank that was asked.
        of: Rank,
        /// The first window asked for.
        from: WindowId,
    },
    /// Fragments were sent again.
    Again {
        /// The fragments' window.
        window: WindowId,
        /// The mask of fragments.
        fragments: u64,
    },
    /// A slot was freed: every rank has acknowledged its window.
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
        /// The cause; `None` at the aggregator, where the cause is a mismatch of descriptors.
        error: Option<&'a OpError>,
    },
}

/// An observer of a state machine. The default does nothing and costs nothing.
pub trait Observer {
    /// Handles an event when it happens.
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
