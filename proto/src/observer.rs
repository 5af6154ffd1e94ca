//! Events of the state machines, for observers: counters, traces and checkers.

use crate::error::OpError;
use crate::ids::{OpId, Rank, WindowId};
use crate::reject::{Reject, Rejects};

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
    /// A nack asked for missing fragments.
    Nacked {
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

/// Counts of events. They outlive the machines that report them.
#[derive(Debug, Clone, Default)]
pub struct EventCounts {
    /// Windows folded.
    pub folds: u64,
    /// Fragments that had arrived before.
    pub duplicates: u64,
    /// Fragments that were sent again.
    pub fragments_again: u64,
    /// Nacks that asked for missing fragments.
    pub asks: u64,
    /// Datagrams that changed nothing, by reason.
    pub rejects: Rejects,
}

impl Observer for EventCounts {
    fn on_event(&mut self, event: &Event<'_>) {
        match event {
            Event::Rejected(reject) => self.rejects.count(*reject),
            Event::Duplicate { .. } => self.duplicates += 1,
            Event::Folded { .. } => self.folds += 1,
            Event::Nacked { .. } => self.asks += 1,
            Event::Again { fragments, .. } => {
                self.fragments_again += u64::from(fragments.count_ones());
            }
            Event::Opened { .. }
            | Event::Retired { .. }
            | Event::Done { .. }
            | Event::Failed { .. } => {}
        }
    }
}

impl<T: Observer + ?Sized> Observer for &mut T {
    fn on_event(&mut self, event: &Event<'_>) {
        (**self).on_event(event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_counted_by_name() {
        let (mut counts, window) = (EventCounts::default(), WindowId::new(OpId(0), 0));
        let events = [
            Event::Rejected(Reject::Sender),
            Event::Rejected(Reject::Sender),
            Event::Duplicate { from: Rank(0), window, fragment: 3 },
            Event::Folded { window, union: 1, contributors: 2 },
            Event::Nacked { of: Rank(1), from: window },
            Event::Again { window, fragments: 0b1011 },
            Event::Failed { op: OpId(0), error: None },
            Event::Retired { window },
        ];
        events.iter().for_each(|event| counts.on_event(event));
        let EventCounts { folds, duplicates, fragments_again, asks, rejects } = counts;
        assert_eq!([folds, duplicates, fragments_again, asks], [1, 1, 3, 1]);
        assert_eq!((rejects.of(Reject::Sender), rejects.total()), (2, 2));
    }
}
